"""One self-contained HTML page from runs and study records."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from selffl._version import __version__
from selffl.errors import DataError, one_line, pluralise
from selffl.reports import client_gains, data, figures, scores, sentences, side_by_side, svg
from selffl.reports.collect import Collection, Group
from selffl.reports.record import StudyRecord
from selffl.reports.schema import Payload, Tables
from selffl.reports.tallies import count_verdicts, tally
from selffl.studies import STUDIES
from selffl.studies.result import capfirst, verdict_word
from selffl.training.metrics import PERCENT, name_of

Recorded = Sequence[tuple[Path, StudyRecord]]

TITLE = "Self-FL, measured"
POLL_MILLISECONDS = 2000  # between two questions of a live page

SECTIONS = {  # of a group, with the chart that has to be there for it
    "methods": ("Methods", None),
    "rounds": ("Rounds", "rounds"),
    "clients": ("Clients", "clients"),
    "tails": ("Worst and top", "tails"),
    "gains": ("Who gains", "gains"),
    "answers": ("Answers", "confusion"),
    "inside": ("Uncertainty", "variances"),
    "clusters": ("Clusters", "clusters"),
    "partition": ("Partition", "partition"),
    "reproduce": ("Reproduce", None),
}


def render(collection: Collection, title: str = TITLE, *, tag: str | None = None, state: str = "") -> str:
    """The page of a collection, which needs no network; with a ``tag``, one that asks its server for later numbers."""
    shown = [
        {
            "anchor": anchor,
            "record": record,
            "figures": [
                {"svg": svg.embed(_beside(folder, f["name"]), f["caption"], f"{anchor}-{f['name']}"), **f}
                for f in record.figures
            ],
            "config": json.dumps(record.config, indent=1, ensure_ascii=False),
            "reading": reading(record),
        }
        for folder, record, anchor in _anchor(collection.studies)
    ]
    groups = _views(collection)
    scripts = [
        _text("theme.js"),
        _plotly() if groups else "",
        (_text("charts.js") if groups else "") + _text("report.js"),
    ]
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts if script]
    content = payload(groups, len(shown), len(collection.waiting))
    if tag is not None:
        content |= {"tag": tag, "every": POLL_MILLISECONDS, "state": state}
    for entry in content["groups"]:  # they are on the page already
        entry.pop("text"), entry.pop("html")
    return (
        _templates()
        .get_template("page.html.j2")
        .render(
            title=groups[0]["group"].title if len(groups) == 1 and not shown else title,
            lead=lead(collection.studies) if shown else "",
            groups=groups,
            beside=side_by_side.beside(collection.groups),
            names=side_by_side.names_of(collection.groups),
            studies=shown,
            waiting=_waiting(collection) if tag is not None and not groups and not shown else "",
            live=tag is not None,
            data=_json(content),
            css=_text("report.css"),
            scripts=scripts,
            # What the page's policy allows a script by: that it is this one, whatever else stands on the page.
            script_hashes=" ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests),
            version=__version__,
        )
    )


def news(collection: Collection, state: str) -> bytes:
    """What a live page asks for: all numbers and sentences, and the shape of the page they are for."""
    groups = _views(collection)
    return _json(payload(groups, len(collection.studies), len(collection.waiting)) | {"state": state}).encode()


def payload(groups: Sequence[dict[str, Any]], num_studies: int, num_waiting: int) -> Payload:
    """What the script of the page works on."""
    parts = _templates().get_template("parts.html.j2").module
    shape = json.dumps(
        [
            [
                (g["sections"], g["charts"], g["tables"]["methods"], g["shown_seeds"], bool(g["joining"]))
                for g in groups
            ],
            num_studies,
            0 if groups else num_waiting,
        ]
    )
    return {
        "shape": hashlib.sha256(shape.encode()).hexdigest()[:16],
        "groups": [
            {
                "id": g["id"],
                "tables": g["tables"],
                "palette": g["palette"],
                "text": g["text"],
                "html": {
                    "table": str(parts.methods_table(g)),  # type: ignore[attr-defined]
                    "joining": str(parts.joining_table(g)),  # type: ignore[attr-defined]
                },
            }
            for g in groups
        ],
    }


def _anchor(studies: Recorded) -> list[tuple[Path, StudyRecord, str]]:
    """Each with an id of its own: the same study may be there twice, say from two folders."""
    anchored = []
    for number, (folder, record) in enumerate(studies):
        first = all(earlier.id != record.id for _, earlier in studies[:number])
        anchored.append((folder, record, record.id if first else f"{record.id}-{number}"))
    return anchored


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("selffl", "reports"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["capfirst"] = capfirst
    environment.globals["verdict_word"] = verdict_word
    return environment


@cache
def _text(name: str) -> str:
    return resources("selffl.reports").joinpath(name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    """The plotting library's script: plotly.js, its basic build. A comment has all functions compiled in one pass."""
    return "//# allFunctionsCalledOnLoad\n" + _text("plotly-basic.min.js").replace("</script", "<\\/script")


