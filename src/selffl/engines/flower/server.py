"""The server as a Flower app: where a run begins or goes on, and what is kept of it."""

from __future__ import annotations

import copy
import json
import time
import uuid
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from flwr.app import Context
from flwr.serverapp import Grid
from flwr.serverapp import ServerApp as ServerApp
from torch import Tensor, nn

from selffl.algorithms import algorithm as method_of
from selffl.algorithms.contract import Population, tensors_of
from selffl.engines.cohort import RunState
from selffl.engines.flower.client import Shared
from selffl.engines.flower.messages import (
    fingerprint,
    options_of,
)
from selffl.engines.flower.records import pack
from selffl.engines.flower.roster import wait_for_clients
from selffl.engines.flower.strategy import Method, SelfFLStrategy, Settings, Watcher
from selffl.errors import ConfigError
from selffl.state.checkpoint import filled, load_tensors, save_tensors
from selffl.training.flat import FlatModel

CHECKPOINT = "checkpoint.safetensors"


class Checkpoint:
    """The server's state on disk, and which run it is of."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path, self._identity = path, json.loads(json.dumps(identity))
        self._began = time.perf_counter()

    def load(self, template: RunState) -> tuple[RunState, str] | None:
        """Where the run stands, and the experiment's id; none if it has not begun."""
        if not self.path.exists():
            return None
        tensors, about = load_tensors(self.path)
        found = about.get("identity", {})
        for name, expected in self._identity.items():
            if found.get(name) != expected:
                raise ConfigError(
                    f"{self.path} is of a run whose {name} is {found.get(name)!r}; expected {expected!r}. Give another "
                    "folder, or the same settings."
                )
        self._began -= float(about["seconds"])
        return replace(filled(template, tensors), round_number=int(about["round"])), str(about["experiment"])

    def save(self, state: RunState, experiment: str) -> None:
        """Keep the state, all or nothing."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        about = {"round": state.round_number, "seconds": self.seconds, "experiment": experiment}
        save_tensors(self.path, tensors_of(state), {**about, "identity": self._identity})

    @property
    def seconds(self) -> float:
        """Since the run began, less the time it lay still."""
        return time.perf_counter() - self._began


def numbered(clients: Sequence[Hashable]) -> list[Hashable]:
    """The ids in the order that numbers them: sorted, as a federation's are."""
    try:
        ids: list[Hashable] = sorted(clients)  # type: ignore[type-var]
    except TypeError:
        raise ConfigError("the clients' ids cannot be sorted; expected all strings or all numbers.") from None
    if not ids:
        raise ConfigError("there are no clients; expected at least one id.")
    texts = [str(client) for client in ids]
    twice = next((text for text in texts if texts.count(text) > 1), None)
    if twice is not None:
        raise ConfigError(f"there are two clients {twice!r}; expected ids that differ.")
    return ids


def start_state(algorithm: Method, params: Tensor, population: Population) -> RunState:
    """Before the first round."""
    none = torch.zeros(population.num_clients, dtype=torch.int64, device=params.device)
    return RunState(0, algorithm.start(params, population), None, none, none.clone())


def server_app(
    model: nn.Module,
    algorithm: str | Method,
    clients: Sequence[Hashable],
    *,
    rounds: int = 200,
    participation: float = 0.1,
    learning_rate: float = 0.03,
    batch_size: int = 10,
    seed: int = 0,
    out: str | Path | None = None,
    evaluate_every: int | None = None,
    quorum: float = 0.5,
    shortfall: Literal["raise", "skip"] = "raise",
    round_seconds: float = 3600.0,
    connect_seconds: float = 60.0,
    experiment: str | None = None,
    population: Population | None = None,
    dtype: torch.dtype = torch.float32,
    watcher: Callable[[RunState], AbstractContextManager[Watcher]] | None = None,
    on_end: Callable[[SelfFLStrategy], None] | None = None,
) -> ServerApp:
    """The app that the server runs.

    A run whose ``out`` holds a checkpoint of the same run goes on from there: Flower does not resume a run, so it is
    submitted again.

    Args:
        model: the module, with the first values of its parameters.
        algorithm: a name, or a method with options; the clients have to have the same.
        clients: the ids of all clients, whether they take part today or not; their sorted order numbers them.
        rounds: how many.
        participation: C, the share of clients in a round.
        learning_rate: η.
        batch_size: B.
        seed: of cohorts and minibatches.
        out: folder for the checkpoint, written after every round; none: nothing is written.
        evaluate_every: rounds between evaluations (the last round always has one); none: a twentieth of the rounds.
        quorum: share of a round's cohort that has to answer for the round to count.
        shortfall: what happens if fewer do: ``raise`` ends the run with a `QuorumError`, ``skip`` goes on to the next
            round with the global model as it was.
        round_seconds: how long answers are waited for.
        connect_seconds: how long clients are waited for before the first round.
        experiment: name under which clients keep their memories; none: a new one, kept in the checkpoint.
        population: what is known of the clients beforehand (clusters, variances), in the order of their sorted ids.
        dtype: of the parameters; the clients have to have the same.
        watcher: whoever keeps records, from the state that the run begins or goes on from to its end
            (`selffl.runs.flower` has one that writes what `selffl.train` writes).
        on_end: called with the strategy after the last round.
    """
    method = method_of(algorithm) if isinstance(algorithm, str) else algorithm
    ids = numbered(clients)
    every = max(rounds // 20, 1) if evaluate_every is None else evaluate_every
    settings = Settings(
        rounds, participation, learning_rate, batch_size, seed, every, quorum, shortfall, round_seconds, connect_seconds
    )  # fmt: skip
    flat = FlatModel(copy.deepcopy(model).to(dtype))
    known = replace(population or Population(len(ids)), layers=flat.layers)
    if known.num_clients != len(ids):
        raise ConfigError(f"the population has {known.num_clients} clients; expected {len(ids)}, one for each id.")
    identity = {
        "algorithm": method.name,
        "options": options_of(method),
        "fingerprint": fingerprint(flat),
        "clients": [str(client) for client in ids],
        "participation": participation,
        "learning_rate": learning_rate,
        "batch_size": batch_size,
        "seed": seed,
    }
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        state, name = start_state(method, flat.params, known), experiment or uuid.uuid4().hex
        checkpoint = None if out is None else Checkpoint(Path(out) / CHECKPOINT, identity)
        before = None if checkpoint is None else checkpoint.load(state)
        if before is not None:
            state, kept = before
            if experiment not in (None, kept):
                raise ConfigError(f"experiment is {experiment!r}; expected {kept!r}, as the checkpoint has it.")
            name = kept
        with nullcontext() if watcher is None else watcher(state) as watching:
            strategy = SelfFLStrategy(
                flat,
                method,
                ids,
                settings,
                experiment=name,
                state=state,
                save=None if checkpoint is None else lambda state: checkpoint.save(state, name),
                watcher=watching,
            )
            if checkpoint is not None and before is None:
                # The name has to outlive a first round that does not end: clients may have kept memories under it.
                checkpoint.save(state, name)
            wait_for_clients(strategy.roster, grid, len(ids), settings.connect_seconds)
            if watching is not None and state.round_number and not watching.is_evaluated(state.round_number):
                strategy.evaluate(grid)  # the run was stopped after the round and before its evaluation
            left = settings.rounds - state.round_number
            if left > 0:
                strategy.start(grid, pack(Shared(state.server.params)), left, settings.round_seconds)
            if on_end is not None:
                on_end(strategy)

    return app
