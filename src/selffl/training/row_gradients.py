"""Gradients of single rows, each shortened: what one row can move a client's step by is bounded (DP-SGD).

Abadi et al., Deep Learning with Differential Privacy, CCS 2016, Algorithm 1.  A row is computed as a client that has
the same model and a minibatch of one, so that every way to gradients (`selffl.training.blocks`) is one to these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from selffl.budget import budget_of
from selffl.data.named import map_entries
from selffl.errors import ConfigError
from selffl.randomness import random_bits
from selffl.training.blocks import Gradient
from selffl.training.flat import FlatModel


class DrawnRows(NamedTuple):
    """A minibatch whose rows are told apart."""

    rows: tuple[Any, ...]  # features [n, B, ...], labels [n, B], where there is dropout keys of masks [n, 1]
    is_there: Tensor  # [n, B]: clients with fewer rows than B have some places empty
    draw: int


def check_rows_apart(model: FlatModel, row_clip: float | None) -> None:
    """Refuse a model in which rows of a minibatch have no gradients of their own, where these are to be bounded."""
    if row_clip is not None and (model.num_statistics or model.mixes_rows):
        raise ConfigError(
            f"row_clip is {row_clip:g}, and {type(model.module).__name__} normalises by batches, whose statistics no "
            "noise hides; expected a model without BatchNorm. Use GroupNorm in its place, or put it into eval() mode."
        )


def clipped_mean(gradient: Gradient, params: Tensor, batch: DrawnRows, most: float) -> Tensor:
    """The mean over each client's rows of their gradients at ``params [n, P]``, none longer than ``most``: ``[n, P]``.

    As many clients at once as there is room for gradients of single rows.
    """
    width = batch.is_there.shape[1]
    at_once = max(budget_of(params.device).gradient_numbers // (width * params.shape[1]), 1)
    found = torch.empty_like(params)
    for start in range(0, len(params), at_once):
        part = slice(start, start + at_once)
        is_there = batch.is_there[part]
        (features, labels), keys = batch.rows[:2], batch.rows[2:]
        own = params[part].repeat_interleave(width, 0)
        rows = map_entries(lambda entry, part=part: entry[part].flatten(0, 1).unsqueeze(1), features)  # type: ignore[misc]
        masks = [random_bits(key[part], "row", torch.arange(width, device=own.device)).reshape(-1, 1) for key in keys]
        each = gradient(own, rows, labels[part].flatten(0, 1).unsqueeze(1), *masks)
        length = torch.linalg.vector_norm(each, dim=-1)
        share = (most / length.clamp(min=most)).view_as(is_there) * is_there
        total = torch.bmm(share.to(each).unsqueeze(1), each.view(*is_there.shape, -1)).squeeze(1)
        found[part] = total / is_there.sum(-1, keepdim=True)
    return found
