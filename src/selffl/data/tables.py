"""Tables as columns of pyarrow: CSV and Parquet files, and frames of pandas, polars and pyarrow.

Every reader ends in a `Table`, and one rule says what its cells mean: which texts stand for a missing value, which are
numbers (with a decimal comma or thousands separators, too), which are dates, and which are words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from selffl.data.estimates import csv_lines
from selffl.errors import DataError, one_line

Array = npt.NDArray[Any]
Kind = Literal["number", "date", "time", "words"]
Decimals = Literal[".", ","]
PLURAL: dict[Kind, str] = {"number": "numbers", "date": "dates", "time": "times of day", "words": "words"}

# What R, pandas, SQL and spreadsheets write for a missing value; case matters ("none" is a word).
MISSING_TEXTS = (
    "", "NA", "N/A", "n/a", "<NA>", "#N/A", "#N/A N/A", "#NA", "NaN", "nan", "-NaN", "-nan", "NULL", "null", "None",
    r"\N", ".", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN", "#DIV/0!", "#VALUE!", "#REF!", "#NAME?", "#NUM!", "#NULL!",
)  # fmt: skip
WHOLE_ID = re.compile(r"0|-?[1-9][0-9]*")  # an id that is a number, and not text such as 007
LARGEST_NUMBER = 1e150  # whose square is still finite
LARGEST_WHOLE = 2.0**53  # up to which floating-point numbers tell all whole numbers apart
NUMBER_SHARE = 0.5  # of a column's cells from which on its words look like mistakes among numbers
NUM_SHOWN_LINES = 8  # in a message
SEPARATORS = ",;\t|"  # between the cells of a CSV file, the likeliest first
MIN_BLOCK_BYTES = 4 << 20  # that the CSV reader takes at once; a row has to fit
NUM_JOINED_BLOCKS = 16  # whose columns are put together while a file is read
MIN_RELEASED_BYTES = 1 << 20  # of a column whose pieces are given back early

# Regular expressions of RE2, for whole cells.
PLAIN_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
POINT_NUMBER = r"^[+-]?(\d{1,3}([,' \x{a0}\x{202f}]\d{3})+|\d+)(\.\d+)?([eE][+-]?\d+)?$"  # 1,234.5
COMMA_NUMBER = r"^[+-]?(\d{1,3}([.' \x{a0}\x{202f}]\d{3})+|\d+)(,\d+)?([eE][+-]?\d+)?$"  # 1.234,5
DATE = r"(\d{4}[./-]\d{1,2}[./-]\d{1,2}|\d{1,2}[./-]\d{1,2}[./-](\d{4}|\d{2}))([ T].*)?"
TIME = r"^([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d+)?)?$"
DATE_TYPES = tuple(pa.timestamp(unit, zone) for unit in ("us", "ns") for zone in (None, "UTC"))


class Interpreted(NamedTuple):
    """A column once it is known what its cells mean."""

    kind: Kind
    values: pa.Array  # numbers as they are, dates as seconds since 1970 (float64), times since midnight; null: missing


@dataclass(frozen=True)
class Table:
    """Columns by name.

    Attributes:
        place: What messages call the table.
        columns: The columns as they were read; text without spaces around it, null where a value is missing.
        path: The CSV file, if it is one: messages then name lines.
        separator: Between the cells of that file.
        rows: Which rows of the source are left, if some were dropped.
        decimals: The decimal sign, if the user or the file says which.
        parts: The tables that it was joined from, whose rows messages name.
    """

    place: str
    columns: Mapping[str, pa.Array]
    path: Path | None = None
    separator: str = ","
    rows: Array | None = None
    decimals: Decimals | None = None
    parts: tuple[Table, ...] = ()
    _known: dict[str, Interpreted] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return 0 if not self.columns else len(next(iter(self.columns.values())))

    def where(self, chosen: Array) -> str:
        """The table's name and its rows where ``chosen [rows]`` is true: lines of a file, or numbers from 0."""
        numbers = np.flatnonzero(chosen)
        numbers = numbers if self.rows is None else self.rows[numbers]
        if not self.parts:
            return f"{self.place}, {self._describe(numbers)}"
        ends = np.cumsum([len(part) for part in self.parts])
        first = int(np.searchsorted(ends, numbers[0], side="right"))
        inside = numbers[numbers < ends[first]] - (ends[first] - len(self.parts[first]))
        others = len(numbers) - len(inside)
        more = f" (and {others:,} row{'' if others == 1 else 's'} of others)" if others else ""
        return f"{self.parts[first].place}, {self.parts[first]._describe(inside)}{more}"

    def _describe(self, numbers: Array) -> str:
        total = len(numbers)
        shown = numbers[:NUM_SHOWN_LINES].tolist()
        if self.path is not None:
            shown = _lines_of_rows(self.path, self.separator, shown)
        word = "row" if self.path is None else "line"
        listed = ", ".join(map(str, shown))
        if total > len(shown):
            return f"{word}s {listed} and {total - len(shown):,} more"
        return f"{word}{'' if total == 1 else 's'} {listed}"

    def select(self, names: Iterable[str]) -> Table:
        """The table with these columns alone."""
        chosen = list(names)
        columns: Mapping[str, pa.Array] = _Columns(chosen, self.columns.__getitem__)
        if isinstance(self.columns, dict):
            columns = {name: self.columns[name] for name in chosen}
        return replace(self, columns=columns)

    def take(self, is_kept: Array) -> Table:
        """The rows where ``is_kept`` is true."""
        kept, numbers = pa.array(is_kept), np.flatnonzero(is_kept)
        columns: Mapping[str, pa.Array] = _Columns(self.columns, lambda name: self.columns[name].filter(kept))
        if isinstance(self.columns, dict):
            columns = {name: column.filter(kept) for name, column in self.columns.items()}
        known = {name: Interpreted(kind, values.filter(kept)) for name, (kind, values) in self._known.items()}
        return replace(self, columns=columns, rows=numbers if self.rows is None else self.rows[numbers], _known=known)

    def release(self, name: str) -> None:
        """Give up the memory of a column, which cannot be used any more."""
        self._known.pop(name, None)
        if isinstance(self.columns, dict):
            is_large = self.columns.pop(name).nbytes > MIN_RELEASED_BYTES
            if is_large:
                pa.default_memory_pool().release_unused()

    def rows_of_source(self, numbers: Any = slice(None)) -> Array:
        """Which rows of the source the rows with these numbers are."""
        rows: Array = (np.arange(len(self)) if self.rows is None else self.rows)[numbers]
        return rows

    def is_missing(self, name: str) -> Array:
        """Where a column has no value, ``[rows]``."""
        return _numpy(self.columns[name].is_null())

    def interpreted(self, name: str) -> Interpreted:
        """What the cells of a column mean."""
        if name not in self._known:
            self._known[name] = self._interpret(name)
        return self._known[name]

    def words(self, name: str) -> pa.Array:
        """A column as text, null where a value is missing."""
        column = self.columns[name]
        if _is_text(column.type):
            return column
        if types.is_null(column.type) or types.is_boolean(column.type) or types.is_integer(column.type):
            return column.cast(pa.string())
        return pa.array([None if value is None else str(value) for value in column.to_pylist()], pa.string())

    def numbers(self, name: str) -> Array:
        """A column of numbers or dates as float64, NaN where a value is missing; words are refused."""
        kind, values = self.interpreted(name)
        if kind == "words":
            raise DataError(
                f"{self.place}: column {name!r} holds words, such as {_example(values)!r}; expected numbers."
            )
        numbers = _numpy(values.cast(pa.float64(), safe=False).fill_null(float("nan"))).astype(np.float64, copy=False)
        is_wrong = np.abs(numbers) > LARGEST_NUMBER
        if is_wrong.any():
            wrong = numbers[is_wrong][0]
            raise DataError(
                f"{self.where(is_wrong)}: {name} is {'infinity' if np.isinf(wrong) else f'{wrong:g}'}; expected finite "
                f"numbers, at most {LARGEST_NUMBER:g} in size."
            )
        return numbers

    def ids(self, name: str) -> Array:
        """A column of ids: whole numbers where all of them are written as such (and fit in 64 bits), else text."""
        column = self.columns[name]
        if types.is_integer(column.type) or types.is_boolean(column.type):
            return _numpy(column)
        if types.is_floating(column.type):
            values = _numpy(column)
            is_whole = bool((np.abs(values) < LARGEST_WHOLE).all() and (values == np.floor(values)).all())
            return values.astype(np.int64) if is_whole else values  # pandas makes 1.0 of 1 beside a missing id
        if not (_is_text(column.type) or types.is_null(column.type)):
            raise DataError(f"{self.place}: column {name!r} is of type {column.type}; expected numbers or text.")
        encoded = column.cast(pa.string()).dictionary_encode()
        texts, codes = encoded.dictionary.to_pylist(), _numpy(encoded.indices)
        if all(map(WHOLE_ID.fullmatch, texts)):
            try:
                return np.array([int(text) for text in texts], dtype=np.int64)[codes]
            except (OverflowError, ValueError):  # rounded, two ids would become the same
                pass
        return np.array(texts, dtype=object)[codes]

    def _interpret(self, name: str) -> Interpreted:
        column = self.columns[name]
        kind = column.type
        if types.is_boolean(kind):
            return Interpreted("number", column.cast(pa.int8()))
        if types.is_integer(kind) or types.is_floating(kind):
            return Interpreted("number", column)
        if types.is_null(kind) or types.is_decimal(kind):
            return Interpreted("number", column.cast(pa.float64()))
        if types.is_temporal(kind) and not types.is_interval(kind):
            return Interpreted(_kind_of_time(kind), _seconds(column))
        if not _is_text(kind):
            raise DataError(
                f"{self.place}: column {name!r} is of type {kind}; expected numbers, dates or words. Leave it out, or "
                "turn it into columns of these."
            )
        return self._interpret_text(name, column)

    def _interpret_text(self, name: str, column: pa.Array) -> Interpreted:
        if column.null_count == len(column):
            return Interpreted("number", column.cast(pa.float64()))
        if self.decimals != "," and _all_match(column, PLAIN_NUMBER):
            return Interpreted("number", _cast_numbers(column))
        if decimals := self._decimals_of(name, column):
            return Interpreted("number", _cast_numbers(_without_separators(column, decimals)))
        is_time = _all_match(column, TIME)
        dates = pc.binary_join_element_wise("1970-01-01", column, "T") if is_time else column
        for type_of_date in DATE_TYPES:
            try:
                return Interpreted("time" if is_time else "date", _seconds(dates.cast(type_of_date)))
            except pa.ArrowInvalid:
                pass
        self._refuse_stray_words(name, column)
        return Interpreted("words", column)

    def _refuse_stray_words(self, name: str, column: pa.Array) -> None:
        """Refuse a column of words most of which are numbers, or dates."""
        is_valid = _numpy(column.is_valid())
        enough = NUMBER_SHARE * is_valid.sum()
        for pattern in (COMMA_NUMBER,) if self.decimals == "," else (PLAIN_NUMBER, POINT_NUMBER, COMMA_NUMBER):
            is_number = _matches(column, pattern)
            if is_number.sum() >= enough:
                is_word = is_valid & ~is_number
                advice = "among numbers; expected numbers, written in one way, or words throughout. Leave such cells "
                advice += "empty if they are missing"
                break
        else:
            if _matches(column, f"^{DATE}$").sum() < enough:
                return
            is_word = is_valid & ~_are_dates(column)
            advice = "no date as ISO 8601 has it; expected dates such as 2020-12-31 or 2020-12-31T23:59:00, all with a "
            advice += "time zone or none. Write them so"
        word = column.filter(pa.array(is_word))[0].as_py()
        raise DataError(f"{self.where(is_word)}: {name} is {word!r}, {advice}, or leave the column out.")

    def _decimals_of(self, name: str, values: pa.Array) -> Decimals | None:
        """The decimal sign of numbers that are written with commas or thousands separators; none: not numbers."""
        fits: dict[Decimals, bool] = {
            ".": _all_match(values, POINT_NUMBER), ",": _all_match(values, COMMA_NUMBER)
        }  # fmt: skip
        if self.decimals is not None:
            if not fits[self.decimals] and any(fits.values()):
                sign = "," if self.decimals == "." else "."
                is_odd = _matches(values, f"[{sign}]")
                raise DataError(
                    f"{self.where(is_odd)}: {name} is {values.filter(pa.array(is_odd))[0].as_py()!r}, and the decimal "
                    f"sign is {self.decimals!r}; expected one decimal sign in a file. Write all numbers in one way."
                )
            return self.decimals if fits[self.decimals] else None
        if all(fits.values()) and pc.any(pc.match_substring(values, ",")).as_py():
            example = values.filter(pc.match_substring(values, ","))[0].as_py()
            raise DataError(
                f"{self.place}: {name} holds {example!r}, which has a decimal comma or a thousands separator; expected "
                'to be told which. Pass decimal="," or decimal=".", or write numbers without separators.'
            )
        return next((sign for sign, is_fitting in fits.items() if is_fitting), None)


