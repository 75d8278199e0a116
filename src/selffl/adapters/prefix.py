"""Attention of torch's with learned keys and values beside those of a row.

Li and Liang, Prefix-Tuning, ACL 2021, put learned places in front of a row's own, in one softmax with them.  However
small their values, the softmax then takes attention away from the row.  Here they have a softmax of their own, and what
a query makes of them is added: the form of He et al., Towards a Unified View of Parameter-Efficient Transfer Learning,
ICLR 2022, section 3, without its gate.  Keys are drawn from a seed, common and frozen; clients train values, which
begin at 0.  So a module starts as the function that it is, and attention is linear in what is trained: the mean of the
clients' values is that of what they add.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from selffl.adapters.attention import AdaptedAttention
from selffl.adapters.layers import Matrix
from selffl.randomness import normal


class PrefixAttention(AdaptedAttention):
    """`nn.MultiheadAttention`, frozen, and what its queries make of learned values.

    Args:
        base: the attention, frozen.
        length: how many keys and values there are.
        seed: of the keys.
        name: of the attention in its module, by which keys differ.
    """

    def __init__(self, base: nn.MultiheadAttention, length: int, seed: int, name: str) -> None:
        super().__init__(base, lambda _, part: part)
        like = self.out_proj.weight
        size = torch.Size((length, self.embed_dim))
        keys = normal(seed, f"prefix {name}", torch.arange(size.numel())).view(size)
        self.prefix_keys = Matrix(keys.to(like), False)
        self.prefix_values = Matrix(like.new_zeros(size), True)
        self._qkv_same_embed_dim = False  # what torch asks before it takes its fast path, which knows of no prefix

    def values(self, num_rows: int) -> Tensor:
        """Values by head ``[heads, length, width]``, for all of so many rows."""
        return self.by_head(self.prefix_values.weight)

    def add_to(self, mixed: Tensor, queries: Tensor) -> Tensor:
        """What attention has mixed ``[B, heads, L, width]``, and the mean of values by how queries meet their keys."""
        scores = queries @ self.by_head(self.prefix_keys.weight).transpose(-1, -2) * self.head_dim**-0.5
        added: Tensor = scores.softmax(-1) @ self.values(len(queries))
        return mixed + added
