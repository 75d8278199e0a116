"""Baselines that are tuned within a study: the library's own search, by runs of the study.

Settings are tried on validation rows, a fifth of each client's training rows, with one or more seeds; what is chosen is
then trained on all training rows and tested like everybody else.  Every baseline may try equally many settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from selffl.algorithms import Ditto
from selffl.algorithms.grids import FINE_TUNE
from selffl.algorithms.grids import STEPS_AFTER as GRID_AFTER
from selffl.runs.evaluation import prefix_of
from selffl.runs.search import Search, Setting, search_grid
from selffl.runs.tune import MAX_TRIALS, VALIDATION_SHARE, is_allowed
from selffl.studies.arms import Arm, Outcome, run_arms
from selffl.studies.problems import Problem
from selffl.studies.result import Job

PENALTIES: tuple[float, ...] = Ditto.grid["penalty"]  # lambda of DITTO
STEPS_AFTER: tuple[int, ...] = GRID_AFTER[FINE_TUNE][1:]  # of fine-tuning, beside none
EQUAL_TRIALS = f"baselines may try {MAX_TRIALS} settings each"


@dataclass
class Tuner:
    """Tries values of a baseline's option on a problem's validation rows, each once.

    Attributes:
        problem: What is trained.
        job: How.
        num_planned: Runs of the whole study, as far as they are known; more come when a grid is widened.
        num_done: Those that were made.
        class_frequencies: Whether global models are looked at with each client's class frequencies, too.
    """

    problem: Problem
    job: Job
    num_planned: int = 0
    num_done: int = 0
    class_frequencies: bool = False
    _arms: dict[tuple[str, str, Any], Arm] = field(default_factory=dict)  # by method, option and value
    _found: dict[tuple[str, int], Outcome] = field(default_factory=dict)  # by label and seed

    def search(
        self, algorithm: str, option: str, values: Sequence[Any], seeds: Sequence[int], start: str = "global"
    ) -> Search:
        """The best value by accuracy over these seeds; the grid is widened, but for a quick look.

        ``start`` is the view that steps of fine-tuning start from.
        """
        self.try_values(algorithm, option, values, seeds)

        def score(settings: list[Setting]) -> list[float]:
            tried = [setting[option] for setting in settings]
            self.num_planned += self.try_values(algorithm, option, tried, seeds)
            return [sum(self._score(algorithm, option, value, seed, start) for seed in seeds) for value in tried]

        def can_be_tried(setting: Setting) -> bool:
            return is_allowed(setting, lambda options: self.problem.method(algorithm, **options), {})

        return search_grid({option: values}, score, can_be_tried, len(values) if self.job.quick else MAX_TRIALS)

    def try_values(self, algorithm: str, option: str, values: Sequence[Any], seeds: Sequence[int]) -> int:
        """Make the runs that are missing, side by side; how many they were."""
        self._name_arms(algorithm, option, [v for v in values if (algorithm, option, v) not in self._arms])
        arms = {arm.label: arm for arm in (self._arms[algorithm, option, value] for value in values)}
        work = [(arm, seed) for seed in seeds for arm in arms.values() if (arm.label, seed) not in self._found]
        if work:
            total = max(self.num_planned, self.num_done + len(work))
            for label, group in run_arms(self.problem, work, self.job, self.num_done, total).items():
                self._found |= {(label, outcome.seed): outcome for outcome in group}
            self.num_done += len(work)
        return len(work)

    def _name_arms(self, algorithm: str, option: str, values: Sequence[Any]) -> None:
        """An arm for each value; numbers of steps that follow training share one."""

        def arm(label: str, options: Mapping[str, Any]) -> Arm:
            return Arm(label, algorithm, options, (), "validation", VALIDATION_SHARE, num_evaluations=1)

        if option != FINE_TUNE:
            self._arms |= {
                (algorithm, option, value): arm(f"{algorithm} {value:g}", {option: value}) for value in values
            }
            return
        more = "" if 0 in values else f", k = {', '.join(map(str, values))}"
        steps = tuple(value for value in values if value)
        shared = replace(
            arm(f"{algorithm} choosing{more}", {}), fine_tune=steps, class_frequencies=self.class_frequencies
        )
        self._arms |= {(algorithm, option, value): shared for value in values}

    def _score(self, algorithm: str, option: str, value: Any, seed: int, start: str) -> float:
        outcome = self._found[self._arms[algorithm, option, value].label, seed]
        return outcome.score(score_after(start, value) if option == FINE_TUNE else "weighted_accuracy")


def score_after(start: str, steps: int) -> str:
    """The name in a summary of the accuracy after so many steps of fine-tuning from a view."""
    if steps == 0 and start == "global":
        return "global_accuracy"
    return f"{prefix_of(view_after(start, steps))}weighted_accuracy"


def view_after(start: str, steps: int) -> str:
    """The view after so many steps of fine-tuning from another."""
    return f"{start}+{steps}" if steps else start


def chosen_value(found: Search) -> Any:
    """The value chosen of the one option that was searched."""
    return next(iter(found.chosen.setting.values()))


def note(sign: str, searches: Sequence[Search]) -> str:
    """What was chosen, for a table: λ = 0.1 (5 tried); of several seeds, one after the other.

    Where a value is the last that was tried although there are more, it says so.
    """
    values = ", ".join(f"{chosen_value(found):g}" for found in searches)
    tried = sorted({len(found.trials) for found in searches})
    count = f"{tried[0]}" if len(tried) == 1 else f"{tried[0]} to {tried[-1]}"
    at_edge = "; at the edge" if any(found.open_ends for found in searches) else ""
    return f"{sign} = {values} ({count} tried{at_edge})"
