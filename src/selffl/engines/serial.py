"""An engine for finding mistakes: one client at a time, and an error says whose, in which round and at which stage."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor

from selffl.algorithms.contract import Algorithm
from selffl.algorithms.local_task import LocalTask
from selffl.algorithms.population import Population
from selffl.engines.cohort import CohortEngine, TaskSource
from selffl.errors import SelfFLError, one_line

STAGES = {  # what a method was doing, by its function
    "client_round": "while training",
    "closing_visit": "while it trained on by itself",
    "personal": "while its personal model was made",
    "noisy_server_round": "while the server combined what it was sent",
    "server_round": "while the server combined what it was sent",
}
SERVER_STAGES = ("server_round", "noisy_server_round")


@dataclass
class _NamedSource:
    """The tasks of another source, and whose the last one was."""

    source: TaskSource
    ids: Sequence[Hashable]
    client: Hashable = None
    round_number: int = 0

    @property
    def shape(self) -> torch.Size:
        return self.source.shape

    @property
    def population(self) -> Population:
        return self.source.population

    def task(self, clients: Tensor, round_number: int) -> LocalTask:
        self.client, self.round_number = self.ids[int(clients.flatten()[0])], round_number
        return self.source.task(clients, round_number)


class _NamedMethod:
    """A method whose errors say at which stage they came."""

    def __init__(self, method: Algorithm[Any, Any, Any, Any], source: _NamedSource) -> None:
        self._method, self._source = method, source

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._method, name)
        return self._named(name, found) if name in STAGES else found

    def closing_rounds(self, num_rounds: int, population: Population) -> Any:
        """The method's closing rounds, whose errors say at which stage they came."""
        return [_NamedMethod(each, self._source) for each in self._method.closing_rounds(num_rounds, population)]

    def _named(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def called(*given: Any) -> Any:
            try:
                return function(*given)
            except Exception as error:
                # A personal model is made for the round before that of its task.
                number = self._source.round_number - (name == "personal")
                whose = "" if name in SERVER_STAGES else f"client {self._source.client!r}, "
                is_ours = isinstance(error, SelfFLError)
                what = str(error) if is_ours else f"{type(error).__name__}: {one_line(error)}"
                kind = type(error) if is_ours else SelfFLError
                raise kind(f"{whose}round {number}, {STAGES[name]}: {what}") from error

        return called


def serial_engine(engine: CohortEngine, ids: Sequence[Hashable]) -> CohortEngine:
    """This engine with one client at a time, by the clients' ``ids``."""
    source = _NamedSource(engine.source, ids)
    method = cast("Algorithm[Any, Any, Any, Any]", _NamedMethod(engine.algorithm, source))
    return replace(engine, algorithm=method, source=source, chunk_size=1)
