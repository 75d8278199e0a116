"""What a run writes down: rows of its tables, made of reports, and told to observers."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from selffl.algorithms.records import sent_tensors, tensors_of
from selffl.data.federation import Federation
from selffl.engines.cohort import RunState
from selffl.engines.rounds import RoundReport
from selffl.errors import ConfigError, DivergedError
from selffl.privacy import spent_privacy, spent_row_privacy
from selffl.runs import folder as files
from selffl.runs.class_answers import count_answers
from selffl.runs.evaluation import Evaluation, or_none, prefix_of, score_names
from selffl.runs.folder import INTERVAL, Records, Row, history_columns, participation_columns, score_columns
from selffl.runs.gain import gain_scores
from selffl.runs.methods import Method
from selffl.runs.observers import Observer
from selffl.runs.recipe import Recipe
from selffl.training.metrics import HIGHER_IS_BETTER


@dataclass(frozen=True)
class Evaluated:
    """All clients, evaluated after a round."""

    evaluation: Evaluation
    num_train: Tensor  # training rows of each client, [M]
    beside: Mapping[str, Evaluation] = field(default_factory=dict)  # the same on other parts of the rows, by name
    cluster: Tensor | None = None  # of each client, [M], where clients have clusters
    clients: Tensor | None = None  # positions of those that were evaluated, [K]; none: all
    classes: Sequence[Any] | None = None  # their names, where they have some


@dataclass(frozen=True)
class TrainedAlone:
    """What all clients have without the others: columns of the table of clients."""

    columns: dict[str, list[Any]]


Report = RoundReport | Evaluated | TrainedAlone


class Recorder:
    """Makes records of a run's reports and tells observers; as a context, it ends with the status of the run."""

    def __init__(
        self,
        recipe: Recipe,
        method: Method,
        clients: Iterable[Hashable],
        records: Records,
        observers: Sequence[Observer] = (),
        seconds: float = 0.0,
    ) -> None:
        self.recipe, self.records = recipe, records
        self._method, self._clients, self._observers = method, list(clients), list(observers)
        self._began, self._updated = time.perf_counter() - seconds, time.perf_counter()
        self._held: list[tuple[Row, list[Row]]] = []  # a round that waits for its scores
        self._visit_bytes: int | None = None

    def __enter__(self) -> Self:
        """Tell that training begins."""
        for observer in self._observers:
            observer.started(self.recipe, self.records)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell how it ended."""
        status = "finished" if kind is None else "diverged" if issubclass(kind, DivergedError) else "stopped"
        if status == "diverged":
            self._publish()
            self._summarise(status, None)
        for observer in self._observers:
            observer.ended(replace(self.records, summary=self.records.summary | {"status": status}))

    def take(self, state: RunState, report: Report) -> None:
        """Add a report to the records; ``state`` is where training stands."""
        if isinstance(report, RoundReport):
            self._add_round(state, report)
        elif isinstance(report, Evaluated):
            self._add_scores(state, report)
        else:
            for row, *cells in zip(self.records.clients, *report.columns.values(), strict=True):
                row.update(zip(report.columns, cells, strict=True))
            self._update(state, "finished")

    def _add_round(self, state: RunState, report: RoundReport) -> None:
        self._note_round(state, report)
        if self.recipe.is_evaluated(report.round_number):  # its scores are still to come
            return
        self._publish()
        is_late = time.perf_counter() - self._updated > files.LOST_SECONDS
        if self.recipe.is_checkpointed(report.round_number) or is_late:
            self._update(state)

    def _note_round(self, state: RunState, report: RoundReport) -> None:
        found, participants = round_rows(self._method, report, self._clients)
        row = dict.fromkeys(history_columns(self.recipe)) | found
        spent, seconds = int(state.num_gradients.sum()), time.perf_counter() - self._began
        row |= {"gradient_evaluations": spent, "bytes_sent": self._bytes_sent(report), "seconds": round(seconds, 3)}
        self.records.history.append(row)
        self.records.participation.extend(participants)
        self._held.append((row, participants))

    def _bytes_sent(self, report: RoundReport) -> int | None:
        """Bytes up to this round, both ways; none where earlier rounds have not been counted."""
        before = self.records.history[-1].get("bytes_sent") if self.records.history else 0
        number = report.clients.shape[-1]
        if before is None or number == 0:
            return before
        if self._visit_bytes is None:
            self._visit_bytes = visit_bytes(self._method, report)
        return int(before) + number * self._visit_bytes

    def _add_scores(self, state: RunState, report: Evaluated) -> None:
        self.records.history[-1] |= score_cells(self.recipe, report)
        if self.recipe.row_noise_multiplier:
            spent, delta = _spent_on_rows(self.recipe, self._method, report, state)
            known = [each for each in spent if each is not None]
            self.records.history[-1] |= {"row_epsilon": max(known, default=None), "row_delta": delta}
        before = self.records.clients
        self.records.clients = client_rows(self.recipe, self._method, self._clients, report, state, self.records)
        if "validation" in report.beside:
            note_best_rounds(self.recipe, self.records.clients, before, report.beside["validation"], state.round_number)
        if report.cluster is not None:
            clusters = report.cluster if report.clients is None else report.cluster[report.clients]
            for client, cluster in zip(self.records.clients, clusters.tolist(), strict=True):
                client["cluster"] = cluster
        self.records.answers = answer_rows(self.records.clients, report)
        self._publish()
        self._update(state)

    def _publish(self) -> None:
        for row, participants in self._held:
            for observer in self._observers:
                observer.round_ended(row, participants)
        self._held.clear()

    def _update(self, state: RunState, status: str | None = None) -> None:
        is_over = state.round_number == self.recipe.rounds and not self.recipe.gain
        self._summarise(status or ("finished" if is_over else "running"), state)
        for observer in self._observers:
            observer.updated(self.records, state)
        self._updated = time.perf_counter()

    def _summarise(self, status: str, state: RunState | None) -> None:
        self.records.summary = summary_row(self.recipe, self._method, len(self._clients), self.records, status, state)


def visit_bytes(method: Method, report: RoundReport) -> int:
    """Bytes of the numbers that a client is sent and sends back in a round, without what the method withholds."""
    if not method.is_federated:
        return 0
    down = sent_tensors(method.broadcast(report.server, report.clients[..., :1]))
    found, withheld = sum(each.nbytes for each in down.values()), method.withheld(report.server)
    for name, each in tensors_of(report.upload).items():
        own = each if method.uploads_add else each.select(report.clients.ndim - 1, 0)
        is_cut = withheld is not None and own.shape == withheld.shape
        number = own.numel() - (int(withheld.sum()) if withheld is not None and is_cut else 0)
        found += number * report.dtypes.get(name, each.dtype).itemsize  # sums have more digits than what is sent
    return found


def round_rows(method: Method, report: RoundReport, ids: Sequence[Hashable]) -> tuple[Row, list[Row]]:
    """A round as a row of the history, and its clients as rows of their own."""
    row: Row = {"round": report.round_number, "clients": report.clients.shape[-1]}
    if not row["clients"]:  # too few answered, over a network, and nothing was learned
        return row, []
    row |= spread_cells(method, report.server)
    if not method.fields_by_client():
        return row, []
    _check_recorded(report)
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
    unknown: list[Any] = [None] * len(report.clients)
    columns = dict.fromkeys(participation_columns(method.recorded), unknown)
    columns |= {name: _as_cells(values) for name, values in found.items() if name in columns}
    columns |= {"round": [report.round_number] * len(report.clients)}
    columns |= {"client": [ids[client] for client in report.clients.tolist()]}
    return row, [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def _as_cells(values: Tensor) -> list[float | None]:
    """Numbers as cells of a table, which has no true and false."""
    return _or_none(values.to(torch.int64) if values.dtype == torch.bool else values)


def _check_recorded(report: RoundReport) -> None:
    """Refuse recorded fields that are no column of a table, or another one than those it has anyway."""
    for name, values in report.recorded.items():
        if values.shape != report.clients.shape or name in ("round", "client"):
            raise ConfigError(
                f"{name!r} is to be recorded, and has the shape {tuple(values.shape)} in the uploads; expected one "
                f"number for each client, {tuple(report.clients.shape)}, and no field called 'round' or 'client'. "
                "Change what the method says in `recorded`, or its upload."
            )


def spread_cells(method: Method, server: Any) -> Row:
    """What a server knows of how clients vary: σ₀², and between what it lies; nothing where the method learns none."""
    row: Row = {}
    if (inter := method.inter_variance(server)) is not None:
        row["inter_variance"] = float(inter)
    if (interval := method.inter_variance_interval(server)) is not None:
        row |= dict(zip(INTERVAL, (or_none(float(end)) for end in interval), strict=True))
    return row


def score_cells(recipe: Recipe, report: Evaluated) -> Row:
    """What an evaluation adds to its round's row of the history."""
    cells = report.evaluation.scores()
    for part, evaluation in report.beside.items():
        for metric in recipe.metrics:
            cells[f"{part}_{metric}"] = or_none(evaluation.weighted(metric, "personal"))
    return cells


