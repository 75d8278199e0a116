"""Where the parts of a model lie among its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Layer(NamedTuple):
    """The parameters of one layer: ``params[..., start:stop]``."""

    name: str
    start: int
    stop: int


def names_of(layers: Sequence[Layer]) -> list[str]:
    """The names of a model's layers, in their order; one that lies in several places is named once."""
    return list(dict.fromkeys(layer.name for layer in layers))


def mask_layers(params: Tensor, layers: Iterable[Layer]) -> Tensor:
    """Where some layers lie in ``params [..., P]``: true or false, of the same shape."""
    is_chosen = torch.zeros_like(params, dtype=torch.bool)
    for layer in layers:
        is_chosen[..., layer.start : layer.stop] = True
    return is_chosen


class ClassBias(NamedTuple):
    """The numbers that a model adds to the scores of classes: ``params[..., start:stop]``.

    Before them lie the weights of the linear layer that makes these scores: ``params[..., weights_start:start]``.
    """

    start: int
    stop: int
    weights_start: int

    @property
    def num_classes(self) -> int:
        """As many as there are scores; a single score tells two apart."""
        return max(self.stop - self.start, 2)

    @property
    def is_single(self) -> bool:
        """Whether a single score tells two classes apart."""
        return self.stop - self.start == 1

    def to_scores(self, shift: Tensor) -> Tensor:
        """What ``shift [..., K]`` of the log-odds of classes adds to the scores: of two, to the second's one score."""
        return shift[..., 1:] - shift[..., :1] if self.is_single else shift

    def add_shift(self, params: Tensor, shift: Tensor) -> Tensor:
        """``params [..., P]`` with ``shift [..., K]`` on top of the scores; they are not changed themselves."""
        found = params.clone()
        self.write_shift(found, shift)
        return found

    def write_shift(self, params: Tensor, shift: Tensor) -> None:
        """Add ``shift [..., K]`` to the scores of ``params [..., P]`` themselves."""
        params[..., self.start : self.stop] += self.to_scores(shift)

    def scale_scores(self, params: Tensor, factor: Tensor) -> Tensor:
        """``params [..., P]`` whose scores are ``factor [...]`` times as large; they are not changed themselves."""
        shape = np.broadcast_shapes(params.shape[:-1], factor.shape)  # torch's own imports sympy, for a second
        given, factors = params.expand(*shape, -1), factor.expand(shape)
        if shape and given.stride(-2) == 0 and factors.stride(-1) == 0:  # what everybody is sent is made once
            given, factors = given[..., :1, :], factors[..., :1]
        found = given.clone()
        found[..., self.weights_start : self.stop].mul_(factors.unsqueeze(-1))
        return found.expand(*shape, -1)


class Head(NamedTuple):
    """The last layer of a model, where it is linear: scores are W z + c, of features z.

    Its numbers lie behind each other, ``params[..., start:stop]``: first W ``[K, D]``, then c ``[K]`` if it has one.
    """

    start: int
    num_outputs: int  # K
    num_features: int  # D
    has_bias: bool

    @property
    def bias_start(self) -> int:
        """Where c begins; the end of W."""
        return self.start + self.num_outputs * self.num_features

    @property
    def stop(self) -> int:
        """The end of its numbers."""
        return self.bias_start + self.num_outputs * self.has_bias

    @property
    def layer(self) -> Layer:
        """Where it lies, as a layer."""
        return Layer("", self.start, self.stop)

    def weight(self, params: Tensor) -> Tensor:
        """W ``[..., K, D]`` of ``params [..., P]``."""
        weight = params[..., self.start : self.bias_start]
        return weight.reshape(*weight.shape[:-1], self.num_outputs, self.num_features)

    def scores(self, params: Tensor, features: Tensor) -> Tensor:
        """W z + c ``[..., B, K]`` of ``features [..., B, D]``, with the head of ``params [..., P]``."""
        found = features @ self.weight(params).transpose(-1, -2)
        return found + params[..., None, self.bias_start : self.stop] if self.has_bias else found


def sizes_of(group_sizes: Tensor) -> list[int]:
    """How many parameters each group has, of ``group_sizes [..., G]`` that are the same everywhere."""
    sizes: list[int] = group_sizes.reshape(-1, group_sizes.shape[-1])[0].tolist()
    return sizes


def by_group(values: Tensor, sizes: list[int]) -> Tensor:
    """Sums ``[..., G]`` of ``values [..., P]`` over groups of parameters that lie behind each other."""
    return torch.stack([part.sum(-1) for part in values.split(sizes, dim=-1)], dim=-1)  # type: ignore[no-untyped-call]


def by_parameter(values: Tensor, group_sizes: Tensor) -> Tensor:
    """``values [..., G]`` of the groups, for each of their parameters ``[..., P]``."""
    return values.repeat_interleave(group_sizes.reshape(-1, group_sizes.shape[-1])[0], dim=-1)
