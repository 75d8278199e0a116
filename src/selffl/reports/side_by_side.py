"""Several comparisons on one page: what each calls itself there, and their methods beside each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypedDict

from selffl.reports import scores, sentences
from selffl.reports.collect import Group
from selffl.training.metrics import PERCENT, name_of


class Beside(TypedDict):
    """A table with a row for each method and a column for each comparison."""

    columns: list[str]
    notes: list[str]  # what the numbers of a column are
    rows: list[tuple[str, list[str]]]


def names_of(groups: Sequence[Group]) -> list[str]:
    """The title of each; of those that share one, the folder; of those that share that too, with a number."""
    titles = Counter(group.title for group in groups)
    named = [g.title if titles[g.title] == 1 else _folder(g) for g in groups]
    again = Counter(named)
    return [
        name if again[name] == 1 else f"{name}, {named[: place + 1].count(name)}" for place, name in enumerate(named)
    ]


def _folder(group: Group) -> str:
    """The folder that a reader has named: that of the comparison, or that of its first run."""
    folder = group.runs[0].folder.absolute()
    return (folder.parent.parent if folder.parent.name == "runs" else folder.parent).name


def beside(groups: Sequence[Group]) -> Beside | None:
    """The score of every method in every comparison; nothing for fewer than two."""
    if len(groups) < 2:
        return None
    lines = [{line.method: line for line in scores.lines(group)} for group in groups]
    methods = list(dict.fromkeys(method for own in lines for method in own))
    return {
        "columns": names_of(groups),
        "notes": [name_of(g.metric) + (", %" if g.metric in PERCENT else "") for g in groups],
        "rows": [
            (
                method,
                [
                    sentences.with_error(own[method].scores.get("weighted") if method in own else None, group.metric)
                    for own, group in zip(lines, groups, strict=True)
                ],
            )
            for method in methods
        ],
    }
