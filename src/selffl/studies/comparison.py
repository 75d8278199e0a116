"""Self-FL beside its baselines on one problem: at the paper's steps, at equal gradients, and tuned.

Tuned baselines choose on validation rows, seed by seed (`selffl.studies.tuning`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from selffl.algorithms.grids import FINE_TUNE
from selffl.runs.best_round import best_round
from selffl.runs.evaluation import leading_metric, prefix_of
from selffl.studies.arms import Arm, Outcome, Outcomes, difference, estimate, metric_of, run_arms
from selffl.studies.problems import METHODS, Problem
from selffl.studies.problems import NUM_SEEDS as NUM_SEEDS
from selffl.studies.result import (
    OVER_SPLITS,
    Chart,
    Claim,
    Estimate,
    Figure,
    Job,
    Series,
    Study,
    StudyResult,
    above_zero,
    capfirst,
)
from selffl.studies.tuning import PENALTIES, STEPS_AFTER, Tuner, chosen_value, note, view_after
from selffl.training.metrics import HIGHER_IS_BETTER, PERCENT, name_of, plain_number

GRADIENTS_PER_STEP = {"fedavg": 1, "local": 1, "ditto": 2, "perfedavg": 2, "pfedme": 5}

TUNED_DITTO, TUNED_FEDAVG = "ditto, λ chosen", "fedavg, fine-tuned"


def metrics_of(metric: str) -> dict[str, str]:
    """The columns of a table, by the names they have in a summary; balanced accuracy never stands alone."""
    beside = {"pooled_auc": "AUC", "weighted_accuracy": "accuracy"} if metric == "balanced_accuracy" else {}
    return {
        f"weighted_{metric}": name_of(metric),
        **beside,
        f"top10_{metric}": "top 10 % by size",
        f"worst10_{metric}": "worst 10 %",
        f"global_{metric}": "global model",
    }


BEST_ROUND = "best round, chosen on test rows"
METRICS = metrics_of("accuracy")  # of the paper's studies


@dataclass(frozen=True)
class Comparison:
    """What is compared, and what the paper found."""

    problem: Problem  # what is trained
    claims: Mapping[str, str]  # baselines by label, each with the statement that the first method is better
    methods: tuple[str, ...] = METHODS  # at the problem's own L; the first is compared with all others
    paper: Mapping[str, Mapping[str, float]] | None = None  # its numbers, by label and metric, as it prints them
    more_steps: int | None = None  # L of a further run of the paper's personal baselines, where it reports one
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of the first method, by label: to see why
    shows_best_round: bool = False  # whether the table has each run's best round by test rows, as published ones do
    is_tuned: bool = True  # whether baselines are also tuned, and run at equal gradients
    num_seeds: int = NUM_SEEDS  # repeats, each with its own split
    quick_share: int = 5  # part of the rounds that a quick look takes, one in so many

    def quick(self) -> Comparison:
        """A first look: two seeds, part of the rounds, the methods as they are: not tuned, nor at equal gradients."""
        return replace(self, num_seeds=2, problem=self.problem.shorten(self.quick_share), is_tuned=False)


def _same_steps(label: str) -> str:
    return f"{label}, equal gradients"


def run_each(
    problem: Problem, arms: Sequence[Arm], seeds: Sequence[int], job: Job, done: int = 0, total: int | None = None
) -> Outcomes:
    """Every arm with every seed, seed by seed, as part of ``total`` runs of which ``done`` came before."""
    work = [(arm, seed) for seed in seeds for arm in arms]
    return run_arms(problem, work, job, done, total or len(work))


def run(comparison: Comparison, job: Job) -> tuple[Outcomes, dict[str, str]]:
    """All arms; and, by label, a word on what was chosen."""
    problem, seeds = comparison.problem, range(comparison.num_seeds)
    base = [Arm(name, name) for name in comparison.methods]
    if comparison.more_steps:
        base += [
            Arm(f"{name}, L = {comparison.more_steps}", name, {"num_local_steps": comparison.more_steps})
            for name in ("ditto", "pfedme", "perfedavg")
        ]
    base += [Arm(label, comparison.methods[0], options) for label, options in comparison.variants.items()]
    if not comparison.is_tuned:
        return run_each(problem, base, seeds, job), {}

    equal = [name for name in comparison.methods if name in GRADIENTS_PER_STEP]
    num_trials = len(PENALTIES) + 1
    tuner = Tuner(problem, job, (len(base) + num_trials + len(equal) + 1) * len(seeds))
    tuner.try_values("ditto", "penalty", PENALTIES, seeds)
    tuner.try_values("fedavg", FINE_TUNE, (0, *STEPS_AFTER), seeds)
    of_ditto = [tuner.search("ditto", "penalty", PENALTIES, [seed]) for seed in seeds]
    of_fedavg = [tuner.search("fedavg", FINE_TUNE, (0, *STEPS_AFTER), [seed]) for seed in seeds]
    penalties, steps = [chosen_value(found) for found in of_ditto], [chosen_value(found) for found in of_fedavg]

    # The fine-tuned view of FedAvg costs little: it is taken along.
    after = [(count,) if count else () for count in steps]
    first = [
        (replace(arm, fine_tune=after[seed]) if arm.label == "fedavg" else arm, seed) for seed in seeds for arm in base
    ]
    first += [(Arm(TUNED_DITTO, "ditto", {"penalty": penalties[seed]}), seed) for seed in seeds]
    outcomes = run_arms(problem, first, job, tuner.num_done, tuner.num_planned)
    budget = mean_gradients(outcomes[comparison.methods[0]])
    spending = {name: max(round(budget / GRADIENTS_PER_STEP[name]), 1) for name in equal}
    second = [(Arm(_same_steps(name), name, {"num_local_steps": spending[name]}), s) for s in seeds for name in equal]
    found = run_arms(problem, second, job, tuner.num_done + len(first), tuner.num_planned)
    outcomes[TUNED_FEDAVG] = [take_fine_tuned(outcomes["fedavg"][seed], steps[seed]) for seed in seeds]
    outcomes |= found
    notes = {
        TUNED_DITTO: note("λ", of_ditto),
        TUNED_FEDAVG: note("k", of_fedavg),
        **{_same_steps(name): f"L = {count}" for name, count in spending.items()},
    }
    job.progress(tuner.num_planned, tuner.num_planned, "done")
    return outcomes, notes


def take_fine_tuned(outcome: Outcome, steps: int, start: str = "global") -> Outcome:
    """FedAvg's outcome with its global model, fine-tuned from the view ``start``, as everybody's personal model."""
    is_as_it_is = steps == 0 and start == "global"
    # Gradients are those of training, for every method; these steps, once per client, come on top (see `chosen`).
    return outcome if is_as_it_is else as_personal(outcome, view_after(start, steps))


def as_personal(outcome: Outcome, view: str) -> Outcome:
    """An outcome with another view of its last round as everybody's personal model."""

    def swap(row: Mapping[str, Any]) -> dict[str, Any]:
        taken = {
            f"{part}_accuracy": row.get(f"{prefix_of(view)}{part}_accuracy")
            for part in ("weighted", "top10", "worst10")
        }
        return dict(row) | taken

    last = [swap(row) for row in outcome.history[-1:]]
    return replace(outcome, summary=swap(outcome.summary), history=last, folder=None)


