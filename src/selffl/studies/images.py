"""Image studies: one model for a federation of images, Self-FL and its rivals, on every client's own test rows.

The embedded demonstration (digits) and figure 1a of the paper (MNIST) differ only in their setting.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from selffl.algorithms import FedAvg, SelfFL, algorithm
from selffl.algorithms.self_fl import SelfFLUpload
from selffl.data.digits import digits
from selffl.data.federation import Federation
from selffl.data.mnist import mnist
from selffl.engines.cohort import CohortEngine, RoundReport, RunState, cohort_size
from selffl.studies.result import Chart, Claim, Estimate, Figure, Progress, Series, Study, StudyResult, Verdict
from selffl.training.model import FlatModel, ModelSource, correct_predictions


@dataclass(frozen=True)
class Setting:
    """What is trained, on what, for how long; L = 20 for all, ℓ_max = 40 for Self-FL, as the methods' defaults are."""

    data: Literal["digits", "mnist"] = "digits"
    num_clients: int = 40
    classes_per_client: int = 3
    test_fraction: float = 0.3
    num_rounds: int = 60
    participation: float = 0.25
    learning_rate: float = 0.03
    batch_size: int = 10
    num_seeds: int = 5
    check_every: int = 10  # rounds between two evaluations
    methods: tuple[str, ...] = ("self-fl", "self-fl-exact", "ditto", "pfedme", "perfedavg", "fedavg", "local")
    num_processes: int = 1  # runs side by side

    def federation(self, seed: int) -> Federation:
        """The clients of one seed."""
        if self.data == "mnist":
            return mnist(seed, self.test_fraction)
        return digits(self.num_clients, self.classes_per_client, self.test_fraction, seed)


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
    share_at_cap: float | None = None  # of Self-FL's client-rounds, those that took ℓ_max steps


