"""Models of text: rows of word numbers, as `selffl.data.text.encode` makes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from selffl.algorithms.options import check_integer
from selffl.data.text import read_embeddings
from selffl.errors import ConfigError


class LSTMClassifier(nn.Module):
    """Frozen word vectors, an LSTM, and a linear layer on what it says after the last word."""

    def __init__(self, vectors: Tensor, num_classes: int, hidden: int, num_layers: int) -> None:
        super().__init__()
        # A frozen parameter, not a buffer: it is no part of what clients train and send.
        self.embedding = nn.Embedding.from_pretrained(vectors, freeze=True)  # type: ignore[no-untyped-call]
        self.lstm = nn.LSTM(vectors.shape[1], hidden, num_layers, batch_first=True)
        self.output = nn.Linear(hidden, num_classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Outputs ``[rows, classes]`` for word numbers ``[rows, tokens]``."""
        states, _ = self.lstm(self.embedding(ids))  # [rows, tokens, hidden]
        outputs: Tensor = self.output(states[:, -1])
        return outputs


def lstm(
    shape: tuple[int, ...],
    num_classes: int,
    embeddings: str = "glove100",
    hidden: int = 256,
    num_layers: int = 2,
) -> nn.Module:
    """FedProx's classifier for Sent140: an LSTM of two layers over frozen GloVe vectors, then one linear layer.

    893,442 trained parameters for two classes and 100 dimensions; FedProx has a further linear layer of 30 in between.

    Args:
        shape: of a row, ``(num_tokens,)``.
        num_classes: outputs.
        embeddings: the word vectors; by the table that the rows were made with, for numbers mean other words in others.
        hidden: units of each layer.
        num_layers: of the LSTM.
    """
    if len(shape) != 1:
        raise ConfigError(f"rows have shape {shape}; expected word numbers (num_tokens,), as text.encode makes them.")
    for option, value in (("hidden", hidden), ("num_layers", num_layers)):
        check_integer(option, value, 1)
    return LSTMClassifier(torch.tensor(read_embeddings(embeddings).vectors), num_classes, hidden, num_layers)
