"""What clients may send: impossible answers are left out by name, and no client's numbers outweigh everybody's.

One place for every engine.  A method says what one client may send (`Algorithm.bounds`), and of which small numbers one
client's may not outweigh everybody's (`Algorithm.capped`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from selffl.algorithms.contract import Algorithm
from selffl.algorithms.records import map_tensors, tensors_of
from selffl.engines.limits import SumLimits

ROUNDED = 1.001  # times its bound that a number may be: soft labels are parts of rows, and sums of them round
MIN_CAPPED = 4  # clients, below which an upper quartile is nobody's but the largest's
QUARTILE = 0.75


@dataclass(frozen=True)
class Claims:
    """What the clients of one round may send.

    Attributes:
        algorithm: The method, which says what may be unknown and what is bounded.
        server: Its state before the round.
        rows: The most rows that each client can have ``[..., M]``.
        axis: That of the clients: how many independent federations' there are before it.
        limits: What uploads have been shortened to; none: they have not.
    """

    algorithm: Algorithm[Any, Any, Any, Any]
    server: Any
    rows: Tensor
    axis: int
    limits: SumLimits | None = None

    @property
    def longest(self) -> float:
        """The most that a model may measure: squares of it are summed over clients, and have to stay finite."""
        params = self.server.params
        largest = torch.finfo(torch.promote_types(params.dtype, torch.float32)).max
        return math.sqrt(largest / max(self.rows.shape[-1], 1)) / 100.0

    def are_possible(self, clients: Tensor, upload: Any) -> Tensor:
        """Whether each client of a part of the cohort, ``clients [..., C]``, can have sent what it has."""
        possible = torch.ones_like(clients, dtype=torch.bool)
        for is_possible, _ in self._checks(clients, upload):
            possible &= is_possible
        return possible

    def fault(self, client: Tensor, upload: Any) -> str:
        """What is wrong with the upload of one ``client [1]``, in a line; for those that are not possible."""
        return next(reason() for is_possible, reason in self._checks(client, upload) if not bool(is_possible.all()))

    def _checks(self, clients: Tensor, upload: Any) -> Iterator[tuple[Tensor, Callable[[], str]]]:
        """Of each thing that is looked at, the verdict by client, and what to say of it where there is one client."""
        rows = self.rows.to(clients.device).expand(*clients.shape[: self.axis], -1).gather(-1, clients)
        if self.limits is None:
            bounds = self.algorithm.bounds(self.server, clients, upload, rows.to(torch.float64))
        else:  # what was shortened does not fit together as it did; that it is short is what counts
            bounds = self.limits.bounds(upload)
        signed = {name for name, bound in bounds.items() if (torch.as_tensor(bound.least) < 0).any()}
        sent = tensors_of(upload)
        for name, tensor in sent.items():
            flat = self._by_client(tensor)
            is_long = tensor.ndim == self.axis + 2 and tensor.shape[-1] == self.server.params.shape[-1]
            is_model = is_long and name not in self.algorithm.capped
            most = self.longest if is_model else self.longest**2
            if name.rpartition(".")[2] in self.algorithm.may_be_unknown:
                flat = flat.nan_to_num(nan=0.0, posinf=0.0, neginf=-1.0)  # what else it may be, its bounds say
            length = torch.linalg.vector_norm(flat.to(_floating(flat)), dim=-1, dtype=torch.float64)
            yield length <= most, partial(_too_long, name, length, most)
            if flat.shape[-1] and not is_model and name not in signed:  # variances, counts, weights
                least = flat.amin(-1)
                yield least >= 0, partial(_negative, name, least)
        for name, bound in bounds.items():
            value = self._by_client(sent[name] if bound.value is None else bound.value)
            if not value.shape[-1]:
                continue
            low, high = (self._end(end, sent[name] if bound.value is None else bound.value) for end in bound[:2])
            is_within = value >= torch.where(low >= 0, low / ROUNDED, low * ROUNDED)
            is_within &= value <= torch.where(high >= 0, high * ROUNDED, high / ROUNDED)
            yield (is_within | value.isnan()).all(-1), partial(_outside, name, value, low, high)

    def _end(self, end: float | Tensor, value: Tensor) -> Tensor:
        """An end of a bound for each of the numbers that are bounded, ``[..., C, n]``."""
        return self._by_client(torch.as_tensor(end, device=value.device, dtype=torch.float64).expand(value.shape))

    def _by_client(self, tensor: Tensor) -> Tensor:
        """All numbers of each client in one row, ``[..., C, n]``."""
        return tensor.unsqueeze(-1) if tensor.ndim == self.axis + 1 else tensor.flatten(self.axis + 1)


def _floating(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.dtype.is_floating_point else torch.float64


def _too_long(name: str, length: Tensor, most: float) -> str:
    if not bool(length.isfinite().all()):
        return f"{name} holds NaN or infinity; expected finite numbers."
    return f"{name} measures {float(length.max()):g}; expected at most {most:g}, for squares to be finite."


def _negative(name: str, least: Tensor) -> str:
    return f"{name} is {float(least.min()):g}; expected 0 or more."


def _outside(name: str, value: Tensor, low: Tensor, high: Tensor) -> str:
    """Of the first number that is outside."""
    is_outside = ((value < low / ROUNDED) | (value > high * ROUNDED)).flatten()
    place = int(is_outside.to(torch.int64).argmax())
    found, least, most = (float(each.flatten()[place]) for each in (value, low, high))
    return f"{name} is {found:g}; expected {least:g}" + ("." if least == most else f" to {most:g}.")


def capped_factors(numbers: Tensor, times: float, axis: int) -> Tensor:
    """By what each client's ``numbers [..., C, ...]`` are multiplied, ``[..., C]``, to be no larger than others' are.

    Larger than ``times`` the upper quartile of those that are not 0 they may not be, by their length.
    """
    flat = numbers.unsqueeze(-1) if numbers.ndim == axis + 1 else numbers.flatten(axis + 1)
    length = torch.linalg.vector_norm(flat, dim=-1, dtype=torch.float64)
    ranked = length.masked_fill(length == 0, torch.nan).sort(-1).values  # NaN last
    count = (length > 0).sum(-1, keepdim=True)
    place = ((QUARTILE * count).ceil().long() - 1).clamp(min=0)
    most = times * ranked.gather(-1, place)
    is_over = (length > most) & (count >= MIN_CAPPED)
    return torch.where(is_over, most / length.clamp(min=torch.finfo(torch.float64).tiny), 1.0)


def choose(record: Any, places: Tensor, axis: int) -> Any:
    """The part of a record that belongs to the clients at these ``places [n]`` of its axis."""
    return map_tensors(lambda tensor: tensor.index_select(axis, places), record)
