"""First and second derivatives of a small model's loss, by all parameters, on rows of many clients at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selffl.data.named import Features, map_entries
from selffl.training.blocks import Loss
from selffl.training.flat import FlatModel


def derivatives_of(
    model: FlatModel, loss: Loss, params: Tensor, features: Features, labels: Tensor, is_own: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums ``[n]``, ``[n, P]`` and ``[n, P, P]`` over those rows ``[n, w]`` of each client that are its own.

    Of the loss at ``params [n, P]`` of the model as it answers, its gradient and its curvature; in double precision.
    """

    doubled = model.doubled

    def total(params: Tensor, features: Features, labels: Tensor, weights: Tensor) -> Tensor:
        outputs = doubled(params, features)
        each: Tensor = torch.func.vmap(loss)(outputs.unsqueeze(1), labels.unsqueeze(1))
        return (each * weights).sum()

    def of_client(params: Tensor, *rows: Any) -> tuple[Tensor, Tensor, Tensor]:
        def slope(point: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            gradient, value = torch.func.grad_and_value(total)(point, *rows)
            return gradient, (value, gradient)

        curvature, (value, gradient) = torch.func.jacrev(slope, has_aux=True)(params)
        return value, gradient, curvature

    def precise(entry: Tensor) -> Tensor:
        return entry.double() if entry.is_floating_point() else entry

    rows = map_entries(precise, features), precise(labels), is_own.double()
    value, gradient, curvature = torch.func.vmap(of_client)(params.double(), *rows)
    return value, gradient, curvature
