"""`selffl posterior`: a CSV of estimates in, shrunk estimates and verdicts out."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

from selffl.cli import console
from selffl.errors import ConfigError

if TYPE_CHECKING:
    from selffl.reports.shrinkage import Shrinkage

app = typer.Typer()


FormChoice = Literal["exact", "paper"]
MethodChoice = Literal["reml", "ml", "pm", "dl"]  # estimators of the variance between clients
NUM_SHOWN_LEFT_OUT = 5  # clients in the table of those left out, the most influential first


@app.command("posterior")
def posterior_command(
    file: Annotated[Path, typer.Argument(help="CSV file with the columns client, estimate, variance.")],
    inter_variance: Annotated[
        float | None, typer.Option(help="Variance between clients, σ₀². Without it, it is estimated.")
    ] = None,
    method: Annotated[
        MethodChoice | None,
        typer.Option(
            help="How to estimate σ₀²: reml (the default), ml (maximum likelihood), pm (Paule–Mandel) or "
            "dl (DerSimonian–Laird)."
        ),
    ] = None,
    covariate: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Shrink towards a line in this column of numbers.")
    ] = None,
    new_variance: Annotated[
        float | None, typer.Option(help="Variance of the next client's own estimate; by default the median.")
    ] = None,
    form: Annotated[
        FormChoice, typer.Option(help="The posterior of the two-level model (exact), or the paper's formula (paper).")
    ] = "exact",
    level: Annotated[float, typer.Option(help="Level of the intervals.")] = 0.95,
    plot: Annotated[Path | None, typer.Option(help="Draw a forest plot into this file (.png, .svg, .pdf).")] = None,
    save: Annotated[Path | None, typer.Option("--out", help="Write the whole table to this CSV file.")] = None,
    rows: Annotated[int, typer.Option(min=0, help="How many clients to show.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary and the shown rows as JSON.")] = False,
) -> None:
    """Shrink each client's estimate towards the others', and say which clients gain.

    Intervals of clients account for the uncertainty of σ₀², if it is estimated from at least three clients.

    Example: selffl posterior hospitals.csv --plot forest.png --out shrunk.csv
    """
    from selffl.data.estimates import read_estimates
    from selffl.reports.shrinkage import Shrinkage, check_ending

    for target in (plot, save):
        console.check_target(target)
        if target is not None and target.resolve() == file.resolve():
            raise ConfigError(f"{target} is the file that is read; expected another one to write.")
    if plot is not None:
        check_ending(plot)
    if method is not None and inter_variance is not None:
        raise ConfigError("--method says how to estimate what --inter-variance already gives; leave one of them out.")
    table = read_estimates(file, covariate)
    found = Shrinkage.of(table, inter_variance, method or "reml", form, level, new_variance)
    if as_json:
        tables = {"rows": list(found.rows(rows)), "without_each": found.rows_without(rows)}
        print(json.dumps(_for_json(found.summary | tables), ensure_ascii=False, allow_nan=False))
    else:
        _print_summary(found)
        _print_clients(found, rows)
    if save is not None:
        found.save(save)
        console.tell_path(console.err, f"All {found.analysis.num_clients:,} clients: ", save)
    if plot is not None:
        found.plot(plot)
        console.tell_path(console.err, "Forest plot: ", plot)


def _for_json(value: Any) -> Any:
    """JSON has no infinity and no NaN; a gain without bound is null."""
    if isinstance(value, dict):
        return {key: _for_json(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_for_json(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print_summary(found: Shrinkage) -> None:
    """Print what holds for all clients together, a line for each."""
    from selffl.studies.result import with_minus

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for name, text in _summary_lines(found):
        grid.add_row(Text(name, style="bold"), Text(with_minus(text)))
    console.out.print(grid)


def _summary_lines(found: Shrinkage) -> Iterator[tuple[str, str]]:
    """Name and words of every line of the summary."""
    a, summary = found.analysis, found.summary
    clients = f"{a.num_clients:,} client{'s' if a.num_clients != 1 else ''}"
    yield clients, f"{found.form} form, {100 * a.level:g} % intervals"
    yield "variance between", f"σ₀² = {a.inter_variance:.4g} ({summary['inter_variance_source']})"
    for interval, name in ((a.inter_variance_interval, "Q-profile"), (a.inter_variance_profile, "profile likelihood")):
        if interval is not None:
            yield "", f"{_range(interval)} ({name})"
    mean = f"{a.mean:.4g}" if a.mean_interval is None else f"{a.mean:.4g}, {_range(a.mean_interval)} (Hartung–Knapp)"
    yield "mean", mean if a.slope is None else f"{mean}, at covariate {a.new_covariate:.4g}"
    if a.slope is not None:
        yield "slope", f"{a.slope.value:.4g}, {_range(a.slope.interval)}, p {a.slope.p_value:.2g} (Hartung–Knapp)"
    if a.heterogeneity is not None:
        q, freedom, p_value, i_squared, h_squared = a.heterogeneity
        yield (
            "heterogeneity",
            f"Q {q:.4g}, {freedom} degree{'s' if freedom != 1 else ''} of freedom, p {p_value:.2g}; "
            f"I² {100 * i_squared:.0f} %, H² {h_squared:.3g}",
        )
    if a.prediction_interval is not None:
        yield "next client", f"{_range(a.prediction_interval)} (Higgins–Thompson–Spiegelhalter)"
    if a.gain_probability is not None:
        name = "" if a.prediction_interval is not None else "next client"
        yield name, f"gains with probability {a.gain_probability:.2f}, if its own variance is {a.new_variance:.4g}"
    alone = summary["alone_is_as_good"]
    who = f"{alone:,} do" if alone > 1 else "one does" if alone else "none does"
    yield "gain", f"median {summary['median_gain']:.2f}×; {who} as well alone"


def _range(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.4g} to {interval[1]:.4g}"


def _print_clients(found: Shrinkage, most: int) -> None:
    """Print the clients that are asked for, and what the answer is without the most influential ones."""
    shown = list(found.rows(most))
    if not shown:
        return
    errors = [row["variance"] ** 0.5 for row in shown]
    write = _number_format([row[name] for row in shown for name in ("estimate", "shrunk", "low", "high")], errors)
    ends = [(write(row["low"]), write(row["high"])) for row in shown]
    width = max(len(end) for pair in ends for end in pair)
    rows = [
        (row["client"], write(row["estimate"]), write(error), write(row["shrunk"]),
         f"{low:>{width}} … {high:>{width}}", row["verdict"])
        for row, error, (low, high) in zip(shown, errors, ends, strict=True)
    ]  # fmt: skip
    _print_table(("client", "own", "s.e.", "shrunk", f"{100 * found.analysis.level:g} % interval", "verdict"), rows)
    if hidden := found.analysis.num_clients - len(shown):
        console.out.print(f"… and {hidden:,} more; --out FILE.csv writes them all.", highlight=False)
    if not found.is_integrated and found.analysis.method != "given":
        console.out.print("Intervals of clients take σ₀² as known, and are too narrow.", highlight=False)
    _print_without(found, min(most, NUM_SHOWN_LEFT_OUT))


def _print_without(found: Shrinkage, most: int) -> None:
    """Print the analysis without the clients whose absence moves others' answers most."""
    shown = found.rows_without(most)
    if not shown:
        return
    moves = [row["largest_move"] for row in shown]
    write = _number_format([row["mean"] for row in shown] + moves, [found.analysis.mean_variance**0.5])
    write_spread = _number_format([row["inter_variance"] for row in shown], [found.analysis.inter_variance])
    rows = [
        (row["client"], write_spread(row["inter_variance"]), write(row["mean"]), write(row["largest_move"]),
         f"{row['surprise'] + 0.0:.1f}")
        for row in shown
    ]  # fmt: skip
    _print_table(("without", "σ₀²", "mean", "largest move", "surprise"), rows)
    console.out.print(
        "Largest move: of another client's shrunk estimate. Surprise: how far the client's estimate lies from the "
        "others' prediction of it, in standard deviations.",
        highlight=False,
        style="dim",
    )