def _beside(folder: Path, name: str) -> Path:
    """A figure of a study, which lies in its folder."""
    if Path(name).name != name:
        raise DataError(f"{folder} names a figure {name!r}; expected a file in that folder. Run the study again.")
    return folder / f"{name}.svg"


def _json(content: Any) -> str:
    """JSON that may stand inside a script element: no user's text can end it."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _waiting(collection: Collection) -> str:
    if not collection.waiting:
        return "There is no run here yet"
    return f"{pluralise(len(collection.waiting), 'run')} begun, none with a finished round"


# ------------------------------------------------------------------------------------------------------- one group


def _views(collection: Collection) -> list[dict[str, Any]]:
    """What the templates show of each group; records that do not fit each other, as damaged ones, are one line."""
    views = []
    for number, group in enumerate(collection.groups):
        try:
            views.append(_view(group, f"g{number}"))
        except (LookupError, ValueError, TypeError, ArithmeticError) as error:
            raise DataError(
                f"the records in {group.runs[0].folder} do not fit each other ({type(error).__name__}: "
                f"{one_line(error)}); expected those of a run, as selffl wrote them."
            ) from error
    return views


def _view(group: Group, identity: str) -> dict[str, Any]:
    """What the templates show of a group."""
    tables = data.tables(group)
    charts = _charts(tables)
    text = sentences.takeaways(group, tables)
    gain = client_gains.gains(group, tables["seeds"][0], 0)[1] if tables["seeds"] else ""
    rows, columns = _table(group)
    text |= {
        "verdict": sentences.verdict(group),
        "headline": sentences.headline(group),
        "majority": sentences.majority(group),
        "test": sentences.name_test(group),
    }
    text |= {"facts": _facts(group, tables), "seeds": _seeds(tables)}
    return {
        "id": identity,
        "group": group,
        "tables": tables,
        "palette": figures.page_palette(tables["methods"]),
        "charts": charts,
        "sections": [(key, name) for key, (name, needed) in SECTIONS.items() if needed is None or needed in charts],
        "text": {name: _unbroken(said) for name, said in text.items()},
        "parts": {part: name for part, name in scores.PARTS.items() if any(tables["rounds"][part])},
        "gain": gain,
        "rows": rows,
        "columns": columns,
        "caption": _unbroken(caption(group))
        + (" The best of each column is underlined." if len(group.methods) > 1 else "")
        + _name_twins(rows),
        "claims": group.record.claims if group.record is not None else [],
        "has_clients": bool(tables["seeds"]),
        "joining": _joining(group),
        "shown_seeds": [table["seed"] for table in tables["seeds"]],
        "reproduce": _reproduce(group),
    }


def _charts(tables: Tables) -> list[str]:
    """The charts that there are numbers for."""
    seeds, inside = tables["seeds"], tables["inside"]
    methods = [method for table in seeds for method in table["methods"] if method is not None]
    has_gain = any("losing" in method or "global" in method for method in methods)
    there = {
        "rounds": any(curve for curves in tables["rounds"].values() for curve in curves),
        "clients": bool(seeds),
        "tails": any("worst10" in known for known in tables["scores"]),
        "gains": bool(methods) and has_gain,
        "predicted": any(tables["predicts"]),
        "spread": bool(seeds),
        "confusion": any("answers" in method for method in methods),
        "sureness": any("answers" in method for method in methods),
        "variances": any(value is not None for one in inside for value in (*one["inter"], *one["intra"])),
        "weights": any(one["weight"] is not None for one in inside),
        "steps": any(one["steps"] is not None for one in inside),
        "histogram": any(one["counts"] is not None for one in inside),
        "trajectory": any(steps is not None for path in tables["paths"] for steps in path["steps"]),
        "clusters": any(table["cluster"] is not None for table in seeds),
        "partition": bool(seeds),
    }
    return [name for name, is_there in there.items() if is_there]


def _facts(group: Group, tables: Tables) -> str:
    """What was done, in a line."""
    run = group.runs[0]
    clients = max((int(r.records.summary.get("clients") or 0) for r in group.runs), default=0)
    ends = {r.round_number for r in group.runs}
    done = max(ends)
    rounds = pluralise(done, "round")
    if any(r.status == "running" for r in group.runs):
        rounds = f"{min(ends):,} to {rounds}" if len(ends) > 1 else rounds
        rounds += f" of {run.config.rounds:,}, still running"
    parts = [
        capfirst(group.data),
        pluralise(clients, "client") if clients else "",
        rounds,
        pluralise(len(group.seeds), "seed") if len(group.seeds) > 1 else f"seed {group.seeds[0]}",
        pluralise(len(group.methods), "method") if len(group.methods) > 1 else "",
        "clients at their own sites" if run.config.device == "remote" else "",
        "quick run" if group.record is not None and group.record.is_quick else "",
    ]
    return " · ".join(part for part in parts if part)


def _seeds(tables: Tables) -> str:
    """Which seeds' clients the page holds."""
    shown = [str(table["seed"]) for table in tables["seeds"]]
    if not shown or len(tables["allSeeds"]) == 1:
        return ""
    text = "Clients of one seed are shown at a time, for each seed splits the rows anew."
    if len(shown) < len(tables["allSeeds"]):
        text += f" This page holds those of {pluralise(len(shown), 'seed')} ({', '.join(shown)}) of "
        text += f"{len(tables['allSeeds'])}."
    return text


