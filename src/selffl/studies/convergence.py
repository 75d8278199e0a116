"""Proposition 3.1, measured: how fast Self-FL converges, and to what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selffl.algorithms import SelfFL
from selffl.engines.cohort import CohortEngine
from selffl.engines.rounds import RoundReport
from selffl.maths.posterior import global_posterior, others_variance, personal_posterior
from selffl.randomness import normal, uniform
from selffl.studies.result import Chart, Claim, Estimate, Figure, Job, Series, Study, StudyResult, Verdict
from selffl.training.gaussian import GaussianFederation


@dataclass(frozen=True)
class Setting:
    """Federations of growing size."""

    num_clients: tuple[int, ...] = (20, 60, 200, 600, 2000)
    num_repeats: int = 48
    inter_variance: float = 1.0
    global_mean: float = 1.6
    smallest: float = 3e-3  # share of the remaining error to which optimisation has to fall
    num_watched: int = 200  # rounds over which the decay is fitted, at most


REGIMES = {
    "constant": "σₘ² constant, uniform on 0.03…0.09",
    "shrinking": "σₘ² = uₘ/M, uₘ uniform on 1…3",
}


def federation(setting: Setting, regime: str, num_clients: int) -> GaussianFederation:
    """Clients whose learning rate makes one local step land exactly on the step equation.

    Eq. (8) wants (1 - eta_m / sigma_m^2)^l = sigma_m^2 / (sigma_m^2 + A_m).  With the learning rate
    eta_m = sigma_m^2 A_m / (sigma_m^2 + A_m) the answer is l = 1: the proposition is tested without rounding of l.
    """
    seeds = torch.arange(setting.num_repeats)
    client = torch.arange(num_clients)
    draw = uniform(seeds.unsqueeze(-1), "intra_variance", client)
    intra = 0.03 + 0.06 * draw if regime == "constant" else (1.0 + 2.0 * draw) / num_clients
    inter = torch.full((setting.num_repeats,), setting.inter_variance, dtype=torch.float64)
    personal = setting.global_mean + setting.inter_variance**0.5 * normal(seeds.unsqueeze(-1), "personal", client)
    estimate = personal + intra.sqrt() * normal(seeds.unsqueeze(-1), "estimate", client)
    prior = others_variance((inter.unsqueeze(-1) + intra).unsqueeze(-1)).squeeze(-1)
    return GaussianFederation(
        global_params=torch.full((setting.num_repeats, 1), setting.global_mean, dtype=torch.float64),
        personal_params=personal.unsqueeze(-1),
        local_estimate=estimate.unsqueeze(-1),
        intra_variance=intra,
        inter_variance=inter,
        num_examples=torch.ones_like(intra),
        seeds=seeds,
        learning_rate=intra * prior / (intra + prior),
    )


@dataclass(frozen=True)
class Trajectory:
    """One size of federation."""

    contraction: Tensor  # q [repeats], Eq. (15)
    decay: Tensor  # fitted factor per round [repeats], of the distance to the fixed point
    personal_floor: Tensor  # max_m |theta_m - theta_m^FL| once converged [repeats]
    global_floor: Tensor  # |theta - theta^G| once converged [repeats]
    errors: Tensor  # max_m |theta_m^t - theta_m^FL| by round, mean over repeats


def measure(setting: Setting, regime: str, num_clients: int) -> Trajectory:
    """Run Self-FL to its fixed point, then again to see how it got there."""
    clients = federation(setting, regime, num_clients)
    intra, inter = clients.intra_variance.unsqueeze(-1), clients.inter_variance[..., None, None]
    centre, _ = global_posterior(clients.local_estimate, inter + intra)
    target, *_ = personal_posterior(clients.local_estimate, intra, inter, "paper")
    rest = others_variance(inter + intra)
    contraction = (intra / (intra + rest)).amax((-2, -1))
    num_rounds = math.ceil(math.log(setting.smallest) / math.log(float(contraction.max())))

    engine = CohortEngine(SelfFL(variances="known"), clients, 1.0, clients.seeds)
    # The fixed point does not depend on the start; from the posterior mean it is near.
    last = engine.advance(engine.start(centre), num_rounds)
    fixed = last.memory.params
    distances, errors = [], []

    def watch(report: RoundReport) -> None:
        distances.append((report.upload.params - fixed).abs().amax((-2, -1)))
        errors.append((report.upload.params - target).abs().amax((-2, -1)).mean())

    engine.advance(engine.start(torch.zeros_like(centre)), min(num_rounds, setting.num_watched), watch)
    from scipy.stats import linregress  # here: it takes a second

    rounds = np.arange(1, len(distances) + 1)
    logs = torch.stack(distances).log().numpy()
    decay = torch.tensor([math.exp(linregress(rounds, logs[:, r]).slope) for r in range(setting.num_repeats)])
    return Trajectory(
        contraction,
        decay.to(torch.float64),
        (fixed - target).abs().amax((-2, -1)),
        (last.server.params - centre).abs().amax(-1),
        torch.stack(errors),
    )


@dataclass(frozen=True)
class Slope:
    """A power of M fitted on log-log axes, with its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, sizes: Sequence[int], floors: list[Tensor]) -> Slope:
        """Slope of the mean error at each size; the interval by resampling repeats 2000 times."""
        x = np.log(np.asarray(sizes, dtype=float))
        centred = (x - x.mean()) / ((x - x.mean()) ** 2).sum()

        def slope(means: np.ndarray) -> np.ndarray:  # [..., sizes]
            return np.asarray(np.log(means) @ centred)

        rng = np.random.default_rng(0)
        values = np.stack([floor.numpy() for floor in floors], axis=-1)  # [repeats, sizes]
        picks = rng.integers(len(values), size=(2000, *values.shape))
        resampled = np.take_along_axis(values[None], picks, axis=1).mean(1)
        low, high = np.quantile(slope(resampled), [0.025, 0.975])
        return cls(float(slope(values.mean(0))), float(low), float(high))

    def __str__(self) -> str:
        """Two decimals and the interval."""
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def bound_verdict(slopes: Sequence[Slope]) -> Verdict:
    """Whether errors fall at least like M^(-1/2): an interval around -1/2 decides nothing."""
    if all(slope.high <= -0.5 for slope in slopes):
        return "holds"
    return "does not hold" if any(slope.low > -0.5 for slope in slopes) else "inconclusive"


