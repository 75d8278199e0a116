"""What users hand over, arrays and columns of ids, as tensors: checked and numbered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from selffl.data.named import Features, NamedFeatures, entries_of, is_named
from selffl.errors import DataError

LABEL_ENTRIES = ("label", "labels")  # of items that are dictionaries; the second is Hugging Face's


def column_of(client: Any) -> npt.NDArray[Any]:
    """One id per row."""
    column = np.asarray(client)
    if column.dtype.kind == "U" and isinstance(client, list | tuple):
        column = np.asarray(client, dtype=object)  # NumPy would make text of a number, and of NaN, among text
    if column.ndim != 1:
        raise DataError(f"client has shape {column.shape}; expected one id per row.")
    return column


def number_ids(name: str, column: npt.NDArray[Any]) -> tuple[list[Any], npt.NDArray[np.int64]]:
    """The sorted different values of a column of ids, and the number of each row's."""
    if column.dtype.kind not in "biufUSTO":
        raise DataError(f"the {name} column is of type {column.dtype}; expected numbers or strings.")
    if column.dtype.kind in "fO" and any(map(is_missing, column.tolist())):
        raise DataError(f"the {name} column holds NaN; expected an id in every row. Name or drop those rows.")
    try:
        ids, number = np.unique(column, return_inverse=True)
    except TypeError:
        raise DataError(f"the {name} column mixes kinds of ids; expected all numbers or all strings.") from None
    return ids.tolist(), number


def is_missing(value: Any) -> bool:
    """Whether an object stands for no value: None, NaN, or NA of pandas."""
    try:
        return value is None or bool(value != value)
    except TypeError:  # NA of pandas, which is not even other than itself
        return True


def cluster_of_client(cluster: Any, owner: npt.NDArray[np.int64], ids: list[Any]) -> Tensor:
    """Cluster numbers ``[M]`` from one label per row, which has to be the same for all rows of a client."""
    column = np.asarray(cluster)
    if column.shape != owner.shape:
        raise DataError(f"cluster has shape {column.shape}; expected one label for each of {len(owner)} rows.")
    labels, number = number_ids("cluster", column)
    cluster_of = np.zeros(len(ids), dtype=np.int64)
    cluster_of[owner] = number
    wrong = np.flatnonzero(cluster_of[owner] != number)
    if len(wrong):
        client = owner[wrong[0]]
        both = sorted({labels[k] for k in number[owner == client]})
        raise DataError(
            f"client {ids[client]!r} is in the clusters {', '.join(map(repr, both))}; expected one cluster for all of "
            "a client's rows."
        )
    return torch.from_numpy(cluster_of)


def check_arrays(x: Any, y: Any, client: npt.NDArray[Any] | None = None) -> tuple[Features, Tensor]:
    """Features and labels, as many of each (and of ``client``), all of them finite."""
    if is_named(y):
        raise DataError(
            f"y is a dictionary of {', '.join(map(repr, y.keys()))}; expected one label per row. Choose one entry, or "
            "join them in one array with a column each."
        )
    features, labels = as_features(x), _classes(_tensor("y", y))
    if len({len(features), len(labels), len(labels if client is None else client)}) != 1:
        counts = f"x has {len(features)} rows, y {len(labels)}"
        counts = counts.replace(", y", " and y") if client is None else f"{counts} and client {len(client)}"
        raise DataError(f"{counts}; expected as many of each.")
    named = {f"x[{name!r}]" if name else "x": entry for name, entry in entries_of(features).items()}
    for name, values in (*named.items(), ("y", labels)):
        if values.is_floating_point() and not torch.isfinite(values).all():
            bad = int((~torch.isfinite(values.reshape(len(values), -1)).all(1)).nonzero()[0])
            raise DataError(f"{name} holds NaN or infinity, first in row {bad}; expected finite numbers.")
    return features, labels


def as_features(x: Any) -> Features:
    """A user's features as tensors: one, or of a dictionary one for each name, with as many rows."""
    if not is_named(x):
        return _tensor("x", x)
    if not x.keys():
        raise DataError("x is a dictionary without entries; expected one for each input of the model.")
    entries: dict[str, Tensor] = {}
    for name, values in x.items():
        if not isinstance(name, str) or not name:
            raise DataError(f"x has an entry {name!r}; expected names that forward can take as keywords. Rename it.")
        if is_named(values):
            raise DataError(f"x[{name!r}] is a dictionary in turn; expected an array for each name. Lay it out flat.")
        entries[name] = _tensor(f"x[{name!r}]", values)
    first = next(iter(entries))
    other = next((name for name, entry in entries.items() if len(entry) != len(entries[first])), None)
    if other is not None:
        raise DataError(
            f"x[{first!r}] has {len(entries[first])} rows and x[{other!r}] {len(entries[other])}; expected as many of "
            "each."
        )
    return NamedFeatures(entries)