def join_tables(where: str, tables: Sequence[Table]) -> Table:
    """The rows of several tables with the same columns behind each other, in the order of the first's columns."""
    first = tables[0]
    for table in tables[1:]:
        for wanted, given, word in ((first, table, "lacks"), (table, first, "has")):
            other = next((name for name in wanted.columns if name not in given.columns), None)
            if other is not None:
                raise DataError(
                    f"{table.place} {word} the column {other!r}, unlike {first.place}; expected the same in all."
                )
    columns, known = {}, {}
    for name in first.columns:
        known[name] = _join_interpreted(name, tables)
        raw = [table.columns[name] for table in tables]
        is_one_type = all(column.type == raw[0].type for column in raw)
        columns[name] = _join(raw) if is_one_type else known[name].values
    return Table(where, columns, parts=tuple(tables), _known=known)


def _join_interpreted(name: str, tables: Sequence[Table]) -> Interpreted:
    """A column of several tables, which has to mean the same in all of them; where it is all missing, it may be any."""
    columns = [table.interpreted(name) for table in tables]
    sure = [index for index, (_, values) in enumerate(columns) if values.null_count < len(values)] or [0]
    kind = columns[sure[0]].kind
    odd = next((index for index in sure if columns[index].kind != kind), None)
    if odd is not None:
        raise DataError(
            f"{tables[odd].place}: column {name!r} holds {PLURAL[columns[odd].kind]}, and {PLURAL[kind]} in "
            f"{tables[sure[0]].place}; expected the same in all."
        )
    empty = columns[sure[0]].values.type
    return Interpreted(kind, _join([v if v.null_count < len(v) else pa.nulls(len(v), empty) for _, v in columns]))


