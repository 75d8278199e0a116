"""Optimisers that clients keep from round to round, for any method: what they remember is part of a client's memory.

A method trains by `selffl.algorithms.solver.descend`, once or several times in a round: each time has an optimiser of
its own, told apart by their order.  How many there are a method declares (``num_optimisers``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from selffl.algorithms.contract import Algorithm
from selffl.algorithms.local_task import LocalTask
from selffl.algorithms.optimisers import Optimiser, RememberedSteps
from selffl.errors import ConfigError


@dataclass(frozen=True)
class KeptMemory:
    """What a client keeps: what its method has it keep, and what its K optimisers remember in S tensors each."""

    own: Any
    num_steps: Tensor  # that an optimiser has made so far [..., C, K]
    states: Tensor  # [..., C, K, S, P]


class _Keeping:
    """A method whose clients keep their optimisers; all else is the method's."""

    def __init__(self, method: Algorithm[Any, Any, Any, Any], num_states: int) -> None:
        self._method, self._num_states = method, num_states

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of its own, and not there yet: a copy is made without calling __init__
            raise AttributeError(name)
        return getattr(self._method, name)

    def newcomer(self, params: Tensor) -> KeptMemory:
        """Optimisers that have made no step."""
        *clients, size = params.shape
        shape = (*clients, self._method.num_optimisers)
        num_steps = torch.zeros(shape, dtype=torch.int64, device=params.device)
        return KeptMemory(self._method.newcomer(params), num_steps, params.new_zeros(*shape, self._num_states, size))

    def client_round(self, broadcast: Any, memory: KeptMemory, task: LocalTask) -> tuple[Any, KeptMemory]:
        """The method's, with the optimisers that its clients have."""
        task.remembered = _slots_of(memory)
        upload, own = self._method.client_round(broadcast, memory.own, task)
        return upload, self._kept(own, memory, task)

    def adapt(self, broadcast: Any, memory: KeptMemory, task: LocalTask) -> KeptMemory:
        """The method's, with the optimisers that its new clients have."""
        task.remembered = _slots_of(memory)
        own = self._method.adapt(broadcast, memory.own, task)
        return self._kept(own, memory, task)

    def closing_visit(self, broadcast: Any, memory: KeptMemory, task: LocalTask, num_rounds: int) -> KeptMemory:
        """The method's closing visit, with the optimisers that its clients have."""
        task.remembered = _slots_of(memory)
        own = self._method.closing_visit(broadcast, memory.own, task, num_rounds)
        return self._kept(own, memory, task)

    def personal(self, global_params: Tensor, memory: KeptMemory, task: LocalTask) -> Tensor:
        """The method's; steps before an evaluation are by an optimiser of their own, which nobody keeps."""
        personal: Tensor = self._method.personal(global_params, memory.own, task)
        return personal

    def _kept(self, own: Any, before: KeptMemory, task: LocalTask) -> KeptMemory:
        found, task.remembered = task.remembered, None
        assert found is not None
        if found.num_asked != self._method.num_optimisers:
            raise ConfigError(
                f"{self._method.name} trains {found.num_asked} times in a round, and says num_optimisers = "
                f"{self._method.num_optimisers}; expected the same, so that optimisers can be kept. Leave out "
                "keep_optimiser, or correct the method."
            )
        return KeptMemory(own, found.num_steps.view_as(before.num_steps), found.states.view_as(before.states))


def _slots_of(memory: KeptMemory) -> RememberedSteps:
    """Copies of remembered steps with one axis of clients, in tensors that may be written into."""
    axes = memory.num_steps.ndim - 1  # of clients
    return RememberedSteps(memory.num_steps.flatten(0, axes - 1).clone(), memory.states.flatten(0, axes - 1).clone())


def keeping_optimisers(
    method: Algorithm[Any, Any, Any, Any], optimiser: Optimiser, *, keep: bool
) -> Algorithm[Any, Any, Any, Any]:
    """The method, with clients that keep their optimisers where they are to."""
    if keep and not method.num_optimisers:
        raise ConfigError(
            f"keep_optimiser is True, and clients of {method.name} train on an objective of its own, whose optimiser "
            "cannot be kept; expected False, or another method."
        )
    found = _Keeping(method, optimiser.num_states) if keep else method
    return cast("Algorithm[Any, Any, Any, Any]", found)
