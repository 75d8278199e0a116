"""Which answers of clients can be used: what one may say of itself, send back and have found.

Each function raises a `DataError` that says what was found and what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import RecordDict
from torch import Tensor

from selffl.engines.flower.messages import Answer, arrays_of, metrics_of, read, shown
from selffl.engines.flower.records import unpack
from selffl.engines.flower.site import VIEWS
from selffl.errors import DataError
from selffl.training.metrics import HIGHER_IS_BETTER

MAX_GRADIENTS = 10**12  # that a client may say it has spent in a round
MAX_LOSS = 1e15  # of a client's rows together: beyond that their sum could leave the finite numbers


@dataclass(frozen=True)
class EvaluationSums:
    """What one client found on its test rows: sums over them, or of AUC and the user's own metrics the value."""

    num_train: int
    num_test: int
    metrics: tuple[str, ...]
    totals: Mapping[str, float]  # "personal.accuracy": the sum over rows


@dataclass(frozen=True)
class Alone:
    """What one client found on its test rows after training by itself; NaN where its model was lost."""

    num_test: int
    metrics: tuple[str, ...]
    num_won: int  # rows that the personal model has right, and this one wrong
    num_lost: int
    totals: Mapping[str, float]  # "alone.accuracy": the sum over rows, or of AUC and the user's metrics the value


def check_answer(content: RecordDict, experiment: str, round_number: int, client: str) -> None:
    """Whether it answers what was asked, and at a cost that can be."""
    answer = read(Answer, content)
    for name, value in {"experiment": experiment, "round_number": round_number, "client": client}.items():
        if getattr(answer, name) != value:
            raise DataError(f"the {name} of the answer is {shown(getattr(answer, name))}; expected {value!r}.")
    if not 0 <= answer.num_gradients <= MAX_GRADIENTS:
        raise DataError(f"num_gradients is {answer.num_gradients}; expected 0 to {MAX_GRADIENTS}.")


@dataclass(frozen=True)
class Bounds:
    """What the numbers of a client's answer have to be like.

    Attributes:
        template: An upload of one client, for names and shapes.
        max_examples: The most rows that a client may claim to have.
        own_metrics: Names of the user's own metrics, which every client has to measure as well.
        withheld: Where uploads say nothing of a model ``[P]``.
    """

    template: Any
    max_examples: int
    own_metrics: tuple[str, ...] = ()
    withheld: Tensor | None = None

    def upload(self, content: RecordDict) -> tuple[Any, int]:
        """A client's upload, of the right names, shapes and types, and what it cost.

        Whether training can give its numbers, `selffl.engines.claims` says, for every engine.
        """
        return unpack(self.template, arrays_of(content), self.withheld), read(Answer, content).num_gradients

    def scores(self, content: RecordDict) -> EvaluationSums:
        """What a client found, once it is seen to be possible."""
        counts, values = self._read_numbers(content, ("num_train", "num_test"))
        metrics = tuple(name.removeprefix("personal.") for name in values if name.startswith("personal."))
        self._check_metrics(values, VIEWS, metrics, counts["num_test"])
        return EvaluationSums(counts["num_train"], counts["num_test"], metrics, values)

    def alone(self, content: RecordDict) -> Alone:
        """What a client found without the others, once it is seen to be possible."""
        counts, values = self._read_numbers(content, ("num_test", "num_won", "num_lost"))
        metrics = tuple(name.removeprefix("alone.") for name in values)
        self._check_metrics(values, ("alone",), metrics, counts["num_test"])
        if counts["num_won"] + counts["num_lost"] > counts["num_test"]:
            raise DataError(
                f"{counts['num_won']} rows are won and {counts['num_lost']} lost; expected as many as rows."
            )
        return Alone(counts["num_test"], metrics, counts["num_won"], counts["num_lost"], values)

    def _read_numbers(self, content: RecordDict, names: tuple[str, ...]) -> tuple[dict[str, int], dict[str, float]]:
        """The counts of an answer by these names, and its other numbers."""
        record = metrics_of(content)
        counts: dict[str, int] = {}
        for name in names:
            count = record.get(name)
            if type(count) is not int or not 0 <= count <= self.max_examples:
                raise DataError(f"{name} is {shown(count)}; expected a whole number from 0 to {self.max_examples}.")
            counts[name] = count
        return counts, {name: value for name, value in record.items() if name not in counts}  # type: ignore[misc]

    def _check_metrics(
        self, values: Mapping[str, Any], views: Sequence[str], metrics: Sequence[str], rows: int
    ) -> None:
        """Refuse metrics that nobody knows, and numbers that they cannot be."""
        known = [metric for metric in metrics if metric in HIGHER_IS_BETTER or metric in self.own_metrics]
        is_known = len(known) == len(metrics) > len(self.own_metrics) and set(self.own_metrics) <= set(known)
        if not is_known or values.keys() != {f"{view}.{metric}" for view in views for metric in metrics}:
            expected = ", ".join(dict.fromkeys((*HIGHER_IS_BETTER, *self.own_metrics)))
            own = f", with {' and '.join(self.own_metrics)}" if self.own_metrics else ""
            raise DataError(
                f"the metrics are {shown(list(values))}; expected some of {expected}{own}, {' and '.join(views)}."
            )
        for name, value in values.items():
            view, _, metric = name.partition(".")
            most = {"accuracy": float(rows), "auc": 1.0}.get(metric, MAX_LOSS)
            least = -most if metric == "loss" or metric in self.own_metrics else 0.0
            is_value = metric == "auc" or metric in self.own_metrics  # of the client, not a sum over its rows
            if rows == 0 and not is_value:  # a sum over nothing
                least = most = 0.0
            # What is not defined, and what was lost where training alone diverged.
            may_be_unknown = is_value or view == "alone"
            is_unknown = may_be_unknown and isinstance(value, float) and math.isnan(value)
            if type(value) is not float or not (is_unknown or least <= value <= most):
                raise DataError(f"{name} is {shown(value)}; expected a number that {metric} can be.")
