"""`selffl.algorithms.self_fl_auto` where sums are noisy: what its small numbers may measure, and what noise leaves.

Noise hides single groups of parameters: what clients report by group is their total, the same for every parameter, and
all groups have the one variance.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from selffl.algorithms.auto_records import AutoUpload
from selffl.algorithms.safeguards import Limit

BY_GROUP = ("deviation_squares", "difference_squares", "disagreements", "squared_disagreements")
MOST_DECIDED = 1.0  # parameters that halves of one client may disagree on and leave undecided, in a noisy sum
MOST_CURVATURE = 5.0  # that rows of one client may have by the two factors, and slope, likewise
LEAST_SHARE = 0.1  # of a cohort, that noisy counts of those who have something cannot fall below
NUM_ERRORS = 2.0  # standard errors of noise that a square has to be above for it to count


def limits_of(clip: float, max_weight: float, num_groups: int) -> dict[str, Limit]:
    """What the small numbers of one client may measure in a noisy sum.

    Shares and indicators are at most 1, rows count as far as the weight does, squares as far as the clip.  What halves
    disagree on, and the derivatives of the likelihood, are cut where most honest clients lie: of those of MNIST and
    the demonstration nine in ten.  A total of so much, shared out evenly among G groups, has a length of 1/√G of it.
    """
    each = 1.0 / math.sqrt(num_groups)
    return {
        "num_examples": Limit(max_weight, is_signed=False),
        "deviation": Limit(clip),
        "deviation_squares": Limit(clip**2 * each, is_signed=False),
        "difference_squares": Limit(clip**2 * each, is_signed=False),
        "disagreements": Limit(MOST_DECIDED * each),
        "squared_disagreements": Limit(MOST_DECIDED * each),
        "spread_products": Limit(MOST_DECIDED**2),
        "undecided": Limit(MOST_DECIDED, is_signed=False),
        **dict.fromkeys(("has_halves", "has_pairs", "same_class_rate", "temperature"), Limit(1.0, is_signed=False)),
        **dict.fromkeys(("class_weights", "weight_with_classes"), Limit(1.0, "weight", is_signed=False)),
        **dict.fromkeys(("factor_slope", "factor_curvature"), Limit(MOST_CURVATURE)),
    }


def totals_and_rows(upload: AutoUpload) -> AutoUpload:
    """The upload with totals in place of groups, and weights in rows, N_m (1 + n_0)/(N_m + n_0), from 1 to N_m.

    Weights matter only beside each other.  (1 + n_0) follows from v_m and N_m; while n_0 is unknown, a client weighs as
    many rows as it has.
    """
    weight, count = upload.weight, upload.num_examples
    tiny = torch.finfo(weight.dtype).tiny
    factor = torch.where(weight < 1, 1.0 + count * (1.0 - weight) / weight.clamp(min=tiny), 1.0)
    return replace(
        upload,
        change=upload.change * factor.unsqueeze(-1),
        weight=weight * factor,
        class_weights=upload.class_weights * factor.unsqueeze(-1),
        weight_with_classes=upload.weight_with_classes * factor,
        **{name: _share_out(getattr(upload, name)) for name in BY_GROUP},
    )


def usable_sum(upload: AutoUpload, number: int, sizes: list[int], deviation_noise: float) -> AutoUpload:
    """The noisy sum of ``number`` clients as the server can use it: counts that can be, and squares without noise.

    Groups share what is left of each total by their ``sizes``, so that all have the one variance.
    """
    least, nothing = LEAST_SHARE * number, torch.zeros_like(upload.has_halves)
    tiny = torch.finfo(upload.weight.dtype).tiny
    pairs = upload.has_pairs.clamp(least, number)
    classes = upload.class_weights.clamp(min=0.0)
    with_classes = upload.weight_with_classes.maximum(LEAST_SHARE * upload.weight)
    frequencies = classes / classes.sum(-1, keepdim=True).clamp(min=tiny)
    share = upload.deviation.new_tensor(sizes) / sum(sizes)
    return replace(
        upload,
        has_halves=upload.has_halves.clamp(least, number),
        has_pairs=pairs,
        temperature=upload.temperature.clamp(least, number),
        num_examples=upload.num_examples.clamp(min=number),
        deviation=beyond_noise(upload.deviation, deviation_noise),
        same_class_rate=upload.same_class_rate.maximum(nothing).minimum(pairs),
        undecided=upload.undecided.maximum(nothing),
        class_weights=frequencies * with_classes.unsqueeze(-1),
        weight_with_classes=with_classes,
        **{name: getattr(upload, name).sum(-1, keepdim=True) * share for name in BY_GROUP},
    )


def beyond_noise(vector: Tensor, noise: float) -> Tensor:
    """A noisy vector ``[..., P]``, as long as what it is made of; nothing where that cannot be told from noise."""
    size = vector.shape[-1]
    square = vector.square().sum(-1, keepdim=True)
    left = square - size * noise**2
    is_seen = left > NUM_ERRORS * math.sqrt(2.0 * size) * noise**2
    return vector * torch.where(is_seen, left / square.clamp(min=torch.finfo(square.dtype).tiny), 0.0).sqrt()


def _share_out(by_group: Tensor) -> Tensor:
    """The same for every group ``[..., G]``, in all as much as before."""
    return by_group.mean(-1, keepdim=True).expand_as(by_group)
