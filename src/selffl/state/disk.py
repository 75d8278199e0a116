"""Client memory on disk, memory-mapped: a slot in a file for each client that has taken part, and none for others.

Each tensor of the memory has a file of its own, in which slot s holds that of one client.  Which slot a client has, and
a sum over what is in it, are two numbers by client, which a checkpoint keeps.  A slot that the last checkpoint refers
to is never written into: what such a client keeps next goes into a free slot, and the old one is free once the next
checkpoint is on disk.  So a kill at any moment leaves what the checkpoint refers to, and a checkpoint costs what
changed since the last one.  Free slots are taken from the lowest up: a resumed run fills the same slots.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from selffl.algorithms.records import map_tensors, tensors_of
from selffl.errors import CheckpointError
from selffl.randomness import random_bits
from selffl.state.files import naming, sync_file

Memory = TypeVar("Memory")

SUFFIX = ".slots"
MIN_GROWTH = 64  # slots by which a file grows at least
GROWTH = 0.25  # and in proportion to what it has
MAPPED_BYTES = 256 << 20  # that are read or written before their pages are given back to the system
AT_ONCE = 64  # clients whose slots are summed or copied at once


class SlotFile:
    """A file of slots for tensors of one shape and type."""

    def __init__(self, path: Path, row: Tensor) -> None:
        self.path, self._row, self._touched = path, row, 0
        self._map: mmap.mmap | None = None
        self._slots = row.new_empty(0, *row.shape)
        self._is_writable = False
        # Odd numbers: whichever single word changes, the sum does.
        self._view = torch.int32 if row.nbytes % 4 == 0 else torch.uint8
        num_words = row.nbytes // self._view.itemsize
        self._factors = random_bits(0, "slot", torch.arange(num_words)) | 1

    def read(self, slots: Tensor) -> Tensor:
        """What is in these ``slots [n]``."""
        if len(slots) and int(slots.max()) >= len(self._slots):
            self._open(int(slots.max()) + 1)
        found = self._slots[slots]
        self._touch(found.nbytes)
        return found

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Fill these ``slots [n]``; the file grows where it has to."""
        if not len(slots):  # nobody's answer came, and an empty file cannot be mapped
            return
        needed = int(slots.max()) + 1
        if needed > len(self._slots) or not self._is_writable:
            self._grow(needed)
        self._slots[slots] = rows.to(self._slots)
        self._touch(rows.nbytes)

    def sums(self, slots: Tensor) -> Tensor:
        """A number for what is in each slot, by which damage is noticed."""
        words = self.read(slots).reshape(len(slots), -1).view(torch.uint8).view(self._view)
        return (words.to(torch.int64) * self._factors).sum(-1)

    def sync(self) -> None:
        """Wait until what was written is on disk."""
        if self._map is not None and self._is_writable:
            with naming(self.path):
                self._map.flush()
                sync_file(self.path)
            self._release()

    def _touch(self, num_bytes: int) -> None:
        self._touched += num_bytes
        if self._touched > MAPPED_BYTES:
            self._release()

    def _release(self) -> None:
        """Give back the pages, which would count as this process's memory; the system keeps and writes them."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
        self._touched = 0

    def _open(self, needed: int) -> None:
        """Map the file as it is, for reading."""
        size = self.path.stat().st_size if self.path.is_file() else 0
        if size < needed * self._row.nbytes:
            raise CheckpointError(
                f"{self.path} has {size // self._row.nbytes} slots, and the checkpoint refers to slot {needed - 1}; "
                "expected the file that was written with it. Put it back, or start the run anew."
            )
        with self.path.open("rb") as file:  # pages of a private copy, so that a folder may be read-only
            self._take(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY), size, is_writable=False)

    def _grow(self, needed: int) -> None:
        """Map the file for writing, with room for so many slots; the disk has to have it."""
        with naming(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab"):
                pass
            with self.path.open("r+b") as file:
                number = os.fstat(file.fileno()).st_size // self._row.nbytes
                if number < needed:
                    number = max(needed, number + max(int(GROWTH * number), MIN_GROWTH))
                    # A full disk is an error here; of a file with holes it would be a signal, in the middle of a write.
                    reserve = getattr(os, "posix_fallocate", lambda handle, _, size: os.ftruncate(handle, size))
                    reserve(file.fileno(), 0, number * self._row.nbytes)
                size = number * self._row.nbytes
                self._take(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_WRITE), size, is_writable=True)

    def _take(self, mapped: mmap.mmap, size: int, *, is_writable: bool) -> None:
        number = size // self._row.nbytes
        flat = torch.frombuffer(mapped, dtype=self._row.dtype, count=number * self._row.numel())
        self._map, self._slots, self._is_writable = mapped, flat.view(number, *self._row.shape), is_writable


class SlotFolder(Generic[Memory]):
    """The files of a memory's tensors; ``fresh`` is that of a client that has not taken part, fields ``[1, ...]``.

    Without a folder they lie in a temporary one, which goes with this object.
    """

    def __init__(self, fresh: Memory, path: Path | None) -> None:
        self.path = path or Path(tempfile.mkdtemp(prefix="selffl-memory-"))
        if path is None:
            weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        self.fresh: Memory = map_tensors(lambda tensor: tensor.detach().cpu().contiguous(), fresh)
        self.files = [
            SlotFile(self.path / f"{name or 'memory'}{SUFFIX}", row[0]) for name, row in tensors_of(self.fresh).items()
        ]

    def read(self, slots: Tensor) -> Memory:
        """The memories in these ``slots [n]``; below 0: those of clients that have not taken part."""
        is_fresh, files = slots < 0, iter(self.files)

        def gather(fresh: Tensor) -> Tensor:
            found = fresh.expand(len(slots), *fresh.shape[1:]).clone()
            found[~is_fresh] = next(files).read(slots[~is_fresh])
            return found

        return map_tensors(gather, self.fresh)

    def write(self, slots: Tensor, memory: Memory) -> None:
        """Fill these ``slots [n]``."""
        for file, rows in zip(self.files, tensors_of(memory).values(), strict=True):
            file.write(slots, rows)

    def sums(self, slots: Tensor) -> Tensor:
        """A number for what is in each slot of every file."""
        total = torch.zeros(len(slots), dtype=torch.int64)
        for file in self.files:
            total += file.sums(slots)
        return total

    def sync(self) -> None:
        """Wait until what was written is on disk."""
        for file in self.files:
            file.sync()
        if self.path.is_dir():
            sync_file(self.path)


@dataclass
class DiskMemory(Generic[Memory]):
    """The memories of M clients on disk; its two tensors are what a checkpoint keeps of it."""

    slots: Tensor  # of each client, -1 before it takes part [M]
    sums: Tensor  # over what is in them, as of the checkpoint [M]
    folder: SlotFolder[Memory]

    @classmethod
    def begin(cls, fresh: Memory, num_clients: int, path: Path | None) -> DiskMemory[Memory]:
        """Memories of clients that have not taken part: ``fresh``, fields ``[1, ...]``."""
        slots = torch.full((num_clients,), -1, dtype=torch.int32)
        return cls(slots, torch.zeros(num_clients, dtype=torch.int64), SlotFolder(fresh, path))

    def __post_init__(self) -> None:
        self._is_unchecked = self.slots >= 0  # by client: what another process wrote
        self._note_published()

    def _note_published(self) -> None:
        """Keep the slots as they are from being written into; all others are free."""
        held = self.slots[self.slots >= 0].long()
        self._end = int(held.max()) + 1 if len(held) else 0
        self._is_published = torch.zeros(self._end, dtype=torch.bool)
        self._is_published[held] = True
        self._free = (~self._is_published).nonzero().flatten()
        self._changed: list[Tensor] = []

    def read(self, clients: Tensor) -> Memory:
        """Memories of ``clients [C]``, on their device."""
        chosen = clients.cpu()
        checked = chosen[self._is_unchecked[chosen]]
        if len(checked) and not torch.equal(self.folder.sums(self.slots[checked].long()), self.sums[checked]):
            raise CheckpointError(
                f"{self.folder.path} holds other memories of clients than the checkpoint refers to (their sums "
                "differ); expected those that were written with it. Load the run again if it is still being trained; "
                "else the files are damaged: put them back, or start the run anew."
            )
        return map_tensors(lambda tensor: tensor.to(clients.device), self.folder.read(self.slots[chosen].long()))

    def write(self, clients: Tensor, memory: Memory) -> None:
        """Replace the memories of ``clients [C]``."""
        chosen = clients.cpu()
        slots = self.slots[chosen].long()
        is_moved = slots < 0
        is_moved[~is_moved] = self._may_not_change(slots[~is_moved])
        slots[is_moved] = self._take(int(is_moved.sum()))
        self.folder.write(slots, memory)
        self.slots[chosen] = slots.to(self.slots)
        self._is_unchecked[chosen] = False
        self._changed.append(chosen)

    def _may_not_change(self, slots: Tensor) -> Tensor:
        found = slots < len(self._is_published)
        found[found.clone()] = self._is_published[slots[found]]
        return found

    def _take(self, number: int) -> Tensor:
        """Take so many free slots, the lowest; behind the last there are always more."""
        found, self._free = self._free[:number], self._free[number:]
        more = self._end + torch.arange(number - len(found))
        self._end += len(more)
        return torch.cat([found, more])

    def contents(self) -> DiskMemory[Memory]:
        """This store, which is what a state keeps."""
        return self

    def stored_in(self, path: Path) -> DiskMemory[Memory]:
        """These memories with their files in that folder: itself, or a copy."""
        if self.folder.path.absolute() == path.absolute():
            return self
        copy = DiskMemory.begin(self.folder.fresh, len(self.slots), path)
        for clients in (self.slots >= 0).nonzero().flatten().split(AT_ONCE):  # type: ignore[no-untyped-call]
            copy.write(clients, self.read(clients))
        return copy

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """A context for writing a checkpoint, which then refers to the slots as they are."""
        if self._changed:
            for clients in torch.cat(self._changed).unique().split(AT_ONCE):  # type: ignore[no-untyped-call]
                self.sums[clients] = self.folder.sums(self.slots[clients].long())
        self.folder.sync()
        yield
        self._note_published()


def bytes_of_client(memory: Any) -> int:
    """What one client's memory takes; ``memory`` has fields ``[1, ...]``."""
    return sum(tensor.nbytes for tensor in tensors_of(memory).values())
