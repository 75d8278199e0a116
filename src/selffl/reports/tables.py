"""Tables as Markdown and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table; the keys of the first row are the columns."""
    columns = list(rows[0])
    lines = [_line(columns), "|" + "---|" * len(columns), *(_line([row[c] for c in columns]) for row in rows)]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"  # a bar inside a cell would end it


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """All rows; the columns are all keys, in the order of first sight."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
