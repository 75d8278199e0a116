"""What a method says of tuning: options that are tuned, and the values to begin with.

A grid that turns out too narrow is widened (`selffl.runs.search`).  ``fine_tune`` is no option of a method: it is a
number of local steps that follow training, on each client by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Grid = Mapping[str, tuple[Any, ...]]  # values by the name of an option

FINE_TUNE = "fine_tune"
STEPS_AFTER: Grid = {FINE_TUNE: (0, 5, 20, 80, 320)}
LOCAL_STEPS: Grid = {"num_local_steps": (10, 20, 40)}
