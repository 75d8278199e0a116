"""What the command-line library has to say about a mistake, in this package's words: found, expected, what to do."""

from __future__ import annotations

import re
import sys
from typing import Any

from selffl.errors import unknown_name

MEANT = {"--method": "--algorithm", "--methods": "--algorithms"}  # what others call an option, and what it is here
MEANT_COMMANDS = {  # and a command
    "resume": "selffl run STUDY --out FOLDER --resume",
    "train": "selffl run STUDY",
    "fit": "selffl run STUDY",
}
# What the library expects of a value, and how that is said here.
EXPECTED = (
    (r"input should be a valid integer.*", "expected a whole number"),
    (r"input should be a valid number.*", "expected a number"),
    (r"input should be greater than or equal to (\S+)", r"expected \1 or more"),
    (r"input should be less than or equal to (\S+)", r"expected \1 or less"),
    (r"input should be (.+)", r"expected \1"),
)


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
        if unknown[1] in MEANT_COMMANDS and command == "selffl":
            return f"unknown command of `{command}` {unknown[1]!r}; expected `{MEANT_COMMANDS[unknown[1]]}`. {see}"
        known = context.command.list_commands(context)
        return f"{unknown_name(f'command of `{command}`', unknown[1], known)} {see}"
    if kind == "BadParameter" and getattr(error, "param", None) is not None:
        option = max(error.param.opts, key=len)
        name = option if option.startswith("-") else error.param.human_readable_name
        value = _given(error.param.opts)
        said = str(error.message).rstrip(".").removeprefix("Value error, ")
        said = said[:1].lower() + said[1:]
        for pattern, text_here in EXPECTED:
            if re.fullmatch(pattern, said):
                said = re.sub(pattern, text_here, said)
                break
        return f"{name} is {value!r}; {said}. {see}" if value else f"{name}: {said}. {see}"
    if missing := re.match(r"Missing (?:argument|option) ['\"](.+?)['\"]", text):
        return f"{missing[1]} is missing; expected `{command} {missing[1]}`. {see}"
    if extra := re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.+)\)", text):
        return f"{extra[1]!r} is left over; expected no more than `{command}` takes. {see}"
    return f"{text}. {see}"


def _given(options: list[str]) -> str | None:
    """What stands behind an option on the command line."""
    words = sys.argv[1:]
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in options:
            return value if equals else next(iter(words[index + 1 :]), None)
    return None