def forget_closing_scores(records: Records, earlier: Recipe, recipe: Recipe, method: Method) -> bool:
    """Empty the scores of the round that a run had ended with, if it goes on: they are those after a closing visit.

    Whether it has done so.
    """
    last: Row = records.history[-1] if records.history else {"round": 0}
    if not method.has_closing_visit or not last["round"] == earlier.rounds < recipe.rounds:
        return False
    last |= dict.fromkeys(score_columns(earlier))
    return True


def client_rows(
    recipe: Recipe,
    method: Method,
    clients: Sequence[Hashable],
    report: Evaluated,
    state: RunState,
    records: Records,
) -> list[Row]:
    """One row per client that is evaluated, as of now."""
    num_train, found = report.num_train, report.evaluation
    chosen = slice(None) if report.clients is None else report.clients
    columns: dict[str, list[Any]] = {
        "client": list(clients) if report.clients is None else [clients[each] for each in report.clients.tolist()],
        "num_train": num_train[chosen].tolist(),
        "num_test": found.num_rows.tolist(),
        **{
            f"{prefix_of(view)}{metric}": _or_none(found.of_clients(metric, view))
            for metric in recipe.metrics
            for view in found.numbers
        },
        **{name: _or_none(values) for name, values in found.majority_of_clients().items()},
        "rounds": state.num_rounds[chosen].tolist(),
        "gradient_evaluations": state.num_gradients[chosen].tolist(),
    }
    if recipe.row_noise_multiplier:
        spent = _spent_on_rows(recipe, method, report, state)[0]
        columns["row_epsilon"] = spent if report.clients is None else [spent[each] for each in report.clients.tolist()]
    if records.participation:
        last = {row["client"]: row for row in records.participation}  # later rows take the place of earlier ones
        for name in ("num_local_steps", "intra_variance"):
            columns[name] = [last.get(client, {}).get(name) for client in columns["client"]]
    sizes = num_train.to(state.server.params.device)
    latest = {
        "intra_variance": method.intra_variance_by_rows(state.server, sizes),
        "predicted_gain": method.gains(state.server, sizes),
    }
    for name, values in latest.items():
        if values is not None:
            columns[name] = _or_none(values.masked_fill(state.num_rounds == 0, torch.nan)[chosen])
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def answer_rows(clients: Sequence[Row], report: Evaluated) -> list[Row]:
    """How many rows of each class of a client got which answer, where that was kept; ``clients`` are their rows."""
    found = report.evaluation
    if found.class_answers is None:
        return []
    classes = found.measure.classes_of(found.labels)
    ids = [row["client"] for row in clients]
    return count_answers(found.class_answers, classes, found.offset, ids, report.classes)


