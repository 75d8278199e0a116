"""Beyond the paper: Self-FL when the server learns sums alone, and what noise on them costs."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

from selffl.errors import ConfigError
from selffl.privacy import epsilon
from selffl.studies.arms import Arm, Outcomes, difference, estimate
from selffl.studies.comparison import (
    NUM_SEEDS,
    by_round,
    history,
    join_problems,
    run_each,
    score_lines,
    seeds_of,
    shorten_for_look,
    study_on,
)
from selffl.studies.problems import MNIST, Problem, femnist
from selffl.studies.result import (
    OVER_SPLITS,
    Chart,
    Claim,
    Figure,
    Job,
    Series,
    Study,
    StudyResult,
    claims_above_zero,
    within,
)

_METHODS = ("self-fl", "self-fl-sums")
PAIRS = {"": {}, ", σ₀² as a mean": {"variance_scale": "mean"}}
COLUMNS = {
    "personal models": "weighted_accuracy",
    "worst 10 %": "worst10_accuracy",
    "global model": "global_accuracy",
}
MAX_GAP_POINTS = 0.5  # points of accuracy that two methods may differ by and still be called alike

# Fixed before any run with noise, from the lengths of the changes in one run of another seed without it (0.6 to 0.8);
# an average client weighs 1, and on MNIST nobody weighs more than 1.01.
CLIP, MAX_WEIGHT = 0.7, 1.0
NOISE = (0.5, 1.0, 2.0, 4.0)
DELTA = 1e-5  # a hundredth of a client of a thousand


def sums_study(digits: Problem, letters: Problem, job: Job) -> StudyResult:
    """Plain against summed, on two problems."""
    problems, seeds = [shorten_for_look(problem, job) for problem in (digits, letters)], seeds_of(job)
    arms = [Arm(name + ending, name, options) for ending, options in PAIRS.items() for name in _METHODS]
    caption = f"Personal models on held-out rows; mean over {len(seeds)} seeds, bars ± s.e."
    parts, num_runs = {}, len(arms) * len(seeds)
    for place, problem in enumerate(problems):
        outcomes = run_each(problem, arms, seeds, job, place * num_runs, len(problems) * num_runs)
        claims = []
        for plain, summed in (tuple(name + ending for name in _METHODS) for ending in PAIRS):
            text = f"{summed} is within {MAX_GAP_POINTS:g} points of {plain} ({problem.name})."
            claims.append(_alike(outcomes, summed, plain, text))
        figure = Figure("accuracy", caption, [by_round(outcomes, list(outcomes), "weighted_accuracy", problem.name)])
        table = score_lines(outcomes, COLUMNS)
        parts[problem.name] = StudyResult(history(outcomes), table, [figure], claims, asdict(problem))
    return join_problems(parts, {"num_seeds": len(seeds)})


def noise_study(whole: Problem, job: Job) -> StudyResult:
    """What clipping and noise cost."""
    problem, seeds = shorten_for_look(whole, job), seeds_of(job)
    bounds = {"clip": CLIP, "max_weight": MAX_WEIGHT}
    free, bounded = "self-fl-sums", "bounded, no noise"
    arms = [Arm(free, "self-fl-sums"), Arm(bounded, "self-fl-sums", settings=bounds), Arm("local", "local")]
    noisy = {f"z = {z:g}": z for z in NOISE}
    arms += [Arm(label, "self-fl-sums", settings=bounds | {"noise_multiplier": z}) for label, z in noisy.items()]
    outcomes = run_each(problem, arms, seeds, job)
    num_clients = int(outcomes[free][0].summary["clients"])
    spent = {label: _epsilon(problem, z, num_clients) for label, z in noisy.items()}
    table = [line | {f"ε at δ = {DELTA:g}": spent.get(line["method"], "–")} for line in score_lines(outcomes, COLUMNS)]
    lines = []
    for name, metric in (("personal models", "weighted_accuracy"), ("global model", "global_accuracy")):
        lines.append(Series.of(name, [0.0, *NOISE], [estimate(outcomes[label], metric) for label in (bounded, *noisy)]))
    alone = estimate(outcomes["local"], "weighted_accuracy").mean
    lines.append(Series("training alone", [0.0, max(NOISE)], [alone, alone], is_reference=True))
    claims = [_alike(outcomes, bounded, free, "Bounding a client's part costs no accuracy.")]
    gains = {}
    for label, z in noisy.items():
        text = f"Noise of z = {z:g} (ε = {spent[label]}) costs the personal models nothing."
        claims.append(_alike(outcomes, label, bounded, text))
        gap = difference(outcomes[label], outcomes["local"], "weighted_accuracy")
        evidence = f"Personal models {gap.signed} points ({label} − local, paired over {gap.count} seeds)."
        gains[f"With noise of z = {z:g} joining is still better than training alone."] = gap, evidence
    claims += claims_above_zero(gains)
    caption = (
        f"Accuracy on held-out rows after {problem.rounds} rounds against the noise multiplier; mean over {len(seeds)} "
        "seeds, bars ± s.e."
    )
    chart = Chart(problem.name, "noise multiplier z", "accuracy, %", lines)
    config = asdict(problem) | bounds | {"noise": NOISE, "delta": DELTA, "num_seeds": len(seeds)}
    figure = Figure("noise", caption, [chart])
    return StudyResult(history(outcomes), table, [figure], claims, config, decided_by=OVER_SPLITS)


def _epsilon(problem: Problem, noise_multiplier: float, num_clients: int) -> str:
    share, rounds = problem.participation, problem.rounds
    try:
        found = epsilon(noise_multiplier, num_clients=num_clients, participation=share, rounds=rounds, delta=DELTA)
    except ConfigError:
        return "not computed: dp-accounting is missing"
    return f"{found:.1f}"


def _alike(outcomes: Outcomes, label: str, other: str, text: str) -> Claim:
    """That an arm is as good as another: contradicted by a gap beyond the bound, shown by one within it."""
    gap, shared = (
        difference(outcomes[label], outcomes[other], name) for name in ("weighted_accuracy", "global_accuracy")
    )
    return Claim(
        text,
        within(gap, MAX_GAP_POINTS),
        f"Personal models {gap.signed} points, global model {shared.signed} ({label} − {other}, paired over "
        f"{gap.count} seeds).",
    )


SUMS = (
    study_on(MNIST, "sums", lambda job: sums_study(MNIST, femnist(), job), ", and letters"),
    Study.known(
        "sums-noise",
        f"{MNIST.setting}; {NUM_SEEDS} seeds; changes clipped at {CLIP:g}, weights at {MAX_WEIGHT:g}",
        partial(noise_study, MNIST),
    ),
)
