"""A single run as a section of a report: what its folder says, drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selffl.errors import DataError
from selffl.reports import figures
from selffl.reports.record import StudyRecord
from selffl.runs import folder as files
from selffl.runs.folder import Records, Row, RunConfig
from selffl.studies.result import Chart, Figure, Series
from selffl.training.metrics import HIGHER_IS_BETTER

MOST_CLIENTS = 40  # that a table shows
PICTURES = "report"  # folder, in the run's own, for its figures


def is_run(folder: Path) -> bool:
    """Whether a run has been written there."""
    return (folder / files.CONFIG).is_file() and (folder / files.HISTORY).is_file()


def load_runs(folder: Path) -> list[tuple[Path, StudyRecord]]:
    """Every run in ``folder`` or one level below it, with the folder its figures lie in; they are drawn anew."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; expected one that `selffl` has written.")
    found = [place for place in (folder, *sorted(folder.iterdir())) if is_run(place)]
    if not found:
        raise DataError(
            f"{folder} holds neither a study nor a run; expected record.json, or {files.CONFIG} and {files.HISTORY}."
        )
    return [_drawn(place) for place in found]


def _drawn(place: Path) -> tuple[Path, StudyRecord]:
    config, records = files.read_config(place), files.read_records(place)
    if not records.history:
        raise DataError(f"{place / files.HISTORY} has no rounds yet; expected at least one. Wait for the first.")
    pictures = place / PICTURES
    pictures.mkdir(exist_ok=True)
    drawn = _figures(config, records)
    for figure in drawn:
        figures.save(figures.draw(figure), pictures / figure.name)
    content: dict[str, Any] = json.loads((place / files.CONFIG).read_text(encoding="utf-8"))
    last, status = records.history[-1], records.summary.get("status", "running")
    where = "" if config.device == "remote" else f" on {config.device}"
    return pictures, StudyRecord(
        id=place.resolve().name,
        title=f"{config.algorithm} on {'rows of the sites' if config.data == 'remote' else config.data}",
        verdict=_verdict(config, records),
        paper="a single run",
        setting=(
            f"{last['round']} of {config.rounds} rounds ({status}), {records.summary.get('clients', '?')} clients, "
            f"C = {config.participation:g}, η = {config.learning_rate:g}, B = {config.batch_size}, seed {config.seed}"
            + (", clients at their own sites" if config.device == "remote" else "")
        ),
        command=f"selffl.train{where}" if config.device != "remote" else "selffl.flower.server_app",
        is_quick=False,
        seconds=float(last.get("seconds") or 0.0),
        claims=[],
        table=_table(config, records),
        figures=[{"name": figure.name, "caption": figure.caption} for figure in drawn],
        config=content["config"],
        environment=content.get("environment", {}),
    )


def _shown(metric: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.1f} %" if metric == "accuracy" else f"{value:.4g}"


def _verdict(config: RunConfig, records: Records) -> str:
    """The run in a few words: personal models, the one model, and the clients worst off."""
    metric = config.metrics[0]
    row = next((row for row in reversed(records.history) if row.get(f"weighted_{metric}") is not None), None)
    if row is None:
        return "not yet evaluated"
    personal, shared = row[f"weighted_{metric}"], row.get(f"global_{metric}")
    words = f"{metric} {_shown(metric, personal)} with personal models, {_shown(metric, shared)} with the global one"
    worst = row.get(f"worst10_{metric}")
    return words if worst is None else f"{words}, worst tenth {_shown(metric, worst)}"


def _figures(config: RunConfig, records: Records) -> list[Figure]:
    metric, found = config.metrics[0], []
    scale, unit = (100.0, ", %") if metric == "accuracy" else (1.0, "")
    views = {"weighted": "personal models", "worst10": "worst tenth of clients", "global": "global model"}
    scores = [_series(name, records.history, f"{part}_{metric}", scale) for part, name in views.items()]
    if any(series.x for series in scores):
        chart = Chart("By round", "round", metric + unit, [series for series in scores if series.x])
        charts = [chart, *_by_size(config, records, scale, unit)]
        found.append(
            Figure("scores", f"{metric.capitalize()} on each client's own test rows, by round and by client.", charts)
        )
    inner = [
        Chart(title, "round", label, [series for series in group if series.x], log_y=log)
        for title, label, log, group in (
            (
                "Local steps",
                "mean over the cohort",
                False,
                [_series("local steps ℓ", records.history, "num_local_steps")],
            ),
            (
                "Variances",
                "variance",
                True,
                [
                    _series("σ₀², between clients", records.history, "inter_variance", is_logarithmic=True),
                    _series("mean σₘ², within", records.history, "intra_variance", is_logarithmic=True),
                ],
            ),
        )
        if any(series.x for series in group)
    ]
    if inner:
        found.append(Figure("inside", "What uncertainty decided, round by round.", inner))
    return found


def _series(name: str, rows: Sequence[Row], column: str, scale: float = 1.0, *, is_logarithmic: bool = False) -> Series:
    """A column by round, where it is known; a zero has no place on a logarithmic axis."""
    known = [(row["round"], scale * row[column]) for row in rows if row.get(column) is not None]
    known = [(x, y) for x, y in known if y > 0 or not is_logarithmic]
    return Series(name, [x for x, _ in known], [y for _, y in known])


def _by_size(config: RunConfig, records: Records, scale: float, unit: str) -> list[Chart]:
    """Each client's score against its rows."""
    metric, lines = config.metrics[0], []
    for column, name in ((metric, "personal models"), (f"global_{metric}", "global model")):
        known = [(row["num_train"], scale * row[column]) for row in records.clients if row.get(column) is not None]
        lines.append(Series(name, [x for x, _ in known], [y for _, y in known]))
    sizes = [size for line in lines for size in line.x]
    if not sizes:
        return []
    is_wide = min(sizes) > 0 and max(sizes) > 10 * min(sizes)
    return [Chart("By client", "training rows", metric + unit, lines, log_x=is_wide, kind="points")]


def _table(config: RunConfig, records: Records) -> list[dict[str, str]]:
    """The clients, those who gain least by a model of their own first."""
    metric = config.metrics[0]
    better = 1.0 if HIGHER_IS_BETTER[metric] else -1.0

    def gain(row: Row) -> float:
        values = row.get(metric), row.get(f"global_{metric}")
        return better * (values[0] - values[1]) if None not in values else float("inf")  # type: ignore[operator]

    lines = [
        {
            "client": str(row["client"]),
            "training rows": f"{row['num_train']:,}",
            f"{metric}, own model": _shown(metric, row.get(metric)),
            f"{metric}, global model": _shown(metric, row.get(f"global_{metric}")),
            "rounds": str(row.get("rounds", "–")),
            "gradients": f"{row.get('gradient_evaluations', 0):,}",
        }
        for row in sorted(records.clients, key=gain)[:MOST_CLIENTS]
    ]
    return lines or [{"client": "–", "training rows": "–"}]
