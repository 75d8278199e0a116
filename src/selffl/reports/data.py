"""Runs turned into the plain tables that a report shows: no drawing, no words, no files.

Scores are in the units that a reader sees (accuracy in percent), gains positive where a client is better off.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from scipy.stats import spearmanr, t

from selffl.algorithms import WITHOUT_GLOBAL
from selffl.reports.collect import Group, Method, RunData
from selffl.runs.folder import Row
from selffl.runs.gain import gain_rows, losers
from selffl.studies.result import Estimate

# What a page can hold: beyond these it shows fewer seeds, an even choice of clients, or fewer rounds, and says so.
MOST_CLIENTS = 2000  # of one seed
MOST_ROWS = 16_000  # clients of all methods and seeds shown
MOST_POINTS = 15_000  # client-rounds
MOST_ROUNDS = 120  # on a curve
DIGITS = 5  # significant
MOST_LOSERS = 10  # clients named that lose by joining
MOST_BINS, FEWEST_IN_BIN = 6, 5  # of clients, on the picture of predicted and realised gains

ALONE = "training alone"  # what a gain is over, if that is known
PARTS = {
    "weighted": "all clients",
    "worst10": "worst 10 %",
    "top10": "top 10 % by size",
    "global": "global model",
}
STEP_BINS = (1, 2, 5, 10, 20, 40, 80, 160, 320, 640)  # lower ends, as in the study of figure 10

Verdict = Literal["first", "better", "worse", "no clear difference", "above", "below", "equal", "unknown"]


def scale_of(metric: str) -> float:
    """From the records' unit to the reader's."""
    return 100.0 if metric == "accuracy" else 1.0


def rounded(value: float | None, digits: int = DIGITS) -> float | int | None:
    """To so many significant digits; what is no number is None, and whole numbers have no point."""
    if value is None or not math.isfinite(value):
        return None
    if value == 0:
        return 0
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _all_rounded(values: Iterable[float | None], digits: int = DIGITS) -> list[float | int | None]:
    return [rounded(value, digits) for value in values]


# ------------------------------------------------------------------------------------------------------- over seeds


@dataclass(frozen=True)
class Line:
    """One method in the table.

    Attributes:
        method: Its label.
        num_seeds: Runs with a score.
        num_diverged: Runs without one, because they left the finite numbers.
        scores: By part of `PARTS`, mean and standard error over seeds; parts without a number are left out.
        difference: Method minus first, paired over the seeds that both have.
        p_value: Of no difference, by Student's t; none with fewer than two seeds.
        verdict: At the 5 % level; with one seed only above, below or equal, which is no test.
        gradients: Per client and round it took part in.
    """

    method: str
    num_seeds: int
    num_diverged: int
    scores: dict[str, Estimate]
    difference: Estimate | None
    p_value: float | None
    verdict: Verdict
    gradients: float | None


def over_seeds(values: Sequence[float]) -> Estimate:
    """Mean and standard error."""
    return Estimate.of(torch.tensor(values, dtype=torch.float64))


def lines(group: Group) -> list[Line]:
    """The table of methods; the first is held against all others."""
    scale, first = scale_of(group.metric), group.methods[0]
    found = []
    for method in group.methods:
        scores = {}
        for part in PARTS:
            if part == "global" and method.algorithm.startswith(WITHOUT_GLOBAL):
                continue
            values = [score for run in method.runs if (score := run.score(f"{part}_{group.metric}")) is not None]
            if values:
                scores[part] = over_seeds([scale * value for value in values])
        gap = None if method is first else difference(group, method, first, f"weighted_{group.metric}")
        found.append(
            Line(
                method.label,
                scores["weighted"].count if "weighted" in scores else 0,
                sum(run.status == "diverged" for run in method.runs),
                scores,
                gap,
                p_value(gap),
                "first" if method is first else verdict(gap, group.is_higher_better),
                _gradients(method),
            )
        )
    return found


def difference(group: Group, method: Method, other: Method, name: str) -> Estimate | None:
    """Of a score, method minus other, over the seeds that both have."""
    theirs = {run.config.seed: run.score(name) for run in other.runs}
    gaps = [
        scale_of(group.metric) * (mine - theirs[run.config.seed])  # type: ignore[operator]
        for run in method.runs
        if (mine := run.score(name)) is not None and theirs.get(run.config.seed) is not None
    ]
    return over_seeds(gaps) if gaps else None


def p_value(gap: Estimate | None) -> float | None:
    """Two-sided, of a mean of zero."""
    if gap is None or gap.count < 2:
        return None
    if gap.error == 0:
        return 1.0 if gap.mean == 0 else 0.0
    return float(2 * t.sf(abs(gap.mean) / gap.error, gap.count - 1))


def verdict(gap: Estimate | None, is_higher_better: bool) -> Verdict:
    """Whether a method is better than the one it is held against."""
    if gap is None or math.isnan(gap.mean):
        return "unknown"
    is_ahead = (gap.mean > 0) == is_higher_better
    if gap.count < 2:
        return "equal" if gap.mean == 0 else "above" if gap.mean > 0 else "below"
    if not gap.is_clear:
        return "no clear difference"
    return "better" if is_ahead else "worse"


def _gradients(method: Method) -> float | None:
    per_run = []
    for run in method.runs:
        taken = sum(int(row["clients"]) for row in run.records.history)
        spent = run.records.history[-1].get("gradient_evaluations") if run.records.history else None
        if taken and spent is not None:
            per_run.append(spent / taken)
    return sum(per_run) / len(per_run) if per_run else None


def by_round(group: Group, part: str) -> list[dict[str, Any] | None]:
    """A score of each method at the rounds that all its runs have evaluated: mean and standard error over seeds."""
    name, scale = f"{part}_{group.metric}", scale_of(group.metric)
    found: list[dict[str, Any] | None] = []
    for method in group.methods:
        if part == "global" and method.algorithm.startswith(WITHOUT_GLOBAL):
            found.append(None)
            continue
        curves = [
            {row["round"]: scale * row[name] for row in run.records.history if row.get(name) is not None}
            for run in method.runs
        ]
        curves = [curve for curve in curves if curve]  # a run that is just beginning takes no rounds from the others
        rounds = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
        estimates = [over_seeds([curve[number] for curve in curves]) for number in rounds]
        found.append(
            {
                "x": rounds,
                "y": _all_rounded(e.mean for e in estimates),
                "error": _all_rounded(e.error for e in estimates) if len(curves) > 1 else None,
            }
            if rounds
            else None
        )
    return found


# ---------------------------------------------------------------------------------------------------------- clients


def runs_of_seed(group: Group, seed: int) -> list[RunData | None]:
    """The run of every method with that seed."""
    return [next((run for run in method.runs if run.config.seed == seed), None) for method in group.methods]


def shown_seeds(group: Group) -> list[int]:
    """Seeds whose clients a page can hold: the first, and more while there is room; only those with clients."""
    found: list[int] = []
    total = 0
    for seed in group.seeds:
        runs = [run for run in runs_of_seed(group, seed) if run is not None and run.records.clients]
        if not runs:
            continue
        total += sum(min(len(run.records.clients), MOST_CLIENTS) for run in runs)
        if found and total > MOST_ROWS:
            break
        found.append(seed)
    return found


def alone(group: Group) -> int | None:
    """Which method is training alone, if it is there."""
    return next((i for i, method in enumerate(group.methods) if method.algorithm == "local"), None)


def chosen_clients(runs: Sequence[RunData | None]) -> tuple[list[str], int]:
    """Ids of the clients to show, largest first, and how many there are; beyond the most, an even choice by size."""
    sizes: dict[str, int] = {}
    for run in runs:
        for row in run.records.clients if run is not None else ():
            sizes.setdefault(str(row["client"]), int(row.get("num_train") or 0))
    ids = sorted(sizes, key=lambda client: -sizes[client])
    if len(ids) <= MOST_CLIENTS:
        return ids, len(ids)
    places = np.unique(np.linspace(0, len(ids) - 1, MOST_CLIENTS).round().astype(int))
    return [ids[place] for place in places], len(ids)


COLUMNS = {  # of a client with one method: what the page calls it, and the column it is in
    "rounds": "rounds",
    "steps": "num_local_steps",
    "variance": "intra_variance",
    "predicted": "predicted_gain",
}


def clients_of_seed(group: Group, seed: int) -> dict[str, Any]:
    """Every client of a seed: sizes, classes, cluster, and what each method did for it."""
    runs = runs_of_seed(group, seed)
    ids, total = chosen_clients(runs)
    scale, metric = scale_of(group.metric), group.metric
    sizes: dict[str, Row] = {}
    methods: list[dict[str, Any] | None] = []
    for run, method in zip(runs, group.methods, strict=True):
        if run is None or not run.records.clients:
            methods.append(None)
            continue
        rows = {str(row["client"]): row for row in run.records.clients}
        for client, row in rows.items():
            sizes.setdefault(client, row)
        found: dict[str, Any] = {"personal": [_scaled(rows.get(c, {}).get(metric), scale) for c in ids]}
        if not method.algorithm.startswith(WITHOUT_GLOBAL):
            found["global"] = [_scaled(rows.get(c, {}).get(f"global_{metric}"), scale) for c in ids]
        if any(row.get("realised_gain") is not None for row in run.records.clients):
            found["alone"] = [_scaled(rows.get(c, {}).get(f"alone_{metric}"), scale) for c in ids]
        for name, column in COLUMNS.items():
            values = [rows.get(client, {}).get(column) for client in ids]
            if any(value is not None for value in values):
                found[name] = _all_rounded(values)
        last = {str(row["client"]): row.get("weight") for row in run.records.participation}
        if any(value is not None for value in last.values()):
            found["weight"] = _all_rounded((last.get(client) for client in ids), 4)
        methods.append(found)
    clusters = [sizes[client].get("cluster") for client in ids]
    table = {
        "seed": seed,
        "clients": ids,
        "total": total,
        "train": [sizes[client].get("num_train") for client in ids],
        "test": [sizes[client].get("num_test") for client in ids],
        "cluster": clusters if any(value is not None for value in clusters) else None,
        "classes": partition(runs, ids),
        "methods": methods,
    }
    for number, own in enumerate(methods):
        found_losing = losing(group, seed, number) if own is not None else None
        if own is None or found_losing is None:
            continue
        own["losing"] = found_losing
        if "predicted" in own and (bins := calibration(own["predicted"], gains(group, table, number)[0])) is not None:
            own["bins"] = bins
    return table


def _scaled(value: float | None, scale: float) -> float | int | None:
    return None if value is None else rounded(scale * value)


def partition(runs: Sequence[RunData | None], ids: Sequence[str]) -> dict[str, Any] | None:
    """Training rows by client and class, where a run has noted them; only the cells that are not empty."""
    rows = next((run.partition for run in runs if run is not None and run.partition), None)
    if rows is None:
        return None
    names = sorted({str(row["class"]) for row in rows}, key=_as_number)
    place, number = {client: i for i, client in enumerate(ids)}, {name: i for i, name in enumerate(names)}
    cells = [
        (place[row["client"]], number[str(row["class"])], int(row["num_train"]))
        for row in rows
        if row["client"] in place and row["num_train"]
    ]
    cells.sort()
    return {
        "names": names,
        "client": [c for c, _, _ in cells],
        "class": [k for _, k, _ in cells],
        "rows": [n for _, _, n in cells],
    }


def _as_number(name: str) -> tuple[int, float, str]:
    try:
        return 0, float(name), name
    except ValueError:
        return 1, 0.0, name


def gains(group: Group, seed_table: dict[str, Any], method: int) -> tuple[list[float | None], str]:
    """What each client gains by joining, and over what.

    Over its own training alone, as the run itself has measured it or as a run of ``local`` with that seed has; else
    over the shared model.
    """
    table = seed_table["methods"][method]
    base_of, name = alone(group), ALONE
    base = None if table is None else table.get("alone")
    if base is None and base_of is not None and base_of != method and seed_table["methods"][base_of] is not None:
        base = seed_table["methods"][base_of]["personal"]
    elif base is None and table is not None:
        base, name = table.get("global"), "the global model"
    if table is None or base is None:
        return [None] * len(seed_table["clients"]), name
    sign = 1.0 if group.is_higher_better else -1.0
    return [
        None if mine is None or other is None else sign * (mine - other)
        for mine, other in zip(table["personal"], base, strict=True)
    ], name


def joined(group: Group, seed: int, method: int) -> list[Row]:
    """A method's clients with what each had alone, as `selffl.runs.gain` takes them; none where that is not known."""
    runs, base, metric = runs_of_seed(group, seed), alone(group), group.metric
    run = runs[method]
    rows = [] if run is None else run.records.clients
    if any(row.get("realised_gain") is not None for row in rows):
        return rows
    other = runs[base] if base is not None and base != method else None
    theirs = {} if other is None else {str(row["client"]): row.get(metric) for row in other.records.clients}
    sign = 1.0 if group.is_higher_better else -1.0
    found = []
    for row in rows:
        mine, own = row.get(metric), theirs.get(str(row["client"]))
        gain = None if mine is None or own is None else sign * (mine - own)
        found.append(row | {f"alone_{metric}": own, "realised_gain": gain})
    return found if theirs else []


