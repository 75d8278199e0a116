"""Self-FL with learned variances against baselines that were tuned for each data set: not in the paper.

Baselines choose on validation rows, a fifth of each client's training rows, on the first seeds: lambda of DITTO, lambda
of pFedMe, the steps of fine-tuning.  They are then trained on all training rows, with every seed.  self-fl-auto chooses
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from selffl.algorithms import Algorithm, SelfFLAuto, algorithm
from selffl.algorithms.grids import FINE_TUNE
from selffl.algorithms.layers import Layer
from selffl.algorithms.population import Population
from selffl.engines.cohort import CohortEngine
from selffl.runs.folder import Row
from selffl.runs.records import visit_bytes
from selffl.runs.tune import default_grid
from selffl.studies.arms import Arm, Outcome, Outcomes, difference, ratio_of
from selffl.studies.comparison import (
    NUM_SEEDS,
    TUNED_FEDAVG,
    by_round,
    history,
    mean_gradients,
    points,
    run_each,
    runs_of,
    score_cells,
    seeds_of,
    take_fine_tuned,
)
from selffl.studies.problems import CIFAR10, DIGITS, LETTERS, MNIST, PROBLEMS, SENTIMENT, WAKEWORD, Problem
from selffl.studies.result import (
    OVER_SPLITS,
    TARGET,
    Claim,
    Estimate,
    Figure,
    Job,
    Study,
    StudyResult,
    all_above_zero,
    read_toml,
    sign,
)
from selffl.studies.tuning import EQUAL_TRIALS, STEPS_AFTER, Tuner, chosen_value, note
from selffl.training.gaussian import GaussianFederation

AUTO = SelfFLAuto.name
BUDGET_RATIO = 2.0  # times FedAvg's gradients and bytes
TUNED = ("ditto", "pfedme")  # by their penalty, lambda
SHARE = "worse than alone"


@dataclass(frozen=True)
class TunedComparison:
    """A problem and who is in it."""

    problem: Callable[[], Problem]  # what is trained
    others: tuple[str, ...] = ("self-fl", "perfedavg")  # besides self-fl-auto, local, fedavg and those that are tuned
    num_choosing: int = 2  # seeds on whose validation rows baselines choose
    fine_tune: tuple[int, ...] = STEPS_AFTER  # numbers of steps that fine-tuning may choose from
    rounds: int | None = None  # fewer than the problem's, where that would take hours
    quick_share: int = 5  # part of the rounds that a quick look takes, one in so many
    quick_model: Mapping[str, int] = field(default_factory=dict)  # options of the model in a quick look

    def make_problem(self, *, is_quick: bool) -> Problem:
        """The problem on the data that are there; shorter for a quick look."""
        problem = self.problem()
        whole = replace(problem, rounds=self.rounds or problem.rounds)
        return whole.shorten(self.quick_share, self.quick_model) if is_quick else whole


FIELDS = {
    "digits": TunedComparison(PROBLEMS["digits"]),
    "mnist": TunedComparison(PROBLEMS["mnist"]),
    "femnist": TunedComparison(PROBLEMS["femnist"]),
    "cifar10": TunedComparison(PROBLEMS["cifar10"], others=(), num_choosing=1, quick_share=20),
    # Its clients have some twenty rows: eighty steps are forty passes.
    "sent140": TunedComparison(
        PROBLEMS["sent140"],
        others=(),
        num_choosing=1,
        fine_tune=STEPS_AFTER[:-1],
        rounds=100,
        quick_share=25,
        quick_model={"hidden": 16},
    ),
    "wakeword": TunedComparison(PROBLEMS["wakeword"], num_choosing=1, quick_share=10),
}


def chosen_label(name: str) -> str:
    """Label of a method whose lambda was chosen."""
    return f"{name}, λ chosen"


def _run(entry: TunedComparison, job: Job) -> StudyResult:
    problem = entry.make_problem(is_quick=job.quick)
    seeds = seeds_of(job)
    choosing = range(1 if job.quick else min(entry.num_choosing, len(seeds)))
    grids = {name: default_grid(name, algorithm(name))["penalty"] for name in TUNED}
    grids = {name: grid[:: len(grid) // 2] if job.quick else grid for name, grid in grids.items()}
    plain = [Arm(name, name) for name in (AUTO, "local", *entry.others)]
    num_trials = sum(map(len, grids.values())) + 1
    tuner = Tuner(problem, job, num_trials * len(choosing) + (len(plain) + 1 + len(grids)) * len(seeds))
    searches = {name: tuner.search(name, "penalty", grid, choosing) for name, grid in grids.items()}
    of_fedavg = tuner.search("fedavg", FINE_TUNE, (0, *entry.fine_tune), choosing)
    steps = chosen_value(of_fedavg)
    tuned = [Arm(chosen_label(name), name, dict(found.chosen.setting)) for name, found in searches.items()]
    fedavg = Arm("fedavg", "fedavg", {}, (steps,) if steps else ())
    outcomes = run_each(problem, [*plain, fedavg, *tuned], seeds, job, tuner.num_done, tuner.num_planned)
    outcomes[TUNED_FEDAVG] = [take_fine_tuned(outcome, steps) for outcome in outcomes["fedavg"]]
    notes = {chosen_label(name): note("λ", [found]) for name, found in searches.items()}
    notes[TUNED_FEDAVG] = note("k", [of_fedavg])
    job.progress(tuner.num_planned, tuner.num_planned, "done")
    return _report(problem, outcomes, notes, len(choosing), steps)


def _report(
    problem: Problem, outcomes: Outcomes, notes: dict[str, str], num_choosing: int, num_tuning_steps: int
) -> StudyResult:
    columns = {TUNED_FEDAVG: f"global_after_{num_tuning_steps}_accuracy" if num_tuning_steps else "global_accuracy"}
    losing = {
        label: 100 * share_losing(group, outcomes["local"], columns.get(label, "accuracy"))
        for label, group in outcomes.items()
        if label != "local"
    }
    table = []
    for label, group in outcomes.items():
        line = {"method": label, **score_cells(group, "accuracy")}
        line[SHARE] = points(Estimate.of(losing[label])) + " %" if label in losing else "–"
        line["gradients"] = f"{mean_gradients(group):.1f}"
        line["chosen"] = notes.get(label, "–")
        table.append(line)
    num_seeds = len(outcomes[AUTO])
    shown = [label for label in outcomes if label != TUNED_FEDAVG]  # which is one number, at the end
    figure = Figure(
        "accuracy",
        f"Accuracy on each client's own held-out rows, by round; mean over {num_seeds} seeds, bars ± s.e.",
        [
            by_round(outcomes, shown, "weighted_accuracy", "All clients, by test rows"),
            by_round(outcomes, shown, "worst10_accuracy", "Worst tenth of clients"),
        ],
    )
    return StudyResult(
        history(outcomes),
        table,
        [figure],
        _claims(outcomes, losing),
        asdict(problem) | {"num_seeds": num_seeds, "num_choosing": num_choosing},
        title=_title(problem),
        setting=f"{problem.setting}; {num_seeds} seeds, baselines tuned on {num_choosing}; {EQUAL_TRIALS}",
        runs=runs_of(outcomes),
        decided_by=OVER_SPLITS,
    )


def share_losing(group: Sequence[Outcome], alone: Sequence[Outcome], column: str) -> Tensor:
    """Share of clients, seed by seed, whose model is worse on their held-out rows than the one trained alone."""

    def of_seed(rows: Sequence[Row], others: Sequence[Row]) -> float:
        if not rows or not others:  # a run that diverged
            return math.nan
        pairs = [
            (float(row[column]), float(other["accuracy"]))
            for row, other in zip(rows, others, strict=True)
            if other["accuracy"] is not None
        ]
        return sum(own < other for own, other in pairs) / len(pairs)

    return torch.tensor(
        [of_seed(own.clients, other.clients) for own, other in zip(group, alone, strict=True)], dtype=torch.float64
    )


def _claims(outcomes: Outcomes, losing: Mapping[str, Tensor]) -> list[Claim]:
    """The lines that self-fl-auto is measured by: each against every other method, or against local training."""
    paired = f"paired over {len(outcomes[AUTO])} seeds"

    def above_all(text: str, metric: str, best: str) -> Claim:
        """Ours less each other method's that did not diverge."""
        gaps = {label: difference(outcomes[AUTO], group, metric) for label, group in outcomes.items() if label != AUTO}
        gaps = {label: gap for label, gap in gaps.items() if gap.mean == gap.mean}
        least = min(gaps, key=lambda label: gaps[label].mean)
        evidence = f"{gaps[least].signed} points against {least}, {best} ({paired})."
        return Claim(f"{TARGET}{text}", all_above_zero(list(gaps.values())), evidence)

    def above_local(text: str, metric: str) -> Claim:
        gap = difference(outcomes[AUTO], outcomes["local"], metric)
        return Claim(f"{TARGET}{text}", sign(gap), f"{gap.signed} points against local ({paired}).")

    shares = {
        label: Estimate.of(theirs - losing[AUTO], test_per_train=ratio_of((*outcomes[AUTO], *outcomes[label])))
        for label, theirs in losing.items()
        if label != AUTO and not theirs.isnan().any()
    }
    fewest = min(shares, key=lambda label: shares[label].mean)
    spent = {label: sum(o.num_gradients for o in outcomes[label]) / len(outcomes[label]) for label in (AUTO, "fedavg")}
    gradients = spent[AUTO] / spent["fedavg"]
    traffic = bytes_of_visit(algorithm(AUTO)) / bytes_of_visit(algorithm("fedavg"))
    return [
        above_all("accuracy above that of every other method.", "weighted_accuracy", "the best"),
        above_all("the worst tenth of clients above every other method's.", "worst10_accuracy", "the best there"),
        above_local("the worst tenth of clients above local training's.", "worst10_accuracy"),
        above_local("the top tenth by size better than alone.", "top10_accuracy"),
        Claim(
            f"{TARGET}a smaller share of clients is worse than alone than with any other method.",
            all_above_zero(list(shares.values())),
            f"{points(Estimate.of(losing[AUTO]))} %; the least of the others {points(Estimate.of(losing[fewest]))} % "
            f"({fewest}); {shares[fewest].signed} points fewer ({paired}).",
        ),
        Claim(
            f"{TARGET}at most {BUDGET_RATIO:g} times FedAvg's gradient evaluations and bytes a round.",
            "holds" if gradients <= BUDGET_RATIO and round(traffic, 2) <= BUDGET_RATIO else "does not hold",
            f"{gradients:.2f} times the gradients, {traffic:.2f} times the numbers sent: counted, not tested.",
        ),
    ]


