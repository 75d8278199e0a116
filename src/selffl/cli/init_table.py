"""What `selffl init` writes for a table: which columns are features, what the label is, and which model suits them."""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from selffl.cli import console
from selffl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from selffl.data.labels import Label, Task
    from selffl.data.preparation import Preparation
    from selffl.data.roles import MissingRule
    from selffl.data.tables import Decimals, Interpreted, Table

MAX_CLASSES_UNASKED = 20  # different words of a label that are classes without --task
MIN_NUMBERED_ROWS = 20  # from which on consecutive whole numbers, all different, number the rows
MIN_ROWS_FOR_NETWORK = 200  # of the median client; with fewer, the model is linear
MIN_ROWS_PER_INPUT = 10  # of the median client, for a network
CODE_WIDTH = 110  # of a line in study.py
NUM_SHOWN_CLASSES = 6

LOSSES: dict[Task, str] = {"classes": "cross_entropy", "values": "mse_loss", "counts": "poisson_nll_loss"}
MAX_RATES: dict[Task, float] = {"classes": 0.05, "values": 0.02, "counts": 0.05}
TASKS: dict[Task, str] = {
    "classes": "each number is the name of a class, and 4 is not more than 2",
    "values": "an amount, predicted with its size",
    "counts": "how often something happened, from 0 up",
}
ID_NAMES = re.compile(
    r"(?:|id|uuid|guid|idx|index|key|nr|no|num|number|rows?|row[_ .-]?(?:id|nr|no|num|numbers?|names?)|unnamed: \d+)"
    r"|.*[_ .-]id",
    re.IGNORECASE,
)
CAMEL_ID = re.compile(r".*[a-z]I[dD]")  # patientId


@dataclass(frozen=True)
class StudyParts:
    """The parts of a new study that rows decide, of a table or of a folder."""

    values: Mapping[str, Any]  # what the templates of study.py and study.toml take
    num_clients: int  # for the share of the clients that take part in a round
    summary: list[str]  # lines for the terminal
    about: Mapping[str, Any]  # the same facts for --json


def table_study(
    path: Path,
    folder: Path,
    client: str,
    label: str,
    *,
    features: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    task: Task | None = None,
    missing: MissingRule = "refuse",
    decimal: Decimals | None = None,
    can_ask: bool = False,
) -> StudyParts:
    """Read the table at ``path`` and choose features, task and model; ``folder`` is where the study will be written."""
    from selffl.data.readers import read_table
    from selffl.data.roles import Roles, settle_missing

    with console.options_in_messages():
        table = read_table(path, [client, label], decimal)
        chosen, left_out = _choose_features(table, client, label, features, exclude, missing)
        table = replace(table, columns={name: table.columns[name] for name in (client, label, *chosen)})
        table, num_dropped = settle_missing(table, Roles(label, client, chosen), chosen, missing)
        client_sizes = _client_sizes(table, client)
        target = _settle_label(table, label, task, can_ask)
        preparation = _fit(table, target, chosen, client, missing, num_dropped)
    num_inputs, median = len(preparation.inputs), statistics.median_low(client_sizes)
    is_network = median >= max(MIN_ROWS_FOR_NETWORK, MIN_ROWS_PER_INPUT * num_inputs)
    model = "network" if is_network else "linear"
    facts = {
        "rows": len(table),
        "clients": len(client_sizes),
        "features": {column.name: column.kind for column in preparation.columns},
        "left_out": left_out,
        "label": label,
        "task": target.task,
        "classes": list(target.classes) or None,
        "missing": {
            "rule": missing,
            "dropped": num_dropped,
            "imputed": {
                name: int(table.is_missing(name).sum()) for name in chosen if missing == "impute"
                and table.is_missing(name).any()
            },
        },
        "inputs": num_inputs,
        "median_rows": median,
        "model": model,
    }  # fmt: skip
    values = {
        "title": _literal(f"{path.name} by {client}"),
        "rows": _literal(Path(os.path.relpath(path, folder)).as_posix()),
        "client": _literal(client),
        "label": _literal(label),
        "features": _list_literal(chosen),
        "task": target.task,
        "missing": missing,
        "decimal": decimal,
        "model": model,
        "model_reason": textwrap.wrap(_reason(facts), console.WIDTH - 2),
        "loss": LOSSES[target.task],
        "rate": _learning_rate(table, target, num_inputs),
    }
    return StudyParts(values, len(client_sizes), _summary(path, preparation, facts), facts)


# ------------------------------------------------------------------------------------------------------------ features