def _classes(labels: Tensor) -> Tensor:
    """Whole-number labels as int64, once they are seen to be class numbers; targets as they are."""
    if labels.is_floating_point():
        return labels
    labels = labels.to(torch.int64)
    if len(labels) and labels.numel() and labels.min() < 0:
        row = int((labels.reshape(len(labels), -1) < 0).any(1).nonzero()[0])
        raise DataError(
            f"y is {int(labels[row].min())} in row {row}; expected classes from 0 up, or floating-point targets."
        )
    return labels


def rows_of_dataset(dataset: torch.utils.data.Dataset[Any], num_ids: int) -> tuple[Features, Tensor]:
    """All features and all labels of a torch data set."""
    if not hasattr(dataset, "__len__"):
        raise DataError(
            f"{type(dataset).__name__} has no length; expected a data set of numbered items, and a client id for each."
        )
    if len(dataset) != num_ids:
        raise DataError(f"the data set has {len(dataset)} items and client {num_ids}; expected as many of each.")
    if isinstance(dataset, torch.utils.data.TensorDataset) and len(dataset.tensors) == 2:
        x, y = dataset.tensors
        return x, y
    entries: dict[str, Tensor] = {}
    labels: list[Any] = []
    for item in range(num_ids):
        try:
            x, y = _pair(dataset[item])
            row = {name: torch.as_tensor(each) for name, each in (x.items() if is_named(x) else [("", x)])}
            labels.append(y.tolist() if isinstance(y, Tensor) else y)
        except (TypeError, ValueError, RuntimeError):
            raise DataError(
                f"item {item} of {type(dataset).__name__} is no pair of numbers; expected (features, label). Give the "
                "data set a transform that makes tensors."
            ) from None
        if not entries:
            entries = {name: torch.empty((num_ids, *each.shape), dtype=each.dtype) for name, each in row.items()}
        if row.keys() != entries.keys():
            found, first = (", ".join(map(str, names)) or "no name" for names in (row, entries))
            raise DataError(f"item {item} has features of {found}; expected {first}, as item 0.")
        for name, each in row.items():
            what, known = name or "features", entries[name][0]
            if each.shape != known.shape:
                raise DataError(
                    f"item {item} has {what} of shape {tuple(each.shape)}; expected {tuple(known.shape)}, as item 0."
                )
            if each.is_floating_point() and not known.is_floating_point():
                raise DataError(
                    f"item {item} has {what} of type {each.dtype}; expected {known.dtype}, as item 0. Make all of "
                    "them floating-point numbers."
                )
            entries[name][item] = each
    if not entries:
        raise DataError("there are no rows; expected at least one.")
    return entries[""] if "" in entries else as_features(entries), _tensor("y", labels)


def _pair(item: Any) -> tuple[Any, Any]:
    """Features and label of an item: a pair, or a dictionary that has the label among its entries."""
    if not is_named(item):
        x, y = item
        return x, y
    found = [name for name in LABEL_ENTRIES if name in item]
    if len(found) != 1:
        names = ", ".join(map(str, item.keys()))
        raise DataError(
            f"an item of the data set is a dictionary of {names}; expected its label in one of the entries "
            f"{' or '.join(LABEL_ENTRIES)}, or a pair (features, label)."
        )
    return {name: each for name, each in item.items() if name != found[0]}, item[found[0]]


def number_rows(name: str, values: Any) -> npt.NDArray[Any]:
    """Rows of numbers as an array; anything else is refused."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise DataError(f"{name} has rows of different lengths; expected a table of numbers.") from None
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        raise DataError(f"{name} is of type {array.dtype} and shape {array.shape}; expected numbers, one row each.")
    return array


def _tensor(name: str, values: Any) -> Tensor:
    """An array of numbers as a tensor of its own."""
    if isinstance(values, Tensor) and values.ndim > 0:
        return values
    array = number_rows(name, values)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


@contextmanager
def say_where(place: str | Path) -> Iterator[None]:
    """Put a place before what is wrong with the rows in it."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{place}: {error}") from None
