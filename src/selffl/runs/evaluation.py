"""The one evaluator: every method, every client, on rows that training never sees.

Personal models are those that the method itself names (``Algorithm.personal``).  Views after k steps of fine-tuning
are kept apart from those before, under names of their own; the steps use training rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selffl.algorithms.solver import descend
from selffl.data.federation import Rows
from selffl.engines.cohort import CohortEngine, RunState
from selffl.errors import DivergedError
from selffl.training.evaluation import correct_predictions
from selffl.training.model import ModelSource


def score_names(fine_tune: Sequence[int] = ()) -> list[str]:
    """Names of the numbers in a summary: personal models first, then the global one, then the fine-tuned views."""
    return [
        *("weighted_accuracy", "top10_accuracy", "worst10_accuracy", "global_accuracy"),
        *(
            f"{kind}_after_{steps}_{part}_accuracy"
            for steps in sorted(fine_tune)
            for kind in ("personal", "global")
            for part in ("weighted", "top10", "worst10")
        ),
    ]


@dataclass(frozen=True)
class Evaluation:
    """Right answers of each client on its own rows, by view.

    Views are ``personal``, ``global`` and, after k steps of fine-tuning, ``personal+k`` and ``global+k``.
    """

    num_rows: Tensor  # [M]
    num_right: dict[str, Tensor]  # view: [M]
    by_size: Tensor  # clients, those with the most training rows first, [M]

    def accuracy(self, view: str) -> Tensor:
        """Of each client ``[M]``; NaN where it has no rows."""
        return self.num_right[view].double() / self.num_rows

    def weighted(self, view: str) -> float:
        """Over all rows: clients weigh as much as they have rows."""
        return float(self.num_right[view].sum().double() / self.num_rows.sum())

    def top(self, view: str) -> float:
        """The same over the tenth of clients with the most training rows."""
        largest = self.by_size[: self._tenth]
        return float(self.num_right[view][largest].sum().double() / self.num_rows[largest].sum())

    def worst(self, view: str) -> float:
        """Mean accuracy of the worst tenth of clients, among those with rows."""
        accuracy = self.accuracy(view)[self.num_rows > 0]
        return float(accuracy.sort().values[: self._tenth].mean())

    @property
    def _tenth(self) -> int:
        return max(len(self.num_rows) // 10, 1)

    def scores(self) -> dict[str, float | None]:
        """The numbers of a summary, as `score_names` names them; None where there is nothing to test on."""
        found = {
            "weighted_accuracy": self.weighted("personal"),
            "top10_accuracy": self.top("personal"),
            "worst10_accuracy": self.worst("personal"),
            "global_accuracy": self.weighted("global"),
        }
        for view in self.num_right:
            kind, plus, steps = view.partition("+")
            if plus:
                prefix = f"{kind}_after_{steps}"
                found[f"{prefix}_weighted_accuracy"] = self.weighted(view)
                found[f"{prefix}_top10_accuracy"] = self.top(view)
                found[f"{prefix}_worst10_accuracy"] = self.worst(view)
        return {name: None if math.isnan(value) else value for name, value in found.items()}


def evaluate(
    engine: CohortEngine, source: ModelSource, state: RunState, rows: Rows, fine_tune: Sequence[int] = ()
) -> Evaluation:
    """Evaluate all clients on ``rows``, as many at a time as train at a time."""
    shared = state.server.params
    found: dict[str, list[Tensor]] = {}

    def note(view: str, params: Tensor, own: Rows) -> None:
        found.setdefault(view, []).append(correct_predictions(source.model, params, own, source.gradients))

    num_clients = source.federation.num_clients
    size = engine.chunk_size or num_clients
    for start in range(0, num_clients, size):
        stop = min(start + size, num_clients)
        clients = torch.arange(start, stop, device=shared.device)
        own = _of_clients(rows, start, stop)
        personal = engine.personal(state, clients)
        if not personal.isfinite().all():
            lost = int((~personal.isfinite().all(-1)).sum())
            raise DivergedError(
                f"the personal models of {lost} clients of {engine.algorithm.name} are not finite after round "
                f"{state.round_number}; expected finite numbers. Lower the learning rate or the penalty."
            )
        note("personal", personal, own)
        note("global", shared, own)
        is_shared = personal.data_ptr() == shared.data_ptr()  # one model for everybody, expanded: no need to tune twice
        for kind, params in (("personal", personal), ("global", shared.expand(len(clients), -1))):
            task, done = source.task(clients, state.round_number + 1), 0
            for steps in sorted(fine_tune):
                if kind == "global" and is_shared:
                    found.setdefault(f"global+{steps}", []).append(found[f"personal+{steps}"][-1])
                    continue
                params = descend(task, params, steps - done, first_draw=done)
                done = steps
                note(f"{kind}+{steps}", params, own)
    by_size = source.federation.train.num_examples.argsort(descending=True, stable=True)
    return Evaluation(rows.num_examples, {view: torch.cat(parts) for view, parts in found.items()}, by_size)


def _of_clients(rows: Rows, start: int, stop: int) -> Rows:
    """Rows of clients ``start`` to ``stop - 1``."""
    low, high = int(rows.offset[start]), int(rows.offset[stop])
    return Rows(rows.features[low:high], rows.labels[low:high], rows.offset[start : stop + 1] - low)