def joining(group: Group, seed: int, method: int) -> list[Row]:
    """Who gains and who loses, worst first, as `selffl.Run.gains` has it."""
    has_global = not group.methods[method].algorithm.startswith(WITHOUT_GLOBAL)
    return gain_rows(joined(group, seed, method), group.metric, has_global=has_global)


@dataclass(frozen=True)
class Joining:
    """What joining does to the clients of one method, over seeds.

    Attributes:
        method: Its label.
        losing: Share of clients that lose, in percent.
        beyond: Share that loses beyond chance, in percent; none where that is not tested.
        gain: Mean over clients, in the reader's unit.
        correlation: Spearman's, between predicted and realised gains; none where nothing is predicted.
    """

    method: str
    losing: Estimate
    beyond: Estimate | None
    gain: Estimate
    correlation: Estimate | None


def by_joining(group: Group) -> list[Joining]:
    """Of each method that is held against training alone."""
    found = []
    for number, method in enumerate(group.methods):
        shares, beyond, means, correlations = [], [], [], []
        for seed in group.seeds:
            rows = [row for row in joining(group, seed, number) if row["realised_gain"] is not None]
            if not rows:
                continue
            down = [row for row in rows if row["realised_gain"] < 0]
            shares.append(100 * len(down) / len(rows))
            # Without pairs some may be beyond chance, some not: then nothing is said.
            if all(row["is_within_chance"] is not None for row in down):
                beyond.append(100 * sum(not row["is_within_chance"] for row in down) / len(rows))
            means.append(scale_of(group.metric) * sum(row["realised_gain"] for row in rows) / len(rows))
            related = rank_correlation([row["predicted_gain"] for row in rows], [row["realised_gain"] for row in rows])
            correlations += [related[0]] if related is not None else []
        if shares:
            found.append(
                Joining(
                    method.label,
                    over_seeds(shares),
                    over_seeds(beyond) if len(beyond) == len(shares) else None,
                    over_seeds(means),
                    over_seeds(correlations) if correlations else None,
                )
            )
    return found


