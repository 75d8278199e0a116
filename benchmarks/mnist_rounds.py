"""Rounds of FedAvg on data of MNIST's shape: a plain PyTorch loop, selffl, and the bare products of matrices.

Softmax regression (784 features, 10 classes), 1000 clients of 50 rows, 100 of them a round, 20 steps of batch 10.
"""

from __future__ import annotations

import torch
from timing import best, interleaved, options, ratios, report, threads_of, with_threads
from torch import nn

from selffl.algorithms import algorithm
from selffl.data.federation import Federation, Rows
from selffl.engines.cohort import CohortEngine
from selffl.models import build
from selffl.training.model import FlatModel, ModelSource

NUM_FEATURES, NUM_CLASSES, LEARNING_RATE = 784, 10, 0.03


def main() -> None:
    """Measure and print."""
    parser = options(__doc__, repeats=11)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=50, help="of each client")
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--chunk", type=int, default=50, help="clients that selffl trains at once")
    args = parser.parse_args()

    torch.manual_seed(0)
    features = torch.randn(args.clients * args.rows, NUM_FEATURES, device=args.device)
    labels = torch.randint(NUM_CLASSES, (len(features),), device=args.device)
    rows = Rows(features, labels, torch.arange(args.clients + 1, device=args.device) * args.rows)

    # A loop that spares itself what it can: one model, one optimiser, rows on the device, one gather per epoch.
    model = build("softmax", NUM_FEATURES, NUM_CLASSES).to(args.device)
    optimiser, criterion = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), nn.CrossEntropyLoss()
    own = list(zip(features.split(args.rows), labels.split(args.rows), strict=True))
    shared = [part.detach().clone() for part in model.parameters()]

    def loop() -> None:
        total = [torch.zeros_like(part) for part in shared]
        for client in torch.randperm(args.clients)[: args.cohort].tolist():
            with torch.no_grad():
                for part, start in zip(model.parameters(), shared, strict=True):
                    part.copy_(start)
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
                for part, kept in zip(model.parameters(), total, strict=True):
                    kept.add_(part, alpha=1 / args.cohort)
        for start, kept in zip(shared, total, strict=True):
            start.copy_(kept)

    flat = FlatModel(build("softmax", NUM_FEATURES, NUM_CLASSES).to(args.device))
    source = ModelSource(
        Federation(range(args.clients), rows, rows), flat, nn.functional.cross_entropy, LEARNING_RATE, args.batch
    )
    engine = CohortEngine(
        algorithm("fedavg", num_local_steps=args.steps), source, args.cohort / args.clients, chunk_size=args.chunk
    )
    state = engine.start(flat.params)

    def selffl() -> None:
        nonlocal state
        state = engine.advance(state, 1)

    batch = torch.randn(args.cohort, args.batch, NUM_FEATURES, device=args.device)
    weight = torch.randn(args.cohort, NUM_CLASSES, NUM_FEATURES, device=args.device)
    error = torch.randn(args.cohort, NUM_CLASSES, args.batch, device=args.device)

    def floor() -> None:
        for _ in range(args.steps):
            torch.bmm(weight, batch.transpose(1, 2))
            torch.bmm(error, batch)

    threads = threads_of(args)
    cases = with_threads({"loop": loop, "selffl": selffl, "products alone": floor}, threads)
    seconds = interleaved(cases, args)
    baselines = {name: f"loop, {name.rpartition(', ')[2]}" for name in seconds}
    sizes = (
        f"{args.clients} clients x {args.rows} rows, {args.cohort} a round, {args.steps} steps of batch {args.batch}"
    )
    report(f"One round of FedAvg, softmax regression: {sizes}", seconds, baselines, args, threads=threads)
    ours, theirs = best(seconds, "selffl"), best(seconds, "loop")
    found = sorted(ratios(seconds, theirs, ours))
    print(f"better of the threads for each: {found[len(found) // 2]:.2f} x ({found[0]:.2f}-{found[-1]:.2f})")


if __name__ == "__main__":
    main()
