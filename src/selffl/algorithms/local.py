"""Local training: every client on its own, the model never averaged.

What a client would have without a federation; the other end of the scale from FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from selffl.algorithms.averaging import (
    LocalWork,
    ModelBroadcast,
    ModelServer,
    ModelUpload,
    PersonalMemory,
    WithPersonalModel,
    upload_model,
)
from selffl.algorithms.contract import LocalTask
from selffl.algorithms.solver import descend
from selffl.errors import ConfigError


@dataclass(frozen=True)
class Local(LocalWork, WithPersonalModel):
    """Options of local training.

    Attributes:
        num_local_steps: L, the steps a client takes in a round.
    """

    name: ClassVar[str] = "local"
    only_sgd: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()

    def client_round(
        self, broadcast: ModelBroadcast, memory: PersonalMemory, task: LocalTask
    ) -> tuple[ModelUpload, PersonalMemory]:
        """L steps on from the client's own model."""
        trained = descend(task, memory.model(broadcast.params), self.steps(task))
        return upload_model(broadcast.params, task), memory.keep(trained)

    def server_round(self, server: ModelServer, clients: Tensor, upload: ModelUpload) -> ModelServer:
        """Nothing is learned from the upload, which carries nothing of the client's model."""
        return server


def training_alone(method: Any) -> Local:
    """Local training for as long as a method's clients train: what they would have had without it.

    Self-FL chooses its steps; what it takes before it knows any variance, it would take alone.
    """
    if isinstance(method, Local):
        raise ConfigError("gain=True holds a method against training alone, which is what local does; leave it out.")
    steps = getattr(method, "num_local_steps", getattr(method, "initial_steps", None))
    if not isinstance(steps, int):
        raise ConfigError(
            f"gain=True trains clients alone for as many steps as the method, and {method.name} has neither "
            "num_local_steps nor initial_steps; give it one, or leave gain out."
        )
    return Local(steps, num_local_epochs=getattr(method, "num_local_epochs", None))