def _choose_features(
    table: Table,
    client: str,
    label: str,
    features: Sequence[str] | None,
    exclude: Sequence[str] | None,
    missing: MissingRule,
) -> tuple[list[str], dict[str, str]]:
    """The columns of features, and why others are left out, by name."""
    from selffl.data.roles import Roles

    if len(table) == 0:
        raise DataError(f"{table.place} has a header but no rows; expected rows of at least two clients.")
    unnamed = [""] if "" in table.columns and "" not in (client, label) else []
    candidates = Roles(label, client, features, [*(exclude or ()), *unnamed]).features_of(table)
    left_out = dict.fromkeys(exclude or (), "as --exclude says")
    if features is not None:
        return candidates, left_out
    for name in [*unnamed, *candidates]:
        reason = _reason_against(name, table.interpret_column(name), missing)
        if reason is not None:
            left_out[name] = reason
    chosen = [name for name in candidates if name not in left_out]
    if not chosen:
        reasons = "; ".join(f"{name!r}: {reason}" for name, reason in left_out.items())
        raise DataError(
            f"{table.place} has no column to predict {label} from ({reasons}); expected numbers, dates, or columns of "
            "a few words. Name columns with --features to take them all the same."
        )
    return chosen, left_out


def _reason_against(name: str, column: Interpreted, missing: MissingRule) -> str | None:
    """Why a column is no feature; none: it is one."""
    import pyarrow.compute as pc

    from selffl.data.preparation import MAX_WORDS

    kind, values = column
    num_missing = values.null_count
    if num_missing == len(values):
        return "empty"
    is_numbered = num_missing == 0 and _numbers_rows(name, column)
    if is_numbered:
        return "numbers the rows" if kind == "number" else "an id, another in every row"
    if name == "":
        return "without a name in the header"
    smallest, largest = (scalar.as_py() for scalar in pc.min_max(values).values())
    if smallest == largest and (num_missing == 0 or missing != "impute"):
        return f"always {smallest!r}" if kind == "words" else "always the same"
    if kind == "words" and (num_words := pc.count_distinct(values).as_py()) > MAX_WORDS:
        example = values.drop_null()[0].as_py()
        return f"{num_words:,} different words, such as {_shorten(example)!r} (at most {MAX_WORDS} can serve)"
    return None


def _numbers_rows(name: str, column: Interpreted) -> bool:
    """Whether a column without missing values says nothing but which row it is."""
    import pyarrow.compute as pc

    kind, values = column
    if kind == "date" or (kind == "number" and not _is_whole(values)):
        return False
    is_consecutive = False
    if kind == "number" and len(values) >= MIN_NUMBERED_ROWS:
        smallest, largest = (scalar.as_py() for scalar in pc.min_max(values).values())
        is_consecutive = largest - smallest + 1 == len(values)
    has_id_name = bool(ID_NAMES.fullmatch(name) or CAMEL_ID.fullmatch(name))
    return (is_consecutive or has_id_name) and pc.count_distinct(values).as_py() == len(values)


def _is_whole(values: Any) -> bool:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pa.types.is_integer(values.type) or bool(pc.all(pc.equal(values, pc.floor(values))).as_py())


# --------------------------------------------------------------------------------------------- label, clients and model


