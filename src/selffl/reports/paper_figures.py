"""Figures and tables for papers: what a report shows of runs and studies, in print.

from selffl.reports.paper_figures import save_paper_figures
save_paper_figures(["runs/compare-digits"], "figures", formats=("pdf",), width="single")
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Canvas

from selffl.errors import ConfigError, DataError, check_known
from selffl.reports import client_gains, data, figures, page, tables
from selffl.reports.collect import Group, collect
from selffl.reports.figures import INCHES, Width
from selffl.reports.partition import partition_plot
from selffl.reports.record import FIGURES, StudyRecord
from selffl.reports.schema import Classes, Inside, SeedTable, Tables, Trajectory
from selffl.studies.result import Chart, Figure, Series, capfirst
from selffl.training.metrics import PERCENT, name_of

FORMATS = ("png", "svg", "pdf")


def save_paper_figures(
    folders: Iterable[str | Path],
    out: str | Path,
    *,
    formats: Sequence[str] = FORMATS,
    width: Width = "double",
) -> list[Path]:
    """Draw what the folders hold, for a paper; returns the files written.

    Args:
        folders: of runs, comparisons or studies.
        out: folder for the figures, ``table.tex`` and ``table.md``; made if it is not there.
        formats: of the figures, any of ``png``, ``svg`` and ``pdf``.
        width: of a ``single`` column or of both (``double``).
    """
    for name in formats:
        check_known("format", name, FORMATS)
    if not formats:
        raise ConfigError(f"there is no format; expected some of: {', '.join(FORMATS)}.")
    check_known("width", width, INCHES)
    collection = collect([Path(folder) for folder in folders])
    target = Path(out)
    target.mkdir(parents=True, exist_ok=True)
    names = [
        *(f"runs-{number}" for number in range(1, len(collection.groups) + 1)),
        *(r.id for _, r in collection.studies),
    ]
    is_only = len(names) == 1
    written: list[Path] = []
    for group, name in zip(collection.groups, names, strict=False):
        written += _save_group(group, target, "" if is_only else f"{name}-", formats, width)
    for (folder, record), name in zip(collection.studies, names[len(collection.groups) :], strict=True):
        written += _save_study(folder, record, target, "" if is_only else f"{name}-", formats, width)
    return written


def _save_group(group: Group, folder: Path, prefix: str, formats: Sequence[str], width: Width) -> list[Path]:
    written = []
    table = data.tables(group)
    for figure in figures_of(group, table):
        written += figures.save(figures.draw(figure, width), folder / f"{prefix}{figure.name}", formats)
    first = table["seeds"][0] if table["seeds"] else None
    if first is not None and first["classes"]:
        written += figures.save(_partition(first["clients"], first["classes"]), folder / f"{prefix}partition", formats)
    return written + _save_table(page.plain_table(group), page.caption(group), folder, prefix)


def _save_study(
    folder: Path, record: StudyRecord, target: Path, prefix: str, formats: Sequence[str], width: Width
) -> list[Path]:
    written = []
    if (folder / FIGURES).is_file():
        for content in json.loads((folder / FIGURES).read_text(encoding="utf-8")):
            figure = figures.of_plain(content)
            written += figures.save(figures.draw(figure, width), target / f"{prefix}{figure.name}", formats)
    else:  # of an earlier version: as it was drawn then
        for name, ending in ((f["name"], ending) for f in record.figures for ending in formats):
            source = folder / f"{name}.{ending}"
            if not source.is_file():
                raise DataError(
                    f"{folder} holds neither {FIGURES} nor {source.name}; expected what the figure shows. Run the "
                    "study again, or leave that format out."
                )
            written.append(Path(shutil.copyfile(source, target / f"{prefix}{source.name}")))
    return written + (_save_table(record.table, record.title, target, prefix) if record.table else [])


def _save_table(rows: Sequence[dict[str, str]], caption: str, folder: Path, prefix: str) -> list[Path]:
    paths = [folder / f"{prefix}table.tex", folder / f"{prefix}table.md"]
    paths[0].write_text(tables.latex(rows, caption), encoding="utf-8")
    paths[1].write_text(tables.markdown(rows), encoding="utf-8")
    return paths


# ---------------------------------------------------------------------------------------------------- what is drawn


def figures_of(group: Group, table: Tables | None = None) -> list[Figure]:
    """The figures of a group: by round, by client, who gains, and what uncertainty decided."""
    table = data.tables(group) if table is None else table
    axis, of_client = (
        name_of(metric) + (", %" if metric in PERCENT else "") for metric in (group.metric, group.client_metric)
    )
    drawn = [
        Figure(
            "rounds",
            f"{capfirst(name_of(group.metric))} by round; bars are standard errors over seeds.",
            [
                Chart(title, "round", axis, series)
                for part, title in (("weighted", "All clients"), ("worst10", "Worst tenth of clients"))
                if (series := _curves(table, part))
            ],
        )
    ]
    for seed_table in table["seeds"][:1]:
        drawn += _of_clients(group, table, seed_table, of_client)
    for inside in table["inside"][:1]:
        drawn += _of_inside(group, table, inside)
    return [figure for figure in drawn if figure.charts]


def _curves(table: Tables, part: str) -> list[Series]:
    return [
        Series(name, curve["x"], curve["y"], curve["error"])
        for name, curve in zip(table["methods"], table["rounds"][part], strict=True)
        if curve is not None
    ]


def _of_clients(group: Group, table: Tables, seed_table: SeedTable, axis: str) -> list[Figure]:
    sizes = seed_table["train"]
    is_wide = min(sizes) > 0 and max(sizes) > 10 * min(sizes)
    points, predicted = [], []
    gains: list[Series] = []
    base = "the global model"
    for number, name in enumerate(table["methods"]):
        columns = seed_table["methods"][number]
        if columns is None:
            continue
        points.append(_points(name, sizes, columns["personal"]))
        client_gain, over = client_gains.gains(group, seed_table, number)
        if number == table["alone"] or all(value is None for value in client_gain):
            continue
        base = over if number == 0 or not gains else base
        ranked = sorted((value for value in client_gain if value is not None), reverse=True)
        gains.append(Series(name, list(range(1, len(ranked) + 1)), ranked))
        if "predicted" in columns and over == client_gains.ALONE:
            predicted.append(_points(name, columns["predicted"], client_gain))
            if (bins := columns.get("bins")) is not None:
                predicted.append(Series(f"{name}, means of bins", bins["x"], bins["y"], bins["error"]))
    seed = f" (seed {seed_table['seed']})" if len(group.seeds) > 1 else ""
    rows = [Chart("By size", "training rows", axis, points, log_x=is_wide, kind="points")]
    gain = f"gain over {base}" + (", points" if group.client_metric in PERCENT else "")
    charts = [Chart("Who gains", "clients, from those who gain most", gain, gains)] if gains else []
    if predicted:
        ends = [end(x for series in predicted for x in series.x) for end in (min, max)]
        predicted.append(Series("no gain", ends, [0.0, 0.0], is_reference=True))
        charts.append(
            Chart("Predicted against realised", "variance shrinks by", gain, predicted, log_x=True, kind="points")
        )
    return [
        Figure("clients", f"Each client's {name_of(group.client_metric)} against its training rows{seed}.", rows),
        Figure("gains", f"What each client gains by joining{seed}.", charts),
    ]


def _points(name: str, x: Sequence[float | None], y: Sequence[float | None]) -> Series:
    known = [(a, b) for a, b in zip(x, y, strict=True) if a is not None and b is not None]
    return Series(name, [a for a, _ in known], [b for _, b in known])


def _of_inside(group: Group, table: Tables, inside: Inside) -> list[Figure]:
    name = table["methods"][inside["method"]]

    def curve(label: str, values: Sequence[float | None]) -> Series:
        known = [(x, y) for x, y in zip(inside["rounds"], values, strict=True) if y is not None and y > 0]
        return Series(label, [x for x, _ in known], [y for _, y in known])

    variances = [curve("σ₀², between clients", inside["inter"]), curve("σₘ², within, mean", inside["intra"])]
    charts = [Chart("Variances", "round", "variance", [s for s in variances if s.x], log_y=True)]
    if inside["weight"] is not None:
        band = inside["weight"]
        named = {"lowest tenth": band["low"], "median": band["middle"], "highest tenth": band["high"]}
        lines = [Series(label, band["x"], [100 * v for v in values]) for label, values in named.items()]
        charts.append(Chart("Weights", "round", "share in the average, %", lines))
    drawn = [Figure("variances", f"{name}: variances and weights by round.", [c for c in charts if c.series])]
    steps = []
    if inside["counts"]:
        total = sum(inside["counts"])
        last = max(index for index, count in enumerate(inside["counts"]) if count)
        shares = [100 * count / total for count in inside["counts"][: last + 1]]
        bars = [Series(name, inside["bins"][: last + 1], shares)]
        steps.append(Chart("Steps wanted", "lower end of the bin", "client-rounds, %", bars, kind="bars"))
    paths = [path for path in table["paths"] if path["method"] == inside["method"]]
    if paths and any(taken is not None for taken in paths[0]["steps"]):
        steps.append(_trajectory(table, paths[0]))
    drawn.append(Figure("steps", f"{name}: steps wanted in all client-rounds, and those of one client.", steps))
    return drawn


def _trajectory(table: Tables, path: Trajectory) -> Chart:
    """The steps of the client that took part most often."""
    busiest = max(set(path["client"]), key=lambda client: (path["client"].count(client), -client))
    at = [i for i, client in enumerate(path["client"]) if client == busiest]
    ids = next(seeds["clients"] for seeds in table["seeds"] if seeds["seed"] == path["seed"])
    named: dict[str, list[Any]] = {"taken": path["steps"], "wanted": path["wanted"]}
    lines = [
        Series(label, [path["round"][i] for i in known], [values[i] for i in known])
        for label, values in named.items()
        if (known := [i for i in at if values[i] is not None])
    ]
    return Chart(f"Client {ids[busiest]}".replace("$", r"\$"), "round", "local steps", lines)


def _partition(clients: Sequence[str], classes: Classes) -> Canvas:
    counts = np.zeros((len(clients), len(classes["names"])), dtype=np.int64)
    counts[classes["client"], classes["class"]] = classes["rows"]
    return partition_plot(counts, "Rows by client and class", clients, classes["names"])
