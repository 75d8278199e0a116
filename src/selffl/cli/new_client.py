"""`selffl welcome`: a personal model for a client that comes when training is over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from selffl.cli import console
from selffl.cli.export import Trusted
from selffl.cli.init import DecimalOfFile, name_columns
from selffl.errors import ConfigError, pluralise

app = typer.Typer()


@app.command("welcome")
def welcome_command(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="RUN")],
    table: Annotated[
        Path, typer.Argument(help="The new client's rows, with a header: .csv, or .parquet.", metavar="ROWS.csv")
    ],
    label: Annotated[
        str | None, typer.Option(help="Column of the labels; without it, that of the training rows, or label.")
    ] = None,
    features: Annotated[
        str | None,
        typer.Option(
            help="Of a run on arrays: columns of the features, with commas, in the order of those trained on, or all "
            "others. A run on a table knows its columns."
        ),
    ] = None,
    decimal: DecimalOfFile = None,
    target: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File to write; without it, newcomer.safetensors, if there is none yet."),
    ] = None,
    trusted: Trusted = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON what was written.")] = False,
) -> None:
    """Write a personal model for a new client, from the global model and its own rows.

    The file is a plain state_dict, for module.load_state_dict. The run stays as it is, and keeps nothing of the rows.

    Example: selffl welcome runs/wards new-ward.csv --label outcome --out new-ward.safetensors
    """
    from selffl.runs.export import check_ending, save_state_dict
    from selffl.runs.reopen import load
    from selffl.training.answers import trained_module

    path = console.new_file(target, "newcomer.safetensors")
    check_ending(path)
    console.check_target(path)
    with console.options_in_messages():
        run = load(folder, trusted=trusted)
        rows, num_rows = _rows(run, table, label, features, decimal)
        model = run.welcome(rows)
    about = {"algorithm": run.config.algorithm, "data": run.config.data, "round": run.summary.get("rounds")}
    trained = trained_module(model)
    about |= run.describe_answers()
    save_state_dict(
        path, trained.state_dict(), about | {"client": table.stem, "rows": num_rows, "module": str(trained)}
    )
    size = path.stat().st_size
    if as_json:
        print(json.dumps({"file": str(path), "bytes": size, "rows": num_rows}, ensure_ascii=False))
        return
    console.tell_path(
        console.out, f"A model from {pluralise(num_rows, 'row')} of {table}: ", path, f" ({size / 1024:,.0f} KiB)"
    )


def _rows(run: Any, path: Path, label: str | None, features: str | None, decimal: Any) -> tuple[Any, int]:
    """What `Run.welcome` takes, and how many rows these are."""
    import numpy as np

    from selffl.data.labels import Label, encode_label, label_of
    from selffl.data.readers import read_table
    from selffl.data.roles import Roles

    chosen = name_columns("--features", features)
    known = run.preparation
    if known is not None and known.columns:
        if chosen is not None or label not in (None, known.label.name):
            raise ConfigError(
                f"the run knows its columns, and the label {known.label.name!r}; expected neither --features nor "
                "another --label. Name the columns of the file as those that were trained on."
            )
        rows = read_table(path, known.texts, decimal or known.decimal)
        return rows, len(rows)
    name = label or "label"
    rows = read_table(path, [name], decimal)
    columns = Roles(name, features=chosen).features_of(rows)
    x = np.column_stack([rows.numbers(column) for column in columns])
    classes = run.classes
    found = label_of(rows, name, "values") if classes is None else Label(name, "classes", tuple(classes))
    y = encode_label(rows, found)
    return (x.astype(np.float32), y if classes is None else np.asarray(classes, dtype=object)[y].tolist()), len(rows)
