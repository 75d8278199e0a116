"""Rounds of FedAvg on data of MNIST's shape: a plain PyTorch loop, selffl, and the bare products of matrices.

Softmax regression (784 features, 10 classes), 1000 clients of 50 rows, 100 of them a round, 20 steps of batch 10.
"""

from __future__ import annotations

import torch
from timing import best, measured, options, ratios, report, threads_of, with_threads

from selffl.data.federation import Rows
from selffl.studies.speed import bare_products, cohort_rounds, plain_loop

NUM_FEATURES, NUM_CLASSES = 784, 10


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

    sizes = {"cohort": args.cohort, "steps": args.steps, "batch": args.batch}
    loop = plain_loop(rows, NUM_CLASSES, **sizes)
    selffl = cohort_rounds(rows, NUM_CLASSES, **sizes, chunk_size=args.chunk)

    floor = bare_products(NUM_FEATURES, NUM_CLASSES, **sizes, device=args.device)

    threads = threads_of(args)
    cases = with_threads({"loop": loop, "selffl": selffl, "products alone": floor}, threads)
    seconds = measured(cases, args)
    baselines = {name: f"loop, {name.rpartition(', ')[2]}" for name in seconds}
    about = (
        f"{args.clients} clients x {args.rows} rows, {args.cohort} a round, {args.steps} steps of batch {args.batch}"
    )
    report(f"One round of FedAvg, softmax regression: {about}", seconds, baselines, args, threads=threads)
    ours, theirs = best(seconds, "selffl"), best(seconds, "loop")
    found = sorted(ratios(seconds, theirs, ours))
    print(f"better of the threads for each: {found[len(found) // 2]:.2f} x ({found[0]:.2f}-{found[-1]:.2f})")


if __name__ == "__main__":
    main()
