"""Accuracy on rows that are common to all clients, weighted by how often each client meets each class.

Where clients are tested on the same rows, a client that holds two classes of ten should not be asked about the others.
Drawing test rows in its proportions would be a sample; weights are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from selffl.data.federation import Federation


@dataclass(frozen=True)
class ShareWeightedAccuracy:
    """A metric of `selffl.Metric` that differs from client to client.

    Attributes:
        shares: Of each class among a client's rows, by its id.
    """

    shares: Mapping[Hashable, Tensor]  # [K] each

    @classmethod
    def of(cls, federation: Federation) -> ShareWeightedAccuracy:
        """The metric by each client's rows for training and, where some are set aside, for validation."""
        counts = federation.class_counts(*(part for part in federation.parts if part != "test")).double()
        shares = counts / counts.sum(1, keepdim=True)
        return cls(dict(zip(federation.clients, shares, strict=True)))

    def for_client(self, client: Hashable) -> Callable[[Tensor, Tensor], float]:
        """Accuracy of outputs ``[rows, K]`` of rows that weigh by the client's share of their class."""

        def accuracy(outputs: Tensor, labels: Tensor) -> float:
            weight = self.shares[client].to(labels.device)[labels]
            total = weight.sum()
            # Rows of none of its classes cannot test it.
            return float((weight * (outputs.argmax(-1) == labels)).sum() / total) if total > 0 else torch.nan

        return accuracy
