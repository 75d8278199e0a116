"""Seconds until a new client has its adapter: `Run.welcome` on a frozen body, after a few rounds of self-fl-auto.

The body is a small network (64-96-48-10, as in docs/howto/adapters.md) or a transformer.  Rows are noise about centres
of classes that differ by client.  A new client makes visits until its model no longer moves; how many is printed.
"""

from __future__ import annotations

from functools import partial
from statistics import median

import numpy as np
import torch
from adapter_cohort import NUM_CLASSES, TARGETS, Transformer
from timing import measured, options, write
from torch import nn

import selffl
from selffl.adapters import lora
from selffl.runs import new_client


def main() -> None:
    """Train, welcome and print."""
    parser = options(__doc__, repeats=7)
    parser.add_argument("--body", choices=("network", "transformer"), default="network")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=16, help="of a row, in places")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--clients", type=int, default=20, help="that the run is trained on")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 10, 50], help="of a new client")
    args = parser.parse_args()
    torch.manual_seed(0)
    draw = np.random.default_rng(0)
    is_network = args.body == "network"
    centres = draw.normal(size=(NUM_CLASSES, args.width))
    row = (args.width,) if is_network else (args.length, args.width)

    def rows_of(number: int) -> tuple[np.ndarray, np.ndarray]:
        own = centres + 0.5 * draw.normal(size=(NUM_CLASSES, args.width))
        labels = draw.integers(0, NUM_CLASSES, number)
        places = own[labels].reshape(number, *[1] * (len(row) - 1), args.width)
        return (places + draw.normal(size=(number, *row))).astype(np.float32), labels

    known = [rows_of(30) for _ in range(args.clients)]
    features, labels = (np.concatenate(each) for each in zip(*known, strict=True))
    federation = selffl.Federation.from_arrays(features, labels, np.arange(len(labels)) // 30)
    if is_network:
        layers = nn.Linear(args.width, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, NUM_CLASSES)
        body: nn.Module = nn.Sequential(*layers)
    else:
        body = Transformer(args.width, args.layers).eval()
    torch.set_num_threads((args.threads or [1])[0])
    run = selffl.train(
        lora(body, args.rank, None if is_network else TARGETS), federation, rounds=args.rounds, participation=0.5
    )
    visits = []
    make = new_client.ModelTask

    def counted(*given: object, **more: object) -> object:
        visits.append(1)
        return make(*given, **more)

    new_client.ModelTask = counted
    size = sum(part.numel() for part in body.parameters())
    print(
        f"welcome, {args.body}, adapters of rank {args.rank}, {size:,} frozen parameters, {args.clock} time, one thread"
    )
    found = {}
    for number in args.rows:
        visits.clear()
        seconds = measured({"": partial(run.welcome, rows_of(number))}, args)[""]
        found[number] = seconds
        span = f"{min(seconds) * 1e3:.0f}-{max(seconds) * 1e3:.0f}"
        num_visits = len(visits) / (args.repeats + 1)
        print(f"{number:4} rows  {median(seconds) * 1e3:7.1f} ms ({span})  {num_visits:.0f} visits", flush=True)
    write(args.json, {"seconds": found})


if __name__ == "__main__":
    main()