@dataclass(frozen=True)
class _LayeredFederation(GaussianFederation):
    """A federation whose parameters lie in layers."""

    layers: tuple[Layer, ...] = ()

    @property
    def population(self) -> Population:
        """What is known of the clients, with the layers."""
        return replace(super().population, layers=self.layers)


def bytes_of_visit(
    method: Algorithm[object, object, object, object], num_params: int = 100_000, layers: tuple[Layer, ...] = ()
) -> int:
    """Bytes that go to a client and back in a round, for a model of so many parameters in float32."""
    one = torch.zeros(1)
    estimates = torch.zeros(1, num_params)
    seed, rows = torch.zeros((), dtype=torch.float64), torch.ones(1, dtype=torch.int64)
    federation = _LayeredFederation(
        estimates[0], estimates, estimates, one + 1, one[0] + 1, rows, seed, 0.1, layers=layers
    )
    engine = CohortEngine(method, federation, 1.0)
    found: list[int] = []
    engine.advance(engine.start(estimates[0]), 1, lambda report: found.append(visit_bytes(method, report)))
    return found[0]


def _title(problem: Problem) -> str:
    """A stand-in is named in every title."""
    return f"Nothing tuned, baselines tuned: {read_toml('studies.toml')['rows'][problem.data]}"


BEYOND = tuple(
    Study(
        f"auto-{name}",
        _title(problem),
        "not in the paper",
        f"{replace(problem, rounds=FIELDS[name].rounds or problem.rounds).setting}; {NUM_SEEDS} seeds",
        partial(_run, FIELDS[name]),
    )
    for name, problem in {
        "digits": DIGITS,
        "mnist": MNIST,
        "femnist": LETTERS,
        "cifar10": CIFAR10,
        "sent140": SENTIMENT,
        "wakeword": WAKEWORD,
    }.items()
)
