"""What takes part in a round of `selffl.algorithms.self_fl_auto`: what server and clients know, keep and send."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from selffl.algorithms.records import ADDED_LATER, EARLIER_NAME, map_tensors


@dataclass(frozen=True)
class MixedSpread:
    """How coefficients of a small linear model vary together, as closing rounds have said; until then NaN.

    Of q coefficients of a score, and P of all scores, score by score; of other models none.
    """

    covariance: Tensor  # in the unit of the loss [..., q, q]
    centre: Tensor  # of all clients, beyond the shared model [..., P]
    moments: Tensor  # what it is learned from: see `selffl.maths.mixed_model.Moments` [..., 1 + V]
    moments_matrix: Tensor  # [..., 1 + V, 1 + V]

    @classmethod
    def unknown(cls, each: Tensor, num_coefficients: int, size: int) -> MixedSpread:
        """NaN everywhere, like ``each [...]``."""
        num_moments = size * (size + 1) // 2 + (size > 0)
        shapes = (size, size), (num_coefficients,), (num_moments,), (num_moments, num_moments)
        return cls(*(each.new_full((*each.shape, *shape), torch.nan) for shape in shapes))


@dataclass(frozen=True)
class ClosingSpread:
    """What closing rounds have said, once training is over; until then, and while it goes on, NaN."""

    inter_variance: Tensor  # sigma_0^2 [...]
    variance_ratios: Tensor  # [..., G]
    prior_variance: Tensor  # sigma_0^2 and how far the centre itself is from where clients would have it [...]
    prior_ratios: Tensor  # of the groups, likewise [..., G]
    prior_rows: Tensor  # n_0 [...]
    # What halves of an average client agree on beyond all clients, what all clients have in common, and what halves
    # disagree on [..., G].
    agreements: Tensor
    common: Tensor
    disagreements: Tensor
    spread_products: Tensor  # [..., 3]
    num_reporting: Tensor  # [...]
    mixed: MixedSpread = field(metadata={ADDED_LATER: True})
    shift: Tensor = field(metadata={ADDED_LATER: True})  # from theta to the centre of the clients [..., P]

    @classmethod
    def unknown(cls, each: Tensor, groups: Tensor, mixed: MixedSpread, params: Tensor) -> ClosingSpread:
        """NaN everywhere, like ``each [...]``, ``groups [..., G]``, ``mixed`` and ``params [..., P]``."""
        one, all_groups = torch.full_like(each, torch.nan), torch.full_like(groups, torch.nan)
        three = each.new_full((*each.shape, 3), torch.nan)
        return cls(
            one,
            all_groups,
            one,
            all_groups,
            one,
            all_groups,
            all_groups,
            all_groups,
            three,
            one,
            map_tensors(lambda old: torch.full_like(old, torch.nan), mixed),
            torch.full_like(params, torch.nan),
        )

    def where(self, chosen: Tensor, other: ClosingSpread) -> ClosingSpread:
        """What is known by this record where it is ``chosen [...]``, else by the ``other``, in the types of that."""

        def choose(mine: Tensor, theirs: Tensor) -> Tensor:
            shaped = chosen.reshape((*chosen.shape, *[1] * (mine.ndim - chosen.ndim)))
            return torch.where(shaped, mine.to(theirs), theirs)

        return map_tensors(choose, self, other)


@dataclass(frozen=True)
class AutoServer:
    """What the server knows."""

    params: Tensor  # theta [..., P], the running mean of the averages
    latest: Tensor  # w [..., P], the last of them
    inter_variance: Tensor  # sigma_0^2 = 1/c [...], over all parameters
    # By how much more or less the parameters of each group vary [..., G], and how many they are [..., G].
    variance_ratios: Tensor = field(metadata={ADDED_LATER: True})
    group_sizes: Tensor = field(metadata={ADDED_LATER: True})
    prior_rows: Tensor  # n_0 [...]: rows of one's own that the prior equals; NaN before the first report
    frequencies: Tensor  # pi [..., K], of the classes, everybody's; K = 0 where models have no scores of classes
    # How often two rows of one client are of one class [...]; 0 before the first report.
    same_class_rate: Tensor = field(metadata={EARLIER_NAME: "alike"})
    # Running means of what halves of an average client agree and disagree on [..., G], in a unit that follows it.
    agreements: Tensor = field(metadata={ADDED_LATER: True})
    disagreements: Tensor = field(metadata={ADDED_LATER: True})
    # Of a_m^2, a_m b_m and b_m^2 [..., 3], a_m and b_m being what halves of one client agree and disagree on in all, in
    # the square of that unit; and of how many clients all these are means [...].  NaN before the first report.
    spread_products: Tensor = field(metadata={ADDED_LATER: True})
    num_reporting: Tensor = field(metadata={ADDED_LATER: True})
    unit: Tensor = field(metadata={ADDED_LATER: True})  # NaN before the first report
    num_clients: Tensor = field(metadata={ADDED_LATER: True})  # M [...]
    # By how much scores and class frequencies are too small (t, a) [..., 2], and what that is learned from: running
    # means of the curvature of the likelihood [..., 2, 2], and of what it pulls towards [..., 2].
    score_factors: Tensor = field(metadata={ADDED_LATER: True})
    factor_curvature: Tensor = field(metadata={ADDED_LATER: True})
    factor_pull: Tensor = field(metadata={ADDED_LATER: True})
    closing: ClosingSpread = field(metadata={ADDED_LATER: True})
    # Places in the model of the coefficients of a small linear one, score by score [..., P]; of other models none.
    coefficient_order: Tensor = field(metadata={ADDED_LATER: True})
    clock: Tensor  # number of rounds [...]


@dataclass(frozen=True)
class AutoBroadcast:
    """What a client is sent: two models, the variances, two more numbers and a frequency for each class."""

    params: Tensor  # theta [..., C, P]
    latest: Tensor  # w [..., C, P]
    group_variances: Tensor  # sigma_0^2 of each group of parameters [..., C, G]
    group_sizes: Tensor  # [..., C, G]
    prior_rows: Tensor  # n_0 [..., C]
    frequencies: Tensor  # pi [..., C, K]
    class_skew: Tensor  # rho [..., C]: how much frequencies differ between clients; 0 while nothing is known
    score_factors: Tensor  # (t, a) [..., C, 2]: by how much scores and class frequencies are too small
    closing_variances: Tensor  # of each group, in closing visits [..., C, G]
    # Of small linear models: how coefficients vary in closing visits [..., C, q, q], how far the centre that they vary
    # around is from theta [..., C, P], and their places in the model [..., C, P].
    closing_covariance: Tensor
    closing_centre: Tensor
    coefficient_order: Tensor
    newness: Tensor  # how much this round weighs in the running means [..., C]: 1 at first, then ever less


@dataclass(frozen=True)
class AutoMemory:
    """What a client keeps: its model and those of two halves of its rows, as functions of the global one, which moves.

    Each is kept as theta_m - (1 - k_m) theta, as of the client's last visit, theta having its scores t times as large.
    """

    personal_offset: Tensor = field(metadata={EARLIER_NAME: "own"})  # [..., C, P]
    first_half_offset: Tensor = field(metadata={ADDED_LATER: True})  # [..., C, P]
    second_half_offset: Tensor = field(metadata={ADDED_LATER: True})  # [..., C, P]
    prior_weight: Tensor = field(metadata={EARLIER_NAME: "lean"})  # 1 - k_m [..., C]
    class_skew: Tensor = field(metadata={EARLIER_NAME: "skew"})  # rho of that visit [..., C]
    score_factors: Tensor = field(metadata={ADDED_LATER: True})  # (t, a) of that visit [..., C, 2]

    def model(self, scaled_params: Tensor) -> Tensor:
        """The posterior mode moves by 1 - k_m of the way that the prior mean has moved since."""
        return torch.addcmul(self.personal_offset, self.prior_weight.unsqueeze(-1), scaled_params)

    def half_models(self, scaled_params: Tensor) -> Tensor:
        """Models of both halves ``[..., C, 2, P]``, moved as the client's own."""
        offsets, lean = (self.first_half_offset, self.second_half_offset), self.prior_weight.unsqueeze(-1)
        found = offsets[0].new_empty(*lean.shape[:-1], 2, scaled_params.shape[-1])
        for half, offset in zip(found.unbind(-2), offsets, strict=True):
            torch.addcmul(offset, lean, scaled_params, out=half)
        return found


