"""The method of a run, and what is recorded of it."""

from __future__ import annotations

import dataclasses
from typing import Any

from selffl.algorithms import ALGORITHMS, DEFAULT_ALGORITHM, Algorithm, algorithm
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
    presets = {name: getattr(make, "keywords", {}) for name, make in ALGORITHMS.items() if _is_named(name, chosen)}
    fitting = [name for name, preset in presets.items() if all(getattr(chosen, key) == preset[key] for key in preset)]
    return max(fitting, key=lambda name: len(presets[name]), default=chosen.name), chosen


def _is_named(name: str, method: Method) -> bool:
    """Whether the registry makes methods of that kind under that name."""
    return name in ALGORITHMS and type(ALGORITHMS[name]()) is type(method)


def method_facts(name: str, method: Method) -> dict[str, Any]:
    """What a recipe records of a method."""
    return {
        "algorithm": name,
        "options": dataclasses.asdict(method) if dataclasses.is_dataclass(method) else {},
        "has_own_method": not _is_named(name, method),
        "has_global_model": method.has_global_model,
        "is_federated": method.is_federated,
    }
