"""The server of a run over Flower: where it begins or goes on, and what is kept of it."""

from __future__ import annotations

import json
import secrets
import time
import uuid
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from flwr.serverapp import Grid

from selffl.algorithms.population import Population
from selffl.algorithms.records import tensors_of
from selffl.algorithms.training_options import TrainingOptions
from selffl.engines.cohort import RunState
from selffl.engines.flower.messages import fingerprint, optimiser_text, options_of
from selffl.engines.flower.records import check_dtype, pack
from selffl.engines.flower.roster import wait_for_clients
from selffl.engines.flower.settings import Network, Records, Rounds, RunIdentity
from selffl.engines.flower.site import Shared
from selffl.engines.flower.strategy import Method, SelfFLStrategy
from selffl.engines.limits import NOT_PRIVATE, PrivacyOptions
from selffl.errors import ConfigError
from selffl.state.checkpoint import fill_record, load_tensors, save_tensors
from selffl.state.files import locked
from selffl.training.flat import FlatModel

CHECKPOINT = "checkpoint.safetensors"
MODEL = "model.safetensors"  # the global model by its parameters' names, when the run has ended


class Checkpoint:
    """The server's state on disk, and which run it is of."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path, self._identity = path, json.loads(json.dumps(identity))
        self._began = time.perf_counter()

    def load(self, template: RunState) -> tuple[RunState, RunIdentity] | None:
        """Where the run stands, and what it goes by; none if it has not begun."""
        if not self.path.exists():
            return None
        tensors, about = load_tensors(self.path)
        # What runs of earlier versions have and do not say.
        usual = {
            "optimiser": optimiser_text("sgd"),
            "robust": "none",
            **TrainingOptions().to_json(),
            **NOT_PRIVATE.to_json(),
        }
        found = usual | about.get("identity", {})
        for name, expected in self._identity.items():
            if found.get(name) != expected:
                raise ConfigError(
                    f"{self.path} is of a run whose {name} is {found.get(name)!r}; expected {expected!r}. Give another "
                    "folder, or the same settings."
                )
        self._began -= float(about["seconds"])
        names = RunIdentity(str(about["experiment"]), str(about["run"]), int(about["cohort_seed"]))
        return replace(fill_record(template, tensors), round_number=int(about["round"])), names

    def save(self, state: RunState, names: RunIdentity) -> None:
        """Keep the state, all or nothing."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        about = {"round": state.round_number, "seconds": self.seconds, "identity": self._identity}
        save_tensors(self.path, tensors_of(state), {**about, **names._asdict()})

    @property
    def seconds(self) -> float:
        """Since the run began, less the time it lay still."""
        return time.perf_counter() - self._began


def number_ids(clients: Sequence[Hashable]) -> list[Hashable]:
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


