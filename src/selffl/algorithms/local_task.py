"""What a method is given on the clients' side: minibatches of their rows, and gradients, which are counted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from selffl.algorithms.optimisers import SGD, Optimiser, RememberedSteps
from selffl.errors import ConfigError

CLIPPING_EPS = 1e-6  # that torch adds to a gradient's length


class StepPart(NamedTuple):
    """What a step is taken in: whole models, or what is linear in those of their parameters that are of one group."""

    states: tuple[Tensor, ...]  # written into [n, ...]
    gradient: Tensor  # at the first of them [n, ...], or the same for all [...]
    group: int | None = None  # none: whole models


# (number, slots, parts): take step ``number`` of the clients in ``slots [n]``, which multiplies states and gradients by
# numbers of each client's, and adds them up.
Advance = Callable[[int, Tensor, Sequence[StepPart]], None]


class Walk(NamedTuple):
    """Steps that are linear in models, in what goes along with them, and in gradients at the first of these."""

    num_steps: Tensor  # of each [slots]
    first_draw: int  # the minibatch of the first step
    states: tuple[Tensor | None, ...]  # as they begin [slots, P]; none: zeros
    result: int  # which of them is wanted in the end
    advance: Advance
    group_sizes: Sequence[int] | None = None  # how many parameters are treated alike, one after the other; none: all


class GradientCount:
    """How many gradients each client has spent.

    Those of the same clients, step after step, are added up at once: on a GPU one addition takes as long as any.
    """

    def __init__(self, spent: Tensor) -> None:
        self._spent = spent  # by client, in the order of slots
        self._slots: Tensor | None = None  # who has taken steps that are not added yet
        self._slots_per_client, self._waiting = 1, 0

    def add(self, slots: Tensor, slots_per_client: int) -> None:
        """One more for the clients in ``slots [n]``."""
        if slots is not self._slots or slots_per_client != self._slots_per_client:
            self.read()
            self._slots, self._slots_per_client = slots, slots_per_client
        self._waiting += 1

    def read(self) -> Tensor:
        """All so far ``[clients]``, the tensor itself: what is added to it counts."""
        if self._slots is not None and self._waiting:
            clients = self._slots // self._slots_per_client
            self._spent.index_add_(0, clients, torch.full_like(clients, self._waiting))
        self._slots, self._waiting = None, 0
        return self._spent


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
    row_clip: float | None = None  # R, the most that a row's gradient may measure, where noise is to hide rows
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
        none = torch.zeros(shape.numel(), dtype=torch.int64, device=num_examples.device)
        self.spent = GradientCount(none)
        self.num_noisy = torch.zeros_like(none)  # of these, what hides rows: all that may leave the client

    @property
    def num_gradients(self) -> Tensor:
        """Gradients spent, by client in the order of slots."""
        return self.spent.read()

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

    def noisy_gradient(self, params: Tensor, batch: Any, slots: Tensor) -> Tensor:
        """The mean of row gradients, each shortened to ``row_clip``, with noise that hides any one of them.

        A minibatch can be asked for once: what protects a row is how seldom it is met.
        """
        raise NotImplementedError(f"{type(self).__name__} has no gradients of single rows")

    def at_home(self) -> Self:
        """This work without noise for rows, for what stays with the client and moves nothing that it sends."""
        return self

    def check_noisy_gradients(self, name: str, most: int | Tensor) -> None:
        """Refuse what the method called ``name`` has taken if it is more than it says that it takes, by client."""
        if bool((self.num_noisy.reshape(self.shape) > most).any()):
            raise ConfigError(
                f"{name} took {int(self.num_noisy.max())} noisy gradients in a visit, more than it says "
                "(Algorithm.sent_gradients), so that ε would be too small; expected no more. Correct the method."
            )

    def gradient(self, params: Tensor, batch: Any, slots: Tensor, frozen: Tensor | None = None) -> Tensor:
        """The gradient of a minibatch, counted: what a method spends is measured here, not reported by the method.

        As in torch, the pass writes the statistics that it leaves into the model that it is given, ``params`` itself.
        The gradient is 0 there.  It is first shortened (``torch.nn.utils.clip_grad_norm_``; coordinates that are
        ``frozen`` do not count), then weight decay is added (as ``torch.optim`` does, but for AdamW).
        """
        self.spent.add(slots, self.slots_per_client)
        if self.row_clip is None:
            found = self.batch_gradient(params, batch)
        else:
            found = self.noisy_gradient(params, batch, slots)
            self.num_noisy.index_add_(0, slots, torch.ones_like(slots))
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

    def walk(self, walk: Walk) -> tuple[Tensor, Tensor] | None:
        """Take steps for clients for whom the task knows a quicker way to where they end.

        Who they are ``[slots]``, and the result ``[slots, P]``, which is theirs alone; none: nobody.  Gradients count
        as if each step had been taken.
        """
        return None

    def parameters(self, values: Tensor) -> Tensor:
        """``values [..., P]`` without those of statistics."""
        return values[..., : -self.num_statistics] if self.num_statistics else values

    def without_statistics(self, values: Tensor) -> Tensor:
        """``values [..., P]``, written into: 0 for statistics, which nothing pulls."""
        if self.num_statistics:
            values[..., -self.num_statistics :] = 0.0
        return values
