"""Noise on a method's sums, between the clients and the server's step: what one client adds cannot be told from it.

How much noise each sum gets, `selffl.engines.limits` says.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from selffl.algorithms.records import tensors_of
from selffl.engines.limits import SumLimits
from selffl.randomness import normal, secret_normal

Upload = TypeVar("Upload")
Draw = Callable[[str, torch.Size], Tensor]  # standard normal numbers for a field, of a shape


def add_noise(limits: SumLimits, total: Upload, num_clients: int, draw: Draw) -> tuple[Upload, dict[str, float]]:
    """The sum of ``num_clients`` uploads with the noise that hides any of them, and its deviation by field.

    Sums of weights, which noise may carry to zero and below, stay at a tenth of the most that they can be.
    """
    sums, scales = tensors_of(total), limits.scales(total)
    noisy = {name: sums[name] + (scale * draw(name, sums[name].shape)).to(sums[name]) for name, scale in scales.items()}
    for name, least in limits.least_weights(total).items():
        if name in noisy:
            noisy[name] = noisy[name].clamp(min=least * num_clients)
    return (replace(total, **noisy) if noisy else total), scales  # type: ignore[type-var]


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
    return secret_normal(shape)
