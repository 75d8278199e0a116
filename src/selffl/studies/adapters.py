"""Adapters of networks that were trained before, client by client: self-fl-auto beside what others do with them.

Three benchmarks that need no download (`selffl.studies.adapter_problem`).  Every method may choose its optimiser and
its learning rate, and some a view or a penalty, on validation rows of the first seed; self-fl-auto has plain steps,
and chooses their size from the same grid.  What is chosen is then trained on all training rows, with every seed.

Averaged B, with A frozen and common, is FFA-LoRA (Sun, Li, Li and Ding, ICLR 2024); averaged A and B is FedIT (Zhang
et al., ICASSP 2024); A shared and B kept is FedSA-LoRA (Guo et al., ICLR 2025).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from selffl.algorithms import algorithm
from selffl.runs.evaluation import WITH_CLASSES, prefix_of
from selffl.runs.tune import VALIDATION_SHARE
from selffl.studies.adapter_problem import B_ALONE, EVERYTHING, AdapterProblem
from selffl.studies.arms import Arm, Outcome, Outcomes, difference, estimate, ratio_of, score_of_clients
from selffl.studies.auto import AUTO, bytes_of_visit, share_losing
from selffl.studies.comparison import as_personal, by_round, history, mean_gradients, points, run_each, runs_of
from selffl.studies.result import (
    OVER_SPLITS,
    TARGET,
    Claim,
    Estimate,
    Figure,
    Job,
    Study,
    StudyResult,
    Verdict,
    read_toml,
    sign,
)
from selffl.training.flat import FlatModel

NUM_SEEDS = 5
NUM_GROUPS = 3  # of clients, by how many rows they have
OPTIMISERS = ("sgd", "adam")
FEDAVG, LOCAL = "fedavg, B", "local, B"
REFERENCES = ("fedavg, everything",)  # what is no adapter, and so no baseline


@dataclass(frozen=True)
class Method:
    """A line of the table: a method, what of the network its clients train, and what it may choose from."""

    label: str
    algorithm: str
    trains: str = B_ALONE
    optimisers: tuple[str, ...] = OPTIMISERS
    options: tuple[Mapping[str, Any], ...] = ({},)  # of the method
    is_fine_tuned: bool = False  # whether it may fine-tune its global model, client by client
    with_classes: bool = False  # whether its global model is taken with each client's class frequencies
    setting_of: str | None = None  # whose optimiser and learning rate it takes; none: it chooses its own

    def views(self, fine_tune: Sequence[int]) -> list[str]:
        """Views of its models that it may choose from."""
        start = WITH_CLASSES if self.with_classes else "global"
        if self.is_fine_tuned:
            return [f"{start}+{steps}" for steps in fine_tune]
        return [start if self.with_classes else "personal"]


METHODS = tuple(Method(**found) for found in read_toml("adapters.toml")["methods"])


@dataclass(frozen=True)
class Adapters:
    """A benchmark, and what methods may choose from."""

    problem: AdapterProblem
    rates: Mapping[str, tuple[float, ...]]  # learning rates, by optimiser
    fine_tune: tuple[int, ...] = (5, 20)  # steps
    methods: tuple[Method, ...] = METHODS
    num_seeds: int = NUM_SEEDS
    quick_share: int = 20  # part of the rounds that a quick look takes, one in so many

    def quick(self) -> Adapters:
        """Two seeds, a smaller network, and little to choose from."""
        rates = {optimiser: each[1:2] for optimiser, each in self.rates.items()}
        return replace(
            self,
            problem=self.problem.shorten(self.quick_share),
            rates=rates,
            fine_tune=self.fine_tune[:1],
            num_seeds=2,
        )

    def settings(self, method: Method, chosen: Mapping[str, Choice]) -> list[dict[str, Any]]:
        """Settings of the problem that a method may choose from; ``chosen`` is what others have."""
        if method.setting_of is not None:
            return [dict(chosen[method.setting_of].settings)]
        return [
            {"trains": method.trains, "optimiser": optimiser, "learning_rate": rate}
            for optimiser in method.optimisers
            for rate in self.rates[optimiser]
        ]

    def arm(self, method: Method, settings: Mapping[str, Any], options: Mapping[str, Any]) -> Arm:
        """How a method is run; those that differ in views alone are one run."""
        is_shared = method.algorithm == "fedavg" and method.trains == B_ALONE
        more = "".join(f", {key} {value}" for key, value in options.items())
        label = f"{method.algorithm}, {method.trains}, {settings['optimiser']} {settings['learning_rate']:g}{more}"
        return Arm(
            label,
            method.algorithm,
            options,
            self.fine_tune if is_shared else (),
            num_evaluations=10,
            class_frequencies=is_shared,
            settings=settings,
        )


@dataclass(frozen=True)
class Choice:
    """What a method has chosen."""

    arm: Arm
    view: str
    score: float  # by which it was chosen, in percent
    num_tried: int

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the problem."""
        return self.arm.settings

    @property
    def words(self) -> str:
        """The choice in words, for a table."""
        own = [f"{self.settings['optimiser']} {self.settings['learning_rate']:g}"]
        own += [f"{key} {value}" for key, value in self.arm.options.items() if isinstance(value, float)]
        own += [f"k = {self.view.rpartition('+')[2]}"] if self.view.rpartition("+")[2].isdigit() else []
        return f"{', '.join(own)} ({self.num_tried} tried)"


