"""Checks of a method's options, made when the method is constructed."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from selffl.errors import ConfigError


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse a value that is not in the list."""
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; expected {' or '.join(repr(choice) for choice in allowed)}.")


def check_bool(name: str, value: object) -> None:
    """Refuse anything but True and False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; expected True or False.")


def check_string(name: str, value: object) -> None:
    """Refuse anything but a string."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} is {value!r}; expected a string.")


def check_integer(name: str, value: object, least: int, *, at_most: float = math.inf) -> None:
    """Refuse anything but a whole number from ``least`` up, and no larger than ``at_most``."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= at_most:
        high = f", and {at_most:g} or less" if at_most < math.inf else ""
        raise ConfigError(f"{name} is {_shown(value)}; expected a whole number, {least} or more{high}.")


def check_number(
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    at_most: float = math.inf,
    alternative: str = "",
) -> None:
    """Refuse anything but a finite number within the bounds; a message names ``alternative`` beside it."""
    # A whole number may be too large for a float, and what is computed is floats.
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not is_number or not (value > above and at_least <= value <= at_most):  # type: ignore[operator]
        low = f"above {above:g}" if above > at_least else f"{at_least:g} or more"
        high = f" and at most {at_most:g}" if at_most < math.inf else ""
        raise ConfigError(f"{name} is {_shown(value)}; expected a number {low}{high}{alternative}.")


def _shown(value: object) -> str:
    """A value for a message; a whole number of hundreds of digits by its length."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**40:
        return f"a whole number of {value.bit_length()} bits"
    return repr(value)
