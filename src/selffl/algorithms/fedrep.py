"""FedRep: a shared representation learned under heads that are each fitted first.

Collins, Hassani, Mokhtari and Shakkottai, ICML 2021, Algorithm 1.  Personalises the head, as FedPer does, but trains
the two one after the other: the head to the received body, then the body under that head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from selffl.algorithms.averaging import Weighting
from selffl.algorithms.fedper import FedPer
from selffl.algorithms.grids import Grid
from selffl.algorithms.local_task import LocalTask
from selffl.algorithms.options import check_integer, option
from selffl.algorithms.solver import descend


@dataclass(frozen=True)
class FedRep(FedPer):
    """Options of FedPer, where ``num_local_steps`` are the body's, and the head's own number of steps.

    Attributes:
        weighting: Algorithm 1 takes the plain mean, so ``equal`` unless told otherwise.
        head_steps: τ, steps of the head alone, before those of the body alone; a round costs both.
    """

    name: ClassVar[str] = "fedrep"
    grid: ClassVar[Grid] = {"head_steps": (10, 20, 40)}
    source: ClassVar[str] = "Collins et al., ICML 2021"
    num_optimisers: ClassVar[int] = 2  # of the head, and of the body

    weighting: Weighting = "equal"
    head_steps: int = option(20, check_integer, least=1)

    def sent_gradients(self, steps_per_epoch: Tensor) -> int | Tensor:
        """The head's steps, too: the body trains under it."""
        return self.head_steps + super().sent_gradients(steps_per_epoch)

    def train_locally(self, start: Tensor, is_head: Tensor, task: LocalTask) -> Tensor:
        """tau steps of the head under the received body, then L steps of the body under that head."""
        fitted = descend(task, start, self.head_steps, frozen=~is_head)
        return descend(task, fitted, self.steps(task), frozen=is_head, first_draw=self.head_steps)
