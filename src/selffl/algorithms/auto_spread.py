"""How the server of `selffl.algorithms.self_fl_auto` learns the variances between clients from a cohort's sums.

What two halves of a client's rows agree on, over what they disagree on, is the variance (`selffl.maths.split_half`).
Both are running means over rounds; groups of parameters have a variance of their own, as far as clients decide it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selffl.algorithms.auto_records import AutoServer, AutoUpload, ClosingUpload, Spread
from selffl.algorithms.layers import by_group, sizes_of
from selffl.maths.split_half import centred_products, common_square

# Decision D17: these numbers are part of the method, the same for every model and data set.
MOST_CHANGE = 2.0  # times what it was before a round that c is after it, at most; and one over it, at least
LEAST_DECIDED = 1e-4  # parameters that an average client decides, below which c grows no further
LEAST_UNDECIDED = 1e-6  # share of the parameters that rows leave undecided, at least
LEAST_DISAGREEMENT = 0.1  # of the squared form of what halves disagree on, which is at least what they do
PRIOR_DECIDED = 10.0  # parameters that the one variance counts for beside those of a group that clients have decided


def learn_spread(server: AutoServer, upload: AutoUpload, share: Tensor, cohort: int, *, is_fixed: bool) -> Spread:
    """The variances and what they are learned from, after one more ``cohort``, which weighs ``share [...]`` of all.

    How much halves agree and disagree on shrinks as c grows, as c^-2 at most, both alike.  Each round is measured
    in a unit that follows what they disagree on, no faster than that: rounds under one c and under another count
    the same, and so does one whose few clients hardly disagree.  Variances that were set by hand are ``is_fixed``.
    """
    pairs, sizes = upload.has_halves.unsqueeze(-1), sizes_of(server.group_sizes)
    common = common_square(by_group(upload.deviation.square(), sizes), upload.deviation_squares, pairs)
    agreements = (upload.deviation_squares - upload.difference_squares) / pairs - common
    disagreements = sum_disagreements(upload) / pairs
    total = disagreements.sum(-1)
    unit = torch.where(server.unit.isnan() & (total > 0), total, server.unit.to(total))
    follows = total.clamp(min=unit / MOST_CHANGE**2, max=unit * MOST_CHANGE**2).to(server.unit)
    measured = (server.agreements, agreements), (server.disagreements, disagreements)
    means = [torch.lerp(old.to(new), new / unit.unsqueeze(-1), share.to(new).unsqueeze(-1)) for old, new in measured]
    # Clients whose losses are next to nothing agree and disagree on numbers that cannot be kept.
    kept_means = [mean.to(old).isfinite().all(-1) for mean, (old, _) in zip(means, measured, strict=True)]
    is_unit = follows.isfinite() & (follows >= torch.finfo(follows.dtype).tiny)
    is_usable = kept_means[0] & kept_means[1] & is_unit
    means = [torch.where(is_usable.unsqueeze(-1), mean, old) for mean, (old, _) in zip(means, measured, strict=True)]
    in_nats = (unit * upload.has_halves / upload.temperature).unsqueeze(-1)  # as parameters are counted
    number = torch.minimum(upload.has_halves / share, server.num_clients)  # who comes again says nothing new
    both = upload.disagreements.sum(-1) / upload.has_halves
    products = centred_products(
        upload.spread_products / pairs, agreements.sum(-1) + common.sum(-1), both, common.sum(-1)
    )
    products = products / unit.square().unsqueeze(-1)
    old = server.spread_products.to(products)
    products = torch.lerp(old.where(~old.isnan(), products), products, share.to(products).unsqueeze(-1))
    # Where halves hardly disagree, what they agree on is beyond numbers: nobody knows then how sure the ratio is.
    kept = products.to(server.spread_products)
    kept = kept.masked_fill(~kept.isfinite().all(-1, keepdim=True), torch.nan)
    with_halves = server.num_clients * upload.has_halves / cohort  # among all clients, if as many as here
    sums = means[0] * in_nats, means[1] * in_nats
    found = learn_variances(server.inter_variance, server.variance_ratios, *sums, number, MOST_CHANGE)
    is_learned = is_usable & (means[1].sum(-1) > 0) & (not is_fixed)
    return Spread(
        torch.where(is_learned, found[0], server.inter_variance).to(server.inter_variance),
        torch.where(is_learned.unsqueeze(-1), found[1], server.variance_ratios).to(server.variance_ratios),
        means[0].to(server.agreements),
        means[1].to(server.disagreements),
        torch.where(is_usable.unsqueeze(-1), kept, server.spread_products),
        torch.where(is_usable, number.minimum(with_halves), server.num_reporting).to(server.num_reporting),
        torch.where(is_unit, follows, unit.to(server.unit)),
    )


def learn_variances(
    one: Tensor, ratios: Tensor, agreements: Tensor, disagreements: Tensor, number: Tensor, most_change: float
) -> tuple[Tensor, Tensor]:
    """The one variance ``[...]``, and the ratios of the groups' own to it ``[..., G]``, after what they were.

    What halves of an average client disagree on ``[..., G]``, in nats, is how many parameters of a group it
    decides.  Times the ``number [...]`` of clients that this is a mean of, it is what the logarithm of a group's
    own variance counts for beside that of the one of all.
    """
    old = one.to(agreements)
    total = disagreements.sum(-1)
    one = _within(old, agreements.sum(-1) / total, most_change)
    # Where clients decide next to nothing, nothing is gained by holding them harder.
    one = torch.where(total < LEAST_DECIDED, one.maximum(old), one)
    before = old.unsqueeze(-1) * ratios.to(agreements)
    own = _within(before, agreements / disagreements, most_change)
    decided = disagreements.clamp(min=0.0) * number.unsqueeze(-1)
    return one, (own / one.unsqueeze(-1)) ** (decided / (decided + PRIOR_DECIDED))


def find_prior_rows(upload: AutoUpload | ClosingUpload, num_params: int, number: int) -> Tensor:
    """n_0 ``[...]``: k = N/(N + n_0) of an average of ``number`` clients is the share of the parameters it decides.

    Where rows decide nearly everything, by what they leave undecided.  NaN where what is measured may be noise alone.
    """
    disagreement = sum_disagreements(upload).sum(-1)
    decided = (disagreement + upload.undecided) / upload.temperature / num_params
    odds = torch.maximum(1.0 / decided - 1.0, upload.undecided / disagreement)
    prior_rows = upload.num_examples / number * odds.clamp(min=LEAST_UNDECIDED)
    return prior_rows.where(disagreement > 0, torch.nan)


def sum_disagreements(upload: AutoUpload | ClosingUpload) -> Tensor:
    """What halves disagree on ``[..., G]``, summed over clients; in all, no less than a share of its squared form."""
    least = LEAST_DISAGREEMENT * upload.squared_disagreements
    is_less = upload.disagreements.sum(-1, keepdim=True) < least.sum(-1, keepdim=True)
    return torch.where(is_less, least, upload.disagreements)


def _within(old: Tensor, new: Tensor, most_change: float) -> Tensor:
    """A variance after a round: no more than so many times what it was, nor less than one over that."""
    return torch.where(new.isfinite(), new, old).clamp(min=old / most_change, max=old * most_change)
