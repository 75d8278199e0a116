"""Names that a shell completes, from a file that the registries were written to: completion should not wait for torch.

`make names` writes the file anew, and a test fails where it is out of date.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from selffl.runs.recipe import STUDY_SETTINGS

FILE = Path(__file__).with_name("names.json")
_NAMES: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))

PROBLEMS: tuple[str, ...] = tuple(_NAMES["problems"])
DEFAULT: str = _NAMES["default_algorithm"]
STUDY_METHODS: tuple[str, ...] = tuple(_NAMES["study_methods"])  # that a new study compares
STUDY_OPTION: Sequence[Any] = _NAMES["study_option"]  # a method, one of its options, and a value


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _completion(names: Iterable[str]) -> Callable[[str], list[str]]:
    """A function that offers those of the names that begin as what is typed."""

    def offer(incomplete: str) -> list[str]:
        return _starting(names, incomplete)

    return offer


algorithm = _completion(_NAMES["algorithms"])
paper_study = _completion(_NAMES["studies"])
data_set = _completion(_NAMES["data_sets"])
tracker = _completion(_NAMES["trackers"])
device = _completion(("cpu", "cuda"))


PERSONALISES: Mapping[str, str] = _NAMES["personalises"]  # what a client has of its own: nothing, layers or the model
SOURCES: Mapping[str, str] = _NAMES["sources"]  # who published a method, where and when; empty: this library, or nobody


def is_federated(name: str) -> bool:
    """Whether clients of a method learn from each other."""
    return name not in _NAMES["alone"]


def algorithms(incomplete: str) -> list[str]:
    """The last of several methods with commas between them; one that is there already is not offered again."""
    before, comma, last = incomplete.rpartition(",")
    taken = before.split(",")
    return [f"{before}{comma}{name}" for name in _starting(_NAMES["algorithms"], last) if name not in taken]


def study(incomplete: str) -> list[str]:
    """What can be trained: a problem of the paper's, or a study of the user's own that lies here."""
    own = [path.parent.name for path in sorted(Path().glob("*/study.toml"))]
    return _starting([*PROBLEMS, *own], incomplete)


def setting(ctx: typer.Context, incomplete: str) -> list[str]:
    """A key of --set, for the method that is named before it; the value is the user's."""
    chosen = ctx.params.get("algorithm") or DEFAULT
    return [f"{key}=" for key in _starting((*_NAMES["algorithms"].get(chosen, ()), *STUDY_SETTINGS), incomplete)]
