"""Beyond the paper: selffl's estimators beside mixed models, on real rows of schools, counties, districts and people.

Data that are not found are left out, and the record says so; simulated counties need none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from selffl.data.multilevel import RTable
from selffl.errors import DataError
from selffl.maths.significance import FRESH_DRAWS
from selffl.studies.arms import run_side_by_side
from selffl.studies.comparison import seeds_of
from selffl.studies.grouped_models import INTERCEPTS, MIXED, OURS, PER_GROUP, POOLED, R_INTERCEPTS, SLOPES, why_no_lme4
from selffl.studies.grouped_runs import (
    COUNTS,
    NEW_SHARE,
    REAL,
    SIMULATED,
    SIZES,
    TEST_SHARE,
    Problem,
    Row,
    Settings,
    Simulation,
    measure_once,
)
from selffl.studies.result import (
    OVER_BOTH,
    Chart,
    Claim,
    Estimate,
    Figure,
    Job,
    Series,
    Study,
    StudyResult,
    Verdict,
    above_zero,
    in_parts,
    within,
)

NEGLIGIBLE = 1e-4  # difference, as a share of the estimator's error, that decides nothing however sure it is
MAX_GAP = 0.01  # between the learned variance and the true one, in units of σ₀², where it is called right

QUICK_VARIANCE = 0.06
QUICK_PROBLEM = Problem(f"simulated, σ₀² = {QUICK_VARIANCE:g}", Simulation(QUICK_VARIANCE, 30), (0, 1), (0, 5))
QUICK = Settings(rounds=10, longer_rounds=None, with_lme4=False)

Array = npt.NDArray[Any]


def multilevel_study(
    job: Job,
    *,
    whole: Sequence[Problem] = (*REAL, *SIMULATED),
    quick: tuple[Problem, Settings] = (QUICK_PROBLEM, QUICK),
    why_no_lme4: Callable[[], str] = why_no_lme4,
) -> StudyResult:
    """Every model on every data set that is there; ``quick`` is the problem of a quick look, and its settings."""
    missing = {}
    if job.quick:
        problems, settings, why = [quick[0]], quick[1], "left out of a quick run"
    else:
        problems = []
        for problem in whole:
            try:
                problem.load(0)
                problems.append(problem)
            except DataError as error:
                missing[problem.name] = str(error)
        why = why_no_lme4()
        settings = Settings(with_lme4=not why)
    seeds = seeds_of(job)
    tasks = {(problem.name, seed): (problem, seed, settings, job.folder) for problem in problems for seed in seeds}
    job.progress(0, len(tasks), problems[0].name)
    found: dict[tuple[str, int], list[Row]] = {}

    def note(piece: tuple[str, int], rows: list[Row]) -> None:
        found[piece] = rows
        job.progress(len(found), len(tasks), f"{piece[0]}, seed {piece[1]}")

    # A process of its own takes longer to start than a quick run to end.
    run_side_by_side(measure_once, tasks, 1 if job.quick else job.num_processes, note)
    rows = [row for piece in tasks for row in found[piece]]
    left_out = [f"{name} was not found (`selffl data fetch {name}`)" for name in missing]
    left_out += [f"lme4: {why}"] if why else []
    setting = f"{SETTING}; seeds: {len(seeds)}" + (f". Left out: {'; '.join(left_out)}" if left_out else "")
    return report(problems, rows, asdict(settings) | {"num_seeds": len(seeds), "missing": missing}, setting)


def report(problems: Sequence[Problem], rows: Sequence[Row], config: Mapping[str, Any], setting: str) -> StudyResult:
    """Tables, figures and verdicts of measurements."""
    claims = [claim for problem in problems for claim in claims_of(problem, rows)]
    table = [line for problem in problems for line in table_of(problem, rows)]
    whole = dict(config) | {"problems": {problem.name: asdict(problem) for problem in problems}}
    figures = [gap_figure(problems, rows)]
    return StudyResult(rows, table, figures, claims, whole, setting=setting, decided_by=OVER_BOTH)


def numbers(
    rows: Sequence[Row], problem: Problem, model: str, count: int | None = None, name: str = "error"
) -> torch.Tensor:
    """A number of a model by seed; of known groups, or of new ones that bring so many rows; NaN where there is none."""
    found = [row[name] for row in _measured(rows, problem, model, count)]
    return torch.tensor([torch.nan if value is None else value for value in found], dtype=torch.float64)


def models_of(rows: Sequence[Row], problem: Problem) -> list[str]:
    """The models that were fitted to a problem, in the order of the table."""
    return list(dict.fromkeys(row["model"] for row in rows if row["data"] == problem.name))


def reference(models: Sequence[str]) -> str:
    """The mixed model with intercepts: lme4's, which fits new groups too; that of statsmodels where R is not there."""
    return R_INTERCEPTS if R_INTERCEPTS in models else INTERCEPTS


