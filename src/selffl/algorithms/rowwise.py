"""What a method is given that tells a client's rows apart, classes and halves of them, and noise that goes with them.

Most methods need gradients of minibatches alone, which any `selffl.algorithms.local_task.LocalTask` has.
"""

from __future__ import annotations

from abc import abstractmethod
from copy import copy
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from selffl.algorithms.layers import ClassBias
from selffl.algorithms.local_task import LocalTask


class RowwiseTask(LocalTask):
    """The local work of a cohort whose rows can be told apart."""

    class_bias: ClassBias | None = None  # what is added to the scores of classes, where that can be said

    @property
    def has_classes(self) -> bool:
        """Whether the loss is the log-likelihood of a class, of which each row has one."""
        return False

    @property
    def num_terms(self) -> Tensor:
        """How many times the loss counts in a client's log-likelihood ``[..., clients]``: it is a mean over N_m."""
        return self.num_examples.expand(self.shape)

    def class_counts(self, num_classes: int) -> Tensor:
        """Rows of each class ``[..., clients, K]``; zeros where rows have no class."""
        return torch.zeros(*self.shape, num_classes, device=self.num_examples.device)

    def class_scores(self, params: Tensor, draw: int) -> tuple[Tensor, Tensor] | None:
        """Scores of classes at ``params [n, P]`` of minibatch ``draw`` of all slots, and 1 for each row's class.

        Both are ``[n, B, K]``.  None where rows have no class.
        """
        return None

    @abstractmethod
    def noise(self, draw: int, slots: Tensor, params: Tensor) -> Tensor:
        """Standard normal numbers like ``params [n, P]``, which go with minibatch ``draw`` as its rows do."""

    @abstractmethod
    def halves(self, split: int = 0) -> Self:
        """This work with each client's rows cut in two, drawn once and for all for a ``split``: ``[..., clients, 2]``.

        Its ``num_terms`` are those of the halves.  The second half of a client with a single row is empty; it has no
        terms, and whatever its minibatches hold does not count.  Gradients are counted by client, as everywhere.
        """

    def _copy_for_halves(self) -> Self:
        """A copy with the shape, the counts and the rates of a task of halves; whose rows are whose is for `halves`."""
        task = copy(self)
        task.shape, task.slots_per_client = torch.Size((*self.shape, 2)), 2
        task.num_examples = split_in_two(self.num_examples.expand(self.shape))
        if isinstance(self.learning_rate, Tensor):
            task.learning_rate = self.learning_rate.unsqueeze(-1).expand(task.shape)
        return task

    def shorten(self, batch: Any) -> Any:
        """The first half of the rows of a minibatch, rounded up; all of it, where there are no minibatches."""
        return batch

    def temperature(self, params: Tensor, batch: Any) -> Tensor:
        """How large a loss is one nat ``[n]``: 1 for a negative log-likelihood, else by the rows of a minibatch."""
        return torch.ones_like(params[:, 0])

    def measure_halves(self, models: Tensor, others: Tensor) -> HalfMeasurement:
        """Measure a task of halves: gradients on rows of each half, at its own model and at the other's.

        ``models`` and ``others`` are ``[..., clients, 2, P]``: that of each half, and what the other half's is for rows
        of this one.  Half of the first minibatch of each half; both count as one minibatch, so that a client spends two
        gradients.
        """
        slots = torch.arange(self.shape.numel(), device=models.device)
        batch = self.shorten(self.batch(0, slots))
        each = [these.reshape(len(slots), -1) for these in (models, others)]
        own, other = (self.batch_gradient(these, batch).reshape_as(models) for these in each)
        self.num_gradients += 2
        temperature = torch.stack([self.temperature(these, batch) for these in each]).mean(0)
        first = torch.stack([own[..., 0, :], other[..., 0, :]], dim=-2)
        second = torch.stack([other[..., 1, :], own[..., 1, :]], dim=-2)
        return HalfMeasurement(torch.stack([first, second], dim=-3), temperature.reshape(self.shape).mean(-1))


class HalfMeasurement(NamedTuple):
    """What two models of a client say of rows of both halves."""

    gradients: Tensor  # [..., clients, 2, 2, P]: first whose rows, then whose model
    temperature: Tensor  # of the loss [..., clients]


def split_in_two(num_examples: Tensor) -> Tensor:
    """Rows of both halves ``[..., clients, 2]`` of clients with ``num_examples [..., clients]``."""
    return torch.stack([(num_examples + 1) // 2, num_examples // 2], dim=-1)
