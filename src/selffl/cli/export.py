"""`selffl export`: take personal models out of a run, or one out of a file of many."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from selffl.cli import console
from selffl.errors import ConfigError

app = typer.Typer()

Trusted = Annotated[
    bool,
    typer.Option("--trusted", "--trust", help="Read a run's own module, a pickle: say that you know who made it."),
]
PrecisionChoice = Literal["exact", "float16", "bfloat16"]  # how differences to the global model are kept
FormChoice = Literal["module", "merged", "peft"]  # how one model with adapters is written


@app.command("export")
def export_command(
    source: Annotated[
        Path, typer.Argument(help="Folder of a run, or a file that this command has written.", metavar="RUN")
    ],
    clients: Annotated[
        list[str] | None,
        typer.Option("--client", "-c", metavar="ID", help="Client whose model to write; repeat it for several."),
    ] = None,
    everybody: Annotated[bool, typer.Option("--all", help="The models of all clients.")] = False,
    target: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File to write; without it, personal.safetensors, if there is none yet."),
    ] = None,
    precision: Annotated[
        PrecisionChoice, typer.Option(help="Of several models: every bit, or differences rounded to a shorter type.")
    ] = "exact",
    form: Annotated[
        FormChoice,
        typer.Option("--as", help="One model with adapters: as it was trained, with plain weights, or peft's folder."),
    ] = "module",
    is_list: Annotated[bool, typer.Option("--list", help="Write nothing; list the clients.")] = False,
    trusted: Trusted = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON what was written, or the list.")] = False,
) -> None:
    """Write personal models as safetensors.

    One client: a plain state_dict, for module.load_state_dict. Several, or --all: one compact file, the global model
    and what differs from it, which selffl.PersonalModels and this command read.

    A model with adapters (selffl.adapters) can be written --as merged, for a module without them, or --as peft.

    Example: selffl export runs/wards --client "ward 03" -o ward-03.safetensors
    """
    from selffl.runs.folder import read_config

    if is_list:
        _list(source, as_json)
        return
    if not source.is_file():
        read_config(source)  # a run that is not there comes before what is said of it
    if everybody == bool(clients):
        raise ConfigError("whose models? Expected --client ID, once or several times, or --all; --list names them.")
    wanted = list(dict.fromkeys(clients or ()))
    is_plain = len(wanted) == 1
    if is_plain and precision != "exact":
        raise ConfigError(f"--precision is {precision}, and one model is written as it is; leave it out.")
    if form != "module" and not (is_plain and source.is_dir()):
        raise ConfigError(f"--as is {form}, which is for one client's model of a run; expected RUN and one --client.")
    path = console.new_file(target, "personal" if form == "peft" else "personal.safetensors")
    console.check_target(path)
    if source.is_file():
        written = _from_file(source, wanted, path)
    else:
        written = _from_run(source, wanted, path, precision, form, trusted)
    size = sum(part.stat().st_size for part in (path.iterdir() if path.is_dir() else (path,)))
    about = {"file": str(path), "bytes": size, "clients": written, "plain": is_plain}
    if as_json:
        print(json.dumps(about, ensure_ascii=False))
        return
    whose = f"The model of client {written[0]}" if is_plain else f"Models of {len(written):,} clients"
    console.tell_path(console.out, f"{whose}: ", path, f" ({size / 1024:,.0f} KiB)")
    if not is_plain:
        again = shlex.join(["selffl", "export", str(path), "--client", str(written[0]), "--out", "one.safetensors"])
        console.tell(console.err, f"To take one out: {again}")


def _from_run(
    folder: Path, wanted: Sequence[str], path: Path, precision: PrecisionChoice, form: FormChoice, trusted: bool
) -> list[Any]:  # fmt: skip
    """Write the models of those clients, or of all, and say whose they are."""
    from selffl.adapters import merge, save_peft
    from selffl.runs.export import check_ending, save_state_dict
    from selffl.runs.reopen import load
    from selffl.training.answers import trained_module

    if len(wanted) == 1 and form != "peft":
        check_ending(path)
    with console.options_in_messages():
        run = load(folder, trusted=trusted)
    ids = _ids(wanted, list(run.federation.clients))
    if form == "module":
        run.export(path, ids, precision=precision, full=len(wanted) == 1)
        return ids
    model = trained_module(run.personal_model(ids[0]))
    if form == "peft":
        save_peft(model, path)
    else:
        save_state_dict(path, merge(model).state_dict(), {"client": ids[0], **run.describe_answers()})
    return ids


def _from_file(file: Path, wanted: Sequence[str], path: Path) -> list[Any]:
    """Take one model out of a file of many."""
    from selffl.runs.export import PersonalModels

    models = PersonalModels(file)
    if len(wanted) != 1:
        raise ConfigError(f"{file} already holds the models of {len(models.clients):,} clients; expected one --client.")
    if path.resolve() == file.resolve():
        raise ConfigError(f"{path} is the file that is read; expected another one to write.")
    ids = _ids(wanted, models.clients)
    models.save(ids[0], path)
    return ids


def _ids(wanted: Sequence[str], known: list[Any]) -> list[Any]:
    """Ids by what was typed; all of them if nothing was."""
    from selffl.runs.export import position_of

    names = [str(client) for client in known]
    return [known[position_of(client, names)] for client in wanted] if wanted else known


def _list(source: Path, as_json: bool) -> None:
    """Who is there, and how sure their models are."""
    from selffl.runs.export import CLIENT_COLUMNS, PersonalModels
    from selffl.runs.folder import CLIENTS, read_config, read_records

    if source.is_file():
        models = PersonalModels(source)
        rows = [
            {"client": client, **models.about(client), "bytes": models.stored_bytes(client)}
            for client in models.clients
        ]
    else:
        read_config(source)
        found = read_records(source).clients
        rows = [{name: row[name] for name in ("client", *CLIENT_COLUMNS) if name in row} for row in found]
        if not rows:
            raise ConfigError(f"{source} holds no {CLIENTS} yet; expected a run that has been evaluated.")
    if as_json:
        print(json.dumps(rows, ensure_ascii=False))
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in names:
        table.add_column(name.replace("_", " "), justify="left" if name == "client" else "right")
    for row in rows:
        cells = [row.get(name) for name in names]
        table.add_row(
            *("–" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells)
        )
    console.out.print(table, highlight=False, markup=False)
