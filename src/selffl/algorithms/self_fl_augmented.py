"""Augmented Self-FL: besides its personal model each client also trains to its local optimum, and sends both.

Chen et al., NeurIPS 2022, Algorithm 2.  The local optima theta_{m,t}, not the early-stopped theta_m^t, give the
variances, the global model and the next starting point: more local work, two models uploaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from selffl.algorithms.local_task import LocalTask
from selffl.algorithms.options import check_integer, check_number, option
from selffl.algorithms.self_fl import ClientLevel, SelfFLUpload
from selffl.algorithms.self_fl_clients import SelfFLBroadcast, SelfFLMemory, model_or_global
from selffl.algorithms.solver import descend, descend_to_convergence
from selffl.maths.variance import Spread


@dataclass(frozen=True)
class AugmentedMemory(SelfFLMemory):
    """``params`` and ``spread`` are those of the local optimum theta_{m,t}."""

    personal_params: Tensor  # theta_m^t [..., C, P]


@dataclass(frozen=True)
class AugmentedUpload(SelfFLUpload):
    """``params`` is the local optimum theta_{m,t}, which the server aggregates."""

    personal_params: Tensor  # theta_m^t [..., C, P]


@dataclass(frozen=True)
class SelfFLAugmented(ClientLevel[AugmentedMemory, AugmentedUpload]):
    """Options of Self-FL, and when local training counts as converged.

    Attributes:
        tolerance: Converged when a client's progress by step is shorter than this, relative to 1 + |θ|: of the last
            step with full batches, on average over whole epochs with minibatches (`solver.windows`); none: 1e-6
            with full batches, 1e-4 with minibatches.
        max_convergence_steps: And in any case after this many steps.
    """

    name: ClassVar[str] = "self-fl-augmented"
    source: ClassVar[str] = "Chen et al., NeurIPS 2022"

    tolerance: float | None = option(None, check_number, above=0.0)
    max_convergence_steps: int = option(2000, check_integer, least=1)

    def sent_gradients(self, steps_per_epoch: Tensor) -> int | Tensor:
        """Gradients of the plan, and of the way to the optimum."""
        return self.max_convergence_steps + super().sent_gradients(steps_per_epoch)

    def newcomer(self, params: Tensor) -> AugmentedMemory:
        """No models yet, no rounds recorded."""
        return AugmentedMemory(torch.zeros_like(params), Spread.empty(params), torch.zeros_like(params))

    def client_round(
        self, broadcast: SelfFLBroadcast, memory: AugmentedMemory, task: LocalTask
    ) -> tuple[AugmentedUpload, AugmentedMemory]:
        """Algorithm 2, ClientUpdate: Algorithm 1's, then on to the local optimum (Eqs. (23) and (24))."""
        plan = self.plan(broadcast, memory, task)
        personal = descend(task, plan.start, plan.num_local_steps)
        tolerance = (1e-6 if task.is_full_batch else 1e-4) if self.tolerance is None else self.tolerance
        # Minibatches go on from where the longest of the planned runs can end; epochs (D15) may have met some of them.
        optimum = descend_to_convergence(
            task,
            personal,
            tolerance=tolerance,
            max_steps=self.max_convergence_steps,
            first_draw=self.max_local_steps,
        )
        upload = AugmentedUpload(
            optimum,
            task.num_examples.to(optimum),
            plan.intra_variance,
            plan.num_local_steps,
            plan.wanted_steps,
            personal,
        )
        return upload, AugmentedMemory(optimum, memory.spread.update(optimum), personal)

    def personal(self, global_params: Tensor, memory: AugmentedMemory, task: LocalTask) -> Tensor:
        """theta_m^t, the early-stopped model (D10)."""
        return model_or_global(global_params, memory, memory.personal_params)
