"""Tables from CSV and Parquet files, and from frames of pandas, polars and pyarrow."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from selffl.data.arrow import pa, pc, types
from selffl.data.columns import is_missing
from selffl.data.estimates import csv_lines
from selffl.data.locate import refuse_unreadable
from selffl.data.tables import (
    COMMA_NUMBER,
    MIN_RELEASED_BYTES,
    MISSING_TEXTS,
    POINT_NUMBER,
    Decimals,
    LazyColumns,
    Table,
    all_match,
    as_numpy,
    check_names,
    is_text,
    with_nulls,
)
from selffl.errors import DataError, one_line

SEPARATORS = ",;\t|"  # between the cells of a CSV file, the likeliest first
MIN_BLOCK_BYTES = 4 << 20  # that the CSV reader takes at once; a row has to fit
NUM_JOINED_BLOCKS = 16  # whose columns are put together while a file is read


# -------------------------------------------------------------------------------------------------------------- frames


def table_of_frame(frame: Any) -> Table:
    """A pandas or polars DataFrame, or a pyarrow Table; neither pandas nor polars is imported."""
    roots = [kind.__module__.partition(".")[0] for kind in type(frame).__mro__]
    library = next((root for root in roots if root in COLUMN_READERS), None)
    if library == "polars" and hasattr(frame, "collect"):
        raise DataError("frame is a LazyFrame; expected a DataFrame. Call collect() first.")
    if library is None or not hasattr(frame, "columns"):
        advice = "Read it with pandas or polars first." if isinstance(frame, str | Path) else "Make one of it first."
        raise DataError(
            f"frame is a {type(frame).__name__}; expected a DataFrame of pandas or polars, or a Table of pyarrow. "
            f"{advice}"
        )
    names = list(frame.schema.names if library == "pyarrow" else frame.columns)
    check_names("the frame", list(map(str, names)))  # names that are no text are taken for their text
    column = dict(zip(map(str, names), names, strict=True))
    read = COLUMN_READERS[library]
    return Table("the frame", LazyColumns(column, lambda name: with_nulls(read(name, frame[column[name]]))))


def _read_pandas(name: str, series: Any) -> pa.Array:
    try:
        values = pa.array(series.array if series.dtype.kind in "mM" else series, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        values = _array_of_objects(name, [None if is_missing(value) else value for value in series.tolist()])
    return values


def _array_of_objects(name: str, values: list[Any]) -> pa.Array:
    """Python's own objects of mixed kinds: numbers of several kinds are numbers, anything else is refused."""
    kinds = {type(value) for value in values if value is not None}
    if kinds and all(issubclass(kind, int | float | Decimal | np.number) and kind is not bool for kind in kinds):
        if all(issubclass(kind, int | np.integer) for kind in kinds):  # beyond int64: rounded, ids would become one
            raise DataError(
                f"the frame: column {name!r} holds whole numbers beyond 64 bits; expected smaller, or text."
            )
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    shown = " and ".join(sorted(kind.__name__ for kind in kinds))
    raise DataError(f"the frame: column {name!r} holds values of type {shown}; expected numbers, dates or text.")


def _read_polars(name: str, series: Any) -> pa.Array:
    if str(series.dtype).startswith("Object"):
        return _array_of_objects(name, series.to_list())
    return series.to_arrow()


COLUMN_READERS: dict[str, Callable[[str, Any], pa.Array]] = {
    "pandas": _read_pandas,
    "polars": _read_polars,
    "pyarrow": lambda _, column: column,
}


FRAME_LIBRARIES = tuple(COLUMN_READERS)


# --------------------------------------------------------------------------------------------------------------- files


def read_table(path: Path, as_text: Iterable[str] = (), decimals: Decimals | None = None) -> Table:
    """A file whose ending says what it is; the cells of the columns ``as_text`` stay as they are written."""
    if path.suffix.lower() not in READERS:
        raise DataError(f"{path} is none of {', '.join(READERS)}; expected one of these. Save the table as CSV.")
    if not path.is_file():
        raise DataError(f"{path} does not exist or is not a file; expected a table. Check its name.")
    return READERS[path.suffix.lower()](path, frozenset(as_text), decimals)


def read_csv(path: Path, as_text: frozenset[str] = frozenset(), decimals: Decimals | None = None) -> Table:
    """A CSV file with a header; commas, semicolons, tabs or bars between cells are told by the header."""
    separator, names, num_lines, longest = _header(path)
    if decimals not in (None, ".", ","):
        raise DataError(f"decimal is {decimals!r}; expected '.' or ','.")
    columns = _read_cells(path, separator, names, num_lines, longest, as_text)
    if decimals == ",":  # a point in a number separates thousands, which Arrow does not know
        again = [name for name, column in columns.items() if types.is_floating(column.type)]
        columns = _read_cells(path, separator, names, num_lines, longest, as_text | set(again)) if again else columns
    for name in names:
        columns[name] = with_nulls(columns[name])
    return Table(str(path), columns, path, separator, None, decimals or _decimals_of_file(path, separator, columns))


