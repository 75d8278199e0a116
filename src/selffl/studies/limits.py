"""The paper's remarks on extreme cases, as checks that run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from selffl.maths.posterior import FORMS, Form, posterior
from selffl.studies.result import Chart, Claim, Figure, Job, Series, Study, StudyResult


@dataclass(frozen=True)
class Check:
    """A quantity in an extreme case, and what the remark says it is."""

    remark: str
    form: Form
    case: str
    quantity: str
    found: float
    expected: float
    tolerance: float  # relative; the order of what the remark's ≈ leaves out

    @property
    def gap(self) -> float:
        """Relative difference."""
        return abs(self.found - self.expected) / max(abs(self.expected), 1e-300)

    @property
    def holds(self) -> bool:
        """Within the order of the approximation."""
        return self.gap <= self.tolerance


RNG_SEED = 0


def _clients(num_clients: int) -> tuple[np.ndarray, np.ndarray]:
    """Estimates and variances without special structure."""
    rng = np.random.default_rng(RNG_SEED)
    return rng.normal(1.6, 1.0, num_clients), rng.uniform(0.5, 2.0, num_clients)


def interpretations(form: Form) -> Iterator[Check]:
    """Remark 2.1: the posterior quantities in three extreme cases."""
    check = partial(Check, "2.1", form)
    estimate, variance = _clients(20)
    far = posterior(estimate, variance, 1e9, form)
    apart = "σ₀² → ∞ (10⁹)"
    yield check(apart, "θ₁ᶠᴸ against z₁", far.personal_mean[0], estimate[0], 1e-6)
    yield check(apart, "v₁ᶠᴸ against σ₁²", far.personal_variance[0], variance[0], 1e-6)
    yield check(apart, "GAIN₁ against 1", far.gain[0], 1.0, 1e-6)
    yield check(apart, "θᴳ against the plain average", far.global_mean, estimate.mean(), 1e-6)

    same = posterior(estimate, variance, 0.0, form)
    pooled = np.average(estimate, weights=1 / variance)
    alike = "σ₀² = 0"
    yield check(alike, "θ₁ᶠᴸ against θᴳ", same.personal_mean[0], float(same.global_mean), 1e-12)
    yield check(alike, "θᴳ against precision weights", float(same.global_mean), pooled, 1e-12)

    sure = variance.copy()
    sure[0] = 1e-6
    expert = posterior(estimate, sure, 0.5, form)
    lead = "σ₁² far below the others' and σ₀²"
    yield check(lead, "θ₁ᶠᴸ against z₁", expert.personal_mean[0], estimate[0], 1e-4)
    yield check(lead, "GAIN₁ against 1", expert.gain[0], 1.0, 1e-4)
    with_shared = posterior(estimate, sure, 0.0, form)
    bound = sure[1] / sure[0]
    # GAIN_2 >= sigma_2^2 / sigma_1^2 as printed needs sigma_0^2 = 0: else client 1 weighs at most 1/sigma_0^2.
    for spread, found in ((0.0, with_shared), (0.5, expert)):
        case = f"{lead}, σ₀² = {spread:g}"
        yield check(case, "min(GAIN₂, σ₂²/σ₁²) against σ₂²/σ₁²", min(found.gain[1], bound), bound, 1e-9)


def early_stopping(form: Form) -> Iterator[Check]:
    """Remark 2.2: gradient descent from theta^INIT for l steps ends at theta^FL."""
    check = partial(Check, "2.2", form, "gradient descent on Eq. (4)")
    estimate, variance = _clients(20)
    p = posterior(estimate, variance, 1.0, form)
    wanted = 25  # choose the learning rate for which the step equation's answer is a whole number
    rate = variance[0] * (1 - (1 - p.local_weight[0]) ** (1 / wanted))
    steps = p.num_local_steps(rate)[0]
    theta = p.initial[0]
    for _ in range(round(steps)):
        theta -= rate * (theta - estimate[0]) / variance[0]
    yield check("steps ℓ against 25", steps, wanted, 1e-9)
    yield check("θ after ℓ steps against θ₁ᶠᴸ", theta, p.personal_mean[0], 1e-9)


def step_choice(form: Form) -> Iterator[Check]:
    """Remark 2.3: the choice of eta and l; the right side of Eq. (10) is one minus the local weight."""
    check = partial(Check, "2.3", form)
    zeros = np.zeros

    num_clients, rows, unit = 100, 10**6, 1.0
    p = posterior(zeros(num_clients), unit / rows, unit, form)
    case = "large samples, few clients (N = 10⁶, M = 100)"
    # A relative 1/M from M - 1 against M, and M/N from the denominator.
    yield check(case, "right side of (10) against (M/N)(v²/σ₀²)", 1 - p.local_weight[0], num_clients / rows, 0.02)

    num_clients, rows = 10**6, 1000
    p = posterior(zeros(num_clients), unit / rows, unit, form)
    case = "small samples, many clients (N = 10³, M = 10⁶)"
    # A relative 1/N from sigma_0^2 + v^2/N against sigma_0^2, and N/M from the denominator.
    yield check(case, "1 − right side of (10) against (N/M)(σ₀²/v²)", p.local_weight[0], rows / num_clients, 0.01)
    rate = 1e-9
    yield check(case, "η·ℓ against σ₀²/M", rate * p.num_local_steps(rate)[0], unit / num_clients, 0.01)

    sizes = np.random.default_rng(RNG_SEED).integers(50, 150, 2000).astype(float)
    p = posterior(zeros(len(sizes)), unit / sizes, 0.0, form)
    case = "homogeneous clients (σ₀² = 0, M = 2000)"
    others = (sizes.sum() - sizes[0]) / sizes.sum()
    yield check(case, "right side of (10) against Σ_{k≠1}N_k / ΣN_k", 1 - p.local_weight[0], others, 1e-12)
    for client in (0, 1):
        progress = rate * p.num_local_steps(rate)[client]
        yield check(case, f"η·ℓ of client {client + 1} against v²/N", progress, unit / sizes.sum(), 0.01)


REMARKS: tuple[Callable[[Form], Iterator[Check]], ...] = (interpretations, early_stopping, step_choice)


def sweep(form: Form) -> list[Series]:
    """Personal means of a few clients as sigma_0^2 goes from nothing to everything."""
    estimate = np.array([0.2, 0.9, 1.4, 1.8, 2.6, 3.2])
    variance = np.array([0.05, 0.4, 0.1, 0.8, 0.2, 0.4])
    grid = np.logspace(-3, 3, 61)
    means = np.stack([posterior(estimate, variance, value, form).personal_mean for value in grid])
    lines = [
        Series(rf"client {m + 1}, $\sigma_m^2$ = {variance[m]:g}", grid.tolist(), means[:, m].tolist())
        for m in range(len(estimate))
    ]
    centre = [float(posterior(estimate, variance, value, form).global_mean) for value in grid]
    return [*lines, Series(r"$\theta^G$", grid.tolist(), centre, is_reference=True)]


CLAIMS = {
    "2.1": "Remark 2.1: the posterior in the extreme cases of σ₀² and σ₁².",
    "2.2": "Remark 2.2: the right start and number of steps end at θ₁ᶠᴸ.",
    "2.3": "Remark 2.3: the choice of η and ℓ in three extreme cases.",
}


def limits_study(job: Job) -> StudyResult:
    """Every remark in both forms of the posterior."""
    total = len(FORMS) * len(REMARKS)
    checks: list[Check] = []
    for step, (form, examine) in enumerate((f, e) for f in FORMS for e in REMARKS):
        job.progress(step, total, f"{examine.__name__.replace('_', ' ')}, {form} form")
        checks += examine(form)
    job.progress(total, total, "done")
    rows, table = [], []
    for c in checks:
        about = {"remark": c.remark, "case": c.case, "quantity": c.quantity, "form": c.form}
        rows.append(
            about
            | {"found": c.found, "expected": c.expected, "relative_gap": c.gap, "tolerance": c.tolerance}
            | {"holds": c.holds}
        )
        table.append(
            about
            | {"found": f"{c.found:.6g}", "remark says": f"{c.expected:.6g}", "relative gap": f"{c.gap:.1e}"}
            | {"holds": "yes" if c.holds else "no"}
        )
    x_label, y_label = r"inter-client variance $\sigma_0^2$", r"personal mean $\theta_m^{FL}$"
    charts = [Chart(f"{form} form", x_label, y_label, sweep(form), log_x=True) for form in FORMS]
    caption = (
        "Six clients between one shared answer (left) and each its own (right). In the paper's form the pull of the "
        "others lasts long after the clients have nothing in common; the exact form lets go when σ₀² passes σₘ²."
    )
    return StudyResult(
        rows,
        table,
        [Figure("shrinkage", caption, charts)],
        [_claim(checks, remark) for remark in CLAIMS],
        {"seed": RNG_SEED},
        decided_by="None: closed forms are compared with the limits that the statements name.",
    )


def _claim(checks: Sequence[Check], remark: str) -> Claim:
    """The remarks are about the paper's form; how the exact one behaves in the same cases is in the table."""
    mine, exact = ([c for c in checks if (c.remark, c.form) == (remark, form)] for form in ("paper", "exact"))
    wrong = [c for c in mine if not c.holds]
    named = "; ".join(f"{c.case}: {c.quantity}, {c.found:.4g} for {c.expected:.4g}" for c in wrong)
    return Claim(
        CLAIMS[remark],
        "holds" if not wrong else "holds in part" if len(wrong) < len(mine) else "does not hold",
        f"{len(mine) - len(wrong)} of {len(mine)} checks."
        + (f" Not: {named}." if wrong else "")
        + f" Of the exact form the same is true in {sum(c.holds for c in exact)} of {len(exact)}.",
    )


LIMITS = Study.known(
    "limits", "closed forms evaluated in the limits the remarks describe, both forms of the posterior", limits_study
)
