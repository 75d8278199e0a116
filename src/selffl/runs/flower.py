"""A run over Flower with the records of `selffl.train`: the same files, made of what the clients report.

Beside the uploads, the server learns of each client how many rows there are and a sum over the test rows for each
metric; no row and no answer to a row leaves a client.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from selffl.algorithms.population import Population
from selffl.engines.cohort import RunState
from selffl.engines.flower.answers import Scores
from selffl.engines.flower.client import VIEWS, algorithm_of
from selffl.engines.flower.server import Server, numbered
from selffl.engines.flower.strategy import Settings
from selffl.engines.rounds import RoundReport
from selffl.errors import CheckpointError, ConfigError, DivergedError
from selffl.runs import folder as files
from selffl.runs.evaluation import Evaluation
from selffl.runs.folder import Records, Row, RunConfig, RunFolder
from selffl.runs.loop import Method, client_rows, every_of, history_columns, rows_of, summary
from selffl.runs.train import is_named, named_method
from selffl.training.flat import FlatModel
from selffl.training.metrics import Measure


@dataclass(frozen=True)
class ReportedEvaluation(Evaluation):
    """An evaluation made of the clients' own sums instead of their rows."""

    totals: Mapping[str, Tensor]  # "personal.accuracy": of each client [M], summed over its rows; of AUC the value

    def of_clients(self, metric: str, view: str) -> Tensor:
        """Of each client ``[M]``; NaN where nothing is known."""
        return self.totals[f"{view}.{metric}"] if metric == "auc" else super().of_clients(metric, view)

    def _totals(self, metric: str, view: str) -> Tensor:
        return self.totals[f"{view}.{metric}"]


def reported(scores: Mapping[int, Scores], num_clients: int) -> ReportedEvaluation:
    """The evaluation of those clients that have answered; the others count as clients without rows."""
    metrics = next(iter(scores.values())).metrics
    rows = torch.zeros(num_clients, dtype=torch.int64)
    totals = {
        f"{view}.{metric}": torch.full((num_clients,), torch.nan if metric == "auc" else 0.0, dtype=torch.float64)
        for view in VIEWS
        for metric in metrics
    }
    num_train = torch.zeros(num_clients, dtype=torch.int64)
    for client, found in scores.items():
        rows[client], num_train[client] = found.num_test, found.num_train
        for name, total in found.totals.items():
            totals[name][client] = total
    return ReportedEvaluation(
        measure=Measure(metrics, lambda outputs, labels: (outputs,)),  # rows were measured where they are
        labels=torch.zeros(0),
        offset=torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)]),
        numbers=dict.fromkeys(VIEWS, torch.zeros(0)),
        by_size=num_train.argsort(descending=True, stable=True),
        totals=totals,
    )


