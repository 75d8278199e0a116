"""Images that differ a little each time a client trains on them: shifted, and mirrored.

What becomes of an image follows from keys (seed, round, client, minibatch, place in it), as which images there are
does: the same on every engine, in blocks of any size, after a resume and over a network.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selffl.algorithms.training_options import augmentations_of
from selffl.data.named import Features
from selffl.errors import ConfigError
from selffl.randomness import integers

PADDING = 4  # pixels on each side of an image, of value 0, before it is cropped to its size


def check_images(augmentation: str, features: Features) -> None:
    """Refuse rows that cannot be shifted or mirrored: features ``[rows, ...]``."""
    if not augmentations_of(augmentation):
        return
    if not isinstance(features, Tensor):
        raise ConfigError(
            f"augmentation is {augmentation!r}, and rows are a dictionary of {', '.join(features.keys())}; expected "
            "one tensor of images. Leave it out, and change images in the module."
        )
    shape = tuple(features.shape[1:])
    if len(shape) != 3 or min(shape[1:]) <= PADDING:
        raise ConfigError(
            f"augmentation is {augmentation!r}, and rows have shape {shape}; expected images [channels, height, width] "
            f"of more than {PADDING} pixels each way. Give rows that shape, or leave it out."
        )


def draw_moves(
    augmentation: str, size: int, seed: int, stream: str, round_number: int, keys: Tensor, draws: Tensor
) -> Tensor:
    """How images are moved: ``[n, draws, B, 3]`` for ``size`` = B images of each minibatch of clients ``keys [n]``.

    The three are whether an image is mirrored, and by how many pixels it goes up and left.
    """
    kinds = augmentations_of(augmentation)
    image = keys[:, None, None], draws[:, None], torch.arange(size, device=keys.device)

    def number(high: int, kind: str, *which: int) -> Tensor:
        """A number from 0 to high − 1 for each image."""
        if kind not in kinds:
            return torch.full((len(keys), len(draws), size), (high - 1) // 2, device=keys.device)
        return integers(high, seed, f"{stream} {kind}", round_number, *image, *which)

    up, left = (number(2 * PADDING + 1, "crop", axis) - PADDING for axis in (0, 1))
    return torch.stack([number(2, "flip"), up, left], dim=-1)


def augment(features: Tensor, moves: Tensor) -> Tensor:
    """Images ``[n, B, C, H, W]``, each moved by its own ``moves [n, B, 3]``."""
    images, moved = features.flatten(0, 1), moves.flatten(0, 1)
    height, width = images.shape[2:]
    down, across = (torch.arange(side, device=images.device) for side in (height, width))
    is_mirrored, up, left = moved[:, :, None].unbind(1)  # each [n B, 1]
    # Where each row and column of an image comes from: mirrored last, and so looked up first.
    rows, columns = down + up, torch.where(is_mirrored == 1, width - 1 - across, across) + left
    found = images.gather(2, rows.clamp(0, height - 1)[:, None, :, None].expand_as(images))
    found = found.gather(3, columns.clamp(0, width - 1)[:, None, None, :].expand_as(images))
    is_padding = ((rows < 0) | (rows >= height))[:, None, :, None] | ((columns < 0) | (columns >= width))[:, None, None]
    return found.masked_fill_(is_padding, 0).view_as(features)
