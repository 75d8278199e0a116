"""What clients may send: impossible answers are left out by name, and no client's numbers outweigh everybody's.

One place for every engine.  A method says what one client may send (`Algorithm.bounds`), and of which small numbers one
client's may not outweigh everybody's (`Algorithm.capped`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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
        """Check one thing after another: the verdict by client, and what to say of it where there is one client."""
        rows = self.rows.to(clients.device).expand(*clients.shape[: self.axis], -1).gather(-1, clients)
        if self.limits is None:
            bounds = self.algorithm.bounds(self.server, clients, upload, rows.to(torch.float64))
        else:  # what was shortened does not fit together as it did; that it is short is what counts
            bounds = self.limits.bounds(upload)
        bounded = {name for name, bound in bounds.items() if bound.value is None}
        sent = tensors_of(upload)
        for name, tensor in sent.items():
            flat = self._by_client(tensor)
            is_long = tensor.ndim == self.axis + 2 and tensor.shape[-1] == self.server.params.shape[-1]
            is_model = is_long and name not in self.algorithm.capped
            most = self.longest if is_model else self.longest**2
            if name.rpartition(".")[2] in self.algorithm.may_be_unknown:
                flat = flat.nan_to_num(nan=0.0, posinf=0.0, neginf=-1.0)  # what else it may be, its bounds say
            # Of a model that is not too long squares fit into a float; of others the length is infinite.
            precise = torch.promote_types(flat.dtype, torch.float32) if is_model else torch.float64
            numbers = flat if flat.is_floating_point() else flat.double()
            length = torch.linalg.vector_norm(numbers, dim=-1, dtype=precise)
            yield length <= most, partial(_too_long, name, flat, most)
            if flat.shape[-1] and not is_model and name not in bounded:  # variances, counts, weights
                least = flat.amin(-1)
                yield least >= 0, partial(_negative, name, least)
        for name, bound in bounds.items():
            value = sent[name] if bound.value is None else bound.value
            numbers = self._by_client(value)
            low, high = (self._end(end, value) for end in bound[:2])
            if numbers.shape[-1]:
                is_outside = (numbers < _widen(low, -1.0)) | (numbers > _widen(high, 1.0))  # NaN is neither
                yield ~is_outside.any(-1), partial(_outside, name, numbers, is_outside, low, high)

    def _end(self, end: float | Tensor, value: Tensor) -> float | Tensor:
        """An end of a bound: one number for all, or one for each of those that are bounded, ``[..., C, n]``."""
        if not isinstance(end, Tensor):
            return float(end)
        return self._by_client(end.to(value.device, torch.float64).expand(value.shape))

    def _by_client(self, tensor: Tensor) -> Tensor:
        """All numbers of each client in one row, ``[..., C, n]``."""
        return tensor.unsqueeze(-1) if tensor.ndim == self.axis + 1 else tensor.flatten(self.axis + 1)


def _too_long(name: str, flat: Tensor, most: float) -> str:
    length = float(torch.linalg.vector_norm(flat.to(torch.float64), dim=-1).max())
    if not math.isfinite(length):
        return f"{name} holds NaN or infinity; expected finite numbers."
    return f"{name} measures {length:g}; expected at most {most:g}, for squares to be finite."


def _negative(name: str, least: Tensor) -> str:
    return f"{name} is {float(least.min()):g}; expected 0 or more."


def _widen(end: float | Tensor, side: float) -> float | Tensor:
    """A little beyond an end of a bound, on the ``side`` -1 or 1."""
    if isinstance(end, Tensor):
        return torch.where(end * side >= 0, end * ROUNDED, end / ROUNDED)
    return end * ROUNDED if end * side >= 0 else end / ROUNDED


def _outside(name: str, value: Tensor, is_outside: Tensor, low: float | Tensor, high: float | Tensor) -> str:
    """Message about the first number that is outside."""
    place = int(is_outside.flatten().to(torch.int64).argmax())
    whole = (torch.as_tensor(each).expand(value.shape) for each in (value, low, high))
    found, least, most = (float(each.flatten()[place]) for each in whole)
    return f"{name} is {found:g}; expected {least:g}" + ("." if least == most else f" to {most:g}.")


def capped_factors(fields: Sequence[Tensor], times: Sequence[float], axis: int) -> Tensor:
    """Factors that make each client's numbers of some ``fields [..., C, ...]`` no larger than others' are.

    Larger than so many ``times`` the upper quartile of those that are not 0 they may not be, by their length.  Factors
    are ``[fields, ..., C]``.
    """
    flat = [each.unsqueeze(-1) if each.ndim == axis + 1 else each.flatten(axis + 1) for each in fields]
    length = torch.stack([torch.linalg.vector_norm(each, dim=-1, dtype=torch.float64) for each in flat])
    ranked = length.masked_fill(length == 0, torch.nan).sort(-1).values  # NaN last
    count = (length > 0).sum(-1, keepdim=True)
    place = ((QUARTILE * count).ceil().long() - 1).clamp(min=0)
    most = ranked.gather(-1, place) * length.new_tensor(times).reshape(-1, *[1] * (length.ndim - 1))
    is_over = (length > most) & (count >= MIN_CAPPED)
    return torch.where(is_over, most / length.clamp(min=torch.finfo(torch.float64).tiny), 1.0)


def choose(record: Any, places: Tensor, axis: int) -> Any:
    """The part of a record that belongs to the clients at these ``places [n]`` of its axis."""
    return map_tensors(lambda tensor: tensor.index_select(axis, places), record)
