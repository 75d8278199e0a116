"""Convolutions as products of matrices.

Under vmap, a convolution with other weights for every client is a grouped convolution, which cuDNN runs badly for many
groups; a product of matrices becomes one batched product.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn


def unfold_convolutions(module: nn.Module) -> None:
    """Have the module's plain two-dimensional convolutions computed by `convolve`; the function is the same."""
    for part in module.modules():
        # Padding by name ("same") may pad one side more than the other: left as it is, as are groups.
        if type(part) is nn.Conv2d and part.groups == 1 and part.padding_mode == "zeros" and part.padding != "same":
            part.forward = partial(convolve, part)  # type: ignore[method-assign]


def convolve(layer: nn.Conv2d, images: Tensor) -> Tensor:
    """What ``layer`` makes of ``images [B, C, H, W]``: weights [O, C k k] times all patches [C k k, B h w]."""
    if images.ndim == 3:
        return convolve(layer, images.unsqueeze(0)).squeeze(0)
    pad_y, pad_x = (0, 0) if layer.padding == "valid" else map(int, layer.padding)
    images = nn.functional.pad(images, (pad_x, pad_x, pad_y, pad_y)) if pad_x or pad_y else images
    # Shifted copies, first by row and then by column.  F.unfold launches a kernel per image, and the slope of
    # Tensor.unfold has none for many clients.
    down, across = (
        _taps(length, *sizes)
        for length, *sizes in zip(images.shape[2:], layer.kernel_size, layer.stride, layer.dilation, strict=True)
    )
    patches = torch.stack([images.transpose(0, 1)[:, :, taps] for taps in down], dim=1)  # [C, k, B, h, W]
    patches = torch.stack([patches[..., taps] for taps in across], dim=2)  # [C, k, k, B, h, w]
    num_images, height, width = patches.shape[3:]
    columns = patches.reshape(layer.weight[0].numel(), -1)
    weight = layer.weight.flatten(1)
    flat = weight @ columns if layer.bias is None else torch.addmm(layer.bias.unsqueeze(-1), weight, columns)
    return flat.view(-1, num_images, height, width).transpose(0, 1)


def _taps(length: int, size: int, stride: int, dilation: int) -> list[slice]:
    """What each of the ``size`` taps of a kernel meets along a side of that length."""
    last = stride * ((length - dilation * (size - 1) - 1) // stride)
    return [slice(dilation * tap, dilation * tap + last + 1, stride) for tap in range(size)]
