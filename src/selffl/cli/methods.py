"""`selffl methods`: what can be trained with, a line for each, without waiting for torch."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from selffl.cli import console, names

app = typer.Typer()

OWN = "this library"
ALONE = "each client alone"  # in place of a source, where there is nothing federated to publish
PERSONAL = {"model": "whole model", "layers": "some layers", "nothing": "nothing"}  # what a client has of its own


@app.command("methods")
def methods_command(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """List the methods: name, the personal part, and the publication.

    Example: selffl methods
    """
    rows = [
        {
            "name": name,
            "personalises": personalises,
            "source": names.SOURCES[name] or (OWN if names.is_federated(name) else None),
            "is_federated": names.is_federated(name),
            "is_default": name == names.DEFAULT,
        }
        for name, personalises in names.PERSONALISES.items()
    ]
    if as_json:
        print(json.dumps(rows, ensure_ascii=False))
        return
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("method", "personal part", "source"):
        table.add_column(heading, no_wrap=True)
    for row in rows:
        style = "bold" if row["is_default"] else ""
        source = f"{row['source'] or ALONE}{', the default' if row['is_default'] else ''}"
        table.add_row(Text(str(row["name"]), style=style), PERSONAL[str(row["personalises"])], source)
    console.out.print(table, highlight=False)
    console.tell(console.out, "Train with one: selffl run digits --algorithm NAME. Several: selffl compare digits.")
