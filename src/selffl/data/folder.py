"""A folder with one file per client, read into arrays."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from selffl.data.tables import TABLES, Columns, labelled, read_table
from selffl.errors import DataError, in_short

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ClientFile:
    """One client's rows; ``names`` are the features' columns, where the file is a table."""

    path: Path
    x: Array
    y: Array
    names: tuple[Hashable, ...] | None = None


def read_folder(folder: Path, label: str = "label") -> tuple[Array, Array, list[str], list[str] | None]:
    """Features, labels, the client id of each row and the names of classes, if they have any.

    From all files of a folder, which must be of one kind.
    """
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
    y, classes = _labels(clients)
    return np.concatenate([client.x for client in clients]), y, ids, classes


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


def _labels(clients: Sequence[ClientFile]) -> tuple[Array, list[str] | None]:
    """All labels: classes if they are in every file, else targets; where they are names of classes, the names."""
    texts, numbers = ([file for file in clients if (file.y.dtype.kind == "O") is is_text] for is_text in (True, False))
    if texts and numbers:
        raise DataError(
            f"the labels of {texts[0].path} are names of classes, those of {numbers[0].path.name} numbers; expected "
            "the same in every file."
        )
    return labelled(np.concatenate([file.y for file in clients]))


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
        raise DataError(f"{path} cannot be read ({in_short(error)}); expected an .npz with arrays x and y.") from None
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


def _read_table(path: Path, label: str) -> ClientFile:
    found = read_table(path, Columns(label))
    return ClientFile(path, found.x, found.y, found.names)


READERS: dict[str, Callable[[Path, str], ClientFile]] = {
    ".npz": _read_npz,
    **dict.fromkeys(TABLES, _read_table),
}
