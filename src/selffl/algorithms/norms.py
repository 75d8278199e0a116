"""Batch normalisation in a federation: three policies, and which methods can follow them.

A running statistic is no parameter: no gradient moves it, and no distance between models should count it.  It is a
coordinate behind the parameters that a training pass writes (`selffl.algorithms.local_task`), and that travels with the
model.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from selffl.algorithms.options import check_choice
from selffl.algorithms.suggestions import suggest
from selffl.errors import ConfigError

BatchNorm = Literal["averaged", "kept", "batch"]


def check_policy(batch_norm: BatchNorm | None) -> None:
    """Refuse an unknown policy."""
    if batch_norm is not None:
        check_choice("batch_norm", batch_norm, get_args(BatchNorm))


def check_batch_norm(batch_norm: BatchNorm, method: Any, *, num_statistics: int, num_kept: int) -> None:
    """Refuse a policy that a method cannot follow, on a model with so many running statistics and layers to keep."""
    if batch_norm == "kept" and not method.keeps_layers:
        raise ConfigError(
            f"batch_norm is 'kept', and {method.name} keeps no layers with its clients; expected a method that does, "
            f"such as {suggest(lambda other: other.keeps_layers)}, or batch_norm='averaged' or 'batch'."
        )
    if method.batch_norm == "kept" != batch_norm:
        raise ConfigError(
            f"batch_norm is {batch_norm!r}, and {method.name} keeps BatchNorm with each client; expected 'kept', or no "
            "batch_norm: nothing else of the model is a client's own."
        )
    if batch_norm == "kept" and not num_kept:
        raise ConfigError(
            f"{method.name} is to keep BatchNorm with each client, and the model has no BatchNorm with anything to "
            "keep; expected some. Give another model, or train without batch_norm='kept', by a method such as "
            f"{suggest(lambda other: other.batch_norm != 'kept')}."
        )
    if num_statistics and method.no_statistics is not None:
        raise ConfigError(
            f"the model has BatchNorm with running statistics, and {method.name} cannot carry them: "
            f"{method.no_statistics}. Pass batch_norm='batch', use GroupNorm, or take a method such as "
            f"{suggest(lambda other: other.no_statistics is None)}."
        )
