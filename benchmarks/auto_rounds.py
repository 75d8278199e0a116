"""Rounds of self-fl-auto beside rounds of FedAvg with as many steps, taking turns; runs go on, as in training.

Softmax regression: 784 features, 10 classes, 1000 clients of 50 rows, 100 of them a round, 20 steps of batch 10.  The
CIFAR-10 tutorial's CNN: 10 clients of 100 rows, 5 of them a round, 40 steps of batch 20.
"""

from __future__ import annotations

import statistics

import torch
from timing import measured, options, write

from selffl.algorithms import algorithm
from selffl.data.federation import Federation, Rows
from selffl.engines.cohort import CohortEngine
from selffl.models import build
from selffl.studies.speed import Case
from selffl.training.flat import FlatModel
from selffl.training.model import ModelSource

NUM_CLASSES, METHODS = 10, ("fedavg", "self-fl-auto")
# Shape of a row; clients, rows of each, clients a round, how many at once, steps, rows of a minibatch; learning rate.
PROBLEMS = {"softmax": ((784,), (1000, 50, 100, 50, 20, 10), 0.03), "cnn": ((3, 32, 32), (10, 100, 5, 5, 40, 20), 0.01)}
ROUNDS_BEFORE = 2  # of each run, before any is measured


def rounds_of(method: str, model: str, device: str) -> Case:
    """A call is one more round of a run."""
    shape, (num_clients, num_rows, cohort, chunk, steps, batch), rate = PROBLEMS[model]
    torch.manual_seed(0)
    features = torch.randn(num_clients * num_rows, *shape)
    labels = torch.randint(NUM_CLASSES, (len(features),))
    rows = Rows(features, labels, torch.arange(num_clients + 1) * num_rows).to(device)
    flat = FlatModel(build(model, shape[0] if len(shape) == 1 else shape, NUM_CLASSES).to(device))
    federation = Federation(range(num_clients), rows, rows)
    source = ModelSource(federation, flat, torch.nn.functional.cross_entropy, rate, batch)
    engine = CohortEngine(algorithm(method, num_local_steps=steps), source, cohort / num_clients, chunk_size=chunk)
    state = engine.advance(engine.start(flat.params), ROUNDS_BEFORE)

    def one_round() -> None:
        nonlocal state
        state = engine.advance(state, 1, consume=True)
        if device != "cpu":
            torch.cuda.synchronize()

    return one_round


def main() -> None:
    """Measure and print."""
    parser = options(__doc__, repeats=11)
    parser.add_argument("--models", nargs="+", default=list(PROBLEMS), choices=PROBLEMS)
    args = parser.parse_args()
    torch.set_num_threads((args.threads or [1])[0])
    found = {}
    for model in args.models:
        seconds = measured({method: rounds_of(method, model, args.device) for method in METHODS}, args)
        for method, each in seconds.items():
            middle, low, high = (1e3 * value for value in (statistics.median(each), min(each), max(each)))
            print(f"{model:8} {method:13} {middle:8.1f} ms ({low:.1f}-{high:.1f})")
        times = sorted(one / other for other, one in zip(*(seconds[method] for method in METHODS), strict=True))
        print(f"{model:8} times as long as FedAvg: {statistics.median(times):.2f} ({times[0]:.2f}-{times[-1]:.2f})")
        found[model] = seconds
    write(args.json, {"title": "Rounds of self-fl-auto beside FedAvg's", "seconds": found})


if __name__ == "__main__":
    main()
