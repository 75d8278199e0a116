"""FedBABU: FedAvg of a body under a head that nobody trains; each client tunes the whole model when training is over.

Oh, Kim and Yun, FedBABU: Towards Enhanced Representation for Federated Image Classification, ICLR 2022, Algorithm 1.
Personalises the whole model, at the end.  The head stays the initial one for ever.  While training goes on everybody
has the global model; a closing visit makes the personal ones.  A client that never took part keeps the global model
(D10).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from selffl.algorithms.averaging import ModelUpload, PersonalMemory, PersonalModels, Weighting
from selffl.algorithms.fedper import CutModel, HeadBroadcast, head_layers
from selffl.algorithms.grids import Grid
from selffl.algorithms.layers import Layer
from selffl.algorithms.local_task import LocalTask
from selffl.algorithms.options import check_integer, check_string, option
from selffl.algorithms.population import Population
from selffl.algorithms.solver import descend


@dataclass(frozen=True)
class FedBABU(PersonalModels, CutModel[PersonalMemory]):
    """Options of FedBABU.

    Attributes:
        num_local_steps: L, of the body alone.
        head: Name of the layer that is not trained, or of a module with all its layers; empty: the last layer.
        weighting: Average bodies by ``examples`` (n_k) or ``equal``, as the authors' code does.
        fine_tune_epochs: Passes over its own rows by which each client tunes body and head at the end.
    """

    name: ClassVar[str] = "fedbabu"
    grid: ClassVar[Grid] = {"fine_tune_epochs": (1, 5, 20)}  # the authors' value is 5
    source: ClassVar[str] = "Oh et al., ICLR 2022"
    newcomer_visits: ClassVar[int | None] = 1
    has_closing_visit: ClassVar[bool] = True

    head: str = option("", check_string)
    weighting: Weighting = "equal"
    fine_tune_epochs: int = option(5, check_integer, least=1)

    def kept(self, population: Population) -> Sequence[Layer]:
        """The head."""
        return head_layers(self.name, self.head, population)

    def client_round(
        self, broadcast: HeadBroadcast, memory: PersonalMemory, task: LocalTask
    ) -> tuple[ModelUpload, PersonalMemory]:
        """L steps of the body under the head that everybody has."""
        trained = descend(task, broadcast.params, self.steps(task), frozen=broadcast.is_head)
        return self.upload(trained, broadcast.params, task), memory

    def adapt(self, broadcast: HeadBroadcast, memory: PersonalMemory, task: LocalTask) -> PersonalMemory:
        """The global model, body and head, after some epochs on the client's own rows."""
        return memory.keep(descend(task, broadcast.params, self.fine_tune_epochs * task.steps_per_epoch))
