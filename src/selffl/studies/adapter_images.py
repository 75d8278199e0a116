"""Pictures of CIFAR-10 over clients with cameras of their own, and a small residual network that was trained on others.

Half of the pictures train the network, by plain PyTorch; clients are cut from the other half.  Their classes follow a
Dirichlet distribution, their sizes are lognormal, and contrast, offset and noise of their pictures are their own.

Clients adapt the last block and the head.  What comes before stays frozen, and its states are therefore a client's
rows, computed once.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from selffl.data import cifar10
from selffl.data.partition import Labels
from selffl.data.regimes import Floats, Kind, Pictures, cut
from selffl.randomness import draw_network
from selffl.studies.adapter_rows import HEAD, Benchmark, Rows, pretrain

WIDTHS, NUM_GROUPS = (16, 32, 64), 4  # channels after each halving of the sides, and groups of GroupNorm
CAMERAS = Kind("classes by Dirichlet 0.5, a camera of their own", 0.5, is_shifted=True)
PLAN = Pictures(num_clients=40, mean_rows=120, num_tiny=0, num_held=0)
SMALL_PLAN = Pictures(num_clients=10, mean_rows=40, num_tiny=0, num_held=0)
TEST_SHARE = 0.5
NUM_STEPS, BATCH_SIZE, RATE = 1200, 128, 4e-3  # of training before


class Block(nn.Module):
    """Two convolutions beside one that goes straight to their output; sides are halved."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride=2, padding=1)
        self.first_norm = nn.GroupNorm(NUM_GROUPS, after)
        self.second = nn.Conv2d(after, after, 3, padding=1)
        self.second_norm = nn.GroupNorm(NUM_GROUPS, after)
        self.straight = nn.Conv2d(before, after, 1, stride=2)

    def forward(self, pictures: Tensor) -> Tensor:
        """Pictures of half the sides."""
        inner = torch.relu(self.first_norm(self.first(pictures)))
        return torch.relu(self.second_norm(self.second(inner)) + self.straight(pictures))


class PictureNetwork(nn.Sequential):
    """A residual network with GroupNorm, of about 80,000 weights."""

    def __init__(self, widths: tuple[int, ...] = WIDTHS, num_classes: int = 10) -> None:
        super().__init__()
        self.add_module("stem", nn.Conv2d(3, widths[0], 3, stride=2, padding=1))
        self.add_module("norm", nn.GroupNorm(NUM_GROUPS, widths[0]))
        self.add_module("relu", nn.ReLU())
        for number, (before, after) in enumerate(pairwise(widths)):
            self.add_module(f"block{number}", Block(before, after))
        self.add_module("mean", nn.AdaptiveAvgPool2d(1))
        self.add_module("flat", nn.Flatten())
        self.add_module(HEAD, nn.Linear(widths[-1], num_classes))

    def cut(self) -> tuple[nn.Sequential, nn.Sequential]:
        """What comes before the last block, and the rest."""
        parts = list(self.named_children())
        place = max(number for number, (_, part) in enumerate(parts) if isinstance(part, Block))
        return nn.Sequential(OrderedDict(parts[:place])), nn.Sequential(OrderedDict(parts[place:]))


@lru_cache(maxsize=1)
def halves() -> tuple[tuple[Floats, Labels], tuple[Floats, Labels]]:
    """Pictures that the network is trained on before, and those for clients: from -1 to 1, with what they show."""
    images, labels = cifar10.images_and_labels()
    order = np.random.default_rng(0).permutation(len(labels))
    first, second = (
        (images[part].astype(np.float32) / 127.5 - 1.0, labels[part].astype(np.int64))
        for part in np.array_split(order, 2)
    )
    return first, second


@lru_cache(maxsize=2)
def train_network(is_small: bool = False) -> PictureNetwork:
    """The residual network, trained on the other half of the pictures."""
    features, labels = halves()[0]
    found = draw_network(lambda: PictureNetwork((4, 8, 8) if is_small else WIDTHS))
    num_steps = NUM_STEPS // 20 if is_small else NUM_STEPS
    return pretrain(found, torch.from_numpy(features), torch.from_numpy(labels), num_steps, BATCH_SIZE, RATE)


def network(is_small: bool = False) -> nn.Module:
    """The residual network's last block and head, which clients adapt."""
    return train_network(is_small).cut()[1]


@lru_cache(maxsize=2)  # seeds follow each other
def rows(seed: int, is_small: bool = False) -> Rows:
    """Clients of a seed, their pictures as the last block is given them."""
    rng = np.random.default_rng([seed, *b"cameras"])
    found = Rows(*cut(CAMERAS, SMALL_PLAN if is_small else PLAN, "lognormal", *halves()[1], rng))
    frozen, _ = train_network(is_small).cut()
    with torch.no_grad():
        states = torch.cat([frozen(part) for part in torch.split(torch.from_numpy(found.features), 256)])
    return found._replace(features=states.numpy())


IMAGES = Benchmark(rows, network, TEST_SHARE)
