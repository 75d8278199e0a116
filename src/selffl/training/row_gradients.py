"""Gradients of the single rows of a module's minibatch, and how much information is in them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from selffl.algorithms.rowwise import RowGradients
from selffl.training.blocks import Gradient, Loss, outputs_of, quickest_way
from selffl.training.flat import FlatModel
from selffl.training.losses import is_cross_entropy, is_logistic, is_squared_error

RowGradientsOf = Callable[[Tensor, Tensor, Tensor, Tensor], RowGradients]  # (params, features, labels, num_examples)

LEAST_LOSS = 1e-6  # of a row that counts as more than nothing: a surplus is finite


def row_gradients_of(model: FlatModel, loss: Loss, gradient: Gradient) -> RowGradientsOf:
    """A function that computes them for a block of clients, each with its own parameters and rows."""

    def row_gradients(params: Tensor, features: Tensor, labels: Tensor, num_examples: Tensor) -> RowGradients:
        num_clients, num_rows = features.shape[:2]
        # Every row as a client of its own, with a minibatch of one.
        spread = params.repeat_interleave(num_rows, dim=0)
        rows = gradient(spread, features.flatten(0, 1).unsqueeze(1), labels.flatten(0, 1).unsqueeze(1))
        rows = rows.view(num_clients, num_rows, -1)
        way = quickest_way(model, params, features)
        with torch.no_grad():
            surplus, temperature = surplus_of(loss, outputs_of(model, params, features, way), labels)
        looked_at = torch.full_like(num_examples, num_rows)
        mean = rows.mean(1)
        rows = rows / temperature.sqrt()[:, None, None]
        return RowGradients(mean, rows, surplus, looked_at, num_examples, temperature)

    return row_gradients


def surplus_of(loss: Loss, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Expected over empirical information of each row ``[n, R]``, and the loss's temperature ``[n]``.

    A label that the model gives the probability p, so that the loss is -log p, has for two classes the empirical
    information (1-p)^2 and the expected one p(1-p): the surplus is p/(1-p) = 1/(exp(loss) - 1); for more classes it is
    that of this class against the rest.  A squared error is the log-likelihood of normal noise in the unit of twice its
    variance, which is taken from the rows: what is expected of them is then what they show on average.  Of other losses
    nothing is known: the empirical information is all there is.
    """
    flat, answers = outputs.flatten(0, 1), labels.flatten(0, 1)
    one = outputs.new_ones(labels.shape[:2])
    is_single = outputs[0, 0].numel() == 1
    if is_cross_entropy(loss) and answers.ndim == 1 and flat.ndim == 2:
        nats = nn.functional.cross_entropy(flat, answers, reduction="none")
    elif is_logistic(loss) and is_single:
        nats = nn.functional.binary_cross_entropy_with_logits(
            flat.reshape(-1), answers.reshape(-1).to(flat), reduction="none"
        )
    elif is_squared_error(loss):
        errors = (flat.reshape(answers.shape) - answers).square().reshape(len(answers), -1)
        each = (2.0 * errors.mean(1) / errors.shape[1]).reshape(one.shape)
        return one, each.mean(1).clamp(min=torch.finfo(one.dtype).eps)
    else:
        return one, one[:, 0]
    return 1.0 / nats.reshape(one.shape).clamp(min=LEAST_LOSS).expm1(), one[:, 0]
