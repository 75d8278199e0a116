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
PERSONAL = {"model": "whole model", "layers": "some layers", "nothing": "nothing"}  # what a client has of its own

SOURCES = {
    "self-fl-auto": OWN,
    "self-fl": "Chen et al., NeurIPS 2022",
    "self-fl-exact": OWN,
    "self-fl-augmented": "Chen et al., NeurIPS 2022",
    "self-fl-cluster": "Chen et al., NeurIPS 2022",
    "self-fl-sums": OWN,
    "apfl": "Deng et al., arXiv 2003.13461, 2020",
    "ditto": "Li et al., ICML 2021",
    "ditto-equal": "Li et al., ICML 2021",
    "fedala": "Zhang et al., AAAI 2023",
    "fedavg": "McMahan et al., AISTATS 2017",
    "fedavg-equal": "McMahan et al., AISTATS 2017",
    "fedbabu": "Oh et al., ICLR 2022",
    "fedbn": "Li et al., ICLR 2021",
    "feddbe": "Zhang et al., NeurIPS 2023",
    "feddpa": "Yang et al., NeurIPS 2024",
    "fedpac": "Xu et al., ICLR 2023",
    "fedper": "Arivazhagan et al., arXiv 1912.00818, 2019",
    "fedprox": "Li et al., MLSys 2020",
    "fedrep": "Collins et al., ICML 2021",
    "fedrod": "Chen and Chao, ICLR 2022",
    "local": "each client alone",
    "perfedavg": "Fallah et al., NeurIPS 2020",
    "pfedbayes": "Zhang et al., ICML 2022",
    "pfedme": "Dinh et al., NeurIPS 2020",
    "scaffold": "Karimireddy et al., ICML 2020",
}


@app.command("methods")
def methods_command(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """List the methods: name, what each client has of its own, and where it was published.

    Example: selffl methods
    """
    rows = [
        {"name": name, "personalises": personalises, "source": SOURCES[name], "is_default": name == names.DEFAULT}
        for name, personalises in names.personalised().items()
    ]
    if as_json:
        print(json.dumps(rows, ensure_ascii=False))
        return
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("method", "of a client's own", "source"):
        table.add_column(heading, no_wrap=True)
    for row in rows:
        style = "bold" if row["is_default"] else ""
        source = f"{row['source']}, the default" if row["is_default"] else str(row["source"])
        table.add_row(Text(str(row["name"]), style=style), PERSONAL[str(row["personalises"])], source)
    console.out.print(table, highlight=False)
    console.tell(console.out, "Train with one: selffl run digits --algorithm NAME. Several: selffl compare digits.")
