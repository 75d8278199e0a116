"""Beyond the paper: hostile clients, and what honest ones keep of their accuracy with and without a defence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from selffl.studies.arms import Arm, Outcome, Outcomes, ratio_of, score_of_clients
from selffl.studies.attacked_problem import ATTACKS, AttackedProblem
from selffl.studies.comparison import points, run_each, seeds_of
from selffl.studies.result import TARGET, Chart, Claim, Estimate, Figure, Job, Series, Study, StudyResult, Verdict

HOSTILE_SHARES = (0.05, 0.1, 0.2, 0.4)  # of the clients
MAIN_SHARE = 0.2  # at which every defence is tried, and which the bar is for
MAX_LOSS_POINTS = 2.0  # that honest clients may lose to hostile ones
MAX_PRICE_POINTS = 0.3  # that they may lose by a defence without any
BY_MEANS = "None: a target is met where the means over seeds are within its bound, all of them; counted, not tested."
DEFENCES: Mapping[str, tuple[str, ...]] = {  # of each method, the one that is recommended first
    "fedavg": ("clip", "median", "trimmed"),
    "ditto": ("clip", "median", "trimmed"),
    "self-fl": ("clip", "hierarchy", "trimmed"),
    "self-fl-auto": ("hierarchy", "clip", "median", "trimmed"),
}
SENT: Mapping[str, tuple[str, ...]] = {  # attacks on what only some methods send
    "variances": ("self-fl", "self-fl-auto"),
    "classes": ("self-fl-auto",),
}
VIEWS = {"personal models": "accuracy", "global model": "global_accuracy"}

DIGITS_20 = AttackedProblem(
    "digits-20",
    "scikit-learn's digits over 20 clients with three digits each and lognormal sizes",
    data="digits",
    model="softmax",
    rounds=30,
    participation=1.0,
    learning_rate=0.1,
    data_options={"test_fraction": 0.3, "num_clients": 20},
)


def label_of(method: str, attack: str, share: float, robust: str) -> str:
    """What an arm is called."""
    return f"{method}, {attack if share else 'nobody'}, {share:.0%}, {robust}"


def arm_of(method: str, attack: str, share: float, robust: str) -> Arm:
    """A method under one attack with one defence."""
    settings = {"attack": attack, "hostile_share": share, "robust": robust}
    return Arm(label_of(method, attack, share, robust), method, settings=settings, num_evaluations=1)


def arms_of(shares: Sequence[float]) -> list[Arm]:
    """Arms: nobody with every defence; every attack with none and with the recommended; at the main share with all."""
    found = []
    for method, defences in DEFENCES.items():
        found += [arm_of(method, "none", 0.0, robust) for robust in ("none", *defences)]
        for attack in attacks_on(method):
            for share in shares:
                tried = defences if share == MAIN_SHARE else defences[:1]
                found += [arm_of(method, attack, share, robust) for robust in ("none", *tried)]
    return found


def honest_score(problem: AttackedProblem, outcome: Outcome, share: float, name: str) -> float:
    """The accuracy of clients that are honest at that share, in percent, over their rows; NaN where a run diverged."""
    if outcome.summary["status"] == "diverged":
        return math.nan
    liars = set(replace(problem, hostile_share=share).liars(outcome.seed))
    return score_of_clients([row for place, row in enumerate(outcome.clients) if place not in liars], name)


def loss(
    problem: AttackedProblem, outcomes: Outcomes, method: str, attack: str, share: float, robust: str, name: str
) -> Estimate:
    """What honest clients lose to a plain run without hostile ones, in points, paired over seeds."""
    plain, found = outcomes[label_of(method, "none", 0.0, "none")], outcomes[label_of(method, attack, share, robust)]
    gaps = [
        honest_score(problem, before, share, name) - honest_score(problem, after, share, name)
        for before, after in zip(plain, found, strict=True)
    ]
    return Estimate.of(torch.tensor(gaps), test_per_train=ratio_of((*plain, *found)))


def attacks_study(whole: AttackedProblem, job: Job, shares: Sequence[float] = HOSTILE_SHARES) -> StudyResult:
    """Every method, attack, share and defence."""
    problem = whole.shorten(5) if job.quick else whole
    seeds = seeds_of(job)
    arms = arms_of(shares)
    outcomes = run_each(problem, arms, seeds, job)
    rows: list[dict[str, Any]] = []
    table = []
    for arm in arms:
        attack, share, robust = (arm.settings[key] for key in ("attack", "hostile_share", "robust"))
        line = {"method": arm.algorithm, "attack": attack, "hostile": f"{share:.0%}", "defence": robust}
        for view, name in VIEWS.items():
            scores = [honest_score(problem, outcome, share, name) for outcome in outcomes[arm.label]]
            rows += [
                {**line, "view": view, "seed": outcome.seed, "accuracy": score}
                for outcome, score in zip(outcomes[arm.label], scores, strict=True)
            ]
            line[view] = points(Estimate.of(torch.tensor(scores)))
            line[f"{view}, lost"] = points(loss(problem, outcomes, arm.algorithm, attack, share, robust, name))
        table.append(line)
    claims = [
        claim
        for method in DEFENCES
        for claim in (_price(problem, outcomes, method), _withstood(problem, outcomes, method))
    ]
    caption = (
        f"What honest clients' own models lose at {MAIN_SHARE:.0%} hostile clients, in points; mean over {len(seeds)} "
        "seeds, bars ± s.e.; attacks in the order of the table."
    )
    charts = [_chart(problem, outcomes, method) for method in DEFENCES]
    config = asdict(problem) | {"num_seeds": len(seeds), "shares": list(shares)}
    return StudyResult(rows, table, [Figure("loss", caption, charts)], claims, config, decided_by=BY_MEANS)


def attacks_on(method: str) -> list[str]:
    """Attacks that a method can be hit by."""
    return [attack for attack in ATTACKS if method in SENT.get(attack, DEFENCES)]


def _chart(problem: AttackedProblem, outcomes: Outcomes, method: str) -> Chart:
    attacks = attacks_on(method)
    lines = [
        Series.of(
            robust,
            list(range(1, len(attacks) + 1)),
            [loss(problem, outcomes, method, attack, MAIN_SHARE, robust, "accuracy") for attack in attacks],
        )
        for robust in ("none", *DEFENCES[method])
    ]
    return Chart(method, "attack", "points lost", lines, kind="points", dodge=0.1)


def _at_most(losses: Iterable[Estimate], most: float) -> Verdict:
    """Whether every loss is within a bound, by its mean: with two or three seeds no interval tells more."""
    return "holds" if all(each.mean <= most for each in losses) else "does not hold"


def _price(problem: AttackedProblem, outcomes: Outcomes, method: str) -> Claim:
    robust = DEFENCES[method][0]
    found = loss(problem, outcomes, method, "none", 0.0, robust, "accuracy")
    return Claim(
        f"{TARGET}without hostile clients {robust} costs {method} at most {MAX_PRICE_POINTS:g} points.",
        _at_most([found], MAX_PRICE_POINTS),
        f"{found.mean:.2f} ± {found.error:.2f} points lost over {found.count} seeds.",
    )


def _withstood(problem: AttackedProblem, outcomes: Outcomes, method: str) -> Claim:
    robust = DEFENCES[method][0]
    losses = {
        attack: loss(problem, outcomes, method, attack, MAIN_SHARE, robust, "accuracy") for attack in attacks_on(method)
    }
    words = "; ".join(f"{attack} {each.mean:.2f} ± {each.error:.2f}" for attack, each in losses.items())
    return Claim(
        f"{TARGET}with {robust}, honest clients of {method} lose at most {MAX_LOSS_POINTS:g} points at "
        f"{MAIN_SHARE:.0%} hostile ones.",
        _at_most(losses.values(), MAX_LOSS_POINTS),
        f"Points lost: {words}.",
    )


ATTACKS_STUDY = Study.known(
    "attacks", f"{DIGITS_20.setting}; honest clients alone are measured", partial(attacks_study, DIGITS_20)
)
