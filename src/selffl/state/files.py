"""Files that are either whole or not there: a power cut or a kill leaves the old one."""

from __future__ import annotations

import csv
import glob
import io
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from selffl.errors import ConfigError

try:
    import fcntl
except ImportError:  # not on Windows, where nothing keeps two processes apart
    fcntl = None  # type: ignore[assignment]

STALE_SECONDS = 24 * 3600.0  # after which no process is still writing a file
LOCK = ".lock"

_FORMULA = re.compile(r"'*[=+\-@\t\r]")  # how a formula begins, with as many apostrophes as were put before it
_NEGATIVE = re.compile(r"-\d+(\.\d+)?")  # a number, which is none


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep a second process from writing the same run; the lock goes with the process, however that ends."""
    path.mkdir(parents=True, exist_ok=True)
    with (path / LOCK).open("w") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"another process is writing the run in {path}; wait for it, or give another.") from None
        yield


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Wait until no other process is between these lines for the same file, which need not exist yet."""
    with path.with_name(path.name + LOCK).open("w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path`` to write into; it takes the place of ``path`` once it is safe on the disk.

    Each writer has its own: of two at once the later one wins, and neither publishes half of the other's.
    """
    sweep(path.parent.glob(f"{glob.escape(path.name)}.*.part"))
    partial = path.with_name(f"{path.name}.{secrets.token_hex(6)}.part")
    try:
        with naming(path):
            yield partial
            sync_file(partial)
            partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    sync_file(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Say which file could not be written: a disk that is full does not."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def sweep(left: Iterable[Path]) -> None:
    """Delete files and folders that a process was writing when it was killed, a day ago or earlier."""
    for path in left:
        with suppress(FileNotFoundError):  # its writer has ended meanwhile
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def sync_file(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, all or nothing."""
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Write a table, all or nothing; the columns are all keys in the order of first sight, unless they are given."""
    names = columns or list(dict.fromkeys(key for row in rows for key in row))
    with atomic_write(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerow(map(as_cell, names))
        _write_rows(file, rows, names)


def _write_rows(file: TextIO, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
    writer.writerows({name: as_cell(cell) for name, cell in row.items()} for row in rows)


def as_cell(value: Any) -> Any:
    """A value as a cell that no spreadsheet takes for a formula: text that begins like one gets an apostrophe.

    Client ids are somebody's text, and a table may be opened by somebody else.  `from_cell` gives the text back.
    """
    is_formula = isinstance(value, str) and _FORMULA.match(value) and not _NEGATIVE.fullmatch(value)
    return f"'{value}" if is_formula else value


def from_cell(cell: str) -> str:
    """The text that `as_cell` made a cell of."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a table with its types, all or nothing; a column of several types, or beyond them, is one of text.

    Where the sources are used without what they ask for (pyarrow), the CSV files are all there is.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        return
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(key for row in rows for key in row):
        cells = [row.get(name) for row in rows]
        kinds = {type(cell) for cell in cells} - {type(None)}
        is_plain = kinds <= {int, float} or (len(kinds) == 1 and kinds <= {str, bool})
        try:
            # An empty column is one of numbers, as in every run where it is not empty.
            columns[name] = pa.array(cells if is_plain else _as_text(cells), None if kinds else pa.float64())
        except (pa.ArrowInvalid, OverflowError):  # ids of 64 bits without a sign
            columns[name] = pa.array(_as_text(cells))
    with atomic_write(path) as partial:
        parquet.write_table(pa.table(columns), partial)


def _as_text(cells: Sequence[Any]) -> list[str | None]:
    return [None if cell is None else str(cell) for cell in cells]


def append_csv(path: Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Add rows to the end of a table that `write_csv` began."""
    with naming(path), path.open("a", newline="", encoding="utf-8") as file:
        _write_rows(file, rows, columns)
        file.flush()
        os.fsync(file.fileno())  # a checkpoint that follows is on the disk, and counts on these rows


def read_csv(path: Path, as_text: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Rows of a table, numbers as numbers and empty cells as None; a last line that was cut off is left out.

    Columns named in ``as_text`` stay text: an id 007 is not the number 7.
    """
    with path.open(newline="", encoding="utf-8") as file:
        text = file.read()
    whole = io.StringIO(text[: text.rfind("\n") + 1], newline="")
    rows = list(csv.DictReader(whole))
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            raise ValueError(f"row {number} of {path.name} has other columns than the first line")
    names = {name: from_cell(name) for name in (rows[0] if rows else ())}
    return [
        {names[key]: from_cell(cell) if names[key] in as_text else _value(cell) for key, cell in row.items()}
        for row in rows
    ]


def _value(cell: str) -> Any:
    if cell == "":
        return None
    for kind in (float,) if "." in cell else (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return from_cell(cell)
