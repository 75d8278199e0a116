"""`selffl run` and `selffl compare`: train one method, or several with several seeds."""

from __future__ import annotations

import json
import os
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selffl.cli import console, live, names, ranks
from selffl.cli.report import print_verdict, write_report
from selffl.cli.studies import print_record, print_table
from selffl.cli.training import (
    Algorithm,
    Device,
    Gain,
    Rounds,
    Settings,
    Study,
    Verbose,
    VerboseRuns,
    find_problem,
    print_gains,
    print_summary,
    settle,
)
from selffl.errors import ConfigError, DataError, RankError, check_known
from selffl.runs.recipe import STUDY_SETTINGS

if TYPE_CHECKING:
    from selffl.runs.recipe import Recipe
    from selffl.studies.problems import Problem

app = typer.Typer()


@app.command("run")
def run_command(
    study: Study,
    algorithm: Algorithm = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the split, the cohorts and the minibatches; without it, 0.")
    ] = None,
    rounds: Rounds = None,
    settings: Settings = None,
    device: Annotated[str | None, typer.Option(help="cpu (the default) or cuda.", autocompletion=names.device)] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder of the run; without it, runs/STUDY-ALGORITHM-SEED.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in that folder.")] = False,
    tracker: Annotated[
        str | None,
        typer.Option(
            help="Also write records for tensorboard, mlflow or wandb.",
            autocompletion=names.tracker,
        ),
    ] = None,
    gain: Gain = False,
    rank_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="With torchrun: how long a process waits for another; without it, 1800 s."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    verbose: Verbose = False,
) -> None:
    """Train one method, and write records and checkpoints during training.

    To share the clients between two processes, start it with torchrun: torchrun --nproc-per-node 2 -m selffl run digits

    Example: selffl run digits --algorithm ditto --set penalty=0.1 --out runs/my-ditto
    """
    from selffl.algorithms.local import training_alone
    from selffl.runs import reopen
    from selffl.runs.folder import CONFIG
    from selffl.runs.recipe import check_settings

    if rank_timeout is not None:
        os.environ["SELFFL_RANK_TIMEOUT"] = str(rank_timeout)
    problem = find_problem(study)
    number = 0 if seed is None else seed
    place = folder or Path("runs") / f"{problem.name}-{algorithm or problem.algorithm}-{number}"
    console.check_folder(place)
    begun = _read_begun(place) if resume else None
    if begun is not None:
        _refuse_other_settings(place, begun, problem, algorithm, seed, settings or [], gain)
    elif resume:
        console.tell(console.err, f"Nothing to go on with in {place}: a new run begins there.")
    name = algorithm or problem.algorithm if begun is None else begun.algorithm
    problem, options = settle(problem, name, settings or [])
    if rounds is not None:
        problem = replace(problem, rounds=rounds)
    method = problem.method(name, **options)  # refuse what cannot work before anything is loaded
    if gain:
        training_alone(method)
    check_settings(problem.settings | {"seed": number})
    if not resume and _read_begun(place) is not None:  # what was typed wrongly has been told by now
        advice = "expected a new folder. Resume that run with --resume, or give another --out"
        raise ConfigError(f"{place} already holds a run; {advice}.")
    ending = ", then every client alone" if gain or (begun is not None and begun.gain) else ""
    start, where = None, device or ("cpu" if begun is None else begun.device)
    title = f"{name} on {problem.name}, seed {number if begun is None else begun.seed}{ending}"
    if problem.warm_up is not None and begun is None:
        with live.watching(f"warm start on {study}", problem.warm_up.rounds, where, verbose) as on_round:
            start = problem.train_warm_up(number, device=where, on_round=on_round)
    try:
        if begun is not None:
            _tell_what_was_edited(place, begun, problem, settings or [])
            parts = problem.own_parts(begun.seed)
            with live.watching(title, rounds or begun.rounds, where, verbose) as on_round:
                run = reopen.resume(place, rounds=rounds, device=device, on_round=on_round, tracker=tracker, **parts)
        else:
            with live.watching(title, problem.rounds, where, verbose) as on_round:
                run = problem.run(
                    name,
                    options,
                    number,
                    device=where,
                    out=place,
                    start=start,
                    on_round=on_round,
                    tracker=tracker,
                    gain=gain,
                )
    except (KeyboardInterrupt, RankError):
        if (place / CONFIG).is_file():
            again = ranks.again(["selffl", "run", study, "--out", str(place), "--resume"])
            console.tell_command(console.err, "The run is kept up to its last checkpoint. To resume: ", again)
        raise
    if as_json:
        print(json.dumps(run.summary, ensure_ascii=False))
        return
    print_summary(run, problem.name, place)
    if run.config.gain:
        print_gains(run)


def _read_begun(place: Path) -> Recipe | None:
    """The recipe of a run that is to go on, or none where one begins; of several processes rank 0 looks."""
    from selffl.engines.ranks import joined
    from selffl.runs.folder import CONFIG, read_config

    with joined() as ranks_of_run:
        return ranks_of_run.share(lambda: read_config(place) if (place / CONFIG).is_file() else None)


