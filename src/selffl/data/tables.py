"""Tables with a row each, as features, labels and ids: frames of other libraries, CSV and Parquet files.

Whatever a table is kept in, its columns become NumPy arrays, and these go one way.  Features are float32.  Labels are
classes where they are whole numbers, targets where they are other numbers, and names of classes where they are text.
"""

from __future__ import annotations

import difflib
import re
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from selffl.data.estimates import RowError, as_number, check_commas, csv_lines
from selffl.errors import DataError, in_short

Array = npt.NDArray[Any]
WHOLE = re.compile(r"0|-?[1-9][0-9]*")  # an id that is a number, and not text such as 007


@dataclass(frozen=True)
class Columns:
    """Which column of a table is what.

    Attributes:
        label: Of the labels.
        client: Of the clients' ids; none: all rows are one client's.
        features: Of the features, in this order; none: all others, in the table's.
        cluster: Of the clients' clusters, if they are grouped.
    """

    label: Hashable
    client: Hashable | None = None
    features: Sequence[Hashable] | None = None
    cluster: Hashable | None = None

    @property
    def kept(self) -> dict[str, Hashable]:
        """The columns that are no features, by what they are for."""
        every = {"label": self.label, "client": self.client, "cluster": self.cluster}
        return {role: name for role, name in every.items() if name is not None}

    def features_of(self, place: str, names: Sequence[Hashable]) -> list[Hashable]:
        """The features among the columns ``names``, once all that is asked for is there; ``place`` is the table's."""
        if not names:
            raise DataError(f"{place} is empty; expected a header with the column {self.label!r} and features.")
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            raise DataError(f"{place}: the column {twice!r} appears twice; expected names that differ.")
        if isinstance(self.features, str) or not isinstance(self.features, Iterable | None):
            raise DataError(f"features is {self.features!r}; expected a list of columns, such as [{self.features!r}].")
        if self.label is None:
            raise DataError("label is None; expected the name of the column of labels.")
        for role, name in self.kept.items():
            if name not in names:
                raise _no_column(place, name, names, f"Name the column of {role}s with {role}=.")
        both = next((name for name, count in Counter(self.kept.values()).items() if count > 1), None)
        if both is not None:
            roles = " and ".join(role for role, name in self.kept.items() if name == both)
            raise DataError(f"{both!r} is given as {roles}; expected a column for each.")
        if self.features is None:
            features = [name for name in names if name not in self.kept.values()]
        else:
            features = list(self.features)
        for name in self.features or ():
            if name not in names:
                raise _no_column(place, name, names, "Name the columns of features with features=.")
            if name in self.kept.values():
                raise DataError(f"{name!r} is among the features and the column of a label or an id; expected one.")
            if features.count(name) > 1:
                raise DataError(f"{name!r} is among the features twice; expected names that differ.")
        if not features:
            beside = " and ".join(map(repr, self.kept.values()))
            raise DataError(f"{place} has no column beside {beside}; expected features.")
        return features


