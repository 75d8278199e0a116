"""Tables as columns of pyarrow, and what their cells mean.

Every reader ends in a `Table`, and one rule says what its cells mean: which texts stand for a missing value, which are
numbers (with a decimal comma or thousands separators, too), which are dates, and which are words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from selffl.data.arrow import pa, pc, types
from selffl.data.estimates import csv_lines
from selffl.errors import DataError, pluralise

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
MIN_RELEASED_BYTES = 1 << 20  # of a column whose pieces are given back early

# Regular expressions of RE2, for whole cells.
PLAIN_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
POINT_NUMBER = r"^[+-]?(\d{1,3}([,' \x{a0}\x{202f}]\d{3})+|\d+)(\.\d+)?([eE][+-]?\d+)?$"  # 1,234.5
COMMA_NUMBER = r"^[+-]?(\d{1,3}([.' \x{a0}\x{202f}]\d{3})+|\d+)(,\d+)?([eE][+-]?\d+)?$"  # 1.234,5
DATE = r"(\d{4}[./-]\d{1,2}[./-]\d{1,2}|\d{1,2}[./-]\d{1,2}[./-](\d{4}|\d{2}))([ T].*)?"
TIME = r"^([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d+)?)?$"
DATE_UNITS = tuple((unit, zone) for unit in ("us", "ns") for zone in (None, "UTC"))


class Interpreted(NamedTuple):
    """A column once it is known what its cells mean."""

    kind: Kind
    values: pa.Array  # numbers as they are, dates as seconds since 1970 (float64), times since midnight; null: missing


@dataclass(frozen=True)
class Table:
    """Columns by name."""

    place: str  # what messages call the table
    columns: Mapping[str, pa.Array]  # as they were read; text without spaces around it, null where a value is missing
    path: Path | None = None  # the CSV file, if it is one: messages then name lines
    separator: str = ","  # between the cells of that file
    rows: Array | None = None  # which rows of the source are left, if some were dropped
    decimals: Decimals | None = None  # the decimal sign, if the user or the file says which
    parts: tuple[Table, ...] = ()  # the tables that it was joined from, whose rows messages name
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
        more = f" (and {pluralise(others, 'row')} of others)" if others else ""
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
        columns: Mapping[str, pa.Array] = LazyColumns(chosen, self.columns.__getitem__)
        if isinstance(self.columns, dict):
            columns = {name: self.columns[name] for name in chosen}
        return replace(self, columns=columns)

    def take(self, is_kept: Array) -> Table:
        """The rows where ``is_kept`` is true."""
        kept, numbers = pa.array(is_kept), np.flatnonzero(is_kept)
        columns: Mapping[str, pa.Array] = LazyColumns(self.columns, lambda name: self.columns[name].filter(kept))
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
        return as_numpy(self.columns[name].is_null())

    def interpret_column(self, name: str) -> Interpreted:
        """What the cells of a column mean."""
        if name not in self._known:
            self._known[name] = self._interpret(name)
        return self._known[name]

    def words(self, name: str) -> pa.Array:
        """A column as text, null where a value is missing."""
        column = self.columns[name]
        if is_text(column.type):
            return column
        if types.is_null(column.type) or types.is_boolean(column.type) or types.is_integer(column.type):
            return column.cast(pa.string())
        return pa.array([None if value is None else str(value) for value in column.to_pylist()], pa.string())

    def numbers(self, name: str) -> Array:
        """A column of numbers or dates as float64, NaN where a value is missing; words are refused."""
        kind, values = self.interpret_column(name)
        if kind == "words":
            found = str(values.drop_null()[0].as_py())
            raise DataError(f"{self.place}: column {name!r} holds words, such as {found!r}; expected numbers.")
        numbers = as_numpy(values.cast(pa.float64(), safe=False).fill_null(float("nan"))).astype(np.float64, copy=False)
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
            return as_numpy(column)
        if types.is_floating(column.type):
            values = as_numpy(column)
            is_whole = bool((np.abs(values) < LARGEST_WHOLE).all() and (values == np.floor(values)).all())
            return values.astype(np.int64) if is_whole else values  # pandas makes 1.0 of 1 beside a missing id
        if not (is_text(column.type) or types.is_null(column.type)):
            raise DataError(f"{self.place}: column {name!r} is of type {column.type}; expected numbers or text.")
        encoded = column.cast(pa.string()).dictionary_encode()
        texts, codes = encoded.dictionary.to_pylist(), as_numpy(encoded.indices)
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
            is_number = types.is_duration(kind)  # of seconds
            return Interpreted("time" if types.is_time(kind) else "number" if is_number else "date", _seconds(column))
        if not is_text(kind):
            raise DataError(
                f"{self.place}: column {name!r} is of type {kind}; expected numbers, dates or words. Leave it out, or "
                "turn it into columns of these."
            )
        return self._interpret_text(name, column)

    def _interpret_text(self, name: str, column: pa.Array) -> Interpreted:
        if column.null_count == len(column):
            return Interpreted("number", column.cast(pa.float64()))
        if self.decimals != "," and all_match(column, PLAIN_NUMBER):
            return Interpreted("number", _cast_numbers(column))
        if decimals := self._decimals_of(name, column):
            return Interpreted("number", _cast_numbers(_without_separators(column, decimals)))
        is_time = all_match(column, TIME)
        dates = pc.binary_join_element_wise("1970-01-01", column, "T") if is_time else column
        for unit_and_zone in DATE_UNITS:
            try:
                return Interpreted("time" if is_time else "date", _seconds(dates.cast(pa.timestamp(*unit_and_zone))))
            except pa.ArrowInvalid:
                pass
        self._refuse_stray_words(name, column)
        return Interpreted("words", column)

    def _refuse_stray_words(self, name: str, column: pa.Array) -> None:
        """Refuse a column of words most of which are numbers, or dates."""
        is_valid = as_numpy(column.is_valid())
        enough = NUMBER_SHARE * is_valid.sum()
        for pattern in (COMMA_NUMBER,) if self.decimals == "," else (PLAIN_NUMBER, POINT_NUMBER, COMMA_NUMBER):
            is_number = _matches(column, pattern)
            if is_number.sum() >= enough:
                is_word = is_valid & ~is_number
                advice = "among numbers; expected numbers, all written the same way, or only words. Leave such cells "
                advice += "empty if they are missing"
                break
        else:
            if _matches(column, f"^{DATE}$").sum() < enough:
                return
            is_word = is_valid & ~_are_dates(column)
            advice = "not a date in ISO 8601; expected dates such as 2020-12-31 or 2020-12-31T23:59:00, all with a "
            advice += "time zone or none. Write them that way"
        word = column.filter(pa.array(is_word))[0].as_py()
        raise DataError(f"{self.where(is_word)}: {name} is {word!r}, {advice}, or leave the column out.")

    def _decimals_of(self, name: str, values: pa.Array) -> Decimals | None:
        """The decimal sign of numbers that are written with commas or thousands separators; none: not numbers."""
        fits: dict[Decimals, bool] = {
            ".": all_match(values, POINT_NUMBER), ",": all_match(values, COMMA_NUMBER)
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
    columns = [table.interpret_column(name) for table in tables]
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


class LazyColumns(Mapping[str, Any]):
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


def check_names(where: str, names: Sequence[str]) -> None:
    """Refuse a table without columns, or with two of one name."""
    if not names:
        raise DataError(f"{where} is empty; expected a header with the names of columns, then rows.")
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DataError(f"{where}: the column {name!r} appears twice; expected names that differ.")
        seen.add(name)


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


# ------------------------------------------------------------------------------------------------------- what cells are


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds text."""
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def as_numpy(column: pa.Array) -> Array:
    """A column as an array of NumPy."""
    array: Array = column.to_numpy(zero_copy_only=False)
    return array


