"""The two-level Gaussian model, eight methods, five rates of participation: the paper's appendix E.1 and E.2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from torch import Tensor

from selffl.algorithms import Ditto, PFedMe, SelfFL, SelfFLAugmented, SelfFLAuto
from selffl.engines.cohort import cohort_size
from selffl.maths.posterior import FORMS, Form
from selffl.maths.significance import FRESH_DRAWS
from selffl.studies.gaussian_runs import (
    HETEROGENEOUS,
    HOMOGENEOUS,
    AnyAlgorithm,
    Outcome,
    Outcomes,
    Setting,
    collect,
    limit,
    methods,
    run_method,
)
from selffl.studies.result import (
    OVER_DRAWS,
    Chart,
    Claim,
    Estimate,
    Figure,
    Job,
    Progress,
    Series,
    Study,
    StudyResult,
    Verdict,
    all_above_zero,
    in_every_case,
    in_parts,
    within,
)

AUTO = SelfFLAuto.name
MAX_EXCESS = 0.1  # over the theoretical limit, as a share of it
ALIKE = 0.05  # share of an error by which another may differ and count as the same
LIMITS = {form: f"limit, {form} posterior" for form in FORMS}


def error_figure(
    name: str, caption: str, setting: Setting, names: Sequence[str], outcomes: Outcomes, limits: dict[Form, Outcome]
) -> Figure:
    """Global and local error against participation, with the theoretical limit as a line."""

    def chart(
        title: str, attribute: str, label: str, shown: Sequence[str], bounds: dict[Form, str], log_y: bool = True
    ) -> Chart:
        lines = []
        for method in shown:
            points = [Estimate.of(getattr(outcomes[method, rate], attribute)) for rate in setting.participation]
            lines.append(Series.of(method, setting.participation, points))
        for form, text in bounds.items():
            level = Estimate.of(getattr(limits[form], attribute)).mean
            lines.append(Series(text, setting.participation, [level] * len(setting.participation), is_reference=True))
        return Chart(title, "participation C", label, lines, log_y=log_y, x_ticks=setting.participation, dodge=0.008)

    level = {n: max(float(outcomes[n, rate].local_error.mean()) for rate in setting.participation) for n in names}
    close = [n for n in names if level[n] < 1.6 * min(level.values())]
    return Figure(
        name,
        caption,
        [
            # Local training has no global model to judge.
            chart(
                "Global parameter",
                "global_error",
                r"ℓ1 error of $\theta$",
                [n for n in names if n != "local"],
                {"exact": "limit, posterior mean"},
            ),
            chart("Personal parameters", "local_error", r"mean ℓ1 error of $\theta_m$", names, LIMITS),
            chart("The best of them, close up", "local_error", r"mean ℓ1 error of $\theta_m$", close, LIMITS, False),
        ],
    )


def short_table(
    setting: Setting, names: Sequence[str], outcomes: Outcomes, limits: dict[Form, Outcome]
) -> list[dict[str, str]]:
    """Local ℓ1 error by participation, and squared error and cost at the highest."""
    top = setting.participation[-1]

    def line(name: str, by_rate: Mapping[float, Outcome], has_global: bool, gradients: str) -> dict[str, str]:
        last = by_rate[top]
        return {
            "method": name,
            **{f"local ℓ1, C={rate:g}": str(Estimate.of(found.local_error)) for rate, found in by_rate.items()},
            f"global ℓ1, C={top:g}": str(Estimate.of(last.global_error)) if has_global else "–",
            f"local squared, C={top:g}": _fine(Estimate.of(last.local_squared_error)),
            "gradients / round": gradients,
        }

    table = []
    for name in names:
        by_rate = {rate: outcomes[name, rate] for rate in setting.participation}
        table.append(line(name, by_rate, name != "local", f"{float(by_rate[top].num_gradients.mean()):.0f}"))
    for form, text in LIMITS.items():
        table.append(line(text, dict.fromkeys(setting.participation, limits[form]), True, "–"))
    return table


def _fine(estimate: Estimate) -> str:
    return f"{estimate.mean:.5f} ± {estimate.error:.5f}"


def paired(first: Tensor, second: Tensor) -> Estimate:
    """Difference of two methods on the same repeats: what they share cancels.  Each repeat draws a federation anew."""
    return Estimate.of(first - second, test_per_train=FRESH_DRAWS)


def is_lower(difference: Estimate) -> bool:
    """Below zero at the 5 % level."""
    return difference.mean < 0 and difference.is_significant


def verdict_of_counts(*parts: bool) -> Verdict:
    """Verdict of a statement whose parts are counted and not tested."""
    return in_parts("holds" if part else "does not hold" for part in parts)


def alike(first: Tensor, second: Tensor) -> Verdict:
    """Whether the means of two errors differ by no more than `ALIKE` of the second one."""
    return within(paired(first, second), ALIKE * float(second.mean()))


def smoothing_figure(
    setting: Setting, outcomes: Outcomes, progress: Progress, done: int, total: int
) -> tuple[Figure, Outcomes]:
    """Error of the global model by round at the lowest participation: what the smoothing average costs (D9, D5)."""
    rate = setting.participation[0]
    most = setting.max_local_steps
    variants: dict[str, AnyAlgorithm] = {
        "self-fl, smoothing off": SelfFL(variances="known", max_local_steps=most, smoothing=1.0),
        "self-fl, all others": SelfFL(variances="known", max_local_steps=most, others="all"),
        "self-fl, all others, smoothing off": SelfFL(
            variances="known", max_local_steps=most, others="all", smoothing=1.0
        ),
    }
    federation = setting.federation()
    found: Outcomes = {}
    for index, (name, algorithm) in enumerate(variants.items()):
        progress(done + index, total, f"{name}, C = {rate:g}")
        found[name, rate] = run_method(setting, federation, algorithm, rate)
    rounds = list(range(1, setting.num_rounds + 1))
    lines = [
        Series(name, rounds, outcome.trace.tolist())
        for name, outcome in {
            "self-fl": outcomes["self-fl", rate],
            **{name: outcome for (name, _), outcome in found.items()},
            "fedavg": outcomes["fedavg", rate],
        }.items()
    ]
    return (
        Figure(
            "global-error-by-round",
            f"Error of the global parameter by round at C = {rate:g}, starting {setting.global_mean:g} away. "
            "“All others” sums S_m over every client instead of this round's cohort (D5).",
            [Chart(f"Start far away, C = {rate:g}", "round", r"ℓ1 error of $\theta$", lines, log_y=True)],
        ),
        found,
    )


NUM_VARIANTS = 3  # runs of smoothing_figure


def estimated_rows(setting: Setting, progress: Progress, done: int, total: int) -> Outcomes:
    """Self-FL with nothing known, each round on a parametric bootstrap of the data as section 3.2 imagines."""
    federation = setting.federation(resample=True)
    found: Outcomes = {}
    for index, rate in enumerate((setting.participation[0], setting.participation[-1])):
        progress(done + index, total, f"self-fl, estimated variances, C = {rate:g}")
        # Estimates can ask for any number of steps; four times what the baselines take is the cap.
        algorithm = SelfFL(max_local_steps=4 * setting.num_local_steps, initial_steps=setting.num_local_steps)
        found["self-fl, estimated", rate] = run_method(setting, federation, algorithm, rate)
    return found


def quick_setting(setting: Setting) -> Setting:
    """This study with fewer repeats and rates."""
    return replace(setting, num_repeats=20, participation=(0.1, 0.5, 1.0))


def synthetic_study(
    setting: Setting, case: str, job: Job, *, shorten: Callable[[Setting], Setting] = quick_setting
) -> StudyResult:
    """Figures 3 and 4: every method against participation; ``shorten`` makes the setting of a quick look."""
    setting = shorten(setting) if job.quick else setting
    named = methods(setting)
    learning: dict[str, AnyAlgorithm] = {AUTO: SelfFLAuto(setting.num_local_steps)}
    total = (len(named) + len(learning)) * len(setting.participation) + NUM_VARIANTS + 2
    federation, outcomes = collect(setting, named, job.progress, 0, total)
    # It is told no variance: it has the rows, whose means are the estimates that the others are given.
    outcomes |= collect(setting, learning, job.progress, len(outcomes), total, with_rows=True)[1]
    named |= learning
    limits = {form: limit(federation, form) for form in FORMS}
    by_round, variants = smoothing_figure(setting, outcomes, job.progress, total - NUM_VARIANTS - 2, total)
    estimated = estimated_rows(setting, job.progress, total - 2, total)
    job.progress(total, total, "done")
    names = list(named)
    rows = [outcome.row(name, rate) for (name, rate), outcome in (outcomes | variants | estimated).items()]
    rows += [limits[form].row(text, rate) for form, text in LIMITS.items() for rate in setting.participation]
    claims = homogeneous_claims if case == "homogeneous" else heterogeneous_claims
    return StudyResult(
        rows=rows,
        table=short_table(setting, names, outcomes, limits),
        figures=[
            error_figure(
                "errors",
                f"Estimation errors on {case} synthetic data against participation; {setting.num_repeats} repeats, "
                "bars are standard errors, dashed lines the posterior means with everything known.",
                setting,
                names,
                outcomes,
                limits,
            ),
            by_round,
        ],
        claims=[
            *claims(setting, outcomes),
            *common_claims(setting, outcomes, variants, estimated),
            learned_claim(setting, outcomes, limits["exact"]),
        ],
        config=asdict(setting) | {"methods": {name: repr(value) for name, value in named.items()}},
        decided_by=OVER_DRAWS,
    )


def learned_claim(setting: Setting, outcomes: Outcomes, bound: Outcome) -> Claim:
    """Not in the paper: nothing known, and as good as everything known."""
    ratios = {
        attribute: {
            rate: float(getattr(outcomes[AUTO, rate], attribute).mean() / getattr(bound, attribute).mean())
            for rate in setting.participation
        }
        for attribute in ("local_error", "global_error")
    }
    said = {
        attribute: ", ".join(f"{ratio:.3f} at C = {rate:g}" for rate, ratio in found.items())
        for attribute, found in ratios.items()
    }
    return Claim(
        f"Not in the paper: {AUTO}, told no variance, comes within {100 * MAX_EXCESS:.0f} % of the theoretical limit.",
        in_parts(
            all_above_zero(
                [paired((1.0 + MAX_EXCESS) * limit, getattr(outcomes[AUTO, rate], name)) for rate in ratios[name]]
            )
            for name, limit in (("local_error", bound.local_error), ("global_error", bound.global_error))
        ),
        f"Mean ℓ1 error over that of the posterior mean with everything known: personal {said['local_error']}; global "
        f"{said['global_error']}.",
    )


BASELINES = ("fedavg", "ditto", "pfedme", "perfedavg")


def lead(ours: Tensor, baselines: Sequence[Tensor]) -> Verdict:
    """Whether a method is ahead of all baselines on the same repeats: at the 5 % level, undecided, or not."""
    return all_above_zero([paired(baseline, ours) for baseline in baselines])


def homogeneous_claims(setting: Setting, outcomes: Outcomes) -> list[Claim]:
    """The two conclusions the paper draws from its figure 3."""
    low, high = setting.participation[0], setting.participation[-1]
    shown = ("self-fl", "self-fl-exact", *BASELINES)

    def claim(text: str, methods: Sequence[str], rate: float, why: str) -> Claim:
        """Whether these methods lead at a rate, by their personal and by their global models."""
        verdicts, evidence = [], ""
        for kind in ("local", "global"):
            errors = {method: getattr(outcomes[method, rate], f"{kind}_error") for method in shown}
            rest = [errors[baseline] for baseline in BASELINES if baseline not in methods]
            verdicts.append(in_parts(lead(errors[method], rest) for method in methods))
            each = ", ".join(f"{method} {Estimate.of(error)}" for method, error in errors.items())
            evidence += f"{kind.capitalize()} error ({verdicts[-1]}): {each}. "
        return Claim(f"{text} (C = {rate:g}).", in_parts(verdicts), evidence + why)

    return [
        claim(
            "With many active clients Self-FL and PerFedAvg have the lowest errors, global and local",
            ("self-fl", "perfedavg"),
            high,
            "With everybody active every average ends near the posterior mean of θ₀; DITTO and pFedMe keep "
            f"personal models that are nearly local ones: 1/σₘ² is {setting.num_examples[0] / setting.row_variance:g} "
            f"or more here, and λ is {Ditto().penalty:g} and {PFedMe().penalty:g}.",
        ),
        claim(
            "With few active clients Self-FL is better than the others",
            ("self-fl",),
            low,
            "Only Self-FL smooths its global model over rounds, and pFedMe moves it slowly; FedAvg's is the average of "
            f"the last {cohort_size(setting.num_clients, low)} clients.",
        ),
    ]


def heterogeneous_claims(setting: Setting, outcomes: Outcomes) -> list[Claim]:
    """The conclusion of figure 4, and what the paper's posterior costs here (D11)."""
    low, high = setting.participation[0], setting.participation[-1]
    sparse, full = outcomes["self-fl", low], outcomes["self-fl", high]

    paper, exact, local = (outcomes[n, high].local_squared_error for n in ("self-fl", "self-fl-exact", "local"))
    return [
        Claim(
            "Self-FL's errors, global and local, are insensitive to participation.",
            in_parts(alike(getattr(sparse, name), getattr(full, name)) for name in ("global_error", "local_error")),
            f"Read as insensitive if within {100 * ALIKE:.0f} %. "
            f"Global {Estimate.of(sparse.global_error)} at C = {low:g} and {Estimate.of(full.global_error)} at "
            f"C = {high:g}; local {Estimate.of(sparse.local_error)} and {Estimate.of(full.local_error)}. The local "
            "error *grows* with participation: the more others are summed into S_m, the harder the paper's posterior "
            "pulls a client towards a mean that is not its own. Self-FL exact: "
            f"{Estimate.of(outcomes['self-fl-exact', low].local_error)} and "
            f"{Estimate.of(outcomes['self-fl-exact', high].local_error)}.",
        ),
        Claim(
            "With a large σ₀² the FL posterior approaches the local one and the client learns on its own.",
            alike(paper, local),
            f"Read as so if the mean squared error is within {100 * ALIKE:.0f} % of local training's. "
            f"Mean squared error of θₘ at C = {high:g}: paper's form {_fine(Estimate.of(paper))}, exact form "
            f"{_fine(Estimate.of(exact))}, local training {_fine(Estimate.of(local))}; paired difference paper − local "
            f"{paired(paper, local)}, exact − local {paired(exact, local)}. The paper postulates "
            "θₘ = θ₀ for the client itself, which leaves σ₀² out of its prior: with M − 1 others the pull has "
            "precision (M − 1)/σ₀², not 1/σ₀². The exact posterior has no such bias.",
        ),
    ]


