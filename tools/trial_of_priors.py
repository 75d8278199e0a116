"""What the trial of priors says, beside what test rows say: accuracy and log loss under every multiple of c.

For cells of the studies `regimes-*` and seeds: the multiple that is chosen, its personal models beside the method's own
global model, and beside the best view of FedAvg, with class frequencies and fine-tuned, chosen on test rows.

    python tools/trial_of_priors.py mnist --cells 9 13 14 --seeds 0 1 2 --multiples --device cuda
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import torch

from selffl.algorithms.auto_trial import MULTIPLES
from selffl.runs.run import Run
from selffl.studies.auto import AUTO
from selffl.studies.regime_problem import RegimeProblem
from selffl.studies.regimes import DESIGNS

FINE_TUNE = (5, 20, 80, 320, 1280)  # steps after FedAvg
TRIED = (0.01, 0.1, 1.0, 10.0, 100.0)


def main() -> None:
    """Read what is asked for, and print a line for each cell and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", choices=[design.pictures for design in DESIGNS])
    parser.add_argument("--cells", type=int, nargs="+", help="places in the study's list; all of them by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--multiples", action="store_true", help="test every multiple, not the chosen one alone")
    parser.add_argument("--fedavg", action="store_true", help="train FedAvg beside it")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    design = next(each for each in DESIGNS if each.pictures == asked.pictures)
    for place in range(len(design.cells)) if asked.cells is None else asked.cells:
        for seed in asked.seeds:
            print(f"{place} {design.cells[place]}, seed {seed}", flush=True)
            measure(design.problem(design.cells[place]), seed, asked.device, asked.multiples, asked.fedavg)


def measure(problem: RegimeProblem, seed: int, device: str, multiples: bool, fedavg: bool) -> None:
    """Train, and print what came out."""
    options = {"device": device, "class_frequencies": True, "evaluate_every": problem.rounds}
    run = problem.run(AUTO, {}, seed, **options)
    found = run.summary
    personal, own = found["weighted_accuracy"], found["global_with_classes_weighted_accuracy"]
    print(f"  c {1 / found['inter_variance']:.3g}, held {found['closing_multiple']:g} times as hard")
    print(f"  personal {100 * personal:.2f} %, own global {100 * own:.2f} %")
    if multiples:
        print_multiples(run)
    if fedavg:
        views = problem.run("fedavg", {}, seed, fine_tune=FINE_TUNE, **options).summary
        named = {name: value for name, value in views.items() if name.endswith("weighted_accuracy")}
        best = max(named, key=lambda name: named[name])
        print(f"  FedAvg at best {100 * named[best]:.2f} % ({best})")


def print_multiples(run: Run) -> None:
    """Under each multiple the sum of the trial over rows, in nats, and accuracy and log loss on test rows."""
    session, state = run._session, run._state
    engine = session.engine.for_trial(state.round_number)
    assert engine is not None
    tried: list[torch.Tensor] = []
    counted = replace(state, num_gradients=state.num_gradients.clone(), num_rounds=state.num_rounds.clone())
    engine.advance(counted, 1, lambda report: tried.append(report.upload.excess_losses))
    rows = int(session.source.federation.train.num_examples.sum())
    excess = dict(zip(MULTIPLES, (tried[0] / rows).tolist(), strict=True)) | {1.0: 0.0}
    for multiple, (accuracy, loss) in zip(TRIED, tested(run, TRIED), strict=True):
        print(f"  {multiple:>6g} c: trial {excess[multiple]:+.4f}, test {100 * accuracy:.2f} %, log loss {loss:.4f}")


def tested(run: Run, multiples: Sequence[float]) -> list[tuple[float, float]]:
    """Accuracy and log loss of personal models whose closing visits are held so many times as hard."""
    session, state, found = run._session, run._state, []
    for multiple in multiples:
        server = replace(state.server, closing_multiple=torch.full_like(state.server.closing_multiple, multiple))
        evaluation = session.evaluate(replace(state, server=server))
        answers, losses = evaluation.numbers["personal"], evaluation.log_losses["personal"]
        found.append((float(answers.float().mean()), float(losses.mean())))
    return found


if __name__ == "__main__":
    main()
