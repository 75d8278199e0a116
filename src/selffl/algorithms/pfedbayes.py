"""pFedBayes: each client has a distribution over models, held near a distribution that all share.

Zhang, Li, Li, Guo and Shao, Personalized Federated Learning via Variational Bayesian Inference, ICML 2022, Algorithm 1.
Personalises the whole model.  Both distributions are normal with independent coordinates.  Evaluated is the mean of the
client's own, and as the global model the mean of the shared one; a client that never took part has the latter (D10).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from selffl.algorithms.averaging import (
    AveragedModel,
    FixedLocalSteps,
    ModelBroadcast,
    ModelServer,
    ModelUpload,
    PersonalMemory,
    move,
)
from selffl.algorithms.contract import Personalises
from selffl.algorithms.grids import Grid
from selffl.algorithms.optimisers import Adam
from selffl.algorithms.options import check_integer, check_number, option
from selffl.algorithms.population import Population
from selffl.algorithms.rowwise import RowwiseTask
from selffl.algorithms.solver import iterate, per_slot, rate_of, take_step
from selffl.maths.divergence import rho_of, slope_of_first, slope_of_second

ADAM = Adam()  # of all steps: beta1 0.9, beta2 0.999, eps 1e-8


@dataclass(frozen=True)
class BayesServer(ModelServer):
    """A server that knows a distribution: its mean ``params``, and rho, of which softplus is the deviation."""

    rho: Tensor  # [..., P]


@dataclass(frozen=True)
class BayesBroadcast(ModelBroadcast):
    """The shared distribution, as each client receives it."""

    rho: Tensor  # [..., C, P]


@dataclass(frozen=True)
class BayesMemory:
    """A client that keeps a distribution of its own."""

    own: PersonalMemory  # its mean [..., C, P]
    rho: Tensor  # [..., C, P]


@dataclass(frozen=True)
class BayesUpload(ModelUpload):
    """What a client adds to the sums: how it changed the shared distribution."""

    rho_change: Tensor  # [..., C, P]


@dataclass(frozen=True)
class PFedBayes(FixedLocalSteps, AveragedModel[BayesServer, BayesBroadcast, BayesMemory, BayesUpload]):
    """Options of pFedBayes.

    Attributes:
        num_local_steps: R, the minibatches a client trains on in a round.
        num_inner_steps: Steps of the client's own distribution on each minibatch, before one of its copy of the shared
            one.
        tempering: ζ, how much the distance between both counts beside the rows.
        adam_learning_rate: Of all steps, which are Adam's, in every round; none: the learning rate of the run, which
            suits plain steps, and its schedule.
        initial_deviation: σ, of every parameter before the first round.
        mixing: β, the share of the average in the new shared distribution.
    """

    name: ClassVar[str] = "pfedbayes"
    grid: ClassVar[Grid] = {"adam_learning_rate": (1e-3, 3e-3, 1e-2)}  # the authors' value is 0.001
    source: ClassVar[str] = "Zhang et al., ICML 2022"
    personalises: ClassVar[Personalises] = "model"
    sends: ClassVar[type[ModelBroadcast]] = BayesBroadcast
    only_sgd: ClassVar[str | None] = "it takes Adam's steps by itself, at a rate of its own (adam_learning_rate)"
    no_row_privacy: ClassVar[str | None] = "its clients take several steps on one minibatch, and noise hides each once"
    num_optimisers: ClassVar[int] = 0  # that can be kept
    no_statistics: ClassVar[str | None] = "they would be those of models drawn at random, not of their mean"

    averaged: ClassVar[Mapping[str, str | None]] = {"change": "weight", "rho_change": "weight"}

    num_inner_steps: int = option(5, check_integer, least=1)
    tempering: float = option(10.0, check_number, at_least=0.0)
    adam_learning_rate: float | None = option(1e-3, check_number, above=0.0)
    initial_deviation: float = option(0.079, check_number, above=0.0)
    mixing: float = option(1.0, check_number, above=0.0)

    def start(self, params: Tensor, population: Population) -> BayesServer:
        """The initial model as the mean, and the same deviation everywhere."""
        return BayesServer(params, torch.full_like(params, rho_of(self.initial_deviation)))

    def newcomer(self, params: Tensor) -> BayesMemory:
        """No distribution of its own yet."""
        return BayesMemory(PersonalMemory.empty(params), torch.zeros_like(params))

    def client_round(
        self, broadcast: BayesBroadcast, memory: BayesMemory, task: RowwiseTask
    ) -> tuple[BayesUpload, BayesMemory]:
        """R times, on one minibatch and one draw of noise: inner steps of q, then a step of the client's copy of w.

        q goes down f(mu + sigma eps) + zeta/N KL(q || w), w goes down zeta/N KL(q || w); N are the client's rows.

        Decisions: q goes on where the client left it, and w begins each round at what was received.  What Adam
        remembers begins anew with every round.  The publication takes one inner step; a public implementation, from
        which the other defaults are, takes five, but draws its noise with deviation 0.001 instead of 1.
        """
        received = torch.cat([broadcast.params, broadcast.rho], dim=-1)  # mean and rho side by side: one step for both
        kept_rho = torch.where((memory.own.clock == 0).unsqueeze(-1), broadcast.rho, memory.rho)
        kept = torch.cat([memory.own.model(broadcast.params), kept_rho], dim=-1)
        shared, own = (each.reshape(-1, each.shape[-1]) for each in (received, kept))
        pull = torch.as_tensor(per_slot(self.tempering / task.num_terms.to(shared.dtype), task))  # zeta/N
        remembered = [torch.zeros_like(own) for _ in range(2 * ADAM.num_states)]

        def step(draw: int, slots: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            own, shared, *before = states
            (mean, rho), others = own.chunk(2, dim=-1), shared.chunk(2, dim=-1)  # views, which move with the steps
            batch, noise = task.batch(draw, slots), task.noise(draw, slots, mean)
            rate = rate_of(task, slots, self.adam_learning_rate)
            held, precision = pull[slots], softplus(others[1]).square().reciprocal()
            for number in range(draw * self.num_inner_steps, (draw + 1) * self.num_inner_steps):
                deviation, gradient = softplus(rho), torch.empty_like(own)
                slope = task.gradient(torch.addcmul(mean, deviation, noise), batch, slots)
                by_mean, by_rho = gradient.chunk(2, dim=-1)
                to_mean, to_deviation = slope_of_first(mean, deviation, others[0], precision)
                torch.addcmul(slope, held, to_mean, out=by_mean)
                torch.mul(slope, noise, out=by_rho).addcmul_(held, to_deviation).mul_(torch.sigmoid(rho))
                take_step(own, ADAM.direction(gradient, tuple(before[:2]), number), rate)
            gradient = held * torch.cat(slope_of_second(mean, rho, *others), dim=-1)
            take_step(shared, ADAM.direction(gradient, tuple(before[2:]), draw), rate)
            return states

        own, shared = iterate(task, self.steps(task), step, own, shared, *remembered)[:2]
        change, rho_change = (shared.reshape_as(received) - received).chunk(2, dim=-1)
        mean, rho = own.reshape_as(kept).chunk(2, dim=-1)
        upload = BayesUpload(change, torch.ones_like(change[..., 0]), rho_change)
        return upload, BayesMemory(memory.own.keep(mean), rho)

    def server_round(self, server: BayesServer, clients: Tensor, upload: BayesUpload) -> BayesServer:
        """The server's distribution moved by beta of the cohort's mean change, of mu and of rho."""
        changes = ((server.params, upload.change), (server.rho, upload.rho_change))
        return BayesServer(*(move(before, change, upload.weight, self.mixing) for before, change in changes))

    def personal(self, global_params: Tensor, memory: BayesMemory, task: RowwiseTask) -> Tensor:
        """The mean of the client's own distribution."""
        return memory.own.model(global_params.unsqueeze(-2))
