"""pFedMe: the global model minimises the clients' Moreau envelopes; the personal model is the inner minimiser.

Dinh, Tran and Nguyen, NeurIPS 2020, Algorithm 1, with the inner problem solved by K steps on one minibatch as in the
authors' code.  Personalises the whole model.  What is kept and evaluated is theta, the inner minimiser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from selffl.algorithms.averaging import (
    FixedLocalSteps,
    ModelBroadcast,
    ModelServer,
    ModelUpload,
    PersonalMemory,
    PersonalModelClients,
    move,
)
from selffl.algorithms.grids import Grid
from selffl.algorithms.local_task import LocalTask
from selffl.algorithms.options import check_integer, check_number, option
from selffl.algorithms.solver import iterate, rate_of


@dataclass(frozen=True)
class PFedMe(FixedLocalSteps, PersonalModelClients):
    """Options of pFedMe.

    Attributes:
        num_local_steps: R, the minibatches a client trains on in a round.
        num_inner_steps: K, steps of θ on each minibatch.
        penalty: λ, which ties θ to the client's copy of the global model.
        mixing: β, the share of the average in the new global model.
        personal_learning_rate: η_p of the inner steps; none: the task's η.
    """

    name: ClassVar[str] = "pfedme"
    grid: ClassVar[Grid] = {"penalty": (1.0, 5.0, 15.0)}  # the authors' value is 15
    source: ClassVar[str] = "Dinh et al., NeurIPS 2020"
    only_sgd: ClassVar[str | None] = "its outer step is a gradient of the Moreau envelope"
    no_row_privacy: ClassVar[str | None] = "its clients take several steps on one minibatch, and noise hides each once"

    num_inner_steps: int = option(5, check_integer, least=1)
    penalty: float = option(15.0, check_number, at_least=0.0)
    mixing: float = option(1.0, check_number, above=0.0)
    personal_learning_rate: float | None = option(None, check_number, above=0.0)

    def client_round(
        self, broadcast: ModelBroadcast, memory: PersonalMemory, task: LocalTask
    ) -> tuple[ModelUpload, PersonalMemory]:
        """R times: K inner steps on one minibatch, then one step of the client's copy of the global model.

        theta <- theta - eta_p (g(theta) + lambda (theta - w_k)), then w_k <- w_k - eta lambda (w_k - theta).
        """
        anchor = broadcast.params.reshape(-1, broadcast.params.shape[-1])  # w_k

        def step(draw: int, slots: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            anchor, personal = states
            inner_rate, rate = rate_of(task, slots, self.personal_learning_rate), rate_of(task, slots)
            batch = task.batch(draw, slots)
            for _ in range(self.num_inner_steps):
                pull = self.penalty * (personal - anchor)
                personal = personal - inner_rate * (task.gradient(personal, batch, slots) + pull)
            return anchor - rate * self.penalty * (anchor - personal), personal

        # theta starts each round at the model received.
        anchor, personal = iterate(task, self.steps(task), step, anchor, anchor)
        shape = broadcast.params.shape
        return self.upload(anchor.reshape(shape), broadcast.params, task), memory.keep(personal.reshape(shape))

    def server_round(self, server: ModelServer, clients: Tensor, upload: ModelUpload) -> ModelServer:
        """w <- (1 - beta) w + beta mean_k w_k."""
        return ModelServer(move(server.params, upload.change, upload.weight, self.mixing))