def losing(group: Group, seed: int, method: int) -> dict[str, Any] | None:
    """How many lose, of how many; who loses most, and why.  None where nobody's training alone is known."""
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
                "gain": _scaled(row["realised_gain"], scale_of(group.metric)),
                "train": row["num_train"],
                "test": row["num_test"],
                "why": row["why"],
            }
            for row in down[:MOST_LOSERS]
        ],
    }


def calibration(predicted: Sequence[float | None], realised: Sequence[float | None]) -> dict[str, Any] | None:
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
        "x": _all_rounded(math.exp(sum(math.log(x) for x, _ in own) / len(own)) for own in bins.values()),
        "y": _all_rounded(each.mean for each in means),
        "error": _all_rounded(each.error for each in means),
        "count": [len(own) for own in bins.values()],
    }


def rank_correlation(one: Sequence[float | None], other: Sequence[float | None]) -> tuple[float, float, int] | None:
    """Spearman's, its p-value, and of how many pairs; none where either does not vary."""
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None]
    if len(pairs) < 3 or len({a for a, _ in pairs}) < 2 or len({b for _, b in pairs}) < 2:
        return None
    found = spearmanr([a for a, _ in pairs], [b for _, b in pairs])
    return float(found.statistic), float(found.pvalue), len(pairs)


