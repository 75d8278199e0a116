"""Attention of torch's with changes of low rank of its four projections."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from selffl.errors import ConfigError

INPUTS = ("query", "key", "value")
PROJECTIONS = (*INPUTS, "out_proj")


class AdaptedAttention(nn.Module):
    """`nn.MultiheadAttention` whose projections are layers of their own, some of them with a change of low rank.

    Args:
        base: the attention, frozen.
        adapt: what makes of the name of a projection and its frozen linear layer the layer that takes its place.
    """

    out_proj: nn.Linear  # or an adapted one, which has the same weight and bias

    def __init__(self, base: nn.MultiheadAttention, adapt: Callable[[str, nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = base.embed_dim, base.num_heads, base.head_dim
        self.batch_first, self.dropout, self._qkv_same_embed_dim = base.batch_first, base.dropout, True
        for name, part in zip(PROJECTIONS, split_projections(base), strict=True):
            setattr(self, name, adapt(name, part))

    merge_masks = nn.MultiheadAttention.merge_masks  # which torch's fast path calls

    @property
    def in_proj_weight(self) -> Tensor:
        """Weights of the first three, changes included: torch's fast path takes them instead of calling layers."""
        return torch.cat([cast(Tensor, getattr(self, name).weight) for name in INPUTS])

    @property
    def in_proj_bias(self) -> Tensor | None:
        """Biases of the first three."""
        biases = [getattr(self, name).bias for name in INPUTS]
        return None if biases[0] is None else torch.cat(biases)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """As that of `nn.MultiheadAttention`; ``is_causal`` is a hint there, and the mask says all."""
        if query.dim() == 2:
            raise ConfigError("attention was given one row without a batch; expected rows with a batch axis.")
        axis = 1 if self.batch_first else 0  # of places
        rows = (given if self.batch_first else given.transpose(0, 1) for given in (query, key, value))
        heads = [self.by_head(getattr(self, name)(given)) for name, given in zip(INPUTS, rows, strict=True)]
        mask = self.mask(key_padding_mask, attn_mask, heads[0])
        if need_weights:
            scores = heads[0] @ heads[1].transpose(-1, -2) * self.head_dim**-0.5
            weights = (scores if mask is None else scores + mask).softmax(-1)
            mixed = self.drop_out(weights) @ heads[2]
        else:
            share = self.dropout if self.training else 0.0
            attend = nn.functional.scaled_dot_product_attention
            mixed = attend(heads[0], heads[1], heads[2], attn_mask=mask, dropout_p=share)
        mixed = self.add_to(mixed, heads[0])
        outputs: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(-2))
        outputs = outputs if axis == 1 else outputs.transpose(0, 1)
        return outputs, (weights.mean(1) if average_attn_weights else weights) if need_weights else None

    def add_to(self, mixed: Tensor, queries: Tensor) -> Tensor:
        """What goes to the last projection ``[B, heads, L, width]``: what attention has mixed, and nothing else."""
        return mixed

    def by_head(self, projected: Tensor) -> Tensor:
        """``[..., L, heads x width]`` as ``[..., heads, L, width]``."""
        return projected.reshape(*projected.shape[:-1], self.num_heads, self.head_dim).transpose(-2, -3)

    def drop_out(self, weights: Tensor) -> Tensor:
        """Weights of which a share is left out in training."""
        return nn.functional.dropout(weights, self.dropout, self.training)

    def mask(self, padding: Tensor | None, given: Tensor | None, like: Tensor) -> Tensor | None:
        """What is added to scores ``[B, heads, L, S]``; none where nothing is."""
        parts = []
        if padding is not None:
            parts.append(as_addend(padding, like)[:, None, None, :])
        if given is not None:
            added = as_addend(given, like)
            parts.append(added if added.dim() == 2 else added.reshape(-1, self.num_heads, *added.shape[1:]))
        return sum(parts[1:], parts[0]) if parts else None

    def merge(self) -> nn.MultiheadAttention:
        """Plain attention that answers the same."""
        weight, bias = self.in_proj_weight.detach(), self.in_proj_bias
        plain = nn.MultiheadAttention(
            self.embed_dim, self.num_heads, self.dropout, bias is not None, batch_first=self.batch_first,
            device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        pairs = [(plain.in_proj_weight, weight), (plain.out_proj.weight, self.out_proj.weight)]
        if bias is not None:
            pairs += [(plain.in_proj_bias, bias), (plain.out_proj.bias, self.out_proj.bias)]
        with torch.no_grad():
            for own, found in pairs:
                own.copy_(found)
        return plain.train(self.training)


def as_addend(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers that are added to scores: true is where nothing may be looked at."""
    return like.new_zeros(mask.shape).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask.to(like)


def split_projections(base: nn.MultiheadAttention) -> list[nn.Linear]:
    """Frozen linear layers that share the memory of the attention's projections."""
    weight, bias = base.in_proj_weight.detach(), base.in_proj_bias
    biases = [None] * len(INPUTS) if bias is None else [*bias.detach().chunk(len(INPUTS))]
    out = base.out_proj
    given = zip((*weight.chunk(len(INPUTS)), out.weight.detach()), (*biases, out.bias), strict=True)
    return [frozen_linear(part, None if own is None else own.detach()) for part, own in given]


def frozen_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer of these very numbers, which are not trained."""
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def check_attention(name: str, part: nn.MultiheadAttention) -> None:
    """Refuse attention that has more than four projections of one width."""
    if not part._qkv_same_embed_dim or part.bias_k is not None or part.add_zero_attn:
        raise ConfigError(
            f"{name} is attention with keys or values of another width, or added to them (kdim, vdim, add_bias_kv, "
            "add_zero_attn), which cannot be adapted; expected plain attention. Choose other targets."
        )
