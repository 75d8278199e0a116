"""The tables that were published, as published.toml describes them: problems, methods, options, and printed numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from selffl.studies.problems import Problem
from selffl.studies.published import PublishedTable, Shown, Trained
from selffl.studies.published_problems import MobileNetProblem, SharedTestProblem
from selffl.studies.result import read_toml

KINDS = {"plain": Problem, "shared test": SharedTestProblem, "mobilenet": MobileNetProblem}


def read_table(content: Mapping[str, Any]) -> PublishedTable:
    """A table as the file has it."""
    about = dict(content)
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


TABLES = {name: read_table(found) for name, found in read_toml("published.toml").items()}
PFEDBAYES, FEDKDDC, FEDLMI, KNNPER = (TABLES[name] for name in ("pfedbayes", "fedkddc", "fedlmi", "knnper"))
PUBLISHED = tuple(table.study for table in TABLES.values())
