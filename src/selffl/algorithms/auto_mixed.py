"""The closing rounds of `selffl.algorithms.self_fl_auto` for small linear models: they fit a mixed model.

Where a model is one linear layer of few coefficients and outcomes are numbers, clients find their posterior modes by
Newton's method (`selffl.algorithms.posterior_mode`).  They send the slope and the curvature of their loss there, and
products of these.
From the sums the server learns by restricted maximum likelihood how much each coefficient varies between clients, how
coefficients vary together, and the centre that they vary around (`selffl.maths.mixed_model`).  A few such rounds arrive
where software for mixed models does that has all rows in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from selffl.algorithms.auto_closing import RoundAfterTraining, is_mixed
from selffl.algorithms.auto_records import (
    AutoBroadcast,
    AutoMemory,
    AutoServer,
    ClosingSpread,
    MixedSpread,
    MixedUpload,
)
from selffl.algorithms.averaging import row_count
from selffl.algorithms.posterior_mode import in_model_order
from selffl.algorithms.rowwise import RowwiseTask
from selffl.algorithms.safeguards import Bound
from selffl.maths.mixed_model import (
    MixedSums,
    Moments,
    for_blocks,
    in_other_units,
    information_of,
    information_products_of,
    learn_covariance,
    roots_of,
    shrink_to_none,
)

# Decision D17: these numbers are part of the method, the same for every model and data set.
NUM_MIXED_ROUNDS = 8
NUM_WHOLE_STEPS = 3  # the first of these rounds; later steps are half as long, and settle where whole ones do not
LEAST_UNIT = 1e-3  # of a variance, in whose units clients send: in smaller ones their numbers would be too small
TOLERANCE = 1e-6  # of products that have been rounded
LEAST_UNDECIDED = 1e-6  # share of the parameters that rows leave undecided, at least


@dataclass(frozen=True)
class MixedRound(RoundAfterTraining[MixedUpload]):
    """A closing round in which clients send what their rows' likelihood says of a mixed model."""

    capped: ClassVar[Mapping[str, float]] = {
        **dict.fromkeys(("num_examples", "num_errors"), 1e2),
        **dict.fromkeys(("score", "information", "variation"), 1e3),
        **dict.fromkeys(("score_products", "information_products"), 1e6),
    }

    def is_due(self, server: AutoServer) -> bool:
        """Whether there is a mixed model to fit: where outcomes are numbers."""
        return is_mixed(server)

    def client_round(
        self, broadcast: AutoBroadcast, memory: AutoMemory, task: RowwiseTask
    ) -> tuple[MixedUpload, AutoMemory]:
        """What the likelihood of its rows says of the covariance and of the centre, at the posterior mode."""
        found, _ = self.method.closing_modes(broadcast, memory, task)
        size = broadcast.closing_covariance.shape[-1]
        covariance, num_scores = broadcast.closing_covariance.double(), found.score.shape[-1] // size
        root = for_blocks(roots_of(covariance, LEAST_UNIT)[0], num_scores)
        inner = information_of(found.curvature, for_blocks(covariance, num_scores))
        information = root @ inner @ root
        score = (root @ found.score.unsqueeze(-1)).squeeze(-1)
        blocks = score.reshape(*score.shape[:-1], -1, size)
        upload = MixedUpload(
            task.num_examples.expand(task.shape).to(score),
            score,
            blocks.mT @ blocks,
            information,
            information_products_of(information, size),
            torch.where(found.num_errors > 0, 2.0 * found.value, 0.0),
            found.num_errors,
            (inner * for_blocks(covariance, num_scores)).sum((-2, -1)),
        )
        return upload, memory

    def server_round(self, server: AutoServer, clients: Tensor, upload: MixedUpload) -> AutoServer:
        """A step of the covariance and of the centre."""
        before, number = server.closing.mixed, clients.shape[-1]
        covariance, centre = self.method.closing_mixture(server)
        sampled = (number / server.num_clients).double()
        sent = MixedSums(
            upload.score, upload.score_products, upload.information, upload.information_products, upload.variation,
            upload.num_errors,
        )  # fmt: skip
        sums = in_other_units(sent, roots_of(covariance.double(), LEAST_UNIT)[1])
        earlier = Moments(before.moments.double(), before.moments_matrix.double())
        # The same clients tell nothing new: their latest answers count.
        share = torch.where(sampled < 1, 1.0 / self.number, 1.0)
        seen = (self.number * sampled).clamp(max=1.0) / sampled
        part = 1.0 if self.number <= NUM_WHOLE_STEPS else 0.5
        found = learn_covariance(sums, covariance.double(), centre.double(), earlier, share, sampled, seen, part)
        # What is reported is what the likelihood says; visits are held by what can be told from nothing.
        is_last = self.number == NUM_MIXED_ROUNDS
        prior = shrink_to_none(found.covariance, found.errors) if is_last else found.covariance
        one, ratios = self.by_parameter(server, found.covariance)
        decided = upload.decided / number / centre.shape[-1]
        prior_rows = upload.num_examples / number * (1.0 / decided - 1.0).clamp(min=LEAST_UNDECIDED)
        # A mean over so many clients whose standard error is that of the covariance.
        clients_seen = number * seen
        squares = one.square() + found.error.square() * (clients_seen - 1.0)
        share_of_each = torch.full_like(ratios, 1.0 / ratios.shape[-1])
        known = ClosingSpread(
            one, ratios, *self.by_parameter(server, prior),
            torch.where(prior_rows.isfinite(), prior_rows, server.prior_rows.to(prior_rows)),
            share_of_each * one.unsqueeze(-1),
            torch.zeros_like(ratios),
            share_of_each,
            torch.stack([squares, one, torch.ones_like(one)], dim=-1),
            clients_seen,
            MixedSpread(prior, centre.double() + share.unsqueeze(-1) * found.shift, *found.moments),
            torch.zeros_like(server.params),  # how far the centre is from theta, it says itself
        )  # fmt: skip
        is_usable = found.covariance.isfinite().all(-1).all(-1) & found.shift.isfinite().all(-1)
        return replace(server, closing=known.where(is_usable, server.closing))

    def by_parameter(self, server: AutoServer, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """The mean variance of the coefficients ``[...]``, and the ratio of each parameter's to it ``[..., P]``."""
        variances, order = covariance.diagonal(dim1=-2, dim2=-1), order_of(server.coefficient_order)
        one = variances.mean(-1)
        ratios = (variances / one.unsqueeze(-1)).repeat(*[1] * one.ndim, len(order) // variances.shape[-1])
        return one, in_model_order(ratios, order)

    def bounds(self, server: AutoServer, clients: Tensor, upload: MixedUpload, rows: Tensor) -> Mapping[str, Bound]:
        """A client has no more rows than it has, and no products but those of what it says."""
        size = upload.score_products.shape[-1]
        blocks = upload.score.double().reshape(*upload.score.shape[:-1], -1, size)
        products = blocks.mT @ blocks
        of_information = information_products_of(upload.information.double(), size)
        slack, much = (TOLERANCE * each.abs().amax((-2, -1), keepdim=True) for each in (products, of_information))
        any_number = Bound(-torch.inf, torch.inf)
        return {
            "num_examples": row_count(rows),
            "score": any_number,
            "score_products": Bound(products - slack, products + slack),
            "information": any_number,
            "the diagonal of information": Bound(0.0, torch.inf, upload.information.diagonal(dim1=-2, dim2=-1)),
            "information_products": Bound(of_information - much, of_information + much),
            "decided": Bound(0.0, upload.score.shape[-1]),
        }


def order_of(coefficient_order: Tensor) -> Tensor:
    """Places of coefficients ``[P]``, of ``coefficient_order [..., P]`` that is the same everywhere."""
    return coefficient_order[(0,) * (coefficient_order.ndim - 1)]
