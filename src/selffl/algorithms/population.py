"""A federation before training, as a method sees it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from selffl.algorithms.layers import ClassBias, Head, Layer


@dataclass(frozen=True)
class Population:
    """What is known of a federation and its model before training.

    Attributes:
        num_clients: M.
        intra_variance: σₘ² ``[..., M]``, where it is known.
        inter_variance: σ₀² ``[...]``, where it is known.
        cluster: Number of each client's cluster ``[M]``, from 0 up, where the federation names clusters.
        layers: The model's layers, in the order in which their parameters lie; empty where it has none.
        class_bias: What is added to its scores, where the model ends in such numbers.
        group_sizes: Of parameters that may vary alike between clients, in the order in which they lie; empty where all
            are one group.
        kept: Those layers that clients keep, whatever the method shares.
        head: The last layer, where it is linear and trained.
        num_examples: Training rows of each client ``[..., M]``, where they are known beforehand.
    """

    num_clients: int
    intra_variance: Tensor | None = None
    inter_variance: Tensor | None = None
    cluster: Tensor | None = None
    layers: tuple[Layer, ...] = ()
    class_bias: ClassBias | None = None
    group_sizes: tuple[int, ...] = ()
    kept: tuple[Layer, ...] = ()
    head: Head | None = None
    num_examples: Tensor | None = None
