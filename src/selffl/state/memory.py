"""Every client's memory, read and written a cohort at a time: in one block of tensors, on disk, or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, NoReturn, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from selffl.algorithms.records import map_tensors
from selffl.errors import ConfigError
from selffl.state.disk import DiskMemory

Memory = TypeVar("Memory")


@runtime_checkable
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
    if not isinstance(memory, Store):
        return MemoryStore(memory, shape, copied=copied)
    if copied:
        place = "on disk" if isinstance(memory, DiskMemory) else "with several processes"
        raise ConfigError(f"the memories of clients lie {place}, and are written into; expected consume=True.")
    return memory


def memories_of(memory: Any, clients: Tensor) -> Any:
    """The memories of ``clients [C]`` of the one federation, from what a state keeps."""
    if isinstance(memory, Store):
        return memory.read(clients)
    return map_tensors(lambda tensor: tensor[clients], memory)


def whole_memory(memory: Any) -> Any:
    """What a state keeps with nothing of it elsewhere: tensors of all clients, or a `DiskMemory`."""
    return memory.collect() if isinstance(memory, SpreadMemory) else memory


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


class ShardMemory:
    """The memories that one of several processes has: of the client ``first`` and those after it."""

    def __init__(self, store: Store, first: int) -> None:
        self._store, self._first = store, first
        self._changed: list[Tensor] = []

    def read(self, clients: Tensor) -> Any:
        """Memories of ``clients [C]``."""
        return self._store.read(clients - self._first)

    def write(self, clients: Tensor, memory: Any) -> None:
        """Replace the memories of ``clients [C]``."""
        self._store.write(clients - self._first, memory)
        self._changed.append(clients)

    def contents(self) -> ShardMemory:
        """This store, which is what a state keeps."""
        return self

    def take_changed(self) -> Tensor:
        """The clients whose memories have changed since they were last asked for, ascending ``[n]``."""
        found: Tensor = torch.unique(torch.cat(self._changed or [torch.zeros(0, dtype=torch.int64)]))
        self._changed = []
        return found


class SpreadMemory:
    """The memories of all clients where some train in other processes: theirs are as of when they were collected."""

    def __init__(self, store: Store, changed: Callable[[], Iterable[tuple[Tensor, Any]]]) -> None:
        self._store, self._changed = store, changed

    def read(self, clients: Tensor) -> Any:
        """Memories of ``clients [C]``, who train in this process."""
        return self._store.read(clients)

    def write(self, clients: Tensor, memory: Any) -> None:
        """Replace the memories of ``clients [C]``."""
        self._store.write(clients, memory)

    def contents(self) -> SpreadMemory:
        """This store, which is what a state keeps."""
        return self

    def collect(self) -> Any:
        """All memories as they are now: those that have changed elsewhere are asked for."""
        for clients, memory in self._changed():
            self._store.write(clients, memory)
        return self._store.contents()


class AbsentMemory:
    """The memories of a run that another process has."""

    def read(self, clients: Tensor) -> NoReturn:
        """Refuse to read: no memories are here."""
        raise ConfigError(
            "what clients keep is with rank 0, and this is another rank; expected to be asked for it there. Look at "
            "personal models where RANK is 0 in the environment."
        )

    def write(self, clients: Tensor, memory: Any) -> NoReturn:
        """Refuse to write: no memories are here."""
        self.read(clients)

    def contents(self) -> AbsentMemory:
        """This store, which is what a state keeps."""
        return self
