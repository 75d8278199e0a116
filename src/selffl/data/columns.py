"""What users hand over, arrays and columns of ids, as tensors: checked and numbered."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from selffl.errors import DataError


def column_of(client: Any) -> npt.NDArray[Any]:
    """One id per row."""
    column = np.asarray(client)
    if column.dtype.kind == "U" and isinstance(client, list | tuple):
        column = np.asarray(client, dtype=object)  # NumPy would make text of a number, and of NaN, among text
    if column.ndim != 1:
        raise DataError(f"client has shape {column.shape}; expected one id per row.")
    return column


def numbered(name: str, column: npt.NDArray[Any]) -> tuple[list[Any], npt.NDArray[np.int64]]:
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
    labels, number = numbered("cluster", column)
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


def checked_rows(x: Any, y: Any, client: npt.NDArray[Any] | None = None) -> tuple[Tensor, Tensor]:
    """Features and labels, as many of each (and of ``client``), all of them finite."""
    features, labels = _tensor("x", x), _classes(_tensor("y", y))
    if len({len(features), len(labels), len(labels if client is None else client)}) != 1:
        counts = f"x has {len(features)} rows, y {len(labels)}"
        counts = counts.replace(", y", " and y") if client is None else f"{counts} and client {len(client)}"
        raise DataError(f"{counts}; expected as many of each.")
    for name, values in (("x", features), ("y", labels)):
        if values.is_floating_point() and not torch.isfinite(values).all():
            bad = int((~torch.isfinite(values.reshape(len(values), -1)).all(1)).nonzero()[0])
            raise DataError(f"{name} holds NaN or infinity, first in row {bad}; expected finite numbers.")
    return features, labels


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


def rows_of_dataset(dataset: torch.utils.data.Dataset[Any], num_ids: int) -> tuple[Tensor, Tensor]:
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
    features: Tensor | None = None
    labels: list[Any] = []
    for item in range(num_ids):
        try:
            x, y = dataset[item]
            x = torch.as_tensor(x)
            labels.append(y.tolist() if isinstance(y, Tensor) else y)
        except (TypeError, ValueError, RuntimeError):
            raise DataError(
                f"item {item} of {type(dataset).__name__} is no pair of numbers; expected (features, label). Give the "
                "data set a transform that makes tensors."
            ) from None
        if features is None:
            features = torch.empty((num_ids, *x.shape), dtype=x.dtype)
        if x.shape != features.shape[1:]:
            raise DataError(
                f"item {item} has features of shape {tuple(x.shape)}; expected {tuple(features.shape[1:])}, as item 0."
            )
        features[item] = x
    if features is None:
        raise DataError("there are no rows; expected at least one.")
    return features, _tensor("y", labels)


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
