"""How often clients have each class: a two-level hierarchy of its own, beside that of their models.

A client's frequencies vary around everybody's, pi, with the variance rho pi (1 - pi): rho is 0 where all clients have
the same, 1 where each has a single class.  As in credibility theory (Buehlmann, 1967), the best linear estimate of a
client's frequencies needs nothing else of how they are distributed.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_SKEW = 0.99  # no class is impossible for not having been met
ABSENT_SHIFT = -30.0  # of a class that rows do not have: e^-30 of a chance is none, beside the others'


def class_shift(counts: Tensor, frequencies: Tensor, skew: Tensor) -> Tensor:
    """log of a client's class frequencies over everybody's, of its ``counts [..., K]`` and rho ``[...]``: ``[..., K]``.

    Its own are estimated by (n_k + alpha pi_k) / (N + alpha), alpha = (1 - rho)/rho.  Nothing where it has no rows, or
    rho = 0, and nothing for a class that nobody has.
    """
    own, rest = skew.unsqueeze(-1), 1.0 - skew.unsqueeze(-1)
    shift = ((own * counts / frequencies + rest) / (own * counts.sum(-1, keepdim=True) + rest)).log()
    return shift.where((counts > 0) | (frequencies != 0), 0.0)


def row_shift(counts: Tensor, frequencies: Tensor) -> Tensor:
    """log of the class frequencies of the very rows that are counted over everybody's: ``[..., K]``.

    No estimate of how often classes will come: it is what a model has on its scores while it trains on these rows, and
    so it learns nothing from how often classes come among them.  Those that they lack are left out.  Nothing without
    rows.
    """
    total = counts.sum(-1, keepdim=True)
    shift = (counts / (total * frequencies)).log().where(counts > 0, ABSENT_SHIFT)
    return shift.where(total > 0, 0.0)


def class_shifts(counts: Tensor) -> Tensor:
    """The shift of every client ``[M, K]``, of everybody's ``counts [M, K]`` at once; zeros where nobody has a row.

    pi are the frequencies of all rows together; rho is of the mean over the clients that have a pair of rows.
    """
    frequencies = counts.sum(0) / counts.sum().clamp(min=1.0)
    skew = class_skew(same_class_rate(counts).nanmean(), frequencies)
    return class_shift(counts, frequencies, skew.expand(len(counts)))


def same_class_rate(counts: Tensor) -> Tensor:
    """Share of the pairs of a client's rows that are of one class, of its ``counts [..., K]``; NaN without a pair."""
    pairs = counts.sum(-1) * (counts.sum(-1) - 1.0)
    rate = (counts * (counts - 1.0)).clamp(min=0.0).sum(-1) / pairs
    return rate.where(pairs > 0, torch.nan)


def class_skew(same_class: Tensor, frequencies: Tensor) -> Tensor:
    """rho ``[...]``, of how often two rows of one client are of one class and how often any two would be.

    With the frequencies pi_m of client m the former is sum_k pi_mk^2, on average sum_k pi_k^2 + rho pi_k (1 - pi_k).
    0 where nothing is known of it: no client has two rows (NaN), or all rows are of one class.
    """
    by_chance = frequencies.square().sum(-1)
    return ((same_class - by_chance) / (1.0 - by_chance)).clamp(0.0, MAX_SKEW).nan_to_num(nan=0.0)
