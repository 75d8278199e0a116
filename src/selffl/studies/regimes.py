"""Whether self-fl-auto learns how far clients differ, where it is known what differs: not in the paper.

A cell is what differs between clients, a model, how rows are spread over clients, and who takes part.  All of these
crossed are 64 cells of a data set with two models; a study has 20.  Every kind of difference is there with every model,
half of them with even sizes and half with lognormal ones; four come again with everybody taking part and with the other
sizes.  What is asked for is the worst cell, not what sizes or participation do by themselves: that, this fraction of
the cross cannot tell from what differs.

In each cell self-fl-auto is compared with three things.  Its own global model, with each client's class frequencies:
personal models that are worse than that should not have been.  The same method with its precision c by hand, the best
of a grid: the oracle, chosen on test rows, which nobody can have.  And baselines, of which those that have something to
choose do so on validation rows of the first seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from selffl.algorithms.grids import FINE_TUNE
from selffl.data.regimes import KINDS, PICTURES
from selffl.runs.evaluation import WITH_CLASSES
from selffl.runs.search import Search
from selffl.studies.arms import Arm, Outcomes
from selffl.studies.auto import AUTO
from selffl.studies.comparison import (
    NUM_SEEDS,
    TUNED_DITTO,
    as_personal,
    run_each,
    seeds_of,
    shorten_for_look,
    take_fine_tuned,
)
from selffl.studies.regime_problem import RegimeProblem
from selffl.studies.regime_results import (
    FEDAVG,
    FEDAVG_CLASSES,
    LOCAL,
    OWN_GLOBAL,
    TUNED_VIEWS,
    Cell,
    CellResult,
    at_precision,
    claims_of,
    gap_figure,
    long_rows,
    table_line,
)
from selffl.studies.result import OVER_SPLITS, Job, Study, StudyResult
from selffl.studies.tuning import EQUAL_TRIALS, PENALTIES, STEPS_AFTER, Tuner, chosen_value, note

SIZES = {  # of clients, by what differs between them
    "alike": "even",
    "shifted": "lognormal",
    "dirichlet-0.1": "even",
    "dirichlet-0.3": "lognormal",
    "dirichlet-1": "even",
    "few": "lognormal",
    "tiny": "even",
    "exchanged": "lognormal",
}
OTHER_SIZES = {"even": "lognormal", "lognormal": "even"}
WITH_EVERYBODY = ("alike", "shifted", "dirichlet-0.3", "exchanged")  # kinds that come again, with participation 1
FEWER_ROUNDS = 5  # with everybody the rounds are one in so many
NUM_QUICK = 2  # cells of a quick look

PRECISIONS = (1.0, 10.0, 100.0, 1e3, 1e4)  # c, for the oracle to choose from


@dataclass(frozen=True)
class Regimes:
    """One set of pictures and how it is trained on.

    Attributes:
        pictures: One of `selffl.data.regimes.PICTURES`.
        title: As a reader knows them.
        models: Names of models; the first is that of the cells with everybody.
        rounds: How many.
        participation: C of the cells without everybody.
        learning_rate: η.
        precisions: c that the oracle chooses from.
        penalties: λ that DITTO chooses from.
        fine_tune: Numbers of steps that fine-tuning chooses from.
    """

    pictures: str
    title: str
    models: tuple[str, ...]
    rounds: int
    participation: float
    learning_rate: float
    precisions: tuple[float, ...] = PRECISIONS
    penalties: tuple[float, ...] = PENALTIES
    fine_tune: tuple[int, ...] = STEPS_AFTER

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The design: every kind with every model, and four with everybody and the other sizes."""
        each = [
            Cell(kind, model, sizes, self.participation, self.rounds)
            for model in self.models
            for kind, sizes in SIZES.items()
        ]
        rounds = max(self.rounds // FEWER_ROUNDS, 1)
        everybody = [Cell(kind, self.models[0], OTHER_SIZES[SIZES[kind]], 1.0, rounds) for kind in WITH_EVERYBODY]
        return (*each, *everybody)

    def problem(self, cell: Cell) -> RegimeProblem:
        """What is trained in a cell."""
        return RegimeProblem(
            f"regimes-{self.pictures}",
            f"{self.title}, {KINDS[cell.kind].title}",
            data=self.pictures,
            model=cell.model,
            rounds=cell.rounds,
            participation=cell.participation,
            learning_rate=self.learning_rate,
            kind=cell.kind,
            sizes=cell.sizes,
        )

    @property
    def setting(self) -> str:
        """One sentence."""
        plan, first = PICTURES[self.pictures], self.problem(self.cells[0])
        return (
            f"{self.title} over {plan.num_clients} clients with {plan.mean_rows} rows on average, or {plan.num_tiny} "
            f"tiny ones; models {' and '.join(self.models)}, {self.rounds} rounds with C = {self.participation:g} or "
            f"{max(self.rounds // FEWER_ROUNDS, 1)} with everybody, η = {self.learning_rate:g}, "
            f"B = {first.batch_size}, L = {first.num_local_steps}"
        )


# ------------------------------------------------------------------------------------------------------------- training


def regimes_study(regimes: Regimes, job: Job) -> StudyResult:
    """Every cell, one after the other; within a cell, runs side by side."""
    seeds, cells = seeds_of(job), regimes.cells[: NUM_QUICK if job.quick else None]
    precisions = {at_precision(value): value for value in regimes.precisions}
    plain = [
        Arm(AUTO, AUTO, class_frequencies=True, num_evaluations=1),
        *(Arm(label, AUTO, {"prior_precision": value}, num_evaluations=1) for label, value in precisions.items()),
        Arm(LOCAL, "local", num_evaluations=1),
    ]
    done, total = 0, (len(regimes.penalties) + 1 + (len(plain) + 2) * len(seeds)) * len(cells)
    results = []
    for cell in cells:
        problem = shorten_for_look(regimes.problem(cell), job)
        tuner = Tuner(problem, job, total, done, class_frequencies=True)
        of_ditto = tuner.search("ditto", "penalty", regimes.penalties, seeds[:1])
        of_fedavg = {
            start: tuner.search("fedavg", FINE_TUNE, (0, *regimes.fine_tune), seeds[:1], start) for start in TUNED_VIEWS
        }
        steps = tuple(sorted({chosen_value(found) for found in of_fedavg.values()} - {0}))
        tuned = [
            Arm(FEDAVG, "fedavg", fine_tune=steps, class_frequencies=True, num_evaluations=1),
            Arm(TUNED_DITTO, "ditto", dict(of_ditto.chosen.setting), num_evaluations=1),
        ]
        arms = [*plain, *tuned]
        outcomes = run_each(problem, arms, seeds, job, tuner.num_done, tuner.num_planned)
        done, total = tuner.num_done + len(arms) * len(seeds), tuner.num_planned
        results.append(_cell_result(cell, outcomes, precisions, of_ditto, of_fedavg))
    job.progress(total, total, "done")
    return report(regimes, results)


def _cell_result(
    cell: Cell,
    outcomes: Outcomes,
    precisions: dict[str, float],
    of_ditto: Search,
    of_fedavg: Mapping[str, Search],
) -> CellResult:
    """A cell's runs, with the views that count as methods."""
    notes = {TUNED_DITTO: note("λ", [of_ditto])}
    outcomes[OWN_GLOBAL] = [as_personal(outcome, WITH_CLASSES) for outcome in outcomes[AUTO]]
    outcomes[FEDAVG_CLASSES] = [as_personal(outcome, WITH_CLASSES) for outcome in outcomes[FEDAVG]]
    for start, label in TUNED_VIEWS.items():
        steps = chosen_value(of_fedavg[start])
        outcomes[label] = [take_fine_tuned(outcome, steps, start) for outcome in outcomes[FEDAVG]]
        notes[label] = note("k", [of_fedavg[start]])
    return CellResult(cell, outcomes, precisions, notes)


# -------------------------------------------------------------------------------------------------------------- results


def report(regimes: Regimes, results: Sequence[CellResult]) -> StudyResult:
    """Tables, figure and verdicts."""
    num_seeds = len(results[0].outcomes[AUTO])
    return StudyResult(
        [row for number, found in enumerate(results, 1) for row in long_rows(number, found)],
        [table_line(number, found) for number, found in enumerate(results, 1)],
        [gap_figure(results)],
        claims_of(results),
        asdict(regimes) | {"num_seeds": num_seeds, "cells": [asdict(found.cell) for found in results]},
        setting=f"{regimes.setting}; {num_seeds} seeds, baselines tuned on the first; {EQUAL_TRIALS}; {len(results)} "
        "cells",
        decided_by=OVER_SPLITS,
    )


# -------------------------------------------------------------------------------------------------------------- studies

DESIGNS = (
    Regimes("digits", "Digits", ("softmax", "mlp"), 60, 0.25, 0.05),
    Regimes("letters", "OCR letters", ("softmax", "mlp"), 150, 0.1, 0.05),
    Regimes("mnist", "MNIST", ("softmax", "cnn"), 150, 0.1, 0.03),
    Regimes("cifar10", "CIFAR-10", ("cnn",), 100, 0.25, 0.03),
)


REGIMES = tuple(
    Study(
        f"regimes-{regimes.pictures}",
        f"Clients of which it is known what differs: {regimes.title}",
        "not in the paper",
        f"{regimes.setting}; {NUM_SEEDS} seeds",
        partial(regimes_study, regimes),
    )
    for regimes in DESIGNS
)
