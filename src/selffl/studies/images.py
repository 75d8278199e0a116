"""The image studies of the paper: figures 1, 2, 6, 9, 10 and 11 and table 1, and the embedded demonstration."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

import numpy as np
import torch

from selffl.errors import DivergedError
from selffl.studies.arms import Arm, Outcomes, difference, estimate, ratio_of
from selffl.studies.comparison import (
    TUNED_DITTO,
    TUNED_FEDAVG,
    Comparison,
    by_round,
    history,
    join_problems,
    points,
    result_of,
    run_each,
    score_lines,
    seeds_of,
    shorten_for_look,
    study,
    study_on,
)
from selffl.studies.problems import CIFAR10, DIGITS, LETTERS, MNIST, Problem, femnist
from selffl.studies.result import (
    OVER_SPLITS,
    Chart,
    Claim,
    Estimate,
    Figure,
    Job,
    Series,
    StudyResult,
    all_above_zero,
    claims_above_zero,
    read_toml,
    sign,
    within,
)


def _baselines(where: str) -> dict[str, str]:
    """The paper's claim against each of its baselines, and what it does not compare with."""
    paper = {"fedavg": "FedAvg", "perfedavg": "PerFedAvg", "pfedme": "pFedMe", "ditto": "DITTO with λ = 1"}
    claims = {
        label: f"Self-FL has a higher personalised accuracy than {name} ({where})." for label, name in paper.items()
    }
    claims |= {
        f"{label}, equal gradients": f"Not in the paper: also than {name} with as many gradient evaluations."
        for label, name in paper.items()
    }
    claims[TUNED_DITTO] = "Not in the paper: also than DITTO with λ chosen on validation rows."
    claims[TUNED_FEDAVG] = "Not in the paper: also than FedAvg fine-tuned, its steps chosen on validation rows."
    claims["local"] = "Not in the paper: joining is better than training alone."
    return claims


DEMO_COMPARISON = Comparison(
    DIGITS,
    {
        "fedavg": "Personal models by Self-FL with learned variances are better than one shared model.",
        "local": "Joining is better than training alone.",
        "ditto": "Self-FL with learned variances is better than DITTO with λ = 1, without a λ.",
        "self-fl": "It is better than the paper's Self-FL.",
    },
    DIGITS.algorithms,
    is_tuned=False,
)
MNIST_COMPARISON = Comparison(MNIST, _baselines("figure 1a"))
FEMNIST_CLAIMS = _baselines("figure 1b") | {
    f"{label}, L = 40": f"The lead over {name} is not one of more local steps: it is there at L = 40 (section 4.2)."
    for label, name in (("ditto", "DITTO"), ("pfedme", "pFedMe"), ("perfedavg", "PerFedAvg"))
}


def letters_study(problem: Problem, job: Job) -> StudyResult:
    """Figure 1b and table 1: every method, also with more local steps, and Self-FL with other settings."""
    comparison = Comparison(
        problem,
        FEMNIST_CLAIMS,
        paper=read_toml("paper.toml")["femnist"],
        more_steps=40,
        variants={"self-fl, no smoothing": {"smoothing": 1.0}, "self-fl, ℓ_max = 400": {"max_local_steps": 400}},
    )
    return _name_data(study(comparison, job), f"Letters over two hundred clients{_source(problem)}", problem)


def _name_data(result: StudyResult, title: str, problem: Problem) -> StudyResult:
    """A result with a title and a setting that say which data were found."""
    return replace(result, title=title, setting=f"{problem.setting}; {result.config['num_seeds']} seeds")


def _source(problem: Problem) -> str:
    return " (OCR letters, a stand-in for FEMNIST)" if problem.data == LETTERS.data else " (EMNIST)"


# ------------------------------------------------------------------------------------------------------------ ablation

PARTS_OFF = {"adaptive_start": False, "adaptive_steps": False, "uncertainty_weights": False}
ABLATION = {
    "full Self-FL": {},
    "initialisation only": PARTS_OFF | {"adaptive_start": True},
    "adaptive steps only": PARTS_OFF | {"adaptive_steps": True},
    "weighted aggregation only": PARTS_OFF | {"uncertainty_weights": True},
    "none (FedAvg, smoothed)": PARTS_OFF,
}


