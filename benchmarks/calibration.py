"""How far the probabilities of personal models can be believed: before and after moderation, and of other methods.

Every method is trained as in the studies.  ``digits-mlp`` is the problem ``digits`` with a network of one hidden layer
of 32.  Numbers are over all clients' held-out rows; nothing is chosen by them.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import nn

from selffl.algorithms import ALGORITHMS
from selffl.maths.confidence import AS_IT_STANDS
from selffl.runs.confidence import Confidence
from selffl.runs.run import Run
from selffl.runs.train import train
from selffl.studies.problems import PROBLEMS

MLP = "digits-mlp"
COLUMNS = {
    "calibration_error": "ECE",
    "even_calibration_error": "even ECE",
    "log_loss": "log loss",
    "brier_score": "Brier",
}
PERCENT = ("calibration_error", "even_calibration_error")


def trained(name: str, method: str, seed: int, rounds: int | None) -> Run:
    """A run of a study's problem."""
    problem = PROBLEMS[name.removesuffix("-mlp")]()
    length = rounds or problem.rounds
    if name != MLP:
        return problem.run(method, {}, seed, rounds=length, evaluate_every=length)
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return train(
        module,
        problem.federation(seed),
        problem.method(method),
        rounds=length,
        participation=problem.participation,
        learning_rate=problem.learning_rate,
        batch_size=problem.batch_size,
        seed=seed,
        evaluate_every=length,
    )


def measured(run: Run) -> dict[str, dict[str, Any]]:
    """Lines of the table by what they are."""
    lines = run.calibration()
    names = {("personal", False): "plain", ("personal", True): "moderated", ("global", False): "global"}
    found = {names[line["model"], line["moderated"]]: line for line in lines}
    if "moderated" in found:
        # Both come with the run: the posterior before rows left out have had their say.
        sure = Confidence(run._personal, AS_IT_STANDS)
        found["posterior as it stands"] = sure.table()[1]
        found["moderated"] |= run._confidence.moderation._asdict()
    return found


def cell(values: list[float], column: str) -> str:
    """Mean and standard error; errors of calibration in percent."""
    unit, form = (100.0, ".2f") if column in PERCENT else (1.0, ".4f")
    mean = f"{unit * fmean(values):{form}}"
    return mean if len(values) < 2 else f"{mean} ± {unit * stdev(values) / math.sqrt(len(values)):{form}}"


def main() -> None:
    """Train, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="+", default=["digits", MLP, "femnist"], choices=[*PROBLEMS, MLP])
    parser.add_argument(
        "--methods", nargs="+", default=["self-fl-auto", "local", "fedavg", "ditto"], choices=ALGORITHMS
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--rounds", type=int, help="of every run, if not the study's")
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    args = parser.parse_args()
    print(f"| problem | method | probabilities | accuracy | {' | '.join(COLUMNS.values())} | log loss, of the plain |")
    print("|---" * (5 + len(COLUMNS)) + "|")
    record = []
    for name in args.problems:
        for method in args.methods:
            runs = [(seed, measured(trained(name, method, seed, args.rounds))) for seed in args.seeds]
            for kind in ("plain", "posterior as it stands", "moderated", "global"):
                lines = [found[kind] for _, found in runs if kind in found]
                if not lines:
                    continue
                cells = [cell([line[column] for line in lines], column) for column in COLUMNS]
                accuracy = f"{100 * fmean(line['accuracy'] for line in lines):.1f}"
                ratio = fmean(
                    line["log_loss"] / found["plain"]["log_loss"] for line, (_, found) in zip(lines, runs, strict=True)
                )
                print(f"| {name} | {method} | {kind} | {accuracy} | {' | '.join(cells)} | {ratio:.2f} x |", flush=True)
            record += [
                {"problem": name, "method": method, "seed": seed, "probabilities": kind, **line}
                for seed, found in runs
                for kind, line in found.items()
            ]
            if args.json is not None:  # as it goes: a long measurement may be stopped
                args.json.write_text(json.dumps({"calibration": record}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
