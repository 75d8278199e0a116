"""Methods that a message can name when another is needed: those that fit, by the registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NUM_NAMED = 2  # methods in a message


def suggest(fits: Callable[[Any], bool]) -> str:
    """The names of a few methods whose traits fit, well-known ones first: "fedavg or ditto"."""
    from selffl.algorithms import ALGORITHMS, WELL_KNOWN  # which import every method, and methods may ask this

    known = dict.fromkeys((*WELL_KNOWN, *ALGORITHMS))
    return " or ".join([name for name in known if fits(ALGORITHMS[name]())][:NUM_NAMED])
