"""Embeddings of a whole cohort, each client with its own table.

Under `torch.func.vmap` the tables of all clients lie behind each other, and a number beyond one of them reads the next
client's: nothing is out of range.  Here such a number gives NaN, so that training stops instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn


def is_trained(part: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether it is a table of each client's own; a frozen one is one for all."""
    return type(part) is nn.Embedding and part.weight.requires_grad


def guard_embeddings(module: nn.Module) -> None:
    """Make the trained embeddings of a module, in place, give NaN for numbers that they do not have."""
    for part in module.modules():
        if is_trained(part):
            part.forward = partial(looked_up, part.forward, part.num_embeddings)  # type: ignore[method-assign]


def looked_up(forward: Callable[[Tensor], Tensor], num_embeddings: int, numbers: Tensor) -> Tensor:
    """Rows of the table for ``numbers``, those within it."""
    is_there = (numbers >= 0) & (numbers < num_embeddings)
    vectors = forward(torch.where(is_there, numbers, 0))
    return torch.where(is_there.unsqueeze(-1), vectors, torch.nan)