def ablation_study(whole: Problem, job: Job) -> StudyResult:
    """Figure 2b: one component of Self-FL at a time."""
    problem, seeds = shorten_for_look(whole, job), seeds_of(job)
    outcomes = run_each(problem, [Arm(label, "self-fl", options) for label, options in ABLATION.items()], seeds, job)
    columns = {
        "global model": "global_accuracy",
        "personal models": "weighted_accuracy",
        "worst 10 %": "worst10_accuracy",
    }
    start, *others = single = list(ABLATION)[1:4]
    best = max(single, key=lambda label: estimate(outcomes[label], "global_accuracy").mean)
    lead = [difference(outcomes[start], outcomes[other], "global_accuracy") for other in others]
    gaps = "; ".join(f"{gap.signed} against {other}" for gap, other in zip(lead, others, strict=True))
    claim = Claim(
        "Of the three components alone, the adjusted initialisation gives the best global model (figure 2b).",
        all_above_zero(lead),
        f"Best alone: {best}. Accuracy of the global model with initialisation only: {gaps} points.",
    )
    caption = f"One component of Self-FL at a time; mean over {len(seeds)} seeds, bars ± s.e."
    panels = {"global_accuracy": "Global model", "weighted_accuracy": "Personal models"}
    table = score_lines(outcomes, columns, "components")
    result = result_of(outcomes, table, [claim], problem, caption, panels)
    return _name_data(result, f"One component of Self-FL at a time{_source(whole)}", whole)


# ----------------------------------------------------------------------------------------------- Algorithms 1 and 2


# A client's optimum is carried on from round to round, so that a bound on the steps of one round is no bound on how
# near it gets.
MAX_CONVERGENCE_STEPS = 100


def augmented_study(
    digits: Problem, letters: Problem, job: Job, *, max_convergence_steps: int = MAX_CONVERGENCE_STEPS
) -> StudyResult:
    """Figure 6: Algorithm 1 against Algorithm 2, on two problems."""
    problems, seeds = [shorten_for_look(problem, job) for problem in (digits, letters)], seeds_of(job)
    arms = [
        Arm("Algorithm 1", "self-fl", evaluate_train=True),
        Arm("Algorithm 2", "self-fl-augmented", {"max_convergence_steps": max_convergence_steps}, evaluate_train=True),
    ]
    columns = {
        "training rows": "train_accuracy",
        "test rows": "weighted_accuracy",
        "worst 10 %, test": "worst10_accuracy",
    }
    caption = f"Algorithm 1 against Algorithm 2 on training rows; mean over {len(seeds)} seeds, bars ± s.e."
    parts, num_runs = {}, len(arms) * len(seeds)
    for place, problem in enumerate(problems):
        outcomes = run_each(problem, arms, seeds, job, place * num_runs, len(problems) * num_runs)
        chart = by_round(outcomes, list(outcomes), "train_accuracy", problem.title.split(" over")[0])
        gap, test = (
            difference(outcomes["Algorithm 2"], outcomes["Algorithm 1"], metric)
            for metric in ("train_accuracy", "weighted_accuracy")
        )
        claim = Claim(
            f"The two algorithms differ by less than a point in training accuracy ({problem.name}, figure 6).",
            within(gap, 1.0),
            f"Algorithm 2 − Algorithm 1: training rows {gap.signed} points, test rows {test.signed} "
            f"(paired over {len(seeds)} seeds).",
        )
        figure = Figure("accuracy", caption, [chart])
        table = score_lines(outcomes, columns)
        parts[problem.name] = StudyResult(history(outcomes), table, [figure], [claim], asdict(problem))
    return join_problems(
        parts,
        {"num_seeds": len(seeds)},
        title=f"Algorithm 1 against Algorithm 2 on MNIST and on letters{_source(letters)}",
        setting=f"{digits.setting}; and {letters.setting}; local optima after at most {max_convergence_steps} steps a "
        f"round; {len(seeds)} seeds",
    )


# --------------------------------------------------------------------------------------------- sparse participation

SPARSE = {
    "self-fl, smoothing by C": ("self-fl", {}),
    "self-fl, smoothing 0.1": ("self-fl", {"smoothing": 0.1}),
    "self-fl, smoothing 0.5": ("self-fl", {"smoothing": 0.5}),
    "self-fl, no smoothing": ("self-fl", {"smoothing": 1.0}),
    "fedavg": ("fedavg", {}),
    "ditto": ("ditto", {}),
}


