"""A network for wake words: 11 convolutions and max-poolings, about three million parameters, as the paper has it.

The paper says no more of its own than that.  Here most parameters lie in the last layers, whose maps are small: a row
takes 23 million multiplications.  There is no batch normalisation, whose statistics no method here would average.
"""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from selffl.errors import ConfigError

CHANNELS = (16, 32, 64, 128, 192, 336, 672)  # after each convolution
NUM_POOLINGS = 4  # poolings, one after each of the first convolutions
MIN_SHAPE = (16, 48)  # bands, frames: less, and nothing is left to convolve


def wakeword_cnn(shape: tuple[int, ...], num_classes: int, width: float = 1.0) -> nn.Module:
    """Seven 3 × 3 convolutions, the first four with a max-pooling after them, and a linear layer.

    2,937,650 parameters for 2 classes of 1 × 40 × 76 spectrograms.

    Args:
        shape: of a row: channels, bands, frames.
        num_classes: of the labels.
        width: number of channels of every layer, relative to the full network's.
    """
    if len(shape) != 3 or shape[1] < MIN_SHAPE[0] or shape[2] < MIN_SHAPE[1]:
        raise ConfigError(
            f"rows have shape {shape}; expected spectrograms (channels, bands, frames) from {MIN_SHAPE[0]} × "
            f"{MIN_SHAPE[1]} up."
        )
    if not isinstance(width, int | float) or not 0 < width < float("inf"):
        raise ConfigError(f"width is {width!r}; expected a number above 0, 1 for the full network.")
    channels = [shape[0], *(max(1, round(width * number)) for number in CHANNELS)]
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(pairwise(channels)):
        # The sixth does not pad the time: half the positions for the layers with the most parameters.
        padding = (1, 0) if number == NUM_POOLINGS + 1 else (1, 1)
        layers += [nn.Conv2d(before, after, 3, padding=padding), nn.ReLU()]
        if number < NUM_POOLINGS:
            layers.append(nn.MaxPool2d(2))
    bands, frames = shape[1] >> NUM_POOLINGS, (shape[2] >> NUM_POOLINGS) - 2
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1] * bands * frames, num_classes))
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            # He et al. 2015: with PyTorch's own, smaller start, seven layers hardly pass anything on.
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu" if isinstance(layer, nn.Conv2d) else "linear")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model