def _table(group: Group) -> tuple[list[list[Any]], list[str]]:
    """The table of methods: the best of each column is marked, and what differs significantly from the first."""
    lines, metric = scores.lines(group), group.metric
    parts = [part for part in scores.PARTS if any(part in line.scores for line in lines)]
    pick = max if group.is_higher_better else min
    best = {
        part: pick(line.scores[part].mean for line in lines if part in line.scores) for part in parts if len(lines) > 1
    }
    has_others = len(lines) > 1
    has_tests = any(line.p_value is not None for line in lines)
    beside = [name for name in scores.SECOND_METRICS if any(name in line.beside for line in lines)]
    columns = ["method", *(scores.PARTS[part] for part in parts), *(scores.SECOND_METRICS[name] for name in beside)]
    columns += [f"against {lines[0].method}"] if has_others else []
    columns += ["p"] if has_tests else []  # after Holm's correction
    columns += ["gradients"]
    rows: list[list[Any]] = []
    for line in lines:
        cells: list[Any] = [line.method]
        for part in parts:
            score = line.scores.get(part)
            lost = part == "weighted" and score is None and line.num_diverged
            is_best = score is not None and part in best and score.mean == best[part]
            cells.append(
                {"text": "diverged" if lost else sentences.with_error(score, metric), "kind": "top" if is_best else ""}
            )
        for name in beside:
            text = sentences.with_error(line.beside.get(name), name.removeprefix("weighted_"))
            cells.append({"text": text, "kind": ""})
        if has_others:
            kind = {"better": "good", "worse": "bad"}.get(line.verdict, "")
            said = {"better": ", better", "worse": ", worse"}.get(line.verdict, "")
            text = sentences.with_error(line.difference, metric, signed=True) + said
            cells.append({"text": "" if line.verdict == "first" else text, "kind": kind})
        if has_tests:
            cells.append({"text": "" if line.verdict == "first" else sentences.p_shown(line.p_value), "kind": ""})
        gradients = "–" if line.gradients is None else f"{line.gradients:,.0f}"
        cells.append({"text": gradients, "kind": ""})
        rows.append(cells)
    return rows, columns