# ----------------------------------------------------------------------------------------------------------- inside


def has_variances(run: RunData) -> bool:
    """Whether the method estimates them."""
    return bool(run.records.participation) or any(row.get("inter_variance") is not None for row in run.records.history)


def inside(group: Group, number: int) -> dict[str, Any] | None:
    """Variances, weights and steps of a method over rounds, all its seeds together; none where it has none of them."""
    runs = [run for run in group.methods[number].runs if has_variances(run)]
    if not runs:
        return None
    all_rounds = sorted({row["round"] for run in runs for row in run.records.history})
    rounds = _thinned(all_rounds)
    curves = {
        name: [_mean(run.records.history, column, rounds) for run in runs]
        for name, column in (("inter", "inter_variance"), ("intra", "intra_variance"))
    }
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
        "inter": [_mean_of(values) for values in zip(*curves["inter"], strict=True)],
        "intra": [_mean_of(values) for values in zip(*curves["intra"], strict=True)],
        "steps": _bands(steps, rounds),
        "weight": _bands(weights, rounds),
        "equal": rounded(1 / (sum(cohort) / len(cohort))) if cohort and sum(cohort) else None,
        "bins": list(STEP_BINS),
        "counts": counts if wanted else None,
        "most": options.get("max_local_steps") if options.get("num_local_epochs") is None else None,
    }


