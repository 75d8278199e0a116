"""Frozen layers with a low-rank change: W + (alpha/r) B A, of which a client trains B.

A frozen weight exists once, however many clients there are.  Under vmap the product with it is one product over the
rows of all clients, and only that with B is a batched one.  A is the same for all clients, drawn from a seed, and
frozen unless asked for: then the model is linear in B, and the mean of the clients' B is the mean of their changes.

`lora_A` and `lora_B` are layers of their own, as in peft, so that methods can tell them apart by their names.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from copy import copy
from typing import Any, cast

import torch
from torch import Tensor, nn

from selffl.randomness import normal

DOWN, UP = "lora_A", "lora_B"  # A and B, as peft calls them


class Matrix(nn.Module):
    """A weight and nothing else: A or B."""

    def __init__(self, weight: Tensor, is_trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=is_trained)

    def extra_repr(self) -> str:
        """Its shape."""
        return " x ".join(map(str, self.weight.shape))


class Adapted(nn.Module):
    """A frozen layer and a change of its weight of rank r.

    Args:
        base: the frozen layer.
        rank: r.
        scale: alpha/r, by which the change is multiplied.
        draw: A by its shape; B starts at 0, and so does the change.
        trains_down: whether A is trained, too.
    """

    def __init__(self, base: nn.Module, rank: int, scale: float, draw: Draw, trains_down: bool) -> None:
        super().__init__()
        self.base, self.rank, self.scale = base, rank, scale
        down, up = self.shapes(base, rank)
        like = cast(Tensor, base.weight)
        self.lora_A = Matrix(draw(down).to(like), trains_down)
        self.lora_B = Matrix(like.new_zeros(up), True)

    @staticmethod
    @abstractmethod
    def shapes(base: Any, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of A and B."""

    @abstractmethod
    def change(self) -> Tensor:
        """(alpha/r) B A, in the shape of the layer's weight."""

    @abstractmethod
    def bring_down(self, inputs: Tensor) -> Tensor:
        """A x: the r numbers that B takes."""

    def forward(self, inputs: Tensor) -> Tensor:
        """What the frozen layer makes of inputs, and (alpha/r) B A x."""
        low = self.bring_down(inputs)
        return cast(Tensor, self.base(inputs)) + self.scale * nn.functional.linear(low, self.lora_B.weight)

    @property
    def weight(self) -> Tensor:
        """The layer's weight with its change, for code that takes weights instead of calling layers."""
        return cast(Tensor, self.base.weight) + self.change()

    @property
    def bias(self) -> Tensor | None:
        """The frozen layer's."""
        return cast("Tensor | None", getattr(self.base, "bias", None))

    def merge(self) -> nn.Module:
        """A plain layer that answers the same."""
        plain = copy(self.base)
        plain._parameters = dict(self.base._parameters)
        plain.weight = nn.Parameter(self.weight.detach().clone(), requires_grad=True)
        return plain

    def extra_repr(self) -> str:
        """Rank and scale."""
        return f"rank={self.rank}, scale={self.scale:g}"


class AdaptedLinear(Adapted):
    """A linear layer with a change of low rank."""

    base: nn.Linear

    @staticmethod
    def shapes(base: nn.Linear, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """r x inputs, and outputs x r."""
        return (rank, base.in_features), (base.out_features, rank)

    @property
    def in_features(self) -> int:
        """The frozen layer's."""
        return self.base.in_features

    @property
    def out_features(self) -> int:
        """The frozen layer's."""
        return self.base.out_features

    def change(self) -> Tensor:
        """B A."""
        return self.scale * (self.lora_B.weight @ self.lora_A.weight)

    def bring_down(self, inputs: Tensor) -> Tensor:
        """A x."""
        return nn.functional.linear(inputs, self.lora_A.weight)


class AdaptedConv(Adapted):
    """A convolution with a change of low rank: r channels by the same kernel, which B mixes place by place."""

    base: nn.modules.conv._ConvNd

    @staticmethod
    def shapes(base: nn.modules.conv._ConvNd, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """r channels of the kernel's size, and a 1 x 1 kernel."""
        ones = (1,) * len(base.kernel_size)
        return (rank, base.in_channels, *base.kernel_size), (base.out_channels, rank, *ones)

    def change(self) -> Tensor:
        """B A, kernel by kernel."""
        down, up = self.lora_A.weight, self.lora_B.weight
        return self.scale * (up.flatten(1) @ down.flatten(1)).reshape(-1, *down.shape[1:])

    def bring_down(self, inputs: Tensor) -> Tensor:
        """The r channels."""
        return self.base._conv_forward(inputs, self.lora_A.weight, None)

    def forward(self, inputs: Tensor) -> Tensor:
        """The convolution, and that of its change."""
        low = self.bring_down(inputs)
        places = len(self.base.kernel_size)
        mixed = self.lora_B.weight.flatten(1) @ low.flatten(-places)
        outputs: Tensor = self.base(inputs)
        return outputs + self.scale * mixed.view_as(outputs)


class AdaptedEmbedding(Adapted):
    """A table of embeddings with a change of low rank: r numbers for each entry, which B makes a vector of."""

    base: nn.Embedding

    @staticmethod
    def shapes(base: nn.Embedding, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """r x entries, and numbers of a vector x r."""
        return (rank, base.num_embeddings), (base.embedding_dim, rank)

    def change(self) -> Tensor:
        """(B A)', as tables lie."""
        return self.scale * (self.lora_B.weight @ self.lora_A.weight).T

    def bring_down(self, inputs: Tensor) -> Tensor:
        """The r numbers of entries."""
        return nn.functional.embedding(inputs, self.lora_A.weight.T)


class Draw:
    """Numbers of A for one layer: normal, of variance one over the inputs, keyed by seed and name."""

    def __init__(self, seed: int, name: str) -> None:
        self.seed, self.name = seed, name

    def __call__(self, shape: tuple[int, ...]) -> Tensor:
        """A of that shape."""
        size = torch.Size(shape)
        numbers = normal(self.seed, f"adapter {self.name}", torch.arange(size.numel())).view(size)
        return numbers.div(math.sqrt(size[1:].numel()))


def adapted_kind(part: nn.Module) -> type[Adapted] | None:
    """The class that adapts a layer; none where there is no such layer."""
    if isinstance(part, nn.Linear):
        return AdaptedLinear
    if isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return AdaptedConv
    return AdaptedEmbedding if isinstance(part, nn.Embedding) else None


def problem_with(name: str, part: nn.Module, rank: int) -> str | None:
    """Why a layer can have no change of that rank, in a line; none where it can."""
    kind = adapted_kind(part)
    if kind is None:
        return (
            f"{name} is a {type(part).__name__}, which cannot be adapted; expected a linear layer, a convolution, an "
            "embedding or attention. Choose other targets."
        )
    if isinstance(part, nn.modules.conv._ConvNd) and part.groups > 1:
        return (
            f"{name} is a convolution in {part.groups} groups, whose change of low rank is no such convolution; "
            "expected one group. Choose other targets."
        )
    if isinstance(part, nn.Embedding) and part.max_norm is not None:
        return (
            f"{name} shortens its own entries (max_norm={part.max_norm:g}); expected a table that stays as it is. "
            "Make it without max_norm, or choose other targets."
        )
    (_, *inputs), (outputs, *_) = kind.shapes(part, rank)
    least = min(torch.Size(inputs).numel(), outputs)
    if rank > least:
        return (
            f"rank is {rank}, and {name} has a weight of rank {least} at most; expected a rank up to that. Lower it, "
            "or choose other targets."
        )
    return None
