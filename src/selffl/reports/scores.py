"""Methods over seeds: the table, the tests between methods and the curves; no drawing, no words, no files.

Scores are in the units that a reader sees (accuracy in percent).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from selffl.algorithms import ALGORITHMS
from selffl.maths.significance import LEVEL, holm_p_values
from selffl.reports.collect import Group, Method, RunData
from selffl.reports.schema import Curve
from selffl.runs.folder import Row
from selffl.studies.result import Estimate
from selffl.training.metrics import PERCENT

SIGNIFICANT_DIGITS = 5  # significant
PARTS = {
    "weighted": "all clients",
    "worst10": "worst 10 %",
    "top10": "top 10 % by size",
    "global": "global model",
}

SECOND_METRICS = {"pooled_auc": "AUC", "weighted_accuracy": "accuracy"}

ASSUMED_TEST_PER_TRAIN = 1 / 9  # where a run has not recorded its rows: a tenth of them to test on, as is usual here

Verdict = Literal["first", "better", "worse", "inconclusive", "above", "below", "equal", "unknown"]


def scale_of(metric: str) -> float:
    """The factor from the records' unit to the reader's."""
    return 100.0 if metric in PERCENT else 1.0


def round_digits(value: float | None, digits: int = SIGNIFICANT_DIGITS) -> float | int | None:
    """A number to so many significant digits; what is no number is None, and whole numbers have no point."""
    if value is None or not math.isfinite(value):
        return None
    if value == 0:
        return 0
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def evenly_chosen(number: int, most: int) -> list[int]:
    """All of so many places, or an even choice of the most that can be shown, the first and the last among them."""
    places: list[int] = np.linspace(0, number - 1, min(number, most)).round().astype(int).tolist()
    return list(dict.fromkeys(places))


def round_all(values: Iterable[float | None], digits: int = SIGNIFICANT_DIGITS) -> list[float | int | None]:
    """Each of them."""
    return [round_digits(value, digits) for value in values]


def to_unit(value: float | None, scale: float) -> float | int | None:
    """A score in the reader's unit."""
    return None if value is None else round_digits(scale * value)


@dataclass(frozen=True)
class Line:
    """One method in the table; its p-value is that of the corrected resampled t test."""

    method: str  # its label
    num_seeds: int  # runs with a score
    num_diverged: int  # runs without one, because they diverged
    scores: dict[str, Estimate]  # by part of `PARTS`, over seeds; parts without a number are left out
    beside: dict[str, Estimate]  # the same of what stands beside balanced accuracy, by `SECOND_METRICS`
    difference: Estimate | None  # method minus first, paired over the seeds that both have
    p_value: float | None  # of no difference, after Holm's correction over the methods; none with fewer than two seeds
    verdict: Verdict  # at the 5 % level; with one seed only above, below or equal, which is no test
    gradients: float | None  # per client and round it took part in


def over_seeds(values: Sequence[float]) -> Estimate:
    """Mean and standard error."""
    return Estimate.of(torch.tensor(values, dtype=torch.float64))


def lines(group: Group) -> list[Line]:
    """The table of methods; the first is compared with all others."""
    scale, first = scale_of(group.metric), group.methods[0]
    gaps = [
        None if method is first else difference(group, method, first, f"weighted_{group.metric}")
        for method in group.methods
    ]
    rows = []
    for method, gap, p in zip(group.methods, gaps, p_values(gaps), strict=True):
        scores = {}
        for part in PARTS:
            if part == "global" and not method.has_global_model:
                continue
            values = [score for run in method.runs if (score := run.score(f"{part}_{group.metric}")) is not None]
            if values:
                scores[part] = over_seeds([scale * value for value in values])
        rows.append(
            Line(
                method.label,
                scores["weighted"].count if "weighted" in scores else 0,
                sum(run.status == "diverged" for run in method.runs),
                scores,
                _beside(group, method),
                gap,
                p,
                "first" if method is first else verdict(gap, p, group.is_higher_better),
                _gradients(method),
            )
        )
    return rows


def _beside(group: Group, method: Method) -> dict[str, Estimate]:
    """What stands beside balanced accuracy; nothing where another metric leads."""
    estimates = {}
    for name in SECOND_METRICS if group.metric == "balanced_accuracy" else ():
        scale = scale_of(name.removeprefix("weighted_"))
        values = [scale * score for run in method.runs if (score := run.score(name)) is not None]
        if values:
            estimates[name] = over_seeds(values)
    return estimates


