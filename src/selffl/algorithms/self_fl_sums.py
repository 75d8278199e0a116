"""Self-FL by sums: the server learns three sums over the cohort and nothing of any single client.

Not in the paper.  In Algorithm 1 the server weighs clients by 1/(sigma_0^2 + sigma_m^2), and so has to be told each
sigma_m^2 and each model.  Here sigma_0^2 is one round old, so that a client can weigh its own change d_m = theta_m -
theta^{t-1}, and sends w_m d_m, w_m and w_m ||d_m||^2.  From their sums alone (D16):

    theta^t     = theta^{t-1} + D / W                 D = sum w_m d_m, W = sum w_m, Q = sum w_m ||d_m||^2
    sigma_0^2   = Q / W - ||D / W||^2                 times n where variances are summed (D2)
    w_m         = r / (sigma_0^2 + sigma_m^2)         r = sigma_0^2 + v, what an average client's total is
    v           = r n / W - sigma_0^2                 so that r is the last cohort's harmonic mean of totals
    1 / S_m     = r / (n - 1)                         as if the others were average clients

Changes rather than models are summed: the same by algebra, and Q does not lose the digits of sigma_0^2 in ||theta||^2.

Sums can be bounded and noisy (`selffl.engines.limits`): everything that is published is made of them, the global
model, sigma_0^2 and r.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from selffl.algorithms.averaging import move, to_each
from selffl.algorithms.contract import Algorithm
from selffl.algorithms.local_task import LocalTask
from selffl.algorithms.population import Population
from selffl.algorithms.safeguards import Bound, Limit
from selffl.algorithms.self_fl_clients import OneModelClients, SelfFLBroadcast, SelfFLMemory
from selffl.algorithms.solver import descend
from selffl.errors import ConfigError

TINY = 1e-12  # of a sum: below that a float has lost digits


@dataclass(frozen=True)
class SumsServer:
    """What the server knows."""

    params: Tensor  # theta^t [..., P]
    inter_variance: Tensor  # sigma_0^2 [...]
    intra_variance: Tensor  # v [...], of an average client; 0 while none is known
    num_clients: Tensor  # M [...]


@dataclass(frozen=True)
class SumsBroadcast(SelfFLBroadcast):
    """What a client is sent: the model and three numbers that are the same for everybody."""

    total_variance: Tensor  # r [..., C]


@dataclass(frozen=True)
class SumsUpload:
    """What a client adds to the sums."""

    change: Tensor  # w_m d_m [..., C, P]
    weight: Tensor  # w_m [..., C]
    square: Tensor  # w_m ||d_m||^2 [..., C]


@dataclass(frozen=True)
class SelfFLSums(OneModelClients, Algorithm[SumsServer, SumsBroadcast, SelfFLMemory, SumsUpload]):
    """Options of Self-FL whose server knows nothing but sums: those of Self-FL.

    ``others`` says whether the others are as many as this round's ``cohort``, or as ``all`` clients.
    """

    name: ClassVar[str] = "self-fl-sums"
    has_inter_variance: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variances == "known":
            raise ConfigError("variances is 'known'; expected 'estimated': the server does not know single clients.")
        if not self.uncertainty_weights:
            raise ConfigError(
                "uncertainty_weights is False; expected True: numbers of examples are not among the sums."
            )

    def start(self, params: Tensor, population: Population) -> SumsServer:
        """sigma_0^2 = 0, and nothing known of the clients."""
        nothing = torch.zeros_like(params[..., 0])
        return SumsServer(params, nothing, nothing, torch.full_like(nothing, population.num_clients))

    def broadcast(self, server: SumsServer, clients: Tensor) -> SumsBroadcast:
        """Send everybody the model, sigma_0^2, r, and 1/S_m as if the others were average clients."""
        total = server.inter_variance + server.intra_variance
        number = torch.full_like(total, clients.shape[-1]) if self.others == "cohort" else server.num_clients
        rest = torch.where(total > 0, total / (number - 1), torch.nan)  # before the first spread nothing is known

        return SumsBroadcast(
            params=to_each(server.params, clients),
            inter_variance=to_each(server.inter_variance, clients),
            others_variance=to_each(rest, clients),
            intra_variance=to_each(torch.full_like(total, torch.nan), clients),
            total_variance=to_each(total, clients),
        )

    def client_round(
        self, broadcast: SumsBroadcast, memory: SelfFLMemory, task: LocalTask
    ) -> tuple[SumsUpload, SelfFLMemory]:
        """Local training as Self-FL's; then the client weighs its own change."""
        plan = self.plan(broadcast, memory, task)
        trained = descend(task, plan.start, plan.num_local_steps)
        weight = self.own_weight(broadcast, plan.intra_variance)
        change = trained - broadcast.params
        upload = SumsUpload(weight.unsqueeze(-1) * change, weight, weight * change.norm(dim=-1).square())
        return upload, SelfFLMemory(trained, memory.spread.update(trained))

    def own_weight(self, broadcast: SumsBroadcast, intra_variance: Tensor) -> Tensor:
        """r / (sigma_0^2 + sigma_m^2) ``[..., C]``; 1, as an average client, while sigma_m^2 or r is unknown."""
        own = broadcast.inter_variance + intra_variance
        is_known = (own > 0) & (broadcast.total_variance > 0)
        return torch.where(is_known, broadcast.total_variance / own.masked_fill(~is_known, 1.0), 1.0)

    def server_round(self, server: SumsServer, clients: Tensor, upload: SumsUpload) -> SumsServer:
        """The server after a round: model and both variances from the three sums (D16)."""
        return self.noisy_server_round(server, clients, upload, {})

    def noisy_server_round(
        self, server: SumsServer, clients: Tensor, upload: SumsUpload, noise: Mapping[str, float]
    ) -> SumsServer:
        """The server after a round, from sums with noise: less what noise adds to ||D||^2."""
        number, weight = clients.shape[-1], upload.weight
        excess = upload.change.shape[-1] * noise.get("change", 0.0) ** 2
        inter = server.inter_variance
        if number > 1:  # a cohort of one has no spread; the last sigma_0^2 stays (D8)
            length = (upload.change / weight.unsqueeze(-1)).square().sum(-1)
            spread = upload.square / weight - length + excess / weight.square()
            spread = spread.clamp(min=0.0) * (number if self.variance_scale == "sum" else 1)
            inter = spread.to(server.inter_variance)
        total = server.inter_variance + server.intra_variance
        intra = (total * number / weight - server.inter_variance).clamp(min=0.0).to(server.intra_variance)
        share = self.share_of_estimate(number, server.num_clients.unsqueeze(-1))
        return SumsServer(move(server.params, upload.change, weight, share), inter, intra, server.num_clients)

    def inter_variance(self, server: SumsServer) -> Tensor:
        """sigma_0^2, as published."""
        return server.inter_variance

    def bounds(self, server: SumsServer, clients: Tensor, upload: SumsUpload, rows: Tensor) -> Mapping[str, Bound]:
        """Nobody weighs more than at sigma_m^2 = 0, and the three parts of a client are those of one change."""
        inter, total = server.inter_variance, server.inter_variance + server.intra_variance
        most = torch.where(total > 0, total / inter, 1.0).clamp(min=1.0)  # without end where there is no spread
        length = upload.change.double().square().sum(-1)
        square = length / upload.weight.double().clamp(min=TINY)
        return {
            "weight": Bound(0.0, most.unsqueeze(-1)),
            "square": Bound((square - TINY).clamp(min=0.0), square + TINY),
        }

    def limits(self, clip: float, max_weight: float, upload: SumsUpload) -> Mapping[str, Limit]:
        """A change's square is no more than that of the longest."""
        return {**super().limits(clip, max_weight, upload), "square": Limit(clip**2, "weight", is_signed=False)}
