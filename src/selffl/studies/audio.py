"""The wake-word studies of the paper: tables 3, 4, 6, 7 and 8, on a stand-in for its private data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from selffl.data.devices import DEVICES
from selffl.data.wakeword import RowTable, describe
from selffl.data.wakeword_rows import NORMAL, STATES
from selffl.studies.arms import Arm, Outcomes, ratio_of
from selffl.studies.comparison import NUM_SEEDS, run_each, seeds_of
from selffl.studies.detection import Cell, Relative, as_ratio, average, curves, line, relative, size, spread
from selffl.studies.problems import WAKEWORD, Problem, WarmUp
from selffl.studies.result import (
    OVER_SPLITS,
    Claim,
    Estimate,
    Figure,
    Job,
    Study,
    StudyResult,
    above_zero,
    sign,
    within,
)

MAX_LOG_GAP = 0.1  # difference of logarithms, about a tenth of the false accepts
CLIENTS_PER_TYPE = 4  # clients of each type, where clients are drawn
MAX_CONVERGENCE_STEPS = 100  # of Algorithm 2 towards a local optimum, a round

# Labels as in the paper: -w weighs by sample size, -e equally.
METHODS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "self-fl": ("self-fl", {}),
    "fedavg-w": ("fedavg", {}),
    "fedavg-e": ("fedavg-equal", {}),
    "ditto-w": ("ditto", {}),
    "ditto-e": ("ditto-equal", {}),
    "perfedavg": ("perfedavg", {}),
    "local": ("local", {}),
}
# The paper's tables: normal state, types A to E.
GLOBAL_PAPER = {
    "self-fl": (0.92, 0.94, 0.91, 0.91, 1.01),
    "fedavg-w": (8.39, 4.00, 12.80, 8.61, 10.62),
    "fedavg-e": (0.97, 0.96, 1.00, 0.92, 1.00),
    "ditto-w": (8.38, 4.00, 12.75, 8.61, 10.23),
    "ditto-e": (0.97, 0.95, 1.00, 0.93, 0.99),
    "perfedavg": (1.06, 0.98, 1.08, 0.93, 1.01),
}
PERSONAL_PAPER = {
    "self-fl": (0.93, 0.91, 0.90, 0.90, 0.99),
    "fedavg-e": (0.95, 0.95, 0.93, 0.91, 0.98),
    "ditto-e": (0.97, 0.96, 0.93, 0.91, 0.96),
    "perfedavg": (1.02, 1.11, 1.08, 1.00, 0.93),
}
AUGMENTED_PAPER = {"Algorithm 2": (0.93, 0.94, 0.96, 0.89, 0.98), "Algorithm 1": (0.92, 0.94, 0.91, 0.91, 1.01)}
CLIENT_PAPER = ("0.91 0.92 0.97 0.91 0.99", "0.93 0.96 1.80 1.00 1.00", "NA 0.89 NA 1.04 1.00")  # by state
CLUSTER_PAPER = ("0.96 0.95 1.00 0.91 0.97", "0.86 0.99 1.00 0.97 1.01", "NA 0.89 NA 1.00 1.00")
SPARSE_PAPER = ("0.95 0.95 1.00 0.91 0.97", "0.86 0.97 1.00 0.96 1.01", "NA 0.89 NA 1.00 1.00")


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
    """What a study's arms have left: runs, and what their test rows are."""

    problem: Problem
    seeds: range
    outcomes: Outcomes
    tables: list[RowTable]

    def relative(self, label: str, view: str) -> dict[Cell, Relative]:
        """Relative false accepts of an arm's models."""
        return relative(self.outcomes[label], view, self.tables)

    def tested(self, repeats: Tensor) -> Estimate:
        """A difference, one number for each seed, that is to be tested."""
        everyone = [outcome for group in self.outcomes.values() for outcome in group]
        return Estimate.of(repeats, test_per_train=ratio_of(everyone))


