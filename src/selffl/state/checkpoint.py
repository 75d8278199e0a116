"""Tensors on disk with a version and a checksum: what a run goes on from.

A checkpoint is a plain safetensors file.  Its header holds the format's version, a JSON object of the writer's choice,
and a SHA-256 over everything else, so that damage is told from change.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from selffl.algorithms.records import ADDED_LATER, EARLIER_NAME
from selffl.errors import CheckpointError
from selffl.state.files import atomic_write

VERSION = 1

Record = TypeVar("Record")


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors and a JSON object in one file, all or nothing."""
    # A copy of its own for each: views that share memory, or jump through it, cannot be stored.
    plain = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    text = json.dumps(about, sort_keys=True)
    header = {"format": "selffl", "version": str(VERSION), "about": text, "sha256": _checksum(plain, text)}
    with atomic_write(path) as partial:
        write_safetensors(partial, plain, header)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> None:
    """Write a safetensors file; what the disk refuses is an `OSError`, and the mode is that of any new file.

    The library writes into a temporary file of its own beside ``path``, for its owner alone.  It gets a folder for it,
    which goes whatever happens, or has an ending by which it is found if the process is killed.
    """
    path.touch()
    with tempfile.TemporaryDirectory(prefix=f"{path.name}.", suffix=".part", dir=path.parent) as place:
        content = Path(place) / "content"
        try:
            save_file(dict(tensors), content, dict(header))
        except SafetensorError as error:
            if (code := re.search(r"\(os error (\d+)\)", str(error))) is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from None
        content.chmod(path.stat().st_mode & 0o777)
        content.replace(path)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_tensors` wrote, checked."""
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; expected a file that selffl has saved.")
    try:
        path.open("rb").close()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened ({error.strerror}); expected a readable file.") from None
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != "selffl":
                raise CheckpointError(f"{path} was not written by selffl; expected one of its checkpoints.")
            if header.get("version") != str(VERSION):
                raise CheckpointError(
                    f"{path} has version {header.get('version')}; expected {VERSION}. Use the selffl that wrote it."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}); expected a whole checkpoint. Delete it and start the run anew."
        ) from None
    if _checksum(tensors, header.get("about", "")) != header.get("sha256"):
        raise CheckpointError(
            f"{path} is damaged (its checksum differs); expected a whole checkpoint. Delete it and start the run anew."
        )
    return tensors, json.loads(header["about"])


def load_about(path: Path) -> dict[str, Any]:
    """The JSON object of such a file alone, unchecked: for one that `load_tensors` has seen a moment ago."""
    try:
        with safe_open(path, framework="pt") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {})["about"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); expected a whole checkpoint.") from None
    return about


def _checksum(tensors: Mapping[str, Tensor], about: str) -> str:
    digest = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
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