Found = dict[tuple[str, int], Trajectory]  # by regime and number of clients
KINDS = {"personal": r"$\max_m|\theta_m-\theta_m^{FL}|$", "global": r"$|\theta-\theta^G|$"}  # of what remains


def convergence_study(setting: Setting, job: Job) -> StudyResult:
    """Measure every regime at every size, fit the slopes, and decide."""
    sizes = setting.num_clients
    total = len(REGIMES) * len(sizes)
    found: Found = {}
    for regime in REGIMES:
        for size in sizes:
            job.progress(len(found), total, f"{REGIMES[regime]}, M = {size}")
            found[regime, size] = measure(setting, regime, size)
    job.progress(total, total, "done")
    return StudyResult(
        [_row(*key, run) for key, run in found.items()],
        [_line(*key, run) for key, run in found.items()],
        [
            Figure(
                "remaining-error",
                "What is left after convergence against the number of clients.",
                [_chart_of_floors(found, regime, sizes) for regime in REGIMES],
            ),
            Figure(
                "error-by-round",
                "Largest personal error by round (solid), and C·qᵗ + floor (dashed) with C and the floor as measured.",
                [_chart_by_round(found, regime, sizes[::2]) for regime in REGIMES],
            ),
        ],
        [_claim_on_decay(found, sizes), *(_claim_on_floors(found, regime, sizes) for regime in REGIMES)],
        asdict(setting) | {"regimes": REGIMES},
        decided_by="Slopes are decided by their 95 % intervals over independent repeats; other statements by the bound "
        "that they name.",
    )


def _row(regime: str, size: int, run: Trajectory) -> dict[str, Any]:
    """A line of the long table."""
    estimates = {
        "fitted_decay": run.decay,
        "remaining_personal_error": run.personal_floor,
        "remaining_global_error": run.global_floor,
    }
    line: dict[str, Any] = {"regime": regime, "num_clients": size, "q": float(run.contraction.mean())}
    line["share_within_q"] = float((run.decay <= run.contraction).double().mean())
    for name, found in ((name, Estimate.of(values)) for name, values in estimates.items()):
        line |= {name: found.mean, f"{name}_se": found.error}
    return line | {"rounds_watched": len(run.errors), "repeats": len(run.decay)}


