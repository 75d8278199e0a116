"""Peak memory and time of reading tables: many rows, and many columns.

Each table is read by `Federation.from_csv` in a process of its own; what counts is its peak resident set, with torch,
from ``resource.getrusage``.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Nothing large is imported up here: a child begins with the peak of the process that starts it.


def peak() -> float:
    """Of this process so far, in MB."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / 1e6 if sys.platform == "darwin" else used / 1e3


def write_table(path: Path, num_rows: int, num_columns: int) -> None:
    """A column of clients, one of ten words, one of values to predict, and numbers."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import csv

    rng = np.random.default_rng(0)
    columns = {"client": rng.integers(0, min(1000, num_rows // 2), num_rows)}
    columns |= {f"x{number}": rng.normal(size=num_rows) for number in range(num_columns - 3)}
    columns["word"] = np.array([f"word{number}" for number in range(10)])[rng.integers(0, 10, num_rows)]
    columns["label"] = rng.normal(size=num_rows)
    csv.write_csv(pa.table(columns), path)


def read_table(path: Path) -> dict[str, float]:
    """Read it, and say what that took."""
    import selffl

    before = peak()
    begin = time.perf_counter()
    selffl.Federation.from_csv(path)
    return {"megabytes before": before, "megabytes": peak(), "seconds": time.perf_counter() - begin}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", nargs="+", default=["2000000x20", "10x20000", "10x40000"], help="rows x columns")
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    parser.add_argument("--write", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write_table(Path(args.write[0]), int(args.write[1]), int(args.write[2]))
        return
    if args.read:
        print(json.dumps(read_table(args.read)))
        return
    found = {}
    for size in args.tables:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.csv"
            subprocess.run([sys.executable, __file__, "--write", path, *size.split("x")], check=True)
            run = subprocess.run([sys.executable, __file__, "--read", path], check=True, capture_output=True, text=True)
            found[size] = json.loads(run.stdout)
    print("rows x columns: peak resident set, seconds, and these over those of the table before")
    before = None
    for size, numbers in found.items():
        ratio = numbers["seconds"] / (before or numbers["seconds"])
        before = numbers["seconds"]
        print(f"{size:<14} {numbers['megabytes']:8,.0f} MB {numbers['seconds']:8.1f} s {ratio:8.2f} x")
    if args.json:
        args.json.write_text(json.dumps({"tables": found}), encoding="utf-8")


if __name__ == "__main__":
    main()
