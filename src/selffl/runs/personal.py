"""Personal models of a run, each made once and kept: closing visits are training."""

from __future__ import annotations

from torch import Tensor

from selffl.budget import budget_of
from selffl.engines.cohort import RunState
from selffl.runs.session import Session


class PersonalModelCache:
    """Personal models of a state that no longer changes, by the places of clients: the latest asked for that fit."""

    def __init__(self, session: Session, state: RunState) -> None:
        self.session, self.state = session, state
        self._kept: dict[int, Tensor] = {}
        params = state.server.params
        self._most = max(budget_of(params.device).evaluated_numbers // params.shape[-1], 1)

    def __getitem__(self, position: int) -> Tensor:
        """The model ``[P]`` of the client in that place, to be read only."""
        if position not in self._kept:
            if len(self._kept) >= self._most:
                del self._kept[next(iter(self._kept))]
            self._kept[position] = self.session.personal(self.state, position)
        return self._kept[position]
