"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table; the keys of the first row are the columns."""
    columns = list(rows[0])
    lines = [_line(columns), "|" + "---|" * len(columns), *(_line([row[c] for c in columns]) for row in rows)]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"  # a bar inside a cell would end it
