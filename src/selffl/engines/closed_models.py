"""Personal models after closing visits, which are training: made once, however often they are asked for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from selffl.budget import budget_of


class ClosedModels:
    """Models after closing visits, kept for the latest state, by the clients asked for together; as many as fit.

    A copy begins without any.
    """

    def __init__(self) -> None:
        self._state: weakref.ref[Any] | None = None
        self._found: dict[tuple[int, ...], Tensor] = {}
        self._room = 0

    def get(self, state: Any, clients: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """The models of ``clients [..., C]`` in that state, made by ``make`` if they are not here; the caller's own."""
        if self._state is None or self._state() is not state:
            self._state, self._found = weakref.ref(state), {}
            self._room = budget_of(clients.device).evaluated_numbers
        key = tuple(clients.flatten().tolist())
        if key in self._found:
            return self._found[key].clone()
        found = make()
        if found.numel() <= self._room:
            self._room -= found.numel()
            self._found[key] = found.clone()
        return found

    def __reduce__(self) -> tuple[type[ClosedModels], tuple[()]]:
        return ClosedModels, ()
