"""`selffl flower`: go on with a run between sites, and see and take out what lies on a client's disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from selffl.cli import console
from selffl.errors import CheckpointError, ConfigError, DataError

flower_app = typer.Typer(
    help="Federations between sites: resume a run, list memories, export a personal model."
    "\n\nExample: selffl flower list /var/lib/selffl/memory",
    no_args_is_help=True,
)


@flower_app.command("resume")
def flower_resume(
    run: Annotated[Path, typer.Argument(help="Folder of the run, on the server: the `out` of its app.", metavar="OUT")],
    app: Annotated[Path, typer.Option("--app", help="Folder of the Flower app that the run was made with.")] = Path(),
    connection: Annotated[
        str | None, typer.Option(help="Name of the SuperLink in Flower's configuration; without it, the default.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds in all; without it, as many as before.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", metavar="KEY=VALUE", help="Further settings of the app, as for `flwr run`."),
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Show the server's log until the run has ended.")] = False,
) -> None:
    """Start a new run of Flower's from the last checkpoint of an earlier one; clients go on with their memories.

    Example: selffl flower resume /srv/selffl/experiment-1 --app examples/flower --connection sites
    """
    from selffl.runs.folder import CHECKPOINT, read_config
    from selffl.runs.recipe import FLOWER_SETTINGS, REMOTE
    from selffl.state.checkpoint import load_tensors

    config = read_config(run)
    _, about = load_tensors(run / CHECKPOINT)
    if config.device != REMOTE or "experiment" not in about:
        raise ConfigError(f"{run} is no run over Flower; go on with it by `selffl run --resume` or `selffl.resume`.")
    last, wanted = int(about["round"]), rounds or config.rounds
    # The global model comes last, after the last evaluation.
    model = run / "model.safetensors"
    is_over = last == wanted and model.is_file() and load_tensors(model)[1].get("round") == last
    if last > wanted or is_over:
        raise ConfigError(f"the run in {run} has done {last} of {wanted} rounds; give more by --rounds to go on.")
    declared = _list_declared(app)
    command = _flwr()
    # What the run was made with, whatever the app's configuration says today.
    content = config.to_json()
    given = {
        **{name.replace("_", "-"): content[name] for name in FLOWER_SETTINGS if content[name] is not None},
        **({} if config.has_own_method else {"algorithm": config.algorithm}),
        "out": str(run.resolve()),
        "experiment": about["experiment"],
        "rounds": wanted,
        "optimiser": content["optimiser"]["name"],
    }
    for name in ("out", "experiment"):
        if '"' in str(given[name]):
            raise ConfigError(f"{name} is {given[name]}; expected no quotation marks, which `flwr run` cannot take.")
    words = [command, "run", str(app), *([connection] if connection else []), *(["--stream"] if stream else [])]
    for name in sorted(given.keys() & declared):  # Flower takes no other; the app's own arguments stand for the rest
        # A JSON string is a TOML string.
        words += ["--run-config", f"{name}={json.dumps(given[name], ensure_ascii=False)}"]
    for setting in settings or ():
        words += ["--run-config", setting]
    if "out" not in declared:
        console.tell(console.err, f"The app does not let `out` be set; its own has to be {given['out']}.")
    console.tell(console.err, f"Experiment {about['experiment']}: from round {last + 1} to {wanted}.")
    code = subprocess.run(words, check=False).returncode
    if code:
        raise ConfigError(f"`flwr run` ended with {code}; the run in {run} is as it was. Its own words are above.")


def _list_declared(app: Path) -> set[str]:
    """Names that an app's run configuration has."""
    path = app / "pyproject.toml"
    if not path.is_file():
        raise ConfigError(f"{app} holds no pyproject.toml; expected the folder of a Flower app. Give it by --app.")
    try:
        content: Any = tomllib.loads(path.read_text(encoding="utf-8"))
        return set(content["tool"]["flwr"]["app"].get("config", {}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no Flower app's ({error!r}); expected a section tool.flwr.app.") from None


def _flwr() -> str:
    """Flower's command, of this environment."""
    found = shutil.which("flwr", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if found is None:
        raise ConfigError("the command flwr is not here; expected Flower. Install it: pip install 'selffl[flower]'.")
    return found


@flower_app.command("list")
def flower_list(
    folder: Annotated[Path, typer.Argument(help="Folder of memories: the node's `memory-dir`.", metavar="MEMORY")],
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """List what this site remembers: experiments, clients, and the rounds they last took part in.

    Example: selffl flower list /var/lib/selffl/memory
    """
    from selffl.engines.flower.memory import memories

    _check_memory(folder)
    found: list[dict[str, Any]] = [
        {
            "experiment": memory.experiment,
            "client": memory.client,
            "round": last,
            "model_of_round": model,
            "bytes": sum(path.stat().st_size for path in (*memory.paths, memory.model_path) if path.is_file()),
            "problem": problem,
        }
        for memory, last, model, problem in memories(folder)
    ]
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
        return
    if not found:
        console.tell(console.out, f"Nothing is remembered in {folder} (a folder of one site: its node's memory-dir).")
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("experiment", "client", "last round", "model of round", "size"):
        table.add_column(name, justify="left" if name in ("experiment", "client") else "right")
    for row in found:
        rounds = (row["problem"],) if row["problem"] else (str(row["round"] or "–"), str(row["model_of_round"] or "–"))
        cells = [row["experiment"], row["client"], *rounds]
        table.add_row(*cells, *[""] * (4 - len(cells)), f"{row['bytes'] / 1024:,.0f} KiB")
    console.out.print(table, highlight=False, markup=False)


@flower_app.command("export")
def flower_export(
    folder: Annotated[Path, typer.Argument(help="Folder of memories: the node's `memory-dir`.", metavar="MEMORY")],
    client: Annotated[str, typer.Option(help="Client whose model to write.")],
    target: Annotated[Path, typer.Option("--out", "-o", help="File to write: .safetensors, or .pt for torch.load.")],
    experiment: Annotated[
        str | None, typer.Option(help="Of which experiment; needed if the client took part in several.")
    ] = None,
) -> None:
    """Write a client's personal model, as of its last evaluation, as a state_dict: parameters by their names.

    Parameters that are not trained are the module's own and are not in it.

    Example: selffl flower export /var/lib/selffl/memory --client anna --out anna.safetensors
    """
    from selffl.engines.flower.memory import ClientMemory, memories
    from selffl.runs.export import check_ending, save_state_dict
    from selffl.state.checkpoint import load_tensors

    check_ending(target)
    console.check_target(target)
    _check_memory(folder)
    if experiment is None:
        known = sorted({memory.experiment for memory, *_ in memories(folder) if memory.client == client})
        if len(known) > 1:
            raise ConfigError(f"client {client} took part in {', '.join(known)}; expected one. Give --experiment.")
        if not known:
            raise DataError(f"{folder} remembers nothing of client {client}; `selffl flower list` says what is there.")
        experiment = known[0]
    path = ClientMemory(folder, experiment, client, None).model_path
    if not path.is_file():
        raise CheckpointError(
            f"client {client} has no personal model of experiment {experiment} yet; expected one from an evaluation, "
            f"as {path}."
        )
    tensors, about = load_tensors(path)
    save_state_dict(target, tensors, {name: about[name] for name in ("experiment", "client", "round")})
    console.tell(console.out, f"Client {client} as of round {about['round']} of {experiment}: {target}")


def _check_memory(folder: Path) -> None:
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; expected a node's memory-dir.")
