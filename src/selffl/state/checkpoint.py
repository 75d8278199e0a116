"""Tensors on disk with a version and a checksum: what a run goes on from.

A checkpoint is a plain safetensors file.  Its header holds the format's version, a JSON object of the writer's choice,
and checksums, so that damage is told from change: a CRC-32 of that object, and one of everything else.  Version 1,
which is still read, had one SHA-256 of both.  That took five times as long, and a checksum is no signature.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from selffl.algorithms.records import ADDED_LATER, EARLIER_NAME
from selffl.errors import CheckpointError
from selffl.state.files import atomic_write

VERSION = 2
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
}  # fmt: skip

Record = TypeVar("Record")


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors and a JSON object in one file, all or nothing."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(about, sort_keys=True)
    header = {
        "format": "selffl",
        "version": str(VERSION),
        "about": text,
        "about_crc32": _crc32_of_text(text),
        "crc32": _crc32(plain),
    }
    with atomic_write(path) as partial:
        write_safetensors(partial, plain, header)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    """Write a safetensors file: the length of its JSON, the JSON, and the tensors one behind the other.

    The library's own writer copies every tensor twice, refuses those that share memory, and has errors of its own for
    what the disk refuses.
    """
    entries: dict[str, Any] = {"__metadata__": dict(header)}
    stop, parts = 0, []
    # Those of the widest type first: so each begins where its numbers may begin.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        start, stop = stop, stop + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        parts.append(tensor)
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in parts:
            file.write(_bytes_of(tensor))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_tensors` wrote, checked."""
    tensors: dict[str, Tensor] = {}

    def read(file: Any) -> None:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            tensors[name] = file.get_tensor(name)

    header = _read(path, read)
    about = header.get("about", "")
    if header["version"] == "1":
        is_whole = header.get("sha256") == _sha256(tensors, about)
    else:
        is_whole = header.get("about_crc32") == _crc32_of_text(about) and header.get("crc32") == _crc32(tensors)
    if not is_whole:
        raise _damaged(path, "its checksum differs")
    return tensors, json.loads(about)


def load_about(path: Path) -> dict[str, Any]:
    """The JSON object of such a file alone, checked; in files of version 1 only all can be checked at once."""
    header = _read(path, lambda _: None)
    if header["version"] == "1":
        return load_tensors(path)[1]
    text = header.get("about", "")
    if header.get("about_crc32") != _crc32_of_text(text):
        raise _damaged(path, "its checksum differs")
    about: dict[str, Any] = json.loads(text)
    return about


def _read(path: Path, read: Callable[[Any], None]) -> dict[str, str]:
    """The header of a file of ours, which ``read`` is given open."""
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; expected a file that selffl has saved.")
    try:
        path.open("rb").close()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened ({error.strerror}); expected a readable file.") from None
    try:
        with safe_open(path, framework="pt") as file:
            header: dict[str, str] = file.metadata() or {}
            if header.get("format") != "selffl":
                raise CheckpointError(f"{path} was not written by selffl; expected one of its checkpoints.")
            if header.get("version") not in ("1", str(VERSION)):
                raise CheckpointError(
                    f"{path} has version {header.get('version')}; expected 1 or {VERSION}. Use the selffl that wrote "
                    "it."
                )
            read(file)
    except (SafetensorError, OSError, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)) from None
    return header


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged ({why}); expected a whole checkpoint. Delete it and start the run anew.")


def _bytes_of(tensor: Tensor) -> memoryview:
    """The numbers of a tensor as they are written: copied only where they do not lie one behind the other."""
    whole = tensor.detach().cpu().contiguous()
    # A tensor of one number lies one behind the other whatever its strides are, and is viewed by them.
    found: memoryview = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy().data
    return found


def _crc32_of_text(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _crc32(tensors: Mapping[str, Tensor]) -> str:
    """Checksum over names, types, shapes and numbers."""
    found = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        found = zlib.crc32(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode(), found)
        found = zlib.crc32(_bytes_of(tensor), found)
    return f"{found:08x}"


def _sha256(tensors: Mapping[str, Tensor], about: str) -> str:
    """The checksum of version 1."""
    digest = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(_bytes_of(tensor))
    return digest.hexdigest()


def fill_record(template: Record, tensors: Mapping[str, Tensor], prefix: str = "") -> Record:
    """The record with its tensors taken from ``tensors`` by their dotted names, as ``tensors_of`` gives them."""
    if isinstance(template, Tensor):
        if prefix not in tensors:
            raise CheckpointError(f"the checkpoint lacks {prefix!r}; expected the state of the same method.")
        tensor = tensors[prefix]
        if tensor.shape != template.shape or tensor.dtype != template.dtype:
            raise CheckpointError(
                f"the checkpoint's {prefix!r} is {tensor.dtype} {tuple(tensor.shape)}; expected {template.dtype} "
                f"{tuple(template.shape)}, as the model and the federation have it."
            )
        return tensor.to(template.device)  # type: ignore[return-value]
    if not is_dataclass(template) or isinstance(template, type):
        return template
    start, parts = f"{prefix}." if prefix else "", {}
    for field in fields(template):
        earlier = field.metadata.get(EARLIER_NAME, field.name)
        name = earlier if f"{start}{earlier}" in tensors else field.name
        if ADDED_LATER in field.metadata and not _holds(tensors, f"{start}{name}"):
            parts[field.name] = getattr(template, field.name)
            continue
        parts[field.name] = fill_record(getattr(template, field.name), tensors, f"{start}{name}")
    return type(template)(**parts)


def _holds(tensors: Mapping[str, Tensor], name: str) -> bool:
    """Whether there is a tensor, or a record of them, of this dotted name."""
    return name in tensors or any(each.startswith(f"{name}.") for each in tensors)
