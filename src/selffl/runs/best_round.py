"""The round of a run with the best score: chosen on test rows, as published tables do, or on validation rows.

A maximum over rounds of a score on test rows is too high: the rows that judge have chosen.  It is here because many
published tables are made like that, and it says of itself what it is.  Where validation rows choose, the score of that
round on test rows is honest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from selffl.errors import ConfigError

ChosenOn = Literal["test rows", "validation rows"]
CHOSEN_ON = "chosen_on"  # beside the scores of a round, on which rows it was chosen


def best_round(
    history: Sequence[Mapping[str, Any]], column: str, chosen_on: ChosenOn, *, higher_is_better: bool
) -> dict[str, Any]:
    """The row of the evaluated round with the best score in ``column``, the first of equals, marked by what chose it.

    Examples:
        >>> rows = [{"round": 5, "weighted_accuracy": 0.7}, {"round": 10, "weighted_accuracy": 0.6}]
        >>> best_round(rows, "weighted_accuracy", "test rows", higher_is_better=True)
        {'round': 5, 'chosen_on': 'test rows', 'weighted_accuracy': 0.7}
    """
    scored = [row for row in history if row.get(column) is not None]
    if not scored:
        raise ConfigError(
            f"no round has a {column}; expected one that was evaluated. Train with evaluate_every above 0."
        )
    pick = max if higher_is_better else min
    found = dict(pick(scored, key=lambda row: row[column]))
    return {"round": found.pop("round"), CHOSEN_ON: chosen_on, **found}
