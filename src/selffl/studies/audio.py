"""The wake-word studies of the paper: tables 3, 4, 6, 7 and 8, on a stand-in for its private data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial

from torch import Tensor

from selffl.data.devices import DEVICES
from selffl.data.wakeword import RowTable, describe
from selffl.data.wakeword_rows import NORMAL, STATES
from selffl.studies.arms import Arm, Outcomes, ratio_of
from selffl.studies.comparison import run_each, seeds_of, study_on
from selffl.studies.detection import Cell, Relative, as_ratio, average, curves, line, relative, size, spread
from selffl.studies.problems import WAKEWORD, Problem, WarmUp
from selffl.studies.result import (
    OVER_SPLITS,
    Claim,
    Estimate,
    Figure,
    Job,
    StudyResult,
    claims_above_zero,
    read_toml,
    sign,
    within,
)

MAX_LOG_GAP = 0.1  # difference of logarithms, about a tenth of the false accepts
CLIENTS_PER_TYPE = 4  # clients of each type, where clients are drawn
MAX_CONVERGENCE_STEPS = 100  # of Algorithm 2 towards a local optimum, a round

# Labels as in the paper, where -w weighs by sample size and -e equally; and the methods.
METHODS: Mapping[str, str] = {
    "self-fl": "self-fl",
    "fedavg-w": "fedavg",
    "fedavg-e": "fedavg-equal",
    "ditto-w": "ditto",
    "ditto-e": "ditto-equal",
    "perfedavg": "perfedavg",
    "local": "local",
}
PAPER = read_toml("paper.toml")  # by study, and by the label of a method


def _shorten_if_quick(problem: Problem, job: Job) -> Problem:
    """The problem; a quick look has a quarter of the rows, an eighth of the network's width."""
    if not job.quick:
        return problem
    assert problem.warm_up is not None
    return replace(
        problem,
        rounds=max(problem.rounds // 5, 2),
        num_local_steps=5,
        max_local_steps=10,
        batch_size=20,
        data_options={**problem.data_options, "scale": 1 / 128},
        model_options={"width": 0.125},
        warm_up=WarmUp(rounds=1, is_pooled=True, num_local_steps=200, learning_rate=problem.warm_up.learning_rate),
    )


# The last models are what is looked at.
_arm = partial(Arm, keep_scores=True, num_evaluations=1)


@dataclass(frozen=True)
class Found:
    """What a study's arms have left: runs, what their test rows are, and which of their models are looked at."""

    problem: Problem
    seeds: range
    outcomes: Outcomes
    tables: list[RowTable]
    views: Mapping[str, str]  # by label

    @cached_property
    def results(self) -> dict[str, dict[Cell, Relative]]:
        """Relative false accepts of every method's models, by cell."""
        return {label: relative(self.outcomes[label], view, self.tables) for label, view in self.views.items()}

    def average(self, label: str, state: int = NORMAL) -> Tensor:
        """Mean of the logarithms of a method's relative false accepts over types, by seed."""
        return average(self.results[label], state)

    def tested(self, repeats: Tensor) -> Estimate:
        """A difference, one number for each seed, that is to be tested."""
        everyone = [outcome for group in self.outcomes.values() for outcome in group]
        return Estimate.of(repeats, test_per_train=ratio_of(everyone))


def _run(
    problem: Problem,
    arms: Sequence[Arm],
    job: Job,
    views: Mapping[str, str] | None = None,
    done: int = 0,
    total: int | None = None,
) -> Found:
    """Train the arms; ``views`` are what is looked at, by label: of every arm the global model, if nothing is said."""
    chosen, seeds = _shorten_if_quick(problem, job), seeds_of(job)
    outcomes = run_each(chosen, arms, seeds, job, done, total)
    tables = [describe(seed=seed, **chosen.data_options).test for seed in seeds]
    return Found(chosen, seeds, outcomes, tables, views or dict.fromkeys(outcomes, "global"))


def _said(problem: Problem) -> str:
    """How many clips, and how many rows were made of them (seed 0)."""
    counts = describe(**problem.data_options).counts()

    def unique(part: str, label: int) -> int:
        """Clips are in one type each; a type's are the same in all its states."""
        by_type = dict.fromkeys(DEVICES, 0)
        for row in counts:
            if row["part"] == part and row["label"] == label:
                by_type[row["type"]] = max(by_type[row["type"]], row["clips"])
        return sum(by_type.values())

    said = []
    for part, name in (("train", "training"), ("test", "test")):
        rows = sum(row["rows"] for row in counts if row["part"] == part)
        said.append(
            f"{name}: {rows:,} rows rendered from {unique(part, 1)} clips of the wake word and "
            f"{unique(part, 0):,} others"
        )
    return "; ".join(said)


def _result(found: Found, table: list[dict[str, str]], claims: list[Claim]) -> StudyResult:
    """Tables, DET curves and verdicts."""
    count = len(found.seeds)
    rows = [
        {
            "method": label,
            "type": list(DEVICES)[device],
            "state": STATES[state],
            "seed": seed,
            "relative_false_accepts": float(value.by_seed[place].exp()),
        }
        for label, cells in found.results.items()
        for (device, state), value in cells.items()
        for place, seed in enumerate(found.seeds)
    ]
    drawn = {label: (found.outcomes[label], view) for label, view in found.views.items()}
    figure = Figure(
        "det",
        f"False accepts against false rejects; mean over device types and {count} seeds.",
        [curves(drawn, found.tables, state, name.capitalize()) for state, name in enumerate(STATES)],
    )
    return StudyResult(
        rows,
        table,
        [figure],
        claims,
        asdict(found.problem) | {"num_seeds": count},
        setting=f"{found.problem.setting}; {_said(found.problem)}; {count} seeds. Relative false accepts, at as many "
        "false rejects as the pre-trained model has, whose threshold rejects a tenth of all types' wake words in the "
        "normal state; geometric mean over seeds [95 % bootstrap interval over clips, for these seeds]",
        decided_by=OVER_SPLITS,
    )


def _normal(found: Found, paper: Mapping[str, Sequence[float]]) -> list[dict[str, str]]:
    """A line per method in the normal state."""
    return [
        {"method": label}
        | line(cells, NORMAL)
        | {"paper": " ".join(f"{number:.2f}" for number in paper.get(label, ())) or "–"}
        for label, cells in found.results.items()
    ]


def _by_state(found: Found, paper: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """A line per method and state."""
    return [
        {"method": label, "state": name}
        | line(cells, state)
        | {"paper": paper[label][state] if label in paper else "–"}
        for label, cells in found.results.items()
        for state, name in enumerate(STATES)
    ]


def _fewer(found: Found, texts: Mapping[str, str]) -> list[Claim]:
    """Whether Self-FL has fewer false accepts than others in the normal state, mean over types, paired over seeds."""
    statements, ours = {}, found.results["self-fl"]
    for other, text in texts.items():
        gap, theirs = found.tested(found.average(other) - found.average("self-fl")), found.results[other]
        by_type = ", ".join(
            f"{name} {theirs[device, NORMAL].mean:.2f} against {ours[device, NORMAL].mean:.2f}"
            for device, name in enumerate(DEVICES)
        )
        factor = f"{other} over self-fl, mean over types: {as_ratio(gap)}, paired over {gap.count} seeds"
        statements[text] = gap, f"{factor}. By type: {by_type}."
    return claims_above_zero(statements)


def _full(problem: Problem, job: Job, views: Mapping[str, str]) -> Found:
    """All methods with full participation; FedAvg's local models are those after L steps more."""
    steps = _shorten_if_quick(problem, job).num_local_steps
    arms = [_arm(label, name, fine_tune=(steps,) if label == "fedavg-e" else ()) for label, name in METHODS.items()]
    return _run(problem, arms, job, views)


def global_study(problem: Problem, job: Job) -> StudyResult:
    """Table 3: the global model."""
    found = _full(problem, job, dict.fromkeys(PAPER["wakeword-global"], "global"))
    texts = {
        other: f"Self-FL's global model has fewer false accepts than {other}'s (table 3)."
        for other in list(found.views)[1:]
    }
    statements = {}
    for label in found.views:
        gap, is_worse = found.tested(found.average(label)), label in ("fedavg-w", "ditto-w")
        text = (
            f"The global model of {label} gets {'worse' if is_worse else 'better'} than the pre-trained one (table 3)."
        )
        evidence = f"Relative false accepts, mean over types: {as_ratio(gap)}."
        statements[text] = gap.scale_by(1 if is_worse else -1), evidence
    claims = _fewer(found, texts) + claims_above_zero(statements)
    return _result(found, _normal(found, PAPER["wakeword-global"]), claims)


def personal_study(problem: Problem, job: Job) -> StudyResult:
    """Table 4: the personal models."""
    tuned = {"fedavg-e": f"global+{_shorten_if_quick(problem, job).num_local_steps}"}
    found = _full(problem, job, dict.fromkeys((*PAPER["wakeword-personal"], "local"), "personal") | tuned)
    texts = {
        other: f"Self-FL's personal models have fewer false accepts than {other}'s (table 4)."
        for other in list(PAPER["wakeword-personal"])[1:]
    }
    texts["local"] = "Not in the paper: and than those of local training."
    shared = average(relative(found.outcomes["self-fl"], "global", found.tables), NORMAL)
    gap = found.tested(shared - found.average("self-fl"))
    claim = Claim(
        "Not in the paper: Self-FL's personal models have fewer false accepts than its global model.",
        sign(gap),
        f"Global over personal, mean over types: {as_ratio(gap)}, paired over {gap.count} seeds.",
    )
    return _result(found, _normal(found, PAPER["wakeword-personal"]), [*_fewer(found, texts), claim])


def augmented_study(problem: Problem, job: Job, *, max_convergence_steps: int = MAX_CONVERGENCE_STEPS) -> StudyResult:
    """Table 6: Algorithm 1 against Algorithm 2."""
    arms = [
        _arm("Algorithm 1", "self-fl"),
        _arm("Algorithm 2", "self-fl-augmented", {"max_convergence_steps": max_convergence_steps}),
    ]
    found = _run(problem, arms, job)
    gap = found.tested(found.average("Algorithm 2") - found.average("Algorithm 1"))
    claim = Claim(
        "The two algorithms perform alike (table 6).",
        within(gap, MAX_LOG_GAP),
        f"Algorithm 2 over Algorithm 1, mean over types: {as_ratio(gap)}, paired over {gap.count} seeds; read as alike "
        f"if the logarithm is within {MAX_LOG_GAP:g}.",
    )
    return _result(found, _normal(found, PAPER["augmented-wakeword"]), [claim])


def clusters_study(problem: Problem, job: Job) -> StudyResult:
    """Table 7: client level against cluster level."""
    whole, others = "client level", {"clusters by device type": {}, "clusters by variance": {"clusters": "variance"}}
    arms = [_arm(label, "self-fl-cluster", options) for label, options in others.items()]
    found = _run(problem, [_arm(whole, "self-fl"), *arms], job)
    claims = []
    for label in others:
        for text, name, measure in (
            ("changes types and states more evenly", "Standard deviation of the logarithm", spread),
            ("is more conservative", "Mean size of the logarithm", size),
        ):
            ours, theirs = measure(found.results[label]), measure(found.results[whole])
            gap = found.tested(theirs - ours)
            claims.append(
                Claim(
                    f"Cluster-level aggregation {text} (table 7; {label}).",
                    sign(gap),
                    f"{name} over types and states: {float(theirs.mean()):.3f} at client level, "
                    f"{float(ours.mean()):.3f} with {label}; difference {gap.mean:+.3f} ± {gap.error:.3f} (paired over "
                    f"{gap.count} seeds).",
                )
            )
    return _result(found, _by_state(found, PAPER["wakeword-clusters"]), claims)


def participation_study(problem: Problem, job: Job) -> StudyResult:
    """Table 8: how many take part in a round."""
    shares = {"C = 0.25": 0.25, "C = 0.1": 0.1}
    parts: dict[str, Found] = {}
    each, total = len(seeds_of(job)), len(shares) * len(seeds_of(job))
    for label, share in shares.items():
        sampled = replace(problem, participation=share)
        parts[label] = _run(sampled, [_arm(label, "self-fl")], job, done=len(parts) * each, total=total)
    outcomes = {label: part.outcomes[label] for label, part in parts.items()}
    found = replace(parts["C = 0.25"], outcomes=outcomes, views=dict.fromkeys(shares, "global"))
    statements = {}
    for state, name in enumerate(STATES):
        gap = found.tested(found.average("C = 0.1", state) - found.average("C = 0.25", state))
        evidence = f"C = 0.1 over C = 0.25, mean over types: {as_ratio(gap)}, paired over {gap.count} seeds."
        statements[f"With more clients a round there are fewer false accepts (table 8; {name})."] = gap, evidence
    table = _by_state(found, PAPER["wakeword-participation"])
    return _result(found, table, claims_above_zero(statements))


SAMPLED = replace(
    WAKEWORD,
    title=f"{WAKEWORD.title}, over {CLIENTS_PER_TYPE * len(DEVICES)} clients",
    participation=0.25,
    data_options={"clients_per_type": CLIENTS_PER_TYPE},
)


# Runs that two of the studies share were made twice on a GPU, and differ.
AUDIO = (
    study_on(WAKEWORD, "wakeword-global", partial(global_study, WAKEWORD)),
    study_on(WAKEWORD, "wakeword-personal", partial(personal_study, WAKEWORD)),
    study_on(
        WAKEWORD,
        "augmented-wakeword",
        partial(augmented_study, WAKEWORD),
        f"; local optima after at most {MAX_CONVERGENCE_STEPS} steps a round",
    ),
    study_on(SAMPLED, "wakeword-clusters", partial(clusters_study, SAMPLED)),
    study_on(SAMPLED, "wakeword-participation", partial(participation_study, SAMPLED), "; and C = 0.1"),
)
