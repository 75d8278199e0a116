"""`selffl.tune`: choose a method's options on validation rows, then train with what was chosen.

Nobody's rows are pooled.  Validation rows are a share of each client's training rows; each client evaluates its own
model on its own, and the score of a setting is what clients report, weighted by their rows.  Test rows play no part in
the choice.  With the setting chosen, training begins anew on all training rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from torch import nn

from selffl.algorithms import DEFAULT_ALGORITHM
from selffl.algorithms.grids import FINE_TUNE, Grid
from selffl.algorithms.options import check_integer
from selffl.data.federation import Federation
from selffl.engines.ranks import num_ranks
from selffl.errors import ConfigError, DataError, DivergedError, check_known, pluralise
from selffl.runs.evaluation import leading_metric
from selffl.runs.methods import Method, named_method
from selffl.runs.recipe import SETTINGS, STUDY_SETTINGS, check_settings
from selffl.runs.run import Run, refuse_if_taken
from selffl.runs.search import Search, Setting, check_grid, describe, search_grid
from selffl.runs.train import train
from selffl.state.files import write_json
from selffl.training.metrics import HIGHER_IS_BETTER, name_of

TUNING = "tuning.json"  # beside the records of the run that follows
VALIDATION_SHARE = 0.2  # of each client's training rows
MAX_TRIALS = 8  # settings of one method; three more than the longest grid, since steps grow fourfold each time
OF_LAST_RUN = (
    "evaluate_every",
    "checkpoint_every",
    "on_round",
    "tracker",
    "gain",
    "keep_rows",
    "evaluate_train",
    "evaluate_validation",
)

OnTrial = Callable[[Setting, float | None], None]  # told the score, none where training diverged


@dataclass(frozen=True)
class Tuning:
    """What was tried, what was chosen, and the run that was trained with it.

    Attributes:
        algorithm: Name of the method.
        metric: What was chosen by, over all validation rows.
        search: All settings with their scores, where higher is better.
        num_runs: How often a model was trained to choose; steps of fine-tuning are tried on the same run.
        num_rows: Validation rows that the choice rests on.
        num_clients: Clients that have any.
        run: Trained on all training rows with the setting chosen.
    """

    algorithm: str
    metric: str
    search: Search
    num_runs: int
    num_rows: int
    num_clients: int
    run: Run

    @property
    def chosen(self) -> Setting:
        """The best setting: a value for each option of the grid."""
        return dict(self.search.chosen.setting)

    @property
    def is_at_edge(self) -> bool:
        """Whether a value chosen is the last that was tried, although there are more beyond it."""
        return bool(self.search.open_ends)

    @property
    def table(self) -> list[dict[str, Any]]:
        """A row for each setting in the order of trying: its values, its score, whether it was widened to, chosen."""
        sign, best = _sign(self.metric, self.run), self.search.chosen
        return [
            {
                **trial.setting,
                f"validation_{self.metric}": sign * trial.score if math.isfinite(trial.score) else None,
                "is_widened": number >= self.search.num_first,
                "is_chosen": trial is best,
            }
            for number, trial in enumerate(self.search.trials)
        ]

    @property
    def summary(self) -> dict[str, Any]:
        """All of it but the run, for a file."""
        return {
            "algorithm": self.algorithm,
            "metric": self.metric,
            "chosen": self.chosen,
            "open_ends": dict(self.search.open_ends),
            "closed_ends": dict(self.search.closed_ends),
            "num_trials": len(self.search.trials),
            "num_first": self.search.num_first,
            "max_trials": self.search.max_trials,
            "num_runs": self.num_runs,
            "validation_rows": self.num_rows,
            "validation_clients": self.num_clients,
            "trials": self.table,
        }

    def __str__(self) -> str:
        """What was chosen, of how much, and whether it lies at an edge, in sentences."""
        tried, widened = len(self.search.trials), len(self.search.trials) - self.search.num_first
        more = f", {widened} of them beyond the grid" if widened else ""
        return (
            f"{self.algorithm} with {describe(self.chosen)}: the best {name_of(self.metric)} on "
            f"{pluralise(self.num_rows, 'validation row')} of {pluralise(self.num_clients, 'client')}, of "
            f"{pluralise(tried, 'setting')} tried{more} (at most {self.search.max_trials}; "
            f"{pluralise(self.num_runs, 'run')})." + "".join(f" {end}" for end in self.search.ends)
        )


def tune(
    model: nn.Module | str,
    federation: Federation,
    algorithm: str | Method = DEFAULT_ALGORITHM,
    grid: Mapping[str, Sequence[Any]] | None = None,
    *,
    validation_fraction: float = VALIDATION_SHARE,
    max_trials: int = MAX_TRIALS,
    metric: str | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    on_trial: OnTrial | None = None,
    **training: Any,
) -> Tuning:
    """Choose a method's options on validation rows, then train with them on all training rows.

    Every setting of the grid is tried.  While the best lies at an edge of a number's values, the next value beyond it
    is tried as well.

    Args:
        model: As in `selffl.train`.
        federation: Whose rows.  Where it has validation rows these are taken, and the last run does not train on them
            either; else a share of each client's training rows is set aside while settings are tried.
        algorithm: The method, whose other options stay as they are.
        grid: Values by name: of options of the method, of settings such as ``learning_rate``, or of ``fine_tune``,
            local steps that follow training, with 0 for none.  None: the method's own (`Algorithm.grid`).
        validation_fraction: Share of each client's training rows to choose on.
        max_trials: As many settings as may be tried, those of the grid among them; the same for every method makes a
            comparison fair.
        metric: What is chosen by; none: what runs are told by first, accuracy where rows have classes.
        seed: Of the rows set aside, and of every run as in `selffl.train`.
        out: Folder for the last run; what was tried stands there in ``tuning.json``.
        on_trial: Called with each setting and its score, which is none where training diverged.
        training: Further settings of `selffl.train`; records, trackers and the like are for the last run.

    Returns:
        What was tried, what was chosen, and the run.

    Raises:
        ConfigError: a grid that cannot work, or that is larger than ``max_trials``.
        DataError: no client has rows to set aside.
        DivergedError: training diverged with every setting.

    Examples:
        >>> import selffl
        >>> from selffl.data import load
        >>> fed = load("digits", num_clients=8, seed=0)
        >>> found = selffl.tune("softmax", fed, "ditto", {"penalty": (0.1, 1.0)}, max_trials=3, rounds=2)
        >>> len(found.table), found.run.config.options["penalty"] == found.chosen["penalty"]
        (3, True)
    """
    if not isinstance(federation, Federation):
        raise ConfigError(f"federation is a {type(federation).__name__}; expected a Federation, as selffl.train takes.")
    name, method = named_method(algorithm)
    for key, instead in (("evaluate_on", "the last run is tested on test rows"), (FINE_TUNE, "give it in the grid")):
        if key in training:
            raise ConfigError(f"{key} is given to tune; expected none. Leave it out: {instead}.")
    if out is not None:
        refuse_if_taken(Path(out))
    aside = federation
    if federation.validation is None:
        if training.get("evaluate_validation"):
            raise ConfigError(
                "evaluate_validation is True, and the last run trains on all training rows; expected a federation with "
                "validation rows of its own. Make it with a validation_fraction, or leave this out."
            )
        aside = federation.with_validation(validation_fraction, seed=seed)

    def run(chosen: Method, settings: Setting, *, is_trial: bool, **more: Any) -> Run:
        rows = aside if is_trial else federation
        return train(model, rows, chosen, seed=seed, **training | settings | more)

    last = {key: training.pop(key) for key in OF_LAST_RUN if key in training}
    return tune_runs(
        name,
        lambda options: replace(method, **options),  # type: ignore[type-var]
        run,
        aside,
        grid,
        beside={name: value for name, value in training.items() if name in SETTINGS},
        metric=metric,
        max_trials=max_trials,
        out=out,
        on_trial=on_trial,
        **last,
    )


def tune_runs(
    name: str,
    make: Callable[[Setting], Method],
    run: Callable[..., Run],
    aside: Federation,
    grid: Mapping[str, Sequence[Any]] | None = None,
    *,
    beside: Setting | None = None,
    metric: str | None = None,
    max_trials: int = MAX_TRIALS,
    out: str | Path | None = None,
    on_trial: OnTrial | None = None,
    **last: Any,
) -> Tuning:
    """`tune` for callers that make methods and runs otherwise.

    Args:
        name: Of the method.
        make: The method with some options changed.
        run: Trains a method with settings: ``run(method, settings, is_trial=..., **more)``; ``more`` are keywords of
            `selffl.train`.
        aside: The rows of trials, with validation rows.
        grid: As in `tune`, and so are ``metric``, ``max_trials``, ``out`` and ``on_trial``.
        beside: Settings of every run that are not in the grid, to check it with.
        last: Further keywords of `selffl.train` for the last run.
    """
    if num_ranks() > 1:
        raise ConfigError(
            f"there are {num_ranks()} processes (WORLD_SIZE), and settings are tried by one; expected one process. "
            "Tune without torchrun, then train with what was chosen over several."
        )
    if grid is None:
        grid = default_grid(name, make({}))
    check_grid(grid)
    _check_values(grid, make, beside or {})
    sizes = _validation_sizes(aside)
    scorer = _Scorer(make, run, grid, metric, on_trial)
    found = search_grid(grid, scorer, lambda setting: is_allowed(setting, make, beside or {}), max_trials)
    if found.chosen.score == -math.inf:
        raise DivergedError(
            f"training diverged with all of {len(found.trials)} settings of the grid; expected one that does not. "
            "Lower the learning rate, or give another grid."
        )
    options, settings, steps = _divide_setting(found.chosen.setting, make({}))
    more: dict[str, Any] = {FINE_TUNE: (steps,)} if steps else {}
    final = run(make(options), settings, is_trial=False, out=out, **more, **last)
    tuning = Tuning(
        name, scorer.metric or "", found, scorer.num_runs, sum(sizes), sum(size > 0 for size in sizes), final
    )
    if out is not None:
        write_json(Path(out) / TUNING, tuning.summary)
    return tuning


def default_grid(name: str, method: Method) -> Grid:
    """The method's own grid; ``name`` is what it is recorded by."""
    found = method.grid
    if found is None:
        raise ConfigError(
            f"{name} has no grid of its own; expected one, such as grid={{'learning_rate': (0.01, 0.1)}}."
        )
    if not found:
        raise ConfigError(
            f"{name} has nothing to tune; expected a method that has, or a grid such as "
            "{'learning_rate': (0.01, 0.1)}. Train it as it is."
        )
    return found