def _join(columns: Sequence[pa.Array]) -> pa.Array:
    joined = pa.concat_tables([pa.table({"": column}) for column in columns], promote_options="permissive")
    return _one_chunk(joined.column(0))


# ------------------------------------------------------------------------------------------------------- what cells are


def _is_text(kind: pa.DataType) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _numpy(column: pa.Array) -> Array:
    array: Array = column.to_numpy(zero_copy_only=False)
    return array


def _one_chunk(column: Any) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _with_nulls(column: Any) -> pa.Array:
    """A column in one piece, null where a value is missing: what stands for it in text, and NaN; no dictionaries."""
    column = _one_chunk(column)
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_floating(column.type):
        column = column.cast(pa.float64()) if types.is_float16(column.type) else column
        is_nan = pc.is_nan(column)
        return pc.if_else(is_nan, pa.scalar(None, column.type), column) if pc.any(is_nan).as_py() else column
    if not _is_text(column.type):
        return column
    plain = pc.utf8_trim_whitespace(column if types.is_string(column.type) else column.cast(pa.string()))
    is_blank = pc.is_in(plain, value_set=pa.array(MISSING_TEXTS))
    return pc.if_else(is_blank, pa.scalar(None, pa.string()), plain) if pc.any(is_blank).as_py() else plain


