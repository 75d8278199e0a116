"""Losses by name, which of them follows from labels and outputs, and which cannot fit them.

Where no loss is given, one follows: cross-entropy for classes, the logistic loss for two classes and a single output,
the squared error for values.
"""

from __future__ import annotations

from torch import Tensor, nn

from selffl.errors import ConfigError
from selffl.training.blocks import Loss

SUM_TOLERANCE = 1e-3  # of 1, the sum of class probabilities


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Mean squared error, whether a row's one output has an axis of its own or not."""
    return nn.functional.mse_loss(outputs.reshape(labels.shape), labels)


def logistic_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy of one logit per row, for labels 0 and 1 of whichever type."""
    return nn.functional.binary_cross_entropy_with_logits(outputs.reshape(labels.shape), labels.to(outputs.dtype))


def count_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Poisson's loss of counts, of which the outputs are the logarithms of the expected ones."""
    return nn.functional.poisson_nll_loss(outputs.reshape(labels.shape), labels)


OWN_LOSSES: dict[str, Loss] = {"squared_error": squared_error, "logistic_loss": logistic_loss, "count_loss": count_loss}
_ENDINGS = ("_loss", "cross_entropy", "_with_logits")
NAMES = tuple(sorted([*OWN_LOSSES, *(name for name in dir(nn.functional) if name.endswith(_ENDINGS))]))


def loss_named(name: str) -> Loss:
    """The loss of that name: selffl's own, or a function of torch.nn.functional; AttributeError if there is none."""
    loss: Loss = OWN_LOSSES[name] if name in OWN_LOSSES else getattr(nn.functional, name)
    return loss


def name_of(loss: Loss) -> str | None:
    """The name by which `loss_named` finds a loss again; none for one of the user's own."""
    name = getattr(loss, "__name__", None) or "?"
    return name if OWN_LOSSES.get(name, getattr(nn.functional, name, None)) is loss else None


# --------------------------------------------------------------------------------------------------------------- kinds


def is_loss(loss: Loss, function: Loss, kind: type[nn.Module]) -> bool:
    """Whether a loss is this one of torch's, as a function or as a module."""
    return loss is function or isinstance(loss, kind)


def is_cross_entropy(loss: Loss) -> bool:
    """Whether a loss is the cross-entropy of logits, one per class."""
    return is_loss(loss, nn.functional.cross_entropy, nn.CrossEntropyLoss)


def is_logistic(loss: Loss) -> bool:
    """Whether a loss is the binary cross-entropy of a logit."""
    return loss is logistic_loss or is_loss(loss, nn.functional.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss)


def is_squared_error(loss: Loss) -> bool:
    """Whether a loss is the mean squared error."""
    return loss is squared_error or is_loss(loss, nn.functional.mse_loss, nn.MSELoss)


def is_absolute_error(loss: Loss) -> bool:
    """Whether a loss is the mean absolute error."""
    return is_loss(loss, nn.functional.l1_loss, nn.L1Loss)


def is_of_log_rates(loss: Loss) -> bool:
    """Whether a loss is that of counts, of which the outputs are the logarithms of the rates."""
    is_poisson = loss is count_loss or is_loss(loss, nn.functional.poisson_nll_loss, nn.PoissonNLLLoss)
    return is_poisson and getattr(loss, "log_input", True)


def is_scale_equivariant(loss: Loss) -> bool:
    """Whether labels and outputs in another unit have the same loss but for a factor, so that labels can be scaled.

    True of the squared and of the absolute error, as means; of other losses nothing is claimed.
    """
    return (is_squared_error(loss) or is_absolute_error(loss)) and getattr(loss, "reduction", "mean") == "mean"


def _compares_values(loss: Loss) -> bool:
    """Whether a loss of torch's compares each output with the label in the same place."""
    functional = nn.functional
    return (
        (is_squared_error(loss) and loss is not squared_error)
        or is_absolute_error(loss)
        or is_loss(loss, functional.smooth_l1_loss, nn.SmoothL1Loss)
        or is_loss(loss, functional.huber_loss, nn.HuberLoss)
        or is_loss(loss, functional.poisson_nll_loss, nn.PoissonNLLLoss)
    )


