"""Names that a shell completes, from a file that the registries were written to: completion should not wait for torch.

`make names` writes the file anew, and a test fails where it is out of date.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from selffl.runs.recipe import STUDY_SETTINGS

FILE = Path(__file__).with_name("names.json")
_NAMES: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))

PROBLEMS: tuple[str, ...] = tuple(_NAMES["problems"])
DEFAULT: str = _NAMES["default_algorithm"]
DEVICES = ("cpu", "cuda")


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def read_personalised() -> Mapping[str, str]:
    """What a client has of its own, by method: nothing, layers or the model."""
    return dict(_NAMES["personalises"])


def sources() -> Mapping[str, str]:
    """Who published a method, where and when; empty: nobody in particular, or this library."""
    return dict(_NAMES["sources"])


def is_federated(name: str) -> bool:
    """Whether clients of a method learn from each other."""
    return name not in _NAMES["alone"]


def algorithm(incomplete: str) -> list[str]:
    """A method."""
    return _starting(_NAMES["algorithms"], incomplete)


def algorithms(incomplete: str) -> list[str]:
    """The last of several methods with commas between them; one that is there already is not offered again."""
    before, comma, last = incomplete.rpartition(",")
    taken = before.split(",")
    return [f"{before}{comma}{name}" for name in _starting(_NAMES["algorithms"], last) if name not in taken]


def study(incomplete: str) -> list[str]:
    """What can be trained: a problem of the paper's, or a study of the user's own that lies here."""
    own = [path.parent.name for path in sorted(Path().glob("*/study.toml"))]
    return _starting([*PROBLEMS, *own], incomplete)


def paper_study(incomplete: str) -> list[str]:
    """A study of the paper."""
    return _starting(_NAMES["studies"], incomplete)


def data_set(incomplete: str) -> list[str]:
    """A data set."""
    return _starting(_NAMES["data_sets"], incomplete)


def tracker(incomplete: str) -> list[str]:
    """A tracker."""
    return _starting(_NAMES["trackers"], incomplete)


def device(incomplete: str) -> list[str]:
    """A device."""
    return _starting(DEVICES, incomplete)


def setting(ctx: typer.Context, incomplete: str) -> list[str]:
    """A key of --set, for the method that is named before it; the value is the user's."""
    chosen = ctx.params.get("algorithm") or DEFAULT
    return [f"{key}=" for key in _starting((*_NAMES["algorithms"].get(chosen, ()), *STUDY_SETTINGS), incomplete)]