def _run(problem: Problem, arms: Sequence[Arm], job: Job, done: int = 0, total: int | None = None) -> Found:
    chosen, seeds = _shorten_if_quick(problem, job), seeds_of(job)
    outcomes = run_each(chosen, arms, seeds, job, done, total)
    tables = [describe(seed=seed, **chosen.data_options).test for seed in seeds]
    return Found(chosen, seeds, outcomes, tables)


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


def _result(
    found: Found,
    results: Mapping[str, Mapping[Cell, Relative]],
    views: Mapping[str, str],
    table: list[dict[str, str]],
    claims: list[Claim],
    title: str,
) -> StudyResult:
    """Tables, DET curves and verdicts; ``views`` are the methods drawn, and which of their models."""
    count = len(found.seeds)
    drawn = {label: (found.outcomes[label], view) for label, view in views.items()}
    figure = Figure(
        "det",
        f"False accepts against false rejects; mean over device types and {count} seeds.",
        [curves(drawn, found.tables, state, name.capitalize()) for state, name in enumerate(STATES)],
    )
    return StudyResult(
        _rows(results, found.seeds),
        table,
        [figure],
        claims,
        asdict(found.problem) | {"num_seeds": count},
        title=f"{title} ({MADE_UP})",
        setting=f"{found.problem.setting}; {_said(found.problem)}; {count} seeds. Relative false accepts, at as many "
        "false rejects as the pre-trained model has, whose threshold rejects a tenth of all types' wake words in the "
        "normal state; geometric mean over seeds [95 % bootstrap interval over clips, for these seeds]",
        decided_by=OVER_SPLITS,
    )


def _rows(results: Mapping[str, Mapping[Cell, Relative]], seeds: range) -> list[dict[str, Any]]:
    """The long table."""
    return [
        {
            "method": label,
            "type": list(DEVICES)[device],
            "state": STATES[state],
            "seed": seed,
            "relative_false_accepts": float(value.by_seed[place].exp()),
        }
        for label, cells in results.items()
        for (device, state), value in cells.items()
        for place, seed in enumerate(seeds)
    ]


def _normal(
    results: Mapping[str, Mapping[Cell, Relative]], paper: Mapping[str, Sequence[float]]
) -> list[dict[str, str]]:
    """A line per method in the normal state."""
    return [
        {"method": label}
        | line(cells, NORMAL)
        | {"paper": " ".join(f"{number:.2f}" for number in paper.get(label, ())) or "–"}
        for label, cells in results.items()
    ]


def _by_state(
    results: Mapping[str, Mapping[Cell, Relative]], paper: Mapping[str, Sequence[str]]
) -> list[dict[str, str]]:
    """A line per method and state."""
    return [
        {"method": label, "state": name}
        | line(cells, state)
        | {"paper": paper[label][state] if label in paper else "–"}
        for label, cells in results.items()
        for state, name in enumerate(STATES)
    ]


def _fewer(
    found: Found, results: Mapping[str, Mapping[Cell, Relative]], ours: str, texts: Mapping[str, str]
) -> list[Claim]:
    """Whether ours has fewer false accepts than others in the normal state, mean over types, paired over seeds."""
    gaps = [found.tested(average(results[other], NORMAL) - average(results[ours], NORMAL)) for other in texts]
    claims = []
    for (other, text), gap, verdict in zip(texts.items(), gaps, above_zero(gaps), strict=True):
        by_type = ", ".join(
            f"{name} {results[other][device, NORMAL].mean:.2f} against {results[ours][device, NORMAL].mean:.2f}"
            for device, name in enumerate(DEVICES)
        )
        factor = f"{other} over {ours}, mean over types: {as_ratio(gap)}, paired over {gap.count} seeds"
        claims.append(Claim(text, verdict, f"{factor}. By type: {by_type}."))
    return claims


def _full(problem: Problem, job: Job) -> Found:
    """All methods with full participation; FedAvg's local models are those after L steps more."""
    steps = _shorten_if_quick(problem, job).num_local_steps
    arms = [
        _arm(label, *chosen, fine_tune=(steps,) if label == "fedavg-e" else ()) for label, chosen in METHODS.items()
    ]
    return _run(problem, arms, job)


