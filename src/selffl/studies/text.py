"""The text studies of the paper: FedAvg on Sent140 from scratch (figure 7), and every method from there (figure 8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from selffl.studies.arms import Arm, Outcomes, difference, estimate
from selffl.studies.comparison import mean_gradients, points, result_of, run_each, seeds_of, study_on
from selffl.studies.problems import SENTIMENT, Problem, WarmUp, sent140
from selffl.studies.result import Claim, Job, StudyResult, Verdict, claims_above_zero, within

# FedAvg's local models, which the paper's figures show: Self-FL without any of its parts is FedAvg, bit for bit (D13),
# and keeps the model that each client trained last.  Its global model is FedAvg's.
LOCAL_MODELS = {"adaptive_start": False, "uncertainty_weights": False, "smoothing": 1.0}
# eta lambda has to stay below 2 for pFedMe's steps to contract: at eta = 0.3 the authors' lambda = 15 cannot.
PFEDME_PENALTY = 1.0
ARMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "self-fl": ("self-fl", {}),
    "self-fl, no smoothing": ("self-fl", {"smoothing": 1.0}),
    "fedavg, local models": ("self-fl", LOCAL_MODELS),
    "ditto": ("ditto", {}),
    "pfedme": ("pfedme", {"penalty": PFEDME_PENALTY}),
    "perfedavg": ("perfedavg", {}),
    "local": ("local", {}),
}
SATURATED_POINTS = 1.0
UNCHANGED_POINTS = 2.0


PANELS = {"train_accuracy": "Training rows", "weighted_accuracy": "Test rows"}


def settle_problem(found: Problem, job: Job) -> tuple[Problem, WarmUp]:
    """The problem as it is run and its warm start: a quick look takes an LSTM of 32 and a twentieth of the rounds."""
    problem = found.shorten(20, {"hidden": 32}) if job.quick else found
    assert problem.warm_up is not None
    return problem, problem.warm_up


FROM_SCRATCH: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "fedavg": ("fedavg", {}),
    "fedavg, local models": ARMS["fedavg, local models"],
}


def _arms(chosen: Mapping[str, tuple[str, Mapping[str, Any]]], job: Job, num_evaluations: int) -> list[Arm]:
    every = 4 if job.quick else num_evaluations
    return [Arm(label, *method, evaluate_train=True, num_evaluations=every) for label, method in chosen.items()]


def _evaluated_rounds(outcomes: Outcomes) -> set[int]:
    """Rounds that some run was evaluated in."""
    return {int(row["round"]) for group in outcomes.values() for outcome in group for row in outcome.history}


def _table(outcomes: Outcomes) -> list[dict[str, str]]:
    return [
        {
            "method": label,
            "training rows": points(estimate(group, "train_accuracy")),
            "test rows": points(estimate(group, "weighted_accuracy")),
            "top 10 % by size": points(estimate(group, "top10_accuracy")),
            "worst 10 %": points(estimate(group, "worst10_accuracy")),
            "AUC, clients with both classes": points(estimate(group, "weighted_auc").scale_by(100)),
            "global model": "–" if label == "local" else points(estimate(group, "global_accuracy")),
            "gradients": f"{mean_gradients(group):.1f}",
        }
        for label, group in outcomes.items()
    ]


def _name_data(problem: Problem) -> str:
    return "a stand-in for Sent140" if problem.data == SENTIMENT.data else "Sent140"


def _unchanged(outcomes: Outcomes, label: str, since: int, bound: float) -> tuple[Verdict, str]:
    """Whether test accuracy has changed by less than a bound since a round; and by how much, in words."""
    gap = difference(outcomes[label], [outcome.at(since) for outcome in outcomes[label]], "weighted_accuracy")
    return within(gap, bound), f"it changes by {gap.signed} points (paired over {gap.count} seeds; "


def warm_start_study(found: Problem, job: Job) -> StudyResult:
    """Figure 7: FedAvg from scratch."""
    (problem, warm_up), seeds = settle_problem(found, job), seeds_of(job)
    scratch = replace(problem, rounds=warm_up.rounds, warm_up=None)
    outcomes = run_each(scratch, _arms(FROM_SCRATCH, job, 20), seeds, job)
    late = max(
        (number for number in _evaluated_rounds(outcomes) if number <= scratch.rounds * 3 // 4), default=scratch.rounds
    )
    claims = []
    for label in outcomes:
        verdict, change = _unchanged(outcomes, label, late, SATURATED_POINTS)
        claims.append(
            Claim(
                f"Test accuracy saturates during the warm start (appendix, figure 8's text; {label}).",
                verdict,
                f"From round {late} to {scratch.rounds} {change}read as saturated if within {SATURATED_POINTS:g}).",
            )
        )
    caption = f"FedAvg from scratch, {_name_data(found)}; mean over {len(seeds)} seeds, bars ± s.e."
    return replace(
        result_of(outcomes, _table(outcomes), claims, scratch, caption, PANELS),
        title=f"FedAvg from scratch on sentiment ({_name_data(found)})",
        setting=f"{scratch.setting}; {len(seeds)} seeds",
    )


def methods_study(found: Problem, job: Job) -> StudyResult:
    """Figure 8: every method from one warm start."""
    (problem, warm_up), seeds = settle_problem(found, job), seeds_of(job)
    outcomes = run_each(problem, _arms(ARMS, job, 10), seeds, job)
    warm, first = warm_up.rounds, min(_evaluated_rounds(outcomes), default=problem.rounds)
    claims = _convergence_claims(outcomes)
    for label in list(ARMS)[:-1]:
        verdict, change = _unchanged(outcomes, label, first, UNCHANGED_POINTS)
        claims.append(
            Claim(
                f"Test accuracy does not change much after the warm start (appendix, figure 8; {label}).",
                verdict,
                f"From round {warm + first} to {warm + problem.rounds} {change}read as unchanged if within "
                f"{UNCHANGED_POINTS:g}).",
            )
        )
    claims += _claims_beyond(outcomes)
    caption = f"Every method from FedAvg's model of round {warm}, {_name_data(found)}; mean over {len(seeds)} seeds."
    return replace(
        result_of(outcomes, _table(outcomes), claims, problem, caption, PANELS, first=warm),
        title=f"Every method from one warm start on sentiment ({_name_data(found)})",
        setting=f"{problem.setting}; pFedMe with λ = {PFEDME_PENALTY:g}; {len(seeds)} seeds",
    )


def _convergence_claims(outcomes: Outcomes) -> list[Claim]:
    """That Self-FL and FedAvg fit training rows better than each of the others."""
    claims = []
    for better, ours in (("self-fl", "Self-FL"), ("fedavg, local models", "FedAvg")):
        statements = {}
        for baseline, name in (("ditto", "DITTO"), ("pfedme", "pFedMe"), ("perfedavg", "PerFedAvg")):
            gap, test = (
                difference(outcomes[better], outcomes[baseline], part)
                for part in ("train_accuracy", "weighted_accuracy")
            )
            statements[f"{ours} converges better than {name} on training rows (appendix, figure 8)."] = (
                gap,
                f"In the last round: training rows {gap.signed} points, test rows {test.signed} "
                f"({better} − {baseline}, paired over {gap.count} seeds).",
            )
        claims += claims_above_zero(statements)
    return claims


def _claims_beyond(outcomes: Outcomes) -> list[Claim]:
    """What the paper does not compare with."""
    statements = {}
    for name, baseline, metric in (
        ("FedAvg's one model", "fedavg, local models", "global_accuracy"),
        ("models trained alone from there", "local", "weighted_accuracy"),
    ):
        gap = difference(outcomes["self-fl"], outcomes[baseline], "weighted_accuracy", metric)
        text = f"Not in the paper: Self-FL's personal models are better on test rows than {name}."
        statements[text] = gap, f"{gap.signed} points (paired over {gap.count} seeds)."
    return claims_above_zero(statements)


TEXT = (
    study_on(
        replace(SENTIMENT, rounds=200, warm_up=None), "sent140-warmstart", lambda job: warm_start_study(sent140(), job)
    ),
    study_on(SENTIMENT, "sent140", lambda job: methods_study(sent140(), job), f"; pFedMe with λ = {PFEDME_PENALTY:g}"),
)
