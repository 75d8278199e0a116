"""Grouped rows split, standardised, fitted by every model, and measured: the numbers of the study beside mixed models.

The rows come with R's packages (`selffl.data.multilevel`), or are simulated counties whose variance between groups is
known.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from selffl.data.multilevel import R_TABLES, GroupedRows, RTable
from selffl.state.files import write_json
from selffl.studies.arms import source_digest
from selffl.studies.grouped_models import (
    INTERCEPTS,
    MEANS,
    OURS,
    PER_GROUP,
    POOLED,
    SLOPES,
    Fit,
    fit_estimator,
    fit_lme4,
    fit_means,
    fit_mixed_model,
    fit_per_group,
    fit_pooled,
    is_binary,
)

TEST_SHARE = 0.3  # of the rows of each known group
NEW_SHARE = 0.2  # of the groups that are left out of training
COUNTS = (0, 1, 5, 10)  # k, rows that a new group brings; at most half of what it has
SIZES = ("small", "medium", "large")  # thirds of the groups, by their rows
LONGER_ROUNDS = 100
LONGER = f"{OURS}, {LONGER_ROUNDS} rounds"

NUM_COUNTIES = 85  # of the simulated rows, as of radon's
MEDIAN_ROWS = 5
SIZE_SPREAD = 1.0  # standard deviation of the logarithm of a county's rows
EFFECTS = (0.4, 0.2)  # of the two simulated features

Array = npt.NDArray[Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Simulation:
    """Counties whose intercepts and slopes all vary by one known variance; the outcome has variance 1."""

    variance: float  # σ₀², of every coefficient between groups
    num_groups: int = NUM_COUNTIES  # how many counties

    def load(self, seed: int) -> GroupedRows:
        """Draw counties and their rows."""
        rng = np.random.default_rng([seed, round(1e6 * self.variance)])
        sizes = np.maximum(np.rint(rng.lognormal(np.log(MEDIAN_ROWS), SIZE_SPREAD, self.num_groups)), 2).astype(int)
        owner = np.repeat(np.arange(self.num_groups), sizes)
        features = rng.normal(size=(len(owner), len(EFFECTS)))
        design = np.column_stack([np.ones(len(owner)), features])
        shared = np.array([0.0, *EFFECTS])
        offsets = rng.normal(0.0, self.variance**0.5, (self.num_groups, len(shared)))
        noise_variance = 1.0 - np.square(shared).sum() - len(shared) * self.variance
        outcome = (design * (shared + offsets[owner])).sum(1) + rng.normal(0.0, noise_variance**0.5, len(owner))
        return GroupedRows(features, outcome, np.array([f"county {number:02d}" for number in owner]))


@dataclass(frozen=True)
class Problem:
    """Rows, and what varies between groups in the larger mixed model."""

    name: str  # in tables
    source: RTable | Simulation  # the table of an R package, or a simulation
    slopes: tuple[int, ...]  # positions of the features whose slopes vary in the larger mixed model, as in textbooks
    counts: tuple[int, ...] = COUNTS  # rows that new groups bring; none where no groups are left out
    is_run_longer: bool = False  # whether the estimator is also fitted with more rounds than its default

    def load(self, seed: int) -> GroupedRows:
        """Rows; those of a simulation are drawn afresh for each seed."""
        return self.source.load(seed) if isinstance(self.source, Simulation) else self.source.load()


SLOPES_THAT_VARY = {"contraception": 2}  # of the other data sets the first feature's
RUN_LONGER = ("radon", "sleepstudy")
REAL = tuple(
    Problem(name, table, (SLOPES_THAT_VARY.get(name, 0),), is_run_longer=name in RUN_LONGER)
    for name, table in R_TABLES.items()
)
SIMULATED = tuple(
    Problem(f"simulated, σ₀² = {variance:g}", Simulation(variance), (0, 1), ()) for variance in (0.0, 0.01, 0.06)
)


@dataclass(frozen=True)
class Settings:
    """How models are fitted.

    Attributes:
        rounds: Of selffl's estimators; none for their default.
        longer_rounds: Of a second fit of theirs to known groups, where a problem asks for it; none for no such fit.
        with_lme4: Whether R's lme4 takes part.  It fits the same models as statsmodels, and faster: where it does,
            statsmodels fits known groups alone.
    """

    rounds: int | None = None
    longer_rounds: int | None = LONGER_ROUNDS
    with_lme4: bool = True


# --------------------------------------------------------------------------------------------------------------- splits


def split_known_groups(group: Array, seed: int) -> tuple[Array, Array]:
    """Choose training and test rows within each group, as positions; every group keeps a training row."""
    rng = np.random.default_rng([seed, 1])
    train, test = [], []
    for name in np.unique(group):
        own = rng.permutation(np.flatnonzero(group == name))
        num_test = min(round(TEST_SHARE * len(own)), len(own) - 1)
        test.append(own[:num_test])
        train.append(own[num_test:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def split_new_groups(group: Array, seed: int, counts: Sequence[int]) -> tuple[dict[int, Array], Array]:
    """Leave whole groups out; training rows by the number of rows that these bring, and the test rows of all cases.

    A new group brings at most half of its rows, of a larger number the same and more; the rows that it never brings
    are the test rows.
    """
    rng = np.random.default_rng([seed, 2])
    names = np.unique(group)
    late = rng.choice(names, max(round(NEW_SHARE * len(names)), 1), replace=False)
    members = np.flatnonzero(~np.isin(group, late))
    brought: dict[int, list[Array]] = {count: [members] for count in counts}
    test = []
    for name in np.sort(late):
        own = rng.permutation(np.flatnonzero(group == name))
        most = min(max(counts), len(own) // 2)
        for count in counts:
            brought[count].append(own[: min(count, most)])
        test.append(own[most:])
    return {count: np.sort(np.concatenate(parts)) for count, parts in brought.items()}, np.sort(np.concatenate(test))


def size_of_group(group: Array) -> dict[str, str]:
    """Sort the groups into thirds by their rows: small, medium and large; none is either where all have as many."""
    names, sizes = np.unique(group, return_counts=True)
    if len(np.unique(sizes)) == 1:
        return dict.fromkeys(names, "all alike")
    thirds = np.array_split(names[np.argsort(sizes, kind="stable")], len(SIZES))
    return {name: size for size, third in zip(SIZES, thirds, strict=True) for name in third}


# --------------------------------------------------------------------------------------------------------- measurements


def measure_once(problem: Problem, seed: int, settings: Settings, folder: Path | None) -> list[Row]:
    """Measure a seed, or read what the same code has measured before and left in the folder."""
    if folder is None:
        return measure(problem, seed, settings)
    asked = json.dumps([asdict(problem), seed, asdict(settings), source_digest()], sort_keys=True)
    plain = "".join(sign if sign.isalnum() else "-" for sign in problem.name)
    path = folder / f"{plain}-{seed}-{hashlib.sha256(asked.encode()).hexdigest()[:12]}.json"
    if path.is_file():
        found: list[Row] = json.loads(path.read_text(encoding="utf-8"))
        return found
    rows = measure(problem, seed, settings)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, rows)
    return rows


def measure(problem: Problem, seed: int, settings: Settings) -> list[Row]:
    """Fit every model to every split of a seed; one row for each."""
    rows = problem.load(seed)
    sizes = size_of_group(rows.group)
    train, test = split_known_groups(rows.group, seed)
    about = {"data": problem.name, "seed": seed}
    found = [
        about | {"part": "known groups", "count": None, "model": label} | line
        for label, line in _lines(problem, rows, train, test, sizes, settings, is_known=True).items()
    ]
    if problem.counts:
        brought, test = split_new_groups(rows.group, seed, problem.counts)
        for count, train in brought.items():
            lines = _lines(problem, rows, train, test, sizes, settings, is_known=False)
            found += [
                about | {"part": "new groups", "count": count, "model": key} | line for key, line in lines.items()
            ]
    return found


def _lines(
    problem: Problem,
    rows: GroupedRows,
    train: Array,
    test: Array,
    sizes: Mapping[str, str],
    settings: Settings,
    *,
    is_known: bool,
) -> dict[str, Row]:
    """Errors of every model on one split."""
    scaled, unit = standardise(rows, train)
    fits = fit_models(scaled.at(train), scaled.at(test), problem, settings, is_known=is_known)
    asked = scaled.at(test)
    size = np.array([sizes[name] for name in asked.group])
    lines = {}
    for label, fit in fits.items():
        loss = losses(asked, fit.prediction)
        error = {
            name: error_of(loss[chosen], unit, is_binary(rows)) if chosen.any() else None
            for name, chosen in {"error": size != "", **{third: size == third for third in SIZES}}.items()
        }
        is_right = (fit.prediction > 0.5) == (asked.outcome == 1)
        lines[label] = {
            **error,
            "accuracy": float(is_right.mean()) if is_binary(rows) else None,
            "cpu_seconds": fit.cpu_seconds,
            "variances": " ".join(f"{value:.6g}" for value in fit.variances),
            "note": fit.note,
        }
    return lines


def standardise(rows: GroupedRows, train: Array) -> tuple[GroupedRows, float]:
    """Bring features, and an outcome that is a number, to mean 0 and standard deviation 1 over the training rows.

    Also returns the outcome's unit: one standard deviation, or 1 for classes.
    """
    mean, scale = rows.features[train].mean(0), rows.features[train].std(0)
    features = (rows.features - mean) / np.where(scale > 0, scale, 1.0)
    if is_binary(rows):
        return GroupedRows(features, rows.outcome, rows.group), 1.0
    unit = float(rows.outcome[train].std())
    return GroupedRows(features, (rows.outcome - rows.outcome[train].mean()) / unit, rows.group), unit


def fit_models(
    train: GroupedRows, test: GroupedRows, problem: Problem, settings: Settings, *, is_known: bool
) -> dict[str, Fit]:
    """Fit every model to the same rows; where the test rows are of known groups, also those that are slow."""
    fits = {OURS: fit_estimator(train, test, settings.rounds)}
    if is_known and problem.is_run_longer and settings.longer_rounds is not None:
        fits[LONGER] = fit_estimator(train, test, settings.longer_rounds)
    if is_known or not settings.with_lme4:
        fits[INTERCEPTS] = fit_mixed_model(train, test)
        fits[SLOPES] = fit_mixed_model(train, test, problem.slopes)
    if settings.with_lme4:
        fits |= fit_lme4(train, test, problem.slopes)
    return fits | {
        POOLED: fit_pooled(train, test),
        PER_GROUP: fit_per_group(train, test),
        MEANS: fit_means(train, test),
    }


def losses(rows: GroupedRows, prediction: Array) -> Array:
    """Squared error of each row; of a binary outcome the negative logarithm of the probability of what was seen."""
    if not is_binary(rows):
        squared: Array = np.square(prediction - rows.outcome)
        return squared
    tiny = np.finfo(np.float64).tiny
    logged: Array = -np.log(np.maximum(np.where(rows.outcome == 1, prediction, 1.0 - prediction), tiny))
    return logged


def error_of(loss: Array, unit: float, binary: bool) -> float:
    """Root mean squared error in the outcome's own unit, or mean log loss."""
    return float(loss.mean()) if binary else unit * float(loss.mean()) ** 0.5
