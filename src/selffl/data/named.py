"""Features of rows: one tensor, or several by name, for modules with several inputs.

Whoever handles rows need not know which: both are indexed by rows alike, and `map_entries` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, ItemsView, Iterator, KeysView, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils import _pytree


class NamedFeatures:
    """Several tensors by name, with a row of each for every row: what a module with several inputs takes.

    An index that is a name gives a tensor; any other gives rows, of every tensor alike.  A module is called with the
    names as keywords, ``module(**features)``.

    Examples:
        >>> import selffl, torch
        >>> x = {"words": torch.tensor([[1, 2], [3, 0], [4, 5]]), "age": torch.tensor([31.0, 48.0, 27.0])}
        >>> fed = selffl.Federation.from_arrays(x, [0, 1, 0], ["anna", "ben", "ben"], test_fraction=0)
        >>> fed.train.features
        NamedFeatures(3 rows: age () float32, words (2,) int64)
        >>> fed.train.features["words"][0], len(fed.train.features[:2])
        (tensor([1, 2]), 2)
    """

    def __init__(self, entries: Mapping[str, Tensor]) -> None:
        self._entries = dict(sorted(entries.items()))  # so that the order in which they are given does not matter

    def __repr__(self) -> str:
        """What it holds, in a line."""
        return f"NamedFeatures({len(self)} rows: {describe_rows(self)})"

    def keys(self) -> KeysView[str]:
        """The names."""
        return self._entries.keys()

    def items(self) -> ItemsView[str, Tensor]:
        """Names and tensors."""
        return self._entries.items()

    @property
    def device(self) -> torch.device:
        """Where all of them are."""
        return next(iter(self._entries.values())).device

    def __len__(self) -> int:
        """How many rows there are."""
        return len(next(iter(self._entries.values())))

    def __contains__(self, name: object) -> bool:
        """Whether there is an entry of that name."""
        return name in self._entries

    def __iter__(self) -> Iterator[NamedFeatures]:
        """Row by row."""
        return (self[row] for row in range(len(self)))

    @overload
    def __getitem__(self, index: str) -> Tensor: ...
    @overload
    def __getitem__(self, index: Any) -> NamedFeatures: ...
    def __getitem__(self, index: Any) -> Tensor | NamedFeatures:
        """The tensor of a name, or rows of all of them."""
        if isinstance(index, str):
            return self._entries[index]
        return NamedFeatures({name: entry[index] for name, entry in self._entries.items()})


Features = Tensor | NamedFeatures
RowShape = tuple[int, ...] | dict[str, tuple[int, ...]]

# torch.func.vmap and torch.func.grad look into what they are given by this registry alone.
_pytree.register_pytree_node(
    NamedFeatures,
    lambda features: (list(features._entries.values()), tuple(features._entries)),
    lambda entries, names: NamedFeatures(dict(zip(names, entries, strict=True))),
)


def is_named(values: Any) -> bool:
    """Whether a user's features are a dictionary, or what has been made of one."""
    return isinstance(values, Mapping | NamedFeatures)


def entries_of(features: Features) -> dict[str, Tensor]:
    """The tensors there are, by name; a single one has none."""
    return {"": features} if isinstance(features, Tensor) else dict(features.items())


def map_entries(function: Callable[[Tensor], Tensor], features: Features) -> Features:
    """``function`` of the tensor, or of each."""
    if isinstance(features, Tensor):
        return function(features)
    return NamedFeatures({name: function(entry) for name, entry in features.items()})


def join(parts: Sequence[Features]) -> Features:
    """Rows behind each other, of parts that have the same entries."""
    entries = [entries_of(part) for part in parts]
    found = {name: torch.cat([each[name] for each in entries]) for name in entries[0]}
    return found[""] if isinstance(parts[0], Tensor) else NamedFeatures(found)


def row_size(features: Features) -> int:
    """How many numbers a row has."""
    return sum(entry[:1].numel() for entry in entries_of(features).values())


def row_shape(features: Features) -> RowShape:
    """The shape of a row, or of each entry of it."""
    shapes = {name: tuple(entry.shape[1:]) for name, entry in entries_of(features).items()}
    return shapes[""] if isinstance(features, Tensor) else shapes


def row_kind(features: Features) -> Hashable:
    """What rows that a module can tell apart by their form differ in: shapes and types."""
    if isinstance(features, Tensor):
        return features.shape[1:], features.dtype
    return tuple((name, entry.shape[1:], entry.dtype) for name, entry in features.items())


def describe_rows(features: Features) -> str:
    """Shape and type of a row, or of each entry of it, for messages."""
    found = [
        f"{name} {tuple(entry.shape[1:])} {str(entry.dtype).removeprefix('torch.')}".strip()
        for name, entry in entries_of(features).items()
    ]
    return ", ".join(found)
