"""The rounds of a run: trained in stretches, evaluated and written in between."""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from selffl.algorithms import Algorithm
from selffl.algorithms.local import training_alone
from selffl.algorithms.optimisers import check_optimiser, optimiser_of
from selffl.algorithms.records import map_tensors
from selffl.budget import budget_of
from selffl.data.federation import Federation, Rows
from selffl.engines.cohort import CohortEngine, RunState
from selffl.engines.rounds import RoundReport
from selffl.errors import ConfigError, DataError, DivergedError
from selffl.runs.evaluation import Evaluation, evaluate, of_clients, or_none, score_names
from selffl.runs.folder import REPORTED, Records, Row, RunConfig, RunFolder
from selffl.runs.gain import gain_columns, gain_scores
from selffl.runs.predict import inputs_of_rows
from selffl.training.answers import LabelScale, present_model
from selffl.training.blocks import Loss, deterministic_cudnn
from selffl.training.evaluation import check_numbers, check_rows, loss_for, numbers_of_rows
from selffl.training.flat import FlatModel, check_parameters
from selffl.training.losses import name_of
from selffl.training.metrics import Metric, by_loss
from selffl.training.model import ModelSource

Method = Algorithm[Any, Any, Any, Any]
OnRound = Callable[[Row], None]

LOST_SECONDS = 60.0  # of training, at most, between two checkpoints
SMALL = 1 << 17  # parameters of a model that one thread trains best


