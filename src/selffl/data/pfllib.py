"""PFLlib's folders of NumPy files, read as they were split.

Zhang et al., PFLlib: Personalized Federated Learning Library (2023).  ``dataset/utils/dataset_utils.py`` of
TsingZ0/PFLlib writes ``train/0.npz``, ``test/0.npz`` and so on, one pair for each client, and ``config.json`` beside.
A file holds the array ``data``, an object that is a pickled dictionary with the arrays x and y.

Reading a pickle can run whatever code it names.  So files are read only once the user says that they are trusted, and
even then by `ArraysOnly`, which calls only what rebuilds arrays.
"""

from __future__ import annotations

import json
import pickle
import struct
import tokenize
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile, ZipFile

import numpy as np

from selffl.data.columns import number_rows
from selffl.data.locate import refuse_unreadable
from selffl.data.parts import LARGEST_WHOLE, Array, ClientRows, SplitRows, join_parts
from selffl.errors import ConfigError, DataError, one_line

PARTS = ("train", "test")
FORM = "expected PFLlib's files, in which data is a dictionary with the arrays x and y"
_reconstruct = np.empty(0).__reduce__()[0]
REBUILDERS: dict[tuple[str, str], Any] = {  # what pickles of arrays name, by module and name
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,  # of NumPy 1
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
}


class ArraysOnly(pickle.Unpickler):
    """Reads pickles of arrays, numbers, text and their containers; refuses whatever else would be called."""

    def find_class(self, module: str, name: str) -> Any:
        """Look up what a pickle names, if it is needed to rebuild arrays; nothing is imported."""
        if (module, name) not in REBUILDERS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which arrays do not need")
        return REBUILDERS[module, name]


def read_pfllib(folder: Path, trusted: bool) -> SplitRows:
    """Rows of all clients; the arguments are those of `Federation.from_pfllib`."""
    if trusted is not True:
        raise ConfigError(
            f"{folder} holds pickles, which can run code when they are read; expected files that you trust. Pass "
            "trusted=True if you have made them, or know who has."
        )
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; expected one with the folders train and test, as PFLlib writes it.")
    num_clients, num_classes = _config(folder / "config.json")
    numbers = _numbers_of_clients(folder, num_clients)
    parts = {part: {number: _read(folder / part / f"{number}.npz") for number in numbers} for part in PARTS}
    for rows in parts["train"].values():
        if not len(rows.y):
            raise DataError(f"{rows.place} has no rows; expected at least one to train on.")
    for rows in (rows for clients in parts.values() for rows in clients.values()):
        if num_classes is not None and len(rows.y) and rows.y.max() >= num_classes:
            raise DataError(
                f"{rows.place}: y is {rows.y.max()} in row {rows.y.argmax()}; expected classes below {num_classes}, "
                "the num_classes of config.json. Generate the files again."
            )
    return join_parts(
        {part: {number: rows for number, rows in clients.items() if len(rows.y)} for part, clients in parts.items()}
    )


def _config(path: Path) -> tuple[int | None, int | None]:
    """Numbers of clients and of classes, as far as the file has them: some data sets have none."""
    if not path.is_file():
        return None, None
    with refuse_unreadable(path, "expected JSON, as PFLlib writes it", OSError, ValueError, RecursionError):
        config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise DataError(f"{path} holds a {type(config).__name__}; expected a dictionary, as PFLlib writes it.")
    for key in ("num_clients", "num_classes"):
        if not isinstance(config.get(key), int | None) or config.get(key) == 0:
            raise DataError(f"{path}: {key} is {config[key]!r}; expected a whole number above 0.")
    return config.get("num_clients"), config.get("num_classes")