def global_study(problem: Problem, job: Job) -> StudyResult:
    """Table 3: the global model."""
    found = _full(problem, job)
    views = dict.fromkeys(GLOBAL_PAPER, "global")
    results = {label: found.relative(label, view) for label, view in views.items()}
    texts = {
        other: f"Self-FL's global model has fewer false accepts than {other}'s (table 3)." for other in list(views)[1:]
    }
    claims = _fewer(found, results, "self-fl", texts)
    gaps = {label: found.tested(average(results[label], NORMAL)) for label in views}
    is_worse = {label: label in ("fedavg-w", "ditto-w") for label in views}
    verdicts = above_zero([gap.scale_by(1 if is_worse[label] else -1) for label, gap in gaps.items()])
    for (label, gap), verdict in zip(gaps.items(), verdicts, strict=True):
        direction = "worse" if is_worse[label] else "better"
        claims.append(
            Claim(
                f"The global model of {label} gets {direction} than the pre-trained one (table 3).",
                verdict,
                f"Relative false accepts, mean over types: {as_ratio(gap)}.",
            )
        )
    return _result(found, results, views, _normal(results, GLOBAL_PAPER), claims, "Wake words: the global model")


def personal_study(problem: Problem, job: Job) -> StudyResult:
    """Table 4: the personal models."""
    found = _full(problem, job)
    views = dict.fromkeys((*PERSONAL_PAPER, "local"), "personal")
    views["fedavg-e"] = f"global+{found.problem.num_local_steps}"
    results = {label: found.relative(label, view) for label, view in views.items()}
    texts = {
        other: f"Self-FL's personal models have fewer false accepts than {other}'s (table 4)."
        for other in list(PERSONAL_PAPER)[1:]
    }
    texts["local"] = "Not in the paper: and than those of local training."
    claims = _fewer(found, results, "self-fl", texts)
    gap = found.tested(average(found.relative("self-fl", "global"), NORMAL) - average(results["self-fl"], NORMAL))
    claims.append(
        Claim(
            "Not in the paper: Self-FL's personal models have fewer false accepts than its global model.",
            sign(gap),
            f"Global over personal, mean over types: {as_ratio(gap)}, paired over {gap.count} seeds.",
        )
    )
    return _result(found, results, views, _normal(results, PERSONAL_PAPER), claims, "Wake words: personal models")


def augmented_study(problem: Problem, job: Job, *, max_convergence_steps: int = MAX_CONVERGENCE_STEPS) -> StudyResult:
    """Table 6: Algorithm 1 against Algorithm 2."""
    arms = [
        _arm("Algorithm 1", "self-fl"),
        _arm("Algorithm 2", "self-fl-augmented", {"max_convergence_steps": max_convergence_steps}),
    ]
    found = _run(problem, arms, job)
    views = {arm.label: "global" for arm in arms}
    results = {label: found.relative(label, view) for label, view in views.items()}
    gap = found.tested(average(results["Algorithm 2"], NORMAL) - average(results["Algorithm 1"], NORMAL))
    claim = Claim(
        "The two algorithms perform alike (table 6).",
        within(gap, MAX_LOG_GAP),
        f"Algorithm 2 over Algorithm 1, mean over types: {as_ratio(gap)}, paired over {gap.count} seeds; read as alike "
        f"if the logarithm is within {MAX_LOG_GAP:g}.",
    )
    table = _normal(results, AUGMENTED_PAPER)
    return _result(found, results, views, table, [claim], "Wake words: Algorithm 1 against Algorithm 2")