def _spent_on_rows(
    recipe: Recipe, method: Method, report: Evaluated, state: RunState
) -> tuple[list[float | None], float]:
    """ε of replacing one row of each client, after the rounds that it took part in, and the δ of all of them."""
    batches = (report.num_train + recipe.batch_size - 1) // recipe.batch_size
    counts = state.num_rounds.cpu() * torch.as_tensor(method.sent_gradients(batches))
    return spent_row_privacy(recipe.row_noise_multiplier, recipe.batch_size, report.num_train.tolist(), counts.tolist())


def note_best_rounds(
    recipe: Recipe, clients: Sequence[Row], before: Sequence[Row], validation: Evaluation, round_number: int
) -> None:
    """Add to the rows of clients the round in which each was best on its own validation rows, and its scores then.

    ``before`` are the rows of the evaluation before this one, if there was one.  Equals go to the first.
    """
    metric = recipe.metrics[0]
    own = recipe.own_metrics.get(metric)
    direction = 1.0 if (HIGHER_IS_BETTER[metric] if own is None else own) else -1.0
    noted = f"validation_{metric}"
    names = ("best_round", noted, *(f"in_best_round_{name}" for name in recipe.metrics))
    for place, (row, found) in enumerate(
        zip(clients, _or_none(validation.of_clients(metric, "personal")), strict=True)
    ):
        earlier = before[place].get(noted) if before else None
        is_better = found is not None and (earlier is None or direction * found > direction * earlier)
        now = dict(zip(names, (round_number, found, *(row[name] for name in recipe.metrics)), strict=True))
        row |= now if is_better else {name: before[place].get(name) if before else None for name in names}


