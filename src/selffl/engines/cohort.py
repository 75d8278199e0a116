"""The cohort engine: one process, all sampled clients of a round at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from selffl.algorithms.contract import Algorithm, LocalTask, Population, tensors_of
from selffl.errors import ConfigError, DivergedError
from selffl.randomness import uniform
from selffl.state.memory import MemoryStore


class TaskSource(Protocol):
    """A federation as an engine sees it."""

    @property
    def shape(self) -> torch.Size:
        """Independent federations that run side by side; usually ``()``."""
        ...

    @property
    def population(self) -> Population:
        """What is known before training."""
        ...

    def task(self, clients: Tensor, round_number: int) -> LocalTask:
        """The local work of a cohort ``clients [..., C]`` in one round."""
        ...


@dataclass(frozen=True)
class RunState:
    """Everything a run needs to go on from here."""

    round_number: int
    server: Any
    memory: Any  # of all clients, fields [..., M, ...]
    num_gradients: Tensor  # evaluations so far, [..., M]


@dataclass(frozen=True)
class RoundReport:
    """What happened in one round."""

    round_number: int
    clients: Tensor  # [..., C]
    upload: Any
    server: Any


def cohort_size(num_clients: int, participation: float) -> int:
    """max(floor(C M), 1), Algorithm 1."""
    return max(math.floor(participation * num_clients + 1e-9), 1)  # 0.29 * 100 is 28.999...


def sample_cohort(seed: int | Tensor, round_number: int, num_clients: int, participation: float) -> Tensor:
    """max(floor(C M), 1) clients without replacement (Algorithm 1), ascending; ``seed [...]`` gives ``[..., C]``.

    Each client draws its own number, keyed by seed, round and client, and the smallest are in: who takes part does not
    depend on how or where the question is asked.
    """
    size = cohort_size(num_clients, participation)
    seeds = torch.as_tensor(seed).unsqueeze(-1)
    everyone = torch.arange(num_clients)
    if size == num_clients:
        return everyone.expand(*seeds.shape[:-1], -1)
    lots = uniform(seeds, "cohort", round_number, everyone)
    return lots.topk(size, dim=-1, largest=False).indices.sort(dim=-1).values


@dataclass(frozen=True)
class CohortEngine:
    """Runs one algorithm on one federation.

    Attributes:
        algorithm: The method.
        source: The federation, as tasks.
        participation: C, the share of clients in a round.
        seed: One, or one per independent federation ``[...]``.
    """

    algorithm: Algorithm[Any, Any, Any, Any]
    source: TaskSource
    participation: float = 1.0
    seed: int | Tensor = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.participation <= 1.0:
            raise ConfigError(f"participation is {self.participation}; expected a share of clients, above 0 up to 1.")

    def start(self, params: Tensor) -> RunState:
        """Before the first round, from the initial model ``params [..., P]``."""
        population = self.source.population
        everyone = params.unsqueeze(-2).expand(*params.shape[:-1], population.num_clients, params.shape[-1])
        return RunState(
            round_number=0,
            server=self.algorithm.start(params, population),
            memory=self.algorithm.newcomer(everyone),
            num_gradients=torch.zeros(everyone.shape[:-1], dtype=torch.int64, device=params.device),
        )

    def advance(
        self, state: RunState, num_rounds: int, on_round: Callable[[RoundReport], None] | None = None
    ) -> RunState:
        """The state after ``num_rounds`` more rounds; ``state`` itself is left as it was."""
        num_clients, shape = self.source.population.num_clients, tuple(self.source.shape)
        server, store = state.server, MemoryStore(state.memory, shape)
        spent = MemoryStore(state.num_gradients, shape)
        # Row of a client in the stores: federation by federation, client by client.
        offset = num_clients * torch.arange(math.prod(shape)).reshape(*shape, 1) if shape else torch.tensor(0)
        for number in range(state.round_number + 1, state.round_number + num_rounds + 1):
            clients = sample_cohort(self.seed, number, num_clients, self.participation)
            rows = clients + offset
            task = self.source.task(clients, number)
            broadcast = self.algorithm.broadcast(server, clients)
            upload, memory = self.algorithm.client_round(broadcast, store.read(rows), task)
            store.write(rows, memory)
            spent.write(rows, spent.read(rows) + task.num_gradients.reshape(clients.shape))
            server = self.algorithm.server_round(server, clients, upload)
            # NaN may stand for "unknown" outside the model; infinity never does.
            if not server.params.isfinite().all() or any(t.isinf().any() for t in tensors_of(server).values()):
                raise DivergedError(
                    f"the state of {self.algorithm.name} is not finite after round {number}; "
                    "expected finite numbers. Lower the learning rate, or take more clients a round."
                )
            if on_round is not None:
                on_round(RoundReport(number, clients, upload, server))
        return RunState(state.round_number + num_rounds, server, store.snapshot(), spent.snapshot())

    def personal(self, state: RunState) -> Tensor:
        """Every client's model as it is evaluated: ``[..., M, P]``."""
        clients = torch.arange(self.source.population.num_clients).expand(*self.source.shape, -1)
        task = self.source.task(clients, state.round_number + 1)
        return self.algorithm.personal(state.server.params, state.memory, task)
