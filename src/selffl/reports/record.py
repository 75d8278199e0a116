"""What a study leaves on disk, written as soon as it is known, so that an interrupted run can still be read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from selffl.errors import DataError
from selffl.reports import figures, tables
from selffl.runs.environment import environment
from selffl.state.files import write_csv, write_json
from selffl.studies import STUDIES, Study, StudyResult
from selffl.studies.result import OLD_VERDICTS, with_minus

RECORD = "record.json"
FIGURES = "figures.json"  # what the figures show, to draw them again in another size or format
RUNS = "runs"  # folder of a study's training runs
RECORD_VERSION = 1


@dataclass(frozen=True)
class StudyRecord:
    """A finished study as it lies in its folder."""

    id: str
    title: str
    paper: str
    setting: str
    command: str
    is_quick: bool
    seconds: float
    claims: list[dict[str, str]]
    table: list[dict[str, str]]
    figures: list[dict[str, str]]  # name, caption; NAME.png and NAME.svg lie beside
    config: dict[str, Any]
    environment: dict[str, str]
    runs: list[dict[str, Any]] = field(default_factory=list)  # method, seed, folder in RUNS, where it is a comparison
    decided_by: str = ""  # the test behind the verdicts; records of earlier versions do not say
    version: int = RECORD_VERSION


def save_study(
    study: Study, result: StudyResult, folder: Path, *, command: str, is_quick: bool, seconds: float
) -> StudyRecord:
    """Write results.csv, table.md, the figures, what they show, and, last, record.json; returns the record."""
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "results.csv", result.rows)
    (folder / "table.md").write_text(tables.markdown(result.table), encoding="utf-8")
    for figure in result.figures:
        figures.save(figures.draw(figure), folder / figure.name)
    write_json(folder / FIGURES, [figures.plain(figure) for figure in result.figures])
    record = StudyRecord(
        id=study.id,
        title=result.title or study.title,
        paper=study.paper,
        setting=result.setting or study.setting,
        command=command,
        is_quick=is_quick,
        seconds=round(seconds, 1),
        claims=[asdict(claim) for claim in result.claims],
        table=[dict(row) for row in result.table],
        figures=[{"name": figure.name, "caption": figure.caption} for figure in result.figures],
        config=result.config,
        environment=environment(),
        runs=[dict(run) for run in result.runs],
        decided_by=result.decided_by,
    )
    write_json(folder / RECORD, asdict(record))
    return record


def load_studies(folder: Path) -> list[tuple[Path, StudyRecord]]:
    """Every study recorded in ``folder`` or one level below it, with the folder it lies in."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; expected one that `selffl paper run` or `selffl demo` has written.")
    paths = sorted(path for path in (*folder.glob(RECORD), *folder.glob(f"*/{RECORD}")) if path.is_file())
    if not paths:
        raise DataError(
            f"{folder} holds no {RECORD}; expected what `selffl paper run`, `selffl compare` or `selffl demo` has "
            "written."
        )
    studies = [(path.parent, _load(path)) for path in paths]
    return sorted(studies, key=lambda entry: place_of(entry[1].id))


def place_of(study_id: str) -> int:
    """Among the studies, which go as the paper goes; anything else comes before them."""
    return list(STUDIES).index(study_id) if study_id in STUDIES else -1


def _load(path: Path) -> StudyRecord:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != RECORD_VERSION:
            raise DataError(f"{path} has version {content['version']}; expected {RECORD_VERSION}. Run the study again.")
        content.pop("verdict", None)  # which earlier versions wrote, and left empty
        claims = [{key: with_minus(said) for key, said in claim.items()} for claim in content.pop("claims")]
        for claim in claims:
            claim["verdict"] = OLD_VERDICTS.get(claim["verdict"], claim["verdict"])
        return StudyRecord(**content, claims=claims)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is not a complete study record ({error}); run the study again.") from None
