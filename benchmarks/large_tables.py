"""Peak memory and time of tables with many rows and with many columns.

Each table is read by `Federation.from_csv`, and those with many rows go through ``selffl init`` and ``selffl run``,
each in a process of its own; what counts is its peak resident set, with torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Nothing large is imported up here: a child begins with the peak of the process that starts it.


def measure(*command: str | Path, folder: Path) -> dict[str, float]:
    """The peak resident set and the seconds of a command, run in that folder."""
    begin = time.perf_counter()
    process = subprocess.Popen(list(map(str, command)), cwd=folder, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {os.waitstatus_to_exitcode(status)}")
    megabytes = used.ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)
    return {"megabytes": megabytes, "seconds": time.perf_counter() - begin}


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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", nargs="+", default=["2000000x20", "10x20000", "10x40000"], help="rows x columns")
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    parser.add_argument("--write", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write_table(Path(args.write[0]), int(args.write[1]), int(args.write[2]))
        return
    found: dict[str, dict[str, dict[str, float]]] = {}
    print("rows x columns, what is done: peak resident set, seconds, and these over those of the table before")
    for size in args.tables:
        rows, columns = map(int, size.split("x"))
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            subprocess.run(
                [sys.executable, __file__, "--write", folder / "rows.csv", str(rows), str(columns)], check=True
            )
            read = "import selffl; selffl.Federation.from_csv('rows.csv')"
            stages = {"read": measure(sys.executable, "-c", read, folder=folder)}
            if rows > columns:
                command = [sys.executable, "-m", "selffl"]
                stages["init"] = measure(*command, "init", "study", "--csv", "rows.csv", folder=folder)
                stages["run, 3 rounds"] = measure(*command, "run", "study", "--rounds", "3", folder=folder)
        before = list(found.values())[-1]["read"]["seconds"] if found else stages["read"]["seconds"]
        found[size] = stages
        for stage, numbers in stages.items():
            ratio = f"{numbers['seconds'] / before:8.2f} x" if stage == "read" else ""
            print(
                f"{size:<14} {stage:<14} {numbers['megabytes']:8,.0f} MB {numbers['seconds']:8.1f} s {ratio}".rstrip()
            )
    if args.json:
        args.json.write_text(json.dumps({"tables": found}), encoding="utf-8")


if __name__ == "__main__":
    main()
