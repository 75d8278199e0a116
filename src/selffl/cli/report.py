"""`selffl report`, `selffl figures` and `selffl serve`: what runs and studies have found, to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from selffl.cli import console

app = typer.Typer()


@app.command("report")
def report_command(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of runs, comparisons or studies, here or over Flower.", metavar="DIR...")
    ],
    target: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path("report.html"),
) -> None:
    """Make one self-contained interactive page from runs and studies; a run may still be going on.

    Example: selffl report runs/compare-digits -o report.html
    """
    console.check_target(target)
    write_report(folders, target)


def write_report(folders: list[Path], target: Path) -> None:
    """One HTML page from all records in the folders."""
    from selffl.reports.collect import collect
    from selffl.reports.page import render

    target.write_text(render(collect(folders)), encoding="utf-8")
    console.tell(console.out, f"Report: {target}")