def _matches(column: pa.Array, pattern: str) -> Array:
    return _numpy(pc.match_substring_regex(column, pattern).fill_null(False))


def _are_dates(column: pa.Array) -> Array:
    """Where text is a date of the first kind that fits any of it."""
    texts = column.to_pylist()
    for kind in DATE_TYPES:
        are_dates = np.array([text is not None and _is_date(text, kind) for text in texts])
        if are_dates.any():
            return are_dates
    return np.zeros(len(texts), dtype=bool)


def _is_date(text: str, kind: pa.DataType) -> bool:
    try:
        pa.scalar(text).cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


def _kind_of_time(kind: pa.DataType) -> Kind:
    """What dates, times and durations count as: a duration is a number of seconds."""
    return "time" if types.is_time(kind) else "number" if types.is_duration(kind) else "date"


def _all_match(values: pa.Array, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(values, pattern)).as_py())


def _cast_numbers(column: pa.Array) -> pa.Array:
    plain = pc.replace_substring_regex(column, r"^\+", "")  # which Arrow does not read
    try:
        return plain.cast(pa.int64())
    except pa.ArrowInvalid:
        return plain.cast(pa.float64())


def _without_separators(column: pa.Array, decimals: Decimals) -> pa.Array:
    """Numbers as Arrow reads them: without thousands separators, with a decimal point."""
    column = pc.replace_substring_regex(column, "[' \\x{a0}\\x{202f}" + ("," if decimals == "." else ".") + "]", "")
    return column if decimals == "." else pc.replace_substring(column, ",", ".")


