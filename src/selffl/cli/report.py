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
        list[Path],
        typer.Argument(help="Folders of runs, comparisons or studies, here or over Flower.", metavar="DIR..."),
    ],
    target: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path("report.html"),
) -> None:
    """Make one self-contained interactive page from runs and studies, finished or not.

    Example: selffl report runs/compare-digits -o report.html
    """
    console.check_target(target)
    write_report(folders, target)


def write_report(folders: list[Path], target: Path) -> None:
    """One HTML page from all records in the folders."""
    from selffl.reports.collect import collect
    from selffl.reports.page import render

    target.write_text(render(collect(folders)), encoding="utf-8")
    console.tell_path(console.out, "Report: ", target)


def print_verdict(folder: Path) -> None:
    """What a comparison says in a sentence, and by which test."""
    from selffl.reports import sentences
    from selffl.reports.collect import collect

    for group in collect([folder]).groups[:1]:
        for text in (
            sentences.verdict(group),
            sentences.headline(group),
            sentences.majority(group),
            sentences.name_test(group),
        ):
            if text:
                console.tell(console.out, text)


@app.command("figures")
def figures_command(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs, comparisons or studies.", metavar="DIR...")],
    target: Annotated[Path, typer.Option("--out", help="Folder to write into.")] = Path("figures"),
    formats: Annotated[
        str, typer.Option("--format", help="Any of png, svg and pdf, with commas between them.")
    ] = "png,svg,pdf",
    width: Annotated[str, typer.Option(help="For one column of a paper, or across two: single or double.")] = "double",
) -> None:
    """Draw figures for a paper, and its table as LaTeX and Markdown.

    Example: selffl figures runs/compare-digits --out figures --format pdf --width single
    """
    from selffl.reports.paper_figures import save_paper_figures

    console.check_folder(target)
    names = [name.strip().lower() for name in formats.split(",") if name.strip()]
    written = save_paper_figures(folders, target, formats=names, width=width)  # type: ignore[arg-type]
    for path in written:
        console.tell_path(console.out, "", path)


@app.command("serve")
def serve_command(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders of runs or comparisons; they need not exist yet.", metavar="DIR..."),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: any free port.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen at; without it, this machine only.")] = "127.0.0.1",
) -> None:
    """Show the report of a run in a browser, during the run; Ctrl-C ends it.

    Example: selffl serve runs/compare-digits --port 8000
    """
    from selffl.errors import DataError
    from selffl.reports.live import ReportServer

    for folder in folders:
        if folder.exists() and not folder.is_dir():
            raise DataError(f"{folder} is not a folder; expected one that `selffl` has written or will write.")
    with ReportServer(folders, host, port) as server:
        if not server.is_on_loopback:
            console.tell(console.err, f"Anybody who can reach {host} can read this report: it has no password.")
        console.tell(console.out, f"Report: {server.url} (Ctrl-C ends it)")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            console.tell(console.err, "Stopped.")
