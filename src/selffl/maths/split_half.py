"""The variance between clients, from two halves of each client's rows.

Each half trains a model towards its posterior mode, with its share of the prior.  Near the prior mean the loss of N_h
rows is quadratic, of curvature N_h H, and the models deviate from the prior mean by

    d_h = S (delta + e_h),      S = (H + c/N)^-1 H,

where delta is how the client differs from the rest, of variance sigma_0^2 in every coordinate, and e_h the error of the
half's own optimum, of covariance (N_h H)^-1.  The halves share delta and nothing else.  So what they agree on is the
client's, and what they disagree on measures how much of it such models show:

    E d_1 . d_2  =  sigma_0^2 tr S^2,      E N_1 d_1 . H (d_1 - d_2)  =  tr S^2.

H (d_1 - d_2) is by how much the mean gradient on the second half's rows changes from one model to the other: no Hessian
is needed.  No noise of steps enters what halves agree on, and the ratio is sigma_0^2 whatever c the models were trained
with and however far they got, for any S that depends on H alone.  Where the loss is a multiple of the negative
log-likelihood, the ratio is sigma_0^2 in that unit, which is what c is in.

Groups of parameters may vary by variances of their own, the prior's precision then being a diagonal C.  With S = (H +
C/N)^-1 H both sums, taken over the parameters of group g alone, have the ratio sigma_g^2 where C = Sigma^-1: S C^-1 is
symmetric, so that S C^-1 S' = S^2 C^-1.

How sure the ratio is follows from how clients differ about it (`ratio_interval`): with a_m what the halves of client m
agree on and b_m what they disagree on, a_m - sigma_0^2 b_m has mean 0.

The idea is that of split-half reliability (Spearman, 1910; Brown, 1910) and of cross-products in place of squares, as
in Haseman and Elston's regression (1972).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

WIDTH = 1.959964  # standard errors to either side that hold 95 % of a normal distribution


@dataclass(frozen=True)
class HalvesOfClients:
    """How far the models of two halves of each client's rows are from the prior mean."""

    deviations: Tensor  # d_1 and d_2 [..., 2, P]
    num_terms: Tensor  # N_1 and N_2 [..., 2]

    @cached_property
    def mean(self) -> Tensor:
        """(d_1 + d_2)/2 ``[..., P]``."""
        return torch.lerp(self.deviations[..., 0, :], self.deviations[..., 1, :], 0.5)

    @cached_property
    def half_difference(self) -> Tensor:
        """(d_1 - d_2)/2 ``[..., P]``: what halves agree on is the square of the mean less the square of this."""
        return (self.deviations[..., 0, :] - self.deviations[..., 1, :]).div_(2)

    def disagreement(self, slope_changes: Tensor) -> Tensor:
        """What sums up to tr S^2 in expectation, by group of parameters ``[..., G]``.

        ``slope_changes [..., 2, 3, G]`` are how much steeper the mean loss on rows of each half is at the first's model
        than at the second's, along d_1, d_2 and (d_1 - d_2)/2: of a gradient g along d, by group, the sum of g d.
        Either half may play the part of the second; the mean of both leaves out what delta and the errors have in
        common by chance.
        """
        first, second = slope_changes[..., 1, 0, :], slope_changes[..., 0, 1, :]
        return (self.num_terms[..., :1] * first - self.num_terms[..., 1:] * second) / 2

    def squared_disagreement(self, slope_changes: Tensor) -> Tensor:
        """(d_1 - d_2) . H (d_1 - d_2) N_1 N_2/N, by group ``[..., G]``; ``slope_changes`` as in `disagreement`."""
        weight = self.num_terms.prod(-1) / self.num_terms.sum(-1).clamp(min=1.0)
        return weight.unsqueeze(-1) * slope_changes[..., 2, :].sum(-2)

    def undecided(self, held_difference: Tensor) -> Tensor:
        """tr S (1 - S) in expectation ``[...]``; with tr S^2 it is gamma.

        ``held_difference [...]`` is the squared length of `half_difference` times the prior's precision c.
        """
        weight = (self.num_terms / self.num_terms.sum(-1, keepdim=True)).prod(-1)  # 0 where a half is empty
        return 4 * weight * held_difference


def common_square(total_square: Tensor, squares: Tensor, number: Tensor) -> Tensor:
    """Squared length of what all clients deviate by ``[...]``: from pairs of clients, which share nothing else.

    ``total_square [...]`` is the squared length of the sum of the deviations of ``number [...]`` clients, ``squares
    [...]`` the sum of their squared lengths.  0 of a single client.
    """
    pairs = number * (number - 1)
    return torch.where(pairs > 0, (total_square - squares) / pairs.clamp(min=1.0), 0.0)


def common_share(mean_square: Tensor, common: Tensor) -> Tensor:
    """Share of the mean deviation of some clients that they have in common, and not by chance ``[...]``: 0 to 1.

    ``mean_square [...]`` is the squared length of their mean, ``common [...]`` that of what all deviate by
    (`common_square`).  The rest of the mean is of clients that happen to be drawn.  So much of the mean is nearest to
    what all deviate by (James and Stein, 1961, with the positive part).
    """
    return (common / mean_square).nan_to_num(nan=0.0).clamp(0.0, 1.0)


def spread_products(agreement: Tensor, disagreement: Tensor) -> Tensor:
    """a_m^2, a_m b_m and b_m^2 ``[..., 3]``, of which `ratio_interval` takes means over clients."""
    return torch.stack([agreement.square(), agreement * disagreement, disagreement.square()], dim=-1)


def centred_products(products: Tensor, agreement: Tensor, disagreement: Tensor, common: Tensor) -> Tensor:
    """Means of `spread_products` ``[..., 3]`` once every a_m is less by ``common [...]``; of a and b the means are."""
    squares, both, others = products.unbind(-1)
    squares = squares - 2 * common * agreement + common.square()
    return torch.stack([squares, both - common * disagreement, others], dim=-1)


def ratio_error(agreement: Tensor, disagreement: Tensor, products: Tensor, number: Tensor) -> Tensor:
    """Standard error of agreement/disagreement ``[...]``, by the delta method; NaN where nothing is known of it.

    All are means over ``number [...]`` clients.  The variance of the ratio R is E(a - R b)^2 / ((number - 1) (E b)^2):
    a mean is lost to R, and of a single client nothing is known.
    """
    ratio = agreement / disagreement
    squares, both, others = products.unbind(-1)
    residual = (squares - 2 * ratio * both + ratio.square() * others).clamp(min=0.0)
    error = (residual / (number - 1)).sqrt() / disagreement
    return error.where((disagreement > 0) & (number > 1), torch.nan)


def ratio_interval(ratio: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Ends of an interval of 95 % confidence for a variance ``[...]``; NaN where the ``error [...]`` is.

    A mean of squares is skewed to the right: where it comes out too small so does its error, and an interval of ratio ±
    1.96 errors ends too early above, hardly ever below.  So the lower end is the plain one, at least 0, and the upper
    end the one that is normal on the logarithm; where the plain interval reaches 0, and the logarithm makes no sense,
    it goes on in a straight line, from where it then is, e - 1 times as far from the ratio as the plain one.
    """
    plain = WIDTH * error
    factor = torch.where(plain < ratio, (plain / ratio).exp(), 1.0)
    high = torch.where(plain < ratio, ratio * factor, ratio + (math.e - 1.0) * plain)
    return (ratio - plain).clamp(min=0.0), high.clamp(min=0.0)