def _validation_sizes(federation: Federation) -> list[int]:
    rows = federation.validation
    sizes = [] if rows is None else rows.num_examples.tolist()
    if not any(sizes):
        raise DataError(
            "no client has validation rows to choose on; expected some. Raise validation_fraction, or give clients "
            "more rows."
        )
    return sizes


def _check_values(grid: Mapping[str, Sequence[Any]], make: Callable[[Setting], Method], beside: Setting) -> None:
    """Refuse what is no option or setting, and values that it does not take, before anything is trained."""
    method = make({})
    options = [field.name for field in fields(method)]  # type: ignore[arg-type]
    for name, values in grid.items():
        check_known("name in the grid", name, (*options, *STUDY_SETTINGS, FINE_TUNE))
        work = make({name: values[0]}).local_work() if name in method.steps_options else None
        if work is not None and work[1] is not None:
            raise ConfigError(
                f"{name} is in the grid, and num_local_epochs takes its place; expected one of them. Leave "
                "num_local_epochs out of the method, or tune that."
            )
    for chosen in product(*grid.values()):
        _check_setting(dict(zip(grid, chosen, strict=True)), make, beside)


def _check_setting(setting: Setting, make: Callable[[Setting], Method], beside: Setting) -> None:
    options, settings, steps = _divide_setting(setting, make({}))
    check_integer(FINE_TUNE, steps, 0)
    check_settings({**beside, **settings})
    make(options)