def _settle_label(table: Table, name: str, task: Task | None, can_ask: bool) -> Label:
    """What the label is, as --task says, as its values leave no doubt, or as the user answers."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from selffl.data.labels import label_of

    kind, values = table.interpret_column(name)
    num_distinct = pc.count_distinct(values).as_py()
    if num_distinct < 2:
        raise DataError(f"{table.place}: {name} is {values[0].as_py()!r} in every row; expected something to predict.")
    if task is None and kind == "words" and num_distinct > MAX_CLASSES_UNASKED:
        raise DataError(
            f"{table.place}: {name} holds {num_distinct:,} different words, such as {_shorten(values[0].as_py())!r}; "
            f"expected numbers, or at most {MAX_CLASSES_UNASKED} classes. Pass --task classes if they are classes."
        )
    if task is None and kind == "number":
        if pa.types.is_boolean(table.columns[name].type) or (num_distinct == 2 and _is_whole(values)):
            task = "classes"
        else:
            task = _ask_task(table, name, values, can_ask) if _is_whole(values) else "values"
    return label_of(table, name, task)


def _ask_task(table: Table, name: str, values: Any, can_ask: bool) -> Task:
    """What whole numbers stand for, which nothing but the user can say."""
    distinct = sorted(values.unique().to_pylist())
    shown = ", ".join(f"{value:g}" for value in distinct[:NUM_SHOWN_CLASSES])
    found = f"{name} holds {len(distinct):,} different whole numbers ({shown}"
    found += ")" if len(distinct) <= NUM_SHOWN_CLASSES else f", … {distinct[-1]:g})"
    tasks = {task: meaning for task, meaning in TASKS.items() if task != "counts" or distinct[0] >= 0}
    if not (can_ask and sys.stdin.isatty()):
        *first, last = (f"--task {task}" for task in tasks)
        either = f"{', '.join(first)} or {last}"
        raise ConfigError(f"{table.place}: {found}; expected to be told what they are. Pass {either}.")
    typer.echo(f"{found}. What are they?")
    for task, meaning in tasks.items():
        typer.echo(f"  {task:<8} {meaning}")
    answer = typer.prompt("Task")
    while answer not in tasks:
        answer = typer.prompt(f"{answer!r} is none of {', '.join(tasks)}. Task")
    return next(task for task in tasks if task == answer)


def _client_sizes(table: Table, client: str) -> list[int]:
    """The number of rows of each client."""
    table.ids(client)  # which refuses what cannot be an id
    sizes: list[int] = table.words(client).value_counts().field("counts").to_pylist()
    if len(sizes) < 2:
        raise DataError(f"{table.place} has one {client}; expected rows of at least two clients.")
    if max(sizes) == 1 and len(sizes) >= MIN_NUMBERED_ROWS:
        raise DataError(
            f"{table.place}: {client} is another in every row; expected clients with several rows each. Name the "
            "column of client ids with --client."
        )
    return sizes


def _fit(
    table: Table, target: Label, features: Sequence[str], client: str, missing: MissingRule, num_dropped: int
) -> Preparation:
    """The preparation of all rows, as training rows will have it up to their choice."""
    from selffl.data.preparation import Preparation
    from selffl.data.profile import Profile, profile_column

    columns = {name: profile_column(table, name) for name in features}
    profile = Profile(columns, target.name, target.task, target.classes, client=client)
    return Preparation.fit(profile, missing=missing, num_dropped=num_dropped)


def _learning_rate(table: Table, target: Label, num_inputs: int) -> float:
    """The task's rate, or less where many inputs or large counts make the loss steep.

    The curvature of a row's loss in the output (1/2 at most for cross-entropy, 2 for squared errors, the count for
    Poisson's) times the square of its inputs (about one each, and the bias) bounds a step that does not overshoot.
    """
    mean_count = float(table.numbers(target.name).mean()) if target.task == "counts" else 0.0
    curvature = {"classes": 0.5, "values": 2.0, "counts": mean_count}[target.task]
    bound = 1.0 / (max(curvature, 1e-6) * (1 + num_inputs))
    return min(MAX_RATES[target.task], float(f"{bound:.0e}"))


# ---------------------------------------------------------------------------------------------------------- the report


def _reason(facts: Mapping[str, Any]) -> str:
    """Why the model is a linear one or a network."""
    return (
        f"The median client has {facts['median_rows']:,} row{'s' if facts['median_rows'] > 1 else ''} for "
        f"{facts['inputs']:,} input{'s' if facts['inputs'] > 1 else ''}; a network wants {MIN_ROWS_FOR_NETWORK} and "
        f"{MIN_ROWS_PER_INPUT} for each input."
    )


def _summary(path: Path, preparation: Preparation, facts: Mapping[str, Any]) -> list[str]:
    from selffl.data.tables import PLURAL

    lines = [("Rows", f"{facts['rows']:,} of {facts['clients']:,} clients, from {path}")]
    label = f"{facts['label']}, {facts['task']}"
    if facts["classes"]:
        shown = ", ".join(map(str, facts["classes"][:NUM_SHOWN_CLASSES]))
        label += f": {shown}{', …' if len(facts['classes']) > NUM_SHOWN_CLASSES else ''}"
    lines.append(("Label", label))
    for kind, plural in PLURAL.items():
        found = [column for column in preparation.columns if column.kind == kind]
        if found:
            each = [f"{column.name} ({len(column.words)})" if kind == "words" else column.name for column in found]
            lines.append(("Features", f"{plural}: {', '.join(each)}"))
    lines += [("Left out", f"{name or '(no name)'}: {reason}") for name, reason in facts["left_out"].items()]
    missing = facts["missing"]
    if missing["dropped"]:
        lines.append(("Missing", f"{missing['dropped']:,} rows dropped for missing values"))
    if missing["imputed"]:
        each = [f"{name} ({number:,})" for name, number in missing["imputed"].items()]
        lines.append(("Missing", f"imputed by the mean, with an input that says where: {', '.join(each)}"))
    lines.append(("Model", f"{facts['model']}. {_reason(facts)}"))
    return console.align(lines)


def _shorten(text: str) -> str:
    return text if len(text) <= 30 else f"{text[:29]}…"


def _literal(value: Any) -> str:
    """A text as Python and TOML write it, in double quotes."""
    return json.dumps(value, ensure_ascii=False)


def _list_literal(names: Sequence[str]) -> str:
    """A list as Python writes it, on as many lines as it needs."""
    if len(line := _literal(list(names))) <= CODE_WIDTH:
        return line
    lines = [""]
    for name in names:
        cell = f"{_literal(name)},"
        if lines[-1] and len(lines[-1]) + len(cell) >= CODE_WIDTH:
            lines.append("")
        lines[-1] += f" {cell}" if lines[-1] else f"    {cell}"
    return "\n".join(["[", *lines, "]"])
