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
from typing import Any

import torch
from torch import Tensor

from selffl.algorithms.layers import ClassBias
from selffl.algorithms.solver import descend
from selffl.data.federation import Rows
from selffl.engines.cohort import CohortEngine, RunState
from selffl.errors import ConfigError, DivergedError, unknown_name
from selffl.maths.frequencies import class_shifts
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

    def __repr__(self) -> str:
        """What there is, in a line."""
        views = ", ".join(self.numbers)
        return f"Evaluation({', '.join(self.metrics)} of {len(self.labels)} rows; views {views})"

    @property
    def num_rows(self) -> Tensor:
        """Of each client, ``[M]``."""
        return self.offset.diff()

    @property
    def metrics(self) -> tuple[str, ...]:
        """Those of the task, and the user's own."""
        return (*self.measure.metrics, *self.own_metrics)

    def of_clients(self, metric: str, view: str) -> Tensor:
        """Of each client ``[M]``; NaN where it has no rows, or what takes two classes for want of a second."""
        for what, name, known in (("metric", metric, self.metrics), ("view", view, self.numbers)):
            if name not in known:
                raise unknown_name(what, name, known)
        if metric in self.own_metrics:
            return self.own_numbers[view][metric]
        if metric == "auc":
            sizes = self.num_rows.tolist()
            pairs = zip(self.numbers[view].split(sizes), self.labels.split(sizes), strict=True)  # type: ignore[no-untyped-call]
            return torch.tensor([auc(scores, labels) for scores, labels in pairs], dtype=torch.float64)
        if metric == "balanced_accuracy":
            return self._balanced(view, self._owner, len(self.num_rows))
        return _rooted(metric, self._totals(metric, view) / self.num_rows)

    @property
    def _owner(self) -> Tensor:
        """The client of each row."""
        return torch.arange(len(self.num_rows)).repeat_interleave(self.num_rows)

    def of_rows(self, metric: str, view: str) -> Tensor:
        """What a metric is the mean of, row by row."""
        log_losses = [self.log_losses[view]] if view in self.log_losses else []
        return self.measure.averaged(metric, [self.numbers[view], *log_losses], self.labels)

    def _balanced(self, view: str, group: Tensor, num_groups: int, rows: Tensor | None = None) -> Tensor:
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
            return float(self._balanced(view, torch.zeros_like(self._owner), 1, is_chosen))
        rows, by_client = self.num_rows[chosen], self.of_clients(metric, view)
        # Defined within a client: between clients scores need not be comparable.
        if metric == "auc" or metric in self.own_metrics:
            found = by_client[chosen]
            is_there = ~found.isnan()
            return float((found * rows)[is_there].sum() / rows[is_there].sum())
        return float(_rooted(metric, self._totals(metric, view)[chosen].sum() / rows.sum()))

    def top(self, metric: str, view: str) -> float:
        """The same over the tenth of clients with the most training rows."""
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


def _rooted(metric: str, mean: Tensor) -> Tensor:
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


