"""The one evaluator: every method, every client, on rows that training never sees.

Personal models are those that the method itself names (``Algorithm.personal``).  Views after k steps of fine-tuning
are kept apart from those before, under names of their own; the steps use training rows.  So is the global model with
each client's class frequencies, or with its nearest neighbours, which are those of its training rows.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from selffl.algorithms.layers import ClassBias
from selffl.algorithms.solver import descend
from selffl.data.federation import Rows
from selffl.engines.cohort import CohortEngine, RunState
from selffl.errors import ConfigError, DivergedError, check_known
from selffl.maths.frequencies import class_shifts
from selffl.runs.class_answers import MOST_ROWS, ClassAnswers
from selffl.training.answers import LabelScale
from selffl.training.evaluation import numbers_of_outputs, numbers_of_rows
from selffl.training.metrics import (
    HIGHER_IS_BETTER,
    IMBALANCED_SHARE,
    Majority,
    Measure,
    Metric,
    auc,
    balanced_accuracy,
)
from selffl.training.model import ModelSource
from selffl.training.neighbours import check_neighbours, outputs_with_neighbours

# What always answering one class scores: a client's own most frequent training class, or the federation's; and how much
# of the training rows the latter has.
LARGEST_SHARE = "largest_class_share"
MAJORITY = ("majority_accuracy", "federation_majority_accuracy", LARGEST_SHARE)

WITH_CLASSES = "global+classes"  # the view of the global model with each client's class frequencies
WITH_NEIGHBOURS = "global+neighbours"  # and with the nearest of its training rows


def prefix_of(view: str) -> str:
    """How the names of a view's numbers begin: ``global+classes+5`` is ``global_with_classes_after_5_``."""
    for with_more in ("classes", "neighbours"):
        view = view.replace(f"+{with_more}", f"_with_{with_more}")
    return "" if view == "personal" else f"{view.replace('+', '_after_')}_"


def score_names(
    metrics: Sequence[str],
    fine_tune: Sequence[int] = (),
    class_frequencies: bool = False,
    neighbours: int | None = None,
) -> list[str]:
    """Names of the numbers in a summary: personal models first, then the global one, then views of the last round.

    Where answers are classes, what the constant answer scores stands at the end.
    """
    with_classes = [WITH_CLASSES] if class_frequencies else []
    with_neighbours = [] if neighbours is None else [WITH_NEIGHBOURS]
    tuned = [f"{view}+{steps}" for steps in sorted(fine_tune) for view in ("personal", "global", *with_classes)]
    found = [
        *(f"{part}_{metric}" for metric in metrics for part in ("weighted", "top10", "worst10", "global")),
        *(("pooled_auc", "global_pooled_auc") if "auc" in metrics else ()),
        *(
            f"{prefix_of(view)}{part}_{metric}"
            for metric in metrics
            for view in with_classes + with_neighbours + tuned
            for part in ("weighted", "top10", "worst10")
        ),
        *(MAJORITY if "accuracy" in metrics else ()),
    ]
    return [sys.intern(name) for name in found]  # keys of every round's row: one text for all of them