def _thinned(rounds: Sequence[int]) -> list[int]:
    if len(rounds) <= MOST_ROUNDS:
        return list(rounds)
    places = np.unique(np.linspace(0, len(rounds) - 1, MOST_ROUNDS).round().astype(int))
    return [rounds[place] for place in places]


def _mean(history: Sequence[Row], column: str, rounds: Sequence[int]) -> list[float | None]:
    known = {row["round"]: row.get(column) for row in history}
    return [known.get(number) for number in rounds]


def _mean_of(values: Iterable[float | None]) -> float | int | None:
    known = [value for value in values if value is not None]
    return rounded(sum(known) / len(known)) if known else None


def _by_round(runs: Sequence[RunData], column: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for run in runs:
        for row in run.records.participation:
            if row.get(column) is not None:
                found.setdefault(row["round"], []).append(float(row[column]))
    return found


def _bands(values: dict[int, list[float]], rounds: Sequence[int]) -> dict[str, Any] | None:
    """The tenth, the middle and the ninth tenth of clients in each round."""
    kept = [number for number in rounds if number in values]
    if not kept:
        return None
    low, middle, high = zip(*(np.quantile(values[number], [0.1, 0.5, 0.9]) for number in kept), strict=True)
    return {"x": kept, "low": _all_rounded(low, 4), "middle": _all_rounded(middle, 4), "high": _all_rounded(high, 4)}


def trajectories(group: Group, seed_tables: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Client by client, the rounds it took part in: of the first method and seed, and of more while there is room."""
    found: list[dict[str, Any]] = []
    left = MOST_POINTS
    for table in seed_tables:
        place = {client: i for i, client in enumerate(table["clients"])}
        for number, run in enumerate(runs_of_seed(group, table["seed"])):
            if run is None or not run.records.participation:
                continue
            rows = [row for row in run.records.participation if str(row["client"]) in place]
            if found and len(rows) > left:
                continue
            every = math.ceil(len(rows) / MOST_POINTS)  # of each client's rounds
            seen: dict[str, int] = {}
            kept = []
            for row in rows:
                count = seen[row["client"]] = seen.get(row["client"], -1) + 1
                if count % max(every, 1) == 0:
                    kept.append(row)
            left -= len(kept)
            found.append(
                {
                    "seed": table["seed"],
                    "method": number,
                    "every": max(every, 1),
                    "client": [place[str(row["client"])] for row in kept],
                    "round": [row["round"] for row in kept],
                    "steps": [row.get("num_local_steps") for row in kept],
                    "wanted": _all_rounded((row.get("wanted_steps") for row in kept), 3),
                    "variance": _all_rounded((row.get("intra_variance") for row in kept), 3),
                    "weight": _all_rounded((row.get("weight") for row in kept), 3),
                }
            )
    return found


# ------------------------------------------------------------------------------------------------------------ a page


def tables(group: Group) -> dict[str, Any]:
    """Everything that the charts of a group are drawn from, as JSON takes it."""
    seed_tables = [clients_of_seed(group, seed) for seed in shown_seeds(group)]
    return {
        "metric": group.metric,
        "unit": "%" if group.metric == "accuracy" else "",
        "higher": group.is_higher_better,
        "parts": PARTS,
        "methods": [method.label for method in group.methods],
        "alone": alone(group),
        "scores": [
            {part: [rounded(e.mean), rounded(e.error)] for part, e in line.scores.items()} for line in lines(group)
        ],
        "rounds": {part: by_round(group, part) for part in PARTS},
        "seeds": seed_tables,
        "allSeeds": group.seeds,
        "inside": [found for number in range(len(group.methods)) if (found := inside(group, number)) is not None],
        "paths": trajectories(group, seed_tables),
    }
