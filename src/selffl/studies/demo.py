"""The embedded demonstration: handwritten digits over forty clients, Self-FL and its rivals."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from selffl.algorithms import ALGORITHMS, algorithm
from selffl.data.digits import digits
from selffl.engines.cohort import CohortEngine, RunState, cohort_size
from selffl.studies.result import Chart, Claim, Estimate, Figure, Progress, Series, Study, StudyResult, Verdict
from selffl.training.model import FlatModel, ModelSource, correct_predictions


@dataclass(frozen=True)
class Setting:
    """What is trained, on what, for how long."""

    num_clients: int = 40
    classes_per_client: int = 3
    test_fraction: float = 0.3
    num_rounds: int = 60
    participation: float = 0.25
    learning_rate: float = 0.03
    batch_size: int = 10
    num_seeds: int = 5
    check_every: int = 10  # rounds between two evaluations
    methods: tuple[str, ...] = field(
        default=("self-fl", "self-fl-exact", "ditto", "pfedme", "perfedavg", "fedavg", "local")
    )


@dataclass(frozen=True)
class Scores:
    """Accuracy of one run at one moment, on every client's own test rows."""

    weighted: float  # by number of test rows
    worst: float  # mean of the worst tenth of clients
    top: float  # weighted, over the tenth of clients with the most training rows
    global_model: float  # of the one shared model


def scores(source: ModelSource, engine: CohortEngine, state: RunState) -> Scores:
    """Evaluate personal models and the global one."""
    test, train_sizes = source.federation.test, source.federation.train.num_examples
    size = test.num_examples
    tenth = max(len(size) // 10, 1)
    right = correct_predictions(source.model, engine.personal(state), test).to(torch.float64)
    shared = correct_predictions(source.model, state.server.params, test).to(torch.float64)
    largest = train_sizes.argsort(descending=True)[:tenth]
    tested = size > 0
    worst = (right[tested] / size[tested]).sort().values[:tenth]
    return Scores(
        float(right.sum() / size.sum()),
        float(worst.mean()),
        float(right[largest].sum() / size[largest].sum()),
        float(shared.sum() / size.sum()),
    )


@dataclass(frozen=True)
class Run:
    """One method, one seed."""

    history: list[Scores]  # every ``check_every`` rounds
    num_gradients: float  # per client and round it took part in


def train(setting: Setting, name: str, seed: int) -> Run:
    """One method from nothing."""
    federation = digits(setting.num_clients, setting.classes_per_client, setting.test_fraction, seed)
    model = FlatModel(nn.Linear(federation.train.features.shape[1], 10))
    source = ModelSource(
        federation, model, nn.functional.cross_entropy, setting.learning_rate, setting.batch_size, seed
    )
    engine = CohortEngine(algorithm(name), source, setting.participation, seed)
    state = engine.start(torch.zeros_like(model.params))
    history = []
    for _ in range(setting.num_rounds // setting.check_every):
        state = engine.advance(state, setting.check_every)
        history.append(scores(source, engine, state))
    rounds_taken = setting.num_rounds * cohort_size(setting.num_clients, setting.participation)
    return Run(history, float(state.num_gradients.sum()) / rounds_taken)


METRICS = {
    "weighted": "accuracy",
    "top": "top 10 % by size",
    "worst": "worst 10 %",
    "global_model": "global model",
}


def _run(quick: bool, progress: Progress) -> StudyResult:
    setting = Setting(num_seeds=2, num_rounds=20) if quick else Setting()
    assert all(name in ALGORITHMS for name in setting.methods)
    total = len(setting.methods) * setting.num_seeds
    runs: dict[str, list[Run]] = {name: [] for name in setting.methods}
    done = 0
    for seed in range(setting.num_seeds):
        for name in setting.methods:
            progress(done, total, f"{name}, seed {seed}")
            runs[name].append(train(setting, name, seed))
            done += 1
    progress(total, total, "done")

    def last(name: str, metric: str) -> Tensor:
        return torch.tensor([100 * getattr(run.history[-1], metric) for run in runs[name]], dtype=torch.float64)

    rows: list[dict[str, Any]] = [
        {"method": name, "seed": seed, "round": (index + 1) * setting.check_every, **asdict(found)}
        for name, group in runs.items()
        for seed, run in enumerate(group)
        for index, found in enumerate(run.history)
    ]
    table = []
    for name in setting.methods:
        line = {"method": name}
        for metric, title in METRICS.items():
            found = Estimate.of(last(name, metric))
            # Local training never changes the model it starts from.
            line[title] = (
                "–" if (name, metric) == ("local", "global_model") else f"{found.mean:.1f} ± {found.error:.1f}"
            )
        line["gradients"] = f"{Estimate.of(torch.tensor([r.num_gradients for r in runs[name]])).mean:.0f}"
        table.append(line)

    ticks = [(index + 1) * setting.check_every for index in range(setting.num_rounds // setting.check_every)]
    charts = []
    for metric, title in (("weighted", "All clients, by test rows"), ("worst", "Worst tenth of clients")):
        lines = []
        for name in setting.methods:
            points = [
                Estimate.of(torch.tensor([100 * getattr(run.history[i], metric) for run in runs[name]]))
                for i in range(len(ticks))
            ]
            lines.append(Series(name, ticks, [p.mean for p in points], [p.error for p in points]))
        charts.append(Chart(title, "round", "accuracy of the personal models, %", lines, dodge=0.35))

    def compare(rival: str, text: str) -> Claim:
        gap = Estimate.of(last("self-fl", "weighted") - last(rival, "weighted"))
        worst = Estimate.of(last("self-fl", "worst") - last(rival, "worst"))
        verdict: Verdict = "not decided"
        if abs(gap.mean) > 2 * gap.error:
            verdict = "holds" if gap.mean > 0 else "does not hold"
        return Claim(
            text,
            verdict,
            f"Accuracy {gap.mean:+.1f} ± {gap.error:.1f} points, worst tenth {worst.mean:+.1f} ± {worst.error:.1f} "
            f"(Self-FL − {rival}, paired over {setting.num_seeds} seeds).",
        )

    claims = [
        compare("fedavg", "Personal models by Self-FL are better than one shared model."),
        compare("local", "Joining is better than training alone."),
        compare("ditto", "Self-FL is better than DITTO with λ = 1, without a λ."),
    ]
    caption = (
        f"Accuracy on each client's own held-out images, by round; mean over {setting.num_seeds} seeds, bars ± s.e."
    )
    return StudyResult(rows, table, [Figure("accuracy", caption, charts)], claims, asdict(setting))


_SETTING = Setting()
DEMO = Study(
    "demo",
    "Handwritten digits over forty clients",
    "a demonstration, not a study of the paper",
    f"scikit-learn's digits, {_SETTING.num_clients} clients with {_SETTING.classes_per_client} digits each and sizes "
    f"by a power law, softmax regression, {_SETTING.num_rounds} rounds, C = {_SETTING.participation:g}, "
    f"η = {_SETTING.learning_rate:g}, B = {_SETTING.batch_size}, L = 20, {_SETTING.num_seeds} seeds",
    _run,
)
