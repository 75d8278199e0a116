"""How fast rounds are: the same rounds by a plain PyTorch loop and by the cohort engine, taking turns.

Seconds mean little on a machine that does other things; ratios within a turn hold.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from selffl.algorithms import algorithm
from selffl.data.federation import Federation, Rows
from selffl.engines.cohort import CohortEngine
from selffl.models import build
from selffl.training.flat import FlatModel
from selffl.training.model import ModelSource

Case = Callable[[], object]
CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
LEARNING_RATE = 0.03


def interleaved(
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
        """Of measurements."""
        return cls(statistics.median(values), min(values), max(values))


def plain_loop(rows: Rows, num_classes: int, *, cohort: int, steps: int, batch: int) -> Case:
    """A round of FedAvg as a careful person writes it: one model and optimiser, rows on the device, a gather an epoch.

    Clients weigh the same.
    """
    device, num_features = rows.features.device, math.prod(rows.features.shape[1:])
    model = build("softmax", num_features, num_classes).to(device)
    optimiser, criterion = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), nn.CrossEntropyLoss()
    sizes = rows.num_examples.tolist()
    features = rows.features.reshape(len(rows.labels), -1)
    own = list(zip(torch.split(features, sizes), torch.split(rows.labels, sizes), strict=True))
    shared = [part.detach().clone() for part in model.parameters()]

    def one_round() -> None:
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

    return one_round


def cohort_rounds(
    rows: Rows, num_classes: int, *, cohort: int, steps: int, batch: int, chunk_size: int | None = None
) -> Case:
    """The same round by the cohort engine."""
    num_clients, num_features = len(rows.offset) - 1, math.prod(rows.features.shape[1:])
    flat = FlatModel(build("softmax", num_features, num_classes).to(rows.features.device))
    federation = Federation(range(num_clients), rows, rows)
    source = ModelSource(federation, flat, nn.functional.cross_entropy, LEARNING_RATE, batch)
    method = algorithm("fedavg", num_local_steps=steps, weighting="equal")
    engine = CohortEngine(method, source, cohort / num_clients, chunk_size=chunk_size)
    state = engine.start(flat.params)

    def one_round() -> None:
        nonlocal state
        state = engine.advance(state, 1)

    return one_round


def flower_rounds(rows: Rows, num_classes: int, *, steps: int, batch: int, rounds: int) -> list[float]:
    """Seconds of rounds of Flower's own FedAvg in its simulation, clients as its users write them; all take part."""
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    num_clients, num_features = len(rows.offset) - 1, math.prod(rows.features.shape[1:])
    began: list[float] = []
    client, server = ClientApp(), ServerApp()

    @client.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        low, high = int(rows.offset[number]), int(rows.offset[number + 1])
        x, y = rows.features[low:high], rows.labels[low:high]
        module, criterion = build("softmax", num_features, num_classes), nn.CrossEntropyLoss()
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimiser = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
        left = steps
        while left:
            for chosen in torch.split(torch.randperm(len(y)), batch)[:left]:
                optimiser.zero_grad()
                criterion(module(x[chosen]), y[chosen]).backward()
                optimiser.step()
                left -= 1
        metrics = MetricRecord({"num-examples": len(y)})
        content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    class Timed(FedAvg):  # type: ignore[misc]
        """Flower's own, with a look at the clock when a round begins."""

        def configure_train(self, *args: Any, **options: Any) -> Any:
            """Note the time."""
            began.append(time.perf_counter())
            return super().configure_train(*args, **options)

    @server.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        del context
        first = ArrayRecord(build("softmax", num_features, num_classes).state_dict())
        strategy = Timed(fraction_evaluate=0.0, min_available_nodes=num_clients, min_train_nodes=num_clients)
        strategy.start(grid, first, rounds + 2, train_config=ConfigRecord({"steps": steps}))

    logging.getLogger("flwr").setLevel(logging.ERROR)  # it writes a page for every run
    run_simulation(server, client, num_clients)
    # The first round starts processes; the last has none behind it that says when it ended.
    return [after - before for before, after in pairwise(began[1:])]
