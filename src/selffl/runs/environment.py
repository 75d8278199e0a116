"""What the numbers of a run are computed with."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path

import numpy
import torch

from selffl._version import __version__
from selffl.errors import ConfigError, one_line


def environment() -> dict[str, str]:
    """What the numbers were computed with."""
    found = {
        "selffl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    return found | ({"commit": commit} if (commit := _commit()) is not None else {})


@cache
def _commit() -> str | None:
    """The commit of this checkout, or none; asked once, for a process computes with the code that it began with."""
    try:
        found = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
            capture_output=True, text=True, timeout=5, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None  # not a checkout
    return found.stdout.strip()


def check_device(device: str) -> None:
    """Refuse a device that torch does not know, or that is not here."""
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        raise ConfigError(f"device is {device!r}; expected 'cpu', 'cuda' or another of torch's.") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch finds no GPU here; use 'cpu'.")
    try:
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(f"device is {device!r}, which cannot be used here ({one_line(error)}); use 'cpu'.") from None