@dataclass(frozen=True)
class AutoUpload:
    """What a client adds to the sums: FedAvg's change, and what its rows say of both variances and of the classes."""

    change: Tensor  # v_m (w_m - w) [..., C, P]
    weight: Tensor  # v_m = N_m/(N_m + n_0) [..., C]
    num_examples: Tensor  # N_m [..., C]
    # Of clients with two rows or more; else zeros, and NaN for what is unknown.
    has_halves: Tensor  # 1 [..., C]
    deviation: Tensor  # mean of both halves' models, less mu_m [..., C, P]
    deviation_squares: Tensor  # its squared length, by group [..., C, G]
    difference_squares: Tensor  # that of half the difference of both models [..., C, G]
    disagreements: Tensor  # tr S^2 in expectation [..., C, G]; of a single client it may be below 0
    squared_disagreements: Tensor  # at least that, in expectation [..., C, G]
    spread_products: Tensor  # a_m^2, a_m b_m, b_m^2 [..., C, 3]: of what both halves agree and disagree on in all
    undecided: Tensor  # tr S (1 - S) in expectation [..., C]
    temperature: Tensor  # of its loss [..., C], the unit of both
    effective_params: Tensor  # gamma_m [..., C], their sum in nats, between 0 and P; NaN where it is unknown
    class_weights: Tensor  # v_m times the frequencies of its classes [..., C, K]
    weight_with_classes: Tensor  # v_m, or 0 where its rows have no class [..., C]
    same_class_rate: Tensor  # how often two of its rows are of one class [..., C]; 0 where it has no two
    has_pairs: Tensor  # 1, or 0 where it has no two rows [..., C]
    factor_slope: Tensor  # of minus the log-likelihood of rows of either half, by t and a [..., C, 2]
    factor_curvature: Tensor  # [..., C, 2, 2]


