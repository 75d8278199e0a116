"""A run over Flower with the records of `selffl.train`: the same files, made of what the clients report.

Per client the server learns how many rows there are and a sum over the test rows for each metric; no row, no answer to
a row and no personal model leaves a client.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from selffl.algorithms.contract import Population
from selffl.engines.cohort import RoundReport, RunState
from selffl.engines.flower.client import VIEWS
from selffl.engines.flower.server import ServerApp, numbered
from selffl.engines.flower.server import server_app as plain_app
from selffl.engines.flower.strategy import Scores, SelfFLStrategy
from selffl.errors import DivergedError
from selffl.runs import folder as files
from selffl.runs.evaluation import Evaluation
from selffl.runs.folder import Records, Row, RunConfig, RunFolder
from selffl.runs.loop import Method, client_rows, history_columns, rows_of, summary
from selffl.runs.train import is_named, named_method
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
        measure=Measure(metrics, lambda outputs, labels: outputs),  # rows were measured where they are
        labels=torch.zeros(0),
        offset=torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)]),
        numbers=dict.fromkeys(VIEWS, torch.zeros(0)),
        by_size=num_train.argsort(descending=True, stable=True),
        totals=totals,
    )


class Recorder:
    """Writes a run's folder as the run goes."""

    def __init__(self, path: Path, config: RunConfig, clients: Sequence[Hashable], state: RunState) -> None:
        self._config, self._clients = config, clients
        self._path, self.records = path, Records()
        if state.round_number and (path / files.CONFIG).is_file():
            self.records = files.read_records(path).up_to(state.round_number)
            self._config = replace(config, metrics=files.read_config(path).metrics)
            ids = {str(client): client for client in clients}
            for row in (*self.records.clients, *self.records.participation):
                row["client"] = ids[row["client"]]
        last: Row = self.records.history[-1] if self.records.history else {}
        self._began = time.perf_counter() - (last.get("seconds") or 0.0)
        self._begin()

    def _begin(self) -> None:
        self._folder = RunFolder(self._path, history_columns(self._config))
        self._path.mkdir(parents=True, exist_ok=True)
        self._folder.begin(self._config, self.records)

    def is_evaluated(self, round_number: int) -> bool:
        """Whether that round's row has scores."""
        name = f"weighted_{self._config.metrics[0]}"
        return any(row["round"] == round_number and row.get(name) is not None for row in self.records.history)

    def trained(self, report: RoundReport, state: RunState) -> None:
        """One more row of the history, and one for each client that took part."""
        self._add(state, *rows_of(report, self._clients))

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
        found = reported(scores, len(self._clients))
        self._config = replace(self._config, metrics=found.measure.metrics)
        self.records.history[-1] |= found.scores()
        heard = [scores.get(client) for client in range(len(self._clients))]
        num_train = torch.tensor([0 if own is None else own.num_train for own in heard])
        self.records.clients = client_rows(
            self._config, self._clients, num_train, found.num_rows, state, self.records, found
        )
        status = "finished" if state.round_number == self._config.rounds else "running"
        self._begin()  # anew: the last row has changed, and the first evaluation says what is measured
        self.conclude(status)

    def conclude(self, status: str) -> None:
        """Write the clients and the summary."""
        self.records.summary = summary(self._config, len(self._clients), self.records, status)
        self._folder.add_evaluation(self.records)


def server_app(
    model: nn.Module,
    algorithm: str | Method,
    clients: Sequence[Hashable],
    *,
    out: str | Path,
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
    experiment: str | None = None,
    population: Population | None = None,
    dtype: torch.dtype = torch.float32,
    data: str = "remote",
    on_end: Callable[[SelfFLStrategy], None] | None = None,
) -> ServerApp:
    """The server of `selffl.engines.flower.server`, whose arguments these are, with records in the folder ``out``.

    ``data`` is what the records call the clients' rows, which the server does not see.
    """
    name, method = named_method(algorithm)
    ids, path = numbered(clients), Path(out)
    every = max(rounds // 20, 1) if evaluate_every is None else evaluate_every
    config = RunConfig(
        algorithm=name,
        options=dataclasses.asdict(method) if dataclasses.is_dataclass(method) else {},
        rounds=rounds,
        participation=participation,
        learning_rate=learning_rate,
        batch_size=batch_size,
        seed=seed,
        device="remote",
        dtype=str(dtype).removeprefix("torch."),
        chunk_size=1,
        gradients="auto",
        evaluate_every=every,
        evaluate_on="test",
        evaluate_train=False,
        fine_tune=(),
        checkpoint_every=1,
        data=data,
        source=None,
        fingerprint="",
        model=None,
        loss=None,
        has_own_method=not is_named(name, method),
    )

    @contextmanager
    def recorded(state: RunState) -> Iterator[Recorder]:
        with files.locked(path):
            recorder = Recorder(path, config, ids, state)
            try:
                yield recorder
            except DivergedError:
                recorder.conclude("diverged")
                raise

    return plain_app(
        model,
        method,
        ids,
        rounds=rounds,
        participation=participation,
        learning_rate=learning_rate,
        batch_size=batch_size,
        seed=seed,
        out=path,
        evaluate_every=every,
        quorum=quorum,
        shortfall=shortfall,
        round_seconds=round_seconds,
        connect_seconds=connect_seconds,
        experiment=experiment,
        population=population,
        dtype=dtype,
        watcher=recorded,
        on_end=on_end,
    )
