"""`selffl tune`: choose a method's options on validation rows, and train with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from selffl.cli import console, live, names
from selffl.cli.training import (
    Algorithm,
    Device,
    Gain,
    Rounds,
    Settings,
    Study,
    Verbose,
    find_problem,
    parse_value,
    print_gains,
    print_summary,
    settle,
)
from selffl.errors import ConfigError
from selffl.runs.recipe import STUDY_SETTINGS

app = typer.Typer()


@app.command("tune")
def tune_command(
    study: Study,
    algorithm: Algorithm = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="KEY=VALUE,VALUE",
            help="Values to choose from, of an option of the method, of fine_tune, or of "
            f"{', '.join(STUDY_SETTINGS[1:])}; without it, the method's own grid.",
            autocompletion=names.setting,
        ),
    ] = None,
    max_trials: Annotated[
        int | None,
        typer.Option(min=1, help="Largest number of settings to try, including those of the grid; without it, 8."),
    ] = None,
    validation_fraction: Annotated[
        float, typer.Option(help="Share of each client's training rows to choose on.")
    ] = 0.2,
    metric: Annotated[
        str | None, typer.Option(help="Metric to choose by; without it, the first metric of the rows.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the split, the cohorts and the minibatches.")] = 0,
    rounds: Rounds = None,
    settings: Settings = None,
    device: Device = "cpu",
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder of the last run; without it, runs/STUDY-ALGORITHM-tuned-SEED.")
    ] = None,
    gain: Gain = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was tried and the summary as JSON.")] = False,
    verbose: Verbose = False,
) -> None:
    """Choose a method's options on validation rows, then train with them on all training rows.

    Validation rows are set aside from each client's training rows. If the best value is the last of its grid, the next
    one beyond it is tried as well.

    Example: selffl tune digits --algorithm ditto --grid penalty=0.1,0.3,1
    """
    from selffl.runs.environment import check_device
    from selffl.runs.recipe import check_settings
    from selffl.runs.run import refuse_if_taken
    from selffl.runs.search import describe
    from selffl.runs.tune import MAX_TRIALS, TUNING
    from selffl.training.metrics import plain_number

    problem = find_problem(study)
    name = algorithm or problem.algorithm
    place = folder or Path("runs") / f"{problem.name}-{name}-tuned-{seed}"
    console.check_folder(place)
    refuse_if_taken(place)
    problem, options = settle(problem, name, settings or [])
    if rounds is not None:
        problem = replace(problem, rounds=rounds)
    problem.method(name, **options)
    check_settings(problem.settings | {"seed": seed})
    check_device(device)
    values = _values_of_grid(grid or [])

    def on_trial(setting: dict[str, Any], score: float | None) -> None:
        if verbose or console.err.is_terminal:
            said = "diverged" if score is None else plain_number(score)
            console.tell(console.err, f"  {describe(setting)}: {said} on validation rows")

    tuning = problem.tune(
        name,
        options,
        seed,
        values or None,
        validation_fraction,
        device,
        metric=metric,
        max_trials=max_trials or MAX_TRIALS,
        out=place,
        on_trial=on_trial,
        gain=gain,
    )
    if as_json:
        print(json.dumps(tuning.summary | {"summary": tuning.run.summary}, ensure_ascii=False))
        return
    console.tell(console.out, str(tuning))
    print_summary(tuning.run, problem.name, place)
    steps = tuning.chosen.get("fine_tune")
    if steps:
        tuned = tuning.run.summary[f"personal_after_{steps}_weighted_{tuning.metric}"]
        console.tell(console.out, f"After {steps} steps of fine-tuning: {live.score(tuning.metric, tuned)}")
    console.tell_path(console.out, "All settings tried: ", place / TUNING)
    if gain:
        print_gains(tuning.run)


def _values_of_grid(grid: list[str]) -> dict[str, list[Any]]:
    """The values of each KEY=VALUE,VALUE."""
    found: dict[str, list[Any]] = {}
    for text in grid:
        key, _, values = text.partition("=")
        parts = [part.strip() for part in values.split(",")]
        if not key or not all(parts) or key in found:
            raise ConfigError(f"--grid is {text!r}; expected KEY=VALUE,VALUE, each key once, such as penalty=0.1,1.")
        found[key] = [parse_value(part) for part in parts]
    return found
