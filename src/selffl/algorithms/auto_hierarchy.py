"""What `selffl.algorithms.self_fl_auto` has learned of how clients vary, and what closing visits make of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from selffl.algorithms.auto_mixed import order_of
from selffl.algorithms.auto_records import AutoServer, AutoUpload, LatestSpread
from selffl.algorithms.hierarchy import Hierarchy
from selffl.maths.split_half import ratio_error, ratio_interval


class AutoHierarchy(Hierarchy[AutoServer, AutoUpload]):
    """Both variances and the prior of closing visits, as training has learned them, or closing rounds since."""

    prior_precision: float | None  # c, by hand; none: it is learned

    has_inter_variance: ClassVar[bool] = True
    has_group_variances: ClassVar[bool] = True
    information_balance: ClassVar[float | None] = 0.25  # half-way between empirical (0) and expected (1/2) information

    def latest_spread(self, server: AutoServer) -> LatestSpread:
        """How clients vary, as closing rounds say, or training while there have been none."""
        is_open, found = server.closing.inter_variance.isnan(), []
        for name in LatestSpread._fields:
            trained, closed = getattr(server, name), getattr(server.closing, name)
            shaped = is_open.reshape((*is_open.shape, *[1] * (trained.ndim - is_open.ndim)))
            found.append(torch.where(shaped, trained, closed))
        return LatestSpread(*found)

    def inter_variance(self, server: AutoServer) -> Tensor:
        """sigma_0^2, as learned."""
        return self.latest_spread(server).inter_variance

    def group_variances(self, server: AutoServer) -> Tensor:
        """sigma_g^2: the one of all times how much more or less a group varies."""
        found = self.latest_spread(server)
        return found.inter_variance.unsqueeze(-1) * found.variance_ratios

    def inter_variance_interval(self, server: AutoServer) -> tuple[Tensor, Tensor] | None:
        """Between what sigma_0^2 lies, by how far clients' reports of it differ; none where it is set by hand.

        sigma_0^2 itself is inside, also while it is on its way to where reports say that it is.
        """
        if self.prior_precision is not None:
            return None
        found = self.latest_spread(server)
        agreement, disagreement = (part.double().sum(-1) for part in (found.agreements, found.disagreements))
        error = ratio_error(agreement, disagreement, found.spread_products.double(), found.num_reporting)
        low, high = ratio_interval(agreement / disagreement, error)
        return low.minimum(found.inter_variance), high.maximum(found.inter_variance)

    def intra_variance(self, server: AutoServer, clients: Tensor, recorded: Mapping[str, Tensor]) -> Tensor:
        """sigma_m^2 = sigma_0^2 n_0/N_m."""
        return self.intra_variance_by_rows(server, recorded["num_examples"])

    def intra_variance_by_rows(self, server: AutoServer, num_examples: Tensor) -> Tensor:
        """sigma_m^2 = sigma_0^2 n_0/N_m, as it is known last."""
        found = self.latest_spread(server)
        return (found.inter_variance * found.prior_rows).unsqueeze(-1) / num_examples

    def gains(self, server: AutoServer, num_examples: Tensor) -> Tensor:
        """Factor by which the others shrink each client's variance, ``[..., M]``: 1 + sigma_m^2/sigma_0^2 (D11)."""
        return 1.0 + self.latest_spread(server).prior_rows.double().unsqueeze(-1) / num_examples

    def closing_multiple(self, server: AutoServer) -> Tensor:
        """How many times as hard as 1/sigma_0^2 says closing visits are held: less, as the centre is uncertain, too."""
        return self.inter_variance(server) / self.closing_prior(server)[0]

    def closing_prior(self, server: AutoServer) -> tuple[Tensor, Tensor]:
        """The variance of the prior in closing visits ``[...]``, and the ratios of the groups' to it ``[..., G]``."""
        found = server.closing
        is_open = found.prior_variance.isnan()
        one = torch.where(is_open, server.inter_variance, found.prior_variance)
        return one, torch.where(is_open.unsqueeze(-1), server.variance_ratios, found.prior_ratios)

    def closing_centre(self, server: AutoServer) -> Tensor:
        """The prior mean of closing visits ``[..., P]``: theta, and as far as closing rounds have moved it.

        Small linear models have theirs apart (`closing_mixture`).
        """
        shift = server.closing.shift
        return torch.where(shift.isnan(), server.params, server.params + shift)

    def closing_variances(self, server: AutoServer) -> Tensor:
        """Variances of the prior in closing visits, group by group ``[..., G]``."""
        one, ratios = self.closing_prior(server)
        return one.unsqueeze(-1) * ratios

    def closing_mixture(self, server: AutoServer) -> tuple[Tensor, Tensor]:
        """The prior of small linear models: covariance of coefficients ``[..., q, q]``, and a centre beyond theta."""
        mixed, order = server.closing.mixed, order_of(server.coefficient_order)
        if not len(order):
            return mixed.covariance, mixed.centre
        variances, size = self.closing_variances(server)[..., order].to(mixed.covariance), mixed.covariance.shape[-1]
        alone = variances.reshape(*variances.shape[:-1], -1, size).mean(-2).diag_embed()
        covariance = mixed.covariance.where(~mixed.covariance.isnan(), alone)
        return covariance, mixed.centre.nan_to_num(nan=0.0)