def partition_rows(federation: Federation) -> list[Row]:
    """How many rows of each class each client holds, for training and for testing.

    A class that a client does not hold has no line.  Nothing where there are no classes.
    """
    if federation.train.is_on_demand or federation.num_classes is None or federation.train.labels.ndim != 1:
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


def summary_row(
    recipe: Recipe, method: Method, num_clients: int, records: Records, status: str, state: RunState | None
) -> Row:
    """The run in one row: the numbers of its last evaluation, and what ``state``, where there is one, knows."""
    # The accuracies are named for every task, so that a script finds them (empty) where there are none.
    names = list(dict.fromkeys([*score_names(("accuracy",)), *score_columns(recipe)]))
    scored = next((row for row in reversed(records.history) if any(row.get(name) is not None for name in names)), {})
    last: Row = records.history[-1] if records.history else {}
    noisy = next((row for row in reversed(records.history) if row.get("row_delta") is not None), {})
    # Closing rounds, which are no rounds of the history, may know better than the last that anybody took part in.
    spread = next((row for row in reversed(records.history) if row.get("inter_variance") is not None), {})
    if state is not None and spread:
        spread = spread_cells(method, state.server)
        if (multiple := method.closing_multiple(state.server)) is not None:
            spread["closing_multiple"] = round(float(multiple), 6)  # no more digits than a float32 has
    return {
        "algorithm": recipe.algorithm,
        "data": recipe.data,
        "seed": recipe.seed,
        "rounds": last.get("round", 0),
        **{name: scored.get(name) for name in names},
        **{name: spread.get(name) for name in ("inter_variance", *INTERVAL, "closing_multiple")},
        "gradient_evaluations": last.get("gradient_evaluations", 0),
        "bytes_sent": last.get("bytes_sent", 0),
        "seconds": last.get("seconds", 0.0),
        "evaluated_in_round": scored.get("round"),
        "evaluated_on": recipe.evaluate_on,
        "clients": num_clients,
        "participation": recipe.participation,
        **(gain_scores(records.clients) if recipe.gain else {}),
        # The largest ε of any client's row at the last evaluation, and its δ; nothing without noise.
        **({name: noisy.get(name) for name in ("row_epsilon", "row_delta")} if recipe.row_noise_multiplier else {}),
        **spent_privacy(recipe.noise_multiplier, num_clients, recipe.participation, last.get("round", 0)),
        "status": status,
    }
