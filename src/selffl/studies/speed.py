"""How fast rounds are: the same rounds by a plain PyTorch loop and by the cohort engine, taking turns.

Seconds mean little on a machine that does other things; ratios within a turn hold.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selffl.algorithms import algorithm
from selffl.data.federation import Federation, Rows
from selffl.engines.cohort import CohortEngine, RunState
from selffl.models import build
from selffl.training.flat import FlatModel
from selffl.training.model import ModelSource

Case = Callable[[], object]
CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
LEARNING_RATE = 0.03


def time_interleaved(
    cases: Mapping[str, Case], repeats: int, device: str = "cpu", clock: str = "wall"
) -> dict[str, list[float]]:
    """Seconds of each case: all once to warm up, then A B C, A B C, ... so that a slow minute is everybody's."""
    now = CLOCKS[clock]

    def finished() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(repeats + 1):
        for name, case in cases.items():
            finished()
            begin = now()
            case()
            finished()
            if repeat:
                seconds[name].append(now() - begin)
    return seconds


def ratios(seconds: Mapping[str, Sequence[float]], baseline: str, name: str) -> list[float]:
    """How many times as fast as the baseline, repeat by repeat."""
    return [slow / fast for slow, fast in zip(seconds[baseline], seconds[name], strict=True)]


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing: the middle one, and how far they lie apart."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Spread of measurements."""
        return cls(statistics.median(values), min(values), max(values))


def plain_loop(rows: Rows, num_classes: int, *, cohort: int, steps: int, batch: int) -> Case:
    """A round of FedAvg as a careful person writes it: one model and optimiser, rows on the device, a gather an epoch.

    Clients weigh the same.  A call returns the shared weight and bias.
    """
    device, num_features = rows.array.device, math.prod(rows.array.shape[1:])
    model = build("softmax", num_features, num_classes).to(device)
    optimiser, criterion = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), nn.CrossEntropyLoss()
    sizes = rows.num_examples.tolist()
    features = rows.array.reshape(len(rows.labels), -1)
    own = list(zip(torch.split(features, sizes), torch.split(rows.labels, sizes), strict=True))
    shared = [part.detach().clone() for part in model.parameters()]

    def one_round() -> list[Tensor]:
        total = [torch.zeros_like(part) for part in shared]
        for client in torch.randperm(len(sizes))[:cohort].tolist():
            with torch.no_grad():
                for part, start in zip(model.parameters(), shared, strict=True):
                    part.copy_(start)
            left = steps
            while left:
                order = torch.randperm(sizes[client], device=device)
                batches = zip(*(torch.split(tensor[order], batch) for tensor in own[client]), strict=True)
                for _, (x, y) in zip(range(left), batches, strict=False):
                    optimiser.zero_grad()
                    criterion(model(x), y).backward()
                    optimiser.step()
                    left -= 1
            with torch.no_grad():
                for part, kept in zip(model.parameters(), total, strict=True):
                    kept.add_(part, alpha=1 / cohort)
        for start, kept in zip(shared, total, strict=True):
            start.copy_(kept)
        return shared

    return one_round


def bare_products(
    num_features: int, num_classes: int, *, cohort: int, steps: int, batch: int, device: str = "cpu"
) -> Case:
    """The products of matrices that the gradients of such a round are made of, step by step, and nothing else."""
    features = torch.randn(cohort, batch, num_features, device=device)
    weight = torch.randn(cohort, num_classes, num_features, device=device)
    error = torch.randn(cohort, num_classes, batch, device=device)

    def products() -> None:
        for _ in range(steps):
            torch.bmm(weight, features.transpose(1, 2))
            torch.bmm(error, features)

    return products


def cohort_rounds(
    rows: Rows, num_classes: int, *, cohort: int, steps: int, batch: int, chunk_size: int | None = None
) -> Case:
    """A round of FedAvg by the cohort engine.  A call returns the state of the run."""
    num_clients, num_features = len(rows.offset) - 1, math.prod(rows.array.shape[1:])
    flat = FlatModel(build("softmax", num_features, num_classes).to(rows.array.device))
    federation = Federation(range(num_clients), rows, rows)
    source = ModelSource(federation, flat, nn.functional.cross_entropy, LEARNING_RATE, batch)
    method = algorithm("fedavg", num_local_steps=steps, weighting="equal")
    engine = CohortEngine(method, source, cohort / num_clients, chunk_size=chunk_size)
    state = engine.start(flat.params)

    def one_round() -> RunState:
        nonlocal state
        state = engine.advance(state, 1)
        return state

    return one_round
