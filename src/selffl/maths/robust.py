"""Robust means: what a few of many vectors say at will moves the mean of all no further than the others allow.

Vectors are ``[..., C, P]``, of C clients.  Each function gives the vectors that take their places, so that
their mean, by any weights, is the robust mean, and their spread is that of the core.
"""

from __future__ import annotations

import torch
from torch import Tensor

TRIMMED_SHARE = 0.25  # of the clients at either end of each coordinate
PLAUSIBLE = 4.0  # times the typical squared distance, relative to what is expected, that a client counts in full
MOST_WEIGHT = 3.0  # times the median weight


def median(values: Tensor, dim: int) -> Tensor:
    """The median, of an even number the mean of both in the middle, along ``dim``, which is kept with one entry."""
    ranked, size = values.sort(dim).values, values.shape[dim]
    return (ranked.narrow(dim, (size - 1) // 2, 1) + ranked.narrow(dim, size // 2, 1)) / 2


def clip_lengths(vectors: Tensor) -> Tensor:
    """The vectors, none longer than the median length (Sun et al., 2019, whose bound is chosen by hand)."""
    length = vectors.norm(dim=-1, keepdim=True)
    most = median(length, -2)
    return vectors * torch.where(length > most, most / length, 1.0)


def take_median(vectors: Tensor) -> Tensor:
    """The median of each coordinate for everybody (Yin, Chen, Ramchandran and Bartlett, 2018)."""
    return median(vectors, -2).expand_as(vectors)


def trim(vectors: Tensor, weights: Tensor) -> Tensor:
    """The vectors, with what lies at either end of a coordinate replaced by the mean of the rest (Yin et al., 2018).

    That mean is by ``weights [..., C]``; by the same weights it is the mean of all that is returned.
    """
    size = vectors.shape[-2]
    outside = int(TRIMMED_SHARE * size)
    ranked = vectors.sort(-2).values
    low, high = ranked.narrow(-2, outside, 1), ranked.narrow(-2, size - 1 - outside, 1)
    is_inside = (vectors >= low) & (vectors <= high)
    weight = weights.unsqueeze(-1) * is_inside
    mean = (weight * vectors).sum(-2, keepdim=True) / weight.sum(-2, keepdim=True)
    return torch.where(is_inside, vectors, mean)


def draw_to_centre(vectors: Tensor, variances: Tensor) -> Tensor:
    """The vectors, the implausible ones drawn to the median of all: by how much further off they are than expected.

    A client's squared distance from the median of each coordinate is expected to be in proportion to its variance, of
    its difference from the rest and of its own error, ``variances [..., C]``; the median client says in which.  Up to
    `PLAUSIBLE` times that it counts in full, beyond by the ratio of both: what is twice as far off counts for half as
    much, so that no distance is worth a lie (the weights of Student's distribution far off; Lange, Little and Taylor,
    1989).
    """
    centre = median(vectors, -2)
    offset = vectors - centre
    ratio = offset.square().sum(-1) / variances
    most = PLAUSIBLE * median(ratio, -1)
    drawn = centre + (most / ratio).unsqueeze(-1) * offset
    return torch.where((ratio > most).unsqueeze(-1), drawn, vectors)


def cap_weights(weights: Tensor) -> Tensor:
    """Weights ``[..., C]`` none of which is above `MOST_WEIGHT` times their median."""
    return weights.minimum(MOST_WEIGHT * median(weights, -1))