class Recorder:
    """Writes a run's folder as the run goes; where the run is, the server's checkpoint says."""

    def __init__(
        self, path: Path, config: RunConfig, method: Method, clients: Sequence[Hashable], state: RunState
    ) -> None:
        self._config, self._method, self._clients = config, method, clients
        self._path, self.records = path, Records()
        self.metrics: tuple[str, ...] | None = None
        if (path / files.CONFIG).is_file():
            self._take_up(state.round_number)
        elif state.round_number:
            raise CheckpointError(
                f"{path} holds a checkpoint of round {state.round_number} and no {files.CONFIG}; expected both. "
                "Put it back, or start another run in another folder."
            )
        last: Row = self.records.history[-1] if self.records.history else {}
        self._began = time.perf_counter() - (last.get("seconds") or 0.0)
        path.mkdir(parents=True, exist_ok=True)
        self._begin()

    def _take_up(self, round_number: int) -> None:
        """The records of the rounds until the checkpoint, all of which have to be there."""
        earlier = files.read_config(self._path)
        if earlier.device != self._config.device:
            raise ConfigError(f"{self._path} holds a run that is not over Flower; give another folder.")
        self.records = files.read_records(self._path).up_to(round_number)
        if [row["round"] for row in self.records.history] != list(range(1, round_number + 1)):
            raise CheckpointError(
                f"{self._path / files.HISTORY} lacks rounds before the checkpoint of round {round_number}; expected "
                "all. Start another run in another folder."
            )
        ids = {str(client): client for client in self._clients}
        for row in (*self.records.clients, *self.records.participation):
            row["client"] = ids[row["client"]]
        if any(row.get(f"weighted_{earlier.metrics[0]}") is not None for row in self.records.history):
            self.metrics = earlier.metrics
            self._config = replace(self._config, metrics=earlier.metrics)

    def _begin(self) -> None:
        self._folder = RunFolder(self._path, history_columns(self._config))
        self._folder.begin(self._config, self.records)

    def is_evaluated(self, round_number: int) -> bool:
        """Whether that round's row has scores."""
        name = f"weighted_{self._config.metrics[0]}"
        return any(row["round"] == round_number and row.get(name) is not None for row in self.records.history)

    def trained(self, report: RoundReport, state: RunState) -> None:
        """One more row of the history, and one for each client that took part."""
        self._add(state, *rows_of(self._method, report, self._clients))

    def skipped(self, state: RunState) -> None:
        """A row that says that nobody took part."""
        self._add(state, {"round": state.round_number, "clients": 0}, [])

    def _add(self, state: RunState, found: Row, taking_part: list[Row]) -> None:
        spent = int(state.num_gradients.sum())
        row = dict.fromkeys(history_columns(self._config)) | found
        row |= {"gradient_evaluations": spent, "seconds": round(time.perf_counter() - self._began, 3)}
        self.records.history.append(row)
        self.records.participation.extend(taking_part)
        self._folder.add_round(row, taking_part)

    def evaluated(self, state: RunState, scores: Mapping[int, Scores]) -> None:
        """The scores of the moment beside the last round, the rows of the clients, and the summary."""
        if scores:
            found = reported(scores, len(self._clients))
            self.metrics = found.measure.metrics
            self._config = replace(self._config, metrics=self.metrics)
            self.records.history[-1] |= found.scores()
            heard = [scores.get(client) for client in range(len(self._clients))]
            num_train = torch.tensor([0 if own is None else own.num_train for own in heard])
            self.records.clients = client_rows(
                self._config, self._method, self._clients, num_train, found.num_rows, state, self.records, found
            )
        # The history last: it says that the round is evaluated, and a run that goes on believes it.
        self.conclude("finished" if state.round_number == self._config.rounds else "running")
        self._begin()  # anew: the last row has changed, and the first evaluation says what is measured

    def conclude(self, status: str) -> None:
        """Write the clients and the summary."""
        self.records.summary = summary(self._config, len(self._clients), self.records, status)
        self._folder.add_evaluation(self.records)