@dataclass(frozen=True)
class Server:
    """What a server is to run, before anybody is connected.

    A run whose ``out`` holds a checkpoint of the same run goes on from there: Flower does not resume a run, so it is
    submitted again.

    Attributes:
        model: The module with the first values of its parameters, flat.
        algorithm: The method; the clients have to have the same.
        clients: The ids of all clients, whether they take part today or not, as `number_ids` gives them.
        recipe: What all rounds have in common.
        network: How clients are dealt with that are slow, silent or wrong.
        out: Folder for the checkpoint, written after every round; none: nothing is written.
        experiment: Name under which clients keep their memories; none: a new one, kept in the checkpoint.
        population: What is known of the clients beforehand (clusters, variances), in the order of their ids.
        own_metrics: Names of the user's own metrics, which the clients measure as well.
    """

    model: FlatModel
    algorithm: Method
    clients: Sequence[Hashable]
    recipe: Rounds
    network: Network
    out: Path | None = None
    experiment: str | None = None
    population: Population | None = None
    own_metrics: Sequence[str] = ()

    def __post_init__(self) -> None:
        known = self.population
        if known is not None and known.num_clients != len(self.clients):
            raise ConfigError(
                f"the population has {known.num_clients} clients; expected {len(self.clients)}, one for each id."
            )
        if self.experiment == "":
            raise ConfigError("experiment is ''; expected a name, or None for a new one.")
        check_dtype(self.model.dtype)

    def run(
        self, grid: Grid, recording: Callable[[RunState], AbstractContextManager[Records]] | None = None
    ) -> SelfFLStrategy:
        """All rounds that are left, with the nodes that ``grid`` reaches; the strategy holds the state they leave.

        ``recording`` keeps records, from the state that the run begins or goes on from to its end.
        """
        with nullcontext() if self.out is None else locked(self.out):
            state, names, save = self._begin()
            with nullcontext() if recording is None else recording(state) as records:
                if save is not None and state.round_number == 0:
                    # The names have to outlive a first round that does not end: clients may have kept memories under
                    # them.  Not before it is seen that the folder is a run's of its own.
                    save(state)
                strategy = SelfFLStrategy(
                    self.model,
                    self.algorithm,
                    self.clients,
                    self.recipe,
                    self.network,
                    names=names,
                    state=state,
                    own_metrics=self.own_metrics,
                    save=save,
                    records=records,
                )
                wait_for_clients(strategy.roster, grid, len(self.clients), self.network.connect_seconds)
                if records is not None and state.round_number and not records.has_scores(state.round_number):
                    strategy.evaluate(grid)  # the run was stopped after the round and before its evaluation
                left = self.recipe.rounds - state.round_number
                if left > 0:
                    strategy.start(grid, pack(Shared(state.server.params)), left, self.network.round_seconds)
                if records is not None and records.first is not None:
                    strategy.train_alone(grid, records.first)
            if self.out is not None:
                about = {"experiment": names.experiment, "round": strategy.state.round_number}
                shared = self.algorithm.global_model(strategy.state.server)
                save_tensors(self.out / MODEL, self.model.parts(shared), about)
        return strategy

    def _begin(self) -> tuple[RunState, RunIdentity, Callable[[RunState], None] | None]:
        """Where the run begins or goes on, what it goes by, and how it is kept."""
        known = self.model.describe(self.population or Population(len(self.clients)))
        params = self.model.params
        none = torch.zeros(len(self.clients), dtype=torch.int64, device=params.device)
        state = RunState(0, self.algorithm.start(params, known), None, none, none.clone())
        # Noise hides a client the better for nobody knowing whether it took part.
        is_secret = self.recipe.noise_multiplier > 0
        run = uuid.uuid4().hex
        names = RunIdentity(self.experiment or run, run, secrets.randbits(62) if is_secret else self.recipe.seed)
        if self.out is None:
            return state, names, None
        checkpoint = Checkpoint(self.out / CHECKPOINT, self._identity())
        before = checkpoint.load(state)
        if before is not None:
            state, names = before
            if self.experiment not in (None, names.experiment):
                raise ConfigError(
                    f"experiment is {self.experiment!r}; expected {names.experiment!r}, as the checkpoint has it."
                )
            if state.round_number > self.recipe.rounds:
                raise ConfigError(
                    f"rounds is {self.recipe.rounds}, and the run is at round {state.round_number}; expected that or "
                    "more."
                )
            if state.round_number < self.recipe.rounds:
                state = replace(state, server=self.algorithm.reopen(state.server))
        return state, names, lambda state: checkpoint.save(state, names)

    def _identity(self) -> dict[str, Any]:
        """What a run has to have in common with the checkpoint that it goes on from."""
        return {
            "algorithm": self.algorithm.name,
            "options": options_of(self.algorithm),
            "fingerprint": fingerprint(self.model),
            "clients": [str(client) for client in self.clients],
            "participation": self.recipe.participation,
            "learning_rate": self.recipe.learning_rate,
            "batch_size": self.recipe.batch_size,
            "seed": self.recipe.seed,
            "optimiser": optimiser_text(self.recipe.optimiser),
            "robust": self.recipe.robust,
            **TrainingOptions.of(self.recipe).to_json(),
            **PrivacyOptions.of(self.recipe).to_json(),
        }
