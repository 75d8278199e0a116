"""What a method is, what it is given, and what it gives back.

One idea carries the library: every client-side tensor has a client axis, and a single real client is a cohort of one.
A method is a frozen dataclass of options, a subclass of `Algorithm`, with six pure functions::

    start     once: the server's state, a record with the global model in its field ``params``
    newcomer  once: the memory of clients that have not taken part
    broadcast ─► client_round ─► server_round     every round
    personal  whenever models are evaluated

Shapes: ``params`` is ``[..., P]`` on the server and ``[..., clients, P]`` on the clients; a number per client is
``[..., clients]``.  The dots are independent federations, repeats that run side by side; usually there are none.

What a client keeps between rounds is its *memory*, a dataclass of tensors that the engine stores by client id.  What
travels is a *broadcast* and an *upload*.  Uploads add: the server's step takes their sum over the cohort, in float64,
and nothing of any single client, unless the method says that it needs single clients (``uploads_add``).  No function
alters what it is given, draws a random number or knows a device: the task keys minibatches, and noise where a method
needs some, by seed, round and client.

What the rest of the library has to know of a method, its class attributes declare: no other file asks for its name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from torch import Tensor

from selffl.algorithms.norms import BatchNorm
from selffl.algorithms.population import Population

Personalises = Literal["nothing", "layers", "model"]

Server = TypeVar("Server")
Broadcast = TypeVar("Broadcast")
Memory = TypeVar("Memory")
Upload = TypeVar("Upload")


class Bound(NamedTuple):
    """Least and most that each client of a cohort may send, of a field of its upload or of a number made of fields."""

    least: float | Tensor
    most: float | Tensor
    value: Tensor | None = None  # what is bounded [..., C, ...]; none: the field itself


class Limit(NamedTuple):
    """The most that one client's part of a sum may measure, all its numbers together, before its weight multiplies it.

    A field without negative numbers (``is_signed`` false) tells less of a client than one with them.
    """

    most: float
    weight: str | None = None  # the field that it has been multiplied by; none: it has not
    is_signed: bool = True

    def difference(self, numbers: int) -> float:
        """How far two clients' parts, of so many numbers, can be apart, over what each may measure."""
        return 2.0 if self.is_signed else math.sqrt(min(numbers, 2))


