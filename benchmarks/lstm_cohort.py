"""Rounds of FedAvg with an LSTM over words: a plain PyTorch loop and selffl's ways.

Two layers of 256 on frozen embeddings of 30,000 words in 100 dimensions, sentences of 25 words, 4 steps of batch 10;
77 clients a round.
"""

from __future__ import annotations

import torch
from rounds import WAYS, compare, size_options
from timing import options
from torch import Tensor, nn

NUM_DIMENSIONS, NUM_CLASSES, LEARNING_RATE = 100, 2, 0.1


class Reader(nn.Module):
    """Frozen embeddings, an LSTM, and a linear layer on its last output."""

    def __init__(self, num_words: int, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, NUM_DIMENSIONS).requires_grad_(False)
        self.memory = nn.LSTM(NUM_DIMENSIONS, hidden, num_layers, batch_first=True)
        self.head = nn.Linear(hidden, NUM_CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        """Logits ``[B, classes]`` of words ``[B, T]``."""
        return self.head(self.memory(self.words(rows))[0][:, -1])


def main() -> None:
    """Measure and print."""
    parser = options(__doc__, repeats=5)
    parser.add_argument("--turns", type=int, dest="repeats", help="the same as --repeats")
    parser.add_argument("--clients", type=int, nargs="+", default=[77], help="a round; several are measured in turn")
    size_options(parser, rows=40, steps=4, batch=10)
    parser.add_argument("--words", type=int, default=30_000, help="with an embedding")
    parser.add_argument("--length", type=int, default=25, help="of a sentence, in words")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--ways", nargs="+", default=["vmap"], choices=WAYS)
    args = parser.parse_args()

    torch.manual_seed(0)
    features = torch.randint(args.words, (max(args.clients) * args.rows, args.length), device=args.device)
    labels = torch.randint(NUM_CLASSES, (len(features),), device=args.device)
    sizes = f"{args.layers} layers of {args.hidden}, {args.length} words, {args.steps} steps of batch {args.batch}"

    def reader() -> nn.Module:
        return Reader(args.words, args.hidden, args.layers)

    compare(f"LSTM: {sizes}", reader, (features, labels), args.clients, LEARNING_RATE, args)


if __name__ == "__main__":
    main()