def _print_table(header: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    """Print names and right-aligned columns within the width of the terminal; it is the names that are cut."""
    from selffl.reports.forest import shorten_name
    from selffl.studies.result import with_minus

    widths = [max(len(row[column]) for row in [tuple(header), *rows]) for column in range(len(header))]
    free = max(console.out.width - sum(widths[1:]) - 2 * len(header), len(header[0]))
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(header[0], no_wrap=True, overflow="ellipsis")
    for name, width in zip(header[1:], widths[1:], strict=True):
        table.add_column(name, justify="left" if name == "verdict" else "right", no_wrap=True, min_width=width)
    for name, *cells in rows:
        style = "dim" if cells[-1] == "alone is as good" else ""
        shown = Text(shorten_name(name, free))  # a text: brackets in it are no markup
        table.add_row(shown, *map(with_minus, cells), style=style)
    console.out.print()
    console.out.print(table)


def _number_format(values: Sequence[float], errors: Sequence[float]) -> Callable[[float], str]:
    """One way to write all numbers of a table: the same decimals, two digits of a typical error among them."""
    typical = statistics.median([error for error in errors if error > 0] or [abs(value) for value in values] or [0.0])
    size = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    decimals = 2 if typical == 0 else max(0, 1 - math.floor(math.log10(typical)))
    if decimals > 7 or size >= 1e7:
        return lambda value: f"{value:.2e}"
    return lambda value: f"{value:.{decimals}f}"