class Algorithm(ABC, Generic[Server, Broadcast, Memory, Upload]):
    """A method of federated learning: a frozen dataclass of options, what it is, and what happens in a round."""

    name: ClassVar[str]
    source: ClassVar[str] = ""  # who published it, where and when; empty: it comes with this library
    personalises: ClassVar[Personalises]  # what a client has of its own: nothing, some layers, or the whole model
    has_global_model: ClassVar[bool] = True  # whether the server's model is trained as a whole, and of use by itself
    is_federated: ClassVar[bool] = True  # whether clients learn from each other at all
    only_sgd: ClassVar[str | None] = "it does not say, by only_sgd = None, that any steps will do"  # else None
    momentum: ClassVar[float] = 0.0  # of its own local steps
    num_optimisers: ClassVar[int] = 1  # how often a client trains in a round, by `selffl.algorithms.solver.descend`
    no_weight_decay: ClassVar[str | None] = None  # why the loss that it trains on cannot have a term more; None: it can
    no_clipping: ClassVar[str | None] = None  # why its gradients cannot be shortened; None: they can
    # Why noise on gradients does not hide rows in all that a client sends; None: it is made of nothing else of rows.
    no_row_privacy: ClassVar[str | None] = "it does not say, by no_row_privacy = None, that it sends nothing else"
    no_bfloat16: ClassVar[str | None] = None  # why gradients need all their digits; None: two or three are enough
    # Why models with running statistics are beyond the method; None: it leaves them to training passes and averages.
    no_statistics: ClassVar[str | None] = "it does not say, by no_statistics = None, that it can"
    keeps_layers: ClassVar[bool] = False  # whether clients keep the layers that a population says they do
    batch_norm: ClassVar[BatchNorm] = "averaged"  # the policy for BatchNorm, where nobody says another
    uploads_add: ClassVar[bool] = True  # whether the server needs nothing but the sum of a cohort's uploads
    recorded: ClassVar[tuple[str, ...]] = ()  # fields of an upload that a run writes down, client by client
    may_be_unknown: ClassVar[tuple[str, ...]] = ()  # fields of an upload that may be NaN
    # Small fields of an upload of which no client's counts for more than so many times the cohort's upper quartile.
    capped: ClassVar[Mapping[str, float]] = {}
    # Fields of an upload that move a model or the like, and the field that each of them has been multiplied by.
    averaged: ClassVar[Mapping[str, str | None]] = {"change": "weight"}
    no_defence: ClassVar[Mapping[str, str]] = {}  # why a defence makes no sense of its uploads, by the defence's name
    per_client: ClassVar[tuple[str, ...]] = ()  # fields of the server's state that have a client axis [..., M, ...]
    newcomer_visits: ClassVar[int | None] = None  # visits that make a new client's model; None: until it stops moving
    has_closing_visit: ClassVar[bool] = False  # whether clients go on by themselves once training is over
    information_balance: ClassVar[float | None] = None  # of a row, in the personal posterior; None: there is none

    @abstractmethod
    def start(self, params: Tensor, population: Population) -> Server:
        """State of the server before the first round; ``params [..., P]`` is the initial model."""

    @abstractmethod
    def newcomer(self, params: Tensor) -> Memory:
        """Memory of clients that have not taken part yet; ``params [..., clients, P]`` gives shape and dtype."""

    @abstractmethod
    def broadcast(self, server: Server, clients: Tensor) -> Broadcast:
        """What the server sends to the cohort ``clients [..., C]``; every field has the client axis."""

    @abstractmethod
    def client_round(self, broadcast: Broadcast, memory: Memory, task: Any) -> tuple[Upload, Memory]:
        """Local work of the cohort: what it sends back, and what it keeps."""

    @abstractmethod
    def server_round(self, server: Server, clients: Tensor, upload: Upload) -> Server:
        """The server's state once the cohort ``clients [..., C]`` has answered.

        ``upload`` is the sum over the cohort: its fields have no client axis, unless uploads do not add.
        """

    @abstractmethod
    def personal(self, global_params: Tensor, memory: Memory, task: Any) -> Tensor:
        """Each client's model as it is evaluated, ``[..., clients, P]``; ``global_params`` is ``[..., P]``.

        Decision D10: a client that never took part has the global model.
        """

    def adapt(self, broadcast: Broadcast, memory: Memory, task: Any) -> Memory:
        """What new clients keep that are not asked to send anything: without the work for the upload, where it can."""
        return self.client_round(broadcast, memory, task)[1]

    def closing_visit(self, broadcast: Broadcast, memory: Memory, task: Any, num_rounds: int) -> Memory:
        """What clients keep once training is over, after ``num_rounds``: nothing is sent back."""
        return self.adapt(broadcast, memory, task)

    def local_work(self) -> tuple[int, int | None] | None:
        """Steps, and epochs instead of them, of a client that trains alone for as long; None: nothing to compare."""
        return None

    def sent_gradients(self, steps_per_epoch: Tensor) -> int | Tensor:
        """The most gradients in a visit that what is sent is made of, for clients of so many minibatches ``[...]``.

        For methods whose rows noise can hide (``no_row_privacy``): each is of a minibatch of its own.
        """
        raise NotImplementedError

    def inter_variance(self, server: Server) -> Tensor | None:
        """σ₀² ``[...]``, as the server has learned it; None: the method has none."""
        return None

    def inter_variance_interval(self, server: Server) -> tuple[Tensor, Tensor] | None:
        """Between what σ₀² lies with 95 % confidence ``[...]``, NaN where unknown; None: the method does not say."""
        return None

    def group_variances(self, server: Server) -> Tensor | None:
        """σ₀² of each group of the population's parameters ``[..., G]``; None: the method has one for all, or none."""
        return None

    def intra_variance(self, server: Server, clients: Tensor, recorded: Mapping[str, Tensor]) -> Tensor | None:
        """σₘ² of ``clients [..., C]``, of whom so much is recorded, NaN where unknown; None: the method has none."""
        return None

    def weights(self, server: Server, clients: Tensor, upload: Upload) -> Tensor | None:
        """What each client of the cohort weighs ``[..., C]``, where the server weighs them, relative to each other."""
        return None

    def gains(self, server: Server, num_examples: Tensor) -> Tensor | None:
        """Factor by which the others shrink each client's variance, ``[..., M]``; NaN where unknown."""
        return None

    def bounds(self, server: Server, clients: Tensor, upload: Upload, rows: Tensor) -> Mapping[str, Bound]:
        """What each of the cohort's ``clients [..., C]``, who have so many ``rows [..., C]`` at most, may send.

        By field, or by the name of what is made of fields.  Fields that are not here and no models are from 0 up.
        """
        return {}

    def moves(self, server: Server, upload: Upload) -> dict[str, Tensor]:
        """What each client would have the server's models move by ``[..., C, D]``, unweighted, by field."""
        found = {}
        for name, weight in self.averaged.items():
            vectors, weights = getattr(upload, name), None if weight is None else getattr(upload, weight)
            found[name] = vectors if weights is None else vectors / weights.unsqueeze(-1)
        return found

    def replace_moves(self, server: Server, upload: Upload, moves: Mapping[str, Tensor]) -> Upload:
        """The upload of clients that move the models by ``moves`` instead."""
        found = {}
        for name, vectors in moves.items():
            weight = self.averaged[name]
            found[name] = vectors if weight is None else vectors * getattr(upload, weight).unsqueeze(-1)
        return replace(upload, **found)  # type: ignore[type-var]

    def has_equal_weights(self) -> bool:
        """Whether every client weighs 1, whatever its rows: then its weight tells nothing of it."""
        return False

    def limits(self, clip: float, max_weight: float, upload: Upload) -> Mapping[str, Limit]:
        """What fields of one client's upload may measure, where a client may move a model by ``clip`` at most.

        All fields but weights, which may be ``max_weight``, and what is merely recorded; ``upload`` tells how many
        numbers they have.
        """
        return {name: Limit(clip, weight) for name, weight in self.averaged.items()}

    def in_units_of_limits(self, upload: Upload) -> Upload:
        """The same upload, where sums matter only relative to each other: in units in which limits can be stated."""
        return upload

    def noisy_server_round(self, server: Server, clients: Tensor, upload: Upload, noise: Mapping[str, float]) -> Server:
        """The server's step where sums have noise of these deviations, by field: where squares are taken, less it."""
        return self.server_round(server, clients, upload)
