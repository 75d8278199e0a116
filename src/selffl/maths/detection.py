"""False accepts and false rejects of a detector, and how two detectors compare where they reject as much.

A detector accepts what scores at or above its threshold.  The paper's metric, the *relative false accepts*, takes a
reference (the pre-trained model) at its own threshold, gives the other detector the threshold at which it rejects as
many of the positives, and divides their false accepts.
"""

from __future__ import annotations

import torch
from torch import Tensor

ADDED_COUNT = (
    0.5  # added to both counts of false accepts: a ratio of small counts has a value, and less bias, even at 0
)


def false_accepts(scores: Tensor, labels: Tensor, rejected: Tensor, weight: Tensor | None = None) -> Tensor:
    """False accepts ``[...]`` at the highest threshold at which ``rejected [...]`` positives are rejected.

    ``scores [rows]`` and ``labels [rows]`` are 1 for a positive.  ``weight [..., rows]`` says how often each row counts
    (a bootstrap sample), once if not given.  Where rows that count several times leave no threshold with that many,
    false accepts lie between those of the two thresholds around it, as far along as the rejects do: rounding to one of
    them would favour the detector whose threshold it is.
    """
    weight = torch.ones_like(scores) if weight is None else weight
    is_positive = labels > 0.5
    # Positives of the same score are rejected together.
    positives, group = scores[is_positive].unique(return_inverse=True)  # type: ignore[no-untyped-call]
    counts = weight.new_zeros(*weight.shape[:-1], len(positives)).index_add_(-1, group, weight[..., is_positive])
    below = counts.cumsum(-1)  # rejected, if the threshold is just above each
    wanted = rejected.to(below).unsqueeze(-1)
    index = torch.searchsorted(below, wanted, right=True)
    # All may be rejected: beyond the last positive there is no threshold but infinity.
    ends = torch.cat([torch.zeros_like(below[..., :1]), below, torch.full_like(below[..., :1], torch.inf)], -1)
    low, high = ends.gather(-1, index), ends.gather(-1, index + 1)
    thresholds = torch.cat([positives, positives.new_full((2,), torch.inf)])
    negatives, order = scores[~is_positive].sort()
    above = weight[..., ~is_positive][..., order].flip(-1).cumsum(-1).flip(-1)  # at or above each
    above = torch.cat([above, torch.zeros_like(above[..., :1])], -1)
    more, fewer = (above.gather(-1, torch.searchsorted(negatives, thresholds[at])) for at in (index, index + 1))
    return torch.lerp(more, fewer, (wanted - low) / (high - low)).squeeze(-1)


def relative_false_accepts(
    scores: Tensor, reference: Tensor, labels: Tensor, threshold: float, weight: Tensor | None = None
) -> Tensor:
    """False accepts of ``scores`` over those of ``reference [rows]``, both where the reference rejects ``[...]``.

    Both detectors get the highest threshold with no more false rejects than the reference has at ``threshold``, and
    half a count is added to both numbers of false accepts.
    """
    counted = torch.ones_like(scores) if weight is None else weight
    rejected = (counted * ((labels > 0.5) & (reference < threshold))).sum(-1)
    ours, theirs = (false_accepts(each, labels, rejected, counted) for each in (scores, reference))
    return (ours + ADDED_COUNT) / (theirs + ADDED_COUNT)


def trade_off(scores: Tensor, labels: Tensor, reject_rates: Tensor) -> Tensor:
    """Shares of negatives accepted where given shares of positives are rejected, ``[rates]``: a DET curve."""
    num_positives = (labels > 0.5).sum()
    rejected = (reject_rates * num_positives + 1e-9).floor()
    accepted = false_accepts(scores, labels, rejected, torch.ones(len(rejected), len(scores), dtype=torch.float64))
    return accepted / (len(labels) - num_positives)
