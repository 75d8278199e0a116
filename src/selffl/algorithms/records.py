"""Records: the dataclasses of tensors that methods keep, send and store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from torch import Tensor

Record = TypeVar("Record")

EARLIER_NAME = "earlier_name"  # metadata of a field: what checkpoints of earlier versions call it
DERIVED = "derived"  # metadata of a field that server and clients each make of the model: it does not travel
ADDED_LATER = "added_later"  # metadata of a field that checkpoints of earlier versions lack: it begins as in a new run


def map_tensors(function: Callable[..., Tensor], record: Record, *others: Record) -> Record:
    """The record with ``function`` applied to each of its tensors (and to those of ``others`` beside it)."""
    if isinstance(record, Tensor):
        return function(record, *others)  # type: ignore[return-value]
    if not is_dataclass(record) or isinstance(record, type):
        return record
    parts = {f.name: map_tensors(function, *(getattr(r, f.name) for r in (record, *others))) for f in fields(record)}
    return type(record)(**parts)


def tensors_of(record: Any, prefix: str = "") -> dict[str, Tensor]:
    """Every tensor of a record by its dotted name: how it is saved."""
    return _tensors(record, prefix, None)


def sent_tensors(record: Any) -> dict[str, Tensor]:
    """The tensors of a record that are sent, by their dotted names: without those that each side makes itself."""
    return _tensors(record, "", DERIVED)


def _tensors(record: Any, prefix: str, left_out: str | None) -> dict[str, Tensor]:
    """Tensors by their dotted names, without fields of that metadata."""
    if isinstance(record, Tensor):
        return {prefix: record}
    if not is_dataclass(record):
        return {}
    found: dict[str, Tensor] = {}
    for each in fields(record):
        if left_out not in each.metadata:
            name = f"{prefix}.{each.name}" if prefix else each.name
            found |= _tensors(getattr(record, each.name), name, left_out)
    return found
