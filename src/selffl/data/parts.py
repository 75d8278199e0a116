"""Rows that come client by client, already divided into training and test rows, joined into arrays."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from selffl.data.columns import check_arrays, say_where
from selffl.data.rows import Rows
from selffl.errors import ConfigError, DataError, unknown_name

Array = npt.NDArray[Any]
LabelKind = Literal["classes", "values"]
LARGEST_WHOLE = 2.0**53  # from here on float64 does not hold every whole number


@dataclass(frozen=True)
class ClientRows:
    """One client's rows in one part; ``place`` is what messages call them."""

    place: str
    x: Array  # [rows, ...]
    y: Array  # [rows, ...]: numbers, or objects that are names of classes


@dataclass(frozen=True)
class SplitRows:
    """The rows of all clients in all parts."""

    ids: list[Any]  # of the clients, sorted
    parts: dict[str, Rows]
    classes: list[str] | None = None  # names of the classes, where labels had names
    cluster: list[Hashable] | None = None  # the group of each client, where clients are grouped


def join_parts(
    parts: Mapping[str, Mapping[Any, ClientRows]],
    labels: LabelKind | None = None,
    classes: Sequence[str] | None = None,
) -> SplitRows:
    """Join the clients' rows of each part, in the order of the sorted ids; a client's own rows keep their order.

    Features are float32 where any client's are floating-point numbers; whole numbers stay whole.

    Args:
        parts: the clients' rows by id, for each part by name.  Every client needs rows in the first part.
        labels: whether numbers are classes or values to predict; none: whole numbers are classes, others are values,
            and it is refused to guess where every label is a whole number written with a decimal point.
        classes: names of the classes in the order of their numbers; none: the names that occur, sorted.
    """
    if labels is not None and labels not in get_args(LabelKind):
        raise unknown_name("kind of labels", str(labels), get_args(LabelKind))
    first_part = next(iter(parts))
    ids = sorted(parts[first_part])
    every = [rows for clients in parts.values() for rows in clients.values()]
    _check_same_form(every)
    names: list[str] | None = None
    if every[0].y.dtype.kind == "O":
        if labels == "values":
            raise DataError(f"{every[0].place}: y holds names of classes; expected numbers, for labels is 'values'.")
        names = _class_names(every, classes)
        label_type: Any = np.int64
    else:
        label_type = _label_type(every, labels)
    feature_type = np.result_type(*{rows.x.dtype for rows in every})
    if feature_type.kind == "f":
        feature_type = np.dtype(np.float32)
    joined = {}
    for part, clients in parts.items():
        chosen = [clients[client] for client in ids if client in clients]
        x, y = (np.empty((sum(len(rows.y) for rows in chosen), *shape), dtype) for shape, dtype in (
            (every[0].x.shape[1:], feature_type), (every[0].y.shape[1:], label_type)
        ))  # fmt: skip
        row = 0
        for rows in chosen:
            end = row + len(rows.y)
            x[row:end], y[row:end] = _check_client(rows, names, feature_type, label_type)
            row = end
        ends = np.cumsum([0, *(len(clients[client].y) if client in clients else 0 for client in ids)])
        joined[part] = Rows(*map(torch.from_numpy, (x, y, ends)))
    return SplitRows(ids, joined, names)


def _check_same_form(every: Sequence[ClientRows]) -> None:
    """Refuse rows that differ in shape, or in whether labels have names, from the first client's."""
    first = every[0]
    for rows in every:
        if len(rows.x) != len(rows.y):
            raise DataError(
                f"{rows.place}: x has {len(rows.x)} rows and y {len(rows.y)}; expected as many of each. The file is "
                "damaged: make it again."
            )
        for name, mine, others in (("x", rows.x, first.x), ("y", rows.y, first.y)):
            if mine.shape[1:] != others.shape[1:]:
                raise DataError(
                    f"{rows.place}: rows of {name} have shape {mine.shape[1:]}; expected {others.shape[1:]}, as in "
                    f"{first.place}."
                )
        if (rows.y.dtype.kind == "O") != (first.y.dtype.kind == "O"):
            mine_are, others_are = ("names", "numbers") if rows.y.dtype.kind == "O" else ("numbers", "names")
            raise DataError(
                f"{rows.place}: labels are {mine_are}, and {others_are} in {first.place}; expected the same throughout."
            )


def _class_names(every: Iterable[ClientRows], classes: Sequence[str] | None) -> list[str]:
    """The names of the classes in the order of their numbers, once every label is among them."""
    first_place = {name: rows.place for rows in every for name in rows.y.tolist()}
    if classes is None:
        return sorted(first_place)
    known = list(classes)
    if len(set(known)) < len(known):
        raise ConfigError("classes holds a name twice; expected names that differ.")
    strange = next((name for name in first_place if name not in known), None)
    if strange is not None:
        raise DataError(f"{first_place[strange]}: {unknown_name('class', strange, known)}")
    return known


def _label_type(every: Sequence[ClientRows], labels: LabelKind | None) -> Any:
    """The type of labels that are numbers: int64 for classes, float32 for values."""
    if labels == "values":
        return np.float32
    fractional = next((rows for rows in every if not _is_whole(rows.y)), None)
    if labels == "classes" and fractional is not None:
        row = next(row for row, label in enumerate(fractional.y) if not _is_whole(label))
        raise DataError(
            f"{fractional.place}: y is {fractional.y[row].tolist()} in row {row}; expected classes, which are whole "
            "numbers. Pass labels='values' for numbers to be predicted."
        )
    if fractional is not None:
        return np.float32
    written = next((rows for rows in every if rows.y.dtype.kind == "f"), None)
    if labels is None and written is not None:
        raise DataError(
            f"{written.place}: y holds whole numbers written with a decimal point, and so does every other file; "
            "expected to know what they are. Pass labels='classes', or labels='values' for numbers to be predicted."
        )
    return np.int64


def _is_whole(y: Array) -> bool:
    return y.dtype.kind in "biu" or bool(((np.abs(y) < LARGEST_WHOLE) & (np.trunc(y) == y)).all())


def _check_client(rows: ClientRows, names: list[str] | None, feature_type: Any, label_type: Any) -> tuple[Array, Array]:
    """One client's features and labels, finite and of these types."""
    y = rows.y
    if names is not None:
        number = {name: index for index, name in enumerate(names)}
        y = np.asarray([number[name] for name in y.tolist()], dtype=np.int64)
    with np.errstate(over="ignore"):  # beyond float32 is infinity, which is refused
        x, y = rows.x.astype(feature_type, copy=False), y.astype(label_type)
    with say_where(rows.place):
        check_arrays(x, y)
    return x, y