class Training:
    """What a run computes with: the rows and the model on their device, and the engine."""

    def __init__(
        self,
        config: RunConfig,
        method: Method,
        module: nn.Module,
        loss: Loss | None,
        federation: Federation,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        self.method, self.federation = method, federation
        self.metrics = dict(metrics or {})  # the user's own
        check_parameters(module)
        self.module = copy.deepcopy(module)  # whatever the user does with it later
        device, dtype = torch.device(config.device), getattr(torch, config.dtype)
        self.model = FlatModel(copy.deepcopy(module).to(device, dtype))
        if loss is None:
            loss = loss_for(self.model, federation.train, federation.preparation)
            config = replace(config, loss=name_of(loss))
        self.label_scale = LabelScale.of(federation.preparation, loss)
        rows = self.label_scale.scale_rows(federation).to(device, dtype)
        parts = [part for part in (rows.train, rows.test, rows.validation) if part is not None and len(part.labels)]
        self.loss = loss
        measures = [check_rows(self.model, loss, part, list(rows.clients)) for part in parts]
        measure = measures[0] if all(found == measures[0] for found in measures) else by_loss(loss)
        self.measure = self.label_scale.in_user_units(measure)
        self.config = replace(config, metrics=(*self.measure.metrics, *self.metrics))
        optimiser = optimiser_of(**config.optimiser)
        check_optimiser(optimiser, method)
        self.source = ModelSource(
            rows,
            self.model,
            loss,
            config.learning_rate,
            config.batch_size,
            config.seed,
            config.gradients,
            optimiser,
        )
        self.engine = CohortEngine(
            method, self.source, config.participation, config.seed, config.chunk_size or self._chunk_size()
        )
        chosen: Rows | None = getattr(rows, config.evaluate_on)
        if chosen is None:
            raise ConfigError("the federation has no validation rows; make it with a validation_fraction above 0.")
        self.evaluated = chosen
        self.first = self.model.params  # what training begins with
        if config.gain:
            training_alone(method)  # refuse a method that cannot be held against it
            if not len(chosen.labels):
                raise DataError(f"gain=True, and no client has {config.evaluate_on} rows; expected some to measure by.")
        self._try_metrics()

    def evaluation(self, state: RunState, rows: Rows | None = None, fine_tune: Sequence[int] = ()) -> Evaluation:
        """All clients on the rows that the run is evaluated on, or on others."""
        chosen = self.evaluated if rows is None else rows
        return evaluate(
            self.engine, self.source, state, chosen, self.measure, fine_tune, self.metrics, self.label_scale
        )

    def present(self, params: Tensor) -> nn.Module:
        """A model as the user gets it: in the units of the table that the rows came from, if they did."""
        return present_model(self.model.load(params), self.federation.preparation, self.label_scale)

    def inputs_of(self, rows: Any) -> Tensor:
        """A user's rows, in the user's units, as the model takes them."""
        known = self.source.federation.train.features
        found = inputs_of_rows(rows, self.federation.preparation, tuple(known.shape[1:]))
        if found.is_floating_point() and not known.is_floating_point():
            raise DataError(f"features are {found.dtype}; expected whole numbers, as those that were trained on.")
        check_numbers(self.model, found)
        return found.to(known)

    def alone(self) -> tuple[Evaluation, Tensor]:
        """All clients on the same rows after as many rounds by themselves, and whose models were lost ``[M]``.

        The same first model, cohorts, minibatches and optimiser; nothing of it counts as work of the run.
        """
        engine = replace(self.engine, algorithm=training_alone(self.method))
        state = engine.advance(engine.start(self.first), self.config.rounds, consume=True)
        lost = ~state.memory.params.isfinite().all(-1)
        kept = map_tensors(lambda tensor: tensor.masked_fill(lost.view(-1, *[1] * (tensor.ndim - 1)), 0), state.memory)
        found = evaluate(
            engine,
            self.source,
            replace(state, memory=kept),
            self.evaluated,
            self.measure,
            (),
            self.metrics,
            self.label_scale,
        )
        return found, lost.cpu()

    def _try_metrics(self) -> None:
        """Compute the user's own metrics once, of the first client that has rows: better now than after training."""
        has_rows = self.evaluated.num_examples.nonzero()
        if not self.metrics or not len(has_rows):
            return
        first = int(has_rows[0])

        def measured(_: int, outputs: Tensor, labels: Tensor) -> None:
            for name, metric in self.metrics.items():
                metric.of_client(name, self.federation.clients[first], outputs, labels)

        own = of_clients(self.evaluated, first, first + 1)
        numbers_of_rows(self.model, self.model.params, own, self.measure, on_client=self.label_scale.for_user(measured))

    def _chunk_size(self) -> int:
        """Clients that train at once, where nobody has said: as many as the cache holds, or on a GPU the memory."""
        budget = budget_of(torch.device(self.config.device))
        return budget.clients_in_training(self.model.params.nbytes, self.source.optimiser.num_states)

    def next_stop(self, round_number: int) -> int:
        """The next round after which something is written or evaluated."""
        steps = [every for every in (self.config.evaluate_every, self.config.checkpoint_every) if every]
        return min([(round_number // every + 1) * every for every in steps] + [self.config.rounds])

    def is_due(self, every: int, round_number: int) -> bool:
        """Whether what happens every so many rounds happens after this one; the last round always counts."""
        return round_number == self.config.rounds or (every > 0 and round_number % every == 0)


@contextmanager
def few_threads(training: Training) -> Iterator[None]:
    """One thread while a small model trains on a CPU, unless the user has said how many.

    Threads that share out a few thousand numbers wait for each other: no faster on a machine that is otherwise idle,
    and several times slower on one that is not.
    """
    before = torch.get_num_threads()
    is_small = training.model.params.numel() <= SMALL and training.config.device == "cpu"
    if is_small and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@deterministic_cudnn()
def go_on(
    training: Training,
    state: RunState,
    records: Records,
    folder: RunFolder | None,
    seconds: float,
    on_round: OnRound | None,
) -> RunState:
    """Train from ``state`` to the last round, adding to ``records`` and writing as it goes; the state at the end."""
    config = training.config
    began = time.perf_counter() - seconds
    spent = int(state.num_gradients.sum())
    ids = list(training.federation.clients)
    waiting: list[tuple[Row, list[Row]]] = []  # rounds not yet written

    def note(report: RoundReport) -> None:
        nonlocal spent
        spent += int(report.num_gradients.sum())
        found, taking_part = rows_of(training.method, report, ids)
        row = dict.fromkeys(history_columns(config)) | found
        row |= {"gradient_evaluations": spent, "seconds": round(time.perf_counter() - began, 3)}
        records.history.append(row)
        records.participation.extend(taking_part)
        waiting.append((row, taking_part))
        if report.round_number != stop:  # the last round of a stretch is written with its evaluation
            publish()

    def publish() -> None:
        for row, taking_part in waiting:
            if folder is not None:
                folder.add_round(row, taking_part)
            if on_round is not None:
                on_round(row)
        waiting.clear()

    pace, saved = math.inf, time.perf_counter()  # seconds a round; when the last checkpoint was written
    while state.round_number < config.rounds:
        first, since = state.round_number, time.perf_counter()
        stop = training.next_stop(first)
        if folder is not None and config.checkpoint_every:  # at most a minute is ever lost; the pace is measured first
            stop = min(stop, first + max(int(LOST_SECONDS / pace), 1))
        try:
            state = training.engine.advance(state, stop - state.round_number, note, consume=True)
            if training.is_due(config.evaluate_every, stop):
                _evaluate(training, state, records)
        except DivergedError:
            publish()
            if folder is not None:
                folder.add_evaluation(replace(records, summary=summary(config, len(ids), records, "diverged")))
            raise
        publish()
        status = "finished" if stop == config.rounds and not config.gain else "running"
        records.summary = summary(config, len(ids), records, status)
        if folder is not None:
            folder.add_evaluation(records)
            now = time.perf_counter()
            pace = (now - since) / (stop - first)
            is_due = training.is_due(config.checkpoint_every, stop) or now - saved > LOST_SECONDS
            if config.checkpoint_every and is_due:
                folder.add_checkpoint(state, now - began)
                saved = now
    if config.gain:  # after the checkpoint: what has been trained is safe while clients train alone
        found = gain_columns(training.evaluation(state), *training.alone())
        for place, row in enumerate(records.clients):
            row.update({name: cells[place] for name, cells in found.items()})
        records.summary = summary(config, len(ids), records, "finished")
        if folder is not None:
            folder.add_evaluation(records)
    return state


def _evaluate(training: Training, state: RunState, records: Records) -> None:
    """Add the scores of the moment to the last row of the history, and make the rows of the clients."""
    config = training.config
    fine_tune = config.fine_tune if state.round_number == config.rounds else ()  # it costs as much as training
    found = training.evaluation(state, fine_tune=fine_tune)
    records.history[-1] |= found.scores()
    if config.evaluate_train:
        fitted = training.evaluation(state, training.source.federation.train)
        for metric in config.metrics:
            records.history[-1][f"train_{metric}"] = or_none(fitted.weighted(metric, "personal"))
    rows = training.federation.train.num_examples, training.evaluated.num_examples
    records.clients = client_rows(config, training.method, training.federation.clients, *rows, state, records, found)
    if training.federation.cluster is not None:
        for row, cluster in zip(records.clients, training.federation.cluster.tolist(), strict=True):
            row["cluster"] = cluster


def rows_of(method: Method, report: RoundReport, ids: Sequence[Hashable]) -> tuple[Row, list[Row]]:
    """A round as a row of the history, and its clients as rows of their own."""
    row: Row = {"round": report.round_number, "clients": report.clients.shape[-1]}
    inter = method.inter_variance(report.server)
    if inter is not None:
        row["inter_variance"] = float(inter)
    if not method.recorded:
        return row, []
    found = dict(report.recorded)
    intra = method.intra_variance(report.server, report.clients, report.recorded)
    if intra is not None:
        found["intra_variance"] = intra
        known = found["intra_variance"][~found["intra_variance"].isnan()]
        row["intra_variance"] = float(known.double().mean()) if len(known) else None
    if "num_local_steps" in found:
        row["num_local_steps"] = float(found["num_local_steps"].double().mean())
    if (weight := method.weights(report.server, report.clients, report.upload)) is not None:
        found["weight"] = weight
    if "weight" in found:
        found["weight"] = found["weight"].double() / found["weight"].double().sum()
    cells = {name: _or_none(values) for name, values in found.items()}
    return row, [
        {
            "round": report.round_number,
            "client": ids[client],
            **{name: cells[name][place] if name in cells else None for name in REPORTED},
        }
        for place, client in enumerate(report.clients.tolist())
    ]


def client_rows(
    config: RunConfig,
    method: Method,
    clients: Sequence[Hashable],
    num_train: Tensor,
    num_test: Tensor,
    state: RunState,
    records: Records,
    found: Evaluation,
) -> list[Row]:
    """One row per client, as of now."""
    prefixes = {"": "personal", "global_": "global"}
    prefixes |= {f"{view.replace('+', '_after_')}_": view for view in found.numbers if "+" in view}
    columns: dict[str, list[Any]] = {
        "client": list(clients),
        "num_train": num_train.tolist(),
        "num_test": num_test.tolist(),
        **{
            f"{prefix}{metric}": _or_none(found.of_clients(metric, view))
            for metric in config.metrics
            for prefix, view in prefixes.items()
        },
        **{name: _or_none(values) for name, values in found.majority_of_clients().items()},
        "rounds": state.num_rounds.tolist(),
        "gradient_evaluations": state.num_gradients.tolist(),
    }
    if records.participation:
        last = {row["client"]: row for row in records.participation}  # later rows take the place of earlier ones
        for name in ("num_local_steps", "intra_variance"):
            columns[name] = [last.get(client, {}).get(name) for client in columns["client"]]
    if (gains := method.gains(state.server, num_train.to(state.server.params.device))) is not None:
        columns["predicted_gain"] = _or_none(gains.masked_fill(state.num_rounds == 0, torch.nan))
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def partition_rows(federation: Federation) -> list[Row]:
    """How many rows of each class each client holds, for training and for testing.

    A class that a client does not hold has no line.  Nothing where there are no classes.
    """
    if federation.num_classes is None or federation.train.labels.ndim != 1:
        return []
    counts = torch.stack([federation.class_counts(part) for part in ("train", "test")], -1)
    held = counts.sum(-1).nonzero()
    names = federation.classes or range(counts.shape[1])
    return [
        {"client": federation.clients[client], "class": names[label], "num_train": train, "num_test": test}
        for (client, label), (train, test) in zip(held.tolist(), counts[tuple(held.T)].tolist(), strict=True)
    ]


def _or_none(values: Tensor) -> list[float | None]:
    return [or_none(value) for value in values.tolist()]


def summary(config: RunConfig, num_clients: int, records: Records, status: str) -> Row:
    """The run in one row: the numbers of its last evaluation."""
    # The accuracies are named for every task, so that a script finds them (empty) where there are none.
    names = list(dict.fromkeys([*score_names(("accuracy",)), *_score_names(config)]))
    scored = next((row for row in reversed(records.history) if any(row.get(name) is not None for name in names)), {})
    last: Row = records.history[-1] if records.history else {}
    return {
        "algorithm": config.algorithm,
        "data": config.data,
        "seed": config.seed,
        "rounds": last.get("round", 0),
        **{name: scored.get(name) for name in names},
        "gradient_evaluations": last.get("gradient_evaluations", 0),
        "seconds": last.get("seconds", 0.0),
        "evaluated_in_round": scored.get("round"),
        "evaluated_on": config.evaluate_on,
        "clients": num_clients,
        "participation": config.participation,
        **(gain_scores(records.clients) if config.gain else {}),
        "status": status,
    }


def _score_names(config: RunConfig) -> list[str]:
    trained = [f"train_{metric}" for metric in config.metrics] if config.evaluate_train else []
    return score_names(config.metrics, config.fine_tune) + trained


def every_of(rounds: int, evaluate_every: int | None) -> int:
    """Rounds between evaluations; a twentieth of all where nobody has said."""
    return max(rounds // 20, 1) if evaluate_every is None else evaluate_every


def history_columns(config: RunConfig) -> list[str]:
    """Columns of a run's history."""
    first = ["round", "clients", "gradient_evaluations", "seconds"]
    return [*first, "num_local_steps", "intra_variance", "inter_variance", *_score_names(config)]
