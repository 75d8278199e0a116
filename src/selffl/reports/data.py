"""Runs turned into the plain tables that a page is drawn from: no drawing, no words, no files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from selffl.reports.client_gains import FEWEST_TEST_ROWS, calibration, gains, losing, predicts
from selffl.reports.collect import Group, RunData
from selffl.reports.over_rounds import inside, trajectories
from selffl.reports.schema import AnswerCells, Classes, ClientColumns, SeedTable, Tables
from selffl.reports.scores import (
    PARTS,
    alone,
    by_round,
    evenly_chosen,
    find_shared_method,
    lines,
    round_all,
    round_digits,
    runs_of_seed,
    scale_of,
    to_unit,
)
from selffl.runs.folder import Row
from selffl.training.metrics import PERCENT, name_of

# What a page can hold: beyond these it shows fewer seeds or an even choice of clients, and says so.
MAX_CLIENTS = 2000  # of one seed
MAX_ROWS = 16_000  # clients of all methods and seeds shown
MAX_CELLS = 20_000  # of answers, of all methods and seeds shown


def shown_seeds(group: Group) -> list[int]:
    """Seeds whose clients are shown: the first, and more while the page can hold them; only those with clients."""
    seeds: list[int] = []
    total = 0
    for seed in group.seeds:
        runs = [run for run in runs_of_seed(group, seed) if run is not None and run.records.clients]
        if not runs:
            continue
        total += sum(min(len(run.records.clients), MAX_CLIENTS) for run in runs)
        if seeds and total > MAX_ROWS:
            break
        seeds.append(seed)
    return seeds


def chosen_clients(runs: Sequence[RunData | None]) -> tuple[list[str], int]:
    """Ids of the clients to show, largest first, and how many there are; beyond the most, an even choice by size."""
    sizes: dict[str, int] = {}
    for run in runs:
        for row in run.records.clients if run is not None else ():
            sizes.setdefault(str(row["client"]), int(row.get("num_train") or 0))
    ids = sorted(sizes, key=lambda client: -sizes[client])
    return [ids[place] for place in evenly_chosen(len(ids), MAX_CLIENTS)], len(ids)


# Of a client with one method: what the page calls it, and the column it is in.
COLUMNS: dict[Literal["rounds", "steps", "variance", "predicted"], str] = {
    "rounds": "rounds",
    "steps": "num_local_steps",
    "variance": "intra_variance",
    "predicted": "predicted_gain",
}


def clients_of_seed(group: Group, seed: int) -> SeedTable:
    """Every client of a seed: sizes, classes, cluster, and what each method did for it."""
    runs = runs_of_seed(group, seed)
    ids, total = chosen_clients(runs)
    scale, metric = scale_of(group.client_metric), group.client_metric
    sizes: dict[str, Row] = {}
    methods: list[ClientColumns | None] = []
    for run, method in zip(runs, group.methods, strict=True):
        if run is None or not run.records.clients:
            methods.append(None)
            continue
        rows = {str(row["client"]): row for row in run.records.clients}
        for client, row in rows.items():
            sizes.setdefault(client, row)
        columns: ClientColumns = {"personal": [to_unit(rows.get(c, {}).get(metric), scale) for c in ids]}
        if method.has_global_model:
            columns["global"] = [to_unit(rows.get(c, {}).get(f"global_{metric}"), scale) for c in ids]
        if any(row.get("realised_gain") is not None for row in run.records.clients):
            columns["alone"] = [to_unit(rows.get(c, {}).get(f"alone_{metric}"), scale) for c in ids]
        for name, column in COLUMNS.items():
            values = [rows.get(client, {}).get(column) for client in ids]
            if any(value is not None for value in values):
                columns[name] = round_all(values)
        last = {str(row["client"]): row.get("weight") for row in run.records.participation}
        if any(value is not None for value in last.values()):
            columns["weight"] = round_all((last.get(client) for client in ids), 4)
        methods.append(columns)
    clusters = [sizes[client].get("cluster") for client in ids]
    table: SeedTable = {
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


def answer_cells(run: RunData, ids: Sequence[str]) -> AnswerCells | None:
    """Which classes the rows of clients got, where a run has kept it."""
    rows = run.records.answers
    if not rows:
        return None
    names = sorted({str(row[name]) for row in rows for name in ("class", "answer")}, key=_as_number)
    position, number = _places(ids), _places(names)
    kept = [row for row in rows if str(row["client"]) in position]
    return {
        "names": names,
        "client": [position[str(row["client"])] for row in kept],
        "class": [number[str(row["class"])] for row in kept],
        "answer": [number[str(row["answer"])] for row in kept],
        "rows": [int(row["num_test"]) for row in kept],
        "confidence": round_all((row["confidence"] for row in kept), 4),
    }


def _places(names: Sequence[str]) -> dict[str, int]:
    return {name: place for place, name in enumerate(names)}


def add_answers(group: Group, seed_tables: Sequence[SeedTable]) -> None:
    """Add answers to the tables: of the first method and seed, and of more while the page can hold them."""
    left = MAX_CELLS
    for table in seed_tables:
        for run, own in zip(runs_of_seed(group, table["seed"]), table["methods"], strict=True):
            cells = None if run is None or own is None else answer_cells(run, table["clients"])
            if own is not None and cells is not None and len(cells["rows"]) <= left:
                own["answers"] = cells
                left -= len(cells["rows"])


def partition(runs: Sequence[RunData | None], ids: Sequence[str]) -> Classes | None:
    """Training rows by client and class, where a run has noted them; only the cells that are not empty."""
    rows = next((run.partition for run in runs if run is not None and run.partition), None)
    if rows is None:
        return None
    names = sorted({str(row["class"]) for row in rows}, key=_as_number)
    position, number = _places(ids), _places(names)
    cells = sorted(
        (position[row["client"]], number[str(row["class"])], int(row["num_train"]))
        for row in rows
        if row["client"] in position and row["num_train"]
    )
    clients, classes, counts = ([cell[part] for cell in cells] for part in range(3))
    return {"names": names, "client": clients, "class": classes, "rows": counts}


def _as_number(name: str) -> tuple[int, float, str]:
    try:
        return 0, float(name), name
    except ValueError:
        return 1, 0.0, name


def tables(group: Group) -> Tables:
    """Everything that the charts of a group are drawn from, as JSON takes it."""
    seed_tables = [clients_of_seed(group, seed) for seed in shown_seeds(group)]
    add_answers(group, seed_tables)
    return {
        "metric": name_of(group.metric),
        "clientMetric": name_of(group.client_metric),
        "unit": "%" if group.metric in PERCENT else "",
        "higher": group.is_higher_better,
        "parts": PARTS,
        "methods": [method.label for method in group.methods],
        "fewest": FEWEST_TEST_ROWS,
        "predicts": [predicts(group, number) for number in range(len(group.methods))],
        "alone": alone(group),
        "shared": find_shared_method(group),
        "scores": [
            {part: [round_digits(e.mean), round_digits(e.error)] for part, e in line.scores.items()}
            for line in lines(group)
        ],
        "rounds": {part: by_round(group, part) for part in PARTS},
        "seeds": seed_tables,
        "allSeeds": group.seeds,
        "inside": [one for number in range(len(group.methods)) if (one := inside(group, number)) is not None],
        "paths": trajectories(group, seed_tables),
    }
