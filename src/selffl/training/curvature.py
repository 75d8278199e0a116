"""First and second derivatives of a small model's loss, by all parameters, on rows of many clients at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selffl.data.named import Features, map_entries
from selffl.training.blocks import Loss
from selffl.training.flat import FlatModel

PROBED = (0.1, 0.9)  # outputs between which a loss is asked whether it is a mean over rows: scores or probabilities
Derivatives = tuple[Tensor, Tensor, Tensor]


def derivatives_of(
    model: FlatModel, loss: Loss, params: Tensor, features: Features, labels: Tensor, is_own: Tensor
) -> Derivatives:
    """Sums ``[n]``, ``[n, P]`` and ``[n, P, P]`` over those rows ``[n, w]`` of each client that are its own.

    Of the loss at ``params [n, P]`` of the model as it answers, its gradient and its curvature; in double precision.
    """
    rows, labels = map_entries(_precise, features), _precise(labels)
    if _is_mean_over_rows(model, loss, rows[0], labels[0]):
        return _side_by_side(model.doubled, loss, params.double(), rows, labels, is_own.double())
    found = []
    for place, own in enumerate(is_own.sum(-1).tolist()):
        first = map_entries(lambda entry, place=place, own=own: entry[place, :own], rows)  # type: ignore[misc]
        found.append(_one_by_one(model.doubled, loss, params[place].double(), first, labels[place, :own]))
    value, gradient, curvature = (torch.stack(parts) for parts in zip(*found, strict=True))
    return value, gradient, curvature


def _precise(entry: Tensor) -> Tensor:
    return entry.double() if entry.is_floating_point() else entry


def _is_mean_over_rows(model: FlatModel, loss: Loss, features: Features, labels: Tensor) -> bool:
    """Whether a loss is the mean of what it is of single rows, as vmap takes it; weights of classes say no."""
    with torch.no_grad():
        outputs = model.doubled(model.params.double().to(features.device), features)
        outputs = torch.linspace(*PROBED, outputs.numel(), dtype=outputs.dtype, device=outputs.device).view_as(outputs)
        try:
            each = torch.func.vmap(loss)(outputs.unsqueeze(1), labels.unsqueeze(1))
        except RuntimeError:  # a loss that looks at numbers
            return False
        return bool(torch.isclose(each.mean(), loss(outputs, labels)))


def _side_by_side(
    doubled: FlatModel, loss: Loss, params: Tensor, features: Features, labels: Tensor, weights: Tensor
) -> Derivatives:
    """Loss, slope and curvature of all clients at once; rows count by their ``weights [n, w]``."""

    def total(params: Tensor, features: Features, labels: Tensor, weights: Tensor) -> Tensor:
        each: Tensor = torch.func.vmap(loss)(doubled(params, features).unsqueeze(1), labels.unsqueeze(1))
        return (each * weights).sum()

    def of_client(params: Tensor, *rows: Any) -> Derivatives:
        def slope(point: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            gradient, value = torch.func.grad_and_value(total)(point, *rows)
            return gradient, (value, gradient)

        curvature, (value, gradient) = torch.func.jacrev(slope, has_aux=True)(params)
        return value, gradient, curvature

    value, gradient, curvature = torch.func.vmap(of_client)(params, features, labels, weights)
    return value, gradient, curvature


def _one_by_one(doubled: FlatModel, loss: Loss, params: Tensor, features: Features, labels: Tensor) -> Derivatives:
    """Loss, slope and curvature of one client, all of whose rows pass together."""

    def total(point: Tensor) -> Tensor:
        return len(labels) * loss(doubled(point, features), labels)

    point = params.clone().requires_grad_()
    value = total(point)
    (gradient,) = torch.autograd.grad(value, point)
    curvature: Tensor = torch.autograd.functional.hessian(total, params)  # type: ignore[no-untyped-call]
    return value.detach(), gradient, curvature
