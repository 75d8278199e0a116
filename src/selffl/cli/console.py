"""What the commands write with, and what they check before they write."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.style import Style
from rich.text import Text

from selffl.errors import ConfigError, SelfFLError


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to `main`: rich would end with exit code 1."""
        raise BrokenPipeError


out = _Console()
err = _Console(stderr=True)

WIDTH = 80  # columns of a terminal
HEADING_WIDTH = 10
OPTIONS = "client|label|features|exclude|task|missing|decimal"  # that commands and the library call alike
IN_PYTHON, IN_SHELL = r"Pass trusted=True( if [^.]*?), or pass [^.]*\.", r"Add --trusted\1."


def tell(console: Console, text: str | Text) -> None:
    """A sentence, without colours or markup: on a terminal it breaks between words, elsewhere it is one line."""
    said = Text(text) if isinstance(text, str) else text
    console.print(said, soft_wrap=not console.is_terminal or len(text) <= console.width)


def tell_command(console: Console, before: str, words: Sequence[str]) -> None:
    """A command to copy: no line end is put into it."""
    console.print(Text(before + shlex.join(words)), soft_wrap=True)


def tell_path(console: Console, before: str, path: Path, after: str = "") -> None:
    """What was written, by its whole path; terminals that know links open it, and no line end is put into it."""
    whole = path.absolute()
    link = Text(str(whole), style=Style(link=whole.as_uri()) if console.is_terminal else "")
    console.print(Text.assemble(before, link, after), soft_wrap=True)


def align(facts: Iterable[tuple[str, str]]) -> list[str]:
    """Headings and what belongs to them as lines of two columns; no word is broken, a repeated heading is left out."""
    lines, last = [], ""
    for heading, text in facts:
        first = f"{'' if heading == last else heading:<{HEADING_WIDTH}}"
        lines += textwrap.wrap(
            text,
            WIDTH,
            initial_indent=first,
            subsequent_indent=" " * HEADING_WIDTH,
            break_long_words=False,
            break_on_hyphens=False,
        )
        last = heading
    return lines


@contextmanager
def json_only(is_wanted: bool) -> Iterator[None]:
    """Nothing on standard output but what is printed as JSON, where that is wanted."""
    was_quiet = out.quiet
    out.quiet = was_quiet or is_wanted
    try:
        yield
    finally:
        out.quiet = was_quiet


@contextmanager
def options_in_messages() -> Iterator[None]:
    """Write options in the library's messages as the command line has them: ``--missing drop``."""
    try:
        yield
    except SelfFLError as error:
        text = re.sub(rf"(?<= )({OPTIONS})=([\"'])(.+?)\2", r"--\1 \3", str(error))
        text = re.sub(rf"(?<= )({OPTIONS})=", r"--\1", text)
        raise type(error)(re.sub(IN_PYTHON, IN_SHELL, text)) from None


@contextmanager
def going_on(words: Sequence[str], kept: str) -> Iterator[None]:
    """Say after an interruption what is kept, and the command that goes on from there."""
    try:
        yield
    except KeyboardInterrupt:
        tell_command(err, f"{kept} To resume: ", words)
        raise


def check_folder(folder: Path) -> None:
    """Refuse an output folder that is a file, or would lie inside one."""
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise ConfigError(f"{place} is a file; expected a folder to write into. Give another --out.")


def new_file(target: Path | None, usual: str) -> Path:
    """The file to write: the one that is named, or one with the usual name where there is none yet."""
    if target is None and Path(usual).exists():
        raise ConfigError(f"{usual} is already there; expected another name. Give one by --out.")
    return target or Path(usual)


def check_target(target: Path | None) -> None:
    """Refuse a file that cannot be written before any work is done."""
    if target is None:
        return
    if target.is_dir():
        raise ConfigError(f"{target} is a folder; expected the name of a file to write.")
    if not target.parent.is_dir():
        raise ConfigError(f"the folder {target.parent} does not exist; make it, or give another file.")
