"""Self-FL: uncertainty decides where local training starts, how long it runs, and how much each client weighs.

Chen et al., Self-Aware Personalized Federated Learning, NeurIPS 2022, Algorithm 1; with ``form="exact"`` the same
steps towards the exact posterior (D11).  Personalises the whole model.  The server keeps the global model, sigma_0^2
and one scalar per client, its last reported sigma_m^2 (D5).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from selffl.algorithms.averaging import ModelUpload, check_epochs
from selffl.algorithms.contract import Algorithm, LocalTask, Personalises, Population
from selffl.algorithms.options import above, at_least, one_of, true_or_false
from selffl.algorithms.solver import descend
from selffl.errors import ConfigError
from selffl.maths.posterior import (
    FORMS,
    Form,
    initial_params,
    local_steps,
    local_weight,
    others_variance,
    prior_variance,
    relative_precision,
    rounded_steps,
    weighted_mean,
)
from selffl.maths.variance import Spread, VarianceScale


@dataclass(frozen=True)
class SelfFLServer:
    """What the server knows."""

    params: Tensor  # theta^t [..., P]
    inter_variance: Tensor  # sigma_0^2 [...]
    intra_variance: Tensor  # sigma_m^2 [..., M], as last reported; NaN where unknown


@dataclass(frozen=True)
class SelfFLBroadcast:
    """What a client is sent: the model and three numbers."""

    params: Tensor  # theta^{t-1} [..., C, P]
    inter_variance: Tensor  # sigma_0^2 [..., C]
    others_variance: Tensor  # 1 / S_m [..., C]; NaN while no variance is known to the server
    intra_variance: Tensor  # the client's own sigma_m^2 where variances are known beforehand, else NaN


@dataclass(frozen=True)
class SelfFLMemory:
    """What a client keeps."""

    params: Tensor  # theta_m [..., C, P], the personal model
    spread: Spread  # of theta_m over the client's own rounds (Eq. (22)); its count is the client's clock


@dataclass(frozen=True)
class SelfFLUpload(ModelUpload):
    """What a client sends back: its model theta_m^t, its number of rows, and one number more."""

    intra_variance: Tensor  # sigma_m^2 [..., C]; NaN while unknown
    num_local_steps: Tensor  # l_m [..., C], for the record
    wanted_steps: Tensor  # l_m before rounding and l_max [..., C], likewise; NaN while the variance is unknown


class Plan(NamedTuple):
    """What a client decides before it trains."""

    intra_variance: Tensor  # sigma_m^2 [..., C]; NaN while unknown
    start: Tensor  # theta_m^init [..., C, P]
    num_local_steps: Tensor  # l_m [..., C]
    wanted_steps: Tensor  # l_m before rounding and l_max [..., C]


@dataclass(frozen=True)
class SelfFL(Algorithm[SelfFLServer, SelfFLBroadcast, SelfFLMemory, SelfFLUpload]):
    """Options of Self-FL; the defaults are the paper's reading of Algorithm 1.

    Attributes:
        form: ``paper``, or ``exact`` for the two-level model itself (D11).
        variances: ``estimated`` from the models' spread, or ``known``: the population states σ₀² and every σₘ².
        variance_scale: Whether the estimated σ₀² is the ``sum`` or the ``mean`` over the cohort (D2).
        others: Who is summed over in S_m: this round's ``cohort``, or ``all`` clients (D5).
        smoothing: Share of the new estimate in the global model: ``participation`` (the share of clients that
            answered), or a number; 1 is off (D9).
        initial_steps: Steps of a client whose variance is not known yet (D3), and of everybody without adaptive steps.
        max_local_steps: ℓ_max, the most steps a client takes (D7).
        num_local_epochs: Passes over its own rows that every client makes instead of either number of steps (D15).
        adaptive_start: Whether training starts at Eq. (18); if not, at the global model (D13).
        adaptive_steps: Whether ℓ_m is Eq. (19)'s; if not, every client takes ``initial_steps`` (D13).
        uncertainty_weights: Whether clients weigh 1/(σ₀² + σₘ²); if not, their numbers of examples (D13).
    """

    name: ClassVar[str] = "self-fl"
    personalises: ClassVar[Personalises] = "model"
    only_sgd: ClassVar[str | None] = "how long a client trains follows from how fast these contract, Eq. (19)"
    recorded: ClassVar[tuple[str, ...]] = ("num_local_steps", "wanted_steps")
    may_be_unknown: ClassVar[tuple[str, ...]] = ("intra_variance", "wanted_steps")
    row_counts: ClassVar[tuple[str, ...]] = ("num_examples",)
    per_client: ClassVar[tuple[str, ...]] = ("intra_variance",)
    # A client's variance is the spread of its models over rounds in which the global one moves (D4).  Visits to a
    # server at rest would show none: one visit, as of a client whose variance is not known yet (D3).
    newcomer_visits: ClassVar[int | None] = 1

    form: Form = "paper"
    variances: Literal["estimated", "known"] = "estimated"
    variance_scale: VarianceScale = "sum"
    others: Literal["cohort", "all"] = "cohort"
    smoothing: Literal["participation"] | float = "participation"
    initial_steps: int = 20
    max_local_steps: int = 40
    num_local_epochs: int | None = field(default=None, kw_only=True)
    adaptive_start: bool = True
    adaptive_steps: bool = True
    uncertainty_weights: bool = True

    def __post_init__(self) -> None:
        one_of("form", self.form, FORMS)
        one_of("variances", self.variances, ("estimated", "known"))
        one_of("variance_scale", self.variance_scale, ("sum", "mean"))
        one_of("others", self.others, ("cohort", "all"))
        if self.smoothing != "participation":
            above("smoothing", self.smoothing, 0.0, at_most=1.0, alternative=", or 'participation'")
        at_least("initial_steps", self.initial_steps, 1)
        at_least("max_local_steps", self.max_local_steps, 1)
        check_epochs(self.num_local_epochs)
        true_or_false("adaptive_start", self.adaptive_start)
        true_or_false("adaptive_steps", self.adaptive_steps)
        true_or_false("uncertainty_weights", self.uncertainty_weights)

    def start(self, params: Tensor, population: Population) -> SelfFLServer:
        """Algorithm 1, input: sigma_0^2 = 0 and no sigma_m^2, unless they are known."""
        unknown = params.new_full((*params.shape[:-1], population.num_clients), torch.nan)
        if self.variances == "estimated":
            return SelfFLServer(params, torch.zeros_like(params[..., 0]), unknown)
        if population.intra_variance is None or population.inter_variance is None:
            raise ConfigError(
                "variances='known', but the federation states no variances; expected intra_variance and "
                "inter_variance. Give them, or use variances='estimated'."
            )
        return SelfFLServer(
            params,
            population.inter_variance.to(params).expand(params.shape[:-1]),
            population.intra_variance.to(params).expand_as(unknown),
        )

    def newcomer(self, params: Tensor) -> SelfFLMemory:
        """No personal model yet, no rounds recorded."""
        return SelfFLMemory(torch.zeros_like(params), Spread.empty(params))

    def broadcast(self, server: SelfFLServer, clients: Tensor) -> SelfFLBroadcast:
        """Send the model, sigma_0^2, and to each client the variance 1/S_m of theta_0 given the others.

        Decision D5: S_m runs over this round's cohort, each member with its last reported variance.  The server takes
        the client's own term out itself, as a sum over the others: the client cannot know which value the server
        assumed for it (D3), and a difference of sums would lose digits.
        """
        known = assumed(server.intra_variance)
        own = known.gather(-1, clients)
        pool = known if self.others == "all" else own
        rest = others_variance((server.inter_variance.unsqueeze(-1) + pool).unsqueeze(-1)).squeeze(-1)
        rest = rest.gather(-1, clients) if self.others == "all" else rest
        nothing_known = server.intra_variance.isnan().all(-1, keepdim=True)
        return self.message(server, clients, rest.masked_fill(nothing_known, torch.nan))

    def message(self, server: SelfFLServer, clients: Tensor, others_variance: Tensor) -> SelfFLBroadcast:
        """What goes out to the cohort, once 1/S_m ``[..., C]`` is there."""
        stated = server.intra_variance.gather(-1, clients)
        return SelfFLBroadcast(
            params=server.params.unsqueeze(-2).expand(*clients.shape, -1),
            inter_variance=server.inter_variance.unsqueeze(-1).expand(clients.shape),
            others_variance=others_variance,
            intra_variance=stated if self.variances == "known" else torch.full_like(stated, torch.nan),
        )

    def client_round(
        self, broadcast: SelfFLBroadcast, memory: SelfFLMemory, task: LocalTask
    ) -> tuple[SelfFLUpload, SelfFLMemory]:
        """Algorithm 1, ClientUpdate: Eqs. (16), (18), (19), then local training."""
        plan = self.plan(broadcast, memory, task)
        trained = descend(task, plan.start, plan.num_local_steps)
        upload = SelfFLUpload(
            trained, task.num_examples.to(trained), plan.intra_variance, plan.num_local_steps, plan.wanted_steps
        )
        return upload, SelfFLMemory(trained, memory.spread.update(trained))

    def plan(self, broadcast: SelfFLBroadcast, memory: SelfFLMemory, task: LocalTask) -> Plan:
        """Each client's sigma_m^2, first point and number of steps, decided before it trains.

        Decision D4: sigma_m^2 is taken over the rounds before this one, by the client's own clock.  Decision D3: with
        fewer than two of them it is unknown, and the client takes ``initial_steps`` steps from the global model.
        Decision D13: without one of Self-FL's components, FedAvg's behaviour takes its place.
        Decision D15: a number of epochs takes the place of every other number of steps.
        """
        if self.variances == "known":
            variance = broadcast.intra_variance
        else:
            variance = memory.spread.variance("mean").masked_fill(memory.spread.count < 2, torch.nan)
        is_known = ~(variance.isnan() | broadcast.others_variance.isnan())
        # A client that has known variances but no model of its own yet starts from the global one.
        own = torch.where((memory.spread.count == 0).unsqueeze(-1), broadcast.params, memory.params)
        total = broadcast.inter_variance + variance
        start = initial_params(broadcast.params, own, total.unsqueeze(-1), broadcast.others_variance.unsqueeze(-1))
        prior = prior_variance(broadcast.others_variance, broadcast.inter_variance, self.form)
        wanted = local_steps(variance, prior, task.learning_rate, task.batch_size)
        steps = torch.where(is_known & self.adaptive_steps, wanted, float(self.initial_steps))
        num_steps = rounded_steps(steps, self.max_local_steps)
        if self.num_local_epochs is not None:
            num_steps = (self.num_local_epochs * task.steps_per_epoch).to(num_steps)
        return Plan(
            variance,
            torch.where((is_known & self.adaptive_start).unsqueeze(-1), start, broadcast.params),
            num_steps,
            wanted.masked_fill(~is_known, torch.nan),
        )

    def server_round(self, server: SelfFLServer, clients: Tensor, upload: SelfFLUpload) -> SelfFLServer:
        """Algorithm 1, ServerUpdate: Eqs. (17) and (20), then the smoothing average (section 4.1, D9)."""
        inter = server.inter_variance
        # Decision D8: a cohort of one has no spread; keep the last sigma_0^2.
        if self.variances == "estimated" and clients.shape[-1] > 1:
            inter = Spread.of(upload.params).variance(self.variance_scale)
        intra = server.intra_variance.scatter(-1, clients, upload.intra_variance.to(server.intra_variance))
        known = replace(server, inter_variance=inter, intra_variance=intra)
        estimate = weighted_mean(upload.params, self.shares(known, clients, upload).unsqueeze(-1))
        return replace(known, params=self.smoothed(server, estimate, clients))

    def local_work(self) -> tuple[int, int | None]:
        """What a client takes while its variance is unknown."""
        return self.initial_steps, self.num_local_epochs

    def inter_variance(self, server: SelfFLServer) -> Tensor | None:
        """sigma_0^2 of Eq. (17)."""
        return server.inter_variance

    def intra_variance(self, server: SelfFLServer) -> Tensor | None:
        """sigma_m^2, as last reported."""
        return server.intra_variance

    def weights(self, server: SelfFLServer, clients: Tensor, upload: SelfFLUpload) -> Tensor | None:
        """Eq. (20), for the record."""
        return self.shares(server, clients, upload)

    def shares(self, server: SelfFLServer, clients: Tensor, upload: SelfFLUpload) -> Tensor:
        """What each client of the cohort weighs, ``[..., C]``, relative to each other, once its variance is known."""
        if not self.uncertainty_weights:
            return upload.num_examples.to(upload.params)
        total = server.inter_variance.unsqueeze(-1) + assumed(server.intra_variance).gather(-1, clients)
        return relative_precision(total.unsqueeze(-1))[0].squeeze(-1)

    def gains(self, server: SelfFLServer) -> Tensor | None:
        """Factor by which the others shrink each client's variance, ``[..., M]`` (1/k_m of Eq. (3)).

        Not a number where the client's variance is unknown, or nothing is left of it.
        """
        known, inter = assumed(server.intra_variance.double()), server.inter_variance.double().unsqueeze(-1)
        prior = prior_variance(others_variance((inter + known).unsqueeze(-1)).squeeze(-1), inter, self.form)
        gain = 1.0 / local_weight(known, prior)
        return gain.masked_fill(server.intra_variance.isnan() | gain.isinf(), torch.nan)

    def smoothed(self, server: SelfFLServer, estimate: Tensor, clients: Tensor) -> Tensor:
        """The new global model: the old one, moved towards the new estimate (D9)."""
        num_clients = server.intra_variance.shape[-1]
        share = clients.shape[-1] / num_clients if self.smoothing == "participation" else float(self.smoothing)
        return torch.lerp(server.params, estimate, share)

    def personal(self, global_params: Tensor, memory: SelfFLMemory, task: LocalTask) -> Tensor:
        """theta_m, the client's last trained model (D10)."""
        is_new = (memory.spread.count == 0).unsqueeze(-1)
        return torch.where(is_new, global_params.unsqueeze(-2), memory.params)


def assumed(intra_variance: Tensor) -> Tensor:
    """Variances ``[..., M]`` with the unknown ones set to the mean of the known, or to 0 if none is (D3).

    When none is known every client has the same total variance, and therefore the same weight.
    """
    return torch.where(intra_variance.isnan(), intra_variance.nanmean(-1, keepdim=True).nan_to_num(), intra_variance)
