"""`selffl init`: a folder with a study of the user's own, which runs as it is."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from csv import reader
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from selffl.cli import console, names
from selffl.errors import ConfigError

if TYPE_CHECKING:
    from selffl.cli.init_table import StudyParts

app = typer.Typer()

MIN_CLIENTS_PER_ROUND = 10  # variances are estimated from their spread
MIN_ROUNDS = 40
NUM_VISITS = 20  # of each client on average, which takes more rounds where few take part in one
TaskChoice = Literal["classes", "values", "counts"]
MissingChoice = Literal["refuse", "drop", "impute"]
DecimalChoice = Literal[".", ","]
DecimalOfFile = Annotated[
    DecimalChoice | None, typer.Option(help="Decimal sign of a CSV file, if its numbers can be read in two ways.")
]
CLIENT, LABEL = "client", "label"  # columns, unless the options name others


@app.command("init")
def init_command(
    folder: Annotated[Path, typer.Argument(help="Folder to make.", metavar="FOLDER")],
    csv: Annotated[
        Path | None,
        typer.Option("--csv", help="Your rows, .csv with a header or .parquet; without it, made-up rows."),
    ] = None,
    client: Annotated[str, typer.Option(help="Column with the client's id.")] = CLIENT,
    label: Annotated[str, typer.Option(help="Column to predict.")] = LABEL,
    features: Annotated[
        str | None,
        typer.Option(metavar="A,B,C", help="Columns to predict it from; without it, all others that are usable."),
    ] = None,
    exclude: Annotated[str | None, typer.Option(metavar="A,B", help="Columns to leave out.")] = None,
    task: Annotated[
        TaskChoice | None,
        typer.Option(help="What the label is: one of several classes, an amount, or a count of events."),
    ] = None,
    missing: Annotated[
        MissingChoice,
        typer.Option(help="Missing values: refuse them, drop their rows, or impute the mean and mark where."),
    ] = "refuse",
    decimal: Annotated[
        DecimalChoice | None, typer.Option(help="Decimal sign, if the numbers can be read in two ways.")
    ] = None,
    leaf: Annotated[Path | None, typer.Option("--leaf", help="A folder of LEAF's JSON files instead of --csv.")] = None,
    pfllib: Annotated[
        Path | None, typer.Option("--pfllib", help="A folder that PFLlib has made, instead of --csv.")
    ] = None,
    trusted: Annotated[
        bool, typer.Option("--trusted", help="PFLlib's files are pickles: say that you know who made them.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was made as JSON.")] = False,
) -> None:
    """Write a study: its settings, its rows and its models, ready to run and to edit.

    Example: selffl init my-study --csv rows.csv --client site --label y
    """
    sources = [(name, path) for name, path in (("csv", csv), ("leaf", leaf), ("pfllib", pfllib)) if path is not None]
    if len(sources) > 1:
        given = " and ".join(f"--{name}" for name, _ in sources)
        raise ConfigError(f"{given} are given together; expected one source of rows. Leave the others out.")
    if trusted and pfllib is None:
        raise ConfigError("--trusted is given without --pfllib; expected a folder of pickles. Leave it out.")
    _check_names(folder, sources[0][1] if sources else None)
    study: StudyParts | None = None
    if csv is None:
        for option, is_given in {
            "--client": client != CLIENT, "--label": label != LABEL, "--features": features is not None,
            "--exclude": exclude is not None, "--task": task is not None,
            "--missing": missing != "refuse", "--decimal": decimal is not None,
        }.items():  # fmt: skip
            if is_given:
                raise ConfigError(f"{option} is given without --csv; expected a file of rows. Add --csv FILE.")
        if sources:
            from selffl.cli.init_folder import folder_study

            kind, path = sources[0]
            study = folder_study("leaf" if kind == "leaf" else "pfllib", path, folder, trusted)
            written = study_files(folder, "study_folder.py", study.values, study.num_clients)
        else:
            title = json.dumps(f"{folder.resolve().name}: made-up sites", ensure_ascii=False)
            written = study_files(folder, "study.py", {"title": title}, None)
    else:
        from selffl.cli.init_table import table_study

        study = table_study(
            csv,
            folder,
            client,
            label,
            features=name_columns("--features", features),
            exclude=name_columns("--exclude", exclude),
            task=task,
            missing=missing,
            decimal=decimal,
            can_ask=not as_json,
        )
        written = study_files(folder, "study_csv.py", study.values, study.num_clients)
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in written.items():
        (folder / file).write_text(text, encoding="utf-8")
    _tell(folder, list(written), study, as_json)


def _check_names(folder: Path, rows: Path | None) -> None:
    """Refuse a folder that is in use, and names that cannot be written into a file."""
    if folder.suffix.lower() in (".csv", ".parquet") and rows is None:
        advice = f"expected a folder to make. For rows of your own: selffl init {folder.stem} --csv {folder}"
        raise ConfigError(f"FOLDER is {folder}, the name of a table; {advice}")
    console.check_folder(folder)
    if folder.is_dir() and any(folder.iterdir()):
        advice = "expected a new folder, so that nothing is overwritten. Give another name"
        raise ConfigError(f"{folder} is not empty; {advice}.")
    for given in (folder, rows):
        try:
            str(given).encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{str(given)!r} is not readable in this locale; expected a name in UTF-8. Set LC_ALL=C.UTF-8."
            ) from None
    name = folder.resolve().name
    if name in names.PROBLEMS:
        raise ConfigError(f"{name} is a study that comes with the package; expected another name for your own.")


def name_columns(option: str, given: str | None) -> list[str] | None:
    """The columns that an option names; quotes allow commas within a name."""
    if given is None:
        return None
    found = [name.strip() for name in next(reader([given], skipinitialspace=True), []) if name.strip()]
    if not found:
        raise ConfigError(f"{option} is {given!r}; expected names of columns with commas between them.")
    return found


def study_files(folder: Path, template: str, values: Mapping[str, Any], num_clients: int | None) -> dict[str, str]:
    """The files of a new study, by name.

    ``template`` is the one for study.py; ``num_clients`` says how large a share of them takes part in a round, and so
    how many rounds there have to be.
    """
    from importlib.resources import files

    import jinja2

    name = folder.resolve().name
    share = 0.5 if num_clients is None else min(max(round(MIN_CLIENTS_PER_ROUND / num_clients, 2), 0.1), 1.0)
    run = f"runs/{name}-{names.DEFAULT}-0"  # where `selffl run` puts it
    method, option, value = names.STUDY_OPTION
    given = {
        "algorithm": names.DEFAULT,
        "algorithms": json.dumps(names.STUDY_METHODS),
        "some_algorithms": ",".join(dict.fromkeys((names.DEFAULT, method, names.STUDY_METHODS[-1]))),
        "option": {"method": method, "name": option, "value": value},
        "run": shlex.quote(run),
        "run_text": json.dumps(run, ensure_ascii=False),
        "place": shlex.quote(str(folder)),
        "name": name,
        "rounds": max(MIN_ROUNDS, 10 * math.ceil(NUM_VISITS / share / 10)),
        "participation": share,
        "model": "model",
        "model_reason": [],
        "loss": "cross_entropy",
        "rate": 0.05,
        **values,
    }
    templates = files("selffl.cli") / "templates"

    def fill(template: str) -> str:
        text = (templates / f"{template}.j2").read_text(encoding="utf-8")
        return str(jinja2.Template(text, undefined=jinja2.StrictUndefined, keep_trailing_newline=True).render(given))

    return {"study.toml": fill("study.toml"), "study.py": fill(template), "README.md": fill("README.md")}


def _tell(folder: Path, written: list[str], study: StudyParts | None, as_json: bool) -> None:
    """Say what was made."""
    if as_json:
        about = {} if study is None else study.about
        print(json.dumps({"folder": str(folder), "files": written, **about}, ensure_ascii=False))
        return
    lines = [] if study is None else study.summary
    for line in [*lines, *console.align([("Written", f"{', '.join(written)} in {folder}")])]:
        console.tell(console.out, line)
    # One line, to be copied.
    console.tell(console.out, f"{'Next':<{console.HEADING_WIDTH}}{shlex.join(['selffl', 'run', str(folder)])}")
