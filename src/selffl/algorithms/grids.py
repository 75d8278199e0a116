"""What is tuned in each method, and the values to begin with.

A grid that turns out too narrow is widened (`selffl.runs.search`).  The table has the names of the registry.
``fine_tune`` is no option of a method: it is a number of local steps that follow training, on each client by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Grid = Mapping[str, tuple[Any, ...]]  # values by the name of an option

FINE_TUNE = "fine_tune"
_STEPS_AFTER: Grid = {FINE_TUNE: (0, 5, 20, 80, 320)}
_MOST_STEPS: Grid = {"max_local_steps": (20, 40, 80)}
_DITTO: Grid = {"penalty": (0.03, 0.1, 0.3, 1.0, 3.0)}

GRIDS: dict[str, Grid] = {
    "self-fl-auto": {},  # which has nothing to tune
    "self-fl": _MOST_STEPS,
    "self-fl-exact": _MOST_STEPS,
    "self-fl-augmented": _MOST_STEPS,
    "self-fl-cluster": _MOST_STEPS,
    "self-fl-sums": _MOST_STEPS,
    "apfl": {"mixing": (0.25, 0.5, 0.75)},
    "ditto": _DITTO,
    "ditto-equal": _DITTO,
    "fedala": {"mixing_rate": (0.1, 1.0, 10.0)},  # the authors' value is 1
    "fedavg": _STEPS_AFTER,
    "fedavg-equal": _STEPS_AFTER,
    "fedbabu": {"fine_tune_epochs": (1, 5, 20)},  # the authors' value is 5
    "fedbn": _STEPS_AFTER,
    "feddbe": {"penalty": (0.1, 1.0, 10.0, 50.0)},  # the authors' value is 50
    "feddpa": {"mixing": (0.25, 0.5, 0.75)},  # the authors' value is 0.5
    "fedpac": {"alignment": (0.1, 1.0, 10.0)},  # the authors' value is 1
    "fedper": _STEPS_AFTER,
    "fedprox": {"penalty": (0.001, 0.01, 0.1, 1.0)},  # the authors' values
    "fedrep": {"head_steps": (10, 20, 40)},
    "fedrod": {"num_local_steps": (10, 20, 40)},
    "local": {"num_local_steps": (10, 20, 40)},
    "perfedavg": {"adaptation_steps": (1, 5, 20)},
    "pfedbayes": {"adam_learning_rate": (1e-3, 3e-3, 1e-2)},  # the authors' value is 0.001
    "pfedme": {"penalty": (1.0, 5.0, 15.0)},  # the authors' value is 15
    "scaffold": _STEPS_AFTER,
}
