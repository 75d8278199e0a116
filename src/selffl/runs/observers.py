"""Who watches a run, and the one way in which they are told: its folder, trackers, the user's own function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selffl.engines.cohort import RunState
    from selffl.runs.folder import Records, Row
    from selffl.runs.recipe import Recipe

RoundCallback = Callable[["Row"], None]


class Observer:
    """What a run tells of itself as it goes; an observer overrides what it wants to hear."""

    def started(self, recipe: Recipe, records: Records) -> None:
        """Training begins, or goes on from what the records hold."""

    def round_ended(self, row: Row, participants: Sequence[Row]) -> None:
        """One more round: a row of the history, with its scores if it was evaluated, and one for each participant."""

    def updated(self, records: Records, state: RunState) -> None:
        """Clients and summary are those of now: after an evaluation, and where a checkpoint is due."""

    def ended(self, records: Records) -> None:
        """It is over: ``records.summary["status"]`` says ``finished``, ``diverged`` or ``stopped``."""


@dataclass(frozen=True)
class EachRound(Observer):
    """Calls a function of the user's own with each row of the history."""

    function: RoundCallback

    def round_ended(self, row: Row, participants: Sequence[Row]) -> None:
        """Hand the row on; what the function raises ends the run."""
        self.function(row)
