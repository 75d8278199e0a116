"""A folder with one file per client, read into arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from selffl.data.columns import check_arrays, say_where
from selffl.data.locate import refuse_unreadable
from selffl.data.readers import READERS, read_table
from selffl.data.roles import Roles
from selffl.data.tables import Decimals, Table, join_tables
from selffl.errors import DataError

Array = npt.NDArray[Any]
ARRAY_ENDING = ".npz"  # the ending of files with arrays; others are tables


def read_folder(
    folder: Path, label: str = "label", decimals: Decimals | None = None
) -> tuple[Table | tuple[Array, Array], list[str]]:
    """The rows of all files of a folder, which must be of one kind: a table, or x and y; and whose each row is."""
    kinds = ", ".join((ARRAY_ENDING, *READERS))
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; expected one with a file ({kinds}) per client.")
    paths = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    if not paths:
        raise DataError(f"{folder} holds no files; expected one ({kinds}) per client.")
    first_of_kind = {path.suffix.lower(): path for path in reversed(paths)}
    odd = next((path for kind, path in sorted(first_of_kind.items()) if kind not in (ARRAY_ENDING, *READERS)), None)
    if odd is not None:
        raise DataError(f"{odd} is none of {kinds}; expected one such file per client. Move it elsewhere.")
    if len(first_of_kind) > 1:
        names = " and ".join(path.name for _, path in sorted(first_of_kind.items()))
        raise DataError(f"{folder} holds {names}; expected files of one kind. Keep one kind.")
    return _read_arrays(paths) if ARRAY_ENDING in first_of_kind else _read_tables(folder, paths, label, decimals)


def _read_tables(folder: Path, paths: Sequence[Path], label: str, decimals: Decimals | None) -> tuple[Table, list[str]]:
    tables = []
    for path in paths:
        table = read_table(path, [label], decimals)
        _check_rows(path, len(table))
        Roles(label).features_of(table)
        tables.append(table)
    ids = [path.stem for path, table in zip(paths, tables, strict=True) for _ in range(len(table))]
    return join_tables(str(folder), tables), ids


def _read_arrays(paths: Sequence[Path]) -> tuple[tuple[Array, Array], list[str]]:
    files: list[tuple[Array, Array]] = []
    for path in paths:
        x, y = _read_npz(path)
        _check_rows(path, len(x))
        for name, mine, others in zip("xy", (x, y), files[0] if files else (x, y), strict=True):
            if mine.shape[1:] != others.shape[1:]:
                raise DataError(
                    f"{path}: rows of {name} have shape {mine.shape[1:]}; expected {others.shape[1:]}, as in "
                    f"{paths[0].name}."
                )
        files.append((x, y))
    ids = [path.stem for path, (x, _) in zip(paths, files, strict=True) for _ in range(len(x))]
    y = np.concatenate([y for _, y in files])  # targets for all where one file has targets
    x = np.concatenate([x for x, _ in files])
    return (x, y if y.dtype.kind in "biu" else y.astype(np.float32)), ids


def _check_rows(path: Path, num_rows: int) -> None:
    if num_rows == 0:
        raise DataError(f"client {path.stem!r} has no rows in {path}; expected at least one. Remove the file.")


def _read_npz(path: Path) -> tuple[Array, Array]:
    # A damaged archive can fail in any way, and so can the header of an array.
    with (
        refuse_unreadable(path, "expected an .npz with arrays x and y", Exception),
        path.open("rb") as opened,
        np.load(opened, allow_pickle=False) as file,
    ):
        missing = [name for name in ("x", "y") if name not in file.files]
        if missing:
            raise DataError(
                f"{path} has no array {' or '.join(missing)} among: {', '.join(file.files) or 'none'}; expected x "
                "(features) and y (labels). Rename them."
            )
        x, y = file["x"], file["y"]
    with say_where(path):  # labels may be below 0 where another file has targets
        check_arrays(x, y.astype(np.float64) if y.dtype.kind == "i" else y)
    return x, y