@dataclass
class Chooser:
    """Lets methods choose on validation rows of the first seed; a run is made once, however many look at it."""

    adapters: Adapters
    job: Job
    num_planned: int
    found: dict[str, Outcome] = field(default_factory=dict)  # by label

    def choose(self, method: Method, chosen: Mapping[str, Choice]) -> Choice:
        """The best of what a method may choose from."""
        settings = self.adapters.settings(method, chosen)
        arms = [self.adapters.arm(method, each, options) for each in settings for options in method.options]
        trials = [
            replace(arm, evaluate_on="validation", validation_fraction=VALIDATION_SHARE, num_evaluations=1)
            for arm in arms
            if arm.label not in self.found
        ]
        if trials:
            total = max(self.num_planned, len(self.found) + len(trials))
            outcomes = run_each(self.adapters.problem, trials, [0], self.job, len(self.found), total)
            self.found |= {label: group[0] for label, group in outcomes.items()}
        pairs = [(arm, view) for arm in arms for view in method.views(self.adapters.fine_tune)]
        scores = [self._score(arm, view) for arm, view in pairs]
        best = max(range(len(pairs)), key=lambda place: scores[place])
        return Choice(*pairs[best], scores[best], len(pairs))

    def _score(self, arm: Arm, view: str) -> float:
        found = self.found[arm.label].score(f"{prefix_of(view)}weighted_accuracy")
        return -math.inf if math.isnan(found) else found


def adapters_study(whole: Adapters, job: Job) -> StudyResult:
    """Every method chooses, and is then trained with every seed."""
    adapters = whole.quick() if job.quick else whole
    seeds = range(job.num_seeds or adapters.num_seeds)
    num_trials = sum(len(method.optimisers) * 3 for method in adapters.methods)
    chooser = Chooser(adapters, job, num_trials + len(adapters.methods) * len(seeds))
    chosen: dict[str, Choice] = {}
    for method in adapters.methods:
        chosen[method.label] = chooser.choose(method, chosen)
    arms = {choice.arm.label: choice.arm for choice in chosen.values()}
    done = len(chooser.found)
    total = done + len(arms) * len(seeds)
    runs = run_each(adapters.problem, list(arms.values()), seeds, job, done, total)
    job.progress(total, total, "done")
    return report(adapters, runs, chosen)


