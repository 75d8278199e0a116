"""What can go wrong, as a family.

SelfFLError
├── ConfigError       an option, a name or a combination that cannot work
├── DataError         rows, columns or arrays that are not what they should be
├── CheckpointError   a saved run that is damaged, incomplete or of another version
├── DivergedError     training has diverged: a number is NaN or infinite
├── RefusedError      an order over the network that a client does not follow
├── QuorumError       too few clients answered in a round over the network
└── RankError         a process of a run over several was lost, or has failed

Every message says what was found, what was expected, and what to do, in one line.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

MOST_CHARACTERS = 2_000  # of a message
UNSHOWN = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))  # categories that end a line, or that a terminal acts on


class SelfFLError(Exception):
    """Root of all errors a user can cause; the command line turns it into one line and exit code 2.

    What a message quotes may come from a file of somebody else: whatever would end the line, or make a terminal do
    something, is spelt out, and the middle of a message without end is left out.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(_shown(str(message)))


class ConfigError(SelfFLError):
    """An option, a name or a combination of options that cannot work."""


class DataError(SelfFLError):
    """Rows, columns or arrays that are not what they should be."""


class CheckpointError(SelfFLError):
    """A saved run that is damaged, incomplete or of another version."""


class DivergedError(SelfFLError):
    """Training has diverged: a number is NaN or infinite."""


class RefusedError(SelfFLError):
    """An order over the network that a client does not follow; its text holds no data and may be sent to the server."""


class QuorumError(SelfFLError):
    """Too few clients answered in a round over the network."""


class RankError(SelfFLError):
    """A process of a run over several was lost, or has failed."""


def _shown(text: str) -> str:
    """A text in one line of bounded length."""
    if len(text) > MOST_CHARACTERS:
        text = f"{text[: MOST_CHARACTERS // 2]} … {text[-MOST_CHARACTERS // 2 :]}"
    if text.isprintable():
        return text
    return "".join(ascii(each)[1:-1] if unicodedata.category(each) in UNSHOWN else each for each in text)


def unknown_name(kind: str, found: object, known: Iterable[str]) -> ConfigError:
    """The error for a name that is not in a list, with the nearest one that is."""
    names = sorted(known)
    near = difflib.get_close_matches(found, names, n=1, cutoff=0.5) if isinstance(found, str) else []
    hint = f"did you mean {near[0]!r}? Expected" if near else "expected"
    return ConfigError(f"unknown {kind} {found!r}; {hint} one of: {', '.join(names)}.")


def check_known(kind: str, found: object, known: Collection[Any]) -> None:
    """Refuse a name that is not in a list."""
    if found not in known:
        raise unknown_name(kind, found, known)


def first_few(values: Sequence[object], most: int, shown: Callable[[object], str] = str) -> str:
    """The first of some values with commas between them, and dots where there are more."""
    return ", ".join(map(shown, values[:most])) + (", …" if len(values) > most else "")


def pluralise(number: int, noun: str) -> str:
    """A number with its noun: 1 row, 1,000 rows, 10 classes."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def one_line(error: BaseException) -> str:
    """What other code says has gone wrong, in one line; what kind of error it is where it says nothing."""
    return " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