def _line(regime: str, size: int, run: Trajectory) -> dict[str, str]:
    """A line of the table that is shown."""
    decay = Estimate.of(run.decay)
    line = {
        "regime": REGIMES[regime],
        "M": str(size),
        "q": f"{float(run.contraction.mean()):.5f}",
        "fitted decay per round": f"{decay.mean:.5f} ± {decay.error:.5f}",
        "decay ≤ q": f"{int((run.decay <= run.contraction).sum())} of {len(run.decay)}",
    }
    for kind, floor in (("personal", Estimate.of(run.personal_floor)), ("global", Estimate.of(run.global_floor))):
        line |= {f"remaining error, {kind}": str(floor), f"{kind} × √M": f"{floor.mean * math.sqrt(size):.3f}"}
    return line


def _floors(found: Found, regime: str, kind: str, sizes: Sequence[int]) -> list[Tensor]:
    """What remains at each size, by repeat."""
    return [getattr(found[regime, size], f"{kind}_floor") for size in sizes]


def _chart_of_floors(found: Found, regime: str, sizes: Sequence[int]) -> Chart:
    lines = [
        Series.of(label, sizes, [Estimate.of(floor) for floor in _floors(found, regime, kind, sizes)])
        for kind, label in KINDS.items()
    ]
    personal = lines[0].y
    envelope = max(mean * math.sqrt(size) for mean, size in zip(personal, sizes, strict=True))
    bound = [envelope / math.sqrt(size) for size in sizes]
    lines.append(Series(r"envelope $\propto M^{-1/2}$", sizes, bound, is_reference=True))
    return Chart(REGIMES[regime], "clients M", "remaining error", lines, log_x=True, log_y=True, x_ticks=sizes)


def _chart_by_round(found: Found, regime: str, sizes: Sequence[int]) -> Chart:
    lines = []
    for size in sizes:
        run = found[regime, size]
        rounds = range(1, len(run.errors) + 1)
        q, first, floor = float(run.contraction.mean()), float(run.errors[0]), float(run.personal_floor.mean())
        bound = [(first - floor) * q ** (r - 1) + floor for r in rounds]
        lines.append(Series(f"M = {size}", list(rounds), run.errors.tolist()))
        lines.append(Series(rf"bound $C\,q^t$ + floor, M = {size}", list(rounds), bound, is_reference=True))
    return Chart(REGIMES[regime], "round t", r"$\max_m|\theta_m^t-\theta_m^{FL}|$", lines, log_y=True)


def _claim_on_decay(found: Found, sizes: Sequence[int]) -> Claim:
    within = [run.decay <= run.contraction for run in found.values()]
    spread = [
        max(float((run.decay - run.contraction).max()) for (name, _), run in found.items() if name == regime)
        for regime in REGIMES
    ]
    return Claim(
        "The distance to the fixed point shrinks by a factor of at most q a round, as fitted over rounds.",
        "holds" if all(bool(each.all()) for each in within) else "does not hold",
        f"Fitted decay ≤ q in {sum(int(each.sum()) for each in within)} of {sum(map(len, within))} runs, "
        f"M = {sizes[0]} … {sizes[-1]}; largest fitted decay − q: "
        f"{spread[0]:.1e} (σₘ² constant), {spread[1]:.1e} (σₘ² ∝ 1/M).",
    )


def _claim_on_floors(found: Found, regime: str, sizes: Sequence[int]) -> Claim:
    larger = sizes[len(sizes) // 2 :]
    whole, late = ([Slope.of(part, _floors(found, regime, kind, part)) for kind in KINDS] for part in (sizes, larger))
    return Claim(
        f"What remains is O(M^(−1/2)); {REGIMES[regime]}.",
        bound_verdict(late),
        "Decided by the 95 % intervals over the larger sizes: holds if both lie below −1/2, does not if one "
        "lies above, and is inconclusive otherwise. "
        f"Slope of log error against log M with its interval, {len(found[regime, sizes[0]].decay)} repeats of each "
        f"size: personal {whole[0]}, global {whole[1]} over M = {sizes[0]} … {sizes[-1]}; personal {late[0]}, global "
        f"{late[1]} over M = {larger[0]} … {larger[-1]}. What remains is the difference between weighting "
        "clients by w_m and by w_m(1 − a_m), where a_m is the right side of Eq. (8): it vanishes where all a_m "
        "are equal, and its size times √M settles once the a_m's relative spread does, which with σₘ² constant "
        "takes until S_m is far above 1/σₘ².",
    )


QUICK = Setting(num_clients=(20, 60, 200), num_repeats=20)

CONVERGENCE = Study.known(
    "convergence",
    "two-level Gaussian model, variances known, full participation, M = 20 … 2000, one exact local step per round",
    lambda job: convergence_study(QUICK if job.quick else Setting(), job),
)
