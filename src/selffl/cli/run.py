"""`selffl run` and `selffl compare`: train one method, or several side by side, on one of the paper's problems."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from selffl.cli import console
from selffl.cli.report import write_report
from selffl.cli.studies import BARS, print_table
from selffl.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from selffl.runs.train import Run
    from selffl.studies.problems import Problem

app = typer.Typer()

OF_PROBLEM = ("rounds", "participation", "learning_rate", "batch_size")  # settings besides a method's own options


STUDIES_HELP = "What to train: digits, mnist, femnist, cifar10, sent140 or wakeword."


@app.command("run")
def run_command(
    study: Annotated[
        str, typer.Argument(help="What to train: digits, mnist, femnist, cifar10, sent140, wakeword.", metavar="STUDY")
    ],
    algorithm: Annotated[str | None, typer.Option("--algorithm", "-a", help="The method; without it, self-fl.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the split, the cohorts and the minibatches; without it, 0.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds; without it, the study's own number.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="An option of the method, or participation, learning_rate, batch_size."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu (the default) or cuda.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder of the run; without it, runs/STUDY-ALGORITHM-SEED.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in that folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Train one method; records and checkpoints are written as it goes.

    Example: selffl run digits --algorithm ditto --set penalty=0.1 --out runs/my-ditto
    """
    from selffl.algorithms.options import above, at_least
    from selffl.runs import train as training
    from selffl.runs.folder import CONFIG, read_config

    problem = _problem(study)
    number = 0 if seed is None else seed
    place = folder or Path("runs") / f"{study}-{algorithm or 'self-fl'}-{number}"
    console.check_folder(place)
    is_there = (place / CONFIG).is_file()
    if is_there and not resume:
        raise ConfigError(f"{place} already holds a run; go on with it by --resume, or give another --out.")
    if is_there:
        _refuse_other_settings(place, problem, algorithm, seed, settings or [])
    elif resume:
        console.tell(console.err, f"Nothing to go on with in {place}: a new run begins there.")
    name = read_config(place).algorithm if is_there else algorithm or "self-fl"
    problem, options = _settle(problem, name, settings or [])
    if rounds is not None:
        problem = replace(problem, rounds=rounds)
    problem.method(name, **options)  # refuse what cannot work before anything is loaded
    for option in ("rounds", "batch_size"):
        at_least(option, getattr(problem, option), 1)
    above("learning_rate", problem.learning_rate, 0.0)
    above("participation", problem.participation, 0.0, at_most=1.0)
    start = None
    if problem.warm_up is not None and not is_there:
        with _watching(problem.warm_up.rounds, f"warm start on {study}") as on_round:
            start = problem.warmed_up(number, device=device or "cpu", on_round=on_round)
    with _watching(problem.rounds, f"{name} on {study}") as on_round:
        try:
            if is_there:
                run = training.resume(place, rounds=rounds, device=device, on_round=on_round)
            else:
                run = problem.run(
                    name, options, number, device=device or "cpu", out=place, start=start, on_round=on_round
                )
        except KeyboardInterrupt:
            if (place / CONFIG).is_file():
                again = shlex.join(["selffl", "run", study, "--out", str(place), "--resume"])
                console.tell(console.err, f"The run is kept up to its last checkpoint. To go on: {again}")
            raise
    if as_json:
        print(json.dumps(run.summary, ensure_ascii=False))
        return
    _print_summary(run, place)


