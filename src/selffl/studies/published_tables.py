"""The tables that were published, as published.toml describes them: problems, methods, options, and printed numbers."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from selffl.studies.problems import Problem
from selffl.studies.published import PublishedTable, Shown, Trained
from selffl.studies.published_problems import MobileNetProblem, SharedTestProblem

FILE = Path(__file__).with_name("published.toml")
KINDS = {"plain": Problem, "shared test": SharedTestProblem, "mobilenet": MobileNetProblem}


def read_table(content: Mapping[str, Any]) -> PublishedTable:
    """A table as the file has it."""
    about: dict[str, Any] = {name: _fixed(value) for name, value in content.items()}
    whole = dict(about.pop("problem"))
    problem = KINDS[whole.pop("kind", "plain")](about["id"], **whole)
    return PublishedTable(
        problems={
            setting: replace(problem, data_options={**problem.data_options, "partition": partition})
            for setting, partition in about.pop("partitions").items()
        },
        methods=tuple(
            Trained(**method | {"shown": tuple(Shown(**row) for row in method["shown"])})
            for method in about.pop("methods")
        ),
        **about,
    )


def _fixed(value: Any) -> Any:
    """A value with tuples for lists, as settings have them."""
    if isinstance(value, dict):
        return {name: _fixed(each) for name, each in value.items()}
    return tuple(map(_fixed, value)) if isinstance(value, list) else value


TABLES = {name: read_table(found) for name, found in tomllib.loads(FILE.read_text(encoding="utf-8")).items()}
PFEDBAYES, FEDKDDC, FEDLMI, KNNPER = (TABLES[name] for name in ("pfedbayes", "fedkddc", "fedlmi", "knnper"))
PUBLISHED = tuple(table.study for table in TABLES.values())
