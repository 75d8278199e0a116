"""Rows of clients behind each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from selffl.data.columns import check_arrays
from selffl.data.named import Features, map_entries
from selffl.errors import DataError


@dataclass(frozen=True)
class Rows:
    """Rows of all clients behind each other: client m has rows ``offset[m]`` to ``offset[m + 1] - 1``."""

    features: Features  # [rows, ...]; or several such tensors by name
    labels: Tensor  # [rows]
    offset: Tensor  # [clients + 1]

    is_on_demand: ClassVar[bool] = False  # whether rows are there only when a client is asked for

    @property
    def num_rows(self) -> int:
        """Number of rows of all clients."""
        return int(self.offset[-1])

    @property
    def sample(self) -> Rows:
        """Rows that say what all of them look like: all of them, where they are there."""
        return self

    @property
    def num_classes(self) -> int | None:
        """Largest label + 1; none where labels are floating-point targets, or there are no rows."""
        return None if self.labels.is_floating_point() or not self.labels.numel() else 1 + int(self.labels.max())

    def cohort(self, clients: Tensor) -> tuple[Rows, Tensor]:
        """Rows among which those of the clients at these positions are, and their positions there."""
        return self, clients

    @cached_property
    def num_examples(self) -> Tensor:
        """Rows of each client, ``[clients]``."""
        return self.offset.diff()

    @property
    def owner(self) -> Tensor:
        """Position of each row's client, ``[rows]``."""
        clients = torch.arange(len(self.offset) - 1, device=self.offset.device)
        return clients.repeat_interleave(self.num_examples)

    @classmethod
    def single_client(cls, x: Any, y: Any) -> Rows:
        """The rows of a single client, in the order given; the rest as in `Federation.from_arrays`."""
        features, labels = check_arrays(x, y)
        return cls(features, labels, torch.tensor([0, len(labels)]))

    @property
    def array(self) -> Tensor:
        """The features of rows that are one tensor; a dictionary of them is refused."""
        if not isinstance(self.features, Tensor):
            raise DataError(
                f"rows are a dictionary of {', '.join(self.features.keys())}; expected one array of features."
            )
        return self.features

    def subset(self, clients: Tensor) -> Rows:
        """The rows of the clients at these positions, in their order."""
        sizes = self.num_examples[clients]
        offset = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        first = (self.offset[clients] - offset[:-1]).repeat_interleave(sizes)
        index = first + torch.arange(len(first), device=first.device)
        return Rows(self.features[index], self.labels[index], offset)

    def where(self, is_chosen: Tensor) -> Rows:
        """The rows for which ``is_chosen [rows]`` is true, still client by client."""
        sizes = torch.bincount(self.owner[is_chosen], minlength=len(self.offset) - 1)
        return Rows(self.features[is_chosen], self.labels[is_chosen], torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Rows:
        """These rows on a device, features (and targets that are not classes) in a precision, if one is given."""

        def move(values: Tensor) -> Tensor:
            return values.to(device, dtype if values.is_floating_point() else None)

        return Rows(map_entries(move, self.features), move(self.labels), self.offset.to(device))
