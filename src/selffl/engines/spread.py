"""Training that is spread over ranks: each has some shards' clients with their memories, and rank 0 is the server.

What travels in a round is the server's state, and of each shard what it has gathered: the sum of its uploads, or all
of them where a method or a defence needs single clients.  Memories stay where their clients train.  Rank 0 asks for
those that have changed when it needs them: for a checkpoint, and at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from selffl.algorithms.records import tensors_of
from selffl.engines.cohort import CohortEngine, RoundOrder, RunState, ShardRound
from selffl.engines.ranks import Ranks
from selffl.engines.shards import Shards
from selffl.state.disk import DiskMemory
from selffl.state.memory import MemoryStore, ShardMemory, SpreadMemory, Store, memories_of, store_of

Found = TypeVar("Found")

BYTES_AT_ONCE = 256 << 20  # of memories in one message


@dataclass(frozen=True)
class BeginOrder:
    """Begin, or go on: the first model, and how often each client has taken part ``[M]``."""

    params: Tensor
    num_rounds: Tensor
    is_alone: bool = False  # whether every client is to train by itself


@dataclass(frozen=True)
class PutOrder:
    """Take these memories of some of your clients."""

    clients: Tensor
    memory: Any


@dataclass(frozen=True)
class CollectOrder:
    """Send the memories that have changed since they were last asked for, as many as are sent at once."""


@dataclass(frozen=True)
class RankShards(Shards):
    """Shards that the ranks have shared out among themselves; for rank 0."""

    ranks: Ranks = field(default_factory=Ranks)

    def map(self, order: Any, work: Callable[[int], Found]) -> list[Found]:
        """The others do as the order says, each for its own shards."""
        by_rank = self.ranks.ask(order, lambda: [work(shard) for shard in self.ranks.own_shards(self.number)])
        return [found for each in by_rank for found in each]

    def spread(self, state: RunState, params: Tensor, *, is_alone: bool = False) -> RunState:
        """The others begin, with the memories that their clients have."""
        self.ranks.ask(BeginOrder(params, state.num_rounds, is_alone), lambda: None)
        for rank in self.ranks.others:
            first, stop = clients_of(self, self.ranks, rank, len(state.num_rounds))
            known = first + (state.num_rounds[first:stop] > 0).nonzero().flatten()
            for clients in known.split(_at_once(state.memory, known)) if len(known) else ():  # type: ignore[no-untyped-call]
                self.ranks.ask_one(rank, PutOrder(clients, memories_of(state.memory, clients)))
        store = store_of(state.memory, (), copied=False)
        return replace(state, memory=SpreadMemory(store, self._changed))

    def _changed(self) -> Iterator[tuple[Tensor, Any]]:
        """Clients, and their memories, that have changed elsewhere."""
        for rank in self.ranks.others:
            while len((found := self.ranks.ask_one(rank, CollectOrder()))[0]):
                yield found


def clients_of(shards: Shards, ranks: Ranks, rank: int, num_clients: int) -> tuple[int, int]:
    """The first client of a rank, and the first after its last."""
    own, bounds = replace(ranks, number=rank).own_shards(shards.number), shards.bounds(num_clients)
    return bounds[own.start], bounds[own.stop]


def _at_once(memory: Any, clients: Tensor) -> int:
    """How many of these clients' memories go into one message."""
    one = memories_of(memory, clients[:1]) if len(clients) else None
    size = sum(tensor.nbytes for tensor in tensors_of(one).values())
    return max(BYTES_AT_ONCE // max(size, 1), 1)


class RankTraining:
    """What a rank other than 0 has of a run: the clients of its shards, and what it makes of orders about them."""

    def __init__(self, engine: CohortEngine, ranks: Ranks, order: BeginOrder, *, is_on_disk: bool) -> None:
        self._engine, self._shards = engine, ranks.own_shards(engine.shards.number)
        num_clients = engine.source.population.num_clients
        first, stop = clients_of(engine.shards, ranks, ranks.number, num_clients)
        params, number = order.params, max(stop - first, 1)  # a rank without clients has room for one
        if is_on_disk:
            fresh = engine.algorithm.newcomer(params.unsqueeze(0))
            store: Store = DiskMemory.begin(fresh, number, None)
        else:
            store = MemoryStore(engine.algorithm.newcomer(params.expand(number, -1)), ())
        self._memory = ShardMemory(store, first)
        self.state = RunState(
            round_number=0,
            server=engine.algorithm.start(params, engine.source.population),
            memory=self._memory,
            num_gradients=torch.zeros_like(order.num_rounds),
            num_rounds=order.num_rounds.clone(),
        )
        self._pending: list[Tensor] = []  # of changed clients, that are still to be sent

    def put(self, order: PutOrder) -> None:
        """Take what clients had kept until the checkpoint."""
        self._memory.write(order.clients, order.memory)
        self._memory.take_changed()  # rank 0 has them

    def train(self, order: RoundOrder) -> list[ShardRound]:
        """The clients of this rank's shards, in one round, or in a closing round after the last."""
        engine = self._engine
        if order.closing:
            engine = engine.closing_engines(order.round_number - order.closing)[order.closing - 1]
        work = engine.shard_rounds(order.round_number, order.server, self._memory, self.state.num_gradients.device)
        found = [work.train(shard) for shard in self._shards]
        if not order.closing:
            self.state.num_rounds[work.clients] += 1
        return found

    def at(self, round_number: int, server: Any) -> RunState:
        """The state after a round, with the server's as rank 0 says."""
        self.state = replace(self.state, round_number=round_number, server=server)
        return self.state

    def measure(self, work: Callable[[int], Found]) -> list[Found]:
        """What ``work`` makes of each of this rank's shards."""
        return [work(shard) for shard in self._shards]

    def collect(self) -> tuple[Tensor, Any]:
        """Clients whose memories have changed and are not sent yet, as many as go at once, and their memories."""
        if not self._pending:
            changed = self._memory.take_changed()
            self._pending = list(changed.split(_at_once(self._memory, changed)))  # type: ignore[no-untyped-call]
        clients = self._pending.pop(0)
        return clients, self._memory.read(clients) if len(clients) else None