def _name_twins(rows: list[list[Any]]) -> str:
    """Which methods end alike, so that nobody takes it for a mistake."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        alike.setdefault(tuple(cell["text"] for cell in cells), []).append(name)
    return "".join(
        f" {sentences.list_words(names)} are different methods; here their numbers agree in every digit shown."
        for names in alike.values()
        if len(names) > 1
    )


def _joining(group: Group) -> list[dict[str, str]]:
    """Who loses by joining, method by method; columns that no method has are left out."""
    rows, metric = client_gains.by_joining(group), group.client_metric
    unit = ", points" if metric in PERCENT else ""
    return [
        {"method": row.method, "losing, %": sentences.with_error(row.losing, "accuracy")}
        | ({"significant, %": sentences.with_error(row.beyond, "accuracy")} if any(r.beyond for r in rows) else {})
        | {f"mean gain{unit}": sentences.with_error(row.gain, metric, signed=True)}
        | (
            {"rank correlation": sentences.with_error(row.correlation, "correlation", signed=True)}
            if any(r.correlation for r in rows)
            else {}
        )
        for row in rows
    ]


def plain_table(group: Group) -> list[dict[str, str]]:
    """The table of methods as text, column by column."""
    rows, columns = _table(group)
    return [dict(zip(columns, [row[0], *(cell["text"] or "–" for cell in row[1:])], strict=True)) for row in rows]


def _unbroken(text: str) -> str:
    """A text in which no line begins with a per cent sign."""
    return text.replace(" %", "\u00a0%")


def caption(group: Group) -> str:
    """What the table's numbers are."""
    on = f"on each client's own {group.config.evaluate_on} rows"
    many = len(group.seeds) > 1
    unit = " in %" if group.metric in PERCENT else ""
    text = f"{capfirst(name_of(group.metric))}{unit}, {on}" + ("; mean ± standard error over seeds" if many else "")
    if len(group.methods) > 1:
        test = sentences.name_test(group)
        text += f". Better and worse: statistically significant. {test}" if test else ". Differences are not tested."
    return text.removesuffix(".") + ". Gradients: evaluations per client and round, in training."


def _reproduce(group: Group) -> dict[str, Any]:
    """The command, the settings, the seeds and the environment."""
    config, record = group.config, group.record
    calls = [
        {
            "title": f"{method.label} in Python" + (f", seed {run.config.seed}" if len(group.seeds) > 1 else ""),
            "text": sentences.call(run.config),
        }
        for method in group.methods
        for run in method.runs[:1]
    ]
    source = {k: v for k, v in (config.source or {}).items() if k not in ("name", "seed")}
    model = {k: v for k, v in (config.model or {}).items() if k not in ("name", "seed")}
    settings = [
        ("data", ", ".join([group.data, *(f"{k} {v}" for k, v in source.items())])),
        ("model", ", ".join([str((config.model or {}).get("name", "the user's own")), *_pairs(model)])),
        ("rounds", f"{config.rounds:,}"),
        ("participation C", f"{config.participation:g}"),
        ("learning rate η", f"{config.learning_rate:g}"),
        ("batch size B", f"{config.batch_size}"),
        ("seeds", ", ".join(map(str, group.seeds))),
        ("device, numbers", f"{config.device}, {config.dtype}"),
        ("seconds, all runs", f"{sum(float(r.records.summary.get('seconds') or 0) for r in group.runs):,.1f}"),
    ]
    if record is not None:
        settings.insert(0, ("setting", record.setting + ("; this quick run has less" if record.is_quick else "")))
    environment = record.environment if record is not None else group.runs[0].environment
    options = [
        (method.label, ", ".join(_pairs(method.runs[0].config.options)) or "no options") for method in group.methods
    ]
    return {
        "command": record.command if record is not None else "",
        "calls": calls,
        "tables": [
            {"caption": "Settings", "rows": settings},
            {"caption": "Computed with", "rows": [(key, str(value)) for key, value in environment.items()]},
            {"caption": "Options of the methods", "rows": options},
        ],
    }


def _pairs(values: dict[str, Any]) -> list[str]:
    return [f"{key} {value}" for key, value in values.items() if value is not None]


# --------------------------------------------------------------------------------------------------------- studies


def lead(studies: Recorded) -> str:
    """The verdicts in a few sentences."""
    counts = count_verdicts(
        (record.paper, claim["text"], claim["verdict"]) for _, record in studies for claim in record.claims
    )
    return tally(counts) or "No claims were put to the test here."


def reading(record: StudyRecord) -> str:
    """What was made of a whole study's numbers, in words; nothing for a quick run, which shows others."""
    return "" if record.is_quick or record.id not in STUDIES else STUDIES[record.id].reading