def sparse_study(digits: Problem, job: Job) -> StudyResult:
    """Figure 9: few clients a round."""
    problem, seeds = shorten_for_look(replace(digits, participation=0.02), job), seeds_of(job)
    arms = [Arm(label, name, options) for label, (name, options) in SPARSE.items()]
    outcomes = run_each(problem, arms, seeds, job)
    half_round = problem.rounds // 2
    half = {label: [outcome.at(half_round) for outcome in group] for label, group in outcomes.items()}
    table = [
        {
            "method": label,
            f"accuracy in round {half_round}": points(estimate(half[label], "weighted_accuracy")),
            "accuracy at the end": points(estimate(group, "weighted_accuracy")),
            "global model at the end": points(estimate(group, "global_accuracy")),
            "worst 10 %": points(estimate(group, "worst10_accuracy")),
        }
        for label, group in outcomes.items()
    ]
    claims = []
    ours, others = next(iter(SPARSE)), {"fedavg": "FedAvg", "ditto": "DITTO"}
    for model, metric in (("personal models", "weighted_accuracy"), ("global model", "global_accuracy")):
        statements = {}
        for baseline, name in others.items():
            gap = difference(half[baseline], half[ours], metric)
            evidence = f"{baseline} − self-fl {gap.signed} points (paired over {len(seeds)} seeds)."
            text = f"Smoothed by C = 0.02, Self-FL converges slower than {name} (figure 9; {model})."
            statements[text] = gap, f"In round {half_round}: {evidence}"
        claims += claims_above_zero(statements)
    caption = f"MNIST with C = {problem.participation:g}; mean over {len(seeds)} seeds, bars ± s.e."
    panels = {"weighted_accuracy": "Personal models", "global_accuracy": "Global model"}
    return result_of(outcomes, table, claims, problem, caption, panels)


# -------------------------------------------------------------------------------------------------------- local steps


BINS = (1, 2, 5, 10, 20, 40, 80, 160, 320, 640)  # lower ends


def _steps(digits: Problem, job: Job) -> tuple[Problem, Outcomes]:
    """Self-FL on MNIST in both forms: the steps that each client wants, before ℓ_max."""
    problem, seeds = shorten_for_look(digits, job), seeds_of(job)
    outcomes = run_each(problem, [Arm("self-fl", "self-fl"), Arm("self-fl-exact", "self-fl-exact")], seeds, job)
    for label, group in outcomes.items():
        for outcome in group:
            if outcome.summary["status"] == "diverged":
                raise DivergedError(f"{label} diverged with seed {outcome.seed}; expected a whole run to look at.")
    return problem, outcomes


def histogram_study(digits: Problem, job: Job) -> StudyResult:
    """Figure 10: the steps that clients want in one round."""
    problem, outcomes = _steps(digits, job)
    moment = problem.rounds // 2
    rows = [
        {"form": label, "seed": outcome.seed, **row}
        for label, group in outcomes.items()
        for outcome in group
        for row in outcome.participation
        if row["round"] == moment and row["wanted_steps"] is not None
    ]
    lines, table = [], []
    beyond: dict[str, Estimate] = {}
    for label, group in outcomes.items():
        shares, large = [], []
        for outcome in group:
            steps = [r["wanted_steps"] for r in rows if r["form"] == label and r["seed"] == outcome.seed]
            ends = (*BINS[1:], float("inf"))
            shares.append(
                [
                    100 * sum(low <= max(s, 1) < high for s in steps) / len(steps)
                    for low, high in zip(BINS, ends, strict=True)
                ]
            )
            large.append(100 * sum(s > problem.max_local_steps for s in steps) / len(steps))
        bars = [Estimate.of(torch.tensor(column)) for column in zip(*shares, strict=True)]
        lines.append(Series.of(label, BINS, bars))
        steps = [r["wanted_steps"] for r in rows if r["form"] == label]
        low, middle, high = np.quantile(steps, [0.1, 0.5, 0.9])
        beyond[label] = Estimate.of(torch.tensor(large), test_per_train=ratio_of(group))
        table.append(
            {
                "form": label,
                "clients": str(len(steps)),
                "ℓ_m, lowest tenth": f"{low:.3g}",
                "median": f"{middle:.3g}",
                "highest tenth": f"{high:.3g}",
                f"above ℓ_max = {problem.max_local_steps}": f"{beyond[label].mean:.0f} ± {beyond[label].error:.0f} %",
            }
        )
    claims = [
        Claim(
            f"Not in the paper: the uncertainty, not ℓ_max, decides the steps of most active clients ({label}).",
            sign(share.shift_by(-50.0).scale_by(-1)),
            f"{share.mean:.0f} ± {share.error:.0f} % of the clients active in round {moment} want more than ℓ_max.",
        )
        for label, share in beyond.items()
    ]
    caption = f"Steps that Self-FL's active clients want in round {moment}, before ℓ_max; mean over seeds, bars ± s.e."
    charts = [Chart("Histogram of ℓ_m", "ℓ_m, from", "share of active clients, %", lines, kind="bars")]
    config = asdict(problem) | {"num_seeds": len(outcomes["self-fl"])}
    return StudyResult(rows, table, [Figure("steps", caption, charts)], claims, config, decided_by=OVER_SPLITS)


