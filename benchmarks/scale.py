"""A round, its memory and its files with a thousand to a million clients, of whom equally many take part.

Softmax regression on rows that are made on demand; clients keep a model each, on disk.  Each number of clients has
a process of its own, so that its memory can be told from the others'; it trains by ``selffl.train`` with a folder, and
waits after each round for the others to have theirs: turns are taken as in the other benchmarks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Nothing large is imported up here: a child begins with the peak of the process that starts it.

POOL_ROWS = 5000  # that the rows of all clients are taken from: making them costs little beside training on them
NUM_CLASSES = 10


def child(args: argparse.Namespace, folder: Path) -> None:
    """Train with one number of clients, a round at a time; each line that is read is the word to go on."""
    import numpy as np
    import torch
    from memory import peak

    import selffl
    from selffl.runs import folder as files

    torch.set_num_threads(args.threads)
    number = args.clients[0]
    pool = np.random.default_rng(0).standard_normal((POOL_ROWS, args.features), dtype=np.float32)
    labels = np.abs(pool[:, :NUM_CLASSES]).argmax(1)

    def make(client: int) -> tuple[Any, Any]:
        first = client * 7919 % (POOL_ROWS - args.rows)
        return pool[first : first + args.rows], labels[first : first + args.rows]

    def disk(path: Path) -> int:
        return sum(each.stat().st_blocks * 512 for each in path.rglob("*") if each.is_file())

    def on_round(row: dict[str, Any]) -> None:
        nonlocal began
        seconds = time.perf_counter() - began
        found = {"seconds": seconds, "megabytes": peak(), "disk_bytes": disk(folder / files.CLIENT_MEMORY)}
        print(json.dumps(found), flush=True)
        sys.stdin.readline()
        began = time.perf_counter()

    fed = selffl.Federation.on_demand(make, number, args.rows, num_classes=NUM_CLASSES)
    method = selffl.algorithm(args.method, num_local_steps=args.steps)
    began = time.perf_counter()
    run = selffl.train(
        "softmax", fed, method, rounds=args.turns + 1, participation=args.cohort / number, out=folder,
        client_memory="disk", evaluate_clients=min(number, 100), evaluate_every=0, on_round=on_round,
    )  # fmt: skip
    writer = files.RunFolder(folder)
    began = time.perf_counter()
    writer.add_checkpoint(run._state, 0.0)
    spent, size = time.perf_counter() - began, (folder / files.CHECKPOINT).stat().st_size
    print(json.dumps({"checkpoint_seconds": spent, "checkpoint_bytes": size, "megabytes": peak()}), flush=True)


def measured(args: argparse.Namespace, place: Path) -> dict[int, dict[str, Any]]:
    """Of each number of clients: seconds of each round but the first, peak memory, and bytes of the files."""
    command = [sys.executable, __file__, *sys.argv[1:], "--child"]
    processes = {}
    for number in args.clients:
        own = [*command, str(place / str(number)), "--clients", str(number)]
        processes[number] = subprocess.Popen(
            own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    found: dict[int, dict[str, Any]] = {number: {"seconds": []} for number in args.clients}
    for number, process in processes.items():  # the first round, and all that comes before it
        found[number] |= {"first": _told(process)["seconds"]}
    for turn in range(args.turns + 1):
        for number, process in processes.items():
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            told = _told(process)
            if turn < args.turns:
                found[number]["seconds"].append(told.pop("seconds"))
            found[number] |= told
    for number, process in processes.items():
        process.stdin.close()  # type: ignore[union-attr]
        if process.wait() != 0:
            raise SystemExit(f"the process of {number} clients ended with {process.returncode}")
    return found


def _told(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a process ended with {process.wait()}")
    told: dict[str, Any] = json.loads(line)
    return told


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--rows", type=int, default=50, help="of each client")
    parser.add_argument("--features", type=int, default=784)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--method", default="ditto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args, args.child)
        return
    with tempfile.TemporaryDirectory() as place:
        found = measured(args, Path(place))
    where = f"{platform.machine()}, {os.cpu_count()} cores"
    print(f"Rounds of {args.method}, {args.cohort} clients each, {args.steps} steps; {where}, {args.turns} turns\n")
    print(f"{'':17}  {'a round':>10}  {'times the first (range)':>24}  {'peak':>8}  {'slots':>9}  {'checkpoint':>20}")
    first = found[args.clients[0]]["seconds"]
    for number, told in found.items():
        times = [own / base for own, base in zip(told["seconds"], first, strict=True)]
        shown = f"{statistics.median(times):.2f} x ({min(times):.2f}-{max(times):.2f})"
        saved = f"{told['checkpoint_bytes'] / 1e6:.1f} MB, {told['checkpoint_seconds'] * 1e3:.0f} ms"
        print(
            f"{f'{number:,} clients':17}  {statistics.median(told['seconds']) * 1e3:7.1f} ms  {shown:>24}  "
            f"{told['megabytes']:5.0f} MB  {told['disk_bytes'] / 1e6:6.1f} MB  {saved:>20}"
        )
    if args.json is not None:
        args.json.write_text(json.dumps({"measured": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
