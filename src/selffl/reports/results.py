"""The results pages of the documentation: studies' records as Markdown, one page a study and a summary of all.

Studies are made on different machines, some in minutes and some on a GPU, and their records seldom lie in one folder.
So pages that are there are brought up to date: what they say of other studies stays.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

from selffl.algorithms import ALGORITHMS
from selffl.errors import DataError
from selffl.reports import tables
from selffl.reports.page import Recorded, reading
from selffl.reports.record import StudyRecord, place_of
from selffl.reports.tallies import count_verdicts, tally, tally_of
from selffl.studies.result import MET, OWN, RULE, TARGET, UNSAID, Verdict, Whose, capfirst, verdict_word, whose

OPENING = "# Results\n\nMade from run records by `selffl paper page`"
QUICK = "**Quick run: fewer repeats or rounds than stated.**"
TEST = "**Test.**"  # how the line begins that says which test decided a page's comparisons
GROUPS: dict[Whose, str] = {  # headings of the summary, by whose the first statement of a study is
    "target": "Our own method, against tuned baselines",
    "paper": "Statements of the paper",
    "own": "Beyond the paper",
}
RULES = "How statements are decided"  # its last heading
MAX_HEADLINE = 150  # characters of evidence that the summary shows of a study
_STUDY = re.compile(r"# .+\n\n`([^`\n]+)`: (.+)")  # how a page begins; where it says what of the paper it is about
_VERDICT = re.compile(r"^- \*\*(.+?)\*\* \*([^*]+)\.\*", re.MULTILINE)
_MADE = re.compile(r"^Made by `([^`\n]+)` in (\d+) s; (.+)\.$", re.MULTILINE)


class Pages(NamedTuple):
    """What `selffl paper page` writes."""

    summary: str
    studies: dict[str, str]  # by the name of the study


def results_pages(studies: Recorded, figure_folder: str, before: Path | None = None) -> Pages:
    """The summary and a page for each study; figures are expected as ``figure_folder/STUDY-NAME.svg``.

    ``before`` is the summary as it was, if there was one: pages of studies that are not among these stay as they are.
    Where pages of studies are, is `folder_of`.
    """
    pages = read_pages(before) if before is not None and before.is_file() else {}
    places: dict[str, Path] = {}
    for folder, record in studies:
        if record.id in places:
            raise DataError(
                f"{places[record.id]} and {folder} both hold the study {record.id}; expected one record of it. "
                "Give a folder with one of them."
            )
        if record.is_quick and QUICK not in pages.get(record.id, QUICK):
            raise DataError(
                f"{folder} holds a quick run of {record.id}, of which {before} has a whole one; expected a whole run. "
                "Leave it out, or give another file."
            )
        places[record.id] = folder
        pages[record.id] = _page(record, figure_folder)
    ordered = {name: pages[name] for name in sorted(pages, key=lambda name: (place_of(name), name))}
    return Pages(_summary(ordered, "results" if before is None else before.stem), ordered)


def folder_of(summary: Path) -> Path:
    """Where the pages of studies are that a summary is about: for ``results.md``, the folder ``results``."""
    return summary.with_suffix("")


def _summary(pages: Mapping[str, str], folder: str) -> str:
    """The first page: counts, a table with a line for each study, the rule."""
    top = (
        f"{OPENING}; numbers and verdicts come from the records. Each study has a page of its own with every "
        "statement, figure and table; the tables below show the first statement of each. Every ± is a standard error "
        "over repeats."
    )
    parts = [top, tally(count_statements(pages.values()))]
    groups = group_studies(pages)
    for kind, names in groups.items():
        rows = [_summary_row(name, pages[name], folder) for name in names]
        parts += [f"## {GROUPS[kind]}", tables.markdown(rows).rstrip()]
    older = sum(count.total() for count in count_statements(p for p in pages.values() if TEST not in p).values())
    parts += [f"## {RULES}", RULE, *([UNSAID.format(number=older)] if older else [])]
    parts.append(
        "Gradients are evaluations per client and round in training; steps of fine-tuning or adaptation before a test "
        "come on top."
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def group_studies(pages: Mapping[str, str]) -> dict[Whose, list[str]]:
    """The names of studies, by whose their first statement is; groups in the order of the summary."""
    found: dict[Whose, list[str]] = {kind: [] for kind in GROUPS}
    for name, text in pages.items():
        statement = _VERDICT.search(text)
        found[whose(_place_in_paper(text), statement[1] if statement else "")].append(name)
    return {kind: names for kind, names in found.items() if names}


def _summary_row(name: str, text: str, folder: str) -> dict[str, str]:
    """What the summary says of a study: its first statement with the verdict and the number, and how all came out."""
    title = text.splitlines()[0].removeprefix("# ")
    statements = _statements(text)
    row = {"study": f"[{title}]({folder}/{name}.md)", "it asks": "–", "verdict": "–", "number": "–", "in all": "–"}
    if not statements:
        return row
    first, counts = statements[0], count_statements([text])
    asked = first.text.removeprefix(TARGET).removeprefix(OWN)
    in_words: dict[Whose, Counter[str]] = {"target": counts["target"], "own": counts["paper"] + counts["own"]}
    return row | {
        "it asks": asked if asked.split()[0] in ALGORITHMS else capfirst(asked),
        "verdict": f"*{first.verdict}.*{'' if TEST in text else ' †'}",
        "number": _headline(first.evidence),
        "in all": "; ".join(tally_of(kind, count) for kind, count in in_words.items() if count),
    }


def _headline(evidence: str) -> str:
    """The first sentence of some evidence that has a measured number, cut where it is long."""
    sentences = re.split(r"(?<=[.])\s+(?=[A-Z])", evidence)
    measured = [one for one in sentences if "±" in one] or [one for one in sentences if re.search(r"\d", one)]
    shown = (measured or sentences)[0].rstrip(".")
    if len(shown) <= MAX_HEADLINE:
        return shown
    return shown[: shown.rindex(" ", 0, MAX_HEADLINE)].rstrip(",;:") + " …"


class Statement(NamedTuple):
    """A line of a results page that has a verdict."""

    text: str
    verdict: str  # as the page words it, such as "Met"
    evidence: str


@dataclass(frozen=True)
class Section:
    """What a results page says of one study."""

    title: str
    command: str  # that made it
    seconds: int  # that the command took
    environment: str  # versions and machine
    statements: Sequence[Statement]
    is_tested: bool  # whether it says which test decided its statements
    table: Sequence[dict[str, str]]  # by column


def read_results(summary: Path) -> dict[str, Section]:
    """Results pages as values, by the name of the study."""
    return {name: _read_section(summary, name, text) for name, text in read_pages(summary).items()}


def _read_section(summary: Path, name: str, text: str) -> Section:
    made = _MADE.search(text)
    if made is None:
        raise DataError(f"{summary} does not say what made {name}; expected a line that begins with 'Made by'.")
    return Section(
        title=text.splitlines()[0].removeprefix("# "),
        command=made[1],
        seconds=int(made[2]),
        environment=made[3],
        statements=_statements(text),
        is_tested=TEST in text,
        table=tables.read_markdown(text),
    )


def _statements(text: str) -> list[Statement]:
    return [Statement(*found) for found in re.findall(_VERDICT.pattern + r" (.+)$", text, re.MULTILINE)]


def count_statements(pages: Iterable[str]) -> dict[Whose, Counter[str]]:
    """The verdicts on pages of studies: on the paper's statements, on our own, and on targets."""
    words = {word: verdict for verdict, word in MET.items()}
    claims = []
    for page in pages:
        for text, said in _VERDICT.findall(page):
            verdict = words.get(said.lower(), said.lower()) if text.startswith(TARGET) else said.lower()
            if verdict not in get_args(Verdict):
                raise DataError(f"{text!r} is {said!r}; expected one of {', '.join(get_args(Verdict))}.")
            claims.append((_place_in_paper(page), text, verdict))
    return count_verdicts(claims)


