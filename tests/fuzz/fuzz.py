"""Coverage-guided fuzzing of everything that reads bytes from elsewhere, by Atheris (libFuzzer).

    python tests/fuzz/fuzz.py --minutes 60              every parser for an hour
    python tests/fuzz/fuzz.py --minutes 5 csv leaf      two of them for five minutes each

One process at a time.  What is found lies in ``--out``, an input for each place that it went wrong at; a line for each
parser says how many inputs were tried.  Keep an input as ``tests/fuzz/cases/PARSER/NAME`` once the fault is mended.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).parent


def place_of(error: BaseException) -> str:
    """Where an error came from, as far as this package goes: one input for each is enough."""
    error = error.__cause__ if type(error).__name__ == "FoundError" and error.__cause__ else error
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/selffl/" in frame.filename] or frames
    return f"{type(error).__name__} at {Path(ours[-1].filename).name}:{ours[-1].lineno}"


def fuzz_one(name: str, seconds: float, out: Path) -> None:
    """Fuzz one parser in this process, which libFuzzer ends."""
    import atheris

    sys.path.insert(0, str(HERE))
    with atheris.instrument_imports(include=["selffl"]):
        import targets

    target = targets.TARGETS[name]
    corpus, found = out / "corpus" / name, out / "found" / name
    for place in (corpus, found):
        place.mkdir(parents=True, exist_ok=True)
    kept = sorted((HERE / "cases" / name).glob("*"))
    for content in (*target.seeds(), *(path.read_bytes() for path in kept)):
        (corpus / hashlib.sha256(content).hexdigest()[:16]).write_bytes(content)
    counts = {"inputs": 0, "taken": 0, "slowest": 0.0}
    places: dict[str, str] = {}
    began = time.monotonic()

    def try_one(content: bytes) -> None:
        start = time.monotonic()
        counts["inputs"] += 1
        try:
            counts["taken"] += targets.check(target, content)
        except Exception as error:
            where = place_of(error)
            if where not in places:
                digest = hashlib.sha256(content).hexdigest()[:12]
                places[where] = digest
                (found / digest).write_bytes(content)
                (found / f"{digest}.txt").write_text(traceback.format_exc(), encoding="utf-8")
        counts["slowest"] = max(counts["slowest"], time.monotonic() - start)
        if counts["inputs"] % 50 == 0 or time.monotonic() - start > 1:
            line = counts | {"parser": name, "seconds": round(time.monotonic() - began, 1), "found": places}
            (out / f"{name}.json").write_text(json.dumps(line), encoding="utf-8")

    arguments = [sys.argv[0], str(corpus), f"-max_total_time={seconds:.0f}", "-verbosity=0", "-print_final_stats=0"]
    atheris.Setup([*arguments, "-timeout=60", "-rss_limit_mb=4096", "-max_len=65536"], try_one)
    atheris.Fuzz()


def main() -> int:
    """Fuzz parsers one after the other; 1 if any of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parsers", nargs="*", help="which; all without")
    parser.add_argument("--minutes", type=float, default=60.0, help="for each parser")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"), help="where findings and inputs lie")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        fuzz_one(arguments.here, 60 * arguments.minutes, arguments.out)
        return 0
    sys.path.insert(0, str(HERE))
    from targets import TARGETS

    failed = False
    for name in arguments.parsers or TARGETS:
        again = [
            sys.executable,
            __file__,
            "--here",
            name,
            "--minutes",
            str(arguments.minutes),
            "--out",
            str(arguments.out),
        ]
        done = subprocess.run(again, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, check=False)
        report = arguments.out / f"{name}.json"
        said = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {"parser": name, "found": {}}
        is_broken = done.returncode != 0 or not report.is_file()  # libFuzzer's own: too long, too much memory, a crash
        failed |= bool(said["found"]) or is_broken
        print(
            json.dumps(said | ({"ended": done.stderr.decode(errors="replace")[-600:]} if is_broken else {})), flush=True
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