def _read_cells(
    path: Path, separator: str, names: Sequence[str], num_lines: int, longest: int, as_text: frozenset[str]
) -> dict[str, pa.Array]:
    """The columns below the header, numbers and dates converted where all cells of a column agree."""
    from pyarrow import csv as arrow_csv

    options = {
        "read_options": arrow_csv.ReadOptions(
            column_names=list(map(str, range(len(names)))),
            skip_rows=num_lines,
            block_size=max(MIN_BLOCK_BYTES, 8 * longest),
        ),
        "parse_options": arrow_csv.ParseOptions(delimiter=separator, newlines_in_values=True),
        "convert_options": arrow_csv.ConvertOptions(
            column_types={str(index): pa.string() for index, name in enumerate(names) if name in as_text},
            null_values=list(MISSING_TEXTS),
            strings_can_be_null=True,
        ),
    }
    pieces: list[list[pa.Array]] = [[] for _ in names]
    try:
        try:
            with arrow_csv.open_csv(path, **options) as reader:  # which holds no text of the file beside its columns
                for number, batch in enumerate(reader, start=1):
                    for piece, column in zip(pieces, batch.columns, strict=True):
                        piece.append(column)
                    del batch, column
                    if number % NUM_JOINED_BLOCKS == 0:  # for the columns of a block take up more than they need
                        for piece in pieces:
                            piece[-NUM_JOINED_BLOCKS:] = [pa.concat_arrays(piece[-NUM_JOINED_BLOCKS:])]
                empty = [pa.array([], kind) for kind in reader.schema.types]
        except pa.ArrowInvalid:  # cells of another kind than those of the first block, perhaps
            pieces = [column.chunks for column in arrow_csv.read_csv(path, **options).columns]
            empty = [pa.array([]) for _ in names]
    except (pa.ArrowException, OSError) as error:
        if _is_at_end(path, num_lines):
            return {name: pa.array([], pa.string()) for name in names}
        raise _reading_error(path, separator, len(names), error) from None
    columns = {}
    for index, name in enumerate(names):
        columns[name] = pa.concat_arrays(pieces[index]) if pieces[index] else empty[index]
        pieces[index] = []  # so that no column is held twice
        if columns[name].nbytes > MIN_RELEASED_BYTES:
            pa.default_memory_pool().release_unused()
        if types.is_binary(columns[name].type):
            raise _reading_error(path, separator, len(names), ValueError(f"{name} holds bytes that are no text"))
    return columns


def _is_at_end(path: Path, num_lines: int) -> bool:
    """Whether nothing follows the first lines of a file."""
    with path.open("rb") as file:
        for _ in range(num_lines):
            file.readline()
        return not file.read().strip()


def _header(path: Path) -> tuple[str, list[str], int, int]:
    """The separator, the columns' names, the lines that these take, and the length of the longest line seen."""
    with csv_lines(path):  # which says in one line what cannot be read
        pass
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as text:
        first = next((line for line in text if line.strip()), "")
    separator = max(SEPARATORS, key=re.sub('"[^"]*"', "", first).count)
    with csv_lines(path, separator) as lines:
        names = [name.strip() for name in next((cells for cells in lines if cells), [])]
        num_lines = lines.line_num
        second = next((cells for cells in lines if cells), [])
    check_names(str(path), names)
    return separator, names, num_lines, max(len(first), sum(map(len, second)) + len(second))


def _decimals_of_file(path: Path, separator: str, columns: Mapping[str, pa.Array]) -> Decimals | None:
    """The decimal comma, where a column leaves no doubt about it; refused where others have decimal points."""
    comma = next((name for name, column in columns.items() if _has_decimal_commas(column)), None)
    if comma is None:
        return None
    for name, column in columns.items():
        if types.is_floating(column.type):
            is_odd = as_numpy(pc.not_equal(column, pc.floor(column)).fill_null(False))
            if is_odd.any():
                where = Table(str(path), columns, path, separator).where(is_odd)
                raise DataError(
                    f"{where}: {name} has a decimal point, and {comma} decimal commas; expected one decimal sign in a "
                    'file. Write all numbers in one way, or pass decimal="," if points separate thousands.'
                )
    return ","


def _has_decimal_commas(column: pa.Array) -> bool:
    return (
        is_text(column.type)
        and column.null_count < len(column)
        and all_match(column, COMMA_NUMBER)
        and not all_match(column, POINT_NUMBER)
    )


def _reading_error(path: Path, separator: str, width: int, error: Exception) -> DataError:
    """What is wrong with a CSV file that Arrow could not read, with its line."""
    with csv_lines(path, separator) as lines:
        for cells in lines:
            if cells and len(cells) != width:
                return DataError(
                    f"{path}, line {lines.line_num}: {len(cells)} field(s); expected {width}, as in the header."
                )
    return DataError(f"{path} cannot be read as CSV ({one_line(error)}); expected comma-separated text.")


def read_parquet(path: Path, as_text: frozenset[str] = frozenset(), decimals: Decimals | None = None) -> Table:
    """A Parquet file."""
    from pyarrow import parquet

    del as_text  # a Parquet file says itself what is text
    with refuse_unreadable(path, "expected a Parquet file", pa.ArrowException, OSError, UnicodeDecodeError):
        _check_footer(path, parquet.read_metadata(path))
        table = parquet.read_table(path)
        names = list(table.schema.names)
    check_names(str(path), names)
    return Table(str(path), LazyColumns(names, lambda name: with_nulls(table.column(name))), decimals=decimals)


def _check_footer(path: Path, footer: Any) -> None:
    """Refuse a file whose parts say other than the whole how many rows it has, or more than memory holds.

    Arrow makes room for as many as the parts say: one kilobyte can ask for terabytes, and the process is killed.
    """
    parts = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if min(parts, default=0) < 0 or sum(parts) != footer.num_rows or sum(parts) > memory:
        raise DataError(
            f"{path} says that it has {footer.num_rows:,} rows, and its parts have {sum(parts):,}; expected as many, "
            "and room for them. It is damaged: write it again."
        )


READERS: dict[str, Callable[[Path, frozenset[str], Decimals | None], Table]] = {
    ".csv": read_csv,
    ".parquet": read_parquet,
}
