"""FedProx: FedAvg whose clients are held near the model they received.

Li et al., MLSys 2020, Algorithm 2, with L steps as the inexact solution of the proximal problem.  Personalises nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from selffl.algorithms.averaging import ModelBroadcast, ModelUpload, NoMemory
from selffl.algorithms.fedavg import FedAvg
from selffl.algorithms.grids import Grid
from selffl.algorithms.local_task import LocalTask
from selffl.algorithms.options import check_number, option
from selffl.algorithms.solver import descend


@dataclass(frozen=True)
class FedProx(FedAvg):
    """Options of FedAvg, and the strength of the proximal term.

    Attributes:
        penalty: μ; 1 in the authors' MNIST runs, 0 is FedAvg.
    """

    name: ClassVar[str] = "fedprox"
    grid: ClassVar[Grid] = {"penalty": (0.001, 0.01, 0.1, 1.0)}  # the authors' values
    source: ClassVar[str] = "Li et al., MLSys 2020"

    penalty: float = option(1.0, check_number, at_least=0.0)

    def client_round(
        self, broadcast: ModelBroadcast, memory: NoMemory, task: LocalTask
    ) -> tuple[ModelUpload, NoMemory]:
        """L steps w_k <- w_k - eta (g(w_k) + mu (w_k - w)) from the global model w."""
        trained = descend(task, broadcast.params, self.steps(task), penalty=self.penalty, anchor=broadcast.params)
        return self.upload(trained, broadcast.params, task), memory
