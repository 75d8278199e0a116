"""A first layer that brings columns of any scale to one that gradient steps like."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Standardise(nn.Module):
    """(x − mean) / spread, column by column: part of the model, so that it takes rows as they come.

    Neither is trained.  A spread of 0, of a column that never changes, counts as 1.

    Args:
        mean: of the training rows, ``[features]`` or whatever a row's shape is.
        spread: their standard deviation, of the same shape.

    Examples:
        >>> import torch
        >>> from selffl.models import Standardise
        >>> rows = torch.tensor([[1000.0, 0.25], [2000.0, 0.5], [3000.0, 0.75]])
        >>> Standardise.of(rows)(rows).tolist()
        [[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0]]
    """

    def __init__(self, mean: Tensor, spread: Tensor) -> None:
        super().__init__()
        self.mean = nn.Parameter(mean.detach().clone(), requires_grad=False)
        self.spread = nn.Parameter(torch.where(spread > 0, spread, 1.0), requires_grad=False)

    @classmethod
    def of(cls, rows: Tensor) -> Standardise:
        """A scaling by the mean and spread of ``rows [rows, ...]``, which should be training rows alone."""
        wide = rows.double()  # a column of large numbers, nearly the same
        return cls(wide.mean(0).to(rows), wide.std(0).to(rows))

    def forward(self, x: Tensor) -> Tensor:
        """Rows as the next layer gets them."""
        return (x - self.mean) / self.spread
