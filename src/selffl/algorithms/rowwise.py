"""What a method is given that looks at single rows: their gradients and their classes.

Most methods need gradients of minibatches alone, which any `selffl.algorithms.contract.LocalTask` has.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selffl.algorithms.contract import LocalTask
from selffl.algorithms.layers import ClassBias


class RowGradients(NamedTuple):
    """Gradients of single rows of a minibatch, and how much information there is in them.

    ``gradients`` are scaled so that their outer products, summed over all of a client's rows, are the information in
    the unit of the loss times the number of its terms, as a prior's precision beside it is.
    """

    mean: Tensor  # gradient of the mean loss over these rows [n, P]
    gradients: Tensor  # of each row's loss, over the root of the temperature [n, R, P]; zeros where there is no row
    surplus: Tensor  # expected information of each row over its empirical one, its outer product [n, R]
    num_rows: Tensor  # that were looked at [n]
    num_examples: Tensor  # of how many [n]
    temperature: Tensor  # a loss of this much is one nat [n]: 1 for a negative log-likelihood


class RowwiseTask(LocalTask):
    """The local work of a cohort whose rows can be looked at one by one."""

    class_bias: ClassBias | None = None  # what is added to the scores of classes, where that can be said

    @property
    def num_terms(self) -> Tensor:
        """How many times the loss counts in a client's log-likelihood ``[..., clients]``: it is a mean over N_m."""
        return self.num_examples.expand(self.shape)

    def class_counts(self, num_classes: int) -> Tensor:
        """Rows of each class ``[..., clients, K]``; zeros where rows have no class."""
        return torch.zeros(*self.shape, num_classes, device=self.num_examples.device)

    @abstractmethod
    def batch_row_gradients(self, params: Tensor, batch: Any, slots: Tensor, most: int) -> RowGradients:
        """At most ``most`` rows of the minibatch of each client in ``slots [n]``, at ``params [n, P]``."""

    def row_gradients(self, params: Tensor, batch: Any, slots: Tensor, most: int) -> RowGradients:
        """The gradients of single rows, counted: as dear as the gradient of a minibatch, which is their mean."""
        self.num_gradients.index_add_(0, slots, torch.ones_like(slots))
        return self.batch_row_gradients(params, batch, slots, most)