def clusters_study(problem: Problem, job: Job) -> StudyResult:
    """Table 7: client level against cluster level."""
    arms = [
        _arm("client level", "self-fl"),
        _arm("clusters by device type", "self-fl-cluster"),
        _arm("clusters by variance", "self-fl-cluster", {"clusters": "variance"}),
    ]
    found = _run(problem, arms, job)
    views = {arm.label: "global" for arm in arms}
    results = {label: found.relative(label, view) for label, view in views.items()}
    claims = []
    for label in list(views)[1:]:
        for text, name, measure in (
            ("changes types and states more evenly", "Standard deviation of the logarithm", spread),
            ("is more conservative", "Mean size of the logarithm", size),
        ):
            ours, theirs = measure(results[label]), measure(results["client level"])
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
    paper = {"client level": CLIENT_PAPER, "clusters by device type": CLUSTER_PAPER}
    table = _by_state(results, paper)
    return _result(found, results, views, table, claims, "Wake words: client level against cluster level")


def participation_study(problem: Problem, job: Job) -> StudyResult:
    """Table 8: how many take part in a round."""
    shares = {"C = 0.25": 0.25, "C = 0.1": 0.1}
    num_seeds = len(seeds_of(job))
    parts = {
        label: _run(
            replace(problem, participation=share),
            [_arm(label, "self-fl")],
            job,
            done * num_seeds,
            len(shares) * num_seeds,
        )
        for done, (label, share) in enumerate(shares.items())
    }
    found = replace(parts["C = 0.25"], outcomes={label: part.outcomes[label] for label, part in parts.items()})
    views = dict.fromkeys(shares, "global")
    results = {label: found.relative(label, view) for label, view in views.items()}
    gaps = [
        found.tested(average(results["C = 0.1"], state) - average(results["C = 0.25"], state))
        for state in range(len(STATES))
    ]
    claims = [
        Claim(
            f"With more clients a round there are fewer false accepts (table 8; {name}).",
            verdict,
            f"C = 0.1 over C = 0.25, mean over types: {as_ratio(gap)}, paired over {gap.count} seeds.",
        )
        for name, gap, verdict in zip(STATES, gaps, above_zero(gaps), strict=True)
    ]
    table = _by_state(results, {"C = 0.25": CLIENT_PAPER, "C = 0.1": SPARSE_PAPER})
    return _result(found, results, views, table, claims, "Wake words: two activity rates")


SAMPLED = replace(
    WAKEWORD,
    title=f"{WAKEWORD.title}, over {CLIENTS_PER_TYPE * len(DEVICES)} clients",
    participation=0.25,
    data_options={"clients_per_type": CLIENTS_PER_TYPE},
)
MADE_UP = "made-up devices, a stand-in for the paper's private audio"
# Runs that two of the studies share were made twice on a GPU, and differ.
AUDIO = (
    Study(
        "wakeword-global",
        f"Wake words: the global model ({MADE_UP})",
        "section 4.3, table 3",
        f"{WAKEWORD.setting}; {NUM_SEEDS} seeds",
        partial(global_study, WAKEWORD),
    ),
    Study(
        "wakeword-personal",
        f"Wake words: personal models ({MADE_UP})",
        "section 4.3, table 4",
        f"{WAKEWORD.setting}; {NUM_SEEDS} seeds",
        partial(personal_study, WAKEWORD),
    ),
    Study(
        "augmented-wakeword",
        f"Wake words: Algorithm 1 against Algorithm 2 ({MADE_UP})",
        "appendix, table 6",
        f"{WAKEWORD.setting}; local optima after at most {MAX_CONVERGENCE_STEPS} steps a round; {NUM_SEEDS} seeds",
        partial(augmented_study, WAKEWORD),
    ),
    Study(
        "wakeword-clusters",
        f"Wake words: client level against cluster level ({MADE_UP})",
        "appendix, table 7",
        f"{SAMPLED.setting}; {NUM_SEEDS} seeds",
        partial(clusters_study, SAMPLED),
    ),
    Study(
        "wakeword-participation",
        f"Wake words: two activity rates ({MADE_UP})",
        "appendix, table 8",
        f"{SAMPLED.setting}; and C = 0.1; {NUM_SEEDS} seeds",
        partial(participation_study, SAMPLED),
    ),
)