def _no_column(place: str, name: Hashable, names: Sequence[Hashable], advice: str) -> DataError:
    near = difflib.get_close_matches(str(name), list(map(str, names)), n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    shown = ", ".join(map(str, names[:6])) + (", …" if len(names) > 6 else "")
    return DataError(f"{place} has no column {name!r} among: {shown}{hint} {advice}")


@dataclass(frozen=True)
class TableRows:
    """The rows of a table."""

    names: tuple[Hashable, ...]  # of the features
    x: Array  # [rows, ...]
    y: Array  # [rows]: numbers, or objects that are text
    client: Array | None = None  # [rows]
    cluster: Array | None = None  # [rows]


def labelled(y: Array) -> tuple[Array, list[str] | None]:
    """Labels as numbers and, where they are names of classes, the names: class k is the k-th in sorted order."""
    if y.dtype.kind == "O":
        names, number = np.unique(y, return_inverse=True)
        return number, names.tolist()
    return (y if y.dtype.kind in "biu" else y.astype(np.float32)), None


# -------------------------------------------------------------------------------------------------------------- frames


def rows_of_frame(frame: Any, columns: Columns) -> TableRows:
    """Of a pandas or polars DataFrame, or a pyarrow Table; none of these is imported, for whoever has one has it."""
    roots = [kind.__module__.partition(".")[0] for kind in type(frame).__mro__]
    library = next((root for root in roots if root in FRAMES), None)
    if library == "polars" and hasattr(frame, "collect"):
        raise DataError("frame is a LazyFrame; expected a DataFrame. Call collect() first.")
    if library is None or not hasattr(frame, "columns"):
        advice = "Read it with pandas or polars first." if isinstance(frame, str | Path) else "Make one of it first."
        raise DataError(
            f"frame is a {type(frame).__name__}; expected a DataFrame of pandas or polars, or a Table of pyarrow. "
            f"{advice}"
        )
    if library == "pyarrow":
        return arrow_table("the frame", frame).rows(columns)
    return Table("the frame", list(frame.columns), lambda name: FRAMES[library](frame[name])).rows(columns)


class Column(NamedTuple):
    """A column as its library has it."""

    is_missing: Array  # [rows]
    kind: str  # what the library calls its type
    values: Callable[[], Array]  # to be asked for where none is missing


def _of_pandas(series: Any) -> Column:
    return Column(series.isna().to_numpy(), str(series.dtype), series.to_numpy)


def _of_polars(series: Any) -> Column:
    is_plain = series.dtype.is_numeric() or str(series.dtype) == "Boolean"
    values = series.to_numpy if is_plain else lambda: objects(series.to_list())
    return Column(series.is_null().to_numpy(), str(series.dtype), values)


def _of_pyarrow(column: Any) -> Column:
    from pyarrow import types

    kind = column.type
    is_plain = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    values = (lambda: np.asarray(column)) if is_plain else (lambda: objects(column.to_pylist()))
    return Column(np.asarray(column.is_null()), str(kind), values)


def arrow_table(place: str, table: Any) -> Table:
    """Of a pyarrow Table."""
    return Table(place, list(table.schema.names), lambda name: _of_pyarrow(table[name]))


FRAMES: dict[str, Callable[[Any], Column]] = {"pandas": _of_pandas, "polars": _of_polars, "pyarrow": _of_pyarrow}


def objects(values: Sequence[Any]) -> Array:
    """An array of Python's own objects ``[rows]``, whatever they are."""
    return np.fromiter(values, dtype=object, count=len(values))


@dataclass(frozen=True)
class Table:
    """Columns by name, wherever they are kept; ``place`` is what messages call the table."""

    place: str
    names: Sequence[Hashable]
    column: Callable[[Hashable], Column]

    def rows(self, columns: Columns) -> TableRows:
        """All of them."""
        features = columns.features_of(self.place, self.names)
        return TableRows(tuple(features), self.numbers(features), **self.labels_and_ids(columns))

    def labels_and_ids(self, columns: Columns) -> dict[str, Array]:
        """What is no feature, as fields of `TableRows`."""
        found = {role: self._values(name, "biufO", "numbers or text") for role, name in columns.kept.items()}
        return {"y": found.pop("label"), **found}

    def numbers(self, features: Sequence[Hashable]) -> Array:
        """The features, float32 ``[rows, features]``."""
        advice = "numbers. Encode it as numbers (0 or 1 for each of its values, say), or leave it out"
        found: Array | None = None
        for position, name in enumerate(features):
            values = self._values(name, "biuf", advice)
            if found is None:
                found = np.empty((len(values), len(features)), dtype=np.float32)
            with np.errstate(over="ignore"):  # beyond float32 is infinity, which is seen where rows are checked
                found[:, position] = values
        assert found is not None  # `Columns.features_of` gives one at least
        return found

    def _values(self, name: Hashable, kinds: str, expected: str) -> Array:
        """A column of one of the ``kinds`` of NumPy, of which O is text, without anything missing."""
        is_missing, kind, values = self.column(name)
        if is_missing.any():
            raise missing_values(self.place, name, is_missing)
        found = _plain(values())
        is_other = found.dtype.kind not in kinds or (found.dtype.kind == "O" and not _is_text(found))
        if is_other and len(found):  # of no values the type says nothing
            raise DataError(f"{self.place}: column {name!r} is of type {kind}; expected {expected}.")
        if found.dtype.kind == "f" and not np.isfinite(found).all():
            row = int(np.flatnonzero(~np.isfinite(found))[0])
            raise DataError(
                f"{self.place}: column {name!r} holds NaN or infinity, first in row {row}; expected finite numbers."
            )
        return found


def missing_values(place: str, name: Hashable, is_missing: Array) -> DataError:
    """The error of a column where some are missing, ``[rows]``."""
    return DataError(
        f"{place}: column {name!r} has {int(is_missing.sum())} missing value(s), first in row "
        f"{int(is_missing.argmax())}; expected one in every row. Fill them in, or drop those rows."
    )


def _plain(values: Array) -> Array:
    """Objects as the numbers that they all are; text as objects; else as it is."""
    if values.dtype.kind in "UT":
        return values.astype(object)
    kinds = {type(value) for value in values.tolist()} if values.dtype.kind == "O" else set()
    for basis, dtype in (((bool, np.bool_), np.bool_), (Integral, np.int64), ((Real, Decimal), np.float64)):
        if kinds and all(issubclass(kind, basis) for kind in kinds):
            with suppress(OverflowError):  # as other numbers, ids beyond int64 might become the same
                return values.astype(dtype)
            return values
    return values


def _is_text(values: Array) -> bool:
    return all(isinstance(value, str) for value in values.tolist())


# --------------------------------------------------------------------------------------------------------------- files


def read_table(path: Path, columns: Columns) -> TableRows:
    """Of a file whose ending says what it is."""
    if path.suffix.lower() not in TABLES:
        raise DataError(f"{path} is none of {', '.join(TABLES)}; expected one of these. Save the table as CSV.")
    if not path.is_file():
        raise DataError(f"{path} is not there or no file; expected a table.")
    return TABLES[path.suffix.lower()](path, columns)


def read_csv(path: Path, columns: Columns) -> TableRows:
    """Of a CSV file with a header; what is wrong is named with its line.

    Ids are whole numbers where all of them are written as such (and fit in 64 bits), else text.
    """
    numbers, line_of = array("d"), array("q")
    kept: dict[Hashable, list[str]] = {name: [] for name in columns.kept.values()}
    with csv_lines(path) as lines:
        names = [name.strip() for name in next((fields for fields in lines if fields), [])]
        check_commas(path, names)
        features = columns.features_of(str(path), names)
        if "" in features:
            raise DataError(
                f"{path}, line 1: column {names.index('') + 1} has no name, as where pandas has written row numbers; "
                "expected a name for each feature. Name it, or leave it out (to_csv(index=False))."
            )
        places = [(name, names.index(name)) for name in map(str, features)]
        texts = [(name, names.index(str(name))) for name in kept]
        for fields in lines:
            if not fields:
                continue  # an empty line is no row
            if len(fields) != len(names):
                raise DataError(
                    f"{path}, line {lines.line_num}: {len(fields)} field(s); expected {len(names)}, as in the header."
                )
            try:
                numbers.extend(as_number(name, fields[place]) for name, place in places)
            except RowError as problem:
                raise DataError(f"{path}, line {lines.line_num}: {problem}.") from None
            for name, place in texts:
                text = fields[place].strip()
                if not text:
                    raise DataError(f"{path}, line {lines.line_num}: {name} is missing; expected one in every row.")
                kept[name].append(text)
            line_of.append(lines.line_num)
    with np.errstate(over="ignore"):
        x = np.frombuffer(numbers, dtype=np.float64).reshape(-1, len(features)).astype(np.float32)
    y = _labels_of_text(path, str(columns.label), kept[columns.label], line_of)
    client, cluster = (None if name is None else _ids_of_text(kept[name]) for name in (columns.client, columns.cluster))
    return TableRows(tuple(features), x, y, client, cluster)


def _labels_of_text(path: Path, name: str, texts: list[str], line_of: Sequence[int]) -> Array:
    is_number = [_is_number(text) for text in texts]
    if texts and not any(is_number):
        return objects(texts)
    if not all(is_number):
        word, number = is_number.index(False), is_number.index(True)
        raise DataError(
            f"{path}, line {line_of[word]}: {name} is {texts[word]!r}, and {texts[number]!r} on line "
            f"{line_of[number]}; expected numbers, or names of classes, throughout."
        )
    values = array("d")
    for line, text in zip(line_of, texts, strict=True):
        try:
            values.append(as_number(name, text))
        except RowError as problem:
            raise DataError(f"{path}, line {line}: {problem}.") from None
    classes = _whole(texts) if all(text.lstrip("+-").isdecimal() for text in texts) else None
    return np.frombuffer(values, dtype=np.float64).astype(np.float32) if classes is None else classes


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text  # which Python would read as 1_000


def _ids_of_text(texts: list[str]) -> Array:
    found = _whole(texts) if all(map(WHOLE.fullmatch, texts)) else None
    return np.asarray(texts) if found is None else found


def _whole(texts: list[str]) -> Array | None:
    """Whole numbers; none where one is beyond int64: NumPy would round it, and two ids become the same."""
    try:
        return np.array([int(text) for text in texts], dtype=np.int64)
    except (OverflowError, ValueError):  # ValueError: thousands of digits, which Python does not read
        return None


def read_parquet(path: Path, columns: Columns) -> TableRows:
    """Of a Parquet file."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(
            f"{path} needs pyarrow, which is not installed; install it, or save the tables as CSV."
        ) from None
    try:
        table = parquet.read_table(path)
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read ({in_short(error)}); expected a Parquet file.") from None
    return arrow_table(str(path), table).rows(columns)


TABLES: dict[str, Callable[[Path, Columns], TableRows]] = {".csv": read_csv, ".parquet": read_parquet}