def common_claims(setting: Setting, outcomes: Outcomes, variants: Outcomes, estimated: Outcomes) -> list[Claim]:
    """What both cases show."""
    low, high = setting.participation[0], setting.participation[-1]
    rates = setting.participation
    worst = max(Estimate.of(outcomes["self-fl", rate].local_error).error for rate in rates)
    worst_global = max(Estimate.of(outcomes["self-fl", rate].global_error).error for rate in rates)
    smooth, plain = variants["self-fl, all others", low], variants["self-fl, all others, smoothing off", low]
    cohort, cohort_plain = outcomes["self-fl", low], variants["self-fl, smoothing off", low]
    found = {}
    for rate in (low, high):
        unknown, known = estimated["self-fl, estimated", rate].local_error, outcomes["self-fl", rate].local_error
        # The data lie within a few units of theta_0: an error of ten is a run that has left them.
        found[rate] = int((unknown > 10).sum()), float(unknown.median() / known.median())
    near = [num_diverged == 0 and ratio < 1.25 for num_diverged, ratio in found.values()]

    def rounds_to(trace: Tensor) -> int:
        """Rounds until the error is within a fifth of where it ends."""
        return int((trace < 1.2 * trace[-20:].mean()).nonzero()[0]) + 1

    slowed = [rounds_to(cohort.trace) > rounds_to(cohort_plain.trace), rounds_to(smooth.trace) > rounds_to(plain.trace)]
    steadied = is_lower(paired(cohort.global_error, cohort_plain.global_error))
    return [
        Claim(
            "The standard error of the experiment is within 0.001.",
            verdict_of_counts(worst <= 0.001, worst_global <= 0.001),
            f"Largest standard error of Self-FL over participation: local {worst:.4f}, global {worst_global:.4f}, "
            f"{setting.num_repeats} repeats. θ₀ is estimated from {setting.num_clients} clients, so the global error "
            "itself varies from repeat to repeat.",
        ),
        Claim(
            "The smoothing average by C slows convergence (appendix E.5).",
            verdict_of_counts(*slowed),
            f"At C = {low:g}, from a start {setting.global_mean:g} away, rounds until the global error is within a "
            f"fifth of where it ends: {rounds_to(cohort.trace)} with smoothing by C (ends at "
            f"{Estimate.of(cohort.global_error)}), {rounds_to(cohort_plain.trace)} without "
            f"({Estimate.of(cohort_plain.global_error)}). With S_m over all clients, where local runs are short: "
            f"{rounds_to(smooth.trace)} ({Estimate.of(smooth.global_error)}) and {rounds_to(plain.trace)} "
            f"({Estimate.of(plain.global_error)})."
            + (
                " What smoothing takes in speed it gives in steadiness: without it the global model is the average of "
                "the last few clients."
                if steadied
                else ""
            ),
        ),
        Claim(
            "Variances can be estimated from the models' own spread (section 3.2), each round a bootstrap sample.",
            verdict_of_counts(*near),
            "Holds at a rate of participation if no repeat diverges (error above 10) and the median error is within a "
            f"quarter. At C = {high:g}: {found[high][0]} of {setting.num_repeats} repeats diverged, and the median "
            f"local error is {found[high][1]:.2f} times that with known variances. At C = {low:g}: {found[low][0]} of "
            f"{setting.num_repeats} diverged, median {found[low][1]:.2f} times. A cohort of two has one other client "
            "in S_m: when that one's estimated variance is large and one's own small, the start θ − (w_m/S_m)(θ_m − θ) "
            "overshoots, and the spread feeds itself.",
        ),
    ]


