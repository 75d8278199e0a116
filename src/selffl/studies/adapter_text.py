"""Rated snippets of reviews and opinion pieces, and a small transformer on their bytes that was trained on others.

Half of the authors, and the tweets and movie reviews that nobody is known to have written, train the network by plain
PyTorch on whether a rating is above 0: by half of the authors alone, 2,870 rows, it learns nothing that helps the
others.  Clients are the other half of the authors.

They adapt the last layer and the head.  What comes before stays frozen, and its states are therefore a client's rows,
computed once.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from selffl.data.sentiment import WITH_AUTHOR, WITHOUT_AUTHOR, files, read_snippets
from selffl.randomness import draw_network
from selffl.studies.adapter_rows import Benchmark, Rows, of_some_clients, pretrain

NUM_BYTES, NUM_AROUND, NUM_AT_ONCE = 96, 7, 4  # of a row, those that a convolution sees, and places that are joined
WIDTH, NUM_HEADS = 64, 4
THRESHOLD = 0.5  # ratings nearer to 0 are left out, as in the data set
MIN_ROWS = 6  # of a client
NUM_SMALL = 30  # clients of a quick look
NUM_STEPS, BATCH_SIZE, RATE = 1200, 64, 2e-3  # of training before


class LastLayer(nn.Module):
    """The last layer of the transformer; the mean over the places where there is text makes the scores."""

    def __init__(self, width: int, num_classes: int = 2) -> None:
        super().__init__()
        self.layer = transformer_layer(width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(width, num_classes)

    def forward(self, states: Tensor) -> Tensor:
        """Scores of rows of states ``[rows, places, width]``, which are 0 where there is no text."""
        is_there = (states != 0).any(-1, keepdim=True)
        found = self.norm(self.layer(states)) * is_there
        scores: Tensor = self.head(self.dropout(found.sum(-2) / is_there.sum(-2).clamp(min=1)))
        return scores


class ByteNetwork(nn.Module):
    """A transformer on the largest of every four places of a convolution over bytes."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width // 2, padding_idx=0)
        self.convolution = nn.Conv1d(width // 2, width, NUM_AROUND, padding=NUM_AROUND // 2)
        self.place = nn.Parameter(0.02 * torch.randn(NUM_BYTES // NUM_AT_ONCE, width))
        self.first = transformer_layer(width)
        self.last = LastLayer(width)

    def states(self, text: Tensor) -> Tensor:
        """What the last layer is given ``[rows, places, width]`` of bytes ``[rows, 96]``; zeros are no text."""
        is_there = by_fours(text > 0).any(-1).unsqueeze(-1)
        found = torch.relu(self.convolution(self.embedding(text).transpose(-1, -2)))
        joined = by_fours(found).amax(-1).transpose(-1, -2)
        states: Tensor = self.first(joined + self.place) * is_there
        return states

    def forward(self, text: Tensor) -> Tensor:
        """Scores of bytes ``[rows, 96]``."""
        scores: Tensor = self.last(self.states(text))
        return scores


def by_fours(values: Tensor) -> Tensor:
    """The last axis, cut into pieces of four."""
    return values.reshape(*values.shape[:-1], -1, NUM_AT_ONCE)


def transformer_layer(width: int) -> nn.TransformerEncoderLayer:
    """Attention and a small network behind it."""
    return nn.TransformerEncoderLayer(width, NUM_HEADS, 2 * width, 0.1, batch_first=True, norm_first=True)


def as_bytes(texts: list[str]) -> npt.NDArray[np.int64]:
    """The first bytes of each text, zeros behind them ``[texts, 96]``."""
    found = np.zeros((len(texts), NUM_BYTES), dtype=np.int64)
    for row, text in zip(found, texts, strict=True):
        content = text.encode()[:NUM_BYTES]
        row[: len(content)] = np.frombuffer(content, dtype=np.uint8)
    return found


@lru_cache(maxsize=1)
def halves() -> tuple[Rows, Rows]:
    """Rows that the network is trained on before, and those of the clients, who have enough of them."""
    path = files()[0].find()
    known = read_rated(path, WITH_AUTHOR)
    names, owner, count = np.unique(known.client, return_inverse=True, return_counts=True)
    is_client = np.random.default_rng(0).permutation(len(names)) % 2 == 1
    chosen = is_client[owner] & (count[owner] >= MIN_ROWS)
    others = [Rows(*(each[~is_client[owner]] for each in known)), read_rated(path, WITHOUT_AUTHOR)]
    return Rows(*map(np.concatenate, zip(*others, strict=True))), Rows(*(each[chosen] for each in known))


def read_rated(path: Path, sources: tuple[str, ...]) -> Rows:
    """Snippets of some sources, but for those with ratings near 0; class 1 is a rating above it."""
    documents, scores, texts = read_snippets(path, sources)
    is_used = np.abs(scores) >= THRESHOLD
    return Rows(as_bytes(texts)[is_used], (scores > 0)[is_used].astype(np.int64), np.asarray(documents)[is_used])


@lru_cache(maxsize=2)
def train_transformer(is_small: bool = False) -> ByteNetwork:
    """The transformer, trained on what is no client's."""
    before, _ = halves()
    found = draw_network(lambda: ByteNetwork(WIDTH // 4 if is_small else WIDTH))
    features, labels = torch.from_numpy(before.features), torch.from_numpy(before.labels)
    return pretrain(found, features, labels, NUM_STEPS // 20 if is_small else NUM_STEPS, BATCH_SIZE, RATE)


def network(is_small: bool = False) -> nn.Module:
    """The transformer's last layer and head, which clients adapt."""
    return train_transformer(is_small).last


@lru_cache(maxsize=2)
def encode_rows(is_small: bool = False) -> Rows:
    """Rows of the clients as the last layer is given them; of thirty clients for a quick look."""
    found = of_some_clients(halves()[1], NUM_SMALL) if is_small else halves()[1]
    network = train_transformer(is_small)  # which needs gradients
    with torch.no_grad():
        states = torch.cat([network.states(part) for part in torch.split(torch.from_numpy(found.features), 256)])
    return found._replace(features=states.numpy())


def rows(seed: int, is_small: bool = False) -> Rows:
    """The rows for all seeds, which split them."""
    del seed
    return encode_rows(is_small)


TEXT = Benchmark(rows, network)
