"""What an algorithm is, what it is given, and what it gives back.

One idea carries the library: every client-side tensor has a client axis, and a single real client is a cohort of one.
An algorithm is a value (a frozen dataclass of options) with six pure functions::

    start     once: the server's state, a record with the global model in its field ``params``
    newcomer  once: the memory of clients that have not taken part
    broadcast ─► client_round ─► server_round     every round
    personal  whenever models are evaluated

Shapes: ``params`` is ``[..., P]`` on the server and ``[..., clients, P]`` on the clients; a number per client is
``[..., clients]``.  The dots are independent federations (repeats of an experiment) that run side by side; usually
there are none.

What a client keeps between rounds is its *memory*, a dataclass of tensors that the engine stores by client id.  What
travels is a *broadcast* and an *upload*.  No function alters what it is given, draws a random number or knows a device:
batches come from the task, which keys them by seed, round and client.  A method whose local steps may be of any kind
says so by ``only_sgd = None``, others why not (`selffl.algorithms.optimisers`); one whose own steps have momentum says
how much, by ``momentum``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from selffl.algorithms.optimisers import SGD, Optimiser


class Layer(NamedTuple):
    """The parameters of one layer: ``params[..., start:stop]``."""

    name: str
    start: int
    stop: int


class ClassBias(NamedTuple):
    """Where the numbers lie that a model adds to the scores of classes: ``params[..., start:stop]``."""

    start: int
    stop: int

    @property
    def num_classes(self) -> int:
        """As many as there are scores; a single score tells two apart."""
        return max(self.stop - self.start, 2)

    def added(self, params: Tensor, shift: Tensor) -> Tensor:
        """``params [..., P]`` with ``shift [..., K]`` on top of the scores; they are not changed themselves."""
        is_one = self.stop - self.start == 1
        found = params.clone()
        found[..., self.start : self.stop] += shift[..., 1:] - shift[..., :1] if is_one else shift
        return found


@dataclass(frozen=True)
class Population:
    """What is known of a federation and its model before training.

    Attributes:
        num_clients: M.
        intra_variance: σₘ² ``[..., M]``, where it is known.
        inter_variance: σ₀² ``[...]``, where it is known.
        cluster: Number of each client's cluster ``[M]``, from 0 up, where the federation names clusters.
        layers: The model's layers, in the order in which their parameters lie; empty where it has none to speak of.
        class_bias: What is added to its scores, where the model ends in such numbers.
    """

    num_clients: int
    intra_variance: Tensor | None = None
    inter_variance: Tensor | None = None
    cluster: Tensor | None = None
    layers: tuple[Layer, ...] = ()
    class_bias: ClassBias | None = None


class Scores(NamedTuple):
    """What single rows say of a model: how much information there is in them.

    ``rows`` are scaled so that their outer products, summed over all of a client's rows, are the information in the
    unit of the loss times the number of its terms, as a prior's precision beside it is.
    """

    gradient: Tensor  # of the mean loss over these rows [n, P]
    rows: Tensor  # gradient of each row's loss, over the root of the temperature [n, R, P]; zeros where there is no row
    surplus: Tensor  # expected information of each row over its empirical one, its outer product [n, R]
    num_rows: Tensor  # that were looked at [n]
    num_examples: Tensor  # of how many [n]
    temperature: Tensor  # a loss of this much is one nat [n]: 1 for a negative log-likelihood


class LocalTask(ABC):
    """What the clients of one cohort can do with their own rows in one round.

    The cohort's leading axes are flattened into *rows*, ``0 .. N-1``, so that a solver can let finished clients leave
    the block.  A minibatch is addressed by a number, ``draw``: asked for twice it is the same minibatch.  A task
    without a batch size has no minibatches: every draw is the whole data set, and counts as B = 1.
    """

    optimiser: Optimiser = SGD()  # how the solver makes steps of gradients; one of its own where a task has been told
    class_bias: ClassBias | None = None  # what is added to the scores of classes, where that can be said

    def __init__(
        self, shape: torch.Size, num_examples: Tensor, learning_rate: float | Tensor, batch_size: int | None = None
    ) -> None:
        self.shape = shape  # [..., clients]
        self.num_examples = num_examples  # N_m [..., clients]
        self.learning_rate = learning_rate  # eta, or eta_m [..., clients]
        self.is_full_batch = batch_size is None
        self.batch_size = 1 if batch_size is None else batch_size  # B
        self.num_gradients = torch.zeros(shape.numel(), dtype=torch.int64, device=num_examples.device)  # so far, by row

    @property
    def num_terms(self) -> Tensor:
        """How many times the loss counts in a client's log-likelihood ``[..., clients]``: it is a mean over N_m."""
        return self.num_examples.expand(self.shape)

    @property
    def steps_per_epoch(self) -> Tensor:
        """ceil(N_m / B) ``[..., clients]``, which is when every row has been met; 1 without minibatches."""
        count = self.num_examples.expand(self.shape)
        return torch.ones_like(count) if self.is_full_batch else (count + self.batch_size - 1) // self.batch_size

    def class_counts(self, num_classes: int) -> Tensor:
        """Rows of each class ``[..., clients, K]``; none where rows have no class."""
        return torch.zeros(*self.shape, num_classes, device=self.num_examples.device)

    @abstractmethod
    def batch(self, draw: int, rows: Tensor) -> Any:
        """Minibatch number ``draw`` of each client in ``rows [n]``."""

    @abstractmethod
    def batch_gradient(self, params: Tensor, batch: Any) -> Tensor:
        """Gradient of each client's mean loss over its minibatch, at ``params [n, P]``: ``[n, P]``."""

    def gradient(self, params: Tensor, batch: Any, rows: Tensor) -> Tensor:
        """The same, counted: what a method spends is measured here, not reported by the method."""
        self.num_gradients.index_add_(0, rows, torch.ones_like(rows))
        return self.batch_gradient(params, batch)

    def batch_scores(self, params: Tensor, batch: Any, rows: Tensor, most: int) -> Scores:
        """Of at most so many rows of the minibatch of each client in ``rows [n]``, at ``params [n, P]``."""
        raise NotImplementedError(f"{type(self).__name__} does not look at single rows")

    def scores(self, params: Tensor, batch: Any, rows: Tensor, most: int) -> Scores:
        """The same, counted: as dear as the gradient of a minibatch, which is their mean."""
        self.num_gradients.index_add_(0, rows, torch.ones_like(rows))
        return self.batch_scores(params, batch, rows, most)


