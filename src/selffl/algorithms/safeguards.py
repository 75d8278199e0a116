"""What a method says of its uploads so that others can check them, defend against them and hide them in noise.

A server that trusts nobody asks for `Safeguards.bounds`, a defence for what each client would move the model by, a run
with noise for what one client's part of a sum may measure.  The method's own steps need none of this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Generic, NamedTuple, TypeVar

from torch import Tensor

Server = TypeVar("Server")
Upload = TypeVar("Upload")


class Bound(NamedTuple):
    """Least and most that each client of a cohort may send, of a field of its upload or of a number made of fields."""

    least: float | Tensor
    most: float | Tensor
    value: Tensor | None = None  # what is bounded [..., C, ...]; none: the field itself


class Limit(NamedTuple):
    """The most that one client's part of a sum may measure, all its numbers together, before its weight multiplies it.

    A field without negative numbers (``is_signed`` false) tells less of a client than one with them.
    """

    most: float
    weight: str | None = None  # the field that it has been multiplied by; none: it has not
    is_signed: bool = True

    def difference(self, numbers: int) -> float:
        """How far two clients' parts, of so many numbers, can be apart, over what each may measure."""
        return 2.0 if self.is_signed else math.sqrt(min(numbers, 2))


class Safeguards(Generic[Server, Upload]):
    """What one client may send, how far it may move the model, and how noise can hide it.

    What stands here suits a method that sends a weighted change of the model and its weight, and nothing else.
    """

    # Small fields of an upload of which no client's counts for more than so many times the cohort's upper quartile.
    capped: ClassVar[Mapping[str, float]] = {}
    # Fields of an upload that move a model or the like, and the field that each of them has been multiplied by.
    averaged: ClassVar[Mapping[str, str | None]] = {"change": "weight"}
    # Why noise on gradients does not hide rows in all that a client sends; None: it is made of nothing else of rows.
    no_row_privacy: ClassVar[str | None] = "it does not say, by no_row_privacy = None, that it sends nothing else"
    no_defence: ClassVar[Mapping[str, str]] = {}  # why a defence makes no sense of its uploads, by the defence's name

    def sent_gradients(self, steps_per_epoch: Tensor) -> int | Tensor:
        """The most gradients in a visit that what is sent is made of, for clients of so many minibatches ``[...]``.

        For methods whose rows noise can hide (``no_row_privacy``): each is of a minibatch of its own.
        """
        raise NotImplementedError(f"{type(self).__name__} says no_row_privacy = None, and not its sent_gradients")

    def bounds(self, server: Server, clients: Tensor, upload: Upload, rows: Tensor) -> Mapping[str, Bound]:
        """What each of the cohort's ``clients [..., C]``, who have so many ``rows [..., C]`` at most, may send.

        By field, or by the name of what is made of fields.  Fields that are not here and no models are from 0 up.
        """
        return {}

    def moves(self, server: Server, upload: Upload) -> dict[str, Tensor]:
        """What each client would have the server's models move by ``[..., C, D]``, unweighted, by field."""
        found = {}
        for name, weight in self.averaged.items():
            vectors, weights = getattr(upload, name), None if weight is None else getattr(upload, weight)
            found[name] = vectors if weights is None else vectors / weights.unsqueeze(-1)
        return found

    def replace_moves(self, server: Server, upload: Upload, moves: Mapping[str, Tensor]) -> Upload:
        """The upload of clients that move the models by ``moves`` instead."""
        found = {}
        for name, vectors in moves.items():
            weight = self.averaged[name]
            found[name] = vectors if weight is None else vectors * getattr(upload, weight).unsqueeze(-1)
        return replace(upload, **found)  # type: ignore[type-var]

    def has_equal_weights(self) -> bool:
        """Whether every client weighs 1, whatever its rows: then its weight tells nothing of it."""
        return False

    def withheld(self, server: Server) -> Tensor | None:
        """Where uploads say nothing of a model ``[..., P]``, true or false; None: they say something of all of it.

        What a client's change has there is zero, and is not sent.
        """
        return None

    def limits(self, clip: float, max_weight: float, upload: Upload) -> Mapping[str, Limit]:
        """What fields of one client's upload may measure, where a client may move a model by ``clip`` at most.

        All fields but weights, which may be ``max_weight``, and what is merely recorded; ``upload`` tells how many
        numbers they have.
        """
        return {name: Limit(clip, weight) for name, weight in self.averaged.items()}

    def in_units_of_limits(self, upload: Upload) -> Upload:
        """The upload in units in which limits can be stated, where sums matter only relative to each other."""
        return upload
