"""One self-contained HTML page, and the results page of the documentation, from study records."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from selffl._version import __version__
from selffl.errors import DataError
from selffl.reports import figures, tables
from selffl.reports.record import StudyRecord
from selffl.studies import STUDIES

Recorded = Sequence[tuple[Path, StudyRecord]]


def html(studies: Recorded, title: str) -> str:
    """The page, figures inside; it needs no network and no other file."""
    environment = Environment(
        loader=PackageLoader("selffl", "reports"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["capfirst"] = capfirst
    shown = []
    for number, (folder, record) in enumerate(studies):
        # The same study may be there twice, say from two folders.
        first = all(earlier.id != record.id for _, earlier in studies[:number])
        anchor = record.id if first else f"{record.id}-{number}"
        pictures = [
            {"svg": _inline(folder / f"{f['name']}.svg", f["caption"], f"{anchor}-{f['name']}"), **f}
            for f in record.figures
        ]
        config = json.dumps(record.config, indent=1, ensure_ascii=False)
        shown.append(
            {"anchor": anchor, "record": record, "figures": pictures, "config": config, "reading": reading(record)}
        )
    return environment.get_template("page.html.j2").render(
        title=title, lead=lead(studies), studies=shown, version=__version__
    )


def capfirst(text: str) -> str:
    """With a capital at the beginning, the rest as it is."""
    return text[:1].upper() + text[1:]


def lead(studies: Recorded) -> str:
    """The verdict in one sentence."""
    count = Counter(claim["verdict"] for _, record in studies for claim in record.claims)
    if not count:
        told = [f"{record.title}: {record.verdict}." for _, record in studies if record.verdict]
        return " ".join(told) or "No claims were put to the test here."
    words = {
        "holds": ("holds", "hold"),
        "holds in part": ("holds in part", "hold in part"),
        "not decided": ("is not decided", "are not decided"),
        "does not hold": ("does not hold", "do not hold"),
    }
    parts = [f"{count[verdict]} {text[count[verdict] > 1]}" for verdict, text in words.items() if count[verdict]]
    return (
        f"Of {count.total()} statements put to the test: {', '.join(parts)}. Comparisons are paired over repeats or "
        "seeds and decided at the 5 % level."
    )


# In the page the ink follows the reader's light or dark setting, and the white ground goes.
_INK = re.compile(figures.INK, re.IGNORECASE)
_GROUND = re.compile(rf'<g id="{figures.BACKGROUND}">.*?</g>', re.DOTALL)


def _inline(path: Path, caption: str, prefix: str) -> str:
    """A figure file as an SVG element; ids get a prefix so that two figures of one page do not share any."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        raise DataError(f"{path} is gone; expected the figure that the record names. Run the study again.") from None
    text = _GROUND.sub("", _INK.sub("currentColor", text[text.index("<svg") :]), count=1)
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}-", text)
    label = caption.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def results_page(studies: Recorded, figure_folder: str) -> str:
    """The documentation's results page as Markdown; figures are expected as ``figure_folder/STUDY-NAME.svg``."""
    parts = [
        "# Results",
        "Made from run records by `selffl paper page`; its numbers and verdicts come from the records. "
        "Every ± is a standard error over repeats. Gradients are evaluations per client and round in training; steps "
        "of fine-tuning or adaptation before a test come on top.",
        lead(studies),
    ]
    for _, record in studies:
        parts += [f"## {record.title}", f"`{record.id}`: {record.paper}. {capfirst(record.setting)}."]
        parts += [f"Made by `{record.command}` in {record.seconds:.0f} s; {_environment(record)}."]
        if record.is_quick:
            parts.append("**Quick run: fewer repeats or rounds than stated.**")
        parts += ["\n".join(f"- **{c['text']}** *{c['verdict'].capitalize()}.* {c['evidence']}" for c in record.claims)]
        if words := reading(record):
            parts.append(f"**Reading.** {words}")
        parts += [
            f"![{f['caption']}]({figure_folder}/{record.id}-{f['name']}.svg)\n\n*{f['caption']}*"
            for f in record.figures
        ]
        parts.append(tables.markdown(record.table).rstrip())
    return "\n\n".join(parts) + "\n"


def reading(record: StudyRecord) -> str:
    """What was made of a whole study's numbers, in words; nothing for a quick run, which shows others."""
    return "" if record.is_quick or record.id not in STUDIES else STUDIES[record.id].reading


def _environment(record: StudyRecord) -> str:
    shown = {key: value for key, value in record.environment.items() if key != "commit"}
    return ", ".join(f"{key} {value}" for key, value in shown.items())
