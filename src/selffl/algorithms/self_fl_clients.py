"""The clients of Self-FL: where local training starts, and how long it runs.

Chen et al., Self-Aware Personalized Federated Learning, NeurIPS 2022, Eqs. (16), (18), (19) and (22).  The variants of
Self-FL share this plan; what is sent back and what the server makes of it is each variant's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from selffl.algorithms.contract import Personalises
from selffl.algorithms.grids import Grid
from selffl.algorithms.local_task import LocalTask
from selffl.algorithms.options import check_bool, check_choice, check_integer, check_number, option
from selffl.maths.posterior import FORMS, Form, initial_params, local_steps, prior_variance, rounded_steps
from selffl.maths.variance import Spread, VarianceScale


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


class Plan(NamedTuple):
    """What a client decides before it trains."""

    intra_variance: Tensor  # sigma_m^2 [..., C]; NaN while unknown
    start: Tensor  # theta_m^init [..., C, P]
    num_local_steps: Tensor  # l_m [..., C]
    wanted_steps: Tensor  # l_m before rounding and l_max [..., C]


def check_smoothing(name: str, value: object) -> None:
    """Refuse anything but a share, or ``participation``."""
    if value != "participation":
        check_number(name, value, above=0.0, at_most=1.0, alternative=", or 'participation'")


@dataclass(frozen=True)
class PlanningClients:
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

    personalises: ClassVar[Personalises] = "model"
    grid: ClassVar[Grid | None] = {"max_local_steps": (20, 40, 80)}
    steps_options: ClassVar[tuple[str, ...]] = ("initial_steps", "max_local_steps")
    only_sgd: ClassVar[str | None] = "how long a client trains follows from how fast plain steps contract, Eq. (19)"
    no_row_privacy: ClassVar[str | None] = None
    no_weight_decay: ClassVar[str | None] = "its loss is a likelihood, and the prior beside it is what it computes"
    no_clipping: ClassVar[str | None] = "how long a client trains follows from how fast plain steps contract, Eq. (19)"
    # A client's variance is the spread of its models over rounds in which the global one moves (D4).  Visits to a
    # server at rest would show none: one visit, as of a client whose variance is not known yet (D3).
    newcomer_visits: ClassVar[int | None] = 1

    form: Form = option("paper", check_choice, allowed=FORMS)
    variances: Literal["estimated", "known"] = option("estimated", check_choice, allowed=("estimated", "known"))
    variance_scale: VarianceScale = option("sum", check_choice, allowed=("sum", "mean"))
    others: Literal["cohort", "all"] = option("cohort", check_choice, allowed=("cohort", "all"))
    smoothing: Literal["participation"] | float = option("participation", check_smoothing)
    initial_steps: int = option(20, check_integer, least=1)
    max_local_steps: int = option(40, check_integer, least=1)
    num_local_epochs: int | None = option(None, check_integer, least=1, kw_only=True)
    adaptive_start: bool = option(True, check_bool)
    adaptive_steps: bool = option(True, check_bool)
    uncertainty_weights: bool = option(True, check_bool)

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

    def share_of_estimate(self, cohort_size: int, num_clients: int | Tensor) -> float | Tensor:
        """Share of the new estimate in the global model (D9)."""
        return cohort_size / num_clients if self.smoothing == "participation" else float(self.smoothing)

    def sent_gradients(self, steps_per_epoch: Tensor) -> int | Tensor:
        """Gradients of the longest plan, one for each step."""
        return self.max_local_steps if self.num_local_epochs is None else self.num_local_epochs * steps_per_epoch

    def local_work(self) -> tuple[int, int | None]:
        """What a client takes while its variance is unknown."""
        return self.initial_steps, self.num_local_epochs


class OneModelClients(PlanningClients):
    """Clients of Self-FL that keep one model, the last they trained."""

    def newcomer(self, params: Tensor) -> SelfFLMemory:
        """No personal model yet, no rounds recorded."""
        return SelfFLMemory(torch.zeros_like(params), Spread.empty(params))

    def personal(self, global_params: Tensor, memory: SelfFLMemory, task: LocalTask) -> Tensor:
        """theta_m, the client's last trained model (D10)."""
        return model_or_global(global_params, memory, memory.params)


def model_or_global(global_params: Tensor, memory: SelfFLMemory, own: Tensor) -> Tensor:
    """A client's ``own [..., C, P]`` model, or the global one ``[..., P]`` if it never took part (D10)."""
    return torch.where((memory.spread.count == 0).unsqueeze(-1), global_params.unsqueeze(-2), own)