def table_of(problem: Problem, rows: Sequence[Row]) -> list[dict[str, str]]:
    """One line per model: errors on known groups, by size of group, and on new groups by the rows that they bring."""
    lines = []
    for model in models_of(rows, problem):
        line = {"data": problem.name, "model": model, "known groups": _shown(numbers(rows, problem, model))}
        line |= {f"{size} groups": _shown(numbers(rows, problem, model, name=size)) for size in SIZES}
        for count in COUNTS:
            line[f"new, k = {count}"] = _shown(numbers(rows, problem, model, count))
        accuracy = 100 * numbers(rows, problem, model, name="accuracy")
        line["accuracy, %"] = "–" if accuracy.isnan().any() else f"{float(accuracy.mean()):.1f}"
        line["σ₀²"] = " / ".join(f"{float(value):.3f}" for value in learned_variances(rows, problem, model)) or "–"
        fallen = [row for row in _measured(rows, problem, model) if row["note"] and model in MIXED]
        line["not converged"] = f"seeds: {len(fallen)}" if fallen else "–"
        spent = numbers(rows, problem, model, name="cpu_seconds")
        line["CPU seconds"] = "–" if spent.isnan().any() else f"{float(spent.mean()):.2f}"
        lines.append(line)
    return lines


def _measured(rows: Sequence[Row], problem: Problem, model: str, count: int | None = None) -> list[Row]:
    """Measurements of a model, a row for each seed: on known groups, or on new ones that bring so many rows."""
    return [row for row in rows if (row["data"], row["model"], row["count"]) == (problem.name, model, count)]


def learned_variances(rows: Sequence[Row], problem: Problem, model: str) -> Array:
    """Variances between groups that a model has learned from the known groups, mean over seeds.

    A seed in which it was fitted without slopes counts for the intercept alone.
    """
    found = [[float(value) for value in row["variances"].split()] for row in _measured(rows, problem, model)]
    longest = max((len(values) for values in found), default=0)
    return np.array([np.mean([values[place] for values in found if len(values) > place]) for place in range(longest)])


def _shown(values: torch.Tensor) -> str:
    """Mean and standard error over the seeds in which there is a number."""
    known = values[~values.isnan()]
    if not len(known):
        return "–"
    found = Estimate.of(known)
    digits = 2 if abs(found.mean) >= 10 else 4
    return f"{found.mean:.{digits}f}" + (f" ± {found.error:.{digits}f}" if len(known) > 1 else "")


# ------------------------------------------------------------------------------------------------------------- verdicts


def claims_of(problem: Problem, rows: Sequence[Row]) -> list[Claim]:
    """The estimator beside mixed models and plain regressions, paired over seeds; and what it learned of σ₀²."""
    models = models_of(rows, problem)
    mixed = [model for model in MIXED if model in models]
    better = f"{problem.name}, new rows of known groups: the estimator predicts better than"
    plain = f"{better} one pooled regression and than a regression per group."
    claims = [
        _better(problem, rows, mixed, [None], f"{better} every mixed model."),
        _better(problem, rows, [POOLED, PER_GROUP], [None], plain),
    ]
    if problem.counts:
        shown = ", ".join(map(str, problem.counts))
        text = f"{problem.name}, new groups that bring {shown} rows: the estimator predicts better than mixed models."
        asked = [model for model in mixed if len(numbers(rows, problem, model, problem.counts[0]))]
        claims.append(_better(problem, rows, asked, problem.counts, text))
    if isinstance(problem.source, Simulation):
        claims.append(_variance_claim(problem, problem.source.variance, rows))
    return claims


