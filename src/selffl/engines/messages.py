"""What processes of one run send each other: any value, its tensors as they lie in memory and the rest pickled."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ALIGNED_BYTES = 16  # at whose multiples tensors begin


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in the bytes of a message."""

    start: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_on_device: bool


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[Tensor] = []
        self.size = 0

    def persistent_id(self, item: Any) -> _Place | None:
        """Tensors are laid aside."""
        if not isinstance(item, Tensor):
            return None
        place = _Place(self.size, item.nbytes, item.dtype, tuple(item.shape), item.device.type != "cpu")
        self.tensors.append(item.detach())
        self.size += -(-item.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        return place


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, content: Tensor, device: torch.device) -> None:
        super().__init__(file)
        self._content, self._device = content, device

    def persistent_load(self, place: _Place) -> Tensor:
        """The tensor that was laid aside; one that was on a GPU there is on this process's."""
        raw = self._content[place.start : place.start + place.num_bytes]
        found = raw.view(place.dtype).reshape(place.shape)
        return found.to(self._device) if place.is_on_device else found.cpu()


def pack(value: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """A value as bytes: of all but its tensors, and of its tensors, which lie on ``device``."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    content = torch.zeros(packer.size, dtype=torch.uint8, device=device)
    start = 0
    for tensor in packer.tensors:
        content[start : start + tensor.nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
        start += -(-tensor.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8), content


def unpack(structure: Tensor, content: Tensor, device: torch.device) -> Any:
    """The value that `pack` made bytes of; what was on a GPU comes to ``device``."""
    return _Unpacker(io.BytesIO(structure.numpy().tobytes()), content, device).load()
