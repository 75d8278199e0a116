"""DITTO: a global model by FedAvg, and beside it a personal one that is pulled towards it.

Li et al., ICML 2021, Algorithm 1.  Personalises the whole model; lambda, the pull, is chosen by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
class Ditto(FixedLocalSteps, PersonalModelClients):
    """Options of DITTO.

    Attributes:
        num_local_steps: L, of both models.
        penalty: λ, the pull towards the global model; 1 in the authors' scripts, 0 is local training.
        weighting: Average by ``examples`` (n_k) or ``equal``.
    """

    name: ClassVar[str] = "ditto"
    grid: ClassVar[Grid] = {"penalty": (0.03, 0.1, 0.3, 1.0, 3.0)}
    source: ClassVar[str] = "Li et al., ICML 2021"
    only_sgd: ClassVar[str | None] = None
    num_optimisers: ClassVar[int] = 2
    no_statistics: ClassVar[str | None] = None
    no_row_privacy: ClassVar[str | None] = None

    penalty: float = option(1.0, check_number, at_least=0.0)
    weighting: Weighting = "examples"

    def client_round(
        self, broadcast: ModelBroadcast, memory: PersonalMemory, task: LocalTask
    ) -> tuple[ModelUpload, PersonalMemory]:
        """On the same minibatches: w_k <- w_k - eta g(w_k) and v <- v - eta (g(v) + lambda (v - w)), which stays."""
        trained = descend(task, broadcast.params, self.steps(task))
        personal = descend(
            task.at_home(),
            memory.model(broadcast.params),
            self.steps(task),
            penalty=self.penalty,
            anchor=broadcast.params,
        )
        return self.upload(trained, broadcast.params, task), memory.keep(personal)
