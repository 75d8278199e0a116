"""`selffl welcome`: a personal model for a client that comes when training is over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from selffl.cli import console
from selffl.errors import ConfigError

app = typer.Typer()


@app.command("welcome")
def welcome_command(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.", metavar="RUN")],
    table: Annotated[
        Path, typer.Argument(help="The newcomer's rows, with a header: .csv, or .parquet.", metavar="ROWS.csv")
    ],
    label: Annotated[str, typer.Option(help="Column of the labels.")] = "label",
    features: Annotated[
        str | None,
        typer.Option(
            help="Columns of the features, with commas, in the order of those that were trained on; all others."
        ),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File to write; without it, newcomer.safetensors, if there is none yet."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON what was written.")] = False,
) -> None:
    """Write a personal model for a client that never took part, from the global model and its own rows.

    The file is a plain state_dict, for module.load_state_dict. The run stays as it is, and keeps nothing of the rows.

    Example: selffl welcome runs/wards new-ward.csv --label outcome --out new-ward.safetensors
    """
    from selffl.data.tables import Columns, read_table
    from selffl.runs.export import check_ending, save_state_dict
    from selffl.runs.reopen import load

    path = target or Path("newcomer.safetensors")
    if target is None and path.exists():
        raise ConfigError(f"{path} is already there; expected another name. Give one by --out.")
    check_ending(path)
    console.check_target(path)
    chosen = None if features is None else [name.strip() for name in features.split(",")]
    rows = read_table(table, Columns(label, features=chosen))
    run = load(folder)
    model = run.welcome((rows.x, rows.y))
    about = {"algorithm": run.config.algorithm, "data": run.config.data, "round": run.summary.get("rounds")}
    save_state_dict(path, model.state_dict(), about | {"client": table.stem, "rows": len(rows.y)})
    size = path.stat().st_size
    if as_json:
        print(json.dumps({"file": str(path), "bytes": size, "rows": len(rows.y)}, ensure_ascii=False))
        return
    number = f"{len(rows.y):,} row{'' if len(rows.y) == 1 else 's'}"
    console.tell(console.out, f"A model from {number} of {table}: {path} ({size / 1024:,.0f} KiB)")
