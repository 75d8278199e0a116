"""Embeddings of a whole cohort, each client with its own table.

Under `torch.func.vmap` the tables of all clients lie behind each other, and a number beyond one of them reads the next
client's: nothing is out of range.  Here such a number gives NaN, so that training stops instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor, nn

from selffl.errors import DataError


def is_trained(part: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether it is a table of each client's own; a frozen one is one for all."""
    return type(part) is nn.Embedding and part.weight.requires_grad


def guard_embeddings(module: nn.Module) -> None:
    """Make the trained embeddings of a module, in place, give NaN for numbers that they do not have."""
    for part in module.modules():
        if is_trained(part):
            part.forward = partial(look_up, part.forward, part.num_embeddings)  # type: ignore[method-assign]


def look_up(forward: Callable[[Tensor], Tensor], num_embeddings: int, numbers: Tensor) -> Tensor:
    """Rows of the table for ``numbers``, those within it."""
    is_there = (numbers >= 0) & (numbers < num_embeddings)
    vectors = forward(torch.where(is_there, numbers, 0))
    return torch.where(is_there.unsqueeze(-1), vectors, torch.nan)


@contextmanager
def refuse_beyond(module: nn.Module) -> Iterator[None]:
    """Refuse numbers that an embedding of the module does not have, in plain passes while the context lasts."""
    kind, names = type(module).__name__, {part: name for name, part in module.named_modules()}

    def check(part: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        assert isinstance(part, nn.Embedding)
        numbers, most = inputs[0] if inputs else named["input"], part.num_embeddings
        if numbers.is_floating_point() or numbers.numel() == 0:  # what the layer refuses, or has nothing to look up for
            return
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high >= most:
            raise DataError(
                f"{kind} looks up the number {low if low < 0 else high} in its embedding {names[part] or 'itself'}, "
                f"which has {most}; expected 0 to {most - 1}. Number or shorten the rows anew, or give the model more."
            )

    hooks = [
        part.register_forward_pre_hook(check, with_kwargs=True) for part in names if isinstance(part, nn.Embedding)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