def _place_in_paper(page: str) -> str:
    """Where in the paper a study is, with what follows on that line."""
    begins = _STUDY.match(page)
    if begins is None:
        raise DataError(f"the page {page.splitlines()[0].lstrip('# ')!r} names no study; expected one.")
    return begins[2]


def read_pages(summary: Path) -> dict[str, str]:
    """The pages of studies that a summary is about, by the name of the study, in the order of the paper."""
    text = summary.read_text(encoding="utf-8-sig", errors="replace")
    if not text.startswith(OPENING):
        raise DataError(
            f"{summary} does not begin as a results page; expected one that `selffl paper page` has written, to bring "
            "it up to date. Give another file."
        )
    for heading in re.findall(r"^## (.+)$", text, re.MULTILINE):
        if heading not in (*GROUPS.values(), RULES):
            raise _by_hand(heading, summary)
    found: dict[str, str] = {}
    for path in folder_of(summary).glob("*.md"):
        page = path.read_text(encoding="utf-8-sig", errors="replace").strip()
        begins = _STUDY.match(page)
        if begins is None:
            raise _by_hand(page.splitlines()[0].lstrip("# ") if page else "what is written", path)
        found[begins[1]] = page
    return {name: found[name] for name in sorted(found, key=lambda name: (place_of(name), name))}


def _by_hand(heading: str, path: Path) -> DataError:
    return DataError(
        f"{heading!r} in {path} names no study; expected what `selffl paper page` has written. Take it out, or give "
        "another file."
    )


def _page(record: StudyRecord, figure_folder: str) -> str:
    parts = [f"# {_line(record.title)}", f"`{record.id}`: {record.paper}. {_line(capfirst(record.setting))}."]
    environment = ", ".join(f"{key} {value}" for key, value in record.environment.items() if key != "commit")
    parts += [f"Made by `{record.command}` in {record.seconds:.0f} s; {environment}."]
    if record.is_quick:
        parts.append(QUICK)
    parts += [
        "\n".join(
            f"- **{_line(c['text'])}** *{verdict_word(c['text'], c['verdict']).capitalize()}.* {_line(c['evidence'])}"
            for c in record.claims
        )
    ]
    if record.decided_by:
        parts.append(f"{TEST} {_line(record.decided_by)}")
    if words := reading(record):
        parts.append(f"**Reading.** {words}")
    for figure in record.figures:
        words = _line(figure["caption"])
        parts.append(f"![{words}]({figure_folder}/{record.id}-{figure['name']}.svg)\n\n*{words}*")
    parts.append(tables.markdown(record.table).rstrip())
    return "\n\n".join(parts)


def _line(text: str) -> str:
    """A text on one line, as Markdown would show it: a line that begins with # would be a heading."""
    return " ".join(text.split())
