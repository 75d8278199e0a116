"""What one client of `selffl.algorithms.self_fl_auto` may send, and how noise hides it.

Noise hides single groups of parameters: what clients report by group is their total, the same for every parameter, and
all groups have the one variance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from selffl.algorithms.auto_records import AutoServer, AutoUpload
from selffl.algorithms.averaging import row_count
from selffl.algorithms.layers import by_group, sizes_of
from selffl.algorithms.safeguards import Bound, Limit, Safeguards
from selffl.maths.posterior import local_weight
from selffl.maths.split_half import spread_products

BY_GROUP = ("deviation_squares", "difference_squares", "disagreements", "squared_disagreements")
MOST_DECIDED = 1.0  # parameters that halves of one client may disagree on and leave undecided, in a noisy sum
MOST_CURVATURE = 5.0  # that rows of one client may have by the two factors, and slope, likewise
LEAST_SHARE = 0.1  # of a cohort, that noisy counts of those who have something cannot fall below
NUM_ERRORS = 2.0  # standard errors of noise that a square has to be above for it to count
TINY = 1e-12  # of a curvature: below that a float has lost digits


class AutoSafeguards(Safeguards[AutoServer, AutoUpload]):
    """What the server checks of an upload, how much one client can count for, and what its numbers may measure."""

    no_row_privacy: ClassVar[str | None] = (
        "its clients send class frequencies, and what halves of their rows disagree on"
    )
    capped: ClassVar[Mapping[str, float]] = {
        "num_examples": 1e2,
        **dict.fromkeys(("deviation_squares", "difference_squares", "disagreements", "undecided", "temperature"), 1e3),
        **dict.fromkeys(("factor_slope", "factor_curvature"), 1e3),
        "squared_disagreements": 1e5,
        "spread_products": 1e6,
    }

    def bounds(self, server: AutoServer, clients: Tensor, upload: AutoUpload, rows: Tensor) -> Mapping[str, Bound]:
        """A client weighs what its rows say, its classes no more than itself, no share is above 1, squares are of
        what they say that they are of, and a curvature is one.

        What halves agree on is the difference of two squares, and no larger than either.
        """
        count, prior_rows = upload.num_examples, server.prior_rows.to(upload.weight).unsqueeze(-1)
        weight = torch.where(prior_rows.isnan(), count, local_weight(prior_rows, count))
        squares = torch.maximum(upload.deviation_squares.sum(-1), upload.difference_squares.sum(-1))
        length = by_group(upload.deviation.square(), sizes_of(server.group_sizes))
        curvature, any_number = upload.factor_curvature, Bound(-torch.inf, torch.inf)
        most_mixed = curvature.diagonal(dim1=-2, dim2=-1).clamp(min=0.0).double().prod(-1).sqrt()
        return {
            "num_examples": row_count(rows),
            "weight": Bound(weight, weight),
            "deviation_squares": Bound(length, length),
            "disagreements": any_number,
            "squared_disagreements": any_number,
            "spread_products": Bound(
                upload.spread_products.new_tensor([0.0, -torch.inf, 0.0]),
                spread_products(squares, upload.disagreements.abs().sum(-1)),
            ),
            "effective_params": Bound(0.0, upload.change.shape[-1]),
            "has_halves": Bound(0.0, 1.0),
            "the sum of class_weights": Bound(0.0, upload.weight_with_classes, upload.class_weights.sum(-1)),
            "weight_with_classes": Bound(0.0, upload.weight),
            "same_class_rate": Bound(0.0, upload.has_pairs),
            "has_pairs": Bound(0.0, 1.0),
            "factor_slope": any_number,
            "factor_curvature": any_number,
            "the diagonal of factor_curvature": Bound(0.0, torch.inf, curvature.diagonal(dim1=-2, dim2=-1)),
            "factor_curvature beside the diagonal": Bound(-most_mixed - TINY, most_mixed + TINY, curvature[..., 0, 1]),
        }

    def limits(self, clip: float, max_weight: float, upload: AutoUpload) -> Mapping[str, Limit]:
        """Limits of all fields that are summed; gamma_m is merely recorded, and withheld."""
        return {
            **super().limits(clip, max_weight, upload),
            **limits_of(clip, max_weight, upload.disagreements.shape[-1]),
        }

    def in_units_of_limits(self, upload: AutoUpload) -> AutoUpload:
        """Weights in rows, totals instead of groups."""
        return totals_and_rows(upload)


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
    """The mean over groups in the place of each ``[..., G]``: in all as much as before."""
    return by_group.mean(-1, keepdim=True).expand_as(by_group)
