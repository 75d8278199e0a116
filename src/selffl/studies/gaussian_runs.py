"""Runs on the two-level Gaussian model: the paper's synthetic federations, the methods on them, and their errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selffl.algorithms import Ditto, FedAvg, Local, PerFedAvg, PFedMe, SelfFL
from selffl.algorithms.contract import Algorithm
from selffl.engines.cohort import CohortEngine, cohort_size
from selffl.engines.rounds import RoundReport
from selffl.maths.posterior import Form, global_posterior, personal_posterior
from selffl.studies.result import Estimate, Progress
from selffl.training.gaussian import GaussianFederation

AnyAlgorithm = Algorithm[Any, Any, Any, Any]


@dataclass(frozen=True)
class Setting:
    """The paper's synthetic federation."""

    inter_variance: float  # sigma_0^2
    num_examples: tuple[int, int]  # range of N_m
    num_clients: int = 20
    global_mean: float = 1.6  # theta_0
    row_variance: float = 0.1  # sigma_m^2 before it is divided by N_m
    learning_rate: float = 1e-4
    num_rounds: int = 200
    num_local_steps: int = 50  # L of the baselines
    max_local_steps: int = 1_000  # of Self-FL: far above what Eq. (19) asks for here, so that it decides
    participation: tuple[float, ...] = (0.1, 0.2, 0.5, 0.8, 1.0)
    num_repeats: int = 200
    first_seed: int = 0
    start: float = 0.0  # every model begins here

    @property
    def seeds(self) -> Tensor:
        """One per repeat."""
        return torch.arange(self.first_seed, self.first_seed + self.num_repeats)

    def federation(self, *, resample: bool = False, with_rows: bool = False) -> GaussianFederation:
        """All repeats side by side."""
        return GaussianFederation.draw(
            seeds=self.seeds,
            num_clients=self.num_clients,
            num_examples=self.num_examples,
            global_mean=self.global_mean,
            inter_variance=self.inter_variance,
            row_variance=self.row_variance,
            learning_rate=self.learning_rate,
            resample=resample,
            with_rows=with_rows,
        )


HOMOGENEOUS = Setting(inter_variance=0.001, num_examples=(10, 20))
HETEROGENEOUS = Setting(inter_variance=1.0, num_examples=(10, 200))


def methods(setting: Setting) -> dict[str, AnyAlgorithm]:
    """The paper's five, local training, and Self-FL towards the exact posterior; variances known to Self-FL."""
    steps, most = setting.num_local_steps, setting.max_local_steps
    return {
        "self-fl": SelfFL(variances="known", max_local_steps=most),
        "self-fl-exact": SelfFL(form="exact", variances="known", max_local_steps=most),
        "fedavg": FedAvg(steps),
        "ditto": Ditto(steps),
        "pfedme": PFedMe(steps),
        "perfedavg": PerFedAvg(steps),
        "local": Local(steps),
    }


@dataclass(frozen=True)
class Outcome:
    """Errors of one method at one rate of participation, one number per repeat."""

    global_error: Tensor  # |theta^T - theta_0|
    local_error: Tensor  # mean over clients of |theta_m - true theta_m|
    local_squared_error: Tensor
    num_gradients: Tensor  # per client and active round
    trace: Tensor  # global error by round, averaged over repeats [rounds]

    @classmethod
    def of(
        cls, federation: GaussianFederation, global_params: Tensor, personal: Tensor, grads: Tensor, trace: Tensor
    ) -> Outcome:
        """Errors, from the models themselves."""
        gap = personal - federation.personal_params
        return cls(
            (global_params - federation.global_params).abs().mean(-1),
            gap.abs().mean((-2, -1)),
            gap.square().mean((-2, -1)),
            grads,
            trace,
        )

    def row(self, method: str, participation: float) -> dict[str, Any]:
        """The errors as one line of the long table."""
        line: dict[str, Any] = {"method": method, "participation": participation}
        for name in ("global_error", "local_error", "local_squared_error", "num_gradients"):
            estimate = Estimate.of(getattr(self, name))
            line |= {name: estimate.mean, f"{name}_se": estimate.error}
        return line | {"repeats": len(self.global_error)}


def run_method(
    setting: Setting, federation: GaussianFederation, algorithm: AnyAlgorithm, participation: float
) -> Outcome:
    """All repeats of one method at one rate of participation."""
    engine = CohortEngine(algorithm, federation, participation, setting.seeds)
    trace: list[Tensor] = []

    def watch(report: RoundReport) -> None:
        trace.append((report.server.params - federation.global_params).abs().mean())

    start = torch.full_like(federation.global_params, setting.start)
    state = engine.advance(engine.start(start), setting.num_rounds, watch)
    rounds_active = cohort_size(setting.num_clients, participation) / setting.num_clients * setting.num_rounds
    grads = state.num_gradients.to(torch.float64).mean(-1) / rounds_active
    personal = engine.personal(state, is_over=True)
    return Outcome.of(federation, state.server.params, personal, grads, torch.stack(trace))


def limit(federation: GaussianFederation, form: Form) -> Outcome:
    """The posterior means with everything known: what no method can be expected to beat on average (question Q1)."""
    intra, inter = federation.intra_variance.unsqueeze(-1), federation.inter_variance[..., None, None]
    centre, _ = global_posterior(federation.local_estimate, inter + intra)
    mean, *_ = personal_posterior(federation.local_estimate, intra, inter, form)
    nothing = torch.zeros(federation.shape)
    return Outcome.of(federation, centre, mean, nothing, torch.zeros(0))


Outcomes = dict[tuple[str, float], Outcome]


def collect(
    setting: Setting,
    named: dict[str, AnyAlgorithm],
    progress: Progress,
    done: int = 0,
    total: int | None = None,
    *,
    with_rows: bool = False,
) -> tuple[GaussianFederation, Outcomes]:
    """Every method at every rate of participation."""
    federation = setting.federation(with_rows=with_rows)
    total = total or len(named) * len(setting.participation)
    outcomes: Outcomes = {}
    for name, algorithm in named.items():
        for rate in setting.participation:
            progress(done + len(outcomes), total, f"{name}, C = {rate:g}")
            outcomes[name, rate] = run_method(setting, federation, algorithm, rate)
    return federation, outcomes