@dataclass(frozen=True)
class Line:
    """A method with every seed."""

    choice: Choice
    outcomes: Sequence[Outcome]  # of the view that was chosen

    @property
    def column(self) -> str:
        """Column of the tables of clients: the accuracy of that view."""
        return f"{prefix_of(self.choice.view)}accuracy"

    def by_size(self) -> list[Estimate]:
        """Accuracy in percent of clients with few, some and many rows, weighted by test rows; thirds of all clients."""
        found = []
        for outcome in self.outcomes:
            rows = sorted(
                (row for row in outcome.clients if row.get(self.column) is not None),
                key=lambda row: int(row["num_train"]),
            )
            thirds = [rows[len(rows) * k // NUM_GROUPS : len(rows) * (k + 1) // NUM_GROUPS] for k in range(NUM_GROUPS)]
            found.append([score_of_clients(third, self.column) for third in thirds])
        return [Estimate.of(torch.tensor(each, dtype=torch.float64)) for each in zip(*found, strict=True)]


def report(adapters: Adapters, runs: Outcomes, chosen: Mapping[str, Choice]) -> StudyResult:
    """Table, picture and verdicts."""
    lines = {
        label: Line(
            choice,
            [each if choice.view == "personal" else as_personal(each, choice.view) for each in runs[choice.arm.label]],
        )
        for label, choice in chosen.items()
    }
    outcomes = {label: list(line.outcomes) for label, line in lines.items()}
    losing = {
        label: 100 * share_losing(line.outcomes, outcomes[LOCAL], line.column)
        for label, line in lines.items()
        if label != LOCAL
    }
    losses = {label: Estimate.of(each) for label, each in losing.items()}
    by_themselves = {label: outcomes[label] for label, line in lines.items() if line.choice.view == "personal"}
    num_seeds = len(outcomes[AUTO])
    figure = Figure(
        "accuracy",
        f"Accuracy on each client's own held-out rows, by round; mean over {num_seeds} seeds, bars ± s.e.",
        [by_round(by_themselves, list(by_themselves), "weighted_accuracy", "All clients, by test rows")],
    )
    return StudyResult(
        history(outcomes),
        [table_line(adapters, label, line, losses.get(label)) for label, line in lines.items()],
        [figure],
        claims_of(outcomes, losing),
        asdict(adapters) | {"num_seeds": num_seeds},
        runs=runs_of(by_themselves),
        setting=f"{adapters.problem.setting}, rank {adapters.problem.rank}; {num_seeds} seeds, optimisers and rates "
        "chosen on validation rows of the first",
        decided_by=OVER_SPLITS,
    )


def table_line(adapters: Adapters, label: str, line: Line, losing: Estimate | None) -> dict[str, str]:
    """A method as it is shown."""
    few, some, many = map(points, line.by_size())
    group = line.outcomes
    seconds = sum(float(outcome.summary.get("seconds", math.nan)) for outcome in group) / len(group)
    return {
        "method": label,
        "accuracy": points(estimate(group, "weighted_accuracy")),
        "worst 10 %": points(estimate(group, "worst10_accuracy")),
        "worse than alone": "–" if losing is None else f"{points(losing)} %",
        "few rows": few,
        "some rows": some,
        "many rows": many,
        "kB a round": f"{bytes_sent(adapters, line.choice.arm) / 1000:.0f}",
        "gradients": f"{mean_gradients(group):.0f}",
        "seconds": f"{seconds:.0f}",
        "chosen": line.choice.words,
    }


def bytes_sent(adapters: Adapters, arm: Arm) -> int:
    """Bytes that go to one client in a round, and back."""
    problem = replace(adapters.problem, **arm.settings)
    model = FlatModel(problem.module(problem.federation(0), 0))
    method = algorithm(arm.algorithm, **arm.options)
    return bytes_of_visit(method, model.num_parameters, model.layers)


def claims_of(outcomes: Outcomes, losing: Mapping[str, torch.Tensor]) -> list[Claim]:
    """What self-fl-auto is measured by."""
    paired = f"paired over {len(outcomes[AUTO])} seeds"
    gaps = {
        label: difference(outcomes[AUTO], group, "weighted_accuracy")
        for label, group in outcomes.items()
        if label not in (AUTO, *REFERENCES)
    }
    gaps = {label: gap for label, gap in gaps.items() if not math.isnan(gap.mean)}
    best = min(gaps, key=lambda label: gaps[label].mean)
    worst = difference(outcomes[AUTO], outcomes[FEDAVG], "worst10_accuracy")
    fewer = Estimate.of(losing[FEDAVG] - losing[AUTO], test_per_train=ratio_of((*outcomes[AUTO], *outcomes[FEDAVG])))
    return [
        Claim(
            f"{TARGET}{AUTO} is level with the best of the other adapters, or above: not below by more than a standard "
            "error.",
            level(gaps[best]),
            f"{gaps[best].signed} points against {best}, the best ({paired}): compared as it is, not tested.".replace(
                " ± nan", ""
            ),
        ),
        Claim(
            f"{TARGET}the worst tenth of clients above that of averaged adapters.",
            sign(worst),
            f"{worst.signed} points against {FEDAVG} ({paired}).",
        ),
        Claim(
            f"{TARGET}fewer clients are worse than alone than with averaged adapters.",
            sign(fewer),
            f"{points(Estimate.of(losing[AUTO]))} % against {points(Estimate.of(losing[FEDAVG]))} %; {fewer.signed} "
            f"points fewer ({paired}).",
        ),
    ]


def level(gap: Estimate) -> Verdict:
    """Whether a difference is not below zero by more than its standard error, which a single repeat does not have."""
    if math.isnan(gap.error):
        return "inconclusive"
    return "holds" if gap.mean >= -gap.error else "does not hold"


# -------------------------------------------------------------------------------------------------------------- studies

DESIGNS = {
    name: Adapters(AdapterProblem(**found["problem"]), **{key: found[key] for key in found if key != "problem"})
    for name, found in read_toml("adapters.toml")["designs"].items()
}
# Convolutions of which every client has its own take several times as long.
DESIGNS["images"] = replace(DESIGNS["images"], methods=tuple(each for each in METHODS if each.trains != EVERYTHING))

ADAPTERS = tuple(
    Study.known(
        design.problem.name,
        f"{design.problem.setting}; {design.num_seeds} seeds",
        partial(adapters_study, design),
    )
    for design in DESIGNS.values()
)
