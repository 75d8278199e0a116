"""APFL: each client mixes a model of its own with the global one, and learns how much of each it wants.

Deng, Kamani and Mahdavi, Adaptive Personalized Federated Learning, arXiv 2003.13461 (2020), Algorithm 1 and Eq. (10).
Personalises the whole model.  Evaluated is alpha v + (1 - alpha) w with the client's v and alpha as it left them and
the latest *global* model w, as in the paper's output; a client that never took part has the global model (D10).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from selffl.algorithms.averaging import FixedLocalSteps, ModelBroadcast, ModelUpload, PersonalMemory, SharedModel
from selffl.algorithms.contract import Personalises
from selffl.algorithms.grids import Grid
from selffl.algorithms.local_task import LocalTask
from selffl.algorithms.options import check_bool, check_number, option
from selffl.algorithms.solver import iterate, rate_of


@dataclass(frozen=True)
class MixingMemory:
    """A client that keeps a model of its own and its share in the mixture."""

    own: PersonalMemory  # v [..., C, P]
    mixing: Tensor  # alpha [..., C]


@dataclass(frozen=True)
class APFL(FixedLocalSteps, SharedModel[MixingMemory]):
    """Options of APFL.

    Attributes:
        num_local_steps: τ, the steps a client takes in a round.
        mixing: α, the share of the client's own model; with ``adaptive``, where it begins.  0 is FedAvg, 1 is
            local training.
        adaptive: Whether each client moves its α with the first step of a round (Eq. (10)), within [0, 1].
    """

    name: ClassVar[str] = "apfl"
    grid: ClassVar[Grid] = {"mixing": (0.25, 0.5, 0.75)}
    source: ClassVar[str] = "Deng et al., arXiv 2003.13461, 2020"
    personalises: ClassVar[Personalises] = "model"
    only_sgd: ClassVar[str | None] = "the share alpha scales the own model's steps, and moves by a gradient step itself"
    no_row_privacy: ClassVar[str | None] = None

    mixing: float = option(0.5, check_number, at_least=0.0, at_most=1.0)
    adaptive: bool = option(True, check_bool)

    def newcomer(self, params: Tensor) -> MixingMemory:
        """No model of its own yet, and the first alpha."""
        return MixingMemory(PersonalMemory.empty(params), torch.full_like(params[..., 0], self.mixing))

    def client_round(
        self, broadcast: ModelBroadcast, memory: MixingMemory, task: LocalTask
    ) -> tuple[ModelUpload, MixingMemory]:
        """L times, on one minibatch, with m = alpha v + (1 - alpha) w before the step and g(m) its gradient.

        w <- w - eta g(w); v <- v - eta alpha g(m), the gradient with respect to v; alpha <- alpha - eta <v - w, g(m)>.

        Decision: alpha moves with the first step only, as in the authors' code.  Eq. (10) is indexed by steps, but v
        follows at alpha times the speed of w, so that alpha sinks to 0, where v stands still.
        """
        shape = broadcast.params.shape
        shared = broadcast.params.reshape(-1, shape[-1])  # w
        own = memory.own.model(broadcast.params).reshape_as(shared)  # v
        mixing = memory.mixing.reshape(-1, 1)  # alpha
        home = task.at_home()  # v and alpha stay there

        def step(draw: int, slots: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            shared, own, mixing = states
            rate, batch = rate_of(task, slots), task.batch(draw, slots)
            gap = own - shared
            slope = home.gradient(shared + mixing * gap, batch if home is task else home.batch(draw, slots), slots)
            shared = shared - rate * task.gradient(shared, batch, slots)
            own = own - rate * mixing * slope
            if self.adaptive and draw == 0:
                mixing = (mixing - rate * (gap * slope).sum(-1, keepdim=True)).clamp(0.0, 1.0)
            return shared, own, mixing

        shared, own, mixing = iterate(task, self.steps(task), step, shared, own, mixing)
        kept = MixingMemory(memory.own.keep(own.reshape(shape)), mixing.reshape(memory.mixing.shape))
        return self.upload(shared.reshape(shape), broadcast.params, task), kept

    def personal(self, global_params: Tensor, memory: MixingMemory, task: LocalTask) -> Tensor:
        """The mixture of v with the latest global model."""
        shared = global_params.unsqueeze(-2)
        return shared + memory.mixing.unsqueeze(-1) * (memory.own.model(shared) - shared)
