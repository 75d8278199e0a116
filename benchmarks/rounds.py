"""Rounds of FedAvg with one model: a plain PyTorch loop over the clients, and selffl's ways."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from timing import Case, measured, report, threads_of
from torch import Tensor, nn

from selffl.algorithms import algorithm
from selffl.data.federation import Federation, Rows
from selffl.engines.cohort import CohortEngine
from selffl.training.blocks import Gradients
from selffl.training.model import FlatModel, ModelSource

WAYS = ("auto", "vmap", "loop", "unfold")
MEGABYTE = 1 << 20
ROUNDS_BEFORE_PEAK = 3  # after which gradients are recorded


class PlainLoop:
    """What a careful person writes: one model and one optimiser for all clients, rows already on the device."""

    def __init__(self, model: nn.Module, own: Sequence[tuple[Tensor, Tensor]], rate: float, steps: int, batch: int):
        self.model, self.own, self.steps, self.batch = model, own, steps, batch
        self.trained = [part for part in model.parameters() if part.requires_grad]
        self.optimiser, self.criterion = torch.optim.SGD(self.trained, lr=rate), nn.CrossEntropyLoss()
        self.shared = [part.detach().clone() for part in self.trained]

    def round(self, cohort: int) -> None:
        """Each of the first clients in turn, and the mean of their models."""
        total = [torch.zeros_like(part) for part in self.shared]
        for client in range(cohort):
            with torch.no_grad():
                torch._foreach_copy_(self.trained, self.shared)
            self.train(client)
            with torch.no_grad():
                torch._foreach_add_(total, self.trained, alpha=1 / cohort)
        torch._foreach_copy_(self.shared, total)

    def train(self, client: int) -> None:
        """The steps of one client, epoch after epoch."""
        left, (features, labels) = self.steps, self.own[client]
        while left:
            order = torch.randperm(len(labels), device=labels.device)
            batches = zip(features[order].split(self.batch), labels[order].split(self.batch), strict=True)
            for _, (x, y) in zip(range(left), batches, strict=False):
                self.optimiser.zero_grad()
                self.criterion(self.model(x), y).backward()
                self.optimiser.step()
                left -= 1


def size_options(parser: argparse.ArgumentParser, rows: int, steps: int, batch: int) -> None:
    """How much is trained."""
    parser.add_argument("--rows", type=int, default=rows, help="of each client")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument(
        "--chunk",
        type=int,
        nargs="+",
        default=[None],
        help="clients that selffl trains at once, if not all; several are measured",
    )


def compare(
    title: str,
    build: Callable[[], nn.Module],
    rows: tuple[Tensor, Tensor],
    cohorts: Sequence[int],
    rate: float,
    args: argparse.Namespace,
    build_plain: Callable[[], nn.Module] | None = None,
) -> None:
    """Measure rounds of each number of clients by the loop and by the ways asked for, and print the table.

    ``build_plain`` makes the loop's module, where that is another than selffl's.  On a GPU the largest memory that a
    round takes is printed, too, beside that of one client by the loop.
    """
    features, labels = rows
    own = list(zip(features.split(args.rows), labels.split(args.rows), strict=True))
    loop = PlainLoop((build_plain or build)().to(args.device), own, rate, args.steps, args.batch)

    def advance(engine: CohortEngine, params: Tensor) -> None:
        engine.advance(engine.start(params), 1)

    def cohort_case(cohort: int, way: Gradients, chunk: int | None) -> Case:
        number_of_rows = cohort * args.rows
        offset = torch.arange(cohort + 1, device=args.device) * args.rows
        part = Rows(features[:number_of_rows], labels[:number_of_rows], offset)
        flat = FlatModel(build().to(args.device))
        source = ModelSource(
            Federation(range(cohort), part, part), flat, nn.functional.cross_entropy, rate, args.batch, gradients=way
        )
        engine = CohortEngine(algorithm("fedavg", num_local_steps=args.steps), source, chunk_size=chunk)
        return partial(advance, engine, flat.params)

    threads = threads_of(args)
    seconds: dict[str, list[float]] = {}
    baselines: dict[str, str] = {}
    for cohort in cohorts:
        ways = {
            f"selffl {way}{f', {chunk} at once' if chunk else ''}": partial(cohort_case, cohort, way, chunk)
            for way, chunk in product(args.ways, args.chunk)
        }
        if args.device != "cpu":
            made = {"one client by the loop": lambda: partial(loop.round, 1)} | ways
            print(f"{cohort} clients, largest memory: ", *(f"{name} {_peak(each)} MB;" for name, each in made.items()))
        cases: dict[str, Case] = {"loop": partial(loop.round, cohort)} | {name: each() for name, each in ways.items()}
        for number in threads:
            torch.set_num_threads(number)
            found = measured(cases, args)
            suffix = f", {cohort} clients, {number} thr."
            seconds |= {name + suffix: values for name, values in found.items()}
            baselines |= {name + suffix: "loop" + suffix for name in found}
    report(f"One round of FedAvg, {title}", seconds, baselines, args, threads=threads)


def _peak(make: Callable[[], Case]) -> int:
    """Megabytes of a GPU that rounds take, with what lies there before them, of a case that is made for this alone."""
    case = make()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(ROUNDS_BEFORE_PEAK):
        case()
    peak = torch.cuda.max_memory_allocated()
    del case
    gc.collect()
    torch.cuda.empty_cache()
    return peak // MEGABYTE
