"""Rounds of FedAvg with the CIFAR-10 tutorial's CNN by one process and by several that share out the clients.

Each case has its processes, which train by ``selffl.train`` and wait after each round for the other cases to have
theirs.
Seconds are by the clock on the wall, and of the processor: of the busiest process of a case.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import selffl
from selffl.data.federation import Federation, Rows

SHAPE, NUM_CLASSES, LEARNING_RATE = (3, 32, 32), 10, 0.01
CASES = {"1 process, 1 thread": (1, 1), "1 process, 2 threads": (1, 2), "2 ranks, 1 thread": (2, 1)}


def child(args: argparse.Namespace) -> None:
    """Train, a round at a time; each line that is read is the word to go on."""
    torch.manual_seed(0)
    features = torch.randn(args.clients * args.rows, *SHAPE)
    labels = torch.randint(NUM_CLASSES, (len(features),))
    rows = Rows(features, labels, torch.arange(args.clients + 1) * args.rows)
    few = Rows(features[: args.clients], labels[: args.clients], torch.arange(args.clients + 1))

    def on_round(row: dict[str, Any]) -> None:
        nonlocal began
        print(json.dumps(time.perf_counter() - began), flush=True)
        sys.stdin.readline()
        began = time.perf_counter()

    began = time.perf_counter()
    selffl.train(
        "cnn", Federation(range(args.clients), rows, few), selffl.algorithm(args.method, num_local_steps=args.steps),
        rounds=args.turns + 2, participation=args.cohort / args.clients, learning_rate=LEARNING_RATE,
        batch_size=args.batch, evaluate_every=0, on_round=on_round,
    )  # fmt: skip


@dataclass
class Processes:
    """Those of one case, of which the first is talked to."""

    started: list[subprocess.Popen[str]]
    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, ranks: int, threads: int) -> Processes:
        """As torchrun would."""
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        common = {"OMP_NUM_THREADS": threads, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        common |= {"GOMP_SPINCOUNT": 0}  # threads wait asleep: where others are at work, spinning takes the core away
        return cls(
            [
                subprocess.Popen(
                    [sys.executable, __file__, *sys.argv[1:], "--child"],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                    env=os.environ | {name: str(value) for name, value in (common | {"RANK": rank}).items()},
                )
                for rank in range(ranks)
            ]
        )  # fmt: skip

    def take_turn(self) -> None:
        """One more round."""
        before = [_processor_seconds(process.pid) for process in self.started]
        stdin = self.started[0].stdin
        assert stdin is not None
        stdin.write("\n")
        stdin.flush()
        self.wall.append(self.told())
        after = [_processor_seconds(process.pid) for process in self.started]
        self.processor.append(max(late - early for early, late in zip(before, after, strict=True)))

    def told(self) -> float:
        """What the first process says of its round."""
        stdout = self.started[0].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise SystemExit(f"a process ended with {self.started[0].wait()}")
        return float(json.loads(line))

    def end(self) -> None:
        """Let them finish."""
        for process in self.started:
            process.stdin.close()  # type: ignore[union-attr]
        for process in self.started:
            if process.wait() != 0:
                raise SystemExit(f"a process ended with {process.returncode}")


def _processor_seconds(process: int) -> float:
    """What a process has used so far, by Linux."""
    cells = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(cells[11]) + int(cells[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--cohort", type=int, default=40, help="clients of a round")
    parser.add_argument("--rows", type=int, default=50, help="of each client")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    cases = {name: Processes.start(*case) for name, case in CASES.items() if name in args.cases}
    for case in cases.values():  # the first round, and all that comes before it
        case.told()
    for _ in range(args.turns):
        for case in cases.values():
            case.take_turn()
    for case in cases.values():
        case.end()
    where = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    print(f"Rounds of {args.method}, {args.cohort} of {args.clients} clients, {args.steps} steps of batch {args.batch}")
    print(f"{where}, {args.turns} turns, interleaved\n")
    print(f"{'':20}  {'a round':>10}  {'times as fast, on the wall':>26}  {'of the processor':>20}")
    first = next(iter(cases.values()))
    for name, case in cases.items():
        shown = [_ratios(first.wall, case.wall), _ratios(first.processor, case.processor)]
        print(f"{name:20}  {statistics.median(case.wall) * 1e3:7.0f} ms  {shown[0]:>26}  {shown[1]:>20}")
    if args.json is not None:
        found = {name: {"wall": case.wall, "processor": case.processor} for name, case in cases.items()}
        record = {"torch": torch.__version__, "seconds": found}
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _ratios(first: list[float], other: list[float]) -> str:
    """How many times as fast, turn by turn: the median and the range."""
    tick = 1.0 / os.sysconf("SC_CLK_TCK")
    found = [max(slow, tick) / max(fast, tick) for slow, fast in zip(first, other, strict=True)]
    return f"{statistics.median(found):.2f} x ({min(found):.2f}-{max(found):.2f})"


if __name__ == "__main__":
    main()
