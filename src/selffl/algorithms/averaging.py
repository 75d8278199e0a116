"""What the averaging methods share: a server that holds one model, and clients that send it weighted changes.

Records, how they start and travel, and one average; each method's local work is in its own file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor

from selffl.algorithms.contract import Algorithm, Memory, Personalises
from selffl.algorithms.local_task import LocalTask
from selffl.algorithms.options import check_choice, check_integer, option
from selffl.algorithms.population import Population
from selffl.algorithms.safeguards import Bound
from selffl.maths.variance import summing_dtype

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
    """What a client adds to the average: how it changed the model, times its weight, and its weight.

    Changes rather than models are summed: the same by algebra, and nothing of a small change is lost beside the model.
    """

    change: Tensor  # n_k (w_k - w) [..., C, P]
    weight: Tensor  # n_k [..., C]


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
        """The memory of clients that have not taken part."""
        return cls(torch.zeros_like(params), torch.zeros_like(params[..., 0]))

    def model(self, global_params: Tensor) -> Tensor:
        """The client's own model, or the global one ``[..., C, P]`` if it never took part (D10)."""
        return torch.where((self.clock == 0).unsqueeze(-1), global_params, self.params)

    def keep(self, params: Tensor) -> PersonalMemory:
        """The memory after one more round that ended with ``params``."""
        return PersonalMemory(params, self.clock + 1)


@dataclass(frozen=True)
class FixedLocalSteps:
    """How long clients train, for methods that do not choose it themselves.

    Attributes:
        num_local_steps: L, the steps a client takes in a round.
        num_local_epochs: Passes over its own rows that each client makes instead of L steps: ceil(N_m/B) steps each
            (D15).
    """

    steps_options: ClassVar[tuple[str, ...]] = ("num_local_steps",)

    num_local_steps: int = option(20, check_integer, least=1)
    num_local_epochs: int | None = option(None, check_integer, least=1, kw_only=True)

    def steps(self, task: LocalTask) -> int | Tensor:
        """One number for every client, or ``[..., clients]``."""
        epochs = self.num_local_epochs
        return self.num_local_steps if epochs is None else epochs * task.steps_per_epoch

    def sent_gradients(self, steps_per_epoch: Tensor) -> int | Tensor:
        """One for each step, unless the method takes more or fewer."""
        return self.num_local_steps if self.num_local_epochs is None else self.num_local_epochs * steps_per_epoch

    def local_work(self) -> tuple[int, int | None]:
        """What a client would do alone: as many steps, or epochs."""
        return self.num_local_steps, self.num_local_epochs


def row_count(rows: Tensor) -> Bound:
    """Bounds of a client's number of rows ``[..., C]``: at least one, if it has any, and no more than there can be."""
    return Bound(rows.clamp(max=1.0), rows)


def weighted_change(trained: Tensor, received: Tensor, weight: Tensor) -> Tensor:
    """A client's change times its weight ``[..., C]``: what it adds to the cohort's sum, ``[..., C, P]``."""
    return (trained - received).to(summing_dtype(trained)).mul_(weight.unsqueeze(-1))


def move(params: Tensor, change: Tensor, weight: Tensor, share: float | Tensor = 1.0) -> Tensor:
    """The model ``[..., P]`` moved by a share of the cohort's mean change, of its sums ``[..., P]`` and ``[...]``."""
    return (params + share * (change / weight.unsqueeze(-1))).to(params)


Server = TypeVar("Server", bound=ModelServer)
Broadcast = TypeVar("Broadcast", bound=ModelBroadcast)
Upload = TypeVar("Upload", bound=ModelUpload)


def to_each(value: Tensor, clients: Tensor) -> Tensor:
    """A value of the server's state ``[..., *]``, the same for each of ``clients [..., C]``: ``[..., C, *]``."""
    axis = clients.ndim - 1  # of the clients, behind federations side by side
    return value.unsqueeze(axis).expand(*clients.shape, *value.shape[axis:])


def send_to_each(kind: type[Broadcast], server: Any, clients: Tensor) -> Broadcast:
    """A broadcast to ``clients [..., C]``: the fields of the server's state that it has, the same for everybody."""
    return kind(**{each.name: to_each(getattr(server, each.name), clients) for each in fields(kind)})


class AveragedModel(Algorithm[Server, Broadcast, Memory, Upload]):
    """A method whose server averages the clients' models."""

    sends: ClassVar[type[ModelBroadcast]] = ModelBroadcast  # what of the server's state is sent to everybody
    weighting: Weighting = "equal"  # of clients in the average; an option of methods that leave it to the user

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("weighting", self.weighting, get_args(Weighting))

    def weighting_of_clients(self) -> Weighting:
        """How clients weigh in the average: as the option says, unless the method says otherwise."""
        return self.weighting

    def broadcast(self, server: Server, clients: Tensor) -> Broadcast:
        """What is sent of the server's state, to every client of the cohort."""
        return cast(Broadcast, send_to_each(self.sends, server, clients))

    def upload(self, trained: Tensor, received: Tensor, task: LocalTask) -> ModelUpload:
        """A cohort's changes to the model that it received, weighted."""
        weight = task.num_examples.expand(task.shape).to(summing_dtype(trained))
        if self.weighting_of_clients() == "equal":
            weight = torch.ones_like(weight)
        return ModelUpload(weighted_change(trained, received, weight), weight)

    def server_round(self, server: Server, clients: Tensor, upload: Upload) -> Server:
        """The weighted average of the clients' models."""
        return replace(server, params=move(server.params, upload.change, upload.weight))

    def has_equal_weights(self) -> bool:
        """Whether every client weighs 1, as the weighting says."""
        return self.weighting_of_clients() == "equal"

    def bounds(self, server: Server, clients: Tensor, upload: Upload, rows: Tensor) -> Mapping[str, Bound]:
        """A client weighs as one, or as many rows as it has."""
        return {"weight": Bound(1.0, 1.0) if self.has_equal_weights() else row_count(rows)}

    def personal(self, global_params: Tensor, memory: Memory, task: Any) -> Tensor:
        """The global model, for everybody."""
        return global_params.unsqueeze(-2).expand(*task.shape, -1)


class SharedModel(AveragedModel[ModelServer, ModelBroadcast, Memory, ModelUpload]):
    """A method whose server knows one model and sends it to everybody."""

    def start(self, params: Tensor, population: Population) -> ModelServer:
        """The initial model."""
        return ModelServer(params)


class StatelessClients(SharedModel[NoMemory]):
    """A method with one shared model, whose clients keep nothing between rounds."""

    def newcomer(self, params: Tensor) -> NoMemory:
        """A memory with nothing in it."""
        return NoMemory()


class PersonalModels:
    """Clients that keep a model of their own, by which they answer; it begins at the shared one."""

    personalises: ClassVar[Personalises] = "model"

    def newcomer(self, params: Tensor) -> PersonalMemory:
        """No model of its own yet."""
        return PersonalMemory.empty(params)

    def personal(self, global_params: Tensor, memory: PersonalMemory, task: LocalTask) -> Tensor:
        """The client's own model; the global one before (D10)."""
        return memory.model(global_params.unsqueeze(-2))


class PersonalModelClients(PersonalModels, SharedModel[PersonalMemory]):
    """A method with one shared model, whose clients keep a model of their own."""
