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
Two sides of a method that a round does not need stand in modules of their own: `selffl.algorithms.safeguards`, what one
client may send and how noise hides it, and `selffl.algorithms.hierarchy`, what the method has learned of variances.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

from torch import Tensor

from selffl.algorithms.grids import Grid
from selffl.algorithms.hierarchy import Hierarchy
from selffl.algorithms.norms import BatchNorm
from selffl.algorithms.options import check_options
from selffl.algorithms.population import Population
from selffl.algorithms.safeguards import Safeguards

Personalises = Literal["nothing", "layers", "model"]

Server = TypeVar("Server")
Broadcast = TypeVar("Broadcast")
Memory = TypeVar("Memory")
Upload = TypeVar("Upload")


class Algorithm(ABC, Safeguards[Server, Upload], Hierarchy[Server, Upload], Generic[Server, Broadcast, Memory, Upload]):
    """A method of federated learning: a frozen dataclass of options, what it is, and what happens in a round."""

    name: ClassVar[str]
    source: ClassVar[str] = ""  # who published it, where and when; empty: nobody in particular, or this library
    personalises: ClassVar[Personalises]  # what a client has of its own: nothing, some layers, or the whole model
    has_global_model: ClassVar[bool] = True  # whether the server's model is trained as a whole, and of use by itself
    is_federated: ClassVar[bool] = True  # whether clients learn from each other at all
    only_sgd: ClassVar[str | None] = "it does not say, by only_sgd = None, that any steps will do"  # else None
    momentum: ClassVar[float] = 0.0  # of its own local steps
    num_optimisers: ClassVar[int] = 1  # how often a client trains in a round, by `selffl.algorithms.solver.descend`
    no_weight_decay: ClassVar[str | None] = None  # why the loss that it trains on cannot have a term more; None: it can
    no_clipping: ClassVar[str | None] = None  # why its gradients cannot be shortened; None: they can
    no_bfloat16: ClassVar[str | None] = None  # why gradients need all their digits; None: two or three are enough
    # Why models with running statistics are beyond the method; None: it leaves them to training passes and averages.
    no_statistics: ClassVar[str | None] = "it does not say, by no_statistics = None, that it can"
    keeps_layers: ClassVar[bool] = False  # whether clients keep the layers that a population says they do
    needs_classes: ClassVar[bool] = False  # whether it makes no sense where rows have no classes
    batch_norm: ClassVar[BatchNorm] = "averaged"  # the policy for BatchNorm, where nobody says another
    uploads_add: ClassVar[bool] = True  # whether the server needs nothing but the sum of a cohort's uploads
    recorded: ClassVar[tuple[str, ...]] = ()  # numbers of an upload that a run writes down: columns, a row per client
    may_be_unknown: ClassVar[tuple[str, ...]] = ()  # fields of an upload that may be NaN
    per_client: ClassVar[tuple[str, ...]] = ()  # fields of the server's state that have a client axis [..., M, ...]
    steps_options: ClassVar[tuple[str, ...]] = ()  # options whose place a number of epochs takes (`local_work`)
    grid: ClassVar[Grid | None] = None  # options that are tuned, with first values; None: it does not say
    newcomer_visits: ClassVar[int | None] = None  # visits that make a new client's model; None: until it stops moving
    has_closing_visit: ClassVar[bool] = False  # whether clients go on by themselves once training is over

    def __post_init__(self) -> None:
        """Refuse options that cannot work (`selffl.algorithms.options.option`)."""
        check_options(self)

    def fields_by_client(self) -> tuple[str, ...]:
        """Fields of an upload that are kept of every client, whether uploads add or not."""
        return tuple(dict.fromkeys((*self.recorded, *self.hierarchy_inputs)))

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

    def global_model(self, server: Any) -> Tensor:
        """The model for everybody ``[..., P]``, as it is evaluated and handed on."""
        params: Tensor = server.params
        return params

    def adapt(self, broadcast: Broadcast, memory: Memory, task: Any) -> Memory:
        """What new clients keep that are not asked to send anything: without the work for the upload, where it can."""
        return self.client_round(broadcast, memory, task)[1]

    def closing_broadcast(self, server: Server, clients: Tensor) -> Broadcast:
        """What the server sends for closing visits: what it sends in a round, unless the method says more."""
        return self.broadcast(server, clients)

    def closing_visit(self, broadcast: Broadcast, memory: Memory, task: Any, num_rounds: int) -> Memory:
        """What clients keep once training is over, after ``num_rounds``: nothing is sent back."""
        return self.adapt(broadcast, memory, task)

    def closing_rounds(
        self, num_rounds: int, population: Population
    ) -> Sequence[Algorithm[Server, Broadcast, Memory, Any]]:
        """Rounds after the last of ``num_rounds``, in which some clients say what closing visits are to be like.

        They take this method's state and memories, one after the other, and leave the memories as they are.
        """
        return ()

    def reopen(self, server: Server) -> Server:
        """The server's state as training left it, for a run that goes on: without what closing rounds have said."""
        return server

    def is_due(self, server: Server) -> bool:
        """Whether a closing round of a federation with this state has anything to ask."""
        return True

    def local_work(self) -> tuple[int, int | None] | None:
        """Steps, and epochs instead of them, of a client that trains alone for as long; None: nothing to compare."""
        return None

    def noisy_server_round(self, server: Server, clients: Tensor, upload: Upload, noise: Mapping[str, float]) -> Server:
        """The server's step where sums have noise of these deviations, by field: where squares are taken, less it."""
        return self.server_round(server, clients, upload)
