"""Checks of a method's options: declared with each option, and made when the method is constructed."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from functools import partial
from typing import Any, Self

from selffl.errors import ConfigError

CHECK = "check"  # metadata of a field: what is called with its name and its value


def option(default: Any, check: Callable[..., object], *, kw_only: bool = False, **bounds: Any) -> Any:
    """A field of a dataclass of options, whose values are held to ``check(name, value, **bounds)``.

    None is a value of fields whose type says so, whatever the check.

    Examples:
        >>> from dataclasses import dataclass
        >>> from selffl.algorithms.options import check_number, check_options, option
        >>> @dataclass(frozen=True)
        ... class Options:
        ...     share: float = option(0.5, check_number, at_least=0.0, at_most=1.0)
        ...     __post_init__ = check_options
        >>> Options(share=2.0)
        Traceback (most recent call last):
        selffl.errors.ConfigError: share is 2.0; expected a number 0 or more and at most 1.
    """
    return field(default=default, kw_only=kw_only, metadata={CHECK: partial(check, **bounds)})


def check_options(options: Any) -> None:
    """Refuse a value that the check of its option refuses."""
    for each in fields(options):
        value = getattr(options, each.name)
        is_none = value is None and "None" in str(each.type)
        if CHECK in each.metadata and not is_none:
            each.metadata[CHECK](each.name, value)


class SettingsPart:
    """A dataclass of options that are some of a run's settings, by the same names."""

    def __post_init__(self) -> None:
        check_options(self)
        for name, value in self.to_json().items():  # 1 and 1.0 are the same setting
            kind = str(self.__dataclass_fields__[name].type)  # type: ignore[attr-defined]
            if kind.startswith("float") and value is not None:
                object.__setattr__(self, name, float(value))

    @classmethod
    def of(cls, settings: Any) -> Self:
        """Options of this kind, from the settings of a run that they are a part of."""
        return cls(**{each.name: getattr(settings, each.name) for each in fields(cls)})  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        """The options by name, as messages and files hold them."""
        return {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]


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
