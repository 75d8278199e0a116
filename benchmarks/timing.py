"""What the benchmarks share: options, interleaved timing, one table, one JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

import torch

from selffl.studies.speed import CLOCKS, Case, ratios, time_interleaved


def options(description: str | None, repeats: int) -> argparse.ArgumentParser:
    """The options that every benchmark of speed takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, nargs="+", help="of PyTorch on the CPU; several are measured in turn")
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu: processor time of one thread, for a machine that is busy"
    )
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    return parser


def threads_of(args: argparse.Namespace) -> list[int]:
    """What was asked for, else one thread and, on a CPU that has them and by the clock on the wall, two."""
    is_useful = args.device == "cpu" and args.clock == "wall" and (os.cpu_count() or 1) > 1
    return args.threads or ([1, 2] if is_useful else [1])


def measured(cases: dict[str, Case], args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each case, as the options have it."""
    return time_interleaved(cases, args.repeats, args.device, args.clock)


def with_threads(cases: dict[str, Case], threads: list[int]) -> dict[str, Case]:
    """The same cases with each number of threads."""

    def run(case: Case, number: int) -> Case:
        def run_case() -> object:
            torch.set_num_threads(number)
            return case()

        return run_case

    return {f"{name}, {number} thr.": run(case, number) for number in threads for name, case in cases.items()}


def best(seconds: dict[str, list[float]], name: str) -> str:
    """Of the cases of that name, the one with the number of threads that suits it best."""
    return min(
        (case for case in seconds if case.rpartition(", ")[0] == name), key=lambda c: statistics.median(seconds[c])
    )


def report(
    title: str, seconds: dict[str, list[float]], baselines: dict[str, str], args: argparse.Namespace, **about: Any
) -> None:
    """Print the table of medians, ranges and ratios, and write the file if one was asked for.

    ``baselines`` says against which case each is compared.
    """
    where = torch.cuda.get_device_name() if args.device != "cpu" else f"{platform.machine()}, {os.cpu_count()} cores"
    print(f"{title}\n{where}, torch {torch.__version__}, {args.repeats} repeats, interleaved, {args.clock} time\n")
    width = max(map(len, seconds))
    print(f"{'':{width}}  {'median':>10}  {'range':>19}  {'times as fast as the loop (range)':>34}")
    for name, values in seconds.items():
        found = ratios(seconds, baselines[name], name)
        span = f"{min(values) * 1e3:.1f}-{max(values) * 1e3:.1f} ms"
        times = f"{statistics.median(found):.2f} x ({min(found):.2f}-{max(found):.2f})"
        print(f"{name:{width}}  {statistics.median(values) * 1e3:7.1f} ms  {span:>19}  {times:>34}")
    print()
    write(args.json, {"title": title, "machine": where, "seconds": seconds, "baselines": baselines, **about})


def write(path: Path | None, record: dict[str, Any]) -> None:
    """Write a record as JSON, if there is a place for it."""
    if path is not None:
        path.write_text(json.dumps({"torch": torch.__version__, **record}, indent=1) + "\n", encoding="utf-8")
