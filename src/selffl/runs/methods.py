"""The method of a run, and what is recorded of it."""

from __future__ import annotations

import dataclasses
from typing import Any

from selffl.algorithms import DEFAULT_ALGORITHM, Algorithm, algorithm, is_registered, registered_name
from selffl.algorithms.local import training_alone
from selffl.algorithms.optimisers import check_optimiser, optimiser_of
from selffl.algorithms.suggestions import suggest
from selffl.algorithms.training_options import TrainingOptions
from selffl.engines.defence import check_defence
from selffl.engines.limits import PrivacyOptions
from selffl.errors import ConfigError
from selffl.runs.recipe import Recipe

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
        "recorded": method.recorded,
    }


def check_room(recipe: Recipe, method: Method) -> None:
    """Refuse settings that a method has no room for, wherever it is run."""
    check_optimiser(optimiser_of(recipe.optimiser), method)
    TrainingOptions.of(recipe).check_method(method)
    check_defence(recipe.robust, method)
    PrivacyOptions.of(recipe).check_method(method, recipe.robust)
    if recipe.precision == "bfloat16" and method.no_bfloat16 is not None:
        raise ConfigError(
            f"precision is 'bfloat16', and {method.name} cannot have it: {method.no_bfloat16}. Expected 'full', or "
            f"another method, such as {suggest(lambda other: other.no_bfloat16 is None)}."
        )
    if recipe.gain:
        training_alone(method)  # which refuses a method that cannot be held against it