# ------------------------------------------------------------------------------------------------ what follows and fits


def default_loss(outputs: Tensor, labels: Tensor) -> Loss:
    """The loss that follows from a module's outputs for a few rows, and from all labels.

    Whole numbers with several outputs are classes (cross-entropy); zeros and ones with a single output two classes
    (`logistic_loss`); floating-point labels of the outputs' shape values (`squared_error`).  Anything else is refused.

    Examples:
        >>> import torch
        >>> from selffl.training.losses import default_loss
        >>> default_loss(torch.zeros(2, 3), torch.tensor([0, 2, 1])).__name__
        'cross_entropy'
        >>> default_loss(torch.zeros(2, 1), torch.tensor([0.5, -2.0, 1.5])).__name__
        'squared_error'
    """
    is_single = _is_single(outputs, labels)
    if labels.is_floating_point():
        if is_single or outputs.shape[1:] == labels.shape[1:]:
            return squared_error
    elif outputs.ndim > 1 and outputs.shape[1] > 1 and outputs.shape[2:] == labels.shape[1:]:
        return nn.functional.cross_entropy
    elif is_single and bool(((labels == 0) | (labels == 1)).all()):
        return logistic_loss
    raise ConfigError(
        f"no loss follows from {_describe(outputs, labels)}; expected whole numbers and one output for each class, "
        "labels 0 and 1 and one output, or floating-point labels of the outputs' shape. Change labels or model, or "
        "pass loss=, such as torch.nn.functional.poisson_nll_loss for counts."
    )


def check_fit(loss: Loss, outputs: Tensor, labels: Tensor) -> None:
    """Refuse a loss of torch's that computes something else than is meant, of outputs for a few rows and all labels."""
    task, name = _describe(outputs, labels), getattr(loss, "__name__", type(loss).__name__)
    is_float = labels.is_floating_point()
    if is_cross_entropy(loss):
        if outputs.ndim < 2 or outputs.shape[1] < 2:
            raise ConfigError(
                f"{name} cannot fit {task}: it needs one output for each class. Give the model more outputs, or leave "
                "loss out, and it follows from the labels."
            )
        if is_float and (labels.shape[1:] != outputs.shape[1:] or not _are_probabilities(labels)):
            raise ConfigError(
                f"{name} cannot fit {task}: it needs whole numbers, or probabilities of the outputs' shape. Cast "
                "labels of classes to whole numbers; for values leave loss out, or pass torch.nn.functional.mse_loss."
            )
    if not _compares_values(loss):
        return
    if not is_float and labels.ndim == 1 and outputs.ndim > 1 and outputs[0].numel() > 1:
        raise ConfigError(
            f"{name} cannot fit {task}: it needs labels of the outputs' shape. For classes leave loss out, or pass "
            "torch.nn.functional.cross_entropy."
        )
    if outputs.shape[1:] != labels.shape[1:]:
        raise ConfigError(
            f"{name} cannot fit {task}: it would compare each row's output with other rows' labels; expected the same "
            "shape of both. Give the model a squeeze(-1), or the labels a last axis of 1; or leave loss out."
        )


def _is_single(outputs: Tensor, labels: Tensor) -> bool:
    """Whether a row has one output and one label."""
    return outputs.numel() == len(outputs) and labels.numel() == len(labels)


def _are_probabilities(labels: Tensor) -> bool:
    """Whether rows ``[n, K, ...]`` are shares of K classes that add up to 1."""
    return bool((labels >= 0).all() and ((labels.sum(1) - 1.0).abs() <= SUM_TOLERANCE).all())


def _describe(outputs: Tensor, labels: Tensor) -> str:
    """What labels and outputs are, for a message."""
    kind = str(labels.dtype).removeprefix("torch.")
    span = f"from {labels.min().item():g} to {labels.max().item():g}"
    each = [f"shape {tuple(part.shape[1:])}" if part.ndim > 1 else "one number" for part in (labels, outputs)]
    return f"labels of type {kind} {span}, {each[0]} per row, and outputs of {each[1]} per row"
