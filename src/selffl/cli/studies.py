"""`selffl demo` and `selffl paper`: studies, their records and their pages."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from selffl.cli import console, live, names
from selffl.cli.report import print_verdict, write_report
from selffl.cli.training import VerboseRuns
from selffl.errors import DataError, check_known

if TYPE_CHECKING:
    from selffl.reports.record import StudyRecord

BARS = (
    TextColumn("{task.description}"),
    BarColumn(bar_width=24),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TimeRemainingColumn(),
    TextColumn("{task.fields[now]}", style="dim"),
)

app = typer.Typer()
paper_app = typer.Typer(
    help="The studies of the paper.\n\nExample: selffl paper run limits --quick", no_args_is_help=True
)
app.add_typer(paper_app, name="paper")


@app.command("demo")
def demo_command(
    quick: Annotated[bool, typer.Option("--quick", help="Two seeds and a fifth of the rounds.")] = False,
    folder: Annotated[Path, typer.Option("--out", help="Folder for the table, the figures and the report.")] = Path(
        "runs/demo"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the study's record as JSON.")] = False,
    verbose: VerboseRuns = False,
) -> None:
    """Train Self-FL and baselines on embedded handwritten digits; ends with a table and an HTML page.

    Example: selffl demo --out runs/demo
    """
    from selffl.reports.record import load_studies
    from selffl.reports.runner import run_studies

    console.check_folder(folder)
    words = ["selffl", "demo", *(["--quick"] if quick else []), "--out", str(folder)]
    with (
        console.going_on(words, "Runs that are done are kept."),
        live.watching_arms("Handwritten digits over forty clients", folder / "demo" / "runs", verbose) as progress,
    ):
        run_studies(
            ["demo"],
            folder,
            quick=quick,
            on_progress=lambda _, done, total, now: progress(done, total, now),
            on_record=lambda _: None,
        )
    record = load_studies(folder / "demo")[0][1]
    with console.json_only(as_json):
        if not as_json:
            _print_verdicts(record)
        print_table(record)
        print_verdict(folder / "demo")
        write_report([folder], folder / "report.html")
    if as_json:
        print_record(record, folder / "report.html")


def print_record(record: StudyRecord, report: Path) -> None:
    """A study's record and where its page is, as JSON."""
    print(json.dumps(as_content(record) | {"report": str(report)}, ensure_ascii=False))


def as_content(record: StudyRecord) -> dict[str, Any]:
    """What there is to say of a study in JSON, without what made it."""
    names_of = ("id", "title", "setting", "command", "is_quick", "seconds", "claims", "table")
    return {name: getattr(record, name) for name in names_of}


def print_table(record: StudyRecord) -> None:
    """The study's table, in 80 columns where it can be; a narrower terminal shows the first of its columns.

    The best of each column of scores is bold; a column without any number is left out.
    """
    known = [name for name in record.table[0] if any(row[name] != "–" for row in record.table)]
    columns = {name: textwrap.fill(name, 10) for name in known}  # long names on two lines, numbers on one
    best = best_cells(record.table)
    room, shown = console.out.width + 1, []  # the last column needs no space after it
    for name, heading in columns.items():
        room -= 1 + max(map(len, [*heading.split("\n"), *(row[name] for row in record.table)]))
        if room < 0:
            break
        shown.append(name)
    shown = shown or list(columns)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for name in shown:
        table.add_column(columns[name], justify="left" if name == shown[0] else "right", no_wrap=True)
    for place, row in enumerate(record.table):
        table.add_row(*(Text(row[name], style="bold" if (place, name) in best else "") for name in shown))
    console.out.print(record.title, style="bold", highlight=False, markup=False)
    console.out.print(table)
    if len(shown) < len(columns):
        console.tell(console.out, f"Not shown for want of room: {', '.join(list(columns)[len(shown) :])}.")


def best_cells(table: Sequence[Mapping[str, str]]) -> set[tuple[int, str]]:
    """The best of each column of scores, by row and column, of a table that compares methods; ties are all best."""
    from selffl.studies.comparison import metrics_of
    from selffl.training.metrics import HIGHER_IS_BETTER, name_of, read_number

    leading = list(table[0])[1]  # after the method's name
    metric = next((name for name in HIGHER_IS_BETTER if name_of(name) == leading), None)
    if metric is None or len(table) < 2:
        return set()
    found = set()
    for column in metrics_of(metric).values():
        numbers = {
            place: read_number(row[column].split()[0])
            for place, row in enumerate(table)
            if row.get(column, "–") not in ("–", "diverged")
        }
        pick = max if HIGHER_IS_BETTER[metric] else min
        found |= {(place, column) for place, value in numbers.items() if value == pick(numbers.values())}
    return found


LIST_NOTES = (
    "Took: when the results of the documentation were made; – where a study has not been run in full. OCR letters "
    "stand in for FEMNIST and rated snippets for Sent140, unless EMNIST or Sentiment140 is found; made-up devices "
    "stand in for the paper's private audio."
)


