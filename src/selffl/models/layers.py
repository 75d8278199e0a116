"""Modules made of torch's own layers as plain data, so that a file can say how to build them and hold no code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from selffl.errors import CheckpointError

_WINDOW = ("kernel_size", "stride", "padding")
_BATCH_NORM = ("num_features", "eps", "momentum", "affine", "track_running_stats")
_MAY_LACK_BIAS = ("Linear", "Conv2d", "LayerNorm")

# By name, what each is made with; nothing that runs code of a user's own.
LAYERS: dict[str, tuple[type[nn.Module], tuple[str, ...]]] = {
    "Linear": (nn.Linear, ("in_features", "out_features")),
    "Conv2d": (nn.Conv2d, ("in_channels", "out_channels", *_WINDOW, "dilation", "groups", "padding_mode")),
    "MaxPool2d": (nn.MaxPool2d, (*_WINDOW, "dilation", "ceil_mode")),
    "AvgPool2d": (nn.AvgPool2d, (*_WINDOW, "ceil_mode", "count_include_pad")),
    "Flatten": (nn.Flatten, ("start_dim", "end_dim")),
    "BatchNorm1d": (nn.BatchNorm1d, _BATCH_NORM),
    "BatchNorm2d": (nn.BatchNorm2d, _BATCH_NORM),
    "GroupNorm": (nn.GroupNorm, ("num_groups", "num_channels", "eps", "affine")),
    "LayerNorm": (nn.LayerNorm, ("normalized_shape", "eps", "elementwise_affine")),
    "Dropout": (nn.Dropout, ("p",)),
    "GELU": (nn.GELU, ("approximate",)),
    "Identity": (nn.Identity, ()),
    "ReLU": (nn.ReLU, ()),
    "SiLU": (nn.SiLU, ()),
    "Sigmoid": (nn.Sigmoid, ()),
    "Tanh": (nn.Tanh, ()),
}


def describe_layers(module: nn.Module) -> dict[str, Any] | None:
    """A module as JSON has it, if torch's own layers are all it is made of; else none.

    Examples:
        >>> describe_layers(nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)))["kind"]
        'Sequential'
        >>> describe_layers(nn.LSTM(3, 1)) is None
        True
    """
    is_changed = "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks
    if is_changed or len([*module.parameters()]) < len([*module.named_parameters(remove_duplicate=False)]):
        return None  # another function than the layers', or layers that share what they learn
    if type(module) is nn.Sequential:
        parts = {name: describe_layers(part) for name, part in module._modules.items() if part is not None}
        return None if None in parts.values() else {"kind": "Sequential", "parts": list(parts.items())}
    kind = type(module).__name__
    known, names = LAYERS.get(kind, (None, ()))
    if type(module) is not known:
        return None
    options = {name: getattr(module, name) for name in names}
    return {"kind": kind, **options, **({"bias": module.bias is not None} if kind in _MAY_LACK_BIAS else {})}


def build_layers(description: Any) -> nn.Module:
    """What `describe_layers` has described, without values: on the meta device, which makes no room for them.

    A description of somebody else's may ask for any size.  Room is made once tensors of that size are there.
    """
    try:
        options = dict(description)
        kind = options.pop("kind")
        if kind == "Sequential":
            parts: Sequence[tuple[str, Any]] = options["parts"]
            module = nn.Sequential()
            for name, part in parts:
                module.add_module(name, build_layers(part))
            return module
        with torch.device("meta"):
            return LAYERS[kind][0](**{key: tuple(v) if isinstance(v, list) else v for key, v in options.items()})
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise CheckpointError("the description of the model names no layers that are known; export it again.") from None