def report(comparison: Comparison, outcomes: Outcomes, notes: Mapping[str, str]) -> StudyResult:
    """Tables, figures and verdicts."""
    first, metric = comparison.methods[0], metric_of(outcomes)
    rows = [
        {"method": label, "seed": outcome.seed, **{name: row.get(name) for name in ("round", *metrics_of(metric))}}
        for label, group in outcomes.items()
        for outcome in group
        for row in outcome.history
    ]
    figure = Figure(
        metric,
        f"{capfirst(name_of(metric))} on each client's own held-out rows, by round; mean over "
        f"{comparison.num_seeds} seeds, bars ± s.e.",
        [
            by_round(outcomes, comparison.methods, f"{part}_{metric}", title)
            for part, title in (("weighted", "All clients, by test rows"), ("worst10", "Worst tenth of clients"))
        ],
    )
    baselines = {label for label in outcomes if label != first}
    claims = better(outcomes, first, {other: text for other, text in comparison.claims.items() if other in baselines})
    return StudyResult(
        rows,
        table(comparison, outcomes, notes),
        [figure],
        claims,
        asdict(comparison),
        runs=runs_of(outcomes),
        decided_by=OVER_SPLITS,
    )


def table(comparison: Comparison, outcomes: Outcomes, notes: Mapping[str, str]) -> list[dict[str, str]]:
    """One line per method: mean ± standard error over seeds, and what the paper prints."""
    lines, metric = [], metric_of(outcomes)
    for label, group in outcomes.items():
        line = {"method": label, **score_cells(group, metric)}
        if comparison.shows_best_round:
            line[BEST_ROUND] = points(estimate(list(map(at_best_round, group)), f"weighted_{metric}"), metric)
        line["gradients"] = f"{mean_gradients(group):.0f}"
        has_cap = comparison.problem.num_local_epochs is None
        shares = [share_at_cap(outcome, comparison.problem.max_local_steps) for outcome in group]
        at_cap = [share for share in shares if has_cap and share is not None]
        line["steps at ℓ_max"] = f"{100 * sum(at_cap) / len(at_cap):.0f} %" if at_cap else "–"
        if notes:
            line["chosen"] = notes.get(label, "–")
        if comparison.paper:
            printed = comparison.paper.get(label, {})
            line["paper"] = ", ".join(f"{METRICS[name]} {value:g}" for name, value in printed.items()) or "–"
        lines.append(line)
    return lines


