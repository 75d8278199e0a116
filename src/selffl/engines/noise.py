"""Noise on a method's sums, between the clients and the server's step: what one client adds cannot be told from it.

A method whose uploads add says how much noise each of their sums gets.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from selffl.algorithms.contract import Algorithm
from selffl.algorithms.records import tensors_of
from selffl.randomness import normal

Upload = TypeVar("Upload")
Draw = Callable[[str, torch.Size], Tensor]  # standard normal numbers for a field, of a shape


def add_noise(algorithm: Algorithm[Any, Any, Any, Any], total: Upload, draw: Draw) -> Upload:
    """The sum of a cohort's uploads, with the noise that the method asks for on each of its fields."""
    sums = tensors_of(total)
    noisy = {
        name: sums[name] + (scale * draw(name, sums[name].shape)).to(sums[name])
        for name, scale in algorithm.noise_scale().items()
    }
    return replace(total, **noisy) if noisy else total  # type: ignore[type-var]


def seeded_noise(seed: int | Tensor, round_number: int) -> Draw:
    """Numbers that a simulation can repeat.  Whoever knows the seed can take them off again: they protect nobody."""
    seeds = torch.as_tensor(seed)

    def draw(name: str, shape: torch.Size) -> Tensor:
        rest = shape[seeds.dim() :]
        own = seeds.reshape((*seeds.shape, *(1 for _ in rest)))
        places = torch.arange(rest.numel()).reshape(rest)
        return normal(own, "noise", round_number, zlib.crc32(name.encode()), places)

    return draw


def secure_noise(name: str, shape: torch.Size) -> Tensor:
    """Numbers from the operating system's generator, which nobody can repeat."""
    words = np.frombuffer(os.urandom(8 * shape.numel()), dtype=np.uint64) >> np.uint64(12)
    uniform = (torch.from_numpy(words.astype(np.float64)) + 0.5) * 2.0**-52
    found: Tensor = torch.special.ndtri(uniform).reshape(shape)
    return found
