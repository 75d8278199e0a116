"""Does `self-fl-auto` notice what differs between clients, on a table of classes that nobody has developed it on?

Clients are cut from the table as in the studies `regimes-*`: alike, with features of their own, with some classes,
with few rows, with exchanged labels.  A line says how accurate personal models are, and by how many points they are
above the method's own global model with class frequencies, and above the best of FedAvg (its global model and
fine-tuned, with and without class frequencies), DITTO and local training.  That best is chosen on test rows, of each
seed for itself: no baseline can have it.

The table is a CSV file with a name for each column: features that are numbers, and the class in the last one.  Of R's
packages, for one:

    Rscript -e 'd <- mlbench::LetterRecognition; d$lettr <- as.integer(d$lettr) - 1' \\
            -e 'write.csv(d[c(2:17, 1)], "letters.csv", row.names = FALSE)'
    python tools/table_regimes.py letters.csv --seeds 0 1
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

import selffl
from selffl.data.regimes import KINDS, TEST_SHARE, Pictures, cut
from selffl.data.split import Split

NUM_CLIENTS, NUM_TINY, MOST_ROWS = 40, 150, 150  # clients; tiny ones; rows of a client on average
SIZES = {"alike": "even", "tiny": "even"}  # of clients; of all other kinds they are lognormal
MOST_DEVIATIONS = 8.0  # of a feature from its mean, in standard deviations
FINE_TUNE = (20, 80, 320)  # steps after FedAvg
PENALTIES = (0.1, 1.0)  # of DITTO
TRAINING = {"rounds": 60, "participation": 0.2, "learning_rate": 0.03, "batch_size": 10, "evaluate_every": 0}


def main() -> None:
    """Read what is asked for, and print a line for each kind and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--model", default="softmax", help="softmax or mlp")
    asked = parser.parse_args()
    for kind in asked.kinds:
        for seed in asked.seeds:
            found = measure(asked.table, kind, seed, asked.model)
            print(f"{asked.table.stem} {kind}, seed {seed}: {found}", flush=True)


def measure(table: Path, kind: str, seed: int, model: str) -> str:
    """Train everybody, and say what came out."""
    clients = cut_table(table, kind, seed)
    found = train(clients, model, seed, "self-fl-auto", class_frequencies=True)
    personal = found["weighted_accuracy"]
    own = max(found["global_accuracy"], found["global_with_classes_weighted_accuracy"])
    shared = train(clients, model, seed, "fedavg", fine_tune=FINE_TUNE, class_frequencies=True)
    baselines = {f"fedavg, {name}": value for name, value in shared.items() if name.endswith("weighted_accuracy")}
    baselines |= {
        f"ditto, {penalty:g}": train(clients, model, seed, "ditto", penalty=penalty)["weighted_accuracy"]
        for penalty in PENALTIES
    }
    baselines["local"] = train(clients, model, seed, "local")["weighted_accuracy"]
    best = max(baselines, key=lambda name: baselines[name])
    return (
        f"{100 * personal:.2f} %, {100 * (personal - own):+.2f} beside its global model, "
        f"{100 * (personal - baselines[best]):+.2f} beside {best}"
    )


def cut_table(table: Path, kind: str, seed: int) -> selffl.Federation:
    """Rows of a table, standardised and shuffled, as clients have them."""
    numbers = np.genfromtxt(table, delimiter=",", skip_header=1)
    features, labels = numbers[:, :-1].astype(np.float32), numbers[:, -1].astype(np.int64)
    deviation = features.std(0)
    features = (features - features.mean(0)) / np.where(deviation > 0, deviation, 1)
    order = np.random.default_rng(0).permutation(len(features))
    features, labels = features.clip(-MOST_DEVIATIONS, MOST_DEVIATIONS)[order], labels[order]
    # Lognormal sizes and few classes need more rows than there are clients times rows on average.
    mean_rows = min(MOST_ROWS, len(features) // (NUM_CLIENTS + 5))
    plan = Pictures(NUM_CLIENTS, mean_rows, NUM_TINY, 2 if labels.max() > 1 else 1)
    rng = np.random.default_rng([seed, *map(ord, kind), 77])
    rows = cut(KINDS[kind], plan, SIZES.get(kind, "lognormal"), features, labels, rng)
    return selffl.Federation.from_arrays(*rows, **Split(TEST_SHARE, 0.0, False, seed).options)


def train(clients: selffl.Federation, model: str, seed: int, method: str, **options: Any) -> dict[str, Any]:
    """The summary of a run."""
    views = {name: options.pop(name) for name in ("fine_tune", "class_frequencies") if name in options}
    torch.manual_seed(seed)
    trained = selffl.train(model, clients, selffl.algorithm(method, **options), seed=seed, **TRAINING, **views)
    return trained.summary


if __name__ == "__main__":
    main()