def augmented_study(
    cases: Mapping[str, Setting], job: Job, *, shorten: Callable[[Setting], Setting] = quick_setting
) -> StudyResult:
    """Algorithm 1 against Algorithm 2 in each of the cases; ``shorten`` makes the setting of a quick look."""
    cases = {case: shorten(setting) for case, setting in cases.items()} if job.quick else cases
    rows: list[dict[str, Any]] = []
    table: list[dict[str, str]] = []
    charts: list[Chart] = []
    claims: list[Claim] = []
    config: dict[str, Any] = {}
    total = sum(2 * len(setting.participation) for setting in cases.values())
    for case, setting in cases.items():
        most, rates = setting.max_local_steps, setting.participation
        named: dict[str, AnyAlgorithm] = {
            "self-fl": SelfFL(variances="known", max_local_steps=most),
            "self-fl-augmented": SelfFLAugmented(variances="known", max_local_steps=most, max_convergence_steps=most),
        }
        federation, outcomes = collect(setting, named, job.progress, len(rows), total)
        bound = Estimate.of(limit(federation, "paper").local_error).mean
        rows += [{"case": case, **outcome.row(name, rate)} for (name, rate), outcome in outcomes.items()]
        lines = []
        for name in named:
            points = [Estimate.of(outcomes[name, rate].local_error) for rate in rates]
            lines.append(Series.of(name, rates, points))
            table.append(
                {"case": case, "method": name}
                | {f"local ℓ1, C={rate:g}": str(point) for rate, point in zip(rates, points, strict=True)}
                | {"gradients / round": f"{float(outcomes[name, rates[-1]].num_gradients.mean()):.0f}"}
            )
        lines.append(Series(LIMITS["paper"], rates, [bound] * len(rates), is_reference=True))
        label = r"mean ℓ1 error of $\theta_m$"
        charts.append(Chart(case.capitalize(), "participation C", label, lines, x_ticks=rates, dodge=0.006))
        claims.append(_claim_on_algorithms(case, outcomes, rates, bound))
        config[case] = asdict(setting) | {"methods": {name: repr(value) for name, value in named.items()}}
    job.progress(total, total, "done")
    caption = "Algorithm 1 against Algorithm 2: mean ℓ1 error of the personal parameters; bars are standard errors."
    return StudyResult(rows, table, [Figure("errors", caption, charts)], claims, config, decided_by=OVER_DRAWS)


