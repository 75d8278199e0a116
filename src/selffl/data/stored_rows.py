"""Rows of clients in a file of Parquet or Arrow, read by client: the file need not fit into memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selffl.data.columns import check_arrays
from selffl.data.locate import refuse_unreadable
from selffl.data.on_demand import check_labels
from selffl.data.rows import Rows
from selffl.errors import DataError

ARROW = (".arrow", ".feather", ".ipc")
NUM_BLOCKS_KEPT = 4  # groups of a Parquet file's rows that stay decoded: clients beside each other share them


class StoredRows:
    """The rows of a file by client; what is kept in memory is where each client's rows begin, and its id."""

    def __init__(self, path: Path, client: str, label: str, features: Sequence[str] | None) -> None:
        self.path, self._label = path, label
        self._num_blocks, self._block, names = _blocks_of(path)
        for what, name in (("client", client), ("label", label)):
            if name not in names:
                raise DataError(f"{path} has no column {name!r} for {what}; expected one of {', '.join(names)}.")
        self._features = [name for name in names if name not in (client, label)] if features is None else [*features]
        if missing := [name for name in self._features if name not in names]:
            raise DataError(f"{path} has no column {missing[0]!r}; expected some of {', '.join(names)} as features.")
        if not self._features:
            raise DataError(f"{path} has no columns but {client!r} and {label!r}; expected features.")
        self.ids, self.num_examples, self._ends = self._clients(client)
        self._offset = torch.cat([self.num_examples.new_zeros(1), self.num_examples.cumsum(0)])
        self.num_classes = self._classes()

    def _clients(self, client: str) -> tuple[list[Hashable], Tensor, Tensor]:
        """Ids in the order of the file, the rows of each, and where the blocks of rows end."""
        ids: list[Hashable] = []
        sizes: list[int] = []
        ends: list[int] = []
        for number in range(self._num_blocks):
            column = self._block(number, (client,)).column(0).to_numpy(zero_copy_only=False)
            ends.append((ends[-1] if ends else 0) + len(column))
            if not len(column):
                continue
            begins = np.concatenate([[0], np.flatnonzero(column[1:] != column[:-1]) + 1])
            found = column[begins].tolist()
            lengths = np.diff([*begins, len(column)]).tolist()
            if ids and found[0] == ids[-1]:  # it goes on from the block before
                sizes[-1] += lengths.pop(0)
                found.pop(0)
            ids += found
            sizes += lengths
        if not ids:
            raise DataError(f"{self.path} has no rows; expected at least one.")
        if len(set(ids)) != len(ids):
            seen: set[Hashable] = set()
            again = next(each for each in ids if each in seen or seen.add(each))  # type: ignore[func-returns-value]
            raise DataError(
                f"{self.path}: the rows of client {again!r} do not lie together; expected a file sorted by {client!r}."
            )
        if any(each is None or each != each for each in ids):
            raise DataError(f"{self.path}: the column {client!r} holds missing values; expected an id in every row.")
        return ids, torch.tensor(sizes), torch.tensor(ends)

    def _classes(self) -> int | None:
        most = -1
        for number in range(self._num_blocks):
            column = _plain(self._block(number, (self._label,)).column(0), self._label, self.path)
            if column.dtype.kind == "f":
                return None
            most = max(most, int(column.max(initial=-1)))
        return most + 1

    def read(self, clients: Tensor) -> Rows:
        """The rows of these clients, block by block of the file."""
        parts: list[tuple[Any, Any]] = []
        for client in clients.tolist():
            parts += self._parts(int(self._offset[client]), int(self._offset[client + 1]))
        x, y = (np.concatenate(each) for each in zip(*parts, strict=True))
        features, labels = check_arrays(x, y)
        check_labels(labels, self.num_classes, str(self.path))
        sizes = self.num_examples[clients]
        return Rows(features, labels, torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))

    def _parts(self, low: int, high: int) -> Iterator[tuple[Any, Any]]:
        """Features and labels of rows ``low`` to ``high - 1``, from each block that has some of them."""
        number = int(torch.searchsorted(self._ends, low, right=True))
        while low < high:
            begin = int(self._ends[number - 1]) if number else 0
            stop = min(high, int(self._ends[number]))
            table = self._block(number, (*self._features, self._label)).slice(low - begin, stop - low)
            columns = [_plain(table.column(name), name, self.path) for name in self._features]
            is_list = len(columns) == 1 and columns[0].ndim == 2  # of words, say, which stay whole numbers
            x = columns[0] if is_list else np.stack(columns, axis=-1)
            y = _plain(table.column(self._label), self._label, self.path)
            yield (
                x if is_list and x.dtype.kind in "iu" else x.astype(np.float32),
                y.astype(np.float32 if y.dtype.kind == "f" else np.int64),
            )
            low, number = stop, number + 1


def _blocks_of(path: Path) -> tuple[int, Any, list[str]]:
    """How many blocks of rows a file has, a function that gives some columns of one, and the names of all."""
    import pyarrow as pa
    from pyarrow import ipc, parquet

    expected = f"expected a Parquet file, or an Arrow file that ends in {' or '.join(ARROW)}"
    with refuse_unreadable(path, expected, OSError, pa.ArrowInvalid):
        if path.suffix in ARROW:
            reader = ipc.open_file(pa.memory_map(str(path)))
            return (
                reader.num_record_batches,
                lambda number, names: pa.table(reader.get_batch(number).select(list(names))),
                reader.schema.names,
            )
        file = parquet.ParquetFile(path, memory_map=True)
    read = lru_cache(NUM_BLOCKS_KEPT)(lambda number, names: file.read_row_group(number, columns=list(names)))
    return file.num_row_groups, read, file.schema_arrow.names


def _plain(column: Any, name: str, path: Path) -> Any:
    """A column as an array of numbers, ``[rows]``; of lists of equal length ``[rows, ...]``."""
    import pyarrow as pa

    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(whole, pa.ChunkedArray):  # of no chunks
        whole = pa.concat_arrays(whole.chunks) if whole.num_chunks else pa.array([], whole.type)
    if whole.null_count:
        raise DataError(f"{path}: the column {name!r} holds missing values; expected a number in every row.")
    if pa.types.is_fixed_size_list(whole.type):
        return _plain(whole.flatten(), name, path).reshape(len(whole), whole.type.list_size)
    if pa.types.is_list(whole.type) or pa.types.is_large_list(whole.type):
        lengths = np.unique(whole.value_lengths().to_numpy(zero_copy_only=False))
        if len(lengths) > 1:
            raise DataError(f"{path}: lists in {name!r} have {lengths[0]} to {lengths[-1]} numbers; expected as many.")
        return _plain(whole.flatten(), name, path).reshape(len(whole), -1)
    found = whole.to_numpy(zero_copy_only=False)
    if found.dtype.kind == "b":
        return found.astype(np.int64)
    if found.dtype.kind not in "iuf":
        raise DataError(f"{path}: the column {name!r} is of type {whole.type}; expected numbers. Number its values.")
    return found
