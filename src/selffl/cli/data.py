"""`selffl data`: which data sets there are, whether their files are whole, where to get them, what they look like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from selffl.cli import console, names
from selffl.cli.init import DecimalChoice, MissingChoice, TaskChoice, name_columns
from selffl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from selffl.data.dataset import DataSet
    from selffl.data.federation import Federation

data_app = typer.Typer(
    help="The data sets: which are here, whether they are complete, how to get them.\n\nExample: selffl data list",
    no_args_is_help=True,
)


def _folder(entry: DataSet) -> str | None:
    """Where a data set's files are, "built in" where it needs none, or None where one is not found."""
    try:
        found = [file.find() for file in entry.files()]
    except DataError:
        return None
    return str(found[0].parent) if found else "built in"


@data_app.command("list")
def data_list(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """List the data sets, and where their files were found.

    Example: selffl data list
    """
    from selffl.data import DATA_SETS

    if as_json:
        fields = ("name", "title", "clients", "stands_for", "licence", "home")
        entries = [
            {field: getattr(entry, field) for field in fields} | {"found": _folder(entry), "can_fetch": entry.can_fetch}
            for entry in DATA_SETS.values()
        ]
        print(json.dumps(entries, ensure_ascii=False))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("name", "clients", "content", "files"):
        table.add_column(name, no_wrap=name == "name", justify="right" if name == "clients" else "left")
    for entry in DATA_SETS.values():
        title = entry.title + (f" [yellow](a stand-in for {entry.stands_for})[/]" if entry.stands_for else "")
        missing = "not found; fetch it" if entry.can_fetch else "not found"
        table.add_row(entry.name, f"{entry.clients:,}", title, _folder(entry) or f"[red]{missing}[/]")
    console.out.print(table, highlight=False)


@data_app.command("check")
def data_check(
    chosen: Annotated[
        list[str] | None,
        typer.Argument(help="Data sets; all, if none is named.", metavar="NAME...", autocompletion=names.data_set),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Check the files that are here, against published checksums where there are any; exit code 2 if one is damaged.

    Example: selffl data check mnist cifar10
    """
    from selffl.data import DATA_SETS
    from selffl.data.registry import data_set

    damaged: list[str] = []
    found: list[dict[str, str]] = []

    def note(state: str, name: str, what: str) -> None:
        found.append({"name": name, "state": state, "file": what})
        if not as_json:
            console.tell(console.out, f"{state:>9}  {name}: {what}")

    for entry in [data_set(name) for name in dict.fromkeys(chosen or DATA_SETS)]:
        if not entry.files():
            note("ok", entry.name, "built in, no files")
        for file in entry.files():
            try:
                path = file.find()
            except DataError:
                if chosen:
                    raise
                note("not found", entry.name, file.names[0])
                continue
            try:
                file.read(path)
            except DataError as error:
                damaged.append(str(path))
                note("damaged", entry.name, str(error))
            else:
                note("ok", entry.name, str(path))
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
    if damaged:
        raise DataError(f"{len(damaged)} damaged file(s), first {damaged[0]}; expected whole ones. Get them again.")


@data_app.command("fetch")
def data_fetch(
    name: Annotated[str, typer.Argument(help="Data set; see `selffl data list`.", autocompletion=names.data_set)],
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder in which its own folder is made; else the user's cache.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the files as JSON.")] = False,
) -> None:
    """Get a data set from its public home, or from R; resume an interrupted download.

    Example: selffl data fetch mnist --out data
    """
    from selffl.data.fetch import fetch

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console.err,
        disable=not console.err.is_terminal,
    ) as bars:
        tasks: dict[str, Any] = {}

        def on_progress(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(file, total=total, completed=done)
            bars.update(tasks[file], completed=done)

        found = fetch(name, folder, on_progress)
    if as_json:
        print(json.dumps([str(path) for path in found], ensure_ascii=False))
        return
    for path in found:
        console.tell(console.out, str(path))


@data_app.command("show")
def data_show(
    name: Annotated[str, typer.Argument(help="Data set; see `selffl data list`.", autocompletion=names.data_set)],
    seed: Annotated[int, typer.Option(help="Of the split.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw clients and classes into this file (.png, .svg, .pdf).")
    ] = None,
    clips: Annotated[
        Path | None, typer.Option(help="For wakeword: draw a clip on each type of device in each state into this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Show how a data set is split: its clients, rows, classes and sizes.

    Example: selffl data show digits --seed 1 --plot digits.png
    """
    from selffl.data import load
    from selffl.data.registry import data_set

    entry = data_set(name)
    if clips is not None and name != "wakeword":
        raise ConfigError(f"--clips is for wakeword; {name} has no clips to draw.")
    for target in (plot, clips):
        console.check_target(target)
        if target is not None:
            from selffl.reports.shrinkage import check_ending

            check_ending(target)
    fed = load(name, seed=seed)
    facts = _facts(fed)
    if as_json:
        print(json.dumps({"name": name, "seed": seed, **facts}))
    else:
        _print_facts(entry, facts)
    if plot is not None:
        from selffl.reports.partition import draw_partition

        title = f"{name}: {fed.num_clients:,} clients, {facts['rows']:,} rows (seed {seed})"
        draw_partition(fed, plot, title, entry.classes)
        console.tell(console.err, f"Clients and classes: {plot}")
    if clips is not None:
        from selffl.reports.spectrograms import draw_spectrograms

        draw_spectrograms(clips, seed)
        console.tell(console.err, f"Clips: {clips}")


@data_app.command("profile")
def data_profile(
    rows: Annotated[Path, typer.Argument(help="Table of this site's training rows: .csv or .parquet.")],
    label: Annotated[str, typer.Option(help="Column to predict.")],
    target: Annotated[Path, typer.Option("--out", "-o", help="File to write, such as site.json.")],
    client: Annotated[str | None, typer.Option(help="Column of clients, if there is one.")] = None,
    features: Annotated[str | None, typer.Option(metavar="A,B", help="Columns of features; else all others.")] = None,
    exclude: Annotated[str | None, typer.Option(metavar="A,B", help="Columns to leave out.")] = None,
    task: Annotated[TaskChoice | None, typer.Option(help="What the label is: classes, values or counts.")] = None,
    missing: Annotated[MissingChoice, typer.Option(help="Missing values: refuse, drop or impute.")] = "refuse",
    decimal: Annotated[DecimalChoice | None, typer.Option(help="Decimal sign of a CSV file: . or ,")] = None,
) -> None:
    """Write the profile of a site's training rows: counts, means, spreads and the words that occur.

    The server makes one preparation of all sites' profiles; no row leaves the site.

    Example: selffl data profile ward.csv --label outcome -o ward.json
    """
    from selffl.data.profile import Profile

    console.check_target(target)
    with console.options_in_messages():
        profile = Profile.of_csv(
            rows,
            label,
            client,
            name_columns("--features", features),
            exclude=name_columns("--exclude", exclude),
            task=task,
            missing=missing,
            decimal=decimal,
        )
    profile.save(target)
    console.tell(console.out, f"{len(profile.columns)} features, {profile.task} of {label}: {target}")


@data_app.command("prepare")
def data_prepare(
    profiles: Annotated[list[Path], typer.Argument(help="Profiles of all sites.", metavar="PROFILE...")],
    target: Annotated[Path, typer.Option("--out", "-o", help="File to write, such as preparation.json.")],
    missing: Annotated[MissingChoice, typer.Option(help="Missing values: refuse, drop or impute.")] = "refuse",
) -> None:
    """Make one preparation of the profiles of all sites, for `Federation.from_csv(preparation=...)` at each.

    Example: selffl data prepare north.json south.json -o preparation.json
    """
    from selffl.data.preparation import Preparation
    from selffl.data.profile import Profile

    console.check_target(target)
    with console.options_in_messages():
        preparation = Preparation.fit(*map(Profile.load, profiles), missing=missing)
    preparation.save(target)
    console.tell(console.out, f"{len(preparation.inputs)} inputs from {len(profiles)} profiles: {target}")


def _facts(fed: Federation) -> dict[str, Any]:
    """What there is to say about a split, in plain numbers."""
    sizes = fed.num_examples.double()
    held = None if fed.num_classes is None else (fed.class_counts() > 0).sum(1)
    return {
        "clients": fed.num_clients,
        "rows": int(sizes.sum()),
        "train": len(fed.train.labels),
        "test": len(fed.test.labels),
        "features": list(fed.train.array.shape[1:]),
        "classes": fed.num_classes,
        "classes_per_client": None if held is None else [int(held.min()), int(held.max())],
        "size": {
            "smallest": int(sizes.min()),
            "median": float(sizes.quantile(0.5)),
            "mean": float(sizes.mean()),
            "std": float(sizes.std(correction=0)),
            "largest": int(sizes.max()),
        },
        "fingerprint": fed.fingerprint(),
    }


def _print_facts(entry: DataSet, facts: dict[str, Any]) -> None:
    low, high = facts["classes_per_client"] or (0, 0)
    of_client = low if low == high else f"{low} to {high}"
    size = facts["size"]
    console.out.print(entry.title, style="bold", highlight=False, markup=False)
    if entry.stands_for:
        console.tell(console.out, f"A stand-in for {entry.stands_for}.")
    table = Table(box=None, show_header=False, pad_edge=False)
    for fact, value in (
        ("clients", f"{facts['clients']:,}"),
        ("rows", f"{facts['rows']:,} ({facts['train']:,} to train on, {facts['test']:,} to test)"),
        ("features", " × ".join(map(str, facts["features"]))),
        (
            "classes",
            f"{facts['classes']}, of which a client has {of_client}" if high else "none: the outcome is a number",
        ),
        (
            "rows of a client",
            f"{size['smallest']:,} … {size['largest']:,}; median {size['median']:,.0f}, mean {size['mean']:,.1f}, "
            f"standard deviation {size['std']:,.1f}",
        ),
        ("licence", entry.licence),
        ("fingerprint", facts["fingerprint"][:16]),
    ):
        table.add_row(fact, value)
    console.out.print(table, highlight=False, markup=False)