def _seconds(column: pa.Array) -> pa.Array:
    """Dates, times and durations as seconds, float64: since 1970, since midnight, or as long as they are."""
    kind = column.type
    if types.is_date(kind):
        column = column.cast(pa.timestamp("s"))
    elif types.is_timestamp(kind) and kind.tz is not None:
        column = column.cast(pa.timestamp(kind.unit, "UTC"))
    elif types.is_time32(kind):
        column = column.cast(pa.time64("us"))
    units = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
    return pc.divide(column.cast(pa.int64()).cast(pa.float64(), safe=False), units[column.type.unit])


def _example(values: pa.Array) -> str:
    return str(values.drop_null()[0].as_py())


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
    return Table("the frame", _Columns(column, lambda name: _with_nulls(read(name, frame[column[name]]))))


class _Columns(Mapping[str, Any]):
    """Columns that are converted when they are asked for: a table may hold some that are not used."""

    def __init__(self, names: Iterable[str], read: Callable[[str], pa.Array]) -> None:
        self._names, self._read, self._found = dict.fromkeys(names), read, {}  # type: ignore[var-annotated]

    def __getitem__(self, name: str) -> pa.Array:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._found:
            self._found[name] = self._read(name)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


def _read_pandas(name: str, series: Any) -> pa.Array:
    try:
        values = pa.array(series.array if series.dtype.kind in "mM" else series, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        values = _array_of_objects(name, [None if _is_na(value) else value for value in series.tolist()])
    return values


def _is_na(value: Any) -> bool:
    try:
        return value is None or bool(value != value)
    except TypeError:  # NA of pandas, which is not even other than itself
        return True


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


def _read_pyarrow(name: str, column: Any) -> pa.Array:
    del name
    return column


COLUMN_READERS: dict[str, Callable[[str, Any], pa.Array]] = {
    "pandas": _read_pandas,
    "polars": _read_polars,
    "pyarrow": _read_pyarrow,
}


FRAME_LIBRARIES = tuple(COLUMN_READERS)


def check_names(where: str, names: Sequence[str]) -> None:
    """Refuse a table without columns, or with two of one name."""
    if not names:
        raise DataError(f"{where} is empty; expected a header with the names of columns, then rows.")
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DataError(f"{where}: the column {name!r} appears twice; expected names that differ.")
        seen.add(name)


# --------------------------------------------------------------------------------------------------------------- files


def read_table(path: Path, as_text: Iterable[str] = (), decimals: Decimals | None = None) -> Table:
    """A file whose ending says what it is; the cells of the columns ``as_text`` stay as they are written."""
    if path.suffix.lower() not in READERS:
        raise DataError(f"{path} is none of {', '.join(READERS)}; expected one of these. Save the table as CSV.")
    if not path.is_file():
        raise DataError(f"{path} is not there or no file; expected a table. Check its name.")
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
        columns[name] = _with_nulls(columns[name])
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
    with _csv_text(path) as text:
        first = next((line for line in text if line.strip()), "")
    separator = max(SEPARATORS, key=re.sub('"[^"]*"', "", first).count)
    with csv_lines(path, separator) as lines:
        names = [name.strip() for name in next((cells for cells in lines if cells), [])]
        num_lines = lines.line_num
        second = next((cells for cells in lines if cells), [])
    check_names(str(path), names)
    return separator, names, num_lines, max(len(first), sum(map(len, second)) + len(second))


@contextmanager
def _csv_text(path: Path) -> Iterator[Iterable[str]]:
    with csv_lines(path):  # which says in one line what cannot be read
        pass
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        yield file


def _decimals_of_file(path: Path, separator: str, columns: Mapping[str, pa.Array]) -> Decimals | None:
    """The decimal comma, where a column leaves no doubt about it; refused where others have decimal points."""
    comma = next((name for name, column in columns.items() if _has_decimal_commas(column)), None)
    if comma is None:
        return None
    for name, column in columns.items():
        if types.is_floating(column.type):
            is_odd = _numpy(pc.not_equal(column, pc.floor(column)).fill_null(False))
            if is_odd.any():
                where = Table(str(path), columns, path, separator).where(is_odd)
                raise DataError(
                    f"{where}: {name} has a decimal point, and {comma} decimal commas; expected one decimal sign in a "
                    'file. Write all numbers in one way, or pass decimal="," if points separate thousands.'
                )
    return ","


def _has_decimal_commas(column: pa.Array) -> bool:
    return (
        _is_text(column.type)
        and column.null_count < len(column)
        and _all_match(column, COMMA_NUMBER)
        and not _all_match(column, POINT_NUMBER)
    )


def _lines_of_rows(path: Path, separator: str, rows: Sequence[int]) -> list[int]:
    """The lines of a CSV file on which its rows (numbered from 0, in order) end."""
    wanted, line_numbers, number = set(rows), [], -2  # the header comes first
    with csv_lines(path, separator) as lines:
        for cells in lines:
            number += bool(cells)
            if cells and number in wanted:
                line_numbers.append(lines.line_num)
                if len(line_numbers) == len(wanted):
                    break
    return line_numbers


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
    try:
        table = parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read ({one_line(error)}); expected a Parquet file.") from None
    names = list(table.schema.names)
    check_names(str(path), names)
    return Table(str(path), _Columns(names, lambda name: _with_nulls(table.column(name))), decimals=decimals)


READERS: dict[str, Callable[[Path, frozenset[str], Decimals | None], Table]] = {
    ".csv": read_csv,
    ".parquet": read_parquet,
}
