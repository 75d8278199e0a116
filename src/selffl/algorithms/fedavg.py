"""FedAvg: one shared model, the average of the clients' models.

McMahan et al., AISTATS 2017, Algorithm 1.  Personalises nothing; it is the floor against which the personal methods are
measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from selffl.algorithms.averaging import (
    FixedLocalSteps,
    ModelBroadcast,
    ModelUpload,
    NoMemory,
    StatelessClients,
    Weighting,
)
from selffl.algorithms.contract import Personalises
from selffl.algorithms.grids import STEPS_AFTER, Grid
from selffl.algorithms.local_task import LocalTask
from selffl.algorithms.solver import descend


@dataclass(frozen=True)
class FedAvg(FixedLocalSteps, StatelessClients):
    """Options of FedAvg.

    Attributes:
        num_local_steps: L, the steps a client takes in a round.
        weighting: Average by ``examples`` (n_k) or ``equal``.
    """

    name: ClassVar[str] = "fedavg"
    grid: ClassVar[Grid] = STEPS_AFTER
    source: ClassVar[str] = "McMahan et al., AISTATS 2017"
    personalises: ClassVar[Personalises] = "nothing"
    only_sgd: ClassVar[str | None] = None
    no_statistics: ClassVar[str | None] = None
    no_row_privacy: ClassVar[str | None] = None

    weighting: Weighting = "examples"

    def client_round(
        self, broadcast: ModelBroadcast, memory: NoMemory, task: LocalTask
    ) -> tuple[ModelUpload, NoMemory]:
        """L steps from the global model."""
        return self.upload(descend(task, broadcast.params, self.steps(task)), broadcast.params, task), memory
