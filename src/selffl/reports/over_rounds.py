"""What goes on over rounds: variances, weights and steps, of all clients together and of each; no drawing, no words."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np

from selffl.reports.collect import Group, RunData
from selffl.reports.schema import Bands, Inside, SeedTable, Trajectory
from selffl.reports.scores import evenly_chosen, round_all, round_digits, runs_of_seed
from selffl.runs.folder import INTERVAL, REPORTED

# What a page can hold: beyond these it shows fewer rounds.
MAX_POINTS = 15_000  # client-rounds
MAX_ROUNDS = 120  # on a curve
STEP_BINS = (1, 2, 5, 10, 20, 40, 80, 160, 320, 640)  # lower ends, as in the study of figure 10


def has_variances(run: RunData) -> bool:
    """Whether the method estimates them."""
    return has_reports(run) or any(row.get("inter_variance") is not None for row in run.records.history)


def has_reports(run: RunData) -> bool:
    """Whether clients have reported what a page draws, by client; what a method records beside it, none draws."""
    return any(row.get(name) is not None for row in run.records.participation for name in REPORTED)


def inside(group: Group, number: int) -> Inside | None:
    """Variances, weights and steps of a method over rounds, all its seeds together; none where it has none of them."""
    runs = [run for run in group.methods[number].runs if has_variances(run)]
    if not runs:
        return None
    all_rounds = sorted({row["round"] for run in runs for row in run.records.history})
    rounds = [all_rounds[place] for place in evenly_chosen(len(all_rounds), MAX_ROUNDS)]
    by_round = [{row["round"]: row for row in run.records.history} for run in runs]
    curves = {
        column: [_mean_of(known.get(number, {}).get(column) for known in by_round) for number in rounds]
        for column in ("inter_variance", "intra_variance")
    }
    closed = [run.records.summary for run in runs if run.records.summary.get("closing_multiple") is not None]
    ends = [_mean_of(run.records.summary.get(column) for run in runs) for column in INTERVAL]
    steps, weights, wanted = _by_round(runs, "num_local_steps"), _by_round(runs, "weight"), []
    for run in runs:
        known = (row.get("wanted_steps") for row in run.records.participation)
        wanted += [float(value) for value in known if value is not None]
    counts = [0] * len(STEP_BINS)
    for value in wanted:  # a client of whom nothing is uncertain wants infinitely many
        counts[bisect_right(STEP_BINS, max(value, 1.0)) - 1] += 1
    options = runs[0].config.options
    cohort = [row["clients"] for run in runs for row in run.records.history]
    return {
        "method": number,
        "rounds": rounds,
        "totalRounds": len(all_rounds),
        "inter": curves["inter_variance"],
        "interval": None if None in ends else ends,
        "closing": _mean_of(summary.get("inter_variance") for summary in closed),
        "intra": curves["intra_variance"],
        "steps": _bands(steps, rounds),
        "weight": _bands(weights, rounds),
        "equal": round_digits(1 / (sum(cohort) / len(cohort))) if cohort and sum(cohort) else None,
        "bins": list(STEP_BINS),
        "counts": counts if wanted else None,
        "most": options.get("max_local_steps") if options.get("num_local_epochs") is None else None,
    }


def _mean_of(values: Iterable[float | None]) -> float | int | None:
    known = [value for value in values if value is not None]
    return round_digits(sum(known) / len(known)) if known else None


def _by_round(runs: Sequence[RunData], column: str) -> dict[int, list[float]]:
    values: dict[int, list[float]] = {}
    for run in runs:
        for row in run.records.participation:
            if row.get(column) is not None:
                values.setdefault(row["round"], []).append(float(row[column]))
    return values


def _bands(values: dict[int, list[float]], rounds: Sequence[int]) -> Bands | None:
    """The tenth, the middle and the ninth tenth of clients in each round."""
    kept = [number for number in rounds if number in values]
    if not kept:
        return None
    low, middle, high = zip(*(np.quantile(values[number], [0.1, 0.5, 0.9]) for number in kept), strict=True)
    return {"x": kept, "low": round_all(low, 4), "middle": round_all(middle, 4), "high": round_all(high, 4)}


def trajectories(group: Group, seed_tables: Sequence[SeedTable]) -> list[Trajectory]:
    """The rounds that clients took part in: of the first method and seed, and of more while the page can hold them."""
    paths: list[Trajectory] = []
    left = MAX_POINTS
    for table in seed_tables:
        position = {client: i for i, client in enumerate(table["clients"])}
        for number, run in enumerate(runs_of_seed(group, table["seed"])):
            if run is None or not has_reports(run):
                continue
            rows = [row for row in run.records.participation if str(row["client"]) in position]
            if paths and len(rows) > left:
                continue
            every = math.ceil(len(rows) / MAX_POINTS)  # of each client's rounds
            seen: dict[str, int] = {}
            kept = []
            for row in rows:
                count = seen[row["client"]] = seen.get(row["client"], -1) + 1
                if count % max(every, 1) == 0:
                    kept.append(row)
            left -= len(kept)
            paths.append(
                {
                    "seed": table["seed"],
                    "method": number,
                    "every": max(every, 1),
                    "client": [position[str(row["client"])] for row in kept],
                    "round": [row["round"] for row in kept],
                    "steps": [row.get("num_local_steps") for row in kept],
                    "wanted": round_all((row.get("wanted_steps") for row in kept), 3),
                    "variance": round_all((row.get("intra_variance") for row in kept), 3),
                    "weight": round_all((row.get("weight") for row in kept), 3),
                }
            )
    return paths
