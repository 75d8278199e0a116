"""Rounds of FedAvg with the CIFAR-10 tutorial's CNN (62,006 parameters): a plain PyTorch loop and selffl's ways.

Images of CIFAR's shape, 40 steps of batch 20; 5 clients a round on a CPU, 5, 20 and 100 on a GPU.
"""

from __future__ import annotations

import warnings

import torch
from rounds import WAYS, compare, size_options
from timing import options

from selffl.models import build

SHAPE, NUM_CLASSES, LEARNING_RATE = (3, 32, 32), 10, 0.01


def main() -> None:
    """Measure and print."""
    parser = options(__doc__, repeats=5)
    parser.add_argument("--clients", type=int, nargs="+", help="that train in a round; several are measured in turn")
    parser.add_argument("--ways", nargs="+", default=["auto", "vmap", "loop", "unfold"], choices=WAYS)
    size_options(parser, rows=100, steps=40, batch=20)
    args = parser.parse_args()
    cohorts = args.clients or ([5] if args.device == "cpu" else [5, 20, 100])
    # Operations without a batching rule are slow, which the table shows.
    warnings.filterwarnings("ignore", message="There is a performance drop")
    torch.manual_seed(0)
    features = torch.randn(max(cohorts) * args.rows, *SHAPE, device=args.device)
    labels = torch.randint(NUM_CLASSES, (len(features),), device=args.device)
    title = f"CIFAR CNN: {args.steps} steps of batch {args.batch}"
    compare(title, lambda: build("cnn", SHAPE, NUM_CLASSES), (features, labels), cohorts, LEARNING_RATE, args)


if __name__ == "__main__":
    main()
