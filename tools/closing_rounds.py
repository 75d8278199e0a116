"""What closing rounds say, beside what test rows say: accuracy and log loss under other priors of closing visits.

For cells of the studies `regimes-*` and seeds: c as training has learned it, c of closing visits, their personal models
beside the method's own global model, and beside the best view of FedAvg, with class frequencies and fine-tuned, chosen
on test rows.

    python tools/closing_rounds.py mnist --cells 9 13 14 --seeds 0 1 2 --multiples --device cuda
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from selffl.runs.run import Run
from selffl.studies.auto import AUTO
from selffl.studies.regime_problem import RegimeProblem
from selffl.studies.regimes import DESIGNS

FINE_TUNE = (5, 20, 80, 320, 1280)  # steps after FedAvg
TRIED = (0.01, 0.1, 1.0, 10.0, 100.0)  # times the c of closing visits


def main() -> None:
    """Read what is asked for, and print a line for each cell and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", choices=[design.pictures for design in DESIGNS])
    parser.add_argument("--cells", type=int, nargs="+", help="places in the study's list; all of them by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--multiples", action="store_true", help="test multiples of the c of closing visits as well")
    parser.add_argument("--fedavg", action="store_true", help="train FedAvg beside it")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    design = next(each for each in DESIGNS if each.pictures == asked.pictures)
    for place in range(len(design.cells)) if asked.cells is None else asked.cells:
        for seed in asked.seeds:
            found = measure(design.problem(design.cells[place]), seed, asked.device, asked.multiples, asked.fedavg)
            print(f"{asked.pictures} {place} {design.cells[place]}, seed {seed}", *found, sep="\n  ", flush=True)


def measure(problem: RegimeProblem, seed: int, device: str, multiples: bool, fedavg: bool) -> list[str]:
    """Train, and say what came out."""
    options = {"device": device, "class_frequencies": True, "evaluate_every": problem.rounds}
    run = problem.run(AUTO, {}, seed, **options)
    found, server = run.summary, run._state.server
    personal, own = found["weighted_accuracy"], found["global_with_classes_weighted_accuracy"]
    trained, closing = (1.0 / float(each) for each in (server.inter_variance, server.closing.prior_variance))
    lines = [
        f"c {trained:.3g} in training, {1.0 / found['inter_variance']:.3g} in closing rounds, {closing:.3g} in visits",
        f"personal {100 * personal:.2f} %, own global {100 * own:.2f} %",
    ]
    if multiples:
        for multiple, (accuracy, loss) in zip(TRIED, measure_models(run, TRIED), strict=True):
            lines.append(f"{multiple:>6g} c: {100 * accuracy:.2f} %, log loss {loss:.4f}")
    if fedavg:
        views = problem.run("fedavg", {}, seed, fine_tune=FINE_TUNE, **options).summary
        named = {name: value for name, value in views.items() if name.endswith("weighted_accuracy")}
        best = max(named, key=lambda name: named[name])
        lines.append(f"FedAvg at best {100 * named[best]:.2f} % ({best})")
    return lines


def measure_models(run: Run, multiples: Sequence[float]) -> list[tuple[float, float]]:
    """Accuracy and log loss of personal models whose closing visits are held so many times as hard."""
    session, state, found = run._session, run._state, []
    closing = state.server.closing
    for multiple in multiples:
        held = replace(closing, prior_variance=closing.prior_variance / multiple)
        evaluation = session.evaluate(replace(state, server=replace(state.server, closing=held)))
        answers, losses = evaluation.numbers["personal"], evaluation.log_losses["personal"]
        found.append((float(answers.float().mean()), float(losses.mean())))
    return found


if __name__ == "__main__":
    main()