Server = TypeVar("Server")
Broadcast = TypeVar("Broadcast")
Memory = TypeVar("Memory")
Upload = TypeVar("Upload")


class Algorithm(Protocol, Generic[Server, Broadcast, Memory, Upload]):
    """A method of federated learning."""

    name: ClassVar[str]

    def start(self, params: Tensor, population: Population) -> Server:
        """State of the server before the first round; ``params [..., P]`` is the initial model."""
        ...

    def newcomer(self, params: Tensor) -> Memory:
        """Memory of clients that have not taken part yet; ``params [..., clients, P]`` gives shape and dtype."""
        ...

    def broadcast(self, server: Server, clients: Tensor) -> Broadcast:
        """What the server sends to the cohort ``clients [..., C]``; every field has the client axis."""
        ...

    def client_round(self, broadcast: Broadcast, memory: Memory, task: LocalTask) -> tuple[Upload, Memory]:
        """Local work of the cohort: what it sends back, and what it keeps."""
        ...

    def server_round(self, server: Server, clients: Tensor, upload: Upload) -> Server:
        """The server's state once the cohort ``clients`` has answered."""
        ...

    def personal(self, global_params: Tensor, memory: Memory, task: LocalTask) -> Tensor:
        """Each client's model as it is evaluated, ``[..., clients, P]``; ``global_params`` is ``[..., P]``.

        Decision D10: a client that never took part has the global model.
        """
        ...


@runtime_checkable
class KnowsClients(Protocol):
    """A method whose server knows single clients: what they weigh, and what they gain by joining.  Runs write it down.

    Both are NaN for a client of whom it is unknown, or where a method has no such number.
    """

    def weights(self, server: Any, clients: Tensor, upload: Any) -> Tensor:
        """What each client of the cohort weighs ``[..., C]``, relative to each other, once it has answered."""
        ...

    def gains(self, server: Any) -> Tensor:
        """Factor by which the others shrink each client's variance, ``[..., M]``."""
        ...


Record = TypeVar("Record")


def map_tensors(function: Callable[..., Tensor], record: Record, *others: Record) -> Record:
    """The record with ``function`` applied to each of its tensors (and to those of ``others`` beside it)."""
    if isinstance(record, Tensor):
        return function(record, *others)  # type: ignore[return-value]
    if not is_dataclass(record) or isinstance(record, type):
        return record
    parts = {f.name: map_tensors(function, *(getattr(r, f.name) for r in (record, *others))) for f in fields(record)}
    return type(record)(**parts)


def tensors_of(record: Any, prefix: str = "") -> dict[str, Tensor]:
    """Every tensor of a record by its dotted name: how it is saved and sent."""
    if isinstance(record, Tensor):
        return {prefix: record}
    if not is_dataclass(record):
        return {}
    found: dict[str, Tensor] = {}
    for field in fields(record):
        found |= tensors_of(getattr(record, field.name), f"{prefix}.{field.name}" if prefix else field.name)
    return found
