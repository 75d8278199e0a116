"""Rounds of FedAvg with one model: a plain PyTorch loop over the clients, and selffl's ways."""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, product
from typing import Any

import torch
from timing import Case, measured, report, threads_of, write
from torch import Tensor, nn

from selffl.algorithms import algorithm
from selffl.data.federation import Federation, Rows
from selffl.engines.cohort import CohortEngine
from selffl.training.blocks import Gradients
from selffl.training.model import FlatModel, ModelSource

WAYS = ("auto", "vmap", "loop", "unfold", "stacked", "recomputed")
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


def make_loop(
    build: Callable[[], nn.Module], rows: tuple[Tensor, Tensor], rate: float, args: argparse.Namespace
) -> PlainLoop:
    """The loop over clients of ``args.rows`` rows each."""
    own = list(zip(*(each.split(args.rows) for each in rows), strict=True))
    return PlainLoop(build().to(args.device), own, rate, args.steps, args.batch)


def cohort_case(
    build: Callable[[], nn.Module],
    rows: tuple[Tensor, Tensor],
    rate: float,
    args: argparse.Namespace,
    cohort: int,
    way: Gradients,
    chunk: int | None,
) -> Case:
    """A round of selffl with the first clients, so many of them at once."""
    number_of_rows = cohort * args.rows
    offset = torch.arange(cohort + 1, device=args.device) * args.rows
    part = Rows(rows[0][:number_of_rows], rows[1][:number_of_rows], offset)
    flat = FlatModel(build().to(args.device))
    source = ModelSource(
        Federation(range(cohort), part, part), flat, nn.functional.cross_entropy, rate, args.batch, gradients=way
    )
    engine = CohortEngine(algorithm("fedavg", num_local_steps=args.steps), source, chunk_size=chunk)
    params = flat.params
    return lambda: engine.advance(engine.start(params), 1)


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
    loop = make_loop(build_plain or build, rows, rate, args)
    threads = threads_of(args)
    seconds: dict[str, list[float]] = {}
    baselines: dict[str, str] = {}
    for cohort in cohorts:
        ways = {
            f"selffl {way}{f', {chunk} at once' if chunk else ''}": partial(
                cohort_case, build, rows, rate, args, cohort, way, chunk
            )
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


def compare_each(
    title: str,
    build: Callable[[], nn.Module],
    rows: tuple[Tensor, Tensor],
    cohort: int,
    rate: float,
    args: argparse.Namespace,
    build_plain: Callable[[], nn.Module] | None = None,
) -> None:
    """Measure each case of ``args.each`` by itself, with nothing of the others in memory, and print it at once.

    Memory is compared with that of one client by the loop; on a GPU rows and frozen weights are among it.
    ``args.each`` holds ways, or ways and how many clients train at once, such as ``stacked:8``.
    """
    print(f"One round of FedAvg, {title}, {cohort} clients, torch {torch.__version__}, each case by itself", flush=True)
    plain = build_plain or build
    alone = _measure(lambda: partial(make_loop(plain, rows, rate, args).round, 1), args)
    print(f"{'one client by the loop':28}  {_memory(alone, alone)}", flush=True)
    looped = _measure(lambda: partial(make_loop(plain, rows, rate, args).round, cohort), args, warm_up=0)
    found = {"loop": looped}
    for name in ("loop", *args.each):
        if name != "loop":
            way, _, chunk = name.partition(":")
            make = partial(cohort_case, build, rows, rate, args, cohort, way, int(chunk) if chunk else None)
            found[name] = _measure(make, args)
        seconds = found[name]["seconds"]
        times = statistics.median(looped["seconds"]) / statistics.median(seconds)
        span = f"{min(seconds) * 1e3:.1f}-{max(seconds) * 1e3:.1f} ms"
        print(f"{name:28}  {span:>21}  {times:6.2f} x the loop  {_memory(found[name], alone)}", flush=True)
        write(args.json, {"title": title, "clients": cohort, "one client": alone, "cases": found})


def _measure(
    make: Callable[[], Case], args: argparse.Namespace, warm_up: int = ROUNDS_BEFORE_PEAK - 1
) -> dict[str, Any]:
    """Seconds of a case that is made for this alone, and the most memory that it took.

    On a GPU that of tensors, and what was reserved for them; on a CPU what a round's tensors take beside those before.
    """
    is_gpu, case = args.device != "cpu", make()
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(warm_up):
        case()
    (seconds,) = measured({"": case}, args).values()
    if is_gpu:
        peaks = {"tensors": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    else:
        peaks = {"tensors": _peak_of_tensors(case)}
    del case
    gc.collect()
    if is_gpu:
        torch.cuda.empty_cache()
    return {"seconds": seconds, "peaks": {kind: peak / MEGABYTE for kind, peak in peaks.items()}}


def _peak_of_tensors(case: Case) -> int:
    """The most bytes of a CPU that tensors take during a call beside those that were there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        case()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(accumulate(sizes), default=0)


def _memory(found: dict[str, Any], alone: dict[str, Any]) -> str:
    """The largest memory of a case, and that over one client's."""
    least = alone["peaks"]
    return ", ".join(f"{kind} {peak:.0f} MB ({peak / least[kind]:.2f} x)" for kind, peak in found["peaks"].items())


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
