"""Gradients of the log-odds of classes, row by row, and their products, which a classifier's posterior is made of."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from selffl.budget import budget_of
from selffl.data.named import Features, row_size
from selffl.errors import ConfigError
from selffl.maths.confidence import log_odds
from selffl.training.blocks import Gradient, Gradients, Loss, gradient_of
from selffl.training.flat import FlatModel
from selffl.training.losses import is_cross_entropy
from selffl.training.metrics import CLASSES, ONE_LOGIT, ONE_PROBABILITY, TWO_CLASSES, Measure


def check_classifies(measure: Measure, loss: Loss) -> None:
    """Refuse a task whose outputs are no log-odds of classes."""
    is_crossed = measure in (CLASSES, TWO_CLASSES) and is_cross_entropy(loss)
    if not (is_crossed or measure in (ONE_LOGIT, ONE_PROBABILITY)):
        raise ConfigError(
            f"the task is measured by {measure.metrics[0]} under the loss {getattr(loss, '__name__', repr(loss))}; "
            "expected classes under torch's cross-entropy, or two of them under its binary cross-entropy. Outputs of "
            "other tasks are no probabilities."
        )


def class_logits(outputs: Tensor, measure: Measure) -> Tensor:
    """Outputs as logits of classes ``[rows, K]``; a single one, or a probability, says class 1 against class 0."""
    if measure in (CLASSES, TWO_CLASSES):
        return outputs
    single = outputs.flatten()
    single = single.logit(torch.finfo(single.dtype).eps) if measure == ONE_PROBABILITY else single
    return torch.stack([torch.zeros_like(single), single], -1)


def class_labels(labels: Tensor, measure: Measure) -> Tensor:
    """Labels as numbers of classes ``[rows]``."""
    return labels if measure in (CLASSES, TWO_CLASSES) else (labels.flatten() > 0.5).long()


class Tangents:
    """The model of one client as rows see it: logits of classes, and products of the gradients of their log-odds."""

    def __init__(self, model: FlatModel, params: Tensor, measure: Measure, gradients: Gradients = "auto") -> None:
        self._model, self._params, self._measure = model, params, measure

        def loss(outputs: Tensor, classes: Tensor) -> Tensor:
            return log_odds(class_logits(outputs, measure), classes).mean()

        self._loss, self._gradients = loss, gradients

    def logits(self, features: Features) -> Tensor:
        """Logits of classes ``[rows, K]``, in double precision."""
        size = budget_of(features.device).rows_evaluated(row_size(features))
        size = max(len(features), 1) if self._model.mixes_rows else size
        starts = range(0, max(len(features), 1), size)
        with torch.no_grad():
            parts = [self._model(self._params, features[start : start + size]) for start in starts]
        return class_logits(torch.cat(parts), self._measure).double()

    @cached_property
    def _gradient(self) -> Gradient:
        return gradient_of(self._model.still, self._loss, self._gradients)

    def rows(self, features: Features, classes: Tensor) -> Tensor:
        """u, the gradients of the log-odds of ``classes [rows]``: ``[rows, P]``, in double precision."""
        own = self._params.expand(len(features), -1)
        return self._gradient(own, features[:, None], classes.unsqueeze(1)).double()

    def products(
        self, left: tuple[Features, Tensor], right: tuple[Features, Tensor], variances: Tensor
    ) -> tuple[Tensor, Tensor]:
        """u_i . u_j of rows of both sides ``[n, m]``, and u_j . u_j ``[m]``; a side is features and classes.

        Each parameter counts by how much it varies, in any unit: ``variances [P]``.  Gradients that the memory does
        not hold are computed again for every block of the other side.
        """
        size = max(budget_of(self._params.device).gradient_numbers // (2 * len(self._params)), 1)
        num_left, num_right = len(left[1]), len(right[1])
        products = torch.empty(num_left, num_right, dtype=torch.float64, device=self._params.device)
        squares = products.new_empty(num_right)
        for begin in range(0, num_right, size):
            part = slice(begin, begin + size)
            these = self.rows(right[0][part], right[1][part])
            squares[part] = these.square() @ variances
            for start in range(0, num_left, size):
                block = slice(start, start + size)
                products[block, part] = self.rows(left[0][block], left[1][block]) @ (these * variances).mT
        return products, squares
