"""`selffl posterior`: a CSV of estimates in, shrunk estimates and verdicts out."""

from __future__ import annotations

import json
import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from selffl.cli import console
from selffl.errors import ConfigError

app = typer.Typer()


class FormChoice(StrEnum):
    """Forms of the posterior."""

    exact = "exact"
    paper = "paper"


class MethodChoice(StrEnum):
    """Estimators of the inter-client variance."""

    reml = "reml"
    dl = "dl"


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
        console.check_target(target)
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
        console.tell(console.err, f"All {found.summary['clients']:,} clients: {save}")
    if plot is not None:
        found.plot(plot)
        console.tell(console.err, f"Forest plot: {plot}")


def _without_infinity(row: dict[str, object]) -> dict[str, object]:
    """JSON has no infinity; a gain without bound is null."""
    return {key: None if isinstance(value, float) and math.isinf(value) else value for key, value in row.items()}


def _print_shrinkage(summary: dict[str, object], shown: list[dict[str, object]], level: float) -> None:
    console.out.print(
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
        console.out.print(table)
    if shown and summary["inter_variance_source"] != "given":
        console.out.print(
            "Intervals take σ₀² as known: estimated from few clients, they are too narrow.", highlight=False
        )
    hidden = int(str(summary["clients"])) - len(shown)
    if hidden and shown:
        console.out.print(f"… and {hidden:,} more; --out FILE.csv writes them all.", highlight=False)
