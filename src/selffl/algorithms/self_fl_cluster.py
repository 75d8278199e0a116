"""Self-FL by clusters: the server keeps a representative of every cluster, and none is forgotten while it is away.

Chen et al., NeurIPS 2022, the cluster-level variant of the appendix on client selection (D12).  A cluster takes the
place of a client: its members share one parameter, of which each member's model is an estimate with variance sigma_m^2.
So sigma_c^2 = 1 / sum_{m in c} 1/sigma_m^2 over the members that made the representative, theta_c is their mean by
1/sigma_m^2, sigma_0^2 is the spread of the representatives, clusters weigh 1/(sigma_0^2 + sigma_c^2), and S_m runs over
the clusters that client m is not in: while it trains, a client stands for its cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from selffl.algorithms.options import check_choice, check_integer, option
from selffl.algorithms.population import Population
from selffl.algorithms.self_fl import SelfFLServer, SelfFLUpload, SingleClients, SingleModels, fill_unknown_variances
from selffl.algorithms.self_fl_clients import SelfFLBroadcast, SelfFLMemory
from selffl.errors import ConfigError
from selffl.maths.posterior import others_variance, relative_precision, weighted_mean
from selffl.maths.variance import Spread


@dataclass(frozen=True)
class ClusterServer(SelfFLServer):
    """What the server knows: of a cluster one model and two numbers, of a client two numbers."""

    cluster: Tensor  # c(m) [..., M], whole numbers
    cluster_params: Tensor  # theta_c [..., K, P], the representatives; NaN before a member has answered
    cluster_variance: Tensor  # sigma_c^2 [..., K]; NaN where unknown
    cluster_examples: Tensor  # rows behind the representative [..., K]; 0 before a member has answered


@dataclass(frozen=True)
class SelfFLCluster(SingleModels, SingleClients[ClusterServer, SelfFLMemory, SelfFLUpload]):
    """Options of Self-FL, and what the clusters are.

    ``others`` is ``all`` clusters here, or those of this round's ``cohort``.

    Attributes:
        clusters: ``column``: those that the federation names; ``variance``: quantiles of the last reported σₘ², taken
            anew after every round, so that a client can move.  Who is unknown counts with the mean of the known
            (D3); while nobody is known, all are in the first cluster.
        num_clusters: How many quantiles; a column has its own number.
    """

    name: ClassVar[str] = "self-fl-cluster"
    source: ClassVar[str] = "Chen et al., NeurIPS 2022"
    per_client: ClassVar[tuple[str, ...]] = ("intra_variance", "cluster")

    others: Literal["cohort", "all"] = "all"
    clusters: Literal["column", "variance"] = option("column", check_choice, allowed=("column", "variance"))
    num_clusters: int = option(5, check_integer, least=1)

    def start(self, params: Tensor, population: Population) -> ClusterServer:
        """No representative yet; a cluster whose variances are stated has the variance of all its members together."""
        client_level: SelfFLServer = super().start(params, population)
        intra = client_level.intra_variance
        if self.clusters == "variance":
            number, cluster = self.num_clusters, self.quantiles(intra)
        elif population.cluster is None:
            raise ConfigError(
                "clusters='column', but the federation names no clusters; expected one for each client. "
                "Give them, or use clusters='variance'."
            )
        else:
            number, cluster = (
                int(population.cluster.max()) + 1,
                population.cluster.to(params.device).expand(intra.shape),
            )
        is_member = _membership(cluster, number)
        _, variance = _precision(intra.unsqueeze(-2), is_member)
        blank = params.unsqueeze(-2).expand(*params.shape[:-1], number, params.shape[-1])
        return ClusterServer(
            params,
            client_level.inter_variance,
            intra,
            client_level.largest_square,
            cluster,
            torch.full_like(blank, torch.nan),
            variance.masked_fill(~is_member.any(-1), torch.nan),
            torch.zeros_like(variance),
        )

    def quantiles(self, intra_variance: Tensor) -> Tensor:
        """Cluster of each client by its variance ``[..., M]``: K times the share of known ones below it, rounded down.

        By rank and in whole numbers, so that rounding does not decide who is above a quantile.
        """
        is_unknown = intra_variance.isnan()
        ranked = intra_variance.masked_fill(is_unknown, torch.inf).sort(-1).values
        largest = intra_variance.masked_fill(is_unknown, -torch.inf).amax(-1, keepdim=True)
        # The mean of equal numbers may round above them.
        below = torch.searchsorted(ranked, torch.minimum(fill_unknown_variances(intra_variance), largest))
        return below * self.num_clusters // (~is_unknown).sum(-1, keepdim=True).clamp(min=1)

    def broadcast(self, server: ClusterServer, clients: Tensor) -> SelfFLBroadcast:
        """Send what Self-FL sends, with 1/S_m over the clusters that the client is not in."""
        cluster = server.cluster.gather(-1, clients)
        total = server.inter_variance.unsqueeze(-1) + fill_unknown_variances(server.cluster_variance)
        # An empty cluster is nobody's other; nor, if asked for, is one that has nobody in this round.
        counted = cluster if self.others == "cohort" else server.cluster
        is_counted = _membership(counted, total.shape[-1]).any(-1)
        rest = others_variance(total.masked_fill(~is_counted, torch.inf).unsqueeze(-1)).squeeze(-1).gather(-1, cluster)
        nothing_known = server.cluster_variance.isnan().all(-1, keepdim=True)
        return self.broadcast_with(server, clients, rest.masked_fill(nothing_known, torch.nan))

    def server_round(self, server: ClusterServer, clients: Tensor, upload: SelfFLUpload) -> ClusterServer:
        """New representatives for the clusters that have members here; then the average over all representatives."""
        cluster, number = server.cluster.gather(-1, clients), server.cluster_variance.shape[-1]
        intra = server.intra_variance.scatter(-1, clients, upload.intra_variance.to(server.intra_variance))
        is_member = _membership(cluster, number)  # [..., K, C]
        is_active = is_member.any(-1)
        counts = upload.num_examples.unsqueeze(-2) * is_member
        weight, fresh = _precision(fill_unknown_variances(intra).gather(-1, clients).unsqueeze(-2), is_member)
        weight = weight if self.uncertainty_weights else counts
        share = weight / weight.sum(-1, keepdim=True).masked_fill(~is_active.unsqueeze(-1), 1.0)
        # Known is the variance of a representative of which at least one member's is.
        is_known = (is_member & ~upload.intra_variance.isnan().unsqueeze(-2)).any(-1)
        params = torch.where(is_active.unsqueeze(-1), share @ upload.params, server.cluster_params)
        variance = torch.where(is_active, fresh.masked_fill(~is_known, torch.nan), server.cluster_variance)
        examples = torch.where(is_active, counts.sum(-1), server.cluster_examples)

        heard = examples > 0
        spoken = params.masked_fill(~heard.unsqueeze(-1), 0.0)
        # D8 needs no care: who has been heard stays so, and a single representative has spread 0, as at the start.
        is_estimated = self.variances == "estimated"
        inter = _spread(spoken, heard).variance(self.variance_scale) if is_estimated else server.inter_variance
        total = (inter.unsqueeze(-1) + fill_unknown_variances(variance)).masked_fill(~heard, torch.inf)
        by_cluster = relative_precision(total.unsqueeze(-1))[0] if self.uncertainty_weights else examples.unsqueeze(-1)
        estimate = weighted_mean(spoken, by_cluster)
        return ClusterServer(
            self.smooth(server, estimate, clients),
            inter,
            intra,
            self.longest(server, upload),
            self.quantiles(intra) if self.clusters == "variance" else server.cluster,
            params,
            variance,
            examples,
        )


def _membership(cluster: Tensor, number: int) -> Tensor:
    """Whether each client ``[..., C]`` is in each cluster: ``[..., K, C]``."""
    return cluster.unsqueeze(-2) == torch.arange(number, device=cluster.device).unsqueeze(-1)


def _precision(intra_variance: Tensor, is_member: Tensor) -> tuple[Tensor, Tensor]:
    """Weights 1/sigma_m^2 of the members of each cluster ``[..., K, C]`` (relative), and sigma_c^2 ``[..., K]``."""
    of_members = intra_variance.masked_fill(~is_member, torch.inf)
    weight, scale = relative_precision(of_members.unsqueeze(-1))
    weight = weight.squeeze(-1) * is_member
    return weight, scale.squeeze(-1).squeeze(-1) / weight.sum(-1).clamp(min=1.0)


def _spread(models: Tensor, counted: Tensor) -> Spread:
    """Spread of those of ``models [..., K, P]`` that count, ``[..., K]``; the others are zero."""
    count = counted.sum(-1).to(models)
    mean = models.sum(-2) / count.unsqueeze(-1)
    return Spread(count, mean, ((models - mean.unsqueeze(-2)).square().sum(-1) * counted).sum(-1))