@dataclass(frozen=True)
class ClosingUpload:
    """What a client adds to the sums of a closing round, zeros where it has no two rows: means over splits."""

    num_examples: Tensor  # N_m [..., C]
    has_halves: Tensor  # 1 [..., C]
    deviation: Tensor  # mean of both halves' models, less mu_m [..., C, P]
    deviation_squares: Tensor  # its squared length, by group [..., C, G]
    agreements: Tensor  # d_1 . d_2, by group [..., C, G]
    disagreements: Tensor  # tr S^2 in expectation [..., C, G]; of a single client it may be below 0
    squared_disagreements: Tensor  # at least that, in expectation [..., C, G]
    spread_products: Tensor  # a_m^2, a_m b_m, b_m^2 [..., C, 3]: of what both halves agree and disagree on in all
    undecided: Tensor  # tr S (1 - S) in expectation [..., C]
    temperature: Tensor  # of its loss [..., C], the unit of both


@dataclass(frozen=True)
class MixedUpload:
    """What a client with a small linear model adds to the sums of a closing round: see `selffl.maths.mixed_model`.

    Slopes and curvatures are in units of how coefficients vary, so that they are neither large nor small.
    """

    num_examples: Tensor  # N_m [..., C]
    score: Tensor  # g_m [..., C, P]
    score_products: Tensor  # [..., C, q, q]
    information: Tensor  # W_m [..., C, P, P]
    information_products: Tensor  # [..., C, V, V]
    variation: Tensor  # [..., C]
    num_errors: Tensor  # [..., C]
    decided: Tensor  # parameters that its rows decide [..., C]


class Arrival(NamedTuple):
    """A client at the beginning of a visit: its models, as they are while it trains."""

    anchor: Tensor  # its prior mean [..., C, P]
    half_anchors: Tensor  # those of both halves of its rows [..., C, 2, P]
    model: Tensor  # its own [..., C, P]
    halves: Tensor  # those of both halves [..., C, 2, P]
    # What is on scores of classes while all rows, the first half and the second train [..., C, 3, K], beyond what is on
    # them when the client predicts.
    excess: Tensor


class SpreadReport(NamedTuple):
    """What a client tells of the variance between clients; as in `AutoUpload`."""

    has_halves: Tensor
    deviation: Tensor
    deviation_squares: Tensor
    difference_squares: Tensor
    disagreements: Tensor
    squared_disagreements: Tensor
    spread_products: Tensor
    undecided: Tensor
    temperature: Tensor
    effective_params: Tensor


class LatestSpread(NamedTuple):
    """What is known last of how clients vary: from closing rounds, or from training while there have been none."""

    inter_variance: Tensor
    variance_ratios: Tensor
    prior_rows: Tensor
    agreements: Tensor
    disagreements: Tensor
    spread_products: Tensor
    num_reporting: Tensor


class Spread(NamedTuple):
    """What the server knows of how clients vary; as in `AutoServer`."""

    inter_variance: Tensor
    variance_ratios: Tensor
    agreements: Tensor
    disagreements: Tensor
    spread_products: Tensor
    num_reporting: Tensor
    unit: Tensor