@app.command("compare")
def compare_command(
    study: Annotated[
        str, typer.Argument(help="What to train: digits, mnist, femnist, cifar10, sent140, wakeword.", metavar="STUDY")
    ],
    algorithms: Annotated[
        str,
        typer.Option("--algorithms", "-a", help="Methods, with commas; the first is held against the rest."),
    ] = "self-fl,self-fl-exact,ditto,pfedme,perfedavg,fedavg,local",
    seeds: Annotated[int, typer.Option(min=1, help="Repeats, each with a split of its own.")] = 5,
    rounds: Annotated[int | None, typer.Option(help="Rounds; without it, the study's own number.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    processes: Annotated[int | None, typer.Option(min=1, help="Runs side by side; without it, one per core.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder for records and report; without it, runs/compare-STUDY.")
    ] = None,
) -> None:
    """Train several methods with several seeds; ends with a table, a figure and an HTML page.

    Runs that are already in the folder, made by the same code with the same options, are not made again.

    Example: selffl compare digits --algorithms self-fl,ditto,local --seeds 3
    """
    from selffl.algorithms import ALGORITHMS
    from selffl.reports.record import save_study
    from selffl.studies.comparison import Comparison, study_of
    from selffl.studies.result import Job

    problem = _problem(study)
    if rounds is not None:
        problem = replace(problem, rounds=rounds)
    names = [name.strip() for name in algorithms.split(",") if name.strip()]
    for name in names:
        if name not in ALGORITHMS:
            raise unknown_name("algorithm", name, ALGORITHMS)
    if len(set(names)) != len(names) or not names:
        raise ConfigError(f"--algorithms is {algorithms!r}; expected names, each once, with commas between them.")
    place = folder or Path("runs") / f"compare-{study}"
    console.check_folder(place)
    claims = {name: f"{names[0]} has a higher personalised accuracy than {name}." for name in names[1:]}
    comparison = Comparison(problem, claims, methods=tuple(names), is_tuned=False, num_seeds=seeds)
    began = time.perf_counter()
    with Progress(*BARS, console=console.err, disable=not console.err.is_terminal) as bars:
        task = bars.add_task(f"compare {study}", total=None, now="")
        job = Job(
            progress=lambda done, total, now: bars.update(task, completed=done, total=total, now=now),
            folder=place / "runs",
            device=device,
            num_processes=processes or os.cpu_count() or 1,
        )
        result = study_of(comparison, f"compare-{study}").run(job)
    words = ["selffl", "compare", study, "--algorithms", ",".join(names), "--seeds", str(seeds)]
    record = save_study(
        study_of(comparison, f"compare-{study}"),
        result,
        place,
        command=shlex.join(words + (["--rounds", str(rounds)] if rounds is not None else [])),
        is_quick=False,
        seconds=time.perf_counter() - began,
    )
    print_table(record)
    write_report([place], place / "report.html")


def _problem(name: str) -> Problem:
    from selffl.studies.problems import PROBLEMS

    if name not in PROBLEMS:
        raise unknown_name("study to train", name, PROBLEMS)
    return PROBLEMS[name]()


def _settle(problem: Problem, algorithm: str, settings: list[str]) -> tuple[Problem, dict[str, Any]]:
    """The problem and the method's options with every KEY=VALUE in its place."""
    from dataclasses import fields

    known = [f.name for f in fields(problem.method(algorithm))]  # type: ignore[arg-type]
    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set is {setting!r}; expected KEY=VALUE, such as max_local_steps=20.")
        try:
            value = json.loads(text)
        except ValueError:
            value = text  # a word
        if key in OF_PROBLEM:
            problem = replace(problem, **{key: value})
        elif key in known:
            options[key] = value
        else:
            raise unknown_name(f"key in --set for {algorithm}", key, (*known, *OF_PROBLEM))
    return problem, options


def _refuse_other_settings(
    place: Path, problem: Problem, algorithm: str | None, seed: int | None, settings: list[str]
) -> None:
    """A run goes on as it began: refuse a method, a seed or a setting that it was not begun with."""
    from selffl.runs.folder import read_config

    config = read_config(place)
    asked: dict[str, Any] = {}
    if algorithm is not None:
        asked["algorithm"] = algorithm
    if seed is not None:
        asked["seed"] = seed
    begun: dict[str, Any] = {"algorithm": config.algorithm, "seed": config.seed} | config.options
    begun |= {key: getattr(config, key) for key in OF_PROBLEM if key != "rounds"}
    changed, options = _settle(problem, config.algorithm, settings)
    asked |= options
    asked |= {key: getattr(changed, key) for key in OF_PROBLEM if key != "rounds" and f"{key}=" in " ".join(settings)}
    asked["data"], begun["data"] = problem.data, config.data
    for key, value in asked.items():
        if begun.get(key) != value:
            raise ConfigError(
                f"{key} is {value!r}, and the run in {place} was begun with {begun.get(key)!r}; leave it out to go on, "
                "or give another --out."
            )


@contextmanager
def _watching(rounds: int, title: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A live line on a terminal: rounds, accuracy, steps, time left; quiet elsewhere."""
    with Progress(*BARS, console=console.err, disable=not console.err.is_terminal) as bars:
        task = bars.add_task(title, total=rounds, now="")
        seen: dict[str, Any] = {}

        def on_round(row: dict[str, Any]) -> None:
            seen.update({key: value for key, value in row.items() if value is not None})
            said = [
                f"{name} {100 * seen[key]:.1f} %"
                for name, key in (("accuracy", "weighted_accuracy"), ("worst", "worst10_accuracy"))
                if key in seen
            ]
            if "num_local_steps" in seen:
                said.append(f"steps {seen['num_local_steps']:.0f}")
            bars.update(task, completed=row["round"], now=", ".join(said))

        yield on_round


def _print_summary(run: Run, place: Path) -> None:
    found = run.summary

    def percent(name: str) -> str:
        return "–" if found[name] is None else f"{100 * found[name]:.1f} %"

    console.tell(
        console.out,
        f"{found['algorithm']} on {found['data']}, seed {found['seed']}, {found['rounds']} rounds, "
        f"{found['clients']:,} clients: accuracy {percent('weighted_accuracy')}, "
        f"top tenth {percent('top10_accuracy')}, worst tenth {percent('worst10_accuracy')}, "
        f"global model {percent('global_accuracy')}; "
        f"{found['gradient_evaluations']:,} gradients, {found['seconds']:.1f} s.",
    )
    console.tell(console.out, f"Records and models: {place}")
