"""Data sets of Hugging Face, and partitions of flwr-datasets, as features, labels and ids.

Neither package is imported: a user who has such a data set has its package.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from selffl.data.arrow import pa, pc
from selffl.data.labels import Label
from selffl.data.named import Features, NamedFeatures, join, row_shape
from selffl.data.readers import table_of_frame
from selffl.data.roles import Roles
from selffl.data.tables import Array, Table, join_tables
from selffl.errors import ConfigError, DataError, check_known

GREY_MODES = ("1", "L", "LA")  # modes of images with one channel
DEEP_MODES = ("I", "F")  # and those with more than 8 bits of it, by how they begin


@dataclass(frozen=True)
class HuggingFaceRows:
    """Rows of all clients."""

    table: Table  # labels, ids where they are a column, and features that are columns of numbers or words
    roles: Roles  # which column is what
    client: Array | None = None  # the client of each row, where every client has a data set of its own
    x: Features | None = None  # features that are images or lists, [rows, ...]; of several columns, by their names
    label: Label | None = None  # the label, where a ClassLabel names its classes


def read_huggingface(
    data: Any, client: str | None, label: str, features: str | Sequence[str] | None, split: str
) -> HuggingFaceRows:
    """Rows of all clients; the arguments are those of `Federation.from_huggingface`."""
    chosen = [features] if isinstance(features, str) else features
    if _is_a(data, "Dataset"):
        if client is None:
            raise ConfigError(
                f"client is None, and data is a single data set with the columns {', '.join(data.column_names)}; "
                "expected the name of the one that says whose row it is."
            )
        return _rows("the data set", data, Roles(label, client, chosen))
    _check_kind(data)
    if client is not None:
        raise ConfigError(
            f"client is {client!r}, but data is no single data set; expected none where every client has one of its "
            "own. Leave client out."
        )
    parts: list[HuggingFaceRows] = []
    ids: list[Hashable] = []
    for name, partition in _partitions(data, split):
        where = f"the data set of client {name!r}"
        if not _is_a(partition, "Dataset"):
            raise DataError(f"{where} is a {type(partition).__name__}; expected a datasets.Dataset.")
        rows = _rows(where, partition, Roles(label, None, chosen))
        if len(rows.table) == 0:
            raise DataError(f"{where} has no rows; expected at least one. Leave it out.")
        _check_like_the_first(where, rows, parts[0] if parts else rows)
        parts.append(rows)
        ids.append(name)
    if not parts:
        raise DataError("data holds no data sets; expected one for each client.")
    owner = np.repeat(np.arange(len(ids)), [len(part.table) for part in parts])
    arrays = [part.x for part in parts if part.x is not None]
    return HuggingFaceRows(
        join_tables("the data sets", [part.table for part in parts]),
        parts[0].roles,
        np.fromiter(ids, dtype=object, count=len(ids))[owner],
        join(arrays) if arrays else None,
        parts[0].label,
    )


def _check_like_the_first(where: str, rows: HuggingFaceRows, first: HuggingFaceRows) -> None:
    def described(part: HuggingFaceRows) -> str:
        shape = "" if part.x is None else f" of shape {row_shape(part.x)}"
        return f"{', '.join(map(str, part.roles.features or ()))}{shape}"

    if described(rows) != described(first):
        raise DataError(f"{where} has the features {described(rows)}; expected {described(first)}, as the first.")
    if rows.label != first.label:
        raise DataError(f"{where} has other names of classes than the first; expected the same in all.")


def _is_a(data: Any, name: str) -> bool:
    return any(kind.__name__ == name and kind.__module__.split(".")[0] == "datasets" for kind in type(data).__mro__)


def _check_kind(data: Any) -> None:
    """Refuse what looks like data sets of clients and is not."""
    if _is_a(data, "DatasetDict"):
        raise ConfigError(
            f"data is a DatasetDict with the splits {', '.join(map(repr, data))}; expected one of them, for splits are "
            "no clients. Pass data['train'], say."
        )
    if _is_a(data, "IterableDataset"):
        raise ConfigError("data is an IterableDataset; expected a Dataset. Load it without streaming=True.")


def _partitions(data: Any, split: str) -> Iterator[tuple[Hashable, Any]]:
    """Ids and data sets of the clients."""
    if hasattr(data, "load_partition") and hasattr(data, "partitioners"):  # a FederatedDataset of flwr-datasets
        check_known("partitioned split", split, data.partitioners)
        yield 0, data.load_partition(0, split)  # some partitioners do not know how many there are before
        for number in range(1, data.partitioners[split].num_partitions):
            yield number, data.load_partition(number, split)
    elif isinstance(data, Mapping):
        yield from data.items()
    elif isinstance(data, Sequence) and not isinstance(data, str | bytes):
        yield from enumerate(data)
    else:
        advice = " Load it with datasets.load_dataset first." if isinstance(data, str | Path) else ""
        raise ConfigError(
            f"data is a {type(data).__name__}; expected a datasets.Dataset, a mapping of ids to them, a sequence of "
            f"them, or a FederatedDataset of flwr-datasets.{advice}"
        )


def _rows(where: str, dataset: Any, roles: Roles) -> HuggingFaceRows:
    every = Table(where, dict.fromkeys(dataset.column_names, pa.array([])))
    features = roles.features_of(every)
    kinds = {name: type(dataset.features[name]).__name__ for name in features}
    is_plain = [kind in ("Value", "ClassLabel") for kind in kinds.values()]
    plain = [*roles.by_name.values(), *(features if all(is_plain) else ())]
    table = table_of_frame(dataset.select_columns(plain).with_format("arrow")[:])
    table = replace(table, place=where)
    label = None
    for name in plain:
        if type(dataset.features[name]).__name__ == "ClassLabel":  # which has -1 for a class that is not known
            names = list(dataset.features[name].names)
            codes = table.columns[name]
            known = pc.if_else(pc.less(codes, 0), pa.scalar(None, codes.type), codes)
            table = replace(table, columns={**table.columns, name: pc.take(pa.array(names, pa.string()), known)})
            label = Label(name, "classes", tuple(names)) if name == roles.label else label
    x: Features | None = None
    if not all(is_plain):
        arrays = {
            name: torch.from_numpy((_images if kind == "Image" else _arrays)(where, dataset, name))
            for name, kind in kinds.items()
        }
        x = NamedFeatures(arrays) if len(arrays) > 1 else arrays[features[0]]
    roles = replace(roles, features=features)
    return HuggingFaceRows(table, roles, None, x, label)


def _images(where: str, dataset: Any, name: str) -> Array:
    """All images, float32 from 0 to 1, ``[rows, channels, height, width]``."""
    pictures: Array | None = None
    for row, item in enumerate(dataset.select_columns([name]).with_format(None)):
        image = item[name]
        if not hasattr(image, "convert"):
            what = "missing" if image is None else f"a {type(image).__name__}"
            raise DataError(
                f"{where}: {name} is {what} in row {row}; expected an image. Drop the row, or decode the column with "
                "cast_column."
            )
        if image.mode.startswith(DEEP_MODES):
            raise DataError(f"{where}: {name} has the mode {image.mode} in row {row}; expected 8 bits a channel.")
        pixels = np.atleast_3d(np.asarray(image.convert("L" if image.mode in GREY_MODES else "RGB"))).transpose(2, 0, 1)
        if pictures is None:
            pictures = np.empty((len(dataset), *pixels.shape), dtype=np.float32)
        if pixels.shape != pictures.shape[1:]:
            raise DataError(
                f"{where}: {name} has the shape {pixels.shape} in row {row}; expected {pictures.shape[1:]}, as row 0. "
                "Resize or convert the images with map()."
            )
        pictures[row] = pixels
    return np.empty((0,), dtype=np.float32) if pictures is None else pictures / np.float32(255)


def _arrays(where: str, dataset: Any, name: str) -> Array:
    """All lists of a column as one array: float32, or int64 where they hold whole numbers."""
    column = dataset.select_columns([name])
    is_missing = np.asarray(column.with_format("arrow")[:][name].is_null())
    if is_missing.any():
        raise DataError(
            f"{where}: column {name!r} is missing in {int(is_missing.sum())} row(s), first in row "
            f"{int(is_missing.argmax())}; expected a list in every row. Drop those rows."
        )
    values = np.asarray(column.with_format("numpy")[:][name])
    if values.dtype.kind not in "biuf":
        raise DataError(
            f"{where}: column {name!r} is of type {dataset.features[name]}; expected numbers, and lists of one length. "
            "Pad or encode them with map(), or choose columns with features=."
        )
    return values.astype(np.float32 if values.dtype.kind == "f" else np.int64)