def _numbers_of_clients(folder: Path, num_clients: int | None) -> Sequence[int]:
    """The clients' numbers, from 0 up without a gap, once each has both files."""
    numbers: dict[str, set[int]] = {}
    for part in PARTS:
        if not (folder / part).is_dir():
            raise DataError(f"{folder} has no folder {part}; expected train and test, as PFLlib writes them.")
        paths = sorted((folder / part).glob("*.npz"))
        if not paths:
            raise DataError(f"{folder / part} holds no .npz files; expected 0.npz, 1.npz and so on.")
        odd = next((path for path in paths if not path.stem.isdecimal() or str(int(path.stem)) != path.stem), None)
        if odd is not None:
            raise DataError(f"{odd} has no client's number for a name; expected 0.npz, 1.npz and so on.")
        numbers[part] = {int(path.stem) for path in paths}
    every = range(max(numbers["train"] | numbers["test"]) + 1)
    if num_clients is not None and len(every) > num_clients:
        raise DataError(
            f"{folder} has files of client {every[-1]}, and config.json says that there are {num_clients} clients; "
            "expected 0.npz up to that. Files of an earlier split are left there: generate the data set again in an "
            "empty folder."
        )
    for number in every if num_clients is None else range(num_clients):
        missing = next((part for part in PARTS if number not in numbers[part]), None)
        if missing is not None:
            raise DataError(
                f"{folder / missing / f'{number}.npz'} is missing; expected both files of each client, and clients "
                "numbered from 0 without a gap. Generate the data set again."
            )
    return every


def _read(path: Path) -> ClientRows:
    """One client's rows in one part."""
    kinds = (OSError, EOFError, ValueError, BadZipFile, zlib.error, RuntimeError, NotImplementedError)
    with refuse_unreadable(path, FORM, *kinds), ZipFile(path) as archive:
        names = archive.namelist()
        if names != ["data.npy"]:
            raise DataError(f"{path} holds {', '.join(names) or 'nothing'}; {FORM}.")
        with archive.open("data.npy") as file:
            content = _unpickle(path, file)
    if not isinstance(content, np.ndarray) or content.shape != () or not isinstance(content.item(), dict):
        raise DataError(f"{path}: data is no dictionary; {FORM}.")
    record = content.item()
    missing = next((key for key in ("x", "y") if key not in record), None)
    if missing is not None:
        raise DataError(f"{path} has no {missing} among: {', '.join(map(str, record)) or 'none'}; {FORM}.")
    x, y = (_array(path, key, record[key]) for key in ("x", "y"))
    if y.ndim != 1:
        raise DataError(f"{path}: y has shape {y.shape}; expected one class for each row.")
    return ClientRows(str(path), x, _classes(path, y))


def _unpickle(path: Path, file: IO[bytes]) -> Any:
    """The object that a .npy file holds."""
    version = np.lib.format.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"version {version} of .npy")
    try:
        _, _, dtype = np.lib.format.read_array_header_1_0(file)
    except tokenize.TokenError as error:  # the header is an expression of Python's
        raise ValueError(one_line(error)) from None
    if dtype != np.dtype(object):
        raise DataError(f"{path}: data is of type {dtype}; {FORM}. Read plain arrays with Federation.from_folder.")
    kinds = (pickle.UnpicklingError, LookupError, AttributeError, TypeError, OverflowError, struct.error)
    with refuse_unreadable(path, FORM, *kinds):
        return ArraysOnly(file).load()


def _array(path: Path, name: str, values: Any) -> Array:
    if isinstance(values, np.ndarray) and values.dtype.kind == "O" and values.shape[1:] == (2,):
        raise DataError(
            f"{path}: {name} holds lists of words with their lengths, as PFLlib keeps text; expected arrays of "
            "numbers. Make an array of the lists, and pass it to Federation.from_arrays."
        )
    return number_rows(f"{path}: {name}", values)


def _classes(path: Path, y: Array) -> Array:
    """Labels as PFLlib reads them: classes, whatever type of number they are kept in."""
    if y.dtype.kind != "f":
        return y
    is_whole = (np.abs(y) < LARGEST_WHOLE) & (np.trunc(y) == y)
    if not is_whole.all():
        row = int(is_whole.argmin())
        raise DataError(f"{path}: y is {y[row]} in row {row}; expected classes, which are whole numbers.")
    return y.astype(np.int64)
