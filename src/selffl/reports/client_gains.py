"""What clients gain by joining, predicted and realised: no drawing, no words, no files.

Gains are positive where a client is better off.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from selffl.maths.significance import LEVEL
from selffl.reports.collect import Group
from selffl.reports.schema import Bins, Losing, SeedTable
from selffl.reports.scores import alone, over_seeds, round_all, runs_of_seed, scale_of, to_unit
from selffl.runs.folder import Row
from selffl.runs.gain import gain_rows, losers, rank_correlation
from selffl.studies.result import Estimate

ALONE = "training alone"  # what a gain is over, if that is known
FEWEST_TEST_ROWS = 10  # below, one row more or less is ten points and more: such a gain is shown, and not counted
MAX_NAMED_LOSERS = 10  # clients named that lose by joining
MOST_BINS, FEWEST_IN_BIN = 6, 5  # of clients, on the picture of predicted and realised gains


def gains(group: Group, seed_table: SeedTable, method: int) -> tuple[list[float | None], str]:
    """What each client gains by joining, and over what.

    Over its own training alone, as the run itself has measured it or as a run of ``local`` with that seed has; else
    over the shared model.
    """
    table = seed_table["methods"][method]
    base_of, name = alone(group), ALONE
    base = None if table is None else table.get("alone")
    other = seed_table["methods"][base_of] if base_of is not None and base_of != method else None
    if base is None and other is not None:
        base = other["personal"]
    elif base is None and table is not None:
        base, name = table.get("global"), "the global model"
    if table is None or base is None:
        return [None] * len(seed_table["clients"]), name
    sign = 1.0 if group.is_higher_better else -1.0
    return [
        None if mine is None or theirs is None else sign * (mine - theirs)
        for mine, theirs in zip(table["personal"], base, strict=True)
    ], name


def is_counted(num_test: int | None) -> bool:
    """Whether a client has rows enough to test on for its gain to count."""
    return num_test is not None and num_test >= FEWEST_TEST_ROWS


def select_counted(rows: Sequence[Row]) -> list[Row]:
    """Clients whose gains count; all of them where none has rows enough."""
    return [row for row in rows if is_counted(row.get("num_test"))] or list(rows)


def join_alone(group: Group, seed: int, method: int) -> list[Row]:
    """A method's clients with what each had alone, as `selffl.runs.gain` takes them; none where that is not known."""
    runs, base, metric = runs_of_seed(group, seed), alone(group), group.client_metric
    run = runs[method]
    rows = [] if run is None else run.records.clients
    if any(row.get("realised_gain") is not None for row in rows):
        return rows
    other = runs[base] if base is not None and base != method else None
    theirs = {} if other is None else {str(row["client"]): row.get(metric) for row in other.records.clients}
    sign = 1.0 if group.is_higher_better else -1.0
    rows_with_base = []
    for row in rows:
        mine, own = row.get(metric), theirs.get(str(row["client"]))
        gain = None if mine is None or own is None else sign * (mine - own)
        rows_with_base.append(row | {f"alone_{metric}": own, "realised_gain": gain})
    return rows_with_base if theirs else []


def joining(group: Group, seed: int, method: int) -> list[Row]:
    """Who gains and who loses, worst first, as `selffl.Run.gains` has it."""
    has_global = group.methods[method].has_global_model
    return gain_rows(join_alone(group, seed, method), group.client_metric, has_global=has_global)


@dataclass(frozen=True)
class Joining:
    """What joining does to the clients of one method, over seeds."""

    method: str  # its label
    losing: Estimate  # share of clients that lose, in percent
    beyond: Estimate | None  # share that loses beyond chance, in percent; none where that is not tested
    gain: Estimate  # mean over clients, in the reader's unit
    correlation: Estimate | None  # Spearman's, between predicted and realised gains; none where nothing is predicted


def by_joining(group: Group) -> list[Joining]:
    """What joining does to the clients of each method that can be compared with training alone."""
    summaries = []
    for number, method in enumerate(group.methods):
        shares, beyond, means, correlations = [], [], [], []
        for seed in group.seeds:
            rows = select_counted([row for row in joining(group, seed, number) if row["realised_gain"] is not None])
            if not rows:
                continue
            down = [row for row in rows if row["realised_gain"] < 0]
            shares.append(100 * len(down) / len(rows))
            # Without pairs some may be beyond chance, some not: then nothing is said.
            if all(row["is_within_chance"] is not None for row in down):
                beyond.append(100 * sum(not row["is_within_chance"] for row in down) / len(rows))
            means.append(scale_of(group.client_metric) * sum(row["realised_gain"] for row in rows) / len(rows))
            related = rank_correlation([row["predicted_gain"] for row in rows], [row["realised_gain"] for row in rows])
            correlations += [related[0]] if related is not None else []
        if shares:
            summaries.append(
                Joining(
                    method.label,
                    over_seeds(shares),
                    over_seeds(beyond) if len(beyond) == len(shares) else None,
                    over_seeds(means),
                    over_seeds(correlations) if correlations else None,
                )
            )
    return summaries


def prediction(group: Group, method: int) -> tuple[float, float, int] | None:
    """Rank correlation of predicted and realised gains in the first seed, its p-value, and over how many clients."""
    rows = select_counted(joining(group, group.seeds[0], method))  # whose numbers are not rounded as the page's are
    return rank_correlation(*([row[name] for row in rows] for name in ("predicted_gain", "realised_gain")))


def predicts(group: Group, method: int) -> bool:
    """Whether what a method predicts orders what its clients gain, at the 5 % level."""
    found = prediction(group, method)
    return found is not None and found[0] > 0 and found[1] < LEVEL


def losing(group: Group, seed: int, method: int) -> Losing | None:
    """How many lose, of how many; who loses most, and why.  None where training alone is not known."""
    rows = [row for row in joining(group, seed, method) if row["realised_gain"] is not None]
    if not rows:
        return None
    down = losers(rows)
    return {
        "lose": len(down),
        "of": len(rows),
        "most": [
            {
                "client": str(row["client"]),
                "gain": to_unit(row["realised_gain"], scale_of(group.client_metric)),
                "train": row["num_train"],
                "test": row["num_test"],
                "why": row["why"],
            }
            for row in down[:MAX_NAMED_LOSERS]
        ],
    }


def calibration(predicted: Sequence[float | None], realised: Sequence[float | None]) -> Bins | None:
    """Clients in bins of about equal counts by what was predicted: where a bin lies, and its mean realised gain.

    Clients of the same prediction are never parted.  None with too few clients.
    """
    pairs = sorted(
        (a, b) for a, b in zip(predicted, realised, strict=True) if a is not None and b is not None and a > 0
    )
    number = min(len(pairs) // FEWEST_IN_BIN, MOST_BINS)
    if number < 1:
        return None
    edges = sorted({pairs[len(pairs) * k // number][0] for k in range(1, number)})
    bins: dict[int, list[tuple[float, float]]] = {}
    for pair in pairs:
        bins.setdefault(bisect_right(edges, pair[0]), []).append(pair)
    means = [over_seeds([gain for _, gain in own]) for own in bins.values()]
    return {
        "x": round_all(math.exp(sum(math.log(x) for x, _ in own) / len(own)) for own in bins.values()),
        "y": round_all(each.mean for each in means),
        "error": round_all(each.error for each in means),
        "count": [len(own) for own in bins.values()],
    }
