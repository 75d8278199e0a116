"""The command line: exit code 0 on success, 2 on a user's mistake (one line), 1 on a fault of ours."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import sys
import textwrap
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from selffl._version import __version__
from selffl.errors import ConfigError, DataError, SelfFLError, unknown_name

if TYPE_CHECKING:
    from selffl.reports.record import StudyRecord

app = typer.Typer(
    name="selffl",
    help="Personalised federated learning that decides from measured uncertainty how far each client trusts itself.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
paper_app = typer.Typer(help="The studies of the paper.", no_args_is_help=True)
app.add_typer(paper_app, name="paper")

INTERRUPTED = 130  # the shell's code for it
STOPPED = "stopped. What was finished is kept."


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to `main`: rich would end with exit code 1."""
        raise BrokenPipeError


out = _Console()
err = _Console(stderr=True)


class FormChoice(StrEnum):
    """Forms of the posterior."""

    exact = "exact"
    paper = "paper"


class MethodChoice(StrEnum):
    """Estimators of the inter-client variance."""

    reml = "reml"
    dl = "dl"


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"selffl {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options that every command has."""


@app.command("demo")
def demo_command(
    quick: Annotated[bool, typer.Option("--quick", help="Two seeds and twenty rounds.")] = False,
    folder: Annotated[Path, typer.Option("--out", help="Folder for the table, the figures and the report.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Train Self-FL and its rivals on embedded handwritten digits; ends with a table and an HTML page.

    Example: selffl demo --out runs/demo
    """
    from selffl.reports.record import load_studies

    _check_folder(folder)
    _run_with_bars(["demo"], folder, quick=quick)
    record = load_studies(folder / "demo")[0][1]
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for index, name in enumerate(record.table[0]):
        # Long names on two lines, numbers on one: 80 columns are enough.
        table.add_column(textwrap.fill(name, 10), justify="left" if index == 0 else "right", no_wrap=True)
    for row in record.table:
        table.add_row(*row.values())
    out.print(record.title, style="bold", highlight=False)
    out.print(table)
    _write_report([folder], folder / "report.html")


@app.command("posterior")
def posterior_command(
    file: Annotated[Path, typer.Argument(help="CSV file with the columns client, estimate, variance.")],
    inter_variance: Annotated[
        float | None, typer.Option(help="Variance between clients, σ₀². Without it, it is estimated.")
    ] = None,
    method: Annotated[
        MethodChoice | None, typer.Option(help="How to estimate σ₀²: reml (the default) or dl (DerSimonian–Laird).")
    ] = None,
    form: Annotated[
        FormChoice, typer.Option(help="The two-level model itself (exact), or the paper's postulated one (paper).")
    ] = FormChoice.exact,
    level: Annotated[float, typer.Option(help="Level of the intervals.")] = 0.95,
    plot: Annotated[Path | None, typer.Option(help="Draw a forest plot into this file (.png, .svg, .pdf).")] = None,
    save: Annotated[Path | None, typer.Option("--out", help="Write the whole table to this CSV file.")] = None,
    rows: Annotated[int, typer.Option(min=0, help="How many clients to show.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary and the shown rows as JSON.")] = False,
) -> None:
    """Shrink each client's estimate towards the others', and say who gains.

    Intervals take σ₀² as known: where it is estimated from a few clients, they are too narrow.

    Example: selffl posterior hospitals.csv --plot forest.png --out shrunk.csv
    """
    from selffl.data.estimates import read_estimates
    from selffl.reports.shrinkage import Shrinkage, check_ending

    for target in (plot, save):
        _check_target(target)
        if target is not None and target.resolve() == file.resolve():
            raise ConfigError(f"{target} is the file that is read; expected another one to write.")
    if plot is not None:
        check_ending(plot)
    if method is not None and inter_variance is not None:
        raise ConfigError("--method says how to estimate what --inter-variance already gives; leave one of them out.")
    found = Shrinkage.of(read_estimates(file), inter_variance, (method or MethodChoice.reml).value, form.value, level)
    if as_json:
        shown = [_without_infinity(row) for row in found.rows(rows)]
        print(json.dumps(_without_infinity(found.summary) | {"rows": shown}, ensure_ascii=False, allow_nan=False))
    else:
        _print_shrinkage(found.summary, list(found.rows(rows)), level)
    if save is not None:
        found.save(save)
        _tell(err, f"All {found.summary['clients']:,} clients: {save}")
    if plot is not None:
        found.plot(plot)
        _tell(err, f"Forest plot: {plot}")


def _without_infinity(row: dict[str, object]) -> dict[str, object]:
    """JSON has no infinity; a gain without bound is null."""
    return {key: None if isinstance(value, float) and math.isinf(value) else value for key, value in row.items()}


def _print_shrinkage(summary: dict[str, object], shown: list[dict[str, object]], level: float) -> None:
    out.print(
        f"{summary['clients']:,} client{'s' if summary['clients'] != 1 else ''}, {summary['form']} form.  "
        f"Between-client variance σ₀² = {summary['inter_variance']:.4g} ({summary['inter_variance_source']}).  "
        f"Global mean {summary['global_mean']:.4g} [{summary['global_low']:.4g}, {summary['global_high']:.4g}].  "
        f"Median gain {summary['median_gain']:.2f}×; {summary['alone_is_as_good']:,} do as well alone.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if shown:
        table = Table(box=None, header_style="bold", pad_edge=False)
        table.add_column("client")
        for name in ("own", "s.e.", "shrunk", f"{100 * level:g} % interval"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        for row in shown:
            style = "dim" if row["verdict"] == "alone is as good" else ""
            table.add_row(
                Text(str(row["client"])),  # as it is: a name in brackets is no markup
                f"{row['estimate']:.4g}",
                f"{float(row['variance']) ** 0.5:.2g}",  # type: ignore[arg-type]
                f"{row['shrunk']:.4g}",
                f"{row['low']:.4g} … {row['high']:.4g}",
                str(row["verdict"]),
                style=style,
            )
        out.print(table)
    if shown and summary["inter_variance_source"] != "given":
        out.print("Intervals take σ₀² as known: estimated from few clients, they are too narrow.", highlight=False)
    hidden = int(str(summary["clients"])) - len(shown)
    if hidden and shown:
        out.print(f"… and {hidden:,} more; --out FILE.csv writes them all.", highlight=False)


@paper_app.command("list")
def paper_list(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """List the studies that can be run.

    Example: selffl paper list
    """
    from selffl.studies import STUDIES

    if as_json:
        fields = ("id", "title", "paper", "setting")
        print(json.dumps([{name: getattr(s, name) for name in fields} for s in STUDIES.values()], ensure_ascii=False))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("id", "in the paper", "what it shows"):
        table.add_column(name, no_wrap=name == "id")
    for study in STUDIES.values():
        table.add_row(study.id, study.paper, study.title)
    out.print(table)


@paper_app.command("run")
def paper_run(
    ids: Annotated[list[str], typer.Argument(help="Studies to run; see `selffl paper list`.", metavar="ID...")],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats: a first look in seconds.")] = False,
    folder: Annotated[Path, typer.Option("--out", help="Folder for tables, figures and the report.")] = Path(
        "runs/paper"
    ),
) -> None:
    """Run studies of the paper; each leaves figures, a CSV, a Markdown table, and all together one HTML page.

    Example: selffl paper run limits convergence --quick --out runs/first-look
    """
    from selffl.studies import STUDIES

    for name in ids:
        if name not in STUDIES:
            raise unknown_name("study", name, STUDIES)
    _check_folder(folder)
    _run_with_bars(list(dict.fromkeys(ids)), folder, quick=quick)
    _write_report([folder], folder / "report.html")


def _run_with_bars(ids: list[str], folder: Path, *, quick: bool) -> None:
    """A progress bar for each study, then their verdicts; without a terminal, each verdict as soon as it is known."""
    from selffl.reports.runner import run_studies

    finished: list[StudyRecord] = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}", style="dim"),
        console=err,
        disable=not err.is_terminal,
    ) as bars:
        tasks = {name: bars.add_task(name, total=None, now="waits", start=False) for name in ids}

        def on_progress(name: str, done: int, total: int, now: str) -> None:
            if done == 0:
                bars.start_task(tasks[name])
            bars.update(tasks[name], completed=done, total=total, now=now)

        def on_record(record: StudyRecord) -> None:
            bars.stop_task(tasks[record.id])
            if err.is_terminal:
                finished.append(record)  # two consoles on one screen would write over each other
            else:
                _print_verdicts(record)

        run_studies(ids, folder, quick=quick, on_progress=on_progress, on_record=on_record)
    for record in sorted(finished, key=lambda record: ids.index(record.id)):
        _print_verdicts(record)


def _print_verdicts(record: StudyRecord) -> None:
    out.print(f"[bold]{record.id}[/bold], {record.seconds:.0f} s", highlight=False)
    for claim in record.claims:
        colour = {"holds": "green", "does not hold": "red"}.get(claim["verdict"], "yellow")
        out.print(f"[{colour}]{claim['verdict']:>14}[/]  {claim['text']}", highlight=False, soft_wrap=True)


@paper_app.command("page")
def paper_page(
    folder: Annotated[Path, typer.Argument(help="Folder that `selffl paper run` has written.")],
    target: Annotated[Path, typer.Option("--out", "-o", help="Markdown file to write.")] = Path("docs/results.md"),
) -> None:
    """Write the results page of the documentation from run records, with its figures beside it.

    Example: selffl paper page runs/paper -o docs/results.md
    """
    from selffl.reports.page import results_page
    from selffl.reports.record import load_studies

    studies = load_studies(folder)
    _check_target(target)
    pictures = {
        place / f"{figure['name']}.svg": f"{record.id}-{figure['name']}.svg"
        for place, record in studies
        for figure in record.figures
    }
    for picture in pictures:
        if not picture.is_file():
            raise DataError(f"{picture} is gone; expected the figure that the record names. Run the study again.")
    (target.parent / "figures").mkdir(exist_ok=True)
    for picture, name in pictures.items():
        shutil.copyfile(picture, target.parent / "figures" / name)
    target.write_text(results_page(studies, "figures"), encoding="utf-8")
    _tell(out, f"Results page: {target}")


@app.command("report")
def report_command(
    folders: Annotated[list[Path], typer.Argument(help="Folders with study records.", metavar="DIR...")],
    target: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path("report.html"),
) -> None:
    """Make one self-contained HTML page from the records of finished studies.

    Example: selffl report runs/paper -o report.html
    """
    _check_target(target)
    _write_report(folders, target)


def _write_report(folders: list[Path], target: Path) -> None:
    from selffl.reports.page import html
    from selffl.reports.record import load_studies

    studies = [entry for folder in folders for entry in load_studies(folder)]
    target.write_text(html(studies, "Self-FL, measured"), encoding="utf-8")
    _tell(out, f"Report: {target}")


def _tell(console: Console, text: str) -> None:
    """A line as it is: not wrapped, not coloured, no markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _check_folder(folder: Path) -> None:
    """Refuse an output folder that is a file, or would lie inside one."""
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise ConfigError(f"{place} is a file; expected a folder to write into. Give another --out.")


def _check_target(target: Path | None) -> None:
    """Refuse a file that cannot be written before any work is done."""
    if target is None:
        return
    if target.is_dir():
        raise ConfigError(f"{target} is a folder; expected the name of a file to write.")
    if not target.parent.is_dir():
        raise ConfigError(f"the folder {target.parent} does not exist; make it, or give another file.")


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without σ shows a question mark, not a traceback
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # newer versions of the command-line library take the interruption for themselves
            _say(STOPPED)
    except SelfFLError as error:
        _say(str(error))
        code = 2
    except BrokenPipeError:
        # The reader of a pipe has seen enough (`| head`); what is left in the buffer has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except (KeyboardInterrupt, typer.Abort):
        _say(STOPPED)
        code = INTERRUPTED
    except Exception as error:
        # Usage errors come from the command-line library, whose classes moved between its versions.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        # A command without arguments has shown its help, which is no mistake.
        code = 0 if type(error).__name__ == "NoArgsIsHelpError" else 2
        if code:
            _say(f"{message().rstrip('.')}. See `selffl --help`.")
    sys.exit(code if isinstance(code, int) else 0)


def _say(text: str) -> None:
    print("selffl: " + " ".join(text.split()), file=sys.stderr)


if __name__ == "__main__":
    main()
