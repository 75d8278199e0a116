"""Which answers of clients can be used: what one may say of itself, send back and have found.

Each function raises a `DataError` that says what was found and what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import RecordDict
from torch import Tensor

from selffl.algorithms.contract import Algorithm
from selffl.algorithms.records import tensors_of
from selffl.engines.flower.client import VIEWS
from selffl.engines.flower.messages import Answer, arrays_of, metrics_of, read, shown
from selffl.engines.flower.records import models_of, unpack
from selffl.errors import DataError
from selffl.training.metrics import HIGHER_IS_BETTER

MOST_GRADIENTS = 10**12  # that a client may say it has spent in a round
MOST_LOSS = 1e15  # of a client's rows together: beyond that their sum could leave the finite numbers
ROUNDED = 1.001  # times its bound that a number may be: soft labels are parts of rows, and sums of them round


@dataclass(frozen=True)
class Scores:
    """What one client found on its test rows: sums over them, or for AUC the value itself."""

    num_train: int
    num_test: int
    metrics: tuple[str, ...]
    totals: Mapping[str, float]  # "personal.accuracy": the sum over rows


def check_answer(content: RecordDict, experiment: str, round_number: int, client: str) -> None:
    """Whether it answers what was asked, and at a cost that can be."""
    answer = read(Answer, content)
    for name, value in {"experiment": experiment, "round_number": round_number, "client": client}.items():
        if getattr(answer, name) != value:
            raise DataError(f"the {name} of the answer is {shown(getattr(answer, name))}; expected {value!r}.")
    if not 0 <= answer.num_gradients <= MOST_GRADIENTS:
        raise DataError(f"num_gradients is {answer.num_gradients}; expected 0 to {MOST_GRADIENTS}.")


@dataclass(frozen=True)
class Bounds:
    """What the numbers of a client's answer have to be like.

    Attributes:
        algorithm: The method, which says what may be unknown and what counts rows.
        template: An upload of one client, for names and shapes.
        params: A global model, for its size and type.
        num_clients: M.
        max_examples: The most rows that a client may claim to have.
    """

    algorithm: Algorithm[Any, Any, Any, Any]
    template: Any
    params: Tensor
    num_clients: int
    max_examples: int

    def upload(self, content: RecordDict) -> tuple[Any, int]:
        """A client's upload and what it cost, once they are seen to be numbers that training can give."""
        upload = unpack(self.template, arrays_of(content))
        models = models_of(upload, self.params.shape[-1])
        # Squares of models are summed over coordinates and clients, and have to stay finite.
        longest = math.sqrt(torch.finfo(self.params.dtype).max / max(self.num_clients, 1)) / 100.0
        for name, tensor in tensors_of(upload).items():
            field = name.rpartition(".")[2]
            if tensor.isinf().any() or (tensor.isnan().any() and field not in self.algorithm.may_be_unknown):
                raise DataError(f"{name} holds NaN or infinity; expected finite numbers.")
            if name in models:
                length = float(tensor.double().norm())
                if length > longest:
                    raise DataError(
                        f"{name} measures {length:g}; expected at most {longest:g}, for squares to be finite."
                    )
            elif (tensor < 0).any():  # variances, counts, weights
                raise DataError(f"{name} is {float(tensor.min()):g}; expected 0 or more.")
        for name, (least, most) in self.algorithm.bounds(upload, self.max_examples).items():
            sent = tensors_of(upload)[name]
            if not ((sent >= torch.as_tensor(least) / ROUNDED) & (sent <= torch.as_tensor(most) * ROUNDED)).all():
                low, high = float(torch.as_tensor(least).min()), float(torch.as_tensor(most).max())
                raise DataError(f"{name} is {float(sent.max()):g}; expected {low:g} to {high:g}.")
        return upload, read(Answer, content).num_gradients

    def scores(self, content: RecordDict) -> Scores:
        """What a client found, once it is seen to be possible."""
        record = metrics_of(content)
        counts = {name: record.get(name) for name in ("num_train", "num_test")}
        for name, count in counts.items():
            if type(count) is not int or not 0 <= count <= self.max_examples:
                raise DataError(f"{name} is {shown(count)}; expected a whole number from 0 to {self.max_examples}.")
        values = {name: value for name, value in record.items() if name not in counts}
        metrics = tuple(name.removeprefix("personal.") for name in values if name.startswith("personal."))
        known = [metric for metric in metrics if metric in HIGHER_IS_BETTER]
        if not metrics or len(known) < len(metrics) or values.keys() != {f"{v}.{m}" for v in VIEWS for m in metrics}:
            raise DataError(
                f"the metrics are {shown(list(values))}; expected some of {', '.join(HIGHER_IS_BETTER)}, personal "
                "and global."
            )
        rows = int(counts["num_test"])  # type: ignore[arg-type]
        for name, value in values.items():
            metric = name.rpartition(".")[2]
            most = {"accuracy": float(rows), "auc": 1.0}.get(metric, MOST_LOSS)
            least = -most if metric == "loss" else 0.0
            if rows == 0 and metric != "auc":  # a sum over nothing
                least = most = 0.0
            is_unknown = metric == "auc" and isinstance(value, float) and math.isnan(value)
            if type(value) is not float or not (is_unknown or least <= value <= most):
                raise DataError(f"{name} is {shown(value)}; expected a number that {metric} can be.")
        totals = {name: float(value) for name, value in values.items()}  # type: ignore[arg-type]
        return Scores(int(counts["num_train"]), rows, metrics, totals)  # type: ignore[arg-type]
