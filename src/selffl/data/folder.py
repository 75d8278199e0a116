"""A folder with one file per client, read into arrays."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from selffl.data.estimates import RowError, as_number, csv_lines
from selffl.errors import DataError

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ClientFile:
    """One client's rows; ``names`` are the features' columns, where the file is a table."""

    path: Path
    x: Array
    y: Array
    names: tuple[str, ...] | None = None


def read_folder(folder: Path, label: str = "label") -> tuple[Array, Array, list[str]]:
    """Features, labels and the client id of each row, from all files of a folder; they must be of one kind."""
    kinds = ", ".join(READERS)
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; expected one with a file ({kinds}) per client.")
    paths = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    if not paths:
        raise DataError(f"{folder} holds no files; expected one ({kinds}) per client.")
    found = {path.suffix.lower(): path for path in reversed(paths)}
    odd = next((path for kind, path in sorted(found.items()) if kind not in READERS), None)
    if odd is not None:
        raise DataError(f"{odd} is none of {kinds}; expected one such file per client. Move it elsewhere.")
    if len(found) > 1:
        names = " and ".join(path.name for _, path in sorted(found.items()))
        raise DataError(f"{folder} holds {names}; expected files of one kind. Keep one kind.")
    clients: list[ClientFile] = []
    for path in paths:
        read = READERS[path.suffix.lower()](path, label)
        if not (len(read.x) and len(read.y)):
            raise DataError(f"client {path.stem!r} has no rows in {path}; expected at least one. Remove the file.")
        clients.append(_like_the_first(read, clients[0]) if clients else read)
    ids = [client.path.stem for client in clients for _ in range(len(client.x))]
    return np.concatenate([client.x for client in clients]), _labels([client.y for client in clients]), ids


def _like_the_first(read: ClientFile, first: ClientFile) -> ClientFile:
    """The file with its columns in the first one's order, once it is seen to hold the same things."""
    if read.names is not None and first.names is not None:
        for wanted, given, word in ((first.names, read.names, "lacks"), (read.names, first.names, "has")):
            other = next((name for name in wanted if name not in given), None)
            if other is not None:
                raise DataError(
                    f"{read.path} {word} the column {other!r}, unlike {first.path.name}; expected the same columns in "
                    "every file."
                )
        order = [read.names.index(name) for name in first.names]
        return ClientFile(read.path, read.x[:, order], read.y, first.names)
    for name, mine, others in (("x", read.x, first.x), ("y", read.y, first.y)):
        if mine.shape[1:] != others.shape[1:]:
            raise DataError(
                f"{read.path}: rows of {name} have shape {mine.shape[1:]}; expected {others.shape[1:]}, as in "
                f"{first.path.name}."
            )
    return read


def _labels(parts: Sequence[Array]) -> Array:
    """All labels: classes if they are in every file, else targets."""
    every = np.concatenate(parts)
    return every if every.dtype.kind in "biu" else every.astype(np.float32)


def _read_npz(path: Path, label: str) -> ClientFile:
    del label  # arrays have names of their own
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in ("x", "y") if name not in file.files]
            if missing:
                raise DataError(
                    f"{path} has no array {' or '.join(missing)} among: {', '.join(file.files) or 'none'}; expected x "
                    "(features) and y (labels). Rename them."
                )
            x, y = file["x"], file["y"]
    except (OSError, ValueError, EOFError, AttributeError, TypeError, BadZipFile, zlib.error) as error:
        # AttributeError and TypeError: NumPy found a single array in the file, or something pickled.
        raise DataError(f"{path} cannot be read ({_short(error)}); expected an .npz with arrays x and y.") from None
    for name, values in (("x", x), ("y", y)):
        if values.dtype.kind not in "biuf" or values.ndim == 0:
            raise DataError(
                f"{path}: {name} is of type {values.dtype}, shape {values.shape}; expected numbers, a row each."
            )
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(1))[0])
            raise DataError(f"{path}: {name} holds NaN or infinity, first in row {row}; expected finite numbers.")
    if len(x) != len(y):
        raise DataError(f"{path}: x has {len(x)} rows and y {len(y)}; expected as many of each.")
    return ClientFile(path, x, y)


def _read_csv(path: Path, label: str) -> ClientFile:
    values = array("d")
    classes = True  # until a label is not written as a whole number
    with csv_lines(path) as lines:
        names = [name.strip() for name in next((fields for fields in lines if fields), [])]
        where = _check_names(path, names, label)
        for fields in lines:
            if not fields:
                continue  # an empty line is no row
            if len(fields) != len(names):
                raise DataError(
                    f"{path}, line {lines.line_num}: {len(fields)} field(s); expected {len(names)}, as in the header."
                )
            try:
                values.extend(as_number(name, text) for name, text in zip(names, fields, strict=True))
            except RowError as problem:
                raise DataError(f"{path}, line {lines.line_num}: {problem}.") from None
            classes = classes and fields[where].strip().lstrip("+-").isdecimal()
    table = np.frombuffer(values, dtype=np.float64).reshape(-1, len(names))
    y = table[:, where].astype(np.int64 if classes else np.float32)
    x = np.delete(table, where, axis=1).astype(np.float32)
    return ClientFile(path, x, y, tuple(name for name in names if name != label))


def _read_parquet(path: Path, label: str) -> ClientFile:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(
            f"{path} needs pyarrow, which is not installed; install it, or save the tables as CSV."
        ) from None
    try:
        table = parquet.read_table(path)
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read ({_short(error)}); expected a Parquet file.") from None
    names = list(table.column_names)
    _check_names(path, names, label)
    columns = {}
    for name in names:
        column = table[name]
        if column.null_count:
            raise DataError(
                f"{path}: column {name!r} has {column.null_count} missing value(s); expected a number each."
            )
        values = column.to_numpy()
        if values.dtype.kind not in "biuf":
            raise DataError(f"{path}: column {name!r} is of type {column.type}; expected numbers.")
        if not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values))[0])
            raise DataError(
                f"{path}: column {name!r} holds NaN or infinity, first in row {row}; expected finite numbers."
            )
        columns[name] = values
    y = columns.pop(label)
    return ClientFile(path, np.stack(list(columns.values()), axis=1).astype(np.float32), y, tuple(columns))


def _check_names(path: Path, names: Sequence[str], label: str) -> int:
    """Where the labels are among the columns."""
    if not names:
        raise DataError(f"{path} is empty; expected a header with the column {label!r} and features, then rows.")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path}: the column {twice!r} appears twice; expected names that differ.")
    if label not in names:
        shown = ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
        raise DataError(f"{path} has no column {label!r} among: {shown}. Name the column of labels with label=.")
    if len(names) < 2:
        raise DataError(f"{path} has no column beside {label!r}; expected features.")
    return names.index(label)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120]


READERS: dict[str, Callable[[Path, str], ClientFile]] = {
    ".npz": _read_npz,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
