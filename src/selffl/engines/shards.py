"""Shards: parts of the clients that train apart, one after the other here, or each in a process of its own.

A shard is a run of neighbouring clients.  The clients of a round who belong to one train and are summed by themselves,
and the sums are added in the order of the shards.  So the numbers depend on how many shards there are, to rounding, and
not on who trains them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

Found = TypeVar("Found")


@dataclass(frozen=True)
class Shards:
    """The clients in so many parts, all of which are this process's."""

    number: int = 1

    def bounds(self, num_clients: int) -> list[int]:
        """The first client of each shard, and at the end how many clients there are: ``number + 1`` of them."""
        return [num_clients * shard // self.number for shard in range(self.number + 1)]

    def slices(self, clients: Tensor, num_clients: int) -> list[slice]:
        """Which places of ``clients [..., C]``, in ascending order, belong to each shard."""
        if self.number == 1:
            return [slice(0, clients.shape[-1])]
        edges = torch.searchsorted(clients.contiguous(), torch.tensor(self.bounds(num_clients))).tolist()
        return [slice(low, high) for low, high in pairwise(edges)]

    def map(self, order: Any, work: Callable[[int], Found]) -> list[Found]:
        """What ``work`` makes of each shard, in their order; ``order`` tells another process to do it for its own."""
        return [work(shard) for shard in range(self.number)]

    def spread(self, state: Any, params: Tensor, *, is_alone: bool = False) -> Any:
        """The state that training goes on from, once all who train have what they need; ``params`` is the first model.

        Where every client trains by itself (``is_alone``), they are told so.
        """
        return state


ONE_SHARD = Shards()
