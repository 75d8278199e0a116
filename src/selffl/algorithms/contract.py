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

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from selffl.algorithms.norms import BatchNorm
from selffl.algorithms.optimisers import SGD, Optimiser, RememberedSteps
from selffl.algorithms.population import Population

Personalises = Literal["nothing", "layers", "model"]
CLIPPING_EPS = 1e-6  # that torch adds to a gradient's length


class LocalTask(ABC):
    """What the clients of one cohort can do with their own rows in one round.

    The cohort's leading axes are flattened into *slots*, ``0 .. N-1``, one for each client, so that a solver can let
    finished clients leave the block.  A minibatch is addressed by a number, ``draw``: asked for twice it is the same
    minibatch.  A task without a batch size has no minibatches: every draw is the whole data set, and counts as B = 1.
    """

    optimiser: Optimiser = SGD()  # how the solver makes steps of gradients; one of its own where a task has been told
    remembered: RememberedSteps | None = None  # where clients keep their optimisers: what these remember
    weight_decay: float = 0.0  # of each gradient of a minibatch, and how long it may be; likewise
    max_gradient_norm: float | None = None
    slots_per_client: int = 1  # 2 where each half of a client's rows has a slot of its own
    num_statistics: int = 0  # coordinates of a model, the last ones, that are no parameters but running statistics

    def __init__(
        self, shape: torch.Size, num_examples: Tensor, learning_rate: float | Tensor, batch_size: int | None = None
    ) -> None:
        self.shape = shape  # [..., clients]
        self.num_examples = num_examples  # N_m [..., clients]
        self.learning_rate = learning_rate  # eta, or eta_m [..., clients]
        self.is_full_batch = batch_size is None
        self.batch_size = 1 if batch_size is None else batch_size  # B
        self.num_gradients = torch.zeros(shape.numel(), dtype=torch.int64, device=num_examples.device)  # spent, by slot

    @property
    def steps_per_epoch(self) -> Tensor:
        """ceil(N_m / B) ``[..., clients]``, which is when every row has been met; 1 without minibatches."""
        count = self.num_examples.expand(self.shape)
        return torch.ones_like(count) if self.is_full_batch else (count + self.batch_size - 1) // self.batch_size

    @abstractmethod
    def batch(self, draw: int, slots: Tensor) -> Any:
        """Minibatch number ``draw`` of the clients in ``slots [n]``."""

    @abstractmethod
    def batch_gradient(self, params: Tensor, batch: Any) -> Tensor:
        """Gradient of each client's mean loss over its minibatch, at ``params [n, P]``: ``[n, P]``.

        In the place of statistics are those that the pass over the minibatch leaves.
        """

    def gradient(self, params: Tensor, batch: Any, slots: Tensor, frozen: Tensor | None = None) -> Tensor:
        """The gradient of a minibatch, counted: what a method spends is measured here, not reported by the method.

        As in torch, the pass writes the statistics that it leaves into the model that it is given, ``params`` itself.
        The gradient is 0 there.  It is first shortened (``torch.nn.utils.clip_grad_norm_``; coordinates that are
        ``frozen`` do not count), then weight decay is added (as ``torch.optim`` does, but for AdamW).
        """
        self.num_gradients.index_add_(0, slots // self.slots_per_client, torch.ones_like(slots))
        found = self.batch_gradient(params, batch)
        if self.num_statistics:
            params[:, -self.num_statistics :] = found[:, -self.num_statistics :]
            found[:, -self.num_statistics :] = 0.0
        if self.max_gradient_norm is not None:
            counted = found if frozen is None else found.masked_fill(frozen, 0.0)
            length = torch.linalg.vector_norm(counted, dim=-1, keepdim=True)
            found.mul_((self.max_gradient_norm / (length + CLIPPING_EPS)).clamp(max=1.0))
        if self.weight_decay:
            self.parameters(found).add_(self.parameters(params), alpha=self.weight_decay)
        return found

    def parameters(self, values: Tensor) -> Tensor:
        """``values [..., P]`` without those of statistics."""
        return values[..., : -self.num_statistics] if self.num_statistics else values

    def without_statistics(self, values: Tensor) -> Tensor:
        """``values [..., P]``, written into: 0 for statistics, which nothing pulls."""
        if self.num_statistics:
            values[..., -self.num_statistics :] = 0.0
        return values


Server = TypeVar("Server")
Broadcast = TypeVar("Broadcast")
Memory = TypeVar("Memory")
Upload = TypeVar("Upload")


class Algorithm(ABC, Generic[Server, Broadcast, Memory, Upload]):
    """A method of federated learning: a frozen dataclass of options, what it is, and what happens in a round."""

    name: ClassVar[str]
    personalises: ClassVar[Personalises]  # what a client has of its own: nothing, some layers, or the whole model
    has_global_model: ClassVar[bool] = True  # whether the server's model is trained as a whole, and of use by itself
    is_federated: ClassVar[bool] = True  # whether clients learn from each other at all
    only_sgd: ClassVar[str | None] = "it does not say, by only_sgd = None, that any steps will do"  # else None
    momentum: ClassVar[float] = 0.0  # of its own local steps
    num_optimisers: ClassVar[int] = 1  # how often a client trains in a round, by `selffl.algorithms.solver.descend`
    no_weight_decay: ClassVar[str | None] = None  # why the loss that it trains on cannot have a term more; None: it can
    no_clipping: ClassVar[str | None] = None  # why its gradients cannot be shortened; None: they can
    # Why models with running statistics are beyond the method; None: it leaves them to training passes and averages.
    no_statistics: ClassVar[str | None] = "it does not say, by no_statistics = None, that it can"
    keeps_layers: ClassVar[bool] = False  # whether clients keep the layers that a population says they do
    batch_norm: ClassVar[BatchNorm] = "averaged"  # the policy for BatchNorm, where nobody says another
    uploads_add: ClassVar[bool] = True  # whether the server needs nothing but the sum of a cohort's uploads
    recorded: ClassVar[tuple[str, ...]] = ()  # fields of an upload that a run writes down, client by client
    may_be_unknown: ClassVar[tuple[str, ...]] = ()  # fields of an upload that may be NaN
    per_client: ClassVar[tuple[str, ...]] = ()  # fields of the server's state that have a client axis [..., M, ...]
    newcomer_visits: ClassVar[int | None] = None  # visits that make a new client's model; None: until it stops moving
    closing_visits: ClassVar[int] = 0  # of every client once training is over, by `adapt`: nothing is sent back
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

    def local_work(self) -> tuple[int, int | None] | None:
        """Steps, and epochs instead of them, of a client that trains alone for as long; None: nothing to compare."""
        return None

    def inter_variance(self, server: Server) -> Tensor | None:
        """σ₀² ``[...]``, as the server has learned it; None: the method has none."""
        return None

    def inter_variance_interval(self, server: Server) -> tuple[Tensor, Tensor] | None:
        """Between what σ₀² lies with 95 % confidence ``[...]``, NaN where unknown; None: the method does not say."""
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

    def bounds(self, upload: Upload, max_examples: int) -> Mapping[str, tuple[float | Tensor, float | Tensor]]:
        """Least and most that one client may send in fields of its upload; else none but models is below 0."""
        return {}

    def noise_scale(self) -> Mapping[str, float]:
        """Standard deviation of the noise on the sum of each field of the uploads; empty: no noise."""
        return {}
