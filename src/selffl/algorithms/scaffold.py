"""SCAFFOLD: FedAvg whose local steps are corrected for what tells a client's gradients from everybody's.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, Algorithm 1, with
option II for the new control variates.  Personalises nothing.  The server and every client keep a control variate, an
estimate of the gradient at the global model; both begin at zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from selffl.algorithms.averaging import AveragedModel, FixedLocalSteps, ModelBroadcast, ModelServer, ModelUpload, move
from selffl.algorithms.contract import Personalises
from selffl.algorithms.grids import STEPS_AFTER, Grid
from selffl.algorithms.local_task import LocalTask
from selffl.algorithms.options import check_number, option
from selffl.algorithms.population import Population
from selffl.algorithms.solver import iterate, rate_of


@dataclass(frozen=True)
class ControlServer(ModelServer):
    """What the server knows."""

    control: Tensor  # c [..., P]
    num_clients: Tensor  # N [...]


@dataclass(frozen=True)
class ControlBroadcast(ModelBroadcast):
    """What a client is sent: the global model and everybody's control variate."""

    control: Tensor  # c [..., C, P]


@dataclass(frozen=True)
class ControlMemory:
    """What a client keeps: its own control variate."""

    control: Tensor  # c_i [..., C, P]


@dataclass(frozen=True)
class ControlUpload(ModelUpload):
    """What a client adds to the sums: its changes to the model and to its control variate."""

    control_change: Tensor  # c_i^+ - c_i [..., C, P]


@dataclass(frozen=True)
class Scaffold(FixedLocalSteps, AveragedModel[ControlServer, ControlBroadcast, ControlMemory, ControlUpload]):
    """Options of SCAFFOLD.

    Attributes:
        num_local_steps: K, the steps a client takes in a round.
        global_learning_rate: η_g, the share of the cohort's mean change that the server takes.
    """

    name: ClassVar[str] = "scaffold"
    grid: ClassVar[Grid] = STEPS_AFTER
    source: ClassVar[str] = "Karimireddy et al., ICML 2020"
    personalises: ClassVar[Personalises] = "nothing"
    sends: ClassVar[type[ModelBroadcast]] = ControlBroadcast
    only_sgd: ClassVar[str | None] = "its control variates are gradients, read off the way that plain gradient steps go"
    no_row_privacy: ClassVar[str | None] = None

    averaged: ClassVar[Mapping[str, str | None]] = {"change": "weight", "control_change": None}

    global_learning_rate: float = option(1.0, check_number, above=0.0)

    def start(self, params: Tensor, population: Population) -> ControlServer:
        """The initial model; nothing to correct yet."""
        return ControlServer(
            params, torch.zeros_like(params), torch.full_like(params[..., 0], float(population.num_clients))
        )

    def newcomer(self, params: Tensor) -> ControlMemory:
        """Nothing to correct yet."""
        return ControlMemory(torch.zeros_like(params))

    def client_round(
        self, broadcast: ControlBroadcast, memory: ControlMemory, task: LocalTask
    ) -> tuple[ControlUpload, ControlMemory]:
        """K times y <- y - eta (g(y) - c_i + c) from the global model x; then c_i^+ = c_i - c + (x - y)/(K eta)."""
        start, correction = broadcast.params, broadcast.control - memory.control
        flat = (tensor.reshape(-1, start.shape[-1]) for tensor in (start, correction))

        def step(draw: int, slots: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            params, shift = states
            gradient = task.gradient(params, task.batch(draw, slots), slots)
            return params - rate_of(task, slots) * (gradient + shift), shift

        trained = iterate(task, self.steps(task), step, *flat)[0].reshape_as(start)
        num_steps = torch.as_tensor(self.steps(task), dtype=start.dtype, device=start.device)  # K
        change, way = trained - start, (num_steps * task.learning_rate).expand(task.shape)
        control_change = -change / way.unsqueeze(-1) - broadcast.control
        upload = ControlUpload(change, torch.ones_like(change[..., 0]), control_change)
        return upload, ControlMemory(memory.control + control_change)

    def server_round(self, server: ControlServer, clients: Tensor, upload: ControlUpload) -> ControlServer:
        """x <- x + eta_g mean(y_i - x) over the cohort; c <- c + sum(c_i^+ - c_i)/N."""
        control = server.control + upload.control_change / server.num_clients.unsqueeze(-1)
        params = move(server.params, upload.change, upload.weight, self.global_learning_rate)
        return ControlServer(params, control.to(server.control), server.num_clients)
