"""FedDPA: an adapter that all share and one of each client's own, half and half.

Yang et al., Dual-Personalizing Adapter for Federated Foundation Models, NeurIPS 2024 (FedDPA-T).  The shared adapter is
trained by FedAvg.  A client trains its own beside it, in the mixture in which both answer, with the shared one as it
was received.  Mixed are models; of adapters with a common A that is the same as mixing their outputs, as in the paper.
The mixture is the same for every row: the authors also weigh the two by how much a row is like the client's.

Personalises the whole model.  Evaluated is the mixture with the latest global model; a client that never took part has
the global model (D10).  A client's own adapter begins at the one that it first receives, in the paper at zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from selffl.algorithms.averaging import (
    FixedLocalSteps,
    ModelBroadcast,
    ModelUpload,
    PersonalMemory,
    PersonalModelClients,
    Weighting,
)
from selffl.algorithms.grids import Grid
from selffl.algorithms.local_task import LocalTask
from selffl.algorithms.options import check_number, option
from selffl.algorithms.solver import descend


@dataclass(frozen=True)
class FedDPA(FixedLocalSteps, PersonalModelClients):
    """Options of FedDPA.

    Attributes:
        num_local_steps: L, of the shared adapter and of the client's own.
        mixing: The share of the client's own in the mixture, up to 1; 0.5 in the authors' code.
        weighting: Average by ``examples`` (n_k) or ``equal``.
    """

    name: ClassVar[str] = "feddpa"
    grid: ClassVar[Grid] = {"mixing": (0.25, 0.5, 0.75)}  # the authors' value is 0.5
    source: ClassVar[str] = "Yang et al., NeurIPS 2024"
    only_sgd: ClassVar[str | None] = None
    num_optimisers: ClassVar[int] = 2
    no_row_privacy: ClassVar[str | None] = None

    mixing: float = option(0.5, check_number, above=0.0, at_most=1.0)
    weighting: Weighting = "examples"

    def client_round(
        self, broadcast: ModelBroadcast, memory: PersonalMemory, task: LocalTask
    ) -> tuple[ModelUpload, PersonalMemory]:
        """w_k <- w_k - eta g(w_k), and v <- v - eta a g(a v + (1 - a) w) on the same minibatches."""
        trained = descend(task, broadcast.params, self.steps(task))
        home, own = task.at_home(), memory.model(broadcast.params)
        own = descend(home, own, self.steps(task), anchor=broadcast.params, share=self.mixing)
        return self.upload(trained, broadcast.params, task), memory.keep(own)

    def personal(self, global_params: Tensor, memory: PersonalMemory, task: LocalTask) -> Tensor:
        """The mixture of the client's own with the latest global one."""
        shared = global_params.unsqueeze(-2)
        return shared + self.mixing * (memory.model(shared) - shared)