def server_app(
    model: nn.Module,
    algorithm: str | Method,
    clients: Sequence[Hashable],
    *,
    out: str | Path | None = None,
    rounds: int = 200,
    participation: float = 0.1,
    learning_rate: float = 0.03,
    batch_size: int = 10,
    seed: int = 0,
    evaluate_every: int | None = None,
    quorum: float = 0.5,
    shortfall: Literal["raise", "skip"] = "raise",
    round_seconds: float = 3600.0,
    connect_seconds: float = 60.0,
    max_examples: int = 10**9,
    experiment: str | None = None,
    population: Population | None = None,
    dtype: torch.dtype = torch.float32,
    data: str = "remote",
) -> ServerApp:
    """The app that the server runs.

    ``out``, ``experiment``, ``algorithm`` (a name) and every setting from ``rounds`` to ``max_examples`` may also be
    given in the app's run configuration, with a dash for each underscore (``flwr run . --run-config "rounds=20"``),
    which then counts.  A run whose ``out`` holds a checkpoint of the same run goes on from there: Flower does not
    resume a run, so it is submitted again (`selffl flower resume`).

    Args:
        model: the module, with the first values of its parameters.
        algorithm: a name, or a method with options; the clients have to have the same.
        clients: the ids of all clients, whether they take part today or not; their sorted order numbers them.
        out: folder, on the server, for the records that `selffl.train` writes and a checkpoint after every round; none:
            nothing is written.
        rounds: how many.
        participation: C, the share of clients in a round.
        learning_rate: η.
        batch_size: B.
        seed: of cohorts and minibatches.
        evaluate_every: rounds between evaluations (the last round always has one); none: a twentieth of the rounds.
        quorum: share of a round's cohort that has to answer for the round to count.
        shortfall: what happens if fewer do: ``raise`` ends the run with a `QuorumError`, ``skip`` goes on to the next
            round with the global model as it was.
        round_seconds: how long enough of a round's clients are waited for, and again their answers.
        connect_seconds: how long all clients are waited for before the first round.
        max_examples: the most rows that a client may claim to have; many methods weigh clients by that.
        experiment: name under which clients keep their memories; none: a new one, kept in the checkpoint.
        population: what is known of the clients beforehand (clusters, variances), in the order of their sorted ids.
        dtype: of the parameters; the clients have to have the same.
        data: what the records call the clients' rows, which the server does not see.
    """
    given = {
        "rounds": rounds,
        "participation": participation,
        "learning_rate": learning_rate,
        "batch_size": batch_size,
        "seed": seed,
        "evaluate_every": evaluate_every,
        "quorum": quorum,
        "shortfall": shortfall,
        "round_seconds": round_seconds,
        "connect_seconds": connect_seconds,
        "max_examples": max_examples,
        "experiment": experiment,
        "out": None if out is None else str(out),
    }
    ids = numbered(clients)
    module = copy.deepcopy(model).to(dtype)

    def server_of(run_config: Mapping[str, Any]) -> tuple[str, Server]:
        name, method = named_method(algorithm_of(run_config, algorithm))
        chosen = overridden(given, run_config)
        experiment, place = chosen.pop("experiment"), chosen.pop("out")
        chosen["evaluate_every"] = every_of(chosen["rounds"], chosen["evaluate_every"])
        place = None if place is None else Path(place)
        return name, Server(FlatModel(module), method, ids, Settings(**chosen), place, experiment, population)

    server_of({})  # what is wrong here should be said before anybody connects
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        name, server = server_of(context.run_config)
        server.run(grid, None if server.out is None else recording(server, name, data))

    return app


def overridden(given: Mapping[str, Any], run_config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with those of a run configuration in their place, whose names have dashes."""
    kinds: dict[str, type[int | str]] = dict.fromkeys(
        ("rounds", "batch_size", "seed", "evaluate_every", "max_examples"), int
    )
    kinds |= dict.fromkeys(("shortfall", "experiment", "out"), str)
    found = dict(given)
    for name in given:
        key, kind = name.replace("_", "-"), kinds.get(name, float)
        if key not in run_config:
            continue
        value: Any = run_config[key]
        if value == "" and name in ("experiment", "out"):  # Flower takes no key that an app does not declare
            continue
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ConfigError(f"{key} is {value!r} in the run configuration; expected {kind.__name__}.")
        found[name] = float(value) if kind is float else value
    return found


def recording(server: Server, algorithm: str, data: str) -> Callable[[RunState], AbstractContextManager[Recorder]]:
    """Who keeps the records of a server's run, from the state it starts from."""
    settings, method, path = server.settings, server.algorithm, server.out
    assert path is not None
    config = RunConfig(
        algorithm=algorithm,
        options=dataclasses.asdict(method) if dataclasses.is_dataclass(method) else {},
        rounds=settings.rounds,
        participation=settings.participation,
        learning_rate=settings.learning_rate,
        batch_size=settings.batch_size,
        seed=settings.seed,
        device="remote",
        dtype=str(server.model.params.dtype).removeprefix("torch."),
        chunk_size=1,
        gradients="auto",
        evaluate_every=settings.evaluate_every,
        evaluate_on="test",
        evaluate_train=False,
        fine_tune=(),
        checkpoint_every=1,
        data=data,
        source=None,
        fingerprint="",
        model=None,
        loss=None,
        has_own_method=not is_named(algorithm, method),
    )

    @contextmanager
    def recorded(state: RunState) -> Iterator[Recorder]:
        recorder = Recorder(path, config, method, server.clients, state)
        try:
            yield recorder
        except DivergedError:
            recorder.conclude("diverged")
            raise

    return recorded
