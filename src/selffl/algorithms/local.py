"""Local training: every client on its own, the model never averaged.

What a client would have without a federation; the other end of the scale from FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from selffl.algorithms.averaging import (
    FixedLocalSteps,
    ModelBroadcast,
    ModelUpload,
    PersonalMemory,
    PersonalModelClients,
)
from selffl.algorithms.contract import Algorithm
from selffl.algorithms.grids import LOCAL_STEPS, Grid
from selffl.algorithms.local_task import LocalTask
from selffl.algorithms.solver import descend
from selffl.errors import ConfigError


@dataclass(frozen=True)
class Local(FixedLocalSteps, PersonalModelClients):
    """Options of local training.

    Attributes:
        num_local_steps: L, the steps a client takes in a round.
    """

    name: ClassVar[str] = "local"
    grid: ClassVar[Grid] = LOCAL_STEPS
    has_global_model: ClassVar[bool] = False  # it stays as it was
    is_federated: ClassVar[bool] = False
    only_sgd: ClassVar[str | None] = None
    no_row_privacy: ClassVar[str | None] = "its clients send nothing"
    no_statistics: ClassVar[str | None] = None

    def client_round(
        self, broadcast: ModelBroadcast, memory: PersonalMemory, task: LocalTask
    ) -> tuple[ModelUpload, PersonalMemory]:
        """L steps on from the client's own model."""
        trained = descend(task, memory.model(broadcast.params), self.steps(task))
        return self.upload(broadcast.params, broadcast.params, task), memory.keep(trained)  # no change


def training_alone(method: Algorithm[Any, Any, Any, Any]) -> Local:
    """Local training for as long as a method's clients train: what they would have had without it.

    A method that chooses its steps says what it takes before it knows anything, which is what it would take alone.
    """
    work = method.local_work()
    if not method.is_federated:
        raise ConfigError(
            f"{method.name} trains every client alone, so that there is no gain to measure; expected a method whose "
            "clients learn from each other."
        )
    if work is None:
        raise ConfigError(
            f"{method.name} does not say how long its clients train, so that they cannot train alone for as long; "
            "expected local_work to say it."
        )
    steps, epochs = work
    return Local(steps, num_local_epochs=epochs)
