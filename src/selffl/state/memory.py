"""Every client's memory, read and written a cohort at a time: in one block of tensors, or on disk."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from selffl.algorithms.records import map_tensors
from selffl.errors import ConfigError
from selffl.state.disk import DiskMemory

Memory = TypeVar("Memory")


class Store(Protocol):
    """Where the memories of clients lie while rounds are trained."""

    def read(self, clients: Tensor) -> Any:
        """Memories of a cohort."""
        ...

    def write(self, clients: Tensor, memory: Any) -> None:
        """Replace the memories of a cohort."""
        ...

    def contents(self) -> Any:
        """What a state keeps: all memories, or where they lie."""
        ...


def store_of(memory: Any, shape: tuple[int, ...], *, copied: bool = True) -> Store:
    """The store of a state's memories; ``copied`` as for `MemoryStore`."""
    if not isinstance(memory, DiskMemory):
        return MemoryStore(memory, shape, copied=copied)
    if copied:
        raise ConfigError("the memories of clients lie on disk, and are written into; expected consume=True.")
    return memory


def memories_of(memory: Any, clients: Tensor) -> Any:
    """The memories of ``clients [C]`` of the one federation, from what a state keeps."""
    if isinstance(memory, DiskMemory):
        return memory.read(clients)
    return map_tensors(lambda tensor: tensor[clients], memory)


class MemoryStore(Generic[Memory]):
    """The memories of M clients, in each of any number of independent federations.

    ``memory`` has fields ``[*shape, M, ...]``; the store works on a copy of its own, unless it may have the memory
    itself (``copied=False``), whose tensors then share nothing with anything that is still needed.
    """

    def __init__(self, memory: Memory, shape: tuple[int, ...], *, copied: bool = True) -> None:
        def flat(tensor: Tensor) -> Tensor:
            clients = tensor.flatten(0, len(shape))
            return clients.clone() if copied else clients.contiguous()  # an expanded tensor cannot be written into

        self._shape = shape
        self._flat = map_tensors(flat, memory)

    def read(self, clients: Tensor) -> Memory:
        """Memories of the clients at ``clients [*shape, C]``, with fields ``[*shape, C, ...]``."""
        return map_tensors(lambda tensor: tensor[clients], self._flat)

    def write(self, clients: Tensor, memory: Memory) -> None:
        """Replace the memories of the clients at ``clients [*shape, C]``."""

        def put(store: Tensor, new: Tensor) -> Tensor:
            store[clients] = new
            return store

        map_tensors(put, self._flat, memory)

    def contents(self) -> Memory:
        """All memories, with fields ``[*shape, M, ...]``; no copy, so take it when the last is written."""
        return map_tensors(lambda tensor: tensor.reshape(*self._shape, -1, *tensor.shape[1:]), self._flat)