@paper_app.command("list")
def paper_list(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """List the studies that can be run, and how long they take.

    Example: selffl paper list
    """
    from selffl.studies import STUDIES

    if as_json:
        fields = ("id", "title", "paper", "setting", "took")
        print(json.dumps([{name: getattr(s, name) for name in fields} for s in STUDIES.values()], ensure_ascii=False))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("id", "took", "in the paper", "subject"):
        table.add_column(name, no_wrap=name == "id")
    for study in STUDIES.values():
        table.add_row(study.id, study.took or "–", study.paper, study.title.partition(" (")[0])  # said once, below
    console.out.print(table)
    console.tell(console.out, LIST_NOTES)


@paper_app.command("run")
def paper_run(
    ids: Annotated[
        list[str],
        typer.Argument(
            help="Studies to run; see `selffl paper list`.", metavar="ID...", autocompletion=names.paper_study
        ),
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats: a first look in seconds.")] = False,
    folder: Annotated[Path, typer.Option("--out", help="Folder for tables, figures and the report.")] = Path(
        "runs/paper"
    ),
    device: Annotated[str, typer.Option(help="Where models train: cpu or cuda.", autocompletion=names.device)] = "cpu",
    processes: Annotated[
        int | None, typer.Option(min=1, help="Training runs side by side in each study; without it, the cores.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Repeats of studies that train; without it, five, or two with --quick.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the studies' records as JSON.")] = False,
) -> None:
    """Run studies of the paper; each leaves figures, a CSV, a Markdown table, and all together one HTML page.

    Example: selffl paper run limits convergence --quick --out runs/first-look
    """
    from selffl.reports.record import load_studies
    from selffl.runs.environment import check_device
    from selffl.studies import STUDIES

    for name in ids:
        check_known("study", name, STUDIES)
    console.check_folder(folder)
    check_device(device)
    words = ["selffl", "paper", "run", *ids, *(["--quick"] if quick else []), "--out", str(folder)]
    for option, value in (("--processes", processes), ("--seeds", seeds)):
        words += [option, str(value)] if value else []
    words += ["--device", device] if device != "cpu" else []
    chosen = list(dict.fromkeys(ids))
    with console.json_only(as_json):
        with console.going_on(words, "Studies and runs that are done are kept."):
            _run_with_bars(chosen, folder, quick=quick, device=device, num_processes=processes, num_seeds=seeds)
        write_report([folder], folder / "report.html")
    if as_json:
        records = [as_content(load_studies(folder / name)[0][1]) for name in chosen]
        print(json.dumps({"studies": records, "report": str(folder / "report.html")}, ensure_ascii=False))


@paper_app.command("page")
def paper_page(
    folder: Annotated[Path, typer.Argument(help="Folder that `selffl paper run` has written.")],
    target: Annotated[
        Path, typer.Option("--out", "-o", help="Markdown file of the summary; studies go into a folder of its name.")
    ] = Path("docs/results.md"),
) -> None:
    """Write the results pages of the documentation from run records: a summary, and a page for each study.

    Figures go beside the summary. Pages that are there are brought up to date: what they say of other studies stays.

    Example: selffl paper page runs/paper -o docs/results.md
    """
    from selffl.reports.record import load_studies
    from selffl.reports.results import folder_of, results_pages
    from selffl.state.files import atomic_write

    studies = load_studies(folder)
    console.check_target(target)
    pictures = {
        place / f"{figure['name']}.svg": f"{record.id}-{figure['name']}.svg"
        for place, record in studies
        for figure in record.figures
    }
    for picture in pictures:
        if not picture.is_file():
            raise DataError(f"{picture} is gone; expected the figure that the record names. Run the study again.")
    pages = results_pages(studies, "../figures", target)
    for place in (target.parent / "figures", folder_of(target)):
        place.mkdir(exist_ok=True)
    for picture, name in pictures.items():
        shutil.copyfile(picture, target.parent / "figures" / name)
    texts = {folder_of(target) / f"{name}.md": f"{text}\n" for name, text in pages.studies.items()}
    for path, text in (texts | {target: pages.summary}).items():
        with atomic_write(path) as partial:  # a page may be the only copy of what it says
            partial.write_text(text, encoding="utf-8")
    console.tell(console.out, f"Results: {target}, and a page for each study in {folder_of(target)}")


def _run_with_bars(ids: list[str], folder: Path, **options: Any) -> None:
    """A progress bar for each study, then their verdicts; without a terminal, each verdict as soon as it is known.

    ``options`` are those of `run_studies`.
    """
    from selffl.reports.runner import run_studies

    finished: list[StudyRecord] = []
    with Progress(*BARS, console=console.err, disable=not console.err.is_terminal) as bars:
        tasks = {name: bars.add_task(name, total=None, now="waits", start=False) for name in ids}

        def on_progress(name: str, done: int, total: int, now: str) -> None:
            if done == 0:
                bars.start_task(tasks[name])
            bars.update(tasks[name], completed=done, total=total, now=now)

        def on_record(record: StudyRecord) -> None:
            bars.stop_task(tasks[record.id])
            if console.err.is_terminal:
                finished.append(record)  # two consoles on one screen would write over each other
            else:
                _print_verdicts(record)

        run_studies(ids, folder, on_progress=on_progress, on_record=on_record, **options)
    for record in sorted(finished, key=lambda record: ids.index(record.id)):
        _print_verdicts(record)


def _print_verdicts(record: StudyRecord) -> None:
    from selffl.studies.result import verdict_word

    console.out.print(f"[bold]{record.id}[/bold], {record.seconds:.0f} s", highlight=False)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", no_wrap=True, min_width=14)
    grid.add_column()
    for claim in record.claims:
        colour = {"holds": "green", "does not hold": "red"}.get(claim["verdict"], "yellow")
        word, text = Text(verdict_word(claim["text"], claim["verdict"]), style=colour), Text(claim["text"])
        grid.add_row(word, text)
        if not console.out.is_terminal:  # where a sentence is one line
            console.tell(console.out, Text(f"{word.plain:>14}  {text.plain}"))
    if console.out.is_terminal:
        console.out.print(grid)
