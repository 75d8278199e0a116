"""Whether probabilities are what they say: of all answers given with probability p, the share p should be right."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_BINS = 15  # as most publications have
MIN_PROBABILITY = 1e-15  # probability that an outcome counts as having had, so that its logarithm is finite


def calibration_error(probabilities: Tensor, labels: Tensor, num_bins: int = NUM_BINS, *, even: bool = False) -> float:
    """Expected calibration error of the likeliest class: mean |share of right answers - mean confidence| over bins.

    Guo et al., "On calibration of modern neural networks", ICML 2017, Eq. (3).  Bins have equal widths, (0, 1/15] to
    (14/15, 1]; with ``even`` they have equally many rows (Nguyen and O'Connor, EMNLP 2015), where most answers are sure
    of themselves the better choice.
    """
    confidence, answer = probabilities.double().max(-1)
    gap = confidence - (answer == labels).double()
    if even:
        bins = gap[confidence.argsort(stable=True)].tensor_split(num_bins)
        return float(sum(part.sum().abs() for part in bins) / len(gap))
    number = (confidence * num_bins).ceil().clamp(1, num_bins).long() - 1
    return float(gap.new_zeros(num_bins).index_add_(0, number, gap).abs().sum() / len(gap))


def log_loss(probabilities: Tensor, labels: Tensor) -> float:
    """Mean of -log of the probability that the label was given."""
    chance = probabilities.double().gather(-1, labels.unsqueeze(-1)).clamp(min=MIN_PROBABILITY)
    return float(-chance.log().mean())


def brier_score(probabilities: Tensor, labels: Tensor) -> float:
    """Mean squared distance of the probabilities from what came about: 0 at best, 2 at worst (Brier, 1950)."""
    outcome = torch.nn.functional.one_hot(labels, probabilities.shape[-1])
    return float((probabilities.double() - outcome).square().sum(-1).mean())
