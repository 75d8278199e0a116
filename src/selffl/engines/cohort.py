"""The cohort engine: one process, all sampled clients of a round at once."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from selffl.algorithms.contract import Algorithm
from selffl.algorithms.local_task import LocalTask
from selffl.algorithms.population import Population
from selffl.algorithms.records import map_tensors
from selffl.engines.claims import Claims
from selffl.engines.closed_models import ClosedModels
from selffl.engines.limits import NOT_PRIVATE, PrivacyOptions, SumLimits
from selffl.engines.noise import seeded_noise
from selffl.engines.rounds import GatheredUploads, RoundReport, Uploads, closing_rounds_after, finish_round
from selffl.engines.shards import ONE_SHARD, Shards
from selffl.errors import DivergedError
from selffl.randomness import smallest_uniforms, uniform
from selffl.state.disk import DiskMemory
from selffl.state.memory import MemoryStore, Store, memories_of, store_of

# Makes a store of the memory of one client that has not taken part, fields [1, ...], and the number of clients.
Keep = Callable[[Any, int], DiskMemory[Any]]

LEAST_COUNTED = 0.5  # share of a cohort whose answers have to be usable
MOST_IN_CLOSING = 200  # clients that take part in a closing round

_log = logging.getLogger(__name__)


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
    memory: Any  # of all clients, fields [..., M, ...]; or a `DiskMemory`
    num_gradients: Tensor  # evaluations so far, [..., M]
    num_rounds: Tensor  # that a client took part in, [..., M]


@dataclass(frozen=True)
class RoundOrder:
    """What a process has to be told to train its shards' part of a round."""

    round_number: int
    server: Any
    closing: int = 0  # which of the closing rounds after the last this is, from 1 up; 0: it is none


@dataclass(frozen=True)
class ShardRound:
    """What the clients of one shard have sent in a round, and the gradients that each of them took ``[..., C]``."""

    uploads: Uploads
    num_gradients: Tensor


@dataclass(frozen=True)
class Counts:
    """What is counted by client."""

    num_gradients: Tensor
    num_rounds: Tensor

    def plus(self, num_gradients: Tensor) -> Counts:
        """Counts after one more round."""
        return Counts(self.num_gradients + num_gradients, self.num_rounds + 1)


def cohort_size(num_clients: int, participation: float) -> int:
    """max(floor(C M), 1), Algorithm 1."""
    return max(math.floor(participation * num_clients + 1e-9), 1)  # 0.29 * 100 is 28.999...


def closing_share(num_clients: int) -> float:
    """The share of the clients that take part in a closing round."""
    return min(MOST_IN_CLOSING / num_clients, 1.0)


def sample_cohort(seed: int | Tensor, round_number: int, num_clients: int, participation: float) -> Tensor:
    """max(floor(C M), 1) clients without replacement (Algorithm 1), ascending; ``seed [...]`` gives ``[..., C]``.

    Each client draws its own number, keyed by seed, round and client, and the smallest are in: who takes part does not
    depend on how or where the question is asked.
    """
    size = cohort_size(num_clients, participation)
    seeds = torch.as_tensor(seed).unsqueeze(-1)
    if size == num_clients:
        return torch.arange(num_clients).expand(*seeds.shape[:-1], -1)
    if seeds.ndim == 1:
        return smallest_uniforms(size, num_clients, int(seed), "cohort", round_number)
    lots = uniform(seeds, "cohort", round_number, torch.arange(num_clients))
    return lots.topk(size, dim=-1, largest=False).indices.sort(dim=-1).values