def evaluate(
    engine: CohortEngine,
    source: ModelSource,
    state: RunState,
    rows: Rows,
    measure: Measure,
    fine_tune: Sequence[int] = (),
    class_frequencies: bool = False,
    neighbours: int | None = None,
    own_metrics: Mapping[str, Metric] | None = None,
    label_scale: LabelScale | None = None,
    is_over: bool = False,
    evaluated: Tensor | None = None,
) -> Evaluation:
    """Evaluate all clients on ``rows``, as many at a time as train at a time; all in the user's units.

    Where only some are ``evaluated [K]``, by their positions, the rows are theirs alone.  Once training ``is_over``,
    personal models are those after the clients' closing visit.
    """
    scale = label_scale or LabelScale()
    shared = state.server.params
    metrics, train = own_metrics or {}, source.federation.train
    everyone = torch.arange(source.federation.num_clients, device=shared.device)
    chosen = everyone if evaluated is None else evaluated.to(shared.device)
    num_clients, ids = len(chosen), [source.federation.clients[client] for client in chosen.tolist()]
    of_classes = class_shifts_of(source) if class_frequencies else None
    head = None if neighbours is None else check_neighbours(source.model, source.loss, train.sample, neighbours)
    found: dict[str, list[tuple[Tensor, ...]]] = {}
    by_client: dict[str, dict[str, Tensor]] = {}

    def note(view: str, own: Rows, params: Tensor | None = None, outputs: Tensor | None = None) -> None:
        values = by_client.setdefault(
            view, {name: torch.full((num_clients,), torch.nan, dtype=torch.float64) for name in metrics}
        )

        def measured(position: int, outputs: Tensor, labels: Tensor) -> None:
            client = start + position
            for name, metric in metrics.items():
                values[name][client] = metric.of_client(name, ids[client], outputs, labels)

        on_client = scale.for_user(measured) if metrics else None
        if outputs is not None:
            numbers = numbers_of_outputs(outputs, own, measure, on_client)
        else:
            assert params is not None
            numbers = numbers_of_rows(source.model, params, own, measure, source.gradients, on_client)
        found.setdefault(view, []).append(tuple(each.cpu() for each in numbers))

    size = engine.chunk_size or num_clients
    for start in range(0, num_clients, size):
        stop = min(start + size, num_clients)
        clients = chosen[start:stop]
        own = of_clients(rows, start, stop)
        personal = engine.personal(state, clients, is_over=is_over)
        if not personal.isfinite().all():
            lost = (~personal.isfinite().all(-1)).nonzero().flatten().tolist()
            first = start + lost[0]
            raise DivergedError(
                f"the personal models of {len(lost)} clients of {engine.algorithm.name} are not finite after round "
                f"{state.round_number} (the first is client {first if engine.names is None else engine.names[first]}); "
                "expected finite numbers. Lower the learning rate or the penalty."
            )
        note("personal", own, personal)
        note("global", own, shared)
        starts = {"personal": personal, "global": shared.expand(len(clients), -1)}
        if of_classes is not None:
            bias, shifts = of_classes
            starts[WITH_CLASSES] = bias.added(starts["global"], shifts[clients])
            note(WITH_CLASSES, own, starts[WITH_CLASSES])
        if neighbours is not None and head is not None:
            theirs = of_clients(train, start, stop) if evaluated is None else train.subset(clients)
            mixed = outputs_with_neighbours(source.model, head, shared, theirs, own, neighbours)
            note(WITH_NEIGHBOURS, own, outputs=mixed)
        is_shared = personal.data_ptr() == shared.data_ptr()  # one model for everybody, expanded: no need to tune twice
        for kind, params in starts.items():
            task, done = source.task(clients, state.round_number + 1).at_home(), 0
            tuned = params
            for steps in sorted(fine_tune):
                if kind == "global" and is_shared:
                    found.setdefault(f"global+{steps}", []).append(found[f"personal+{steps}"][-1])
                    by_client[f"global+{steps}"] = by_client[f"personal+{steps}"]
                    continue
                # Going on from where it was would lose what an optimiser remembers of the steps before.
                first = 0 if task.optimiser.num_states else done
                tuned = descend(task, tuned if first else params, steps - first, first_draw=first)
                done = steps
                note(f"{kind}+{steps}", own, tuned)
    by_size = train.num_examples[chosen].argsort(descending=True, stable=True)
    numbers = {view: [torch.cat(each) for each in zip(*parts, strict=True)] for view, parts in found.items()}
    return Evaluation(
        measure,
        scale.unscale(rows.labels).cpu(),
        rows.offset.cpu(),
        {view: each[0] for view, each in numbers.items()},
        by_size.cpu(),
        log_losses={view: each[1] for view, each in numbers.items() if len(each) > 1},
        majority=Majority.of(measure, train if evaluated is None else train.subset(chosen), rows),
        own_metrics=metrics,
        own_numbers=by_client,
    )


def of_clients(rows: Rows, start: int, stop: int) -> Rows:
    """Rows of clients ``start`` to ``stop - 1``."""
    low, high = int(rows.offset[start]), int(rows.offset[stop])
    return Rows(rows.features[low:high], rows.labels[low:high], rows.offset[start : stop + 1] - low)
