"""The method of a run, and what is recorded of it."""

from __future__ import annotations

import dataclasses
from typing import Any

from selffl.algorithms import DEFAULT_ALGORITHM, Algorithm, algorithm, is_registered, registered_name
from selffl.errors import ConfigError

Method = Algorithm[Any, Any, Any, Any]


def named_method(chosen: str | Method) -> tuple[str, Method]:
    """A method and the name it is recorded by: the registry's, the most particular that fits."""
    if isinstance(chosen, str):
        return chosen, algorithm(chosen)
    if not isinstance(chosen, Algorithm):
        raise ConfigError(
            f"algorithm is {chosen!r}; expected a name such as {DEFAULT_ALGORITHM!r}, or a method with options, an "
            "instance of a subclass of selffl.algorithms.Algorithm."
        )
    return registered_name(chosen), chosen


def method_facts(name: str, method: Method) -> dict[str, Any]:
    """What a recipe records of a method."""
    return {
        "algorithm": name,
        "options": dataclasses.asdict(method) if dataclasses.is_dataclass(method) else {},
        "has_own_method": not is_registered(name, method),
        "has_global_model": method.has_global_model,
        "is_federated": method.is_federated,
    }
