"""Rounds of FedAvg with the CIFAR-10 tutorial's CNN (62,006 parameters): a plain PyTorch loop and selffl's ways.

Images of CIFAR's shape, 40 steps of batch 20; 5 clients a round on a CPU, 5, 20 and 100 on a GPU.
"""

from __future__ import annotations

import warnings
from functools import partial

import torch
from timing import Case, measured, options, report, threads_of
from torch import nn

from selffl.algorithms import algorithm
from selffl.data.federation import Federation, Rows
from selffl.engines.cohort import CohortEngine
from selffl.models import build
from selffl.training.model import FlatModel, ModelSource

SHAPE, NUM_CLASSES, LEARNING_RATE = (3, 32, 32), 10, 0.01
WAYS = ("auto", "vmap", "loop", "unfold")


def main() -> None:
    """Measure and print."""
    parser = options(__doc__, repeats=5)
    parser.add_argument("--clients", type=int, nargs="+", help="that train in a round; several are measured in turn")
    parser.add_argument("--rows", type=int, default=100, help="of each client")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    args = parser.parse_args()
    cohorts = args.clients or ([5] if args.device == "cpu" else [5, 20, 100])
    # Operations without a batching rule are slow, which the table shows.
    warnings.filterwarnings("ignore", message="There is a performance drop")

    torch.manual_seed(0)
    features = torch.randn(max(cohorts) * args.rows, *SHAPE, device=args.device)
    labels = torch.randint(NUM_CLASSES, (len(features),), device=args.device)
    own = list(zip(features.split(args.rows), labels.split(args.rows), strict=True))
    model = build("cnn", SHAPE, NUM_CLASSES).to(args.device)
    optimiser, criterion = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), nn.CrossEntropyLoss()
    shared = [part.detach().clone() for part in model.parameters()]

    def loop(cohort: int) -> None:
        total = [torch.zeros_like(part) for part in shared]
        for client in range(cohort):
            with torch.no_grad():
                torch._foreach_copy_(list(model.parameters()), shared)
            left = args.steps
            while left:
                order = torch.randperm(args.rows, device=args.device)
                batches = zip(*(tensor[order].split(args.batch) for tensor in own[client]), strict=True)
                for _, (x, y) in zip(range(left), batches, strict=False):
                    optimiser.zero_grad()
                    criterion(model(x), y).backward()
                    optimiser.step()
                    left -= 1
            with torch.no_grad():
                torch._foreach_add_(total, list(model.parameters()), alpha=1 / cohort)
        torch._foreach_copy_(shared, total)

    def selffl(engine: CohortEngine, params: torch.Tensor) -> None:
        engine.advance(engine.start(params), 1)

    threads = threads_of(args)
    seconds, baselines = {}, {}
    for cohort in cohorts:
        offset = torch.arange(cohort + 1, device=args.device) * args.rows
        rows = Rows(features[: cohort * args.rows], labels[: cohort * args.rows], offset)
        cases: dict[str, Case] = {"loop": partial(loop, cohort)}
        for way in args.ways:
            flat = FlatModel(build("cnn", SHAPE, NUM_CLASSES).to(args.device))
            source = ModelSource(
                Federation(range(cohort), rows, rows), flat, nn.functional.cross_entropy, LEARNING_RATE, args.batch,
                gradients=way,
            )  # fmt: skip
            engine = CohortEngine(algorithm("fedavg", num_local_steps=args.steps), source)
            cases[f"selffl {way}"] = partial(selffl, engine, flat.params)
        for number in threads:
            torch.set_num_threads(number)
            found = measured(cases, args)
            suffix = f", {cohort} clients, {number} thr."
            seconds |= {name + suffix: values for name, values in found.items()}
            baselines |= {name + suffix: "loop" + suffix for name in found}
    report(
        f"One round of FedAvg, CIFAR CNN: {args.steps} steps of batch {args.batch}", seconds, baselines, args,
        threads=threads,
    )  # fmt: skip


if __name__ == "__main__":
    main()
