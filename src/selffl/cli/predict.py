"""`selffl predict`: answers to new rows, each by its own client's model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from selffl.cli import console
from selffl.cli.export import Trusted
from selffl.cli.init import DecimalOfFile
from selffl.errors import ConfigError, DataError

app = typer.Typer()

WRITERS = (".csv", ".parquet")


@app.command("predict")
def predict_command(
    folder: Annotated[
        Path, typer.Argument(help="Folder of a run, or a file of personal models (selffl export).", metavar="RUN")
    ],
    table: Annotated[Path, typer.Argument(help="New rows, with a header: .csv or .parquet.", metavar="ROWS.csv")],
    client: Annotated[
        str | None, typer.Option(help="Column with the client's id; without it, the column of the training rows.")
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File to write, .csv or .parquet; without it, CSV on standard output."),
    ] = None,
    decimal: DecimalOfFile = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the columns of the rows, too.")] = False,
    trusted: Trusted = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Predict for every row by its own client's model, in the classes and units of your table.

    The global model predicts for rows of new clients; the column model says which model it was.

    Example: selffl predict runs/wards new-rows.csv --client ward -o answers.csv
    """
    from selffl.data.readers import read_table
    from selffl.runs.export import PersonalModels
    from selffl.runs.reopen import load

    if target is not None:
        if target.suffix not in WRITERS:
            raise ConfigError(
                f"the output file is named {target}; expected a name that ends in {' or '.join(WRITERS)}."
            )
        if target.resolve() == table.resolve():
            raise ConfigError(f"{target} is the file that is read; expected another one to write.")
        console.check_target(target)
    elif as_json:
        raise ConfigError("--json says what was written, and nothing is without --out; expected --out FILE.")
    with console.options_in_messages():
        source: Any = PersonalModels(folder) if folder.is_file() else load(folder, trusted=trusted)
    if source.preparation is None or not source.preparation.columns:
        raise DataError(
            f"{folder} was trained on arrays, which have no column names; expected a run on a table. Use "
            "run.predict(array) in Python."
        )
    texts = [*source.preparation.texts, *filter(None, [client])]
    with console.options_in_messages():
        rows = read_table(table, texts, decimal or source.preparation.decimal)
        if len(rows) == 0:
            raise DataError(f"{table} has a header but no rows; expected rows to answer.")
        answers = source.predict(rows, client)
    written = _beside(rows, answers) if keep else answers
    _write(written, target)
    counts = Counter(answers.column("model").to_pylist())
    if target is None:
        return
    if as_json:
        print(json.dumps({"file": str(target), "rows": len(answers), **counts}, ensure_ascii=False))
        return
    whose = [
        f"{counts[kind]:,} by {name}"
        for kind, name in (("personal", "personal models"), ("global", "the global model"))
        if counts[kind]
    ]
    console.tell_path(console.out, f"{len(answers):,} rows answered, {' and '.join(whose)}: ", target)


def _beside(rows: Any, answers: Any) -> Any:
    """The columns of the rows as they were read, and the answers."""
    import pyarrow as pa

    taken = set(rows.columns)
    names = {name: name if name not in taken else f"{name} (answer)" for name in answers.column_names}
    own = {name: rows.columns[name] for name in rows.columns}
    added = {
        names[name]: answers.column(name)
        for name in answers.column_names
        if name == "prediction" or name == "model" or name.startswith("probability_")
    }
    return pa.table(own | added)


def _write(table: Any, target: Path | None) -> None:
    import sys

    import pyarrow as pa
    from pyarrow import csv, parquet

    from selffl.state.files import atomic_write

    # Plain text in place of dictionaries, which not every reader takes.
    kinds = [kind.value_type if pa.types.is_dictionary(kind) else kind for kind in table.schema.types]
    plain = table.cast(pa.schema(list(zip(table.column_names, kinds, strict=True))))
    if target is None:
        csv.write_csv(plain, sys.stdout.buffer)
        return
    with atomic_write(target) as partial:
        if target.suffix == ".csv":
            csv.write_csv(plain, partial)
        else:
            parquet.write_table(plain, partial)
