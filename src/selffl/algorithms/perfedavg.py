"""PerFedAvg: a global model that is good after one local step.

Fallah, Mokhtari and Ozdaglar, NeurIPS 2020, Algorithm 1, in its first-order (FO) and Hessian-free (HF) versions.
Personalises by adapting the global model with a few gradient steps on the client's own *training* rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from selffl.algorithms.averaging import FixedLocalSteps, ModelBroadcast, ModelUpload, NoMemory, StatelessClients
from selffl.algorithms.contract import Personalises
from selffl.algorithms.grids import Grid
from selffl.algorithms.local_task import LocalTask
from selffl.algorithms.options import check_choice, check_integer, check_number, option
from selffl.algorithms.solver import descend, iterate, rate_of


@dataclass(frozen=True)
class PerFedAvg(FixedLocalSteps, StatelessClients):
    """Options of PerFedAvg.

    Attributes:
        num_local_steps: L, each on two minibatches (three if Hessian-free).
        order: ``first``, or ``hessian-free`` for the second-order term by a central difference.
        inner_learning_rate: α of the inner step; none: the task's η, which is also β.
        adaptation_steps: Steps on training rows before the model is evaluated.
        difference: δ of the central difference.
    """

    name: ClassVar[str] = "perfedavg"
    grid: ClassVar[Grid] = {"adaptation_steps": (1, 5, 20)}
    source: ClassVar[str] = "Fallah et al., NeurIPS 2020"
    personalises: ClassVar[Personalises] = "model"
    only_sgd: ClassVar[str | None] = "its meta-gradient is that of one plain inner step"
    no_bfloat16: ClassVar[str | None] = "it is made of differences of gradients, which bfloat16 is too coarse for"
    no_clipping: ClassVar[str | None] = "its meta-gradient is made of whole gradients and of their differences"
    no_statistics: ClassVar[str | None] = None
    no_row_privacy: ClassVar[str | None] = None

    order: Literal["first", "hessian-free"] = option("first", check_choice, allowed=("first", "hessian-free"))
    inner_learning_rate: float | None = option(None, check_number, above=0.0)
    adaptation_steps: int = option(1, check_integer, least=0)
    difference: float = option(1e-3, check_number, above=0.0)

    def client_round(
        self, broadcast: ModelBroadcast, memory: NoMemory, task: LocalTask
    ) -> tuple[ModelUpload, NoMemory]:
        """L times: w' = w - alpha g(w; B1), then w <- w - beta (I - alpha H(w; B3)) g(w'; B2), FO without the H."""
        params = broadcast.params.reshape(-1, broadcast.params.shape[-1])
        batches_per_step = 2 if self.order == "first" else 3

        def step(number: int, slots: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            slope = self.meta_gradient(states[0], task, slots, number * batches_per_step)
            return (states[0] - rate_of(task, slots) * slope,)

        (params,) = iterate(task, self.steps(task), step, params)
        return self.upload(params.reshape(broadcast.params.shape), broadcast.params, task), memory

    def sent_gradients(self, steps_per_epoch: Tensor) -> int | Tensor:
        """Two for each step; of a Hessian-free step the last two share a minibatch, which noise cannot have."""
        return 2 * super().sent_gradients(steps_per_epoch)

    def meta_gradient(self, params: Tensor, task: LocalTask, slots: Tensor, draw: int) -> Tensor:
        """Gradient of f(w - alpha g(w)) with respect to w, on minibatches ``draw``, ``draw + 1`` (and ``draw + 2``)."""
        alpha = rate_of(task, slots, self.inner_learning_rate)
        adapted = params - alpha * task.gradient(params, task.batch(draw, slots), slots)
        gradient = task.gradient(adapted, task.batch(draw + 1, slots), slots)
        if self.order == "first":
            return gradient
        batch = task.batch(draw + 2, slots)
        forward = task.gradient(params + self.difference * gradient, batch, slots)
        backward = task.gradient(params - self.difference * gradient, batch, slots)
        return gradient - alpha * (forward - backward) / (2 * self.difference)

    def personal(self, global_params: Tensor, memory: NoMemory, task: LocalTask) -> Tensor:
        """The global model after ``adaptation_steps`` steps on training rows."""
        start = global_params.unsqueeze(-2).expand(*task.shape, -1)
        return descend(task, start, self.adaptation_steps, learning_rate=self.inner_learning_rate)