def difference(group: Group, method: Method, other: Method, name: str) -> Estimate | None:
    """Difference of a score, method minus other, over the seeds that both have."""
    theirs = {run.config.seed: run.score(name) for run in other.runs}
    gaps = [
        scale_of(group.metric) * (mine - theirs[run.config.seed])  # type: ignore[operator]
        for run in method.runs
        if (mine := run.score(name)) is not None and theirs.get(run.config.seed) is not None
    ]
    if not gaps:
        return None
    return Estimate.of(torch.tensor(gaps, dtype=torch.float64), test_per_train=ratio_of(group))


def ratio_of(group: Group) -> float:
    """What the corrected test takes for n_test/n_train."""
    ratio = group.recorded_ratio
    return ASSUMED_TEST_PER_TRAIN if ratio is None else ratio


def has_one_split(group: Group) -> bool:
    """Whether all seeds have the same rows to train and to test on: only training differs between them."""
    prints = {run.config.fingerprint for run in group.runs}
    return len(group.seeds) > 1 and len(prints) == 1 and prints != {""}


def p_values(gaps: Sequence[Estimate | None]) -> list[float | None]:
    """Two-sided, after Holm's correction over all that can be tested; none where there is no test."""
    corrected = holm_p_values([math.nan if gap is None else gap.p_value for gap in gaps])
    return [None if math.isnan(p) else p for p in corrected]


def verdict(gap: Estimate | None, p: float | None, is_higher_better: bool) -> Verdict:
    """Whether a method is better than the one it is compared with, from the difference and its p-value."""
    if gap is None or math.isnan(gap.mean):
        return "unknown"
    is_ahead = (gap.mean > 0) == is_higher_better
    if p is None:
        return "equal" if gap.mean == 0 else "above" if gap.mean > 0 else "below"
    if p >= LEVEL:
        return "inconclusive"
    return "better" if is_ahead else "worse"


def _gradients(method: Method) -> float | None:
    per_run = []
    for run in method.runs:
        taken = sum(int(row["clients"]) for row in run.records.history)
        spent = run.records.history[-1].get("gradient_evaluations") if run.records.history else None
        if taken and spent is not None:
            per_run.append(spent / taken)
    return sum(per_run) / len(per_run) if per_run else None


def by_round(group: Group, part: str) -> list[Curve | None]:
    """A score of each method at the rounds that all its runs have evaluated: mean and standard error over seeds."""
    name, scale = f"{part}_{group.metric}", scale_of(group.metric)
    scores: list[Curve | None] = []
    for method in group.methods:
        if part == "global" and not method.has_global_model:
            scores.append(None)
            continue
        begun = [  # a run that is just beginning takes no rounds from the others
            (run, curve)
            for run in method.runs
            if (curve := {r["round"]: scale * r[name] for r in run.records.history if r.get(name) is not None})
        ]
        curves = [curve for _, curve in begun]
        spent = [{row["round"]: row for row in run.records.history} for run, _ in begun]
        rounds = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
        estimates = [over_seeds([curve[number] for curve in curves]) for number in rounds]
        scores.append(
            {
                "x": rounds,
                "y": round_all(e.mean for e in estimates),
                "error": round_all(e.error for e in estimates) if len(curves) > 1 else None,
                "gradients": [_mean_spent(spent, number, "gradient_evaluations") for number in rounds],
                "bytes": [_mean_spent(spent, number, "bytes_sent") for number in rounds],
                "seconds": [_mean_spent(spent, number, "seconds") for number in rounds],
                "single": [round_all(curve[number] for number in rounds) for curve in curves],
            }
            if rounds
            else None
        )
    return scores


def _mean_spent(spent: Sequence[Mapping[int, Row]], number: int, column: str) -> float | int | None:
    """What runs had spent by a round, on average; none where one of them has not recorded it."""
    values = [rows[number].get(column) for rows in spent]
    known = [float(value) for value in values if value is not None]
    return round_digits(sum(known) / len(known)) if known and len(known) == len(values) else None


def runs_of_seed(group: Group, seed: int) -> list[RunData | None]:
    """The run of every method with that seed."""
    return [next((run for run in method.runs if run.config.seed == seed), None) for method in group.methods]


def alone(group: Group) -> int | None:
    """Which method is training alone, if it is there."""
    return next((i for i, method in enumerate(group.methods) if not method.runs[0].config.is_federated), None)


def find_shared_method(group: Group) -> int | None:
    """Which method is the first that gives all clients one model, if there is one."""
    names = [method.runs[0].config.algorithm for method in group.methods]
    known = [ALGORITHMS[name]().personalises if name in ALGORITHMS else None for name in names]
    return known.index("nothing") if "nothing" in known else None