def at_best_round(outcome: Outcome) -> Outcome:
    """The outcome as of its best round by test rows; as diverged where it did, whatever came before."""
    metric = leading_metric([outcome.summary]) or "accuracy"
    if outcome.summary["status"] == "diverged" or not outcome.history:
        return outcome
    is_up = HIGHER_IS_BETTER.get(metric, True)
    best = best_round(outcome.history, f"weighted_{metric}", "test rows", higher_is_better=is_up)
    return outcome.at(best["round"])


def score_cells(group: Sequence[Outcome], metric: str) -> dict[str, str]:
    """The scores of one arm in a table; a dash for a global model that is of no use, and for what was not measured."""
    cells = {}
    for name, title in metrics_of(metric).items():
        is_void = name.startswith("global_") and not group[0].has_global_model
        is_void |= all(o.summary.get(name) is None and o.summary.get("status") != "diverged" for o in group)
        cells[title] = "–" if is_void else points(estimate(group, name), "auc" if name == "pooled_auc" else metric)
    return cells


def score_lines(outcomes: Outcomes, columns: Mapping[str, str], heading: str = "method") -> list[dict[str, str]]:
    """One line per arm: its label, the scores that ``columns`` name by their titles, and what they took."""
    return [
        {heading: label}
        | {title: points(estimate(group, name)) for title, name in columns.items()}
        | {"gradients": f"{mean_gradients(group):.0f}"}
        for label, group in outcomes.items()
    ]


def points(found: Estimate, metric: str = "accuracy") -> str:
    """Percentage points with their standard error; of other metrics than accuracy, their own unit."""
    if found.mean != found.mean:
        return "diverged"
    form = ".1f" if metric in PERCENT else ".3f" if metric == "auc" else None
    mean, error = (
        (plain_number(found.mean), plain_number(found.error, 2))
        if form is None
        else (f"{found.mean:{form}}", f"{found.error:{form}}")
    )
    return mean + (f" ± {error}" if found.error == found.error else "")  # one seed: none


def share_at_cap(outcome: Outcome, max_local_steps: int) -> float | None:
    """Share of client-rounds that took the most steps allowed; none for a method that does not choose them."""
    steps = [row["num_local_steps"] for row in outcome.participation if row["num_local_steps"] is not None]
    return sum(count >= max_local_steps for count in steps) / len(steps) if steps else None


def by_round(outcomes: Outcomes, labels: Sequence[str], metric: str, title: str, first: int = 0) -> Chart:
    """A metric of the evaluated rounds, mean and standard error over seeds; rounds count on from ``first``."""
    lines = []
    for label in labels:
        group = outcomes[label]
        rounds = sorted({row["round"] for outcome in group for row in outcome.history})
        found = [estimate([outcome.at(number) for outcome in group], metric) for number in rounds]
        lines.append(Series.of(label, [first + number for number in rounds], found))
    part, _, what = metric.partition("_")
    which = {"global": "the global model", "train": "the personal models on training rows"}
    label = f"{name_of(what)} of {which.get(part, 'the personal models')}" + (", %" if what in PERCENT else "")
    return Chart(title, "round", label, lines, dodge=max((x for line in lines for x in line.x), default=0) / 170)


def runs_of(outcomes: Outcomes) -> list[dict[str, Any]]:
    """Method, seed and folder of each run, for a report that looks inside."""
    return [
        {"method": label, "seed": outcome.seed, "folder": outcome.folder}
        for label, group in outcomes.items()
        for outcome in group
        if outcome.folder is not None
    ]


def mean_gradients(group: Sequence[Outcome]) -> float:
    """Gradients in training, per client and round it took part in, over seeds."""
    return sum(outcome.num_gradients for outcome in group) / len(group)


