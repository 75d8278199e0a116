"""A run over several processes: rank 0 trains as ever, with shards that others train, and these follow its orders.

Every rank runs the same program.  Rank 0 alone writes, draws and calls what the user has given to be called.  The
others get the records when it is done; what clients keep is with rank 0 then.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from selffl._version import __version__
from selffl.engines.cohort import RoundOrder, RunState
from selffl.engines.ranks import Ranks, Stop
from selffl.engines.spread import BeginOrder, CollectOrder, PutOrder, RankShards, RankTraining
from selffl.errors import ConfigError, one_line
from selffl.runs.evaluation import EvaluationOrder
from selffl.runs.folder import Records, RunFolder
from selffl.runs.observers import Observer
from selffl.runs.recipe import Recipe
from selffl.runs.run import Run, make_run, train_and_record
from selffl.runs.session import Session, single_thread
from selffl.state.memory import AbsentMemory, whole_memory
from selffl.training.blocks import deterministic_cudnn


@dataclass(frozen=True)
class FactsOrder:
    """Say what you have been asked to train."""


@dataclass(frozen=True)
class Result:
    """What the other ranks get of a run: all but the memories of clients."""

    records: Records
    state: RunState


def for_ranks(recipe: Recipe, ranks: Ranks) -> Recipe:
    """The recipe as so many ranks follow it; what cannot work with several is refused."""
    if ranks.size > 1 and recipe.engine == "serial":
        raise ConfigError(
            f"engine is 'serial', and there are {ranks.size} ranks; expected one process to look for mistakes in. "
            "Start without torchrun."
        )
    ranks.use_device(recipe.device)
    # A run that goes on with more ranks than it has shards gets more shards: its numbers may differ in the last bits.
    return replace(recipe, shards=max(recipe.shards or 1, ranks.size))


def shared_module(module: nn.Module, ranks: Ranks) -> nn.Module:
    """The module with the weights that it has on rank 0: nobody has to seed it alike everywhere."""
    if ranks.size == 1:
        return module
    first = ranks.share(module.state_dict)
    if ranks.number == 0:
        return module
    own = copy.deepcopy(module)
    try:
        own.load_state_dict(first)
    except RuntimeError as error:
        raise ConfigError(
            f"the model of rank {ranks.number} is not that of rank 0 ({one_line(error)}); expected the same program on "
            "every rank."
        ) from None
    return own


def train_over(
    ranks: Ranks,
    session: Session,
    state: RunState,
    records: Records,
    folder: RunFolder | None,
    seconds: float,
    observers: Sequence[Observer],
) -> Run:
    """On rank 0: the run, trained from ``state`` to its last round by all ranks."""
    if ranks.size == 1:
        return train_and_record(session, state, records, folder, seconds, observers)
    _check_same(session, ranks)
    shards = RankShards(session.engine.shards.number, ranks)
    spread = replace(session, engine=replace(session.engine, shards=shards))
    run = train_and_record(spread, shards.spread(state, session.first), records, folder, seconds, observers)
    last = replace(run._state, memory=whole_memory(run._state.memory))
    return dismiss(ranks, make_run(session, last, records))


def dismiss(ranks: Ranks, run: Run) -> Run:
    """On rank 0: tell the others that the run is there, and return it."""
    ranks.dismiss(Result(run._records(), replace(run._state, memory=AbsentMemory())))
    return run


def follow(session: Session, ranks: Ranks) -> Run:
    """On another rank: do as rank 0 says until the run is done."""
    follower = _Follower(session, ranks)
    with single_thread(session), deterministic_cudnn():
        while not isinstance(order := ranks.await_order(), Stop):
            ranks.answer(follower.work(order))
    result: Result = order.result
    return make_run(session, result.state, result.records)


class _Follower:
    """What a rank makes of each kind of order."""

    def __init__(self, session: Session, ranks: Ranks) -> None:
        self._session, self._ranks = session, ranks
        self._training: RankTraining | None = None
        self._trained = session  # of it, or of clients that train alone

    def work(self, order: Any) -> Callable[[], Any]:
        """The work that an order asks for."""
        if isinstance(order, FactsOrder):
            return lambda: _facts(self._session)
        if isinstance(order, BeginOrder):
            return lambda: self._begin(order)
        training = self._training
        assert training is not None
        if isinstance(order, RoundOrder):
            return lambda: training.train(order)
        if isinstance(order, EvaluationOrder):
            return lambda: self._evaluate(training, order)
        if isinstance(order, PutOrder):
            return lambda: training.put(order)
        assert isinstance(order, CollectOrder)
        return training.collect

    def _begin(self, order: BeginOrder) -> None:
        self._trained = self._session.alone() if order.is_alone else self._session
        is_on_disk = self._session.recipe.client_memory == "disk"
        self._training = RankTraining(self._trained.engine, self._ranks, order, is_on_disk=is_on_disk)

    def _evaluate(self, training: RankTraining, order: EvaluationOrder) -> list[Any]:
        state = training.at(order.round_number, order.server)
        return training.measure(self._trained.shard_evaluations(state, order.views).measure_shard)


def _facts(session: Session) -> dict[str, Any]:
    """What has to be the same on every rank."""
    versions = {"version of selffl": __version__, "version of torch": torch.__version__}
    rows = {"fingerprint": session.federation.fingerprint()}
    return versions | session.recipe.to_json() | rows


def _check_same(session: Session, ranks: Ranks) -> None:
    """Refuse ranks that were asked for another run, or have other rows."""
    expected, *others = ranks.ask(FactsOrder(), lambda: _facts(session))
    for rank, found in enumerate(others, start=1):
        for name, value in expected.items():
            if found.get(name) == value:
                continue
            if name == "fingerprint":
                name, value, found = "data", "rows of its own", {"data": "others"}
            raise ConfigError(
                f"rank {rank} has the {name} {found.get(name)!r}, and rank 0 {value!r}; expected the same program "
                "with the same rows on every rank. To train runs apart, start them without torchrun."
            )