def is_allowed(setting: Setting, make: Callable[[Setting], Method], beside: Setting) -> bool:
    """Whether a method and its training take a setting, ``beside`` others; ``make`` changes options of the method."""
    try:
        _check_setting(setting, make, beside)
    except ConfigError:
        return False
    return True


def _divide_setting(setting: Setting, method: Method) -> tuple[Setting, Setting, Any]:
    """A setting's options of the method, settings of training, and steps of fine-tuning."""
    names = [field.name for field in fields(method)]  # type: ignore[arg-type]
    options = {name: value for name, value in setting.items() if name in names}
    settings = {name: value for name, value in setting.items() if name not in names and name != FINE_TUNE}
    return options, settings, setting.get(FINE_TUNE, 0)


def _sign(metric: str, run: Run) -> float:
    own = run.config.own_metrics.get(metric)
    return 1.0 if (HIGHER_IS_BETTER[metric] if own is None else own) else -1.0


class _Scorer:
    """Trains each setting and scores it on validation rows, higher is better; steps of fine-tuning share a run."""

    def __init__(
        self,
        make: Callable[[Setting], Method],
        run: Callable[..., Run],
        grid: Mapping[str, Sequence[Any]],
        metric: str | None,
        on_trial: OnTrial | None,
    ) -> None:
        self.metric, self.num_runs = metric, 0
        self._make, self._run, self._grid, self._on_trial = make, run, grid, on_trial
        self._runs: dict[str, Run | None] = {}  # those that later settings may start from

    def __call__(self, settings: list[Setting]) -> list[float]:
        return [self._score(setting) for setting in settings]

    def _score(self, setting: Setting) -> float:
        options, training, steps = _divide_setting(setting, self._make({}))
        run = self._train_setting(options, training)
        score = -math.inf
        if run is not None:
            score = self._measure_setting(run, steps)
        if self._on_trial is not None:
            self._on_trial(
                setting, None if run is None or not math.isfinite(score) else _sign(str(self.metric), run) * score
            )
        return score

    def _train_setting(self, options: Setting, training: Setting) -> Run | None:
        """None where it diverged, or where a value beyond the grid is one that the model does not allow."""
        key = repr(sorted((options | training).items()))
        if key in self._runs:
            return self._runs[key]
        self.num_runs += 1
        try:
            run = self._run(
                self._make(options), training, is_trial=True, evaluate_on="validation", evaluate_every=0,
                checkpoint_every=0,
            )  # fmt: skip
        except DivergedError:
            run = None
        except ConfigError:
            if all(value in self._grid[name] for name, value in (options | training).items()):
                raise
            run = None
        if FINE_TUNE in self._grid:
            self._runs[key] = run
        return run

    def _measure_setting(self, run: Run, steps: int) -> float:
        metric = self.metric = self.metric or leading_metric([run.summary]) or ""
        check_known("metric", metric, run.config.metrics)
        try:
            evaluation = run.evaluate(fine_tune=(steps,) if steps else ())
        except DivergedError:
            return -math.inf
        return _sign(metric, run) * evaluation.weighted(metric, f"personal+{steps}" if steps else "personal")
