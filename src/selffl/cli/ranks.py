"""The command line as one of several processes that torchrun has started: rank 0 speaks, the others are silent."""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from selffl.cli import console
from selffl.errors import ConfigError, RankError

COMMAND = "run"  # the one that trains over several processes


def num_processes() -> int:
    """How many there are, by the environment."""
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() else 1


def number() -> int:
    """Which of them this is."""
    text = os.environ.get("RANK", "")
    return int(text) if num_processes() > 1 and text.isdecimal() else 0


def refuse_other_commands(command: str | None) -> None:
    """Several processes that do the same would write over each other's files."""
    if num_processes() > 1 and command not in (None, COMMAND):
        raise ConfigError(
            f"selffl {command} is one of {num_processes()} processes (WORLD_SIZE); expected one, for only `selffl run` "
            "trains over several. Start it without torchrun, or unset WORLD_SIZE."
        )


def silence() -> None:
    """Let nothing be heard of a process that is not rank 0."""
    if number() == 0:
        return
    nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (as long as the process)
    console.out.file = console.err.file = sys.stdout = nowhere
    logging.getLogger("selffl").addHandler(logging.NullHandler())


def speak_up(error: Exception) -> None:
    """Let rank 1 be heard where rank 0 cannot say itself that it was lost."""
    if number() == 1 and isinstance(error, RankError):
        from selffl.engines.ranks import FirstRankLostError

        if isinstance(error, FirstRankLostError):
            console.err.file = sys.stderr


def wait_for_first() -> None:
    """Let rank 0 say what is wrong, before torchrun ends it because this process has ended."""
    if number():
        from selffl.engines.ranks import GRACE_SECONDS

        with suppress(KeyboardInterrupt):
            time.sleep(GRACE_SECONDS)


def again(words: list[str]) -> list[str]:
    """A command as it has to be given to have as many processes."""
    here = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return words if num_processes() == 1 else ["torchrun", "--nproc-per-node", here, "-m", *words]