MIN_TRAJECTORY_ROUNDS = 20  # of a client, to be called a trajectory


def trajectory_study(digits: Problem, job: Job) -> StudyResult:
    """Figure 11: the steps that one client wants, over the rounds."""
    problem, outcomes = _steps(digits, job)
    late = problem.rounds * 3 // 4
    rows: list[dict[str, object]] = []
    table, lines, claims = [], [], []
    for label, group in outcomes.items():
        slopes = []
        for outcome in group:
            taken: dict[object, list[tuple[int, float]]] = {}
            for row in outcome.participation:
                if row["wanted_steps"] is not None:
                    taken.setdefault(row["client"], []).append((row["round"], row["wanted_steps"]))
            # A client that took part often shows a trajectory; the first such one to take part, so that none is picked.
            often = next(
                client
                for client in taken
                if len(taken[client]) >= min(MIN_TRAJECTORY_ROUNDS, max(map(len, taken.values())))
            )
            rows += [
                {"form": label, "seed": outcome.seed, "client": often, "round": number, "wanted_steps": steps}
                for number, steps in taken[often]
            ]
            if outcome.seed == 0:
                numbers, steps = zip(*taken[often], strict=True)
                lines.append(Series(label, numbers, steps, [0.0] * len(steps)))
            trends = [
                np.polyfit([point[0] for point in points], [point[1] for point in points], 1)[0]
                for every in taken.values()
                if len(points := [point for point in every if point[0] > late]) >= 3
            ]
            slopes.append(float(np.mean(trends)))
        trend = Estimate.of(torch.tensor(slopes, dtype=torch.float64), test_per_train=ratio_of(group))
        table.append(
            {"form": label, f"mean slope after round {late}, steps a round": f"{trend.mean:.3g} ± {trend.error:.2g}"}
        )
        claims.append(
            Claim(
                f"The number of steps has a decreasing trend after round {late} ({label}; figure 11 shows one client).",
                sign(trend.scale_by(-1)),
                f"Slope of ℓ_m over rounds, mean over all clients with three rounds or more after round {late}: "
                f"{trend.mean:+.3g} ± {trend.error:.2g} steps a round (over {trend.count} seeds).",
            )
        )
    caption = "Steps that one client of seed 0 wants, in the rounds in which it takes part."
    chart = Chart("ℓ_m of one client over rounds", "round", "ℓ_m, before ℓ_max", lines)
    config = asdict(problem) | {"num_seeds": len(outcomes["self-fl"])}
    return StudyResult(rows, table, [Figure("steps", caption, [chart])], claims, config, decided_by=OVER_SPLITS)


DEMO = study_on(DIGITS, "demo", partial(study, DEMO_COMPARISON))
IMAGES = (
    study_on(MNIST, "mnist", partial(study, MNIST_COMPARISON)),
    study_on(LETTERS, "femnist", lambda job: letters_study(femnist(), job)),
    study_on(LETTERS, "femnist-ablation", lambda job: ablation_study(femnist(), job)),
    study_on(CIFAR10, "cifar10", partial(study, Comparison(CIFAR10, _baselines("figure 2a"), quick_share=20))),
    study_on(MNIST, "augmented-images", lambda job: augmented_study(MNIST, femnist(), job), f"; and {LETTERS.setting}"),
    study_on(replace(MNIST, participation=0.02), "mnist-sparse", partial(sparse_study, MNIST)),
    study_on(MNIST, "step-histogram", partial(histogram_study, MNIST)),
    study_on(MNIST, "step-trajectory", partial(trajectory_study, MNIST)),
)
