"""Rows and their classes, for losses that are the log-likelihood of one."""

from __future__ import annotations

import torch
from torch import Tensor

from selffl.data.named import Features
from selffl.training.blocks import Loss
from selffl.training.flat import FlatModel
from selffl.training.losses import is_cross_entropy, is_logistic


def has_classes(model: FlatModel, loss: Loss, features: Features, labels: Tensor) -> bool:
    """Whether the ``labels [n, ...]`` of rows are classes whose scores the model adds a bias to.

    Classes are what the model's outputs are the log-odds of: of several, one each, or of two, one for both.  A loss
    that weighs classes is taken at its word: they are then to be as frequent as it says, not as they are.  One that
    smooths labels gives each row a little of every class, also of those that a client lacks.
    """
    if model.class_bias is None or not len(labels):
        return False
    is_right = is_logistic(loss) if model.class_bias.is_single else is_cross_entropy(loss)
    is_weighted = any(getattr(loss, name, None) is not None for name in ("weight", "pos_weight"))
    is_smoothed = bool(getattr(loss, "label_smoothing", 0.0))
    if not is_right or is_weighted or is_smoothed or not model.has_scores(features[:1]):
        return False
    if model.class_bias.is_single:
        return labels.numel() == len(labels)
    return labels.ndim == 1 and not labels.is_floating_point()


def class_counts(model: FlatModel, labels: Tensor, owner: Tensor, number: int) -> Tensor:
    """Rows of each class ``[number, K]``, of ``labels [n, ...]`` of classes whose ``owner [n]`` is one of so many.

    A soft label of two classes is a part of a row of each.  A label that is no class is one that the loss ignores.
    """
    assert model.class_bias is not None
    num_classes = model.class_bias.num_classes
    none = torch.zeros(number, num_classes, device=labels.device)
    if model.class_bias.is_single:
        return none.index_add(0, owner, class_targets(model, labels).to(none))
    is_class = (labels >= 0) & (labels < num_classes)
    flat = owner[is_class] * num_classes + labels[is_class].to(owner)
    return torch.bincount(flat, minlength=none.numel()).reshape(none.shape).to(none)


def class_targets(model: FlatModel, labels: Tensor) -> Tensor:
    """1 for the class of each row, parts of it where labels are soft: ``[n, K]`` of ``labels [n, ...]``."""
    assert model.class_bias is not None
    if model.class_bias.is_single:
        share = labels.reshape(-1).to(model.dtype).clamp(0.0, 1.0)
        return torch.stack([1.0 - share, share], dim=-1)
    classes = torch.arange(model.class_bias.num_classes, device=labels.device)
    return (labels.unsqueeze(-1) == classes).to(model.dtype)
