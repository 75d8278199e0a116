"""Slopes of the Kullback-Leibler divergence between normal distributions with independent coordinates.

A deviation is sigma = softplus(rho) = log(1 + e^rho), which is above 0 whatever rho is, so that steps need no bounds.
KL(q || w) = sum of log(sigma_w / sigma_q) + (sigma_q^2 + (mu_q - mu_w)^2) / (2 sigma_w^2) - 1/2 over coordinates.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus


class NormalSlope(NamedTuple):
    """A derivative with respect to the mean and to rho of a normal distribution."""

    mean: Tensor
    rho: Tensor


def rho_of(deviation: float) -> float:
    """The rho whose softplus is a deviation above 0."""
    return deviation + math.log(-math.expm1(-deviation))


def slope_of_first(
    mean: Tensor, deviation: Tensor, other_mean: Tensor, other_precision: Tensor
) -> tuple[Tensor, Tensor]:
    """Slope of KL(q || w) by the mean and the *deviation* of q, where w is the other with 1/sigma_w^2.

    What steps of q have in common is given: sigma_q is needed for a draw anyway, and w stays while q moves.
    """
    return (mean - other_mean).mul_(other_precision), (deviation * other_precision).sub_(deviation.reciprocal())


def slope_of_second(mean: Tensor, rho: Tensor, other_mean: Tensor, other_rho: Tensor) -> NormalSlope:
    """Slope of KL(q || w) with respect to w = N(other_mean, softplus(other_rho)^2), where q is the first."""
    other = softplus(other_rho)
    gap, precision = other_mean - mean, other.square().reciprocal()
    by_deviation = (1.0 - (softplus(rho).square() + gap.square()) * precision) / other
    return NormalSlope(gap * precision, by_deviation * torch.sigmoid(other_rho))
