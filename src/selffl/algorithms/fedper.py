"""FedPer: a body that all share by FedAvg, and a head that stays on the client.

Arivazhagan et al., Federated Learning with Personalization Layers, arXiv 1912.00818 (2019), Algorithms 1 and 2.
Personalises the head.  The server's head is the initial one for ever, and nothing of a client's head leaves it: its
change counts as zero, and is not sent.  Evaluated is the latest global body with the client's own head; a client
that never took part has the initial head, which is the global model (D10).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from selffl.algorithms.contract import Memory, Personalises
from selffl.algorithms.grids import STEPS_AFTER, Grid
from selffl.algorithms.layers import Layer, mask_layers, names_of
from selffl.algorithms.local_task import LocalTask
from selffl.algorithms.options import check_string, option
from selffl.algorithms.population import Population
from selffl.algorithms.records import DERIVED
from selffl.algorithms.solver import descend
from selffl.errors import ConfigError, unknown_name


@dataclass(frozen=True)
class HeadServer(ModelServer):
    """A server that knows which coordinates are not its own."""

    is_head: Tensor  # [..., P], true or false


@dataclass(frozen=True)
class HeadBroadcast(ModelBroadcast):
    """The global body, the initial head, and which is which."""

    is_head: Tensor = field(metadata={DERIVED: True})  # [..., C, P], true or false; an expanded view


@dataclass(frozen=True)
class HeadMemory:
    """A client that keeps its head: the coordinates of ``params`` where ``is_head``."""

    params: Tensor  # [..., C, P]; zero outside the head
    is_head: Tensor  # [..., C, P]; nowhere true before the first round

    def model(self, global_params: Tensor) -> Tensor:
        """The global model ``[..., C, P]`` with the client's head."""
        return torch.where(self.is_head, self.params, global_params)


class CutModel(FixedLocalSteps, AveragedModel[HeadServer, HeadBroadcast, Memory, ModelUpload]):
    """A method that averages some layers of a model, and knows which the others are."""

    sends: ClassVar[type[ModelBroadcast]] = HeadBroadcast
    only_sgd: ClassVar[str | None] = None
    no_statistics: ClassVar[str | None] = None
    no_row_privacy: ClassVar[str | None] = None

    @abstractmethod
    def kept(self, population: Population) -> Sequence[Layer]:
        """Layers that are not averaged, beside those that the population says."""

    def start(self, params: Tensor, population: Population) -> HeadServer:
        """The initial model, and where the layers lie that clients keep."""
        is_head = mask_layers(params, (*self.kept(population), *population.kept))
        if is_head.all():
            raise ConfigError(
                f"{self.name} would keep the whole model with each client; expected a part of it, of the layers "
                f"{', '.join(names_of(population.layers))}."
            )
        return HeadServer(params, is_head)


class SharedBody(CutModel[HeadMemory]):
    """A method whose clients share some layers by averaging and keep the others."""

    personalises: ClassVar[Personalises] = "layers"
    has_global_model: ClassVar[bool] = False  # what clients keep is never trained in it
    keeps_layers: ClassVar[bool] = True

    def newcomer(self, params: Tensor) -> HeadMemory:
        """No head of its own yet."""
        return HeadMemory(torch.zeros_like(params), torch.zeros_like(params, dtype=torch.bool))

    def withheld(self, server: HeadServer) -> Tensor:
        """What clients keep."""
        return server.is_head

    def client_round(
        self, broadcast: HeadBroadcast, memory: HeadMemory, task: LocalTask
    ) -> tuple[ModelUpload, HeadMemory]:
        """Train from the received body with the client's own head; the body goes back, the head stays."""
        trained = self.train_locally(memory.model(broadcast.params), broadcast.is_head, task)
        body = torch.where(broadcast.is_head, broadcast.params, trained)
        kept = HeadMemory(trained.masked_fill(~broadcast.is_head, 0.0), broadcast.is_head)
        return self.upload(body, broadcast.params, task), kept

    def train_locally(self, start: Tensor, is_head: Tensor, task: LocalTask) -> Tensor:
        """L steps of the whole model."""
        return descend(task, start, self.steps(task))

    def personal(self, global_params: Tensor, memory: HeadMemory, task: LocalTask) -> Tensor:
        """The latest global body with the client's own head."""
        return memory.model(global_params.unsqueeze(-2))


def head_layers(method: str, head: str, population: Population) -> Sequence[Layer]:
    """The layers of a head by their names, divided by commas; empty: the last layer.

    A name is a layer's or a module's with all its layers; where there is none, a part of the names of several, as
    ``lora_B`` is of adapters.
    """
    names = names_of(population.layers)
    if len(names) < 2:
        raise ConfigError(
            f"{method} shares a body and keeps a head, but the model has {len(names) or 'no'} "
            f"layer{'' if len(names) == 1 else 's'}; expected two or more. Use a deeper model, or another method."
        )
    chosen = []
    for part in [part.strip() for part in head.split(",")] if head else names[-1:]:
        found = [layer for layer in population.layers if f"{layer.name}.".startswith(f"{part}.")]
        found = found or [layer for layer in population.layers if f".{part}." in f".{layer.name}."]
        if not found:
            raise unknown_name("layer", part, names)
        chosen += [layer for layer in found if layer not in chosen]
    if len(chosen) == len(population.layers):
        raise ConfigError(f"head is {head!r}, which is the whole model; expected a part of: {', '.join(names)}.")
    return chosen


@dataclass(frozen=True)
class FedPer(SharedBody):
    """Options of FedPer.

    Attributes:
        num_local_steps: L, of body and head together.
        head: Names of the layers that stay personal, divided by commas: of a layer, of a module with all its layers, or
            a part of the names of several, as ``lora_B`` is of adapters; empty: the last layer.
        weighting: Average bodies by ``examples`` (n_k) or ``equal``.
    """

    name: ClassVar[str] = "fedper"
    grid: ClassVar[Grid] = STEPS_AFTER
    source: ClassVar[str] = "Arivazhagan et al., arXiv 1912.00818, 2019"

    head: str = option("", check_string)
    weighting: Weighting = "examples"

    def kept(self, population: Population) -> Sequence[Layer]:
        """The head."""
        return head_layers(self.name, self.head, population)
