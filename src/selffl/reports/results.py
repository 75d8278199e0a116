"""The results page of the documentation: studies' records as Markdown.

Studies are made on different machines, some in minutes and some on a GPU, and their records seldom lie in one folder.
So a page that is there is brought up to date: what it says of other studies stays.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

from selffl.errors import DataError
from selffl.reports import tables
from selffl.reports.page import Recorded, count_verdicts, reading, tally
from selffl.reports.record import StudyRecord, place_of
from selffl.studies.result import MET, OLD_VERDICTS, RULE, TARGET, Verdict, Whose, capfirst, verdict_word

OPENING = "# Results\n\nMade from run records by `selffl paper page`"
QUICK = "**Quick run: fewer repeats or rounds than stated.**"
TEST = "**Test.**"  # how the line begins that says which test decided a section's comparisons
UNSAID = (
    "**Not yet so:** {number} of the verdicts counted above are in sections without a line that begins with *Test*. "
    "These were made before the rule, and without their records they cannot be decided anew. Their comparisons are "
    "paired over repeats or seeds and decided by Student's t at the 5 % level, each by itself, as if seeds that split "
    "the same rows anew were independent, which is too sure; those of the `auto-…` studies are decided by the sign of "
    "the mean difference, or by one standard error where a statement says so, and not by a test. Where a line that "
    "begins with *Test* says otherwise than the rule, that line is right."
)
_STUDY = re.compile(r"## .+\n\n`([^`\n]+)`: ")  # how a section begins
_PAPER = re.compile(r"## .+\n\n`[^`\n]+`: (.+)")  # where a section says what of the paper it is about
_VERDICT = re.compile(r"^- \*\*(.+?)\*\* \*([^*]+)\.\*", re.MULTILINE)
_MADE = re.compile(r"^Made by `([^`\n]+)` in (\d+) s; (.+)\.$", re.MULTILINE)
OF_TARGETS = ("auto-", "regimes-")  # how names of studies begin whose lines are targets


def results_page(studies: Recorded, figure_folder: str, before: Path | None = None) -> str:
    """The page; figures are expected as ``figure_folder/STUDY-NAME.svg``.

    ``before`` is the page as it was, if there was one: sections of studies that are not among these stay as they are.
    """
    sections = _sections(before) if before is not None and before.is_file() else {}
    places: dict[str, Path] = {}
    for folder, record in studies:
        if record.id in places:
            raise DataError(
                f"{places[record.id]} and {folder} both hold the study {record.id}; expected one record of it. "
                "Give a folder with one of them."
            )
        if record.is_quick and QUICK not in sections.get(record.id, QUICK):
            raise DataError(
                f"{folder} holds a quick run of {record.id}, of which {before} has a whole one; expected a whole run. "
                "Leave it out, or give another file."
            )
        places[record.id] = folder
        sections[record.id] = _section(record, figure_folder)
    top = (
        f"{OPENING}; its numbers and verdicts come from the records. Every ± is a standard error over repeats. "
        "Gradients are evaluations per client and round in training; steps of fine-tuning or adaptation before a test "
        "come on top."
    )
    parts = [sections[name] for name in sorted(sections, key=lambda name: (place_of(name), name))]
    older = sum(count.total() for count in count_statements("\n\n".join(p for p in parts if TEST not in p)).values())
    rule = f"{RULE}\n\n{UNSAID.format(number=older)}" if older else RULE
    return "\n\n".join([top, tally(count_statements("\n\n".join(parts))), rule, *parts]) + "\n"


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


def read_results(page: Path) -> dict[str, Section]:
    """A results page as values, by the name of the study."""
    return {name: _read_section(page, name, text) for name, text in _sections(page).items()}


def _read_section(page: Path, name: str, text: str) -> Section:
    made = _MADE.search(text)
    if made is None:
        raise DataError(f"{page} does not say what made {name}; expected a line that begins with 'Made by'.")
    return Section(
        title=text.splitlines()[0].removeprefix("## "),
        command=made[1],
        seconds=int(made[2]),
        environment=made[3],
        statements=[Statement(*found) for found in re.findall(_VERDICT.pattern + r" (.+)$", text, re.MULTILINE)],
        is_tested=TEST in text,
        table=tables.read_markdown(text),
    )


def count_statements(page: str) -> dict[Whose, Counter[str]]:
    """The verdicts on a page: on the paper's statements, on our own, and on targets."""
    words = {word: verdict for verdict, word in MET.items()}
    claims = []
    for section in re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]:
        paper = _PAPER.match(section)
        if paper is None:
            raise DataError(f"the section {section.splitlines()[0][3:]!r} names no study; expected one.")
        for text, said in _VERDICT.findall(section):
            verdict = words.get(said.lower(), said.lower()) if text.startswith(TARGET) else said.lower()
            if verdict not in get_args(Verdict):
                raise DataError(f"{text!r} is {said!r}; expected one of {', '.join(get_args(Verdict))}.")
            claims.append((paper[1], text, verdict))
    return count_verdicts(claims)


def _sections(page: Path) -> dict[str, str]:
    """What a page says of each study, by its name."""
    text = page.read_text(encoding="utf-8-sig", errors="replace")
    for old, new in OLD_VERDICTS.items():
        text = text.replace(f"*{old.capitalize()}.*", f"*{new.capitalize()}.*")
    if not text.startswith(OPENING):
        raise DataError(
            f"{page} does not begin as a results page; expected one that `selffl paper page` has written, to bring it "
            "up to date. Give another file."
        )
    sections = {}
    for part in re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]:
        begins = _STUDY.match(part)
        if begins is None:
            raise DataError(
                f"the section {part.splitlines()[0][3:]!r} of {page} names no study; expected what `selffl paper page` "
                "has written. Take it out, or give another file."
            )
        sections[begins.group(1)] = part.strip()
    return {name: _with_targets(text) if name.startswith(OF_TARGETS) else text for name, text in sections.items()}


def _with_targets(section: str) -> str:
    """A section whose lines are targets, which earlier versions called statements."""

    def renamed(match: re.Match[str]) -> str:
        text, said = match.groups()
        if text.startswith(TARGET):
            return match[0]
        text = f"{TARGET}{text[:1].lower()}{text[1:]}"
        return f"- **{text}** *{verdict_word(text, said.lower()).capitalize()}.*"

    return _VERDICT.sub(renamed, section)


def _section(record: StudyRecord, figure_folder: str) -> str:
    parts = [f"## {_line(record.title)}", f"`{record.id}`: {record.paper}. {_line(capfirst(record.setting))}."]
    parts += [f"Made by `{record.command}` in {record.seconds:.0f} s; {_environment(record)}."]
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
    """On one line, as Markdown would show it: a line that begins with ## would begin a section."""
    return " ".join(text.split())


def _environment(record: StudyRecord) -> str:
    shown = {key: value for key, value in record.environment.items() if key != "commit"}
    return ", ".join(f"{key} {value}" for key, value in shown.items())