def _one_chunk(column: Any) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def with_nulls(column: Any) -> pa.Array:
    """A column in one piece, null where a value is missing: what stands for it in text, and NaN; no dictionaries."""
    column = _one_chunk(column)
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_floating(column.type):
        column = column.cast(pa.float64()) if types.is_float16(column.type) else column
        is_nan = pc.is_nan(column)
        return pc.if_else(is_nan, pa.scalar(None, column.type), column) if pc.any(is_nan).as_py() else column
    if not is_text(column.type):
        return column
    plain = pc.utf8_trim_whitespace(column if types.is_string(column.type) else column.cast(pa.string()))
    is_blank = pc.is_in(plain, value_set=pa.array(MISSING_TEXTS))
    return pc.if_else(is_blank, pa.scalar(None, pa.string()), plain) if pc.any(is_blank).as_py() else plain


def _matches(column: pa.Array, pattern: str) -> Array:
    return as_numpy(pc.match_substring_regex(column, pattern).fill_null(False))


def _are_dates(column: pa.Array) -> Array:
    """Where text is a date of the first kind that fits any of it."""
    texts = column.to_pylist()
    for unit_and_zone in DATE_UNITS:
        kind = pa.timestamp(*unit_and_zone)
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


def all_match(values: pa.Array, pattern: str) -> bool:
    """Whether all texts that are there match a regular expression."""
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
