"""FedALA: a client starts from a mixture of its own model and the global one, number by number, that it learns.

Zhang, Hua, Wang, Song, Xue, Ma and Guan, FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI
2023, Algorithm 1.  Personalises the last layers.  What is evaluated is the mixture that the client would start from
next, before it trains on: it is learned on training rows whenever it is asked for.  A client that never took part has
the global model (D10).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from selffl.algorithms.averaging import (
    AveragedModel,
    FixedLocalSteps,
    ModelBroadcast,
    ModelServer,
    ModelUpload,
    Weighting,
)
from selffl.algorithms.contract import Personalises
from selffl.algorithms.grids import Grid
from selffl.algorithms.layers import mask_layers, names_of
from selffl.algorithms.local_task import LocalTask
from selffl.algorithms.options import check_integer, check_number, option
from selffl.algorithms.population import Population
from selffl.algorithms.solver import descend, iterate
from selffl.errors import ConfigError


@dataclass(frozen=True)
class MixtureServer(ModelServer):
    """A server that knows which coordinates clients mix."""

    is_mixed: Tensor  # [..., P], true or false


@dataclass(frozen=True)
class MixtureBroadcast(ModelBroadcast):
    """The global model, and which coordinates are to be mixed."""

    is_mixed: Tensor  # [..., C, P], true or false; an expanded view


@dataclass(frozen=True)
class MixtureMemory:
    """A client that keeps the model it trained last, and how it mixed the one before."""

    params: Tensor  # θ_m [..., C, P]
    mixing: Tensor  # W_m [..., C, P], from 0, its own, to 1, the global one
    is_mixed: Tensor  # [..., C, P]; nowhere true before the first round
    clock: Tensor  # [..., C]; 0 before the first round


@dataclass(frozen=True)
class FedALA(FixedLocalSteps, AveragedModel[MixtureServer, MixtureBroadcast, MixtureMemory, ModelUpload]):
    """Options of FedALA.

    Attributes:
        num_local_steps: L, the steps a client takes from its mixture.
        mixed_layers: p, how many of the last layers are mixed; the others are the global ones.  0: all are mixed.
        row_share: s, the share of a client's rows that a pass of learning the mixture goes over.
        mixing_rate: η of the mixture.
        first_passes: Passes when a client learns its mixture for the first time; one ever after.
        weighting: Average by ``examples`` (n_k) or ``equal``.
    """

    name: ClassVar[str] = "fedala"
    grid: ClassVar[Grid] = {"mixing_rate": (0.1, 1.0, 10.0)}  # the authors' value is 1
    source: ClassVar[str] = "Zhang et al., AAAI 2023"
    personalises: ClassVar[Personalises] = "layers"
    sends: ClassVar[type[ModelBroadcast]] = MixtureBroadcast
    only_sgd: ClassVar[str | None] = None
    no_row_privacy: ClassVar[str | None] = (
        "its clients learn their mixtures on the minibatches that they train on, and noise hides each once"
    )
    no_statistics: ClassVar[str | None] = None

    mixed_layers: int = option(1, check_integer, least=0)
    row_share: float = option(0.8, check_number, above=0.0, at_most=1.0)
    mixing_rate: float = option(1.0, check_number, above=0.0)
    first_passes: int = option(11, check_integer, least=1)
    weighting: Weighting = "examples"

    def start(self, params: Tensor, population: Population) -> MixtureServer:
        """The initial model, and where the layers lie that clients mix: everywhere, if it has none."""
        names = names_of(population.layers)
        if names and self.mixed_layers > len(names):
            raise ConfigError(
                f"mixed_layers is {self.mixed_layers}, and the model has {len(names)} layers; expected as many or "
                "less, or 0 for all."
            )
        if not names:
            return MixtureServer(params, torch.ones_like(params, dtype=torch.bool))
        last = names[-self.mixed_layers :]
        return MixtureServer(params, mask_layers(params, (layer for layer in population.layers if layer.name in last)))

    def newcomer(self, params: Tensor) -> MixtureMemory:
        """No model of its own yet: the mixture is the global model."""
        nowhere = torch.zeros_like(params, dtype=torch.bool)
        return MixtureMemory(
            torch.zeros_like(params), torch.ones_like(params), nowhere, torch.zeros_like(params[..., 0])
        )

    def client_round(
        self, broadcast: MixtureBroadcast, memory: MixtureMemory, task: LocalTask
    ) -> tuple[ModelUpload, MixtureMemory]:
        """Learn the mixture, and train on from it."""
        start, mixing = self.mix(broadcast.params, memory, task)
        trained = descend(task, start, self.steps(task))
        kept = MixtureMemory(trained, mixing, broadcast.is_mixed, memory.clock + 1)
        return self.upload(trained, broadcast.params, task), kept

    def personal(self, global_params: Tensor, memory: MixtureMemory, task: LocalTask) -> Tensor:
        """The mixture from which the client would train on."""
        return self.mix(global_params.unsqueeze(-2).expand_as(memory.params), memory, task)[0]

    def mix(self, global_params: Tensor, memory: MixtureMemory, task: LocalTask) -> tuple[Tensor, Tensor]:
        """θ̂ = θ + (Θ − θ) W, where W <- clip(W − η g(θ̂) (Θ − θ), 0, 1) step by step; θ̂ and W ``[..., C, P]``."""
        own = torch.where(memory.is_mixed, memory.params, global_params)
        gap = global_params - own

        def step(number: int, slots: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            mixing, own, gap = states
            gradient = task.gradient(own + gap * mixing, task.batch(number, slots), slots)
            return (mixing - self.mixing_rate * gradient * gap).clamp(0.0, 1.0), own, gap

        flat = (values.reshape(-1, values.shape[-1]) for values in (memory.mixing, own, gap))
        mixing = iterate(task, self.mixing_steps(memory.clock, task), step, *flat)[0].reshape_as(own)
        return own + gap * mixing, mixing

    def mixing_steps(self, clock: Tensor, task: LocalTask) -> Tensor:
        """Minibatches on which a client learns its mixture ``[..., C]``; none before it has a model of its own."""
        rows = self.row_share * task.num_examples.expand(task.shape).double()
        in_a_pass = torch.ones_like(rows) if task.is_full_batch else (rows / task.batch_size - 1e-9).ceil()
        passes = torch.where(clock == 1, self.first_passes, 1) * (clock > 0)
        return passes * in_a_pass.long()
