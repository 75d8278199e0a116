"""Checks of a method's options, made when the method is constructed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from selffl.errors import ConfigError


def one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse a value that is not in the list."""
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; expected {' or '.join(repr(choice) for choice in allowed)}.")


def true_or_false(name: str, value: object) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; expected True or False.")


def a_string(name: str, value: object) -> None:
    """Refuse anything but a string."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} is {value!r}; expected a string.")


def at_least(name: str, value: object, least: int) -> None:
    """Refuse anything but a whole number from ``least`` up."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}; expected a whole number, {least} or more.")


def above(
    name: str, value: object, bound: float, *, at_most: float = math.inf, inclusive: bool = False, alternative: str = ""
) -> None:
    """Refuse anything but a number above ``bound`` (or equal to it, if inclusive) and no larger than ``at_most``."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value > at_most or value < bound or (value == bound and not inclusive):  # type: ignore[operator]
        low = f"{bound:g} or more" if inclusive else f"above {bound:g}"
        high = f" and at most {at_most:g}" if at_most < math.inf else ""
        raise ConfigError(f"{name} is {value!r}; expected a number {low}{high}{alternative}.")
