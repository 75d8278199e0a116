"""A table of clients with an estimate and its variance each, from a CSV file."""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from selffl.errors import DataError, first_few

if TYPE_CHECKING:
    from _csv import Reader

COLUMNS = ("client", "estimate", "variance")


@dataclass(frozen=True)
class EstimateTable:
    """One row per client."""

    client: list[str]
    estimate: npt.NDArray[np.float64]  # z_m
    variance: npt.NDArray[np.float64]  # sigma_m^2
    covariate: npt.NDArray[np.float64] | None = None  # a column of the users' choice


class RowError(ValueError):
    """What is wrong with a row."""


def read_estimates(path: Path, covariate: str | None = None) -> EstimateTable:
    """Read a CSV file with the columns client, estimate and variance, in any order, among others.

    ``covariate`` is the name of one more column of numbers.

    Every row counts: one that cannot be used is an error that names its line, and nothing is dropped.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist; expected a CSV file with the columns {', '.join(COLUMNS)}.")
    if path.is_dir():
        raise DataError(f"{path} is a folder; expected a CSV file with the columns {', '.join(COLUMNS)}.")
    with csv_lines(path) as lines:
        return _read(path, lines, covariate)


@contextmanager
def csv_lines(path: Path, separator: str = ",") -> Iterator[Reader]:
    """The lines of a CSV file; what is no CSV is an error of one line."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield csv.reader(file, delimiter=separator)
    except UnicodeDecodeError:
        raise DataError(
            f"{path} is not text in UTF-8 (byte {_bad_byte(path)}); save the table as CSV in UTF-8."
        ) from None
    except (csv.Error, OSError) as error:
        raise DataError(f"{path} cannot be read as CSV ({error}); expected comma-separated text.") from None


def _bad_byte(path: Path) -> int:
    """Where the file stops being UTF-8; an error while reading counts from its own block."""
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start
    return 0


def _read(path: Path, lines: Reader, covariate: str | None) -> EstimateTable:
    positions, width = _header(path, lines, covariate)
    names = [*COLUMNS[1:], *([] if covariate is None else [covariate])]
    clients: list[str] = []
    columns = [array("d") for _ in names]
    first_line: dict[str, int] = {}
    wrong: list[tuple[int, str]] = []
    for fields in lines:
        number = lines.line_num
        if not fields:
            continue  # an empty line is no row
        try:
            client, values = _row(fields, positions, width, names)
            if client in first_line:
                raise RowError(
                    f"client {client!r} is already on line {first_line[client]}; expected one row per client"
                )
        except RowError as problem:
            wrong.append((number, str(problem)))
            continue
        first_line[client] = number
        clients.append(client)
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    if wrong:
        others = f" {len(wrong) - 1} more bad row(s): line {first_few([line for line, _ in wrong[1:]], 8)}."
        advice = f"{others} Correct them" if len(wrong) > 1 else " Correct the row"
        raise DataError(f"{path}, line {wrong[0][0]}: {wrong[0][1]}.{advice}; none was dropped.")
    if not clients:
        raise DataError(f"{path} has a header but no rows; expected one row per client.")
    return EstimateTable(clients, *(np.frombuffer(column) for column in columns))


def _header(path: Path, lines: Iterator[list[str]], covariate: str | None) -> tuple[list[int], int]:
    """Where the columns stand, the covariate last, and how many there are."""
    first = next((fields for fields in lines if fields), [])  # blank lines before the header do not matter
    names = [name.strip().lower() for name in first]
    if not names:
        raise DataError(f"{path} is empty; expected a header with the columns {', '.join(COLUMNS)}, then rows.")
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        check_commas(path, names)
        shown = ", ".join(names[:6])
        advice = "Add a header line." if len(missing) == len(COLUMNS) else "Rename or add the column."
        raise DataError(f"{path}, line 1: no column {' or '.join(missing)} among: {shown}. {advice}")
    wanted = [*COLUMNS, *([] if covariate is None else [covariate.strip().lower()])]
    if wanted[-1] not in names:
        raise DataError(f"{path}, line 1: no column {wanted[-1]} for the covariate among: {', '.join(names[:6])}.")
    if any(names.count(name) > 1 for name in wanted):
        raise DataError(f"{path}, line 1: a column appears twice among: {', '.join(names)}. Keep one of each.")
    return [names.index(name) for name in wanted], len(names)


def check_commas(path: Path, names: Sequence[str]) -> None:
    """Refuse a header of a single column that was meant to be several."""
    for sign, word in ((";", "semicolons"), ("\t", "tabs")):
        if len(names) == 1 and sign in names[0]:
            raise DataError(f"{path}, line 1: the columns are separated by {word}; expected commas.")


def _row(fields: list[str], positions: list[int], width: int, names: Sequence[str]) -> tuple[str, list[float]]:
    """The client of a row, and its numbers by ``names``."""
    if len(fields) <= max(positions):
        raise RowError(f"{len(fields)} field(s) found; expected at least {max(positions) + 1}")
    if len(fields) > width:
        raise RowError(f"{len(fields)} fields found; expected {width}, as in the header (a decimal comma?)")
    client = fields[positions[0]].strip()
    if not client:
        raise RowError("client is missing; expected a name")
    values = [as_number(name, fields[position]) for name, position in zip(names, positions[1:], strict=True)]
    if values[1] < 0:
        raise RowError(f"variance is {values[1]:g}; expected 0 or more")
    return client, values


def as_number(name: str, text: str) -> float:
    """A finite number as people write it; else a `RowError`."""
    try:
        if "_" in text:  # which Python would read as 1_000
            raise ValueError
        value = float(text)
    except ValueError:
        description = f"is {text.strip()!r}" if text.strip() else "is missing"
        raise RowError(f"{name} {description}; expected a number") from None
    if not math.isfinite(value):
        raise RowError(f"{name} is {text.strip()}; expected a finite number")
    return value
