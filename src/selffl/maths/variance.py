"""Empirical variance of a growing set of models, without keeping the models.

Self-FL, Eqs. (16), (17), (21) and (22).  For vectors the variance is the trace, the sum over coordinates, so that one
number per client describes how far its models lie apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

VarianceScale = Literal["sum", "mean"]


@dataclass(frozen=True)
class Spread:
    """How many vectors there were, their mean, and the sum of their squared distances to it."""

    count: Tensor  # [...], a whole number in the dtype of the vectors, float32 at least: exact up to 2^24 there
    mean: Tensor  # [..., P], x-bar_t
    squares: Tensor  # [...], t * sigma_t^2: the squared distances, summed over vectors and coordinates

    @classmethod
    def empty(cls, like: Tensor) -> Spread:
        """Spread of no vectors yet; ``like [..., P]`` gives shape, dtype and device."""
        zero = torch.zeros_like(like[..., 0], dtype=summing_dtype(like))
        return cls(zero, torch.zeros_like(like), zero)

    @classmethod
    def of(cls, vectors: Tensor) -> Spread:
        """Spread of ``vectors [..., count, P]``, in two passes."""
        mean = vectors.sum(-2) / max(vectors.shape[-2], 1)  # of nothing: zero, as in `empty`
        count = torch.full_like(mean[..., 0], vectors.shape[-2], dtype=summing_dtype(vectors))
        return cls(count, mean, (vectors - mean.unsqueeze(-2)).to(count).square_().sum((-2, -1)))

    def update(self, vector: Tensor) -> Spread:
        """Spread with one more vector for each entry.

        Self-FL, Eq. (22).  Deviation D1: the printed recursion adds (mean_t - mean_{t-1}) without its square; with
        the square it is this merge with a single vector, and equals Eq. (21).
        """
        one = torch.ones_like(self.count)
        return self.merge(Spread(one, vector, torch.zeros_like(one)))

    def merge(self, other: Spread) -> Spread:
        """Spread of both sets together, as if all vectors had been seen at one place.

        Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
        """
        count = self.count + other.count
        share = other.count / count.clamp(min=1)
        step = other.mean - self.mean
        return Spread(
            count=count,
            mean=(self.mean + share.unsqueeze(-1) * step).to(self.mean),
            squares=self.squares + other.squares + self.count * share * step.to(count).square().sum(-1),
        )

    def variance(self, scale: VarianceScale = "mean") -> Tensor:
        """The empirical variance, summed over coordinates.

        Decision D2: "mean" divides by the count, as Eq. (21) does; "sum" does not, as the text's definition after
        Eq. (17) reads.
        """
        return self.squares if scale == "sum" else self.squares / self.count.clamp(min=1)


def summing_dtype(vectors: Tensor) -> torch.dtype:
    """The type in which ``vectors`` are counted and added up: half precision would stop counting at 256 or 2,048."""
    return torch.promote_types(vectors.dtype, torch.float32)
