"""The problem whose clients are cut from one set of pictures, so that what differs between them is known."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from selffl.data.federation import Federation
from selffl.data.regimes import regime
from selffl.studies.problems import Problem

FLAT_MODELS = ("softmax", "mlp")  # whose rows are lists of pixels


@dataclass(frozen=True)
class RegimeProblem(Problem):
    """A problem on clients of `selffl.data.regimes`; ``data`` names the pictures.

    Attributes:
        kind: What differs between clients.
        sizes: How many rows they have, ``"even"`` or ``"lognormal"``.
    """

    keeps_rows: ClassVar[bool] = False  # a copy for each run would take gigabytes

    kind: str = "alike"
    sizes: str = "even"

    def federation(self, seed: int, validation_fraction: float = 0.0) -> Federation:
        """The clients of one seed."""
        return _regime(self.data, self.kind, self.sizes, self.model in FLAT_MODELS, seed, validation_fraction)


@lru_cache(maxsize=2)  # runs of one seed follow each other
def _regime(pictures: str, kind: str, sizes: str, is_flat: bool, seed: int, validation_fraction: float) -> Federation:
    return regime(pictures, kind, sizes, is_flat=is_flat, seed=seed, validation_fraction=validation_fraction)
