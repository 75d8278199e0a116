"""The models of the studies, by name: plain torch modules, made the same from the same seed wherever they are made."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from selffl.data.split import check_seed
from selffl.errors import ConfigError, check_known
from selffl.models.audio import wakeword_cnn
from selffl.models.scaling import Standardise
from selffl.models.select import Select
from selffl.models.text import lstm
from selffl.randomness import draw_network


def softmax(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Softmax regression: one linear layer on rows that are flat, or are made so; it starts at 0, without opinion."""
    linear = nn.Linear(math.prod(shape), num_classes)
    for part in linear.parameters():
        nn.init.zeros_(part)
    # A bare nn.Linear has its gradients in closed form; a Sequential has not.
    return linear if len(shape) == 1 else nn.Sequential(nn.Flatten(), linear)


def mlp(shape: tuple[int, ...], num_classes: int, hidden: int = 64) -> nn.Module:
    """A network with one hidden layer of rectified units, on rows that are flat, or are made so."""
    first = nn.Linear(math.prod(shape), hidden)
    layers = [first, nn.ReLU(), nn.Linear(hidden, num_classes)]
    return nn.Sequential(*layers) if len(shape) == 1 else nn.Sequential(nn.Flatten(), *layers)


def cnn(
    shape: tuple[int, ...], num_classes: int, channels: Sequence[int] = (6, 16), hidden: Sequence[int] = (120, 84)
) -> nn.Module:
    """The network of the PyTorch CIFAR-10 tutorial: two convolutions, three linear layers.

    62,006 parameters for 10 classes of 3 × 32 × 32 images; other images from 16 × 16 up will do.  ``channels`` are
    those of the convolutions, ``hidden`` the units of the linear layers before the last.
    """
    if len(shape) != 3 or min(shape[1:]) < 16:
        raise ConfigError(f"rows have shape {shape}; expected images (channels, height, width) from 16 × 16 up.")
    if len(channels) != 2 or not hidden or min(*channels, *hidden) < 1:
        raise ConfigError(f"channels is {channels} and hidden {hidden}; expected two numbers and one or more, above 0.")
    _, height, width = shape
    # A 5 × 5 convolution takes off 4, pooling halves.
    left = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
    first, second = channels
    widths = [second * left[0] * left[1], *hidden]
    return nn.Sequential(
        nn.Conv2d(shape[0], first, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        *(layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())),
        nn.Linear(widths[-1], num_classes),
    )  # fmt: skip


MODELS: dict[str, Callable[..., nn.Module]] = {
    "softmax": softmax,
    "mlp": mlp,
    "cnn": cnn,
    "lstm": lstm,
    "wakeword": wakeword_cnn,
}


def build(name: str, shape: int | Sequence[int], num_classes: int, seed: int = 0, **options: Any) -> nn.Module:
    """The model of that name for rows of that shape, initial parameters drawn from ``seed`` where it draws any.

    The global random state is neither used nor moved.  Some models have options: ``hidden`` of ``mlp`` and
    ``lstm``, ``channels`` and ``hidden`` of ``cnn``, ``width`` of ``wakeword``.

    Examples:
        >>> from selffl.models import build
        >>> sum(part.numel() for part in build("cnn", (3, 32, 32), 10).parameters())
        62006
        >>> build("softmax", 784, 10)
        Linear(in_features=784, out_features=10, bias=True)
    """
    check_known("model", name, MODELS)
    known = list(inspect.signature(MODELS[name]).parameters)[2:]
    if options and not known:
        raise ConfigError(f"model {name} has no options; expected none, found {', '.join(options)}.")
    for option in options:
        check_known(f"option of model {name}", option, known)
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"rows have shape {sizes}; expected sizes of 1 or more.")
    if num_classes < 2:
        raise ConfigError(f"num_classes is {num_classes}; expected 2 or more.")
    check_seed(seed)
    return draw_network(lambda: MODELS[name](sizes, num_classes, **options), seed)


__all__ = ["MODELS", "Select", "Standardise", "build"]
