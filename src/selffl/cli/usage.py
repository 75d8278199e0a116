"""What the command-line library has to say about a mistake, in this package's words: found, expected, what to do."""

from __future__ import annotations

import re
import sys
from typing import Any

from selffl.errors import unknown_name

MEANT = {"--method": "--algorithm", "--methods": "--algorithms"}  # what others call an option, and what it is here


def message(error: Any) -> str:
    """One line for a usage error; its classes moved between versions of the library, so it is known by what it has."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "selffl"
    see = f"See `{command} --help`."
    kind, text = type(error).__name__, str(error.format_message()).rstrip(".")
    if kind == "NoSuchOption" and context is not None:
        known = {name for param in context.command.params for name in param.opts if name.startswith("--")}
        meant = MEANT.get(error.option_name)
        if meant in known:
            return f"unknown option of `{command}` {error.option_name!r}; expected {meant!r}. {see}"
        return f"{unknown_name(f'option of `{command}`', error.option_name, known | {'--help'})} {see}"
    unknown = re.match(r"No such command ['\"](.+?)['\"]", text)
    if unknown and context is not None:
        known = context.command.list_commands(context)
        return f"{unknown_name(f'command of `{command}`', unknown[1], known)} {see}"
    if kind == "BadParameter" and getattr(error, "param", None) is not None:
        option = max(error.param.opts, key=len)
        name = option if option.startswith("-") else error.param.human_readable_name
        value = _given(error.param.opts)
        said = str(error.message).rstrip(".").removeprefix("Value error, ")
        return f"{name} is {value!r}; {said[:1].lower()}{said[1:]}. {see}" if value else f"{name}: {said}. {see}"
    return f"{text}. {see}"


def _given(options: list[str]) -> str | None:
    """What stands behind an option on the command line."""
    words = sys.argv[1:]
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in options:
            return value if equals else next(iter(words[index + 1 :]), None)
    return None
