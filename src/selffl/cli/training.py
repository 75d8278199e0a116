"""What `selffl run`, `tune` and `compare` share: the study that is named, its settings, and what is said of a run."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selffl.cli import console, live, names
from selffl.errors import ConfigError, unknown_name
from selffl.runs.recipe import STUDY_SETTINGS

if TYPE_CHECKING:
    from selffl.runs.run import Run
    from selffl.studies.problems import Problem

NUM_NAMED_CLIENTS = 5
NEARLY_AS_HARD = 0.8  # times as hard as the variance between clients says: not worth a sentence

STUDY_HELP = f"What to train: {', '.join(names.PROBLEMS)}; or a folder that `selffl init` has made, or its study file."
Study = Annotated[str, typer.Argument(help=STUDY_HELP, metavar="STUDY", autocompletion=names.study)]
Algorithm = Annotated[
    str | None,
    typer.Option("--algorithm", "-a", help="The method; without it, the study's own.", autocompletion=names.algorithm),
]
Rounds = Annotated[int | None, typer.Option(help="Rounds; without it, the study's own number.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help=f"An option of the method, or {', '.join(STUDY_SETTINGS[1:])}.",
        autocompletion=names.setting,
    ),
]
Device = Annotated[str, typer.Option(help="cpu or cuda.", autocompletion=names.device)]
Gain = Annotated[
    bool,
    typer.Option(
        "--gain", help="At the end, train every client alone as well, and say which clients lose by joining, and why."
    ),
]
VerboseRuns = Annotated[
    bool, typer.Option("--verbose", "-v", help="A plain line on standard error for each run that is done.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="A plain line on standard error for each evaluation.")]


def find_problem(name: str) -> Problem:
    """One of the package's by its name, or the user's own by its folder or file."""
    from selffl.studies.own import FILE, read_study
    from selffl.studies.problems import PROBLEMS

    if name in PROBLEMS:
        return PROBLEMS[name]()
    path = Path(name)
    if path.suffix == ".toml" or path.is_dir():
        return read_study(path)
    own = [file.parent.name for file in sorted(Path().glob(f"*/{FILE}"))]
    unknown = unknown_name("study to train", name, (*PROBLEMS, *own))
    raise ConfigError(f"{unknown} A study of your own is named by its folder, or by its {FILE}.")


def settle(problem: Problem, algorithm: str, settings: list[str]) -> tuple[Problem, dict[str, Any]]:
    """The problem and the method's options with every KEY=VALUE in its place."""
    known = [f.name for f in fields(problem.method(algorithm))]  # type: ignore[arg-type]
    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set is {setting!r}; expected KEY=VALUE, such as max_local_steps=20.")
        value = parse_value(text)
        if key in STUDY_SETTINGS:
            problem = replace(problem, **{key: value})
        elif key in known:
            options[key] = value
        else:
            raise unknown_name(f"key in --set for {algorithm}", key, (*known, *STUDY_SETTINGS))
    return problem, options


def parse_value(text: str) -> Any:
    """A value as it is written on the command line: a number, true or false, or a word."""
    try:
        return json.loads(text)
    except ValueError:
        return text.strip()


def print_gains(run: Run) -> None:
    """How many lose by joining, and the worst of them with the reasons."""
    from selffl.runs.gain import losers

    metric = run.config.metrics[0]
    known = [row for row in run.gains() if row["realised_gain"] is not None]
    losing = losers(known)
    tested = [row for row in losing if row["is_within_chance"] is not None]
    clear = sum(not row["is_within_chance"] for row in tested)
    clearly = f", {clear or 'none'} of them significantly" if tested else ""
    mean = run.summary["mean_realised_gain"]
    console.tell(
        console.out,
        f"{len(losing):,} of {len(known):,} clients lose by joining ({100 * len(losing) / len(known):.1f} %){clearly}; "
        f"the mean gain over training alone is {live.difference(metric, mean)}.",
    )
    for row in losing[:NUM_NAMED_CLIENTS]:
        scores = f"{live.score(metric, row['alone'])} alone, {live.score(metric, row['personal'])} joined"
        lost = live.difference(metric, row["realised_gain"])
        console.tell(console.out, f"  {row['client']}: {lost} ({scores}): {row['why']}")


def print_summary(run: Run, name: str, place: Path) -> None:
    """What came of a run, a short line for each number; what matters most for such rows comes first."""
    from selffl.runs.evaluation import majority_sentence
    from selffl.training.metrics import name_of

    found, metric = run.summary, live.metric_of(run.summary)
    rounds = f"{found['rounds']} {'round' if found['rounds'] == 1 else 'rounds'}"
    title = f"{found['algorithm']} on {name}, seed {found['seed']}"
    console.tell(console.out, f"{title}: {rounds}, {found['clients']:,} clients")
    lines = [(name_of(metric), live.score(metric, found.get(f"weighted_{metric}")))]
    if found.get("pooled_auc") is not None:
        lines.append(("AUC", live.score("auc", found["pooled_auc"])))
    if metric == "balanced_accuracy":
        lines.append(("accuracy", live.score("accuracy", found["weighted_accuracy"])))
    lines += [
        (text, live.score(metric, found.get(f"{part}_{metric}")))
        for part, text in (("top10", "top tenth by size"), ("worst10", "worst tenth"), ("global", "global model"))
    ]
    if found.get("majority_accuracy") is not None:
        lines.append(("majority class", live.score("accuracy", found["majority_accuracy"])))
    lines += [("gradients", f"{found['gradient_evaluations']:,}"), ("seconds", f"{found['seconds']:.1f}")]
    wide, right = (max(len(line[part].removesuffix(" %")) for line in lines) for part in (0, 1))
    for text, value in lines:
        number = value.removesuffix(" %")
        console.tell(console.out, f"  {text:<{wide}}  {number:>{right}}{value[len(number) :]}")
    if said := majority_sentence([found]):
        console.tell(console.out, said)
    if found.get("inter_variance_high") is not None:
        inter, low, high = (f"{found[f'inter_variance{end}']:.3g}" for end in ("", "_low", "_high"))
        said = f"Variance between clients: σ₀² = {inter}, between {low} and {high} with 95 % confidence."
        console.tell(console.out, said)
    if (multiple := found.get("closing_multiple") or 1.0) < NEARLY_AS_HARD:
        said = (
            f"Personal models were held {1.0 / multiple:.2g} times as loosely as that says: the global model is not "
            "where clients would have it."
        )
        console.tell(console.out, said)
    for unit, before in (("client", ""), ("row", "row_")):
        if found.get(f"{before}delta") is not None:
            console.tell(console.out, live.privacy_sentence(unit, found[f"{before}epsilon"], found[f"{before}delta"]))
    console.tell_path(console.out, "Records and models: ", place)
