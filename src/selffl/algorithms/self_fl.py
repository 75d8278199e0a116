"""Self-FL: uncertainty decides where local training starts, how long it runs, and how much each client weighs.

Chen et al., Self-Aware Personalized Federated Learning, NeurIPS 2022, Algorithm 1; with ``form="exact"`` the same
steps towards the exact posterior (D11).  Personalises the whole model.  The server keeps the global model, sigma_0^2
and one scalar per client, its last reported sigma_m^2 (D5).  It needs single clients: their weights follow from the
spread of this round's models, Eqs. (17) and (20).  `selffl.algorithms.self_fl_sums` does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from selffl.algorithms.averaging import row_count, to_each
from selffl.algorithms.contract import Algorithm
from selffl.algorithms.local_task import LocalTask
from selffl.algorithms.population import Population
from selffl.algorithms.records import ADDED_LATER
from selffl.algorithms.safeguards import Bound
from selffl.algorithms.self_fl_clients import OneModelClients, PlanningClients, SelfFLBroadcast, SelfFLMemory
from selffl.algorithms.solver import descend
from selffl.errors import ConfigError
from selffl.maths.posterior import local_weight, others_variance, prior_variance, relative_precision, weighted_mean
from selffl.maths.variance import Spread

MOST_VARIANCE = 4.0  # times the squared length of the longest model that sigma_m^2 may be: the spread of m's models


@dataclass(frozen=True)
class SelfFLServer:
    """What the server knows."""

    params: Tensor  # theta^t [..., P]
    inter_variance: Tensor  # sigma_0^2 [...]
    intra_variance: Tensor  # sigma_m^2 [..., M], as last reported; NaN where unknown
    largest_square: Tensor = field(
        metadata={ADDED_LATER: True}
    )  # squared length of the longest model sent so far [...]


@dataclass(frozen=True)
class SelfFLUpload:
    """What a client sends back: its model, its number of rows, and one number more."""

    params: Tensor  # theta_m^t [..., C, P]
    num_examples: Tensor  # N_m [..., C]
    intra_variance: Tensor  # sigma_m^2 [..., C]; NaN while unknown
    num_local_steps: Tensor  # l_m [..., C], for the record
    wanted_steps: Tensor  # l_m before rounding and l_max [..., C], likewise; NaN while the variance is unknown


Server = TypeVar("Server", bound=SelfFLServer)
Memory = TypeVar("Memory", bound=SelfFLMemory)
Upload = TypeVar("Upload", bound=SelfFLUpload)


@dataclass(frozen=True)
class SingleClients(PlanningClients, Algorithm[Server, SelfFLBroadcast, Memory, Upload]):
    """A variant of Self-FL whose server knows the variance of every client, as last reported (D5)."""

    uploads_add: ClassVar[bool] = False
    has_inter_variance: ClassVar[bool] = True
    recorded: ClassVar[tuple[str, ...]] = ("num_local_steps", "wanted_steps")
    may_be_unknown: ClassVar[tuple[str, ...]] = ("intra_variance", "wanted_steps")
    averaged: ClassVar[Mapping[str, str | None]] = {"params": None}
    no_defence: ClassVar[Mapping[str, str]] = {
        "median": "σ₀² is the spread of its clients' models, and medians have none"
    }
    per_client: ClassVar[tuple[str, ...]] = ("intra_variance",)

    def start(self, params: Tensor, population: Population) -> Any:
        """Algorithm 1, input: sigma_0^2 = 0 and no sigma_m^2, unless they are known."""
        unknown = params.new_full((*params.shape[:-1], population.num_clients), torch.nan)
        if self.variances == "estimated":
            return SelfFLServer(params, torch.zeros_like(params[..., 0]), unknown, torch.zeros_like(params[..., 0]))
        if population.intra_variance is None or population.inter_variance is None:
            raise ConfigError(
                "variances='known', but the federation states no variances; expected intra_variance and "
                "inter_variance. Give them, or use variances='estimated'."
            )
        return SelfFLServer(
            params,
            population.inter_variance.to(params).expand(params.shape[:-1]),
            population.intra_variance.to(params).expand_as(unknown),
            torch.zeros_like(params[..., 0]),
        )

    def broadcast_with(self, server: Server, clients: Tensor, others_variance: Tensor) -> SelfFLBroadcast:
        """What goes out to the cohort, once 1/S_m ``[..., C]`` is there."""
        stated = server.intra_variance.gather(-1, clients)
        return SelfFLBroadcast(
            params=to_each(server.params, clients),
            inter_variance=to_each(server.inter_variance, clients),
            others_variance=others_variance,
            intra_variance=stated if self.variances == "known" else torch.full_like(stated, torch.nan),
        )

    def smooth(self, server: Server, estimate: Tensor, clients: Tensor) -> Tensor:
        """The new global model: the old one, moved towards the new estimate (D9)."""
        share = self.share_of_estimate(clients.shape[-1], server.intra_variance.shape[-1])
        return torch.lerp(server.params, estimate, share)

    def inter_variance(self, server: Server) -> Tensor:
        """sigma_0^2 of Eq. (17)."""
        return server.inter_variance

    def intra_variance(self, server: Server, clients: Tensor, recorded: Mapping[str, Tensor]) -> Tensor:
        """sigma_m^2, as last reported."""
        return server.intra_variance.gather(-1, clients)

    def longest(self, server: Server, upload: Upload) -> Tensor:
        """Squared length of the longest model that anybody has sent by now ``[...]``."""
        return server.largest_square.maximum(upload.params.square().sum(-1).amax(-1))

    def bounds(self, server: Server, clients: Tensor, upload: Upload, rows: Tensor) -> Mapping[str, Bound]:
        """A variance is as it was stated, or that of models that were sent, and so no more than their squared length.

        The variance of some vectors is at most the largest of their squared lengths.  Answers may have been lost, so
        that the longest model may have been up to twice as long as any that arrived.
        """
        variance = MOST_VARIANCE * server.largest_square.unsqueeze(-1).maximum(upload.params.square().sum(-1))
        stated = server.intra_variance.gather(-1, clients)
        is_known = self.variances == "known"
        return {
            "num_examples": row_count(rows),
            "intra_variance": Bound(stated, stated) if is_known else Bound(0.0, variance),
        }

    def moves(self, server: Server, upload: Upload) -> dict[str, Tensor]:
        """How each client's model differs from the global one."""
        return {"params": upload.params - server.params.unsqueeze(-2)}

    def replace_moves(self, server: Server, upload: Upload, moves: Mapping[str, Tensor]) -> Upload:
        """The upload of clients whose models differ by ``moves``."""
        return replace(upload, params=server.params.unsqueeze(-2) + moves["params"])


