"""Tables that others published, beside the same methods here: one description a table (`published_tables`).

What is compared is the published number with the mean over seeds, each of which draws clients, first weights and
minibatches anew; the published one counts as exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from selffl.runs.evaluation import WITH_NEIGHBOURS, prefix_of
from selffl.studies.arms import Arm, Outcome, Outcomes, ratio_of
from selffl.studies.comparison import at_best_round, by_round, history, run_each, runs_of
from selffl.studies.problems import Problem
from selffl.studies.published_problems import SHARE_ACCURACY
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
    all_above_zero,
    with_minus,
    within,
)

BOUND_POINTS = 1.0  # of accuracy, between ours and the published number
SHARE_WITHIN = 0.8  # of the rows with a published number that should be within the bound
AUTO = "self-fl-auto"
ROUNDS = {
    "last": "the last",
    "test": "the best on test rows, which is too good",
    "validation": "each client's best on its own validation rows",
}


@dataclass(frozen=True)
class Shown:
    """A row of a table: a view of what was trained."""

    label: str  # as the table has it
    published: tuple[str, ...] = ()  # as printed, one for each setting of the table; none: it is not in it
    fine_tune: int | None = None  # the last global model after so many steps on a client's own rows
    neighbours: int | None = None  # the last global model with so many of a client's nearest rows
    is_global: bool = False  # the global model, where that is not what everybody uses
    differs: str = ""  # what is known to be otherwise than in the published run

    @property
    def view(self) -> str:
        """The view as evaluations call it."""
        if self.neighbours is not None:
            return WITH_NEIGHBOURS
        if self.fine_tune is not None:
            return f"global+{self.fine_tune}"
        return "global" if self.is_global else "personal"


@dataclass(frozen=True)
class Trained:
    """A method of a table, and the rows that it is shown in."""

    algorithm: str  # as the registry has it; each is there once
    shown: tuple[Shown, ...]
    options: Mapping[str, Any] = field(default_factory=dict)  # of the method
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the problem, where the method needs others
    most_seeds: int | None = None  # where it takes too long for all of them, unless a number of seeds is asked for


@dataclass(frozen=True)
class PublishedTable:
    """A table of a publication, and how it is made here."""

    id: str
    title: str
    source: str  # where the numbers are printed
    problems: Mapping[str, Problem]  # by setting, in the order of the numbers
    methods: tuple[Trained, ...]
    chosen: Literal["last", "test", "validation"] = "last"  # which round is reported of personal models
    metric: str = "accuracy"
    validation_fraction: float = 0.0
    num_seeds: int = 3
    quick_share: int = 5  # part of the rounds that a quick look takes, one in so many

    def arm(self, trained: Trained, rounds: int) -> Arm:
        """How a method is run and looked at."""
        return Arm(
            trained.algorithm,
            trained.algorithm,
            trained.options,
            tuple(sorted({row.fine_tune for row in trained.shown if row.fine_tune is not None})),
            validation_fraction=self.validation_fraction,
            num_evaluations=20 if self.chosen == "last" else rounds,
            neighbours=next((row.neighbours for row in trained.shown if row.neighbours is not None), None),
            evaluate_validation=self.chosen == "validation",
            settings=trained.settings,
        )

    def score(self, outcome: Outcome, view: str) -> float:
        """Percent, as the table reports it; NaN for a run that diverged."""
        if outcome.summary["status"] == "diverged":
            return math.nan
        if view == "personal" and self.chosen == "test":
            return at_best_round(outcome).score(f"weighted_{self.metric}")
        if view == "personal" and self.chosen == "validation":
            rows = [row for row in outcome.clients if row[f"in_best_round_{self.metric}"] is not None]
            return 100 * sum(float(row[f"in_best_round_{self.metric}"]) for row in rows) / len(rows)
        return outcome.score(
            f"global_{self.metric}" if view == "global" else f"{prefix_of(view)}weighted_{self.metric}"
        )

    def setting(self, num_seeds: int) -> str:
        """What is run how often, and where it was published."""
        settings = ", ".join(self.problems) if len(self.problems) > 1 else ""
        first = next(iter(self.problems.values()))
        return (
            f"{first.setting}{f' ({settings})' if settings else ''}; round reported of personal models: "
            f"{ROUNDS[self.chosen]}; {num_seeds} seed{'s' * (num_seeds > 1)}. Published: {self.source}"
        )

    @property
    def study(self) -> Study:
        """The table as something that runs."""
        run = partial(published_study, self)
        return Study(self.id, self.title, "not in the paper", self.setting(self.num_seeds), run)


@dataclass(frozen=True)
class Cell:
    """A row of a table in one setting."""

    setting: str
    row: Shown
    algorithm: str
    scores: Tensor  # percent, one for each seed
    published: str | None  # as printed
    test_per_train: float  # test rows per training row

    @property
    def gap(self) -> Estimate:
        """Ours less the published number, ready to be tested."""
        assert self.published is not None
        printed = float(self.published.split()[0])  # without the ± that may follow
        return Estimate.of(self.scores - printed, test_per_train=self.test_per_train)


def published_study(table: PublishedTable, job: Job) -> StudyResult:
    """Every method in every setting with every seed, beside what was published."""
    seeds = range(job.num_seeds or (2 if job.quick else table.num_seeds))
    methods = [replace(each, most_seeds=None) if job.num_seeds else each for each in table.methods]
    total = len(table.problems) * sum(len(seeds[: trained.most_seeds]) for trained in methods)
    found: dict[str, Outcomes] = {}
    done = 0
    for setting, whole in table.problems.items():
        problem = whole.shorten(table.quick_share) if job.quick else whole
        found[setting] = {}
        for most in dict.fromkeys(trained.most_seeds for trained in methods):
            arms = [table.arm(each, problem.rounds) for each in methods if each.most_seeds == most]
            found[setting] |= run_each(problem, arms, seeds[:most], job, done, total)
            done += len(arms) * len(seeds[:most])
    return report(table, found)


def report(table: PublishedTable, found: Mapping[str, Outcomes]) -> StudyResult:
    """The table, a picture by round for each setting, and the verdicts."""
    cells = [
        Cell(
            setting,
            row,
            trained.algorithm,
            torch.tensor([table.score(each, row.view) for each in outcomes[trained.algorithm]], dtype=torch.float64),
            row.published[place] if row.published else None,
            # Rows that all clients are tested on are there once.
            ratio_of(outcomes[trained.algorithm])
            / (max(len(outcomes[trained.algorithm][0].clients), 1) if table.metric == SHARE_ACCURACY else 1),
        )
        for place, (setting, outcomes) in enumerate(found.items())
        for trained in table.methods
        for row in trained.shown
    ]
    is_one = len(found) == 1
    titled = {
        label if is_one else f"{setting}: {label}": group
        for setting, outcomes in found.items()
        for label, group in outcomes.items()
    }
    charts = [
        by_round(outcomes, list(outcomes), f"weighted_{table.metric}", setting) for setting, outcomes in found.items()
    ]
    return StudyResult(
        history(titled),
        [table_line(table, cell) for cell in cells],
        [Figure("accuracy", "Accuracy of the personal models by round; mean over seeds, bars ± s.e.", charts)],
        [*claims_within(cells), *claims_above(cells)],
        asdict(table),
        runs=runs_of(titled),
        setting=table.setting(max(len(cell.scores) for cell in cells)),
        decided_by=f"{OVER_SPLITS} Published numbers count as exact.",
    )


def table_line(table: PublishedTable, cell: Cell) -> dict[str, str]:
    """A row as it is shown: published, ours, and the difference."""
    ours = Estimate.of(cell.scores)
    gap = cell.gap.signed.replace(" ± nan", "") if cell.published is not None else "–"
    is_last = table.chosen == "last" or cell.row.view != "personal"
    return {
        **({"setting": cell.setting} if len(table.problems) > 1 else {}),
        "method": cell.row.label,
        "published": cell.published or "–",
        "ours": "diverged" if math.isnan(ours.mean) else f"{ours.mean:.2f} ± {ours.error:.2f}".replace(" ± nan", ""),
        "ours − published": "–" if math.isnan(ours.mean) else with_minus(gap),
        "seeds": str(len(cell.scores)),
        "round": "last" if is_last else table.chosen,
        "known to differ": cell.row.differs or "–",
    }


def claims_within(cells: Sequence[Cell]) -> list[Claim]:
    """Whether enough rows are within the bound of their published numbers."""
    compared = [cell for cell in cells if cell.published is not None]
    if not compared:
        return []
    verdicts = [within(cell.gap, BOUND_POINTS) for cell in compared]
    needed = math.ceil(SHARE_WITHIN * len(compared))
    near = sum(abs(cell.gap.mean) <= BOUND_POINTS for cell in compared)
    farthest = max(compared, key=lambda cell: math.inf if math.isnan(cell.gap.mean) else abs(cell.gap.mean))
    far = "diverged" if math.isnan(farthest.gap.mean) else f"{farthest.gap.signed} points".replace(" ± nan", "")
    return [
        Claim(
            f"{TARGET}within a point of the published number in at least {needed} of {len(compared)} rows with one.",
            at_least(needed, verdicts),
            f"The mean is so in {near}; by the rule {verdicts.count('holds')} are within, "
            f"{verdicts.count('inconclusive')} inconclusive. The farthest is {farthest.row.label}"
            f"{f' ({farthest.setting})' if len({cell.setting for cell in cells}) > 1 else ''}: {far}.",
        )
    ]


def claims_above(cells: Sequence[Cell]) -> list[Claim]:
    """Whether self-fl-auto, of which nothing is tuned, is above every other row run here, setting by setting."""
    claims = []
    for setting in dict.fromkeys(cell.setting for cell in cells):
        here = [cell for cell in cells if cell.setting == setting]
        own = next((cell for cell in here if cell.algorithm == AUTO), None)
        if own is None:
            continue
        gaps = {}
        for cell in here:
            count = min(len(cell.scores), len(own.scores))  # the first seeds, which both have
            gap = own.scores[:count] - cell.scores[:count]
            if cell is not own and not cell.scores.isnan().any():
                gaps[cell.row.label] = Estimate.of(gap, test_per_train=own.test_per_train)
        if not gaps:
            continue
        best = min(gaps, key=lambda label: gaps[label].mean)
        where = f" ({setting})" if len({cell.setting for cell in cells}) > 1 else ""
        over = f"{gaps[best].count} seed{'s' * (gaps[best].count > 1)}"
        claims.append(
            Claim(
                f"{TARGET}accuracy of {AUTO} above that of every other row run here{where}.",
                all_above_zero(list(gaps.values())),
                f"{gaps[best].signed} points against {best}, the best (paired over {over}).".replace(" ± nan", ""),
            )
        )
    return claims


def at_least(needed: int, verdicts: Iterable[Verdict]) -> Verdict:
    """Decide a statement that holds in at least so many cases: those that are inconclusive may be either."""
    found = list(verdicts)
    if found.count("holds") >= needed:
        return "holds"
    return "does not hold" if found.count("holds") + found.count("inconclusive") < needed else "inconclusive"
