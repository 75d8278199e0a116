"""pyarrow, read when the first table is: a process that trains on tensors does without its 30 MB."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any


class ImportedLater:
    """A module that is imported when something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        found = getattr(import_module(self._name), name)
        vars(self)[name] = found
        return found


if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import types
else:
    pa, pc, types = map(ImportedLater, ("pyarrow", "pyarrow.compute", "pyarrow.types"))

__all__ = ["pa", "pc", "types"]