class ClientLevel(SingleClients[SelfFLServer, Memory, Upload]):
    """A variant whose clients are weighed one by one, Eq. (20)."""

    def broadcast(self, server: SelfFLServer, clients: Tensor) -> SelfFLBroadcast:
        """Send the model, sigma_0^2, and to each client the variance 1/S_m of theta_0 given the others.

        Decision D5: S_m runs over this round's cohort, each member with its last reported variance.  The server takes
        the client's own term out itself, as a sum over the others: the client cannot know which value the server
        assumed for it (D3), and a difference of sums would lose digits.
        """
        known = fill_unknown_variances(server.intra_variance)
        own = known.gather(-1, clients)
        pool = known if self.others == "all" else own
        rest = others_variance((server.inter_variance.unsqueeze(-1) + pool).unsqueeze(-1)).squeeze(-1)
        rest = rest.gather(-1, clients) if self.others == "all" else rest
        nothing_known = server.intra_variance.isnan().all(-1, keepdim=True)
        return self.broadcast_with(server, clients, rest.masked_fill(nothing_known, torch.nan))

    def server_round(self, server: SelfFLServer, clients: Tensor, upload: Upload) -> SelfFLServer:
        """Algorithm 1, ServerUpdate: Eqs. (17) and (20), then the smoothing average (section 4.1, D9)."""
        inter = server.inter_variance
        # Decision D8: a cohort of one has no spread; keep the last sigma_0^2.
        if self.variances == "estimated" and clients.shape[-1] > 1:
            inter = Spread.of(upload.params).variance(self.variance_scale)
        intra = server.intra_variance.scatter(-1, clients, upload.intra_variance.to(server.intra_variance))
        known = replace(server, inter_variance=inter, intra_variance=intra, largest_square=self.longest(server, upload))
        estimate = weighted_mean(upload.params, self.weights(known, clients, upload).unsqueeze(-1))
        return replace(known, params=self.smooth(server, estimate, clients))

    def weights(self, server: SelfFLServer, clients: Tensor, upload: Upload) -> Tensor:
        """Eq. (20), once the variances are those of this round; numbers of examples without it (D13)."""
        if not self.uncertainty_weights:
            return upload.num_examples.to(upload.params)
        total = server.inter_variance.unsqueeze(-1) + fill_unknown_variances(server.intra_variance).gather(-1, clients)
        return relative_precision(total.unsqueeze(-1))[0].squeeze(-1)

    def gains(self, server: SelfFLServer, num_examples: Tensor) -> Tensor:
        """Factor by which the others shrink each client's variance, ``[..., M]`` (1/k_m of Eq. (3)).

        Not a number where the client's variance is unknown, or nothing is left of it.
        """
        known = fill_unknown_variances(server.intra_variance.double())
        inter = server.inter_variance.double().unsqueeze(-1)
        prior = prior_variance(others_variance((inter + known).unsqueeze(-1)).squeeze(-1), inter, self.form)
        gain = 1.0 / local_weight(known, prior)
        return gain.masked_fill(server.intra_variance.isnan() | gain.isinf(), torch.nan)


class SingleModels(OneModelClients):
    """Clients that send the one model that they keep, for a server that knows each of them."""

    def client_round(
        self, broadcast: SelfFLBroadcast, memory: SelfFLMemory, task: LocalTask
    ) -> tuple[SelfFLUpload, SelfFLMemory]:
        """Algorithm 1, ClientUpdate: Eqs. (16), (18), (19), then local training."""
        plan = self.plan(broadcast, memory, task)
        trained = descend(task, plan.start, plan.num_local_steps)
        count = task.num_examples.to(trained)
        upload = SelfFLUpload(trained, count, plan.intra_variance, plan.num_local_steps, plan.wanted_steps)
        return upload, SelfFLMemory(trained, memory.spread.update(trained))


@dataclass(frozen=True)
class SelfFL(SingleModels, ClientLevel[SelfFLMemory, SelfFLUpload]):
    """Self-FL; its options are those of its clients."""

    name: ClassVar[str] = "self-fl"
    source: ClassVar[str] = "Chen et al., NeurIPS 2022"


def fill_unknown_variances(intra_variance: Tensor) -> Tensor:
    """Variances ``[..., M]`` with the unknown ones set to the mean of the known, or to 0 if none is (D3).

    When none is known every client has the same total variance, and therefore the same weight.
    """
    return torch.where(intra_variance.isnan(), intra_variance.nanmean(-1, keepdim=True).nan_to_num(), intra_variance)