def _claim_on_algorithms(case: str, outcomes: Outcomes, rates: Sequence[float], bound: float) -> Claim:
    """That the two algorithms end at the same error."""
    ours, other = ({rate: outcomes[name, rate] for rate in rates} for name in ("self-fl", "self-fl-augmented"))
    gaps = {rate: paired(ours[rate].local_error, other[rate].local_error) for rate in rates}
    shares = {rate: abs(gaps[rate].mean) / float(ours[rate].local_error.mean()) for rate in rates}
    largest = max(rates, key=lambda rate: shares[rate])
    share = shares[largest]
    return Claim(
        f"On {case} data the gap between Algorithms 1 and 2 is negligible.",
        in_every_case(alike(other[rate].local_error, ours[rate].local_error) for rate in rates),
        f"Read as negligible if within {100 * ALIKE:.0f} % at every C. "
        f"Largest relative gap {100 * share:.1f} % of Algorithm 1's error, at C = {largest:g} "
        f"(paired difference {gaps[largest]}). Algorithm 2's start and global model come from local optima, so "
        f"that with everybody active it ends at the paper's posterior mean (error {bound:.4f}, Algorithm 2 "
        f"{float(other[rates[-1]].local_error.mean()):.4f}); Algorithm 1 ends at a "
        "fixed point of its own, which is another place. Algorithm 2 spends "
        f"{float(other[rates[-1]].num_gradients.mean()):.0f} gradients a round where "
        f"Algorithm 1 spends {float(ours[rates[-1]].num_gradients.mean()):.0f} (C = 1).",
    )


def _setting_text(setting: Setting) -> str:
    low, high = setting.num_examples
    return (
        f"M = {setting.num_clients}, N_m uniform on {low}…{high}, θ₀ = {setting.global_mean:g}, "
        f"σ₀² = {setting.inter_variance:g}, σ_m² = {setting.row_variance:g}/N_m, η = {setting.learning_rate:g}, "
        f"{setting.num_rounds} rounds, L = {setting.num_local_steps}, C from {setting.participation[0]:g} to 1, "
        f"{setting.num_repeats} repeats; Self-FL is told the variances"
    )


CASES = {"homogeneous": HOMOGENEOUS, "heterogeneous": HETEROGENEOUS}
SYNTHETIC = (
    *(
        Study.known(f"synthetic-{case}", _setting_text(setting), partial(synthetic_study, setting, case))
        for case, setting in CASES.items()
    ),
    Study.known(
        "augmented-synthetic",
        "both synthetic cases, Self-FL and Augmented Self-FL, variances known",
        partial(augmented_study, CASES),
    ),
)
