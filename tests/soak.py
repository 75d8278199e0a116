"""Ten thousand rounds of a tiny federation: what a long run takes of memory and disk, round after round.

A run has to keep its records, on disk and in memory: a row for each round, and for methods that say so a row for each
client of a round.  Everything else has to stay as it is.  Memory is what the process holds (resident set), after each
thousand rounds; the slope is a straight line through all but the first two thousand, which fill caches, less what the
records are.

    python tests/soak.py                       10,000 rounds of each method, `make soak`
    python tests/soak.py 4000 self-fl-auto     fewer, of one
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import selffl
from selffl.data.digits import digits
from selffl.engines.cohort import CohortEngine

METHODS = ("fedavg", "self-fl", "self-fl-auto")
MAX_SLOPE_MB = 1.0  # per thousand rounds
GROWING = ("history.csv", "participation.csv")  # a row for each round, or for each client of one
EVERY = 1000  # rounds between two looks


def megabytes() -> float:
    """What the process holds."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


def deep_size(rows: list[dict[str, Any]]) -> int:
    """Bytes of rows and of what is in them; texts are shared."""
    return sys.getsizeof(rows) + sum(
        sys.getsizeof(row) + sum(sys.getsizeof(value) for value in row.values() if isinstance(value, float | int))
        for row in rows
    )


def watched(method: str, rounds: int, folder: Path) -> tuple[list[dict[str, Any]], float]:
    """A run, looked at after every thousand rounds, and the megabytes of records of a thousand rounds."""
    looks: list[dict[str, Any]] = []
    advance = CohortEngine.advance

    def counted(self: CohortEngine, state: Any, *given: Any, **named: Any) -> Any:
        # Before the next round the records of those before are on disk.
        if state.round_number % EVERY == 0 and state.round_number:
            sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
            looks.append({"round": state.round_number, "megabytes": megabytes(), "files": sizes})
        return advance(self, state, *given, **named)

    CohortEngine.advance = counted  # type: ignore[method-assign]
    run = selffl.train(
        "softmax", digits(num_clients=6, seed=0), method, rounds=rounds, participation=0.5, batch_size=4,
        evaluate_every=EVERY, checkpoint_every=EVERY, out=folder, seed=0,
    )  # fmt: skip
    return looks, (deep_size(run.history) + deep_size(run.participation)) / rounds * 1000 / 2**20


def verdict(method: str, looks: list[dict[str, Any]], records: float, seconds: float) -> list[str]:
    """What is wrong, in lines; prints what was seen."""
    late = [look for look in looks if look["round"] > 2 * EVERY] or looks
    thousands = np.array([look["round"] / 1000 for look in late])
    slope = float(np.polyfit(thousands, [look["megabytes"] for look in late], 1)[0]) if len(late) > 1 else 0.0
    grown = {
        name: (late[-1]["files"][name] - size) / max(thousands[-1] - thousands[0], 1) / 1000
        for name, size in late[0]["files"].items()
        if name in late[-1]["files"]
    }
    bytes_a_round = {name: round(float(each), 1) for name, each in grown.items() if each >= 1.0}
    print(
        f"{method}: {late[0]['megabytes']:.1f} to {late[-1]['megabytes']:.1f} MB, {slope:+.2f} MB per 1,000 rounds, of "
        f"which records {records:.2f}; files grow by bytes a round: {bytes_a_round}; {seconds:.0f} s"
    )
    wrong = []
    if slope - records > MAX_SLOPE_MB:
        wrong.append(
            f"{method}: memory beside records grows by {slope - records:.2f} MB per 1,000 rounds; expected at most "
            f"{MAX_SLOPE_MB:g}."
        )
    for name, each in grown.items():
        steps = np.diff([look["files"].get(name, 0) for look in late])
        if name not in GROWING and each > 1.0:  # a byte or two where a number has a digit more
            wrong.append(f"{method}: {name} grows by {each:.1f} bytes a round; expected a constant size.")
        if name in GROWING and len(steps) > 1 and steps.max() > 1.1 * steps.min():
            wrong.append(f"{method}: {name} grows by {steps.tolist()} bytes; expected as much every {EVERY} rounds.")
    return wrong


def main() -> int:
    """Every method in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rounds", nargs="?", type=int, default=10_000)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"without it: {', '.join(METHODS)}")
    asked = parser.parse_args()
    rounds = asked.rounds

    def one(method: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            looks, records = watched(method, rounds, Path(folder) / "run")
            for line in (wrong := verdict(method, looks, records, time.monotonic() - began)):
                print(line)
        sys.stdout.flush()
        os._exit(1 if wrong else 0)

    failed = 0
    for method in asked.methods or METHODS:
        child = os.fork()
        if child == 0:
            one(method)
        failed += os.waitpid(child, 0)[1] != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
