"""What the numbers of a run were computed with."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import numpy
import torch

from selffl._version import __version__


def environment() -> dict[str, str]:
    """What the numbers were computed with."""
    found = {
        "selffl": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    try:
        commit = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
            capture_output=True, text=True, timeout=5, check=True,
        )  # fmt: skip
        found["commit"] = commit.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        pass  # not a checkout
    return found