def _with_own_storage(memory: Any, params: Tensor) -> Any:
    """Memories whose tensors share no storage with the initial model or with each other: they are written into."""
    taken = {params.untyped_storage().data_ptr()}

    def own(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place in taken:
            return tensor.clone()
        taken.add(place)
        return tensor

    return map_tensors(own, memory)


@dataclass(frozen=True)
class CohortEngine:
    """Runs one algorithm on one federation.

    Attributes:
        algorithm: The method.
        source: The federation, as tasks.
        participation: C, the share of clients in a round.
        seed: One, or one per independent federation ``[...]``.
        chunk_size: Clients that train at once, if fewer than the cohort: bounds the memory, changes no number (beyond
            the last bits where a library computes a block of another size in another order).
        names: Of the clients, in messages; none: their numbers.
        robust: The defence against hostile clients (`selffl.engines.defence`).
        privacy: What bounds each client's part of the sums, and the noise on them (`selffl.engines.limits`).
        shards: Parts of the clients that train apart, and who does it (`selffl.engines.shards`).
        closing: Which of the closing rounds its round is, from 1 up; 0: its rounds are those of training.
    """

    algorithm: Algorithm[Any, Any, Any, Any]
    source: TaskSource
    participation: float = 1.0
    seed: int | Tensor = 0
    chunk_size: int | None = None
    names: Sequence[Hashable] | None = None
    robust: str = "none"
    privacy: PrivacyOptions = NOT_PRIVATE
    shards: Shards = ONE_SHARD
    closing: int = 0
    _closed: ClosedModels = field(default_factory=ClosedModels, init=False, repr=False, compare=False)

    def start(self, params: Tensor, keep: Keep | None = None) -> RunState:
        """Before the first round, from the initial model ``params [..., P]``.

        ``keep`` makes what a state keeps of the clients' memories, where they do not lie in one block of tensors.
        """
        population = self.source.population
        everyone = params.unsqueeze(-2).expand(*params.shape[:-1], population.num_clients, params.shape[-1])
        if keep is None:
            memory = _with_own_storage(self.algorithm.newcomer(everyone), params)
        else:
            memory = keep(self.algorithm.newcomer(everyone[..., :1, :]), population.num_clients)
        return RunState(
            round_number=0,
            server=self.algorithm.start(params, population),
            memory=memory,
            num_gradients=torch.zeros(everyone.shape[:-1], dtype=torch.int64, device=params.device),
            num_rounds=torch.zeros(everyone.shape[:-1], dtype=torch.int64, device=params.device),
        )

    def advance(
        self,
        state: RunState,
        num_rounds: int,
        on_round: Callable[[RoundReport], None] | None = None,
        *,
        consume: bool = False,
    ) -> RunState:
        """The state after ``num_rounds`` more rounds; ``state`` itself is left as it was, unless it may be consumed.

        Consumed, its memories are written into: half the room, where many clients keep a large model.
        """
        shape = tuple(self.source.shape)
        server, store = state.server, store_of(state.memory, shape, copied=not consume)
        counts = MemoryStore(Counts(state.num_gradients, state.num_rounds), shape, copied=not consume)
        for number in range(state.round_number + 1, state.round_number + num_rounds + 1):
            work = self.shard_rounds(number, server, store, state.num_gradients.device)
            found = self.shards.map(RoundOrder(number, server, self.closing), work.train)
            gathered = self._gathering(server, work.clients.device)
            for each in found:
                gathered.found.join(each.uploads)
            spent = torch.cat([each.num_gradients for each in found], dim=-1)
            counts.write(work.places, counts.read(work.places).plus(spent))
            rest = self._rest(number, work.clients, gathered)
            spent = spent if rest is None else spent[rest]
            report = finish_round(self.algorithm, server, number, gathered, spent, seeded_noise(self.seed, number))
            # Honest clients are at times that far from others, too: worth a line, not a warning.
            self._say(number, gathered.held_back, "is held back", logging.INFO)
            server = report.server
            if on_round is not None:
                on_round(report)
        counted = counts.contents()
        return RunState(
            state.round_number + num_rounds, server, store.contents(), counted.num_gradients, counted.num_rounds
        )

    def closing_engines(self, num_rounds: int) -> list[CohortEngine]:
        """An engine for each closing round after so many rounds of training."""
        population = self.source.population
        share = closing_share(population.num_clients)
        rounds = closing_rounds_after(self.algorithm, num_rounds, population, self.robust, self.privacy)
        return [
            replace(self, algorithm=algorithm, participation=share, closing=number)
            for number, algorithm in enumerate(rounds, 1)
        ]

    def conclude(self, state: RunState) -> RunState:
        """The state once training is over: with what clients have said in closing rounds, where there are any.

        Memories of ``state`` are written into, the same numbers as before.
        """
        # What clients spend on it, as on their closing visits, is no part of training.
        closed = replace(state, num_gradients=state.num_gradients.clone(), num_rounds=state.num_rounds.clone())
        for engine in self.closing_engines(state.round_number):
            if engine.algorithm.is_due(closed.server):
                closed = engine.advance(closed, 1, consume=True)
        return replace(state, server=closed.server, memory=closed.memory)

    def shard_rounds(self, number: int, server: Any, store: Store, device: torch.device) -> ShardRounds:
        """The clients' half of a round that begins with this ``server``, to be done shard by shard."""
        return ShardRounds(self, number, server, store, device)

    def _gathering(self, server: Any, device: torch.device) -> GatheredUploads:
        """Where the uploads of a round go that begins with this state."""
        population = self.source.population
        rows = population.num_examples
        if rows is None:
            rows = torch.full((population.num_clients,), torch.inf)
        axis = len(self.source.shape)
        limits = None if self.privacy.clip is None else SumLimits(self.algorithm, self.privacy, axis)
        claims = Claims(self.algorithm, server, rows.to(device), axis, limits)
        return GatheredUploads(self.algorithm, axis, claims, self.robust, limits)

    def _rest(self, number: int, clients: Tensor, gathered: GatheredUploads) -> Tensor | None:
        """Places of the cohort whose answers count; none: all of them.  Fewer than half of it have diverged."""
        if not gathered.left_out:
            return None
        is_counted = ~torch.isin(clients, torch.tensor(list(gathered.left_out), device=clients.device))
        if is_counted.sum() < LEAST_COUNTED * len(clients):
            client, reason = next(iter(gathered.left_out.items()))
            first = f"client {self._name(client)}: {reason.rstrip('.')}"
            raise DivergedError(
                f"{len(gathered.left_out)} of {len(clients)} clients of {self.algorithm.name} sent what cannot be used "
                f"in round {number} ({first}); expected half of them to send finite numbers within bounds. Lower the "
                "learning rate, or take more clients a round."
            )
        self._say(number, gathered.left_out, "is left out")
        return is_counted.nonzero().flatten()

    def _say(self, number: int, reasons: Mapping[int, str], what: str, level: int = logging.WARNING) -> None:
        for client, reason in reasons.items():
            _log.log(level, "round %d: client %s %s: %s", number, self._name(client), what, reason)

    def _name(self, client: int) -> Hashable:
        return client if self.names is None else self.names[client]

    def personal(self, state: RunState, clients: Tensor | None = None, *, is_over: bool = False) -> Tensor:
        """Models as they are evaluated: of all clients ``[..., M, P]``, or of ``clients [C]`` of the one federation.

        Once training ``is_over``, clients make their closing visit first.  The state is left as it is: training may
        go on from it.
        """
        everyone = torch.arange(self.source.population.num_clients, device=state.num_gradients.device)
        chosen = everyone.expand(*self.source.shape, -1) if clients is None else clients
        whole = clients is None and not isinstance(state.memory, Store)
        memory = state.memory if whole else memories_of(state.memory, chosen)
        if is_over and self.algorithm.has_closing_visit:
            return self._closed.get(state, chosen, partial(self._personal_when_closed, state, chosen, memory))
        return self._personal(state, memory, chosen)

    def _personal_when_closed(self, state: RunState, clients: Tensor, memory: Any) -> Tensor:
        """Models of ``clients [..., C]`` with this ``memory`` after their closing visit."""
        closed = self._close(state, clients, memory)
        # Who never took part has the global model (D10).
        has_trained = state.num_rounds.gather(-1, clients) > 0
        memory = map_tensors(partial(_choose, has_trained), closed, memory)
        return self._personal(state, memory, clients)

    def _personal(self, state: RunState, memory: Any, clients: Tensor) -> Tensor:
        """Models of ``clients [..., C]`` with this ``memory``, around the global one."""
        shared = self.algorithm.global_model(state.server)
        return self.algorithm.personal(shared, memory, self._task_at_home(clients, state))

    def _task_at_home(self, clients: Tensor, state: RunState) -> LocalTask:
        """Work of a cohort of which nothing is sent: minibatches are those of the next round."""
        return self.source.task(clients, state.round_number + 1).at_home()

    def _close(self, state: RunState, clients: Tensor, memory: Any) -> Any:
        """What ``clients [..., C]`` with this ``memory`` keep after their closing visit, as many at a time as train."""
        axis, parts = len(self.source.shape), []
        most = cohort_size(self.source.population.num_clients, self.participation)
        for part in _slices(0, clients.shape[-1], self.chunk_size or most):
            some = clients[..., part]
            own = map_tensors(partial(torch.narrow, dim=axis, start=part.start, length=some.shape[-1]), memory)
            sent, task = self.algorithm.closing_broadcast(state.server, some), self._task_at_home(some, state)
            parts.append(self.algorithm.closing_visit(sent, own, task, state.round_number))
        return map_tensors(lambda *tensors: torch.cat(tensors, dim=axis), *parts)


class ShardRounds:
    """The clients' half of one round: who takes part, what they are sent, and their training, shard by shard."""

    def __init__(self, engine: CohortEngine, number: int, server: Any, store: Store, device: torch.device) -> None:
        self._engine, self._number, self._server, self._store = engine, number, server, store
        num_clients, shape = engine.source.population.num_clients, tuple(engine.source.shape)
        # Drawn on the CPU: who takes part is the same on every device.
        drawn = sample_cohort(engine.seed, number, num_clients, engine.participation)
        self.clients = drawn.to(device)
        # Place of a client in the stores: federation by federation, client by client.
        offset = num_clients * torch.arange(math.prod(shape), device=device).reshape(*shape, 1) if shape else 0
        self.places = self.clients + offset
        self._parts = engine.shards.slices(drawn, num_clients)
        self._broadcast = engine.algorithm.broadcast(server, self.clients)  # which may depend on the whole cohort

    def train(self, shard: int) -> ShardRound:
        """Train the clients of one shard, and keep what they keep."""
        engine, axis = self._engine, len(self._engine.source.shape)
        gathered, spent = engine._gathering(self._server, self.clients.device), []
        whole = self._parts[shard]
        size = engine.chunk_size or max(whole.stop - whole.start, 1)
        for part in _slices(whole.start, whole.stop, size):
            chunk, places = self.clients[..., part], self.places[..., part]
            task = engine.source.task(chunk, self._number)
            of_chunk = partial(torch.narrow, dim=axis, start=part.start, length=chunk.shape[-1])
            sent = map_tensors(of_chunk, self._broadcast)
            upload, memory = engine.algorithm.client_round(sent, self._store.read(places), task)
            check_noisy_gradients(engine.algorithm, task)
            self._store.write(places, memory)
            spent.append(task.num_gradients.reshape(chunk.shape))
            gathered.add(chunk, upload if gathered.limits is None else gathered.limits.bound(upload))
        nothing = self.clients[..., :0]
        return ShardRound(gathered.found, torch.cat(spent, dim=-1) if spent else nothing)


def check_noisy_gradients(method: Algorithm[Any, Any, Any, Any], task: LocalTask) -> None:
    """Refuse a visit in which noise was to hide rows and that took more gradients than the method says."""
    if task.row_clip is not None:
        task.check_noisy_gradients(method.name, method.sent_gradients(task.steps_per_epoch))


def _slices(start: int, stop: int, size: int) -> list[slice]:
    """Places ``start`` to ``stop``, at most ``size`` at a time."""
    return [slice(low, min(low + size, stop)) for low in range(start, stop, size)]


def _choose(chosen: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """``first`` where a client is ``chosen [..., M]``, else ``second``; both ``[..., M, ...]``."""
    return torch.where(chosen.reshape(*chosen.shape, *[1] * (first.ndim - chosen.ndim)), first, second)
