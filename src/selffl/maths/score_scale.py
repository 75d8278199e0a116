"""How far scores of classes, and a client's class frequencies, are to be believed: two factors, the same for everybody.

A model that has not been trained to its end has scores z that are too small throughout.  Adding the whole logarithm of
a client's class frequencies, s (`selffl.maths.frequencies`), then counts these for too much.  So the log-odds of
classes are taken to be t z + a s, and both factors are learned by maximum likelihood, on rows that the frequencies have
not seen.

Derivatives of the likelihood add up over rows and clients.  The prior of both factors is normal, of mean 1 and variance
1: it decides where there are no rows, and hardly counts beside hundreds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_STEP = 1.0  # by which a factor changes in a round, at most
MIN_SCORE_FACTOR = 0.1  # below which scores would say next to nothing
MAX_FREQUENCY_WEIGHT = 2.0  # a/t: beside scores as they are, nobody's frequencies count for more than their square


class Derivatives(NamedTuple):
    """Derivatives of minus the log-likelihood of rows, at given factors (t, a)."""

    slope: Tensor  # [..., 2]
    curvature: Tensor  # [..., 2, 2]


def derivatives(scores: Tensor, shift: Tensor, targets: Tensor, factors: Tensor) -> Derivatives:
    """Summed over rows: of ``scores [..., n, K]`` with ``shift [..., K]``, ``factors [..., 2]``.

    ``targets [..., n, K]`` are 1 for a row's class, parts of 1 where its label is soft, and 0 of a row without a class.
    """
    inputs = torch.stack([scores, shift.unsqueeze(-2).expand_as(scores)], dim=-1)  # [..., n, K, 2]
    chances = (inputs * factors[..., None, None, :]).sum(-1).softmax(-1).unsqueeze(-1)
    weights = targets.sum(-1, keepdim=True)  # [..., n, 1]
    means = (chances * inputs).sum(-2)  # [..., n, 2]
    centred = inputs - means.unsqueeze(-2)
    spread = (chances * centred).transpose(-1, -2) @ centred  # [..., n, 2, 2]
    slope = (weights * means).sum(-2) - (targets.unsqueeze(-1) * inputs).sum((-3, -2))
    return Derivatives(slope, (weights.unsqueeze(-1) * spread).sum(-3))


def next_factors(factors: Tensor, curvature: Tensor, pull: Tensor) -> Tensor:
    """The most likely factors ``[..., 2]``, a step from those before.

    The likelihood is close to a normal one with the precision ``curvature [..., 2, 2]``, whose mean is what it makes of
    ``pull [..., 2]``: curvature times factors, less the slope there.
    """
    prior = torch.eye(2, dtype=curvature.dtype, device=curvature.device)
    # Curvatures that are large beyond digits may be singular beside the prior: then nothing is found.
    found: Tensor = torch.linalg.solve_ex(curvature + prior, (pull + 1.0).unsqueeze(-1))[0].squeeze(-1)
    found = torch.where(found.isfinite(), found, factors)
    stepped = found.clamp(min=factors - MAX_STEP, max=factors + MAX_STEP)
    of_scores = stepped[..., 0].clamp(min=MIN_SCORE_FACTOR)
    of_frequencies = stepped[..., 1].clamp(min=0.0).minimum(MAX_FREQUENCY_WEIGHT * of_scores)
    return torch.stack([of_scores, of_frequencies], dim=-1)