def result_of(
    outcomes: Outcomes,
    table: Sequence[dict[str, str]],
    claims: Sequence[Claim],
    problem: Problem,
    caption: str,
    panels: Mapping[str, str],
    first: int = 0,
) -> StudyResult:
    """What a study of one problem found, with a picture by round: ``panels`` are metrics and what to call them."""
    charts = [by_round(outcomes, list(outcomes), metric, title, first) for metric, title in panels.items()]
    num_seeds = len(next(iter(outcomes.values())))
    config = asdict(problem) | {"num_seeds": num_seeds}
    figure = Figure("accuracy", caption, charts)
    return StudyResult(history(outcomes), table, [figure], claims, config, decided_by=OVER_SPLITS)


def join_problems(
    parts: Mapping[str, StudyResult], config: Mapping[str, Any], title: str | None = None, setting: str | None = None
) -> StudyResult:
    """What a study of several problems found, by their names: each on lines of its own, pictures side by side."""
    figure = next(iter(parts.values())).figures[0]
    return StudyResult(
        [{"problem": name} | row for name, part in parts.items() for row in part.rows],
        [{"problem": name} | line for name, part in parts.items() for line in part.table],
        [replace(figure, charts=[chart for part in parts.values() for chart in part.figures[0].charts])],
        [claim for part in parts.values() for claim in part.claims],
        {name: part.config for name, part in parts.items()} | dict(config),
        title,
        setting,
        decided_by=OVER_SPLITS,
    )


def history(outcomes: Outcomes) -> list[dict[str, object]]:
    """Every evaluated round of every run, for the long table."""
    return [
        {"method": label, "seed": outcome.seed} | {key: value for key, value in row.items() if value is not None}
        for label, group in outcomes.items()
        for outcome in group
        for row in outcome.history
    ]


def seeds_of(job: Job) -> range:
    """Seeds, as many as are asked for, else two for a quick look."""
    return range(job.num_seeds or (2 if job.quick else NUM_SEEDS))


def shorten_for_look(problem: Problem, job: Job) -> Problem:
    """The problem, with a fifth of the rounds for a quick look."""
    return problem.shorten(5) if job.quick else problem


def better(outcomes: Outcomes, first: str, texts: Mapping[str, str]) -> list[Claim]:
    """Whether the first method is better than each of others, paired over seeds; ``texts`` say so, by the other.

    Holm's correction is over all methods that the first is compared with, as in the table, claimed or not.
    """
    metric = metric_of(outcomes)
    unit = " points" if metric in PERCENT else ""
    direction = 1.0 if HIGHER_IS_BETTER.get(metric, True) else -1.0
    names = {**PARTS, "weighted": capfirst(name_of(metric))}
    num_seeds = len(outcomes[first])
    over = f"paired over {num_seeds} seeds" if num_seeds > 1 else "one seed"
    gaps = {
        other: {part: difference(outcomes[first], outcomes[other], f"{part}_{metric}") for part in PARTS}
        for other in outcomes
        if other != first
    }
    verdicts = dict(zip(gaps, above_zero([gap["weighted"].scale_by(direction) for gap in gaps.values()]), strict=True))
    return [
        Claim(
            text,
            verdicts[other],
            ", ".join(f"{names[part]} {_gap(gap, metric)}" for part, gap in gaps[other].items())
            + f"{unit} ({first} − {other}, {over}).",
        )
        for other, text in texts.items()
    ]


def _gap(gap: Estimate, metric: str) -> str:
    """A difference with its sign and its standard error, of which one seed has none."""
    if math.isnan(gap.error):
        return f"{gap.mean:+.2f}" if metric in PERCENT else plain_number(gap.mean, 3, signed=True)
    if metric in PERCENT:
        return gap.signed
    return f"{plain_number(gap.mean, 3, signed=True)} ± {plain_number(gap.error, 3)}"


PARTS = {"weighted": "Accuracy", "top10": "top tenth", "worst10": "worst tenth"}


def study(comparison: Comparison, job: Job) -> StudyResult:
    """Run and report."""
    chosen = comparison.quick() if job.quick else comparison
    chosen = replace(chosen, num_seeds=job.num_seeds or chosen.num_seeds)
    outcomes, notes = run(chosen, job)
    return report(chosen, outcomes, notes)


def study_on(problem: Problem, name: str, run: Callable[[Job], StudyResult], more: str = "") -> Study:
    """A study of one problem with the usual number of seeds; ``more`` is said of its setting."""
    return Study.known(name, f"{problem.setting}{more}; {NUM_SEEDS} seeds", run)


def study_of(comparison: Comparison, name: str) -> Study:
    """A comparison of a user's own as a study."""
    problem = comparison.problem
    return Study(
        name,
        f"{', '.join(comparison.methods)} on {problem.title}",
        "a comparison, not a study of the paper",
        f"{problem.setting}; {comparison.num_seeds} seeds",
        partial(study, comparison),
    )