def _better(
    problem: Problem, rows: Sequence[Row], others: Sequence[str], counts: Sequence[int | None], text: str
) -> Claim:
    """Whether the estimator's error is below that of every other model, in every case."""
    gaps = {
        (other, count): Estimate.of(
            numbers(rows, problem, other, count) - numbers(rows, problem, OURS, count),
            test_per_train=_test_per_train(problem, count),
        )
        for other in others
        for count in counts
    }
    metric = "log loss" if isinstance(problem.source, RTable) and problem.source.is_binary else "RMSE"
    said = ", ".join(
        f"{other}{'' if count is None else f', k = {count}'} {gap.mean:+.4f} ± {gap.error:.4f}"
        for (other, count), gap in gaps.items()
    )
    own = numbers(rows, problem, OURS)
    least = NEGLIGIBLE * float(own.mean())
    verdicts: list[Verdict] = [
        "inconclusive" if abs(gap.mean) < least else found
        for gap, found in zip(gaps.values(), above_zero(list(gaps.values())), strict=True)
    ]
    return Claim(
        text,
        in_parts(verdicts),
        f"{metric} of the other model less the estimator's, paired over {len(own)} seeds: {said}.",
    )


def _test_per_train(problem: Problem, count: int | None) -> float:
    """What the seeds share: simulated rows are drawn anew, real ones split anew."""
    if isinstance(problem.source, Simulation):
        return FRESH_DRAWS
    share = TEST_SHARE if count is None else NEW_SHARE
    return share / (1.0 - share)


def _variance_claim(problem: Problem, truth: float, rows: Sequence[Row]) -> Claim:
    """Whether the estimator learns the variance between groups."""
    each = [float(row["variances"]) for row in _measured(rows, problem, OURS)]
    learned = torch.tensor(each, dtype=torch.float64)
    gap = Estimate.of(learned - truth, test_per_train=FRESH_DRAWS)
    beside = learned_variances(rows, problem, SLOPES)
    return Claim(
        f"{problem.name}: the estimator learns σ₀² to within {MAX_GAP:g}.",
        within(gap, MAX_GAP),
        f"Learned {float(learned.mean()):.4f} ± {gap.error:.4f} for {truth:g}; {SLOPES}: "
        f"{', '.join(f'{value:.4f}' for value in beside)} for intercept and slopes.",
    )


# --------------------------------------------------------------------------------------------------------------- figure


def gap_figure(problems: Sequence[Problem], rows: Sequence[Row]) -> Figure:
    """The estimator's error less that of the mixed model with intercepts, in percent of the latter."""

    def gap(problem: Problem, count: int | None, name: str = "error") -> Estimate:
        ours = numbers(rows, problem, OURS, count, name)
        other = numbers(rows, problem, reference(models_of(rows, problem)), count, name)
        return Estimate.of((100 * (ours - other) / other)[~other.isnan()])

    thirds = list(range(1, len(SIZES) + 1))
    by_size = [problem for problem in problems if not numbers(rows, problem, OURS, name=SIZES[0]).isnan().any()]
    charts = [
        Chart(
            "New rows of known groups",
            "third of the groups by size: 1 small, 3 large",
            "error beside the mixed model's, %",
            [Series.of(problem.name, thirds, [gap(problem, None, size) for size in SIZES]) for problem in by_size],
            x_ticks=thirds,
            dodge=0.02,
        )
    ]
    with_new = [problem for problem in problems if problem.counts]
    if with_new:
        charts.append(
            Chart(
                "New groups",
                "rows of the new group, k",
                "error beside the mixed model's, %",
                [Series.of(p.name, p.counts, [gap(p, count) for count in p.counts]) for p in with_new],
                x_ticks=list(COUNTS),
                dodge=0.05,
            )
        )
    caption = (
        "Error of the estimator less that of a mixed model with an intercept per group, in percent of "
        "the latter: below 0 the estimator predicts better. RMSE, or log loss of binary outcomes; means over seeds, "
        "bars ± s.e."
    )
    return Figure("gaps", caption, charts)


SETTING = (
    "Rows of R's packages mlmRev, nlme, rstanarm and lme4 (GPL), and simulated counties; 30 % of each known group's "
    "rows are test rows; or a fifth of the groups is new and brings k rows, at most half of its own, and all models "
    "are fitted with them. Error is RMSE in the outcome's unit, of contraception and immunisation log loss. σ₀² is the "
    "variance between groups that a model learned, for outcome and features of variance 1: of the estimator the one "
    "over all coefficients, of mixed models those of intercept / slopes"
)
MULTILEVEL = Study.known("multilevel", SETTING, multilevel_study)
