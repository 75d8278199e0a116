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


def at_least(name: str, value: object, least: int, *, at_most: float = math.inf) -> None:
    """Refuse anything but a whole number from ``least`` up, and no larger than ``at_most``."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= at_most:
        high = f", and {at_most:g} or less" if at_most < math.inf else ""
        raise ConfigError(f"{name} is {_shown(value)}; expected a whole number, {least} or more{high}.")


def above(
    name: str, value: object, bound: float, *, at_most: float = math.inf, inclusive: bool = False, alternative: str = ""
) -> None:
    """Refuse anything but a number above ``bound`` (or equal to it, if inclusive) and no larger than ``at_most``."""
    # A whole number may be too large for a float, and is finite all the same.
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0
    if not is_number or value > at_most or value < bound or (value == bound and not inclusive):  # type: ignore[operator]
        low = f"{bound:g} or more" if inclusive else f"above {bound:g}"
        high = f" and at most {at_most:g}" if at_most < math.inf else ""
        raise ConfigError(f"{name} is {_shown(value)}; expected a number {low}{high}{alternative}.")


def _shown(value: object) -> str:
    """A value for a message; a whole number of hundreds of digits by its length."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return f"a whole number of {value.bit_length()} bits"
    return repr(value)
