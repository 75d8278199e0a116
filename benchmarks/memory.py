"""Peak memory of the MNIST study: Self-FL on 1000 clients, each of which keeps two vectors of 7,850 parameters.

The study runs in a process of its own; what counts is its peak resident set above that of ``import torch`` alone,
from ``resource.getrusage``.  The rows themselves (157 MB) are counted too.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

# Nothing large is imported up here: a child begins with the peak of the process that starts it.


def peak() -> float:
    """Of this process so far, in MB."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / 1e6 if sys.platform == "darwin" else used / 1e3


def study(args: argparse.Namespace) -> dict[str, float]:
    """Train, evaluate, and say what it took."""
    import torch

    torch.set_num_threads(args.threads)
    before = peak()
    from torch import nn

    from selffl.algorithms import algorithm
    from selffl.data.federation import Federation, Rows
    from selffl.engines.cohort import CohortEngine
    from selffl.models import build
    from selffl.training.evaluation import numbers_of_rows
    from selffl.training.flat import FlatModel
    from selffl.training.metrics import CLASSES
    from selffl.training.model import ModelSource

    imported = peak()
    features = torch.randn(args.clients * args.rows, 784)
    labels = torch.randint(10, (len(features),))
    rows = Rows(features, labels, torch.arange(args.clients + 1) * args.rows)
    with_rows = peak()
    model = FlatModel(build("softmax", 784, 10))
    source = ModelSource(Federation(range(args.clients), rows, rows), model, nn.functional.cross_entropy, 0.03, 10)
    engine = CohortEngine(algorithm(args.method), source, args.participation)
    state = engine.start(model.params)
    for _ in range(args.rounds // args.every):
        state = engine.advance(state, args.every)
        numbers_of_rows(model, engine.personal(state), rows, CLASSES)
    return {
        "import torch": before,
        "import selffl": imported - before,
        "and rows": with_rows - before,
        "whole run": peak() - before,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=50, help="of each client")
    parser.add_argument("--participation", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--every", type=int, default=10, help="rounds between two evaluations")
    parser.add_argument("--method", default="self-fl")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(study(args)))
        return
    command = [sys.executable, __file__, *sys.argv[1:], "--child"]
    runs = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(args.repeats)
    ]
    print(f"Peak memory of {args.method}: {args.clients} clients x {args.rows} rows, {args.rounds} rounds\n")
    print(f"{'':28}  {'median':>9}  {'range':>13}  {'ratio to import torch':>21}")
    for name in runs[0]:
        values = sorted(run[name] for run in runs)
        median, span = values[len(values) // 2], f"{values[0]:.0f}-{values[-1]:.0f}"
        label = name if name == "import torch" else f"{name}, above it"
        ratio = median / sorted(run["import torch"] for run in runs)[len(runs) // 2]
        print(f"{label:28}  {median:6.0f} MB  {span:>13}  {ratio:19.2f} x")
    if args.json is not None:
        args.json.write_text(json.dumps({"megabytes": runs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