def leading_metric(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """What runs are told by first, from their summaries or rows of their histories; none where nothing is known.

    The first metric of the task.  Where one class has more than `IMBALANCED_SHARE` of the training rows (the mean over
    the runs), balanced accuracy: the constant answer has half of it, and nearly all of the accuracy.
    """
    scored = [
        [
            name.removeprefix("weighted_")
            for name, value in row.items()
            if name.startswith("weighted_") and value is not None
        ]
        for row in rows
    ]
    scored = [known for known in scored if known]
    if not scored:
        return None
    shares = [float(row[LARGEST_SHARE]) for row in rows if row.get(LARGEST_SHARE) is not None]
    is_imbalanced = bool(shares) and sum(shares) / len(shares) > IMBALANCED_SHARE
    if is_imbalanced and all("balanced_accuracy" in known for known in scored):
        return "balanced_accuracy"
    return scored[0][0]


def majority_sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the constant answer scores, where that is worth saying: where balanced accuracy leads; means over runs."""
    if leading_metric(rows) != "balanced_accuracy":
        return ""
    share, right = (
        statistics.fmean(float(row[name]) for row in rows if row.get(name) is not None)
        for name in (LARGEST_SHARE, "federation_majority_accuracy")
    )
    said = f"One class has {100 * share:.1f} % of the training rows"
    return f"{said}: always answering it gets {100 * right:.1f} % accuracy."


@dataclass(frozen=True)
class Evaluation:
    """What the measure of the task makes of each row of each client, by view; on the CPU.

    Views are ``personal``, ``global`` and, with each client's class frequencies, ``global+classes``; after k steps of
    fine-tuning they are ``personal+k``, ``global+k`` and ``global+classes+k``; with the nearest of each client's
    training rows ``global+neighbours``.  ``numbers`` are the rows' answers; where answers are classes, ``log_losses``
    are there as well.
    """

    measure: Measure
    labels: Tensor  # [rows, ...]
    offset: Tensor  # [M + 1]
    numbers: dict[str, Tensor]  # view: [rows]
    by_size: Tensor  # clients, those with the most training rows first, [M]
    log_losses: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)  # view: [rows]
    majority: Majority | None = field(default=None, kw_only=True)  # what the constant answer scores
    own_metrics: Mapping[str, Metric] = field(default_factory=dict, kw_only=True)  # the user's own, by name
    own_numbers: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict, kw_only=True)  # view: metric: [M]
    class_answers: ClassAnswers | None = field(default=None, kw_only=True)  # of personal models, where they are kept

    def __repr__(self) -> str:
        """What there is, in a line."""
        views = ", ".join(self.numbers)
        return f"Evaluation({', '.join(self.metrics)} of {len(self.labels)} rows; views {views})"

    @property
    def num_rows(self) -> Tensor:
        """Number of rows of each client, ``[M]``."""
        return self.offset.diff()

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics of the task, and the user's own."""
        return (*self.measure.metrics, *self.own_metrics)

    def of_clients(self, metric: str, view: str) -> Tensor:
        """Scores of each client ``[M]``; NaN where it has no rows, or what takes two classes for want of a second."""
        for what, name, known in (("metric", metric, self.metrics), ("view", view, self.numbers)):
            check_known(what, name, known)
        if metric in self.own_metrics:
            return self.own_numbers[view][metric]
        if metric == "auc":
            sizes = self.num_rows.tolist()
            pairs = zip(self.numbers[view].split(sizes), self.labels.split(sizes), strict=True)  # type: ignore[no-untyped-call]
            return torch.tensor([auc(scores, labels) for scores, labels in pairs], dtype=torch.float64)
        if metric == "balanced_accuracy":
            return self._balanced_accuracy(view, self._owner, len(self.num_rows))
        return _take_root(metric, self._totals(metric, view) / self.num_rows)

    @property
    def _owner(self) -> Tensor:
        """The client of each row."""
        return torch.arange(len(self.num_rows)).repeat_interleave(self.num_rows)

    def of_rows(self, metric: str, view: str) -> Tensor:
        """What a metric is the mean of, row by row."""
        log_losses = [self.log_losses[view]] if view in self.log_losses else []
        return self.measure.averaged(metric, [self.numbers[view], *log_losses], self.labels)

    def _balanced_accuracy(self, view: str, group: Tensor, num_groups: int, rows: Tensor | None = None) -> Tensor:
        """Balanced accuracy of each group of rows, or of some of the rows."""
        chosen = slice(None) if rows is None else rows
        is_right, classes = self.of_rows("balanced_accuracy", view), self.measure.classes_of(self.labels)
        return balanced_accuracy(is_right[chosen], classes[chosen], group[chosen], num_groups)

    def _totals(self, metric: str, view: str) -> Tensor:
        """Sums over each client's rows, ``[M]``."""
        values = self.of_rows(metric, view).double()
        return torch.zeros(len(self.num_rows), dtype=torch.float64).index_add_(0, self._owner, values)

    def weighted(self, metric: str, view: str, clients: Tensor | None = None) -> float:
        """Over all rows, of all clients or some: they weigh as much as they have rows."""
        chosen = slice(None) if clients is None else clients
        if metric == "balanced_accuracy":
            is_chosen = None if clients is None else torch.isin(self._owner, clients)
            return float(self._balanced_accuracy(view, torch.zeros_like(self._owner), 1, is_chosen))
        rows, by_client = self.num_rows[chosen], self.of_clients(metric, view)
        # Defined within a client: between clients scores need not be comparable.
        if metric == "auc" or metric in self.own_metrics:
            found = by_client[chosen]
            is_there = ~found.isnan()
            return float((found * rows)[is_there].sum() / rows[is_there].sum())
        return float(_take_root(metric, self._totals(metric, view)[chosen].sum() / rows.sum()))

    def top(self, metric: str, view: str) -> float:
        """Mean over the tenth of clients with the most training rows."""
        return self.weighted(metric, view, self.by_size[: max(len(self.by_size) // 10, 1)])

    def worst(self, metric: str, view: str) -> float:
        """Mean of the worst tenth of clients, among those that have a number."""
        found = self.of_clients(metric, view)
        own = self.own_metrics.get(metric)
        is_higher_better = HIGHER_IS_BETTER[metric] if own is None else own.higher_is_better
        ranked = found[~found.isnan()].sort(descending=not is_higher_better).values
        return float(ranked[: max(len(ranked) // 10, 1)].mean())

    def scores(self) -> dict[str, float | None]:
        """The numbers of a summary, as `score_names` names them; None where there is nothing to test on."""
        found = {}
        for metric in self.metrics:
            for view in self.numbers:
                prefix = prefix_of(view)
                if metric == "auc" and "+" not in view:  # over all rows at once, as if all scores were one model's
                    found[f"{prefix}pooled_auc"] = auc(self.numbers[view], self.labels)
                if view == "global":
                    found[f"{prefix}{metric}"] = self.weighted(metric, view)
                    continue
                found[f"{prefix}weighted_{metric}"] = self.weighted(metric, view)
                found[f"{prefix}top10_{metric}"] = self.top(metric, view)
                found[f"{prefix}worst10_{metric}"] = self.worst(metric, view)
        if self.majority is not None:
            totals = (self.majority.own, self.majority.federation)
            rates = [float(total.sum() / self.num_rows.sum()) for total in totals]
            found |= dict(zip(MAJORITY, [*rates, self.majority.largest_share], strict=True))
        return {name: or_none(value) for name, value in found.items()}

    def majority_of_clients(self) -> dict[str, Tensor]:
        """Columns of the table of clients, ``[M]``: what the constant answer scores; none without classes."""
        if self.majority is None:
            return {}
        totals = (self.majority.own, self.majority.federation)
        return {name: total / self.num_rows for name, total in zip(MAJORITY, totals, strict=False)}


def or_none(value: float) -> float | None:
    """A number, or None for NaN: a table has empty cells, and JSON has no NaN."""
    return None if math.isnan(value) else value


def _take_root(metric: str, mean: Tensor) -> Tensor:
    """An error is the root of a mean square: in the unit of the targets."""
    return mean.sqrt() if metric == "error" else mean


def class_shifts_of(source: ModelSource) -> tuple[ClassBias, Tensor]:
    """What each client's class frequencies add to the scores ``[M, K]``, and where; refused where there are no classes.

    Frequencies are those of training rows.
    """
    bias, params = source.model.class_bias, source.model.params
    found = f"{type(source.model.module).__name__} ends in no linear layer with a bias"
    if bias is not None:
        everyone = torch.arange(source.federation.num_clients, device=params.device)
        counts = source.task(everyone, 0).at_home().class_counts(bias.num_classes)
        if counts.any():
            return bias, class_shifts(counts.double()).to(params)
        found = "the bias adds to no scores of classes, as far as labels, loss and outputs tell"
    raise ConfigError(
        f"class_frequencies is True, and {found}; expected labels that are classes, the cross-entropy or logistic loss "
        "without weights, and a model whose outputs are those of a last nn.Linear with a bias. Leave class_frequencies "
        "out, or change these."
    )


@dataclass(frozen=True)
class Views:
    """What of the models is evaluated, and on which rows.

    Attributes:
        part: Of the rows: ``train``, ``test`` or ``validation``.
        fine_tune: Numbers of local steps after which models are evaluated once more.
        class_frequencies: Whether the global model is, with each client's class frequencies.
        neighbours: k, where the global model is, with each client's nearest training rows.
        is_over: Whether training is, so that personal models are those after the clients' closing visit.
        keep_answers: Whether it is kept which class every row got, where answers are classes; of at most `MOST_ROWS`.
    """

    part: str
    fine_tune: tuple[int, ...] = ()
    class_frequencies: bool = False
    neighbours: int | None = None
    is_over: bool = False
    keep_answers: bool = False


@dataclass(frozen=True)
class EvaluationOrder:
    """What a process has to be told to evaluate the clients of its shards."""

    views: Views
    round_number: int
    server: Any


@dataclass
class Measured:
    """What is found of the clients of a shard, by view."""

    numbers: dict[str, list[tuple[Tensor, ...]]] = field(default_factory=dict)  # of their rows, chunk by chunk
    own: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # the user's own metrics, by client
    answers: list[ClassAnswers] = field(default_factory=list)  # of personal models, where they are kept, chunk by chunk


@dataclass(frozen=True)
class ShardEvaluations:
    """Evaluates clients on ``rows``, shard by shard, as many at a time as train at a time; in the user's units.

    Where only some are ``evaluated [K]``, by their positions, the rows are theirs alone.
    """

    engine: CohortEngine
    source: ModelSource
    state: RunState
    rows: Rows
    measure: Measure
    views: Views
    own_metrics: Mapping[str, Metric]
    label_scale: LabelScale
    evaluated: Tensor | None = None

    @property
    def chosen(self) -> Tensor:
        """The clients that are evaluated, by their positions, ascending."""
        device = self.state.server.params.device
        everyone = torch.arange(self.source.federation.num_clients, device=device)
        return everyone if self.evaluated is None else self.evaluated.to(device)

    @cached_property
    def _class_shifts(self) -> tuple[ClassBias, Tensor]:
        return class_shifts_of(self.source)

    def measure_shard(self, shard: int) -> Measured:
        """The clients of one shard."""
        found, chosen = Measured(), self.chosen
        part = self.engine.shards.slices(chosen.cpu(), self.source.federation.num_clients)[shard]
        size = self.engine.chunk_size or max(part.stop - part.start, 1)
        for start in range(part.start, part.stop, size):
            self._measure_chunk(found, chosen, start, min(start + size, part.stop))
        return found

    def _measure_chunk(self, found: Measured, chosen: Tensor, start: int, stop: int) -> None:
        """Add what is found of the clients in places ``start`` to ``stop`` of the chosen."""
        source, state, views = self.source, self.state, self.views
        shared = self.engine.algorithm.global_model(state.server)
        clients, own, train = chosen[start:stop], of_clients(self.rows, start, stop), self.source.federation.train
        personal = self.engine.personal(state, clients, is_over=views.is_over)
        self._check_finite(personal, clients)
        note = partial(self._note, found, clients, own)
        note("personal", personal)
        note("global", shared)
        starts = {"personal": personal, "global": shared.expand(len(clients), -1)}
        if views.class_frequencies:
            bias, shifts = self._class_shifts
            starts[WITH_CLASSES] = bias.add_shift(starts["global"], shifts[clients])
            note(WITH_CLASSES, starts[WITH_CLASSES])
        if views.neighbours is not None:
            head = check_neighbours(source.model, source.loss, train.sample, views.neighbours)
            theirs = of_clients(train, start, stop) if self.evaluated is None else train.subset(clients)
            mixed = outputs_with_neighbours(source.model, head, shared, theirs, own, views.neighbours)
            note(WITH_NEIGHBOURS, outputs=mixed)
        is_shared = personal.data_ptr() == shared.data_ptr()  # one model for everybody, expanded: no need to tune twice
        for kind, params in starts.items():
            task, done = source.task(clients, state.round_number + 1).at_home(), 0
            tuned = params
            for steps in sorted(views.fine_tune):
                if kind == "global" and is_shared:
                    found.numbers[f"global+{steps}"] = found.numbers[f"personal+{steps}"]
                    found.own[f"global+{steps}"] = found.own[f"personal+{steps}"]
                    continue
                # Going on from where it was would lose what an optimiser remembers of the steps before.
                first = 0 if task.optimiser.num_states else done
                tuned = descend(task, tuned if first else params, steps - first, first_draw=first)
                done = steps
                note(f"{kind}+{steps}", tuned)

    def _note(
        self, found: Measured, clients: Tensor, own: Rows, view: str, params: Tensor | None = None,
        outputs: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Add what models, or their outputs, come to on the rows of some clients."""
        values = {name: torch.full((len(clients),), torch.nan, dtype=torch.float64) for name in self.own_metrics}
        answers = ClassAnswers.of_rows(len(own.labels)) if view == "personal" and self._keeps_answers else None
        has_log_odds, bounds = "auc" in self.measure.metrics, own.offset.tolist()

        def measured(position: int, outputs: Tensor, labels: Tensor) -> None:
            client = self.source.federation.clients[int(clients[position])]
            for name, metric in self.own_metrics.items():
                values[name][position] = metric.of_client(name, client, outputs, labels)
            if answers is not None and not has_log_odds:
                answers.note(bounds[position], outputs)

        is_wanted = bool(self.own_metrics) or (answers is not None and not has_log_odds)
        on_client = self.label_scale.for_user(measured) if is_wanted else None
        if outputs is not None:
            numbers = numbers_of_outputs(outputs, own, self.measure, on_client)
        else:
            assert params is not None
            numbers = numbers_of_rows(self.source.model, params, own, self.measure, self.source.gradients, on_client)
        found.numbers.setdefault(view, []).append(tuple(each.cpu() for each in numbers))
        if answers is not None:
            found.answers.append(answers)
            if has_log_odds:
                answers.note_log_odds(numbers[0])
        before = found.own.setdefault(view, {})
        for name, value in values.items():
            before[name] = torch.cat([before[name], value]) if name in before else value

    @property
    def _keeps_answers(self) -> bool:
        return self.views.keep_answers and self.measure.has_classes and len(self.rows.labels) <= MOST_ROWS

    def _check_finite(self, personal: Tensor, clients: Tensor) -> None:
        if personal.isfinite().all():
            return
        lost = clients[~personal.isfinite().all(-1)].tolist()
        names = self.engine.names
        raise DivergedError(
            f"the personal models of {len(lost)} clients of {self.engine.algorithm.name} are not finite after round "
            f"{self.state.round_number} (the first is client {lost[0] if names is None else names[lost[0]]}); "
            "expected finite numbers. Lower the learning rate or the penalty."
        )

    def join(self, shards: Sequence[Measured]) -> Evaluation:
        """All clients, of what was found of each shard, in their order."""
        rows, chosen, train = self.rows, self.chosen, self.source.federation.train
        views = list(next((each.numbers for each in shards if each.numbers), {}))
        found = {view: [part for each in shards for part in each.numbers.get(view, ())] for view in views}
        own = {view: [each.own[view] for each in shards if view in each.own] for view in views}
        numbers = {view: [torch.cat(each) for each in zip(*parts, strict=True)] for view, parts in found.items()}
        return Evaluation(
            self.measure,
            self.label_scale.unscale(rows.labels).cpu(),
            rows.offset.cpu(),
            {view: each[0] for view, each in numbers.items()},
            train.num_examples[chosen].argsort(descending=True, stable=True).cpu(),
            log_losses={view: each[1] for view, each in numbers.items() if len(each) > 1},
            majority=Majority.of(self.measure, train if self.evaluated is None else train.subset(chosen), rows),
            own_metrics=self.own_metrics,
            own_numbers={
                view: {name: torch.cat([each[name] for each in parts]) for name in self.own_metrics}
                for view, parts in own.items()
            },
            class_answers=ClassAnswers.join([part for each in shards for part in each.answers]),
        )


def of_clients(rows: Rows, start: int, stop: int) -> Rows:
    """Rows of clients ``start`` to ``stop - 1``."""
    low, high = int(rows.offset[start]), int(rows.offset[stop])
    return Rows(rows.features[low:high], rows.labels[low:high], rows.offset[start : stop + 1] - low)
