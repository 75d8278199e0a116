"""Files that are either whole or not there: a power cut or a kill leaves the old one."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path`` to write into; it takes the place of ``path`` once it is safe on the disk."""
    partial = path.with_name(path.name + ".part")
    try:
        yield partial
        _sync(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, all or nothing."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Write a table, all or nothing; the columns are all keys in the order of first sight, unless they are given."""
    names = columns or list(dict.fromkeys(key for row in rows for key in row))
    with replacing(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def append_csv(path: Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Add rows to the end of a table that `write_csv` began."""
    with path.open("a", newline="", encoding="utf-8") as file:
        csv.DictWriter(file, columns, lineterminator="\n").writerows(rows)


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
    return [{name: cell if name in as_text else _value(cell) for name, cell in row.items()} for row in rows]


def _value(cell: str) -> Any:
    if cell == "":
        return None
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell
