"""Rows that are made, or read from a file, when a client is asked for: never all of them at once.

A federation of them trains as any other: who trains, and on which minibatches, depends on clients and seeds alone.
What needs all rows at once (saving them, counting classes, pooling) is refused in a line.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, Literal, NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from selffl.data.columns import say_where
from selffl.data.named import Features, join, row_shape
from selffl.data.rows import Rows
from selffl.data.split import Split, parts_by_lot
from selffl.errors import ConfigError, DataError
from selffl.randomness import uniform


class RowSource(Protocol):
    """Where the rows of clients come from: the same rows whenever they are asked for."""

    @property
    def num_examples(self) -> Tensor:
        """All rows of each client, ``[M]``."""
        ...

    @property
    def num_classes(self) -> int | None:
        """Number of classes of all labels; none where they are targets."""
        ...

    def read(self, clients: Tensor) -> Rows:
        """All rows of the clients at these positions, in their order."""
        ...


class MadeRows:
    """Rows that a function makes of a client's number."""

    def __init__(
        self, make: Callable[[int], tuple[Any, Any]], num_clients: int, num_examples: Any, num_classes: int | None
    ) -> None:
        if not callable(make):
            raise ConfigError(f"make is {make!r}; expected a function of a client's number that gives (x, y).")
        if not isinstance(num_clients, int) or isinstance(num_clients, bool) or num_clients < 1:
            raise ConfigError(f"num_clients is {num_clients!r}; expected a whole number, 1 or more.")
        sizes = torch.as_tensor(num_examples)
        if sizes.shape not in ((), (num_clients,)) or sizes.is_floating_point() or bool((sizes < 1).any()):
            raise DataError(
                f"num_examples has shape {tuple(sizes.shape)} and type {sizes.dtype}; expected a number of rows, 1 or "
                f"more, for all of {num_clients} clients, or one for each."
            )
        self._make, self.num_classes = make, num_classes
        self.num_examples = sizes.to(torch.int64).expand(num_clients)

    def read(self, clients: Tensor) -> Rows:
        """Made anew, one client after the other, and checked."""
        found = [self._rows_of(int(client)) for client in clients]
        sizes = self.num_examples[clients]
        offset = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        return Rows(join([rows.features for rows in found]), torch.cat([rows.labels for rows in found]), offset)

    def _rows_of(self, client: int) -> Rows:
        try:
            x, y = self._make(client)
        except (TypeError, ValueError) as error:
            raise DataError(f"make({client}) gives no (x, y) ({error}); expected features and labels.") from error
        with say_where(f"make({client})"):
            rows = Rows.single_client(x, y)
        expected = int(self.num_examples[client])
        if len(rows.labels) != expected:
            raise DataError(f"make({client}) gives {len(rows.labels)} rows; expected {expected}, as num_examples says.")
        check_labels(rows.labels, self.num_classes, f"client {client}")
        return rows


def check_labels(labels: Tensor, num_classes: int | None, whose: str) -> None:
    """Refuse labels that are not what a federation on demand was said to have."""
    if labels.is_floating_point() != (num_classes is None):
        kind = "targets" if labels.is_floating_point() else "classes"
        raise DataError(
            f"labels of {whose} are {labels.dtype}, {kind}, and num_classes is {num_classes}; expected the number of "
            "classes for classes, and none for targets."
        )
    if num_classes is not None and len(labels) and int(labels.max()) >= num_classes:
        raise DataError(f"{whose} has the label {int(labels.max())}; expected 0 to {num_classes - 1}, by num_classes.")


class RowsOnDemand(Rows):
    """One part of the rows of a source; a cohort's are there when it is asked for."""

    is_on_demand: ClassVar[bool] = True

    def __init__(
        self,
        source: RowSource,
        split: Split,
        part: Literal["train", "test"],
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        self._source, self._split, self._part, self._device, self._dtype = source, split, part, device, dtype
        sizes = source.num_examples
        tested = (split.test_fraction * sizes.double()).round().long().clamp(max=sizes - 1)
        own = tested if part == "test" else sizes - tested
        offset = torch.cat([own.new_zeros(1), own.cumsum(0)]).to(device)
        object.__setattr__(self, "offset", offset)  # the record is frozen

    def __repr__(self) -> str:
        """What they are, in a line."""
        return f"RowsOnDemand({self.num_rows} {self._part} rows of {len(self.offset) - 1} clients)"

    def _refuse(self) -> NoReturn:
        raise DataError(
            f"{self.num_rows} {self._part} rows are made or read when a client is asked for, and never all there; "
            "expected a federation with its rows in memory. Leave out what needs all of them, or take fewer clients by "
            "Federation.subset."
        )

    @property
    def features(self) -> Features:
        """Refused: they are never all there."""
        self._refuse()

    @property
    def labels(self) -> Tensor:
        """Refuse to give labels of all rows: they are made when a cohort's are asked for."""
        self._refuse()

    @cached_property
    def sample(self) -> Rows:
        """Rows of the first client that has any: what all rows look like."""
        found = self.num_examples.nonzero()
        return self.subset(found[0] if len(found) else torch.arange(0, 1))

    @property
    def num_classes(self) -> int | None:
        """Number of classes, as the source says."""
        return self._source.num_classes

    def cohort(self, clients: Tensor) -> tuple[Rows, Tensor]:
        """The rows of these clients alone, who are number 0, 1, … among them."""
        return self.subset(clients), torch.arange(len(clients), device=clients.device)

    def subset(self, clients: Tensor) -> Rows:
        """The rows of the clients at these positions, in their order."""
        places = clients.cpu()
        rows = self._source.read(places)
        known = self.__dict__.get("sample")
        if known is not None and row_shape(rows.features) != row_shape(known.features):
            raise DataError(
                f"a row of these clients has shape {row_shape(rows.features)}; expected {row_shape(known.features)}, "
                "as of the first client."
            )
        owner = rows.owner.numpy()
        if self._split.test_fraction:
            row = torch.arange(len(owner)) - rows.offset[rows.owner]
            lots = uniform(self._split.seed, "split", places[rows.owner], row).numpy()
            is_tested = parts_by_lot(lots, owner.astype(np.int64), (self._split.test_fraction,)) == 0
            rows = rows.where(torch.from_numpy(is_tested if self._part == "test" else ~is_tested))
        elif self._part == "test":
            rows = rows.where(torch.zeros(len(owner), dtype=torch.bool))
        return rows.to(self._device, self._dtype)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Rows:
        """These rows, moved whenever they are made."""
        return RowsOnDemand(self._source, self._split, self._part, device, dtype or self._dtype)


def split_on_demand(source: RowSource, split: Split) -> tuple[Rows, Rows]:
    """Training and test rows of a source; which of a client's rows are for testing depends on it and the seed alone."""
    return RowsOnDemand(source, split, "train"), RowsOnDemand(source, split, "test")
