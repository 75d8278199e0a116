"""Rows that belong to clients, packed in one tensor, split into what may be trained on and what may not."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selffl.errors import ConfigError, DataError


def check_seed(seed: int) -> None:
    """Refuse a seed that NumPy does not take."""
    if not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"seed is {seed!r}; expected a whole number, 0 or more.")


@dataclass(frozen=True)
class Rows:
    """Rows of all clients behind each other: client m has rows ``offset[m]`` to ``offset[m + 1] - 1``."""

    features: Tensor  # [rows, ...]
    labels: Tensor  # [rows]
    offset: Tensor  # [clients + 1]

    @property
    def num_examples(self) -> Tensor:
        """Rows of each client, ``[clients]``."""
        return self.offset.diff()


@dataclass(frozen=True)
class Federation:
    """Clients with their training rows and, kept apart, their test rows.

    Tasks are made from ``train`` alone; only the evaluator looks at ``test``.

    Attributes:
        clients: Their ids, in the order of the rows.
        train: What tasks are made from.
        test: What only the evaluator looks at.
        validation: Rows set aside for choosing a method's options, where there are any; never trained on either.
        cluster: Number of each client's cluster ``[M]``, from 0 up, where clients are grouped.
        source: The call that makes it again, ``{"name": ..., **options}`` for `selffl.data.load`; none for a user's own
            rows.
    """

    clients: Sequence[Hashable]
    train: Rows
    test: Rows
    validation: Rows | None = None
    cluster: Tensor | None = None
    source: Mapping[str, Any] | None = None

    @property
    def num_clients(self) -> int:
        """M."""
        return len(self.clients)

    @classmethod
    def from_arrays(cls, x: Any, y: Any, client: Any, test_fraction: float = 0.1, seed: int = 0) -> Federation:
        """Group rows by the client column and set aside a share of each client's rows for testing.

        Args:
            x: features, one row each; floating-point features must be finite.
            y: labels or targets, one each.
            client: the client of each row; any column of numbers or strings.
            test_fraction: share of each client's rows, rounded to nearest; every client keeps at least one
                training row, and a client with a single row has no test rows.
            seed: of the choice of test rows.

        Examples:
            >>> import selffl
            >>> x, y = [[0.0], [1.0], [2.0], [3.0]], [0, 1, 0, 1]
            >>> fed = selffl.Federation.from_arrays(x, y, list("abab"), test_fraction=0.5)
            >>> fed.clients, fed.train.num_examples.tolist(), fed.test.num_examples.tolist()
            (['a', 'b'], [1, 1], [1, 1])
        """
        if not 0 <= test_fraction < 1:
            raise ConfigError(f"test_fraction is {test_fraction}; expected a share from 0 up to, not including, 1.")
        check_seed(seed)
        features, labels = _tensor("x", x), _tensor("y", y)
        column = np.asarray(client)
        if column.ndim != 1:
            raise DataError(f"client has shape {column.shape}; expected one id per row.")
        if len({len(features), len(labels), len(column)}) != 1:
            raise DataError(
                f"x has {len(features)} rows, y {len(labels)} and client {len(column)}; expected as many of each."
            )
        if len(column) == 0:
            raise DataError("there are no rows; expected at least one.")
        for name, values in (("x", features), ("y", labels)):
            if values.is_floating_point() and not torch.isfinite(values).all():
                bad = int((~torch.isfinite(values.reshape(len(values), -1)).all(1)).nonzero()[0])
                raise DataError(f"{name} holds NaN or infinity, first in row {bad}; expected finite numbers.")
        if column.dtype.kind in "fO" and any(value is None or value != value for value in column.tolist()):
            raise DataError("the client column holds NaN; expected an id in every row. Name or drop those rows.")
        try:
            ids, owner, count = np.unique(column, return_inverse=True, return_counts=True)
        except TypeError:
            raise DataError("the client column mixes kinds of ids; expected all numbers or all strings.") from None
        rng = np.random.default_rng(seed)
        # A random order within each client; its first rows are held out.
        order = np.lexsort((rng.random(len(owner)), owner))
        start = np.concatenate([[0], np.cumsum(count)])
        num_test = np.minimum(np.rint(test_fraction * count).astype(int), count - 1)
        rank = np.arange(len(owner)) - np.repeat(start[:-1], count)
        held_out = rank < np.repeat(num_test, count)

        def pack(mask: np.ndarray, sizes: np.ndarray) -> Rows:
            chosen = torch.from_numpy(order[mask])
            offset = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
            return Rows(features[chosen], labels[chosen], offset)

        return cls(ids.tolist(), pack(~held_out, count - num_test), pack(held_out, num_test))


def _tensor(name: str, values: Any) -> Tensor:
    """An array of numbers as a tensor of its own."""
    if isinstance(values, Tensor) and values.ndim > 0:
        return values
    try:
        array = np.asarray(values)
    except ValueError:
        raise DataError(f"{name} has rows of different lengths; expected a table of numbers.") from None
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        raise DataError(f"{name} is of type {array.dtype} and shape {array.shape}; expected numbers, one row each.")
    return torch.from_numpy(array if array.flags.writeable else array.copy())
