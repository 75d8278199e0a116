"""What a method is given that tells a client's rows apart, classes and halves of them, and noise that goes with them.

Most methods need gradients of minibatches alone, which any `selffl.algorithms.local_task.LocalTask` has.
"""

from __future__ import annotations

from abc import abstractmethod
from copy import copy
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from selffl.algorithms.layers import ClassBias, by_group
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

    def measure_halves(self, models: Tensor, deviations: Tensor, sizes: list[int]) -> HalfMeasurement:
        """Measure a task of halves on rows of each half, at its own model and at the other's.

        ``models [..., clients, 2, P]`` of both halves deviate from their prior means by ``deviations``.  For rows of
        one half the other's model is what is as far from this half's prior mean as the other is from its own.  Slopes
        are taken by groups of parameters of such ``sizes``.  Half of the first minibatch of each half; both models
        count as one minibatch, so that a client spends two gradients.
        """
        slots = torch.arange(self.shape.numel(), device=models.device)
        batch = self.shorten(self.batch(0, slots))
        own, beyond = (these.reshape(len(slots), -1) for these in (models, deviations))
        changes, temperature = self.compare_halves(own, beyond, batch, sizes)
        changes = changes.reshape(*self.shape, *changes.shape[1:])
        changes[..., 1, :, :].neg_()
        self.num_gradients.add_(2)
        return HalfMeasurement(changes, temperature.reshape(self.shape).mean(-1))

    def compare_halves(self, models: Tensor, deviations: Tensor, batch: Any, sizes: list[int]) -> tuple[Tensor, Tensor]:
        """How much steeper the mean loss over a minibatch is at ``models [n, P]`` than at the other half's.

        ``[n, 3, G]``: along d_1, d_2 and (d_1 - d_2)/2, the two ``deviations [n, P]`` of a client being d_1 and d_2, by
        groups of parameters of such ``sizes``.  And the mean temperature of both losses ``[n]``.
        """
        others = other_models(models, deviations)
        change = self.batch_gradient(models, batch) - self.batch_gradient(others, batch)
        by_client, beyond = (each.reshape(-1, 2, each.shape[-1]) for each in (change, deviations))
        first, second = beyond[:, :1], beyond[:, 1:]
        found = [by_group(by_client * each, sizes) for each in (first, second, (first - second).div_(2))]
        temperature = torch.stack([self.temperature(these, batch) for these in (models, others)]).mean(0)
        return torch.stack(found, dim=-2).flatten(0, 1), temperature


def other_models(models: Tensor, deviations: Tensor) -> Tensor:
    """What is as far from the prior mean of each half as the other half's model is from its own ``[n, P]``.

    Halves of a client follow each other: their ``models [n, P]`` and ``deviations`` from their prior means.
    """
    swapped = deviations.view(-1, 2, deviations.shape[-1]).flip(1).view(deviations.shape)
    return (models - deviations).add_(swapped)


class HalfMeasurement(NamedTuple):
    """What two models of a client say of rows of both halves."""

    # How much steeper the mean loss on rows of each half is at the first's model than at the second's, along each
    # direction, by group of parameters [..., clients, 2, D, G].
    slope_changes: Tensor
    temperature: Tensor  # of the loss [..., clients]


def split_in_two(num_examples: Tensor) -> Tensor:
    """Rows of both halves ``[..., clients, 2]`` of clients with ``num_examples [..., clients]``."""
    return torch.stack([(num_examples + 1) // 2, num_examples // 2], dim=-1)