def train(setting: Setting, name: str, seed: int) -> Run:
    """One method from nothing."""
    federation = setting.federation(seed)
    model = FlatModel(nn.Linear(federation.train.features.shape[1], 10))
    source = ModelSource(
        federation, model, nn.functional.cross_entropy, setting.learning_rate, setting.batch_size, seed
    )
    engine = CohortEngine(algorithm(name), source, setting.participation, seed)
    state = engine.start(torch.zeros_like(model.params))
    history, capped = [], []

    def watch(report: RoundReport) -> None:
        if isinstance(report.upload, SelfFLUpload) and isinstance(engine.algorithm, SelfFL):
            capped.append((report.upload.num_local_steps >= engine.algorithm.max_local_steps).double().mean())

    for _ in range(setting.num_rounds // setting.check_every):
        state = engine.advance(state, setting.check_every, watch)
        history.append(scores(source, engine, state))
    rounds_taken = setting.num_rounds * cohort_size(setting.num_clients, setting.participation)
    at_cap = float(torch.stack(capped).mean()) if capped else None
    return Run(history, float(state.num_gradients.sum()) / rounds_taken, at_cap)


METRICS = {
    "weighted": "accuracy",
    "top": "top 10 % by size",
    "worst": "worst 10 %",
    "global_model": "global model",
}


def train_all(setting: Setting, progress: Progress) -> dict[str, list[Run]]:
    """Every method with every seed, seed by seed; in processes of their own if there are to be several."""
    pairs = [(name, seed) for seed in range(setting.num_seeds) for name in setting.methods]
    runs: dict[str, list[Run]] = {name: [] for name in setting.methods}
    if setting.num_processes == 1:
        for done, (name, seed) in enumerate(pairs):
            progress(done, len(pairs), f"{name}, seed {seed}")
            runs[name].append(train(setting, name, seed))
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(setting.num_processes, context, torch.set_num_threads, (1,)) as pool:
            futures = [pool.submit(train, setting, name, seed) for name, seed in pairs]
            for done, ((name, seed), future) in enumerate(zip(pairs, futures, strict=True)):
                progress(done, len(pairs), f"{name}, seed {seed}")
                runs[name].append(future.result())
    progress(len(pairs), len(pairs), "done")
    return runs


def study_of(setting: Setting, rivals: dict[str, str], progress: Progress) -> StudyResult:
    """Run a setting; ``rivals`` are the methods that Self-FL is held against, each with the claim that it is better."""
    runs = train_all(setting, progress)

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
        caps = [run.share_at_cap for run in runs[name] if run.share_at_cap is not None]
        line["steps at ℓ_max"] = f"{100 * sum(caps) / len(caps):.0f} %" if caps else "–"
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
        charts.append(
            Chart(title, "round", "accuracy of the personal models, %", lines, dodge=setting.num_rounds / 170)
        )

    def compare(rival: str, text: str) -> Claim:
        gap = Estimate.of(last("self-fl", "weighted") - last(rival, "weighted"))
        worst = Estimate.of(last("self-fl", "worst") - last(rival, "worst"))
        top = Estimate.of(last("self-fl", "top") - last(rival, "top"))
        verdict: Verdict = "not decided"
        if gap.is_clear:
            verdict = "holds" if gap.mean > 0 else "does not hold"
        return Claim(
            text,
            verdict,
            f"Accuracy {gap.mean:+.2f} ± {gap.error:.2f} points, top tenth {top.mean:+.2f} ± {top.error:.2f}, worst "
            f"tenth {worst.mean:+.2f} ± {worst.error:.2f} (Self-FL − {rival}, paired over {setting.num_seeds} seeds).",
        )

    claims = [compare(rival, text) for rival, text in rivals.items()]
    caption = (
        f"Accuracy on each client's own held-out images, by round; mean over {setting.num_seeds} seeds, bars ± s.e."
    )
    return StudyResult(rows, table, [Figure("accuracy", caption, charts)], claims, asdict(setting))


DIGITS = Setting()
MNIST_SETTING = Setting(
    data="mnist",
    num_clients=1000,
    classes_per_client=2,
    test_fraction=0.1,
    num_rounds=200,
    participation=0.1,
    check_every=20,
    num_processes=os.cpu_count() or 1,
)


def _setting_text(setting: Setting, name: str, sizes: str) -> str:
    return (
        f"{name}, {setting.num_clients} clients with {setting.classes_per_client} digits each and "
        f"{sizes}, softmax regression, {setting.num_rounds} rounds, C = {setting.participation:g}, "
        f"η = {setting.learning_rate:g}, B = {setting.batch_size}, L = {FedAvg().num_local_steps}, "
        f"ℓ_max = {SelfFL().max_local_steps}, {setting.num_seeds} seeds"
    )


def _demo(quick: bool, progress: Progress) -> StudyResult:
    rivals = {
        "fedavg": "Personal models by Self-FL are better than one shared model.",
        "local": "Joining is better than training alone.",
        "ditto": "Self-FL is better than DITTO with λ = 1, without a λ.",
    }
    return study_of(replace(DIGITS, num_seeds=2, num_rounds=20) if quick else DIGITS, rivals, progress)


def _mnist(quick: bool, progress: Progress) -> StudyResult:
    rivals = {
        "fedavg": "Self-FL has a higher personalised accuracy than FedAvg (figure 1a).",
        "perfedavg": "Self-FL has a higher personalised accuracy than PerFedAvg (figure 1a).",
        "pfedme": "Self-FL has a higher personalised accuracy than pFedMe (figure 1a).",
        "ditto": "Self-FL has a higher personalised accuracy than DITTO with λ = 1 (figure 1a).",
        "local": "Not in the paper: Self-FL is better than training alone.",
    }
    return study_of(replace(MNIST_SETTING, num_seeds=2, num_rounds=40) if quick else MNIST_SETTING, rivals, progress)


DEMO = Study(
    "demo",
    "Handwritten digits over forty clients",
    "a demonstration, not a study of the paper",
    _setting_text(DIGITS, "scikit-learn's digits", "lognormal sizes"),
    _demo,
)
MNIST = Study(
    "mnist",
    "MNIST over a thousand clients",
    "section 4.2, figure 1a",
    _setting_text(MNIST_SETTING, "MNIST", "FedProx's power-law sizes"),
    _mnist,
)
