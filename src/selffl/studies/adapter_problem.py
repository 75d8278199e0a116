"""The problem whose clients adapt a network that was trained before."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

from torch import nn

from selffl.adapters import lora
from selffl.data.federation import Federation
from selffl.data.split import Split
from selffl.studies.adapter_images import IMAGES
from selffl.studies.adapter_rows import HEAD, Benchmark
from selffl.studies.adapter_speech import SPEECH
from selffl.studies.adapter_text import TEXT
from selffl.studies.problems import Problem

BENCHMARKS: Mapping[str, Benchmark] = {"speech": SPEECH, "text": TEXT, "images": IMAGES}
B_ALONE, A_AND_B, EVERYTHING = "B", "A and B", "everything"  # what clients train, with the head


@dataclass(frozen=True)
class AdapterProblem(Problem):
    """A problem of `BENCHMARKS`; ``data`` names it, and ``model`` says for readers what is adapted.

    Attributes:
        trains: What clients train and send, beside the head: B, A and B, or everything.
        rank: Of the changes.
        is_small: Whether network and rows are those of a quick look.
    """

    keeps_rows: ClassVar[bool] = False

    trains: str = B_ALONE
    rank: int = 8
    is_small: bool = False

    def shorten(self, share: int, model_options: Mapping[str, Any] | None = None) -> Self:
        """The problem for a quick look: fewer rounds, a smaller network and fewer clients."""
        return replace(super().shorten(share, model_options), is_small=True, rank=min(self.rank, 2))

    def federation(self, seed: int, validation_fraction: float = 0.0) -> Federation:
        """The clients of one seed."""
        return _federation(self.data, self.is_small, seed, validation_fraction)

    def module(self, federation: Federation, seed: int) -> nn.Module:
        """The network with its adapters, the same for all seeds."""
        del federation, seed
        network = BENCHMARKS[self.data].network(self.is_small)
        if self.trains == EVERYTHING:
            return copy.deepcopy(network).requires_grad_(True)
        return lora(network, self.rank, also=[HEAD], train_a=self.trains == A_AND_B)


@lru_cache(maxsize=2)  # runs of one seed follow each other
def _federation(name: str, is_small: bool, seed: int, validation_fraction: float) -> Federation:
    benchmark = BENCHMARKS[name]
    split = Split(benchmark.test_fraction, validation_fraction, False, seed)
    return Federation.from_arrays(*benchmark.rows(seed, is_small), **split.options)
