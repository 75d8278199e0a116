"""What the averaging methods share: a server that holds one model, and a client that holds its own.

Records, how they start and travel, and one weighting rule; each method's rounds are in its own file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from selffl.algorithms.contract import Algorithm, LocalTask, Memory, Personalises, Population, Upload
from selffl.algorithms.options import at_least, one_of
from selffl.maths.posterior import weighted_mean

Weighting = Literal["examples", "equal"]


@dataclass(frozen=True)
class ModelServer:
    """A server that knows one model."""

    params: Tensor  # w [..., P]


@dataclass(frozen=True)
class ModelBroadcast:
    """The global model, as each client receives it."""

    params: Tensor  # w [..., C, P]


@dataclass(frozen=True)
class ModelUpload:
    """A client's model and how many rows stand behind it."""

    params: Tensor  # w_k [..., C, P]
    num_examples: Tensor  # n_k [..., C]


@dataclass(frozen=True)
class NoMemory:
    """A client that keeps nothing between rounds."""


@dataclass(frozen=True)
class PersonalMemory:
    """A client that keeps its own model, and knows how often it took part."""

    params: Tensor  # [..., C, P]
    clock: Tensor  # [..., C]; 0 before the first round

    @classmethod
    def empty(cls, params: Tensor) -> PersonalMemory:
        """Of clients that have not taken part."""
        return cls(torch.zeros_like(params), torch.zeros_like(params[..., 0]))

    def model(self, global_params: Tensor) -> Tensor:
        """The client's own model, or the global one ``[..., C, P]`` if it never took part (D10)."""
        return torch.where((self.clock == 0).unsqueeze(-1), global_params, self.params)

    def keep(self, params: Tensor) -> PersonalMemory:
        """After one more round that ended with ``params``."""
        return PersonalMemory(params, self.clock + 1)


@dataclass(frozen=True)
class FixedLocalSteps:
    """How long clients train, for methods that do not choose it themselves.

    Attributes:
        num_local_steps: L, the steps a client takes in a round.
        num_local_epochs: Passes over its own rows that each client makes instead of L steps: ceil(N_m/B) steps each
            (D15).
    """

    num_local_steps: int = 20
    num_local_epochs: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        at_least("num_local_steps", self.num_local_steps, 1)
        check_epochs(self.num_local_epochs)

    def steps(self, task: LocalTask) -> int | Tensor:
        """Of every client alike, or ``[..., clients]``."""
        epochs = self.num_local_epochs
        return self.num_local_steps if epochs is None else epochs * task.steps_per_epoch

    def local_work(self) -> tuple[int, int | None]:
        """What a client would do alone: as many steps, or epochs."""
        return self.num_local_steps, self.num_local_epochs


def check_epochs(num_local_epochs: int | None) -> None:
    """Refuse a number of epochs below 1."""
    if num_local_epochs is not None:
        at_least("num_local_epochs", num_local_epochs, 1)


def check_weighting(weighting: Weighting) -> None:
    """Refuse an unknown weighting."""
    one_of("weighting", weighting, get_args(Weighting))


class SharedModel(Algorithm[ModelServer, ModelBroadcast, Memory, Upload]):
    """A method whose server knows one model and sends it to everybody."""

    row_counts: ClassVar[tuple[str, ...]] = ("num_examples",)

    def start(self, params: Tensor, population: Population) -> ModelServer:
        """The initial model."""
        return ModelServer(params)

    def broadcast(self, server: ModelServer, clients: Tensor) -> ModelBroadcast:
        """The global model, to every client of the cohort."""
        return ModelBroadcast(server.params.unsqueeze(-2).expand(*clients.shape, -1))


class StatelessClients(SharedModel[NoMemory, ModelUpload]):
    """A method with one shared model, whose clients keep nothing between rounds."""

    def newcomer(self, params: Tensor) -> NoMemory:
        """Nothing."""
        return NoMemory()


class PersonalModelClients(SharedModel[PersonalMemory, ModelUpload]):
    """A method with one shared model, whose clients keep a model of their own that begins at the shared one."""

    personalises: ClassVar[Personalises] = "model"

    def newcomer(self, params: Tensor) -> PersonalMemory:
        """No model of its own yet."""
        return PersonalMemory.empty(params)

    def personal(self, global_params: Tensor, memory: PersonalMemory, task: LocalTask) -> Tensor:
        """The client's own model (D10)."""
        return memory.model(global_params.unsqueeze(-2))


def average(upload: ModelUpload, weighting: Weighting) -> Tensor:
    """Mean of the cohort's models, by number of examples or with equal weights."""
    weight = (
        upload.num_examples.to(upload.params) if weighting == "examples" else torch.ones_like(upload.params[..., 0])
    )
    return weighted_mean(upload.params, weight.unsqueeze(-1))


def upload_model(params: Tensor, task: LocalTask) -> ModelUpload:
    """A cohort's models with their example counts."""
    return ModelUpload(params, task.num_examples.to(params))
