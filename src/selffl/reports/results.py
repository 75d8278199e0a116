"""The results page of the documentation: studies' records as Markdown.

Studies are made on different machines, some in minutes and some on a GPU, and their records seldom lie in one folder.
So a page that is there is brought up to date: what it says of other studies stays.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from selffl.errors import DataError
from selffl.reports import tables
from selffl.reports.page import Recorded, capfirst, reading, verdicts
from selffl.reports.record import StudyRecord, place_of

HEADING = "# Results"
_STUDY = re.compile(r"^`([^`]+)`: ", re.MULTILINE)  # begins the paragraph under a section's heading
_VERDICT = re.compile(r"^- \*\*.+?\*\* \*([^*]+)\.\*", re.MULTILINE)


def results_page(studies: Recorded, figure_folder: str, before: Path | None = None) -> str:
    """The page; figures are expected as ``figure_folder/STUDY-NAME.svg``.

    ``before`` is the page as it was, if there was one: sections of studies that are not among these stay as they are.
    """
    found = (_sections(before) if before is not None and before.is_file() else {}) | {
        record.id: _section(record, figure_folder) for _, record in studies
    }
    parts = [found[name] for name in sorted(found, key=place_of)]
    top = [
        HEADING,
        "Made from run records by `selffl paper page`; its numbers and verdicts come from the records. "
        "Every ± is a standard error over repeats. Gradients are evaluations per client and round in training; steps "
        "of fine-tuning or adaptation before a test come on top.",
        verdicts(Counter(verdict.lower() for part in parts for verdict in _VERDICT.findall(part))),
    ]
    return "\n\n".join(top + parts) + "\n"


def _sections(page: Path) -> dict[str, str]:
    """What a page says of each study, by its name."""
    try:
        first, *rest = re.split(r"^(?=## )", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    except UnicodeDecodeError:
        first, rest = "", []
    names = [_STUDY.search(part) for part in rest]
    if not first.startswith(HEADING) or None in names:
        raise DataError(
            f"{page} is not a results page; expected one that `selffl paper page` has written, to bring it up to date. "
            "Give another file."
        )
    return {name.group(1): part.strip() for name, part in zip(names, rest, strict=True) if name}


def _section(record: StudyRecord, figure_folder: str) -> str:
    parts = [f"## {record.title}", f"`{record.id}`: {record.paper}. {capfirst(record.setting)}."]
    parts += [f"Made by `{record.command}` in {record.seconds:.0f} s; {_environment(record)}."]
    if record.is_quick:
        parts.append("**Quick run: fewer repeats or rounds than stated.**")
    parts += ["\n".join(f"- **{c['text']}** *{c['verdict'].capitalize()}.* {c['evidence']}" for c in record.claims)]
    if words := reading(record):
        parts.append(f"**Reading.** {words}")
    parts += [
        f"![{f['caption']}]({figure_folder}/{record.id}-{f['name']}.svg)\n\n*{f['caption']}*" for f in record.figures
    ]
    parts.append(tables.markdown(record.table).rstrip())
    return "\n\n".join(parts)


def _environment(record: StudyRecord) -> str:
    shown = {key: value for key, value in record.environment.items() if key != "commit"}
    return ", ".join(f"{key} {value}" for key, value in shown.items())