@app.command("compare")
def compare_command(
    study: Study,
    algorithms: Annotated[
        str | None,
        typer.Option(
            "--algorithms",
            "-a",
            metavar="A,B,C",
            help="Methods, separated by commas; the first is compared with the rest. Without it, the study's own.",
            autocompletion=names.algorithms,
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Repeats, each with a split of its own; without it, the study's own number."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds; without it, the study's own number.")] = None,
    device: Device = "cpu",
    processes: Annotated[int | None, typer.Option(min=1, help="Runs side by side; without it, one per core.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder for records and report; without it, runs/compare-STUDY.")
    ] = None,
    best_round: Annotated[
        bool,
        typer.Option(
            "--best-round",
            help="Also show each run's best round, chosen on test rows: too optimistic, as in many papers.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the study's record as JSON.")] = False,
    verbose: VerboseRuns = False,
) -> None:
    """Train several methods with several seeds; ends with a table, a verdict and an HTML page.

    Runs that are already in the folder, made by the same code with the same options, are not made again.

    Example: selffl compare digits --algorithms self-fl,ditto,local --seeds 3
    """
    from selffl.algorithms import ALGORITHMS
    from selffl.reports.record import save_study
    from selffl.runs.environment import check_device
    from selffl.studies.comparison import Comparison, study_of
    from selffl.studies.result import Job

    problem = find_problem(study)
    if rounds is not None:
        problem = replace(problem, rounds=rounds)
    methods = list(problem.algorithms)
    if algorithms is not None:
        methods = [name.strip() for name in algorithms.split(",") if name.strip()]
    for name in methods:
        check_known("algorithm", name, ALGORITHMS)
    if len(set(methods)) != len(methods) or not methods:
        raise ConfigError(f"--algorithms is {algorithms!r}; expected names, each once, with commas between them.")
    repeats = problem.num_seeds if seeds is None else seeds
    place = folder or Path("runs") / f"compare-{problem.name}"
    console.check_folder(place)
    check_device(device)
    if len(problem.federation(0).test.labels) == 0:  # which says what is missing before processes are started
        raise DataError(
            f"no client of {study} has rows to test on; expected some, to compare methods by. Give clients more rows, "
            "or keep a larger test_fraction."
        )
    claims = {name: f"{methods[0]} has better personal models than {name}." for name in methods[1:]}
    comparison = Comparison(
        problem,
        claims,
        methods=tuple(methods),
        shows_best_round=best_round,
        is_tuned=False,
        num_seeds=repeats,
    )
    began = time.perf_counter()
    words = ["selffl", "compare", study, "--algorithms", ",".join(methods), "--seeds", str(repeats)]
    words += ["--rounds", str(rounds)] if rounds is not None else []
    words += ["--best-round"] if best_round else []
    again = [*words, *(["--out", str(folder)] if folder else []), *(["--device", device] if device != "cpu" else [])]
    title = f"{problem.name}: {problem.rounds} rounds, {repeats} seed{'s' if repeats > 1 else ''}"
    with (
        console.going_on(again, "Runs that are done are kept."),
        live.watching_arms(title, place / "runs", verbose) as progress,
    ):
        job = Job(
            progress=progress, folder=place / "runs", device=device, num_processes=processes or os.cpu_count() or 1
        )
        result = study_of(comparison, f"compare-{problem.name}").run(job)
    record = save_study(
        study_of(comparison, f"compare-{problem.name}"),
        result,
        place,
        command=shlex.join(words),
        is_quick=False,
        seconds=time.perf_counter() - began,
    )
    with console.json_only(as_json):
        print_table(record)
        print_verdict(place)
        write_report([place], place / "report.html")
    if as_json:
        print_record(record, place / "report.html")


def _refuse_other_settings(
    place: Path,
    recipe: Recipe,
    problem: Problem,
    algorithm: str | None,
    seed: int | None,
    settings: list[str],
    gain: bool,
) -> None:
    """A run goes on as it began: refuse a method, a seed or a setting that it was not begun with."""
    given_once = {"algorithm": algorithm, "seed": seed, "gain": gain or None}
    asked: dict[str, Any] = {key: value for key, value in given_once.items() if value is not None}
    begun = {key: getattr(recipe, key) for key in given_once} | _begun_with(recipe)
    changed, options = settle(problem, recipe.algorithm, settings)
    asked |= options
    given = {setting.partition("=")[0] for setting in settings} - {"rounds"}
    asked |= {key: value for key, value in changed.settings.items() if key in given}
    if ":" not in problem.data:  # rows of the user's own are compared with the run's own fingerprint
        asked["data"], begun["data"] = problem.data, recipe.data
    for key, value in asked.items():
        if begun.get(key) != value:
            raise ConfigError(
                f"{key} is {value!r}, and the run in {place} was begun with {begun.get(key)!r}; leave it out to go on, "
                "or give another --out."
            )


def _begun_with(recipe: Recipe) -> dict[str, Any]:
    """Settings and options that a run was begun with and goes on with; the rounds may be more."""
    content = recipe.to_json()
    settings = {key: content[key] for key in STUDY_SETTINGS if key != "rounds"}
    return settings | {"optimiser": content["optimiser"]["name"]} | recipe.options


def _tell_what_was_edited(place: Path, recipe: Recipe, problem: Problem, settings: list[str]) -> None:
    """A run goes on as it began; say so where its study file says otherwise now, or its Python has been changed."""
    from dataclasses import asdict

    from selffl.runs.folder import LAYERS, MODULE
    from selffl.studies.own import OwnProblem, code_files

    if not isinstance(problem, OwnProblem):
        return
    begun = _begun_with(recipe)
    now: dict[str, Any] = {key: value for key, value in problem.settings.items() if key in begun}
    now |= asdict(problem.method(recipe.algorithm))
    given = {setting.partition("=")[0] for setting in settings}
    for key, value in now.items():
        if key in begun and key not in given and begun[key] != value:
            console.tell(
                console.err,
                f"{key} is {value!r} in the study now; the run in {place} keeps {begun[key]!r}, with which it began.",
            )
    kept = [file for file in (place / LAYERS, place / MODULE) if file.is_file()]
    for path in code_files(problem) if kept else ():
        if path.stat().st_mtime > kept[0].stat().st_mtime:
            news = f"{path} has changed since the run in {place} began; the run continues with the changed file."
            console.tell(console.err, news)
