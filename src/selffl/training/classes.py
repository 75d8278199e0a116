"""Rows of each class, for losses that are the log-likelihood of one."""

from __future__ import annotations

import torch
from torch import Tensor

from selffl.data.federation import Rows
from selffl.training.blocks import Loss
from selffl.training.flat import FlatModel
from selffl.training.losses import is_cross_entropy, is_logistic


def class_counts(model: FlatModel, loss: Loss, rows: Rows, clients: Tensor, num_classes: int) -> Tensor:
    """Rows of each class that ``clients [C]`` have, ``[C, K]``; none where rows have no class, or scores no bias.

    Classes are what the model's outputs are the log-odds of: of several, one each, or of two, one for both.  A loss
    that weighs classes is taken at its word: they are then to be as frequent as it says, not as they are.
    """
    none = torch.zeros(len(clients), num_classes, device=rows.offset.device)
    if model.class_bias is None or num_classes != model.class_bias.num_classes:
        return none
    is_one = model.class_bias.stop - model.class_bias.start == 1
    wanted = is_logistic(loss) if is_one else is_cross_entropy(loss)
    is_weighted = any(getattr(loss, name, None) is not None for name in ("weight", "pos_weight"))
    if not wanted or is_weighted or not len(rows.labels) or not model.adds_bias(rows.features[:1]):
        return none
    size = rows.num_examples[clients]
    owner = torch.arange(len(clients), device=size.device).repeat_interleave(size)
    index = torch.arange(len(owner), device=size.device) - (size.cumsum(0) - size)[owner]
    labels = rows.labels[rows.offset[clients][owner] + index]
    if is_one and labels.numel() == len(owner):
        share = labels.reshape(-1).to(none).clamp(0.0, 1.0)  # a soft label is a part of a row of each
        return none.index_add(0, owner, torch.stack([1.0 - share, share], dim=-1))
    if is_one or labels.ndim != 1 or labels.is_floating_point():
        return none
    is_class = (labels >= 0) & (labels < num_classes)  # others are rows that the loss ignores
    flat = owner[is_class] * num_classes + labels[is_class].to(owner)
    return torch.bincount(flat, minlength=none.numel()).reshape(none.shape).to(none)
