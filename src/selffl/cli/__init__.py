"""The command line: exit code 0 on success, 2 on a user's mistake (one line), 1 on a fault of ours."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from selffl._version import __version__
from selffl.cli import (
    bench,
    console,
    data,
    export,
    flower,
    init,
    methods,
    new_client,
    posterior,
    predict,
    ranks,
    report,
    run,
    studies,
    tune,
    usage,
)
from selffl.errors import SelfFLError

PANELS = {  # of the help, in this order
    "Start": ("demo", "init", "run", "compare", "tune"),
    "Look": ("methods", "report", "figures", "serve", "posterior"),
    "Models": ("export", "predict", "welcome"),
    "Science": ("paper", "data", "bench"),
    "Deploy": ("flower",),
}
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}


WORDS = {  # what the help calls a value, by what typer calls its type, before 0.29 and since
    **dict.fromkeys(("int", "int range", "float", "integer", "integer range", "float range"), "NUMBER"),
    **dict.fromkeys(("str", "list[str]", "text"), "NAME"),
    **dict.fromkeys(("path", "file", "directory"), "PATH"),
}


class _PlainWords:
    """The help says in words what is to be given: a name, a number, a path; nothing after a flag."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Options and arguments, as the help shows them."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if param.param_type_name == "argument":
                _name_argument(param)
            elif getattr(param, "is_flag", False):
                param.metavar = ""
            else:
                kind = param.display_type(ctx).strip("<>") if hasattr(param, "display_type") else param.type.name
                param.metavar = param.metavar or WORDS.get(kind)
                param._get_number_range_help_str = lambda: None  # a number out of range is told in a sentence
        return params


def _name_argument(param: Any) -> None:
    """Its name alone, in capitals: neither its type beside it nor braces around it in the line of usage."""
    name = param.metavar = param.metavar or param.name.upper()
    usage = name if param.required else f"[{name}]"
    param.get_usage_pieces = lambda ctx: [usage]
    param.display_type_rich = lambda ctx: None


class _Command(_PlainWords, TyperCommand):
    pass


class _Group(_PlainWords, TyperGroup):
    pass


class _Grouped(_Group):
    def list_commands(self, ctx: Any) -> list[str]:
        """In the order of the panels."""
        return list(PANEL_OF)


app = typer.Typer(
    name="selffl",
    cls=_Grouped,
    help="Train one model per client without moving anybody's data; selffl decides how much each borrows from the rest."
    "\n\nExample: selffl demo",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for part in (studies, run, tune, init, methods, report, posterior, export, predict, new_client, bench):
    app.add_typer(part.app)
app.add_typer(data.data_app, name="data")
app.add_typer(flower.flower_app, name="flower")


def _inner(above: typer.Typer) -> list[typer.Typer]:
    """The groups of commands right below one."""
    return [group.typer_instance for group in above.registered_groups if group.typer_instance is not None]


levels = [app]
for level in levels:
    for command in level.registered_commands:
        command.cls = _Command
    for group in _inner(level):
        group.info.cls = _Group
        levels.append(group)
for level in (app, *_inner(app)):
    entries: list[Any] = [*level.registered_commands, *level.registered_groups]
    for entry in entries:
        if entry.name in PANEL_OF:
            entry.rich_help_panel = PANEL_OF[entry.name]

INTERRUPTED = 130  # the shell's code for it
DRAWING = ("matplotlib", "jinja2")  # what a site may do without
STOPPED = "stopped. What was finished is kept."


def _version(wanted: bool) -> None:
    if wanted:
        console.out.print(f"selffl {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options that every command has."""
    ranks.refuse_other_commands(context.invoked_subcommand)


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: processes that it started end with it
    if getattr(signal, "SIGHUP", None) and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # not under nohup
        signal.signal(signal.SIGHUP, signal.default_int_handler)  # a terminal that is closed
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without σ shows a question mark, not a traceback
    warnings.showwarning = _warn
    ranks.silence()
    try:
        code = app(standalone_mode=False, prog_name="selffl")
        if code == INTERRUPTED:  # newer versions of the command-line library take the interruption for themselves
            _say(STOPPED)
    except SelfFLError as error:
        ranks.speak_up(error)
        _say(str(error))
        code = 2
    except BrokenPipeError:
        # The reader of a pipe has seen enough (`| head`); what is left in the buffer has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in DRAWING:
            raise
        _say(f"this command draws with {package}, which is not installed. Install it: pip install {package}.")
        code = 2
    except OSError as error:
        # A folder that may not be written, a disk that is full: nothing of ours.
        _say(_refusal(error))
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        _say(STOPPED)
        code = INTERRUPTED
    except Exception as error:
        # Usage errors come from the command-line library, whose classes moved between its versions.
        if not hasattr(error, "format_message"):
            raise
        # A command without arguments has shown its help, which is no mistake.
        code = 0 if type(error).__name__ == "NoArgsIsHelpError" else 2
        if code:
            _say(usage.message(error))
    if code:
        ranks.wait_for_first()
    sys.exit(code if isinstance(code, int) else 0)


def _refusal(error: OSError) -> str:
    """What the disk has refused, and what to do."""
    where = error.filename or "a file"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}: no space left to write it. Make room and go on: what was finished before is kept."
    return f"{where}: {error.strerror or error}. Check that it exists and may be read or written."


def _warn(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    """A warning meant for users as a line, without the place in the code; those for developers as ever."""
    if issubclass(category, UserWarning):
        _say(str(message))
    else:
        sys.stderr.write(warnings.formatwarning(message, category, *place[:2]))


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # of a terminal that is gone
        console.tell(console.err, "selffl: " + " ".join(text.split()))


if __name__ == "__main__":
    main()
