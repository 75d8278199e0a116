"""Which mutants of a package do its tests notice?

Tests are collected once.  A forked process runs them all and notes which lines each of them runs and how long it takes.
Then each mutant has a process of its own: its function gets the mutant's code, the tests that run the changed line
follow, those first that have noticed most mutants of the function, then the quickest, and the first that fails
ends it.  A mutant whose tests take too long (ten seconds more than five times as long as without it) counts as noticed.

    python tests/mutants/run.py maths                       every mutant of a package, `make mutants`
    python tests/mutants/run.py algorithms --sample 300     so many, drawn at random
    python tests/mutants/run.py maths --again found.jsonl   those that survived before
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import math
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coverage
import pytest
from mutations import Mutant, code_of, mutants_of

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "selffl"
MAX_MEMORY_BYTES = 16 * 2**30
FLOWER = [SOURCE / "engines" / "claims.py"] + [
    SOURCE / "engines" / "flower" / f"{name}.py" for name in ("answers", "messages", "records", "roster")
]
PACKAGES: dict[str, tuple[list[Path], list[str]]] = {  # the sources and the tests of each
    "maths": (sorted((SOURCE / "maths").glob("*.py")), ["tests/maths", "src/selffl/maths"]),
    "state": (sorted((SOURCE / "state").glob("*.py")), ["tests/state", "tests/runs/test_client_memory.py"]),
    "algorithms": (sorted((SOURCE / "algorithms").glob("*.py")), ["tests/algorithms", "src/selffl/algorithms"]),
    "flower": (
        FLOWER,
        [
            "tests/engines/flower",
            "tests/engines/test_claims_by_hand.py",
            "tests/engines/test_left_out.py",
            "tests/fuzz",
        ],
    ),
}


@dataclass
class Test:
    """A collected test: what it runs, how long it takes, and how many mutants of a function it has noticed."""

    item: pytest.Item
    seconds: float = 0.0
    noticed: Counter[str] = field(default_factory=Counter)


class Session:
    """The tests of a package, and the mutants that they are tried on."""

    def __init__(self, mutants: list[Mutant], sources: list[Path], out: Path, most_seconds: float) -> None:
        self.mutants, self.sources, self.out, self.most_seconds = mutants, sources, out, most_seconds
        self.tests: list[Test] = []
        self.tests_by_line: dict[tuple[str, int], set[int]] = {}
        self.results: list[dict[str, Any]] = []
        self.has_failed = False
        self.place = Path()  # below which tests have their folders
        self.log = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1)  # what tests print is caught

    def pytest_configure(self) -> None:
        """Have Hypothesis take the same examples each time, and be content with the first that fails."""
        import hypothesis  # pytest wants to be the first to import it

        hypothesis.settings.register_profile(
            "mutants", database=None, derandomize=True, deadline=None, print_blob=False,
            phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        hypothesis.settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Whether any part of a test has failed."""
        self.has_failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try the mutants instead of running the tests."""
        self.tests = [Test(item) for item in session.items]
        self._measure()
        gc.unfreeze()
        functions = _functions({str(path) for path in self.sources})
        with self.out.open("a", encoding="utf-8") as file:
            for number, mutant in enumerate(self.mutants, start=1):
                result = self._try(mutant, functions)
                self.results.append(result)
                file.write(json.dumps(result) + "\n")
                file.flush()
                if number % 50 == 0 or result["verdict"] in ("survived", "not run"):
                    print(f"{number}/{len(self.mutants)} {result['verdict']}: {mutant.name}", file=self.log)
        return True

    def _run(self, places: Iterable[int]) -> int | None:
        """Run some tests; the place of the first that fails."""
        order = list(places)
        # What a killed process has left is no concern of the next one.
        self.tests[order[0]].item.config._tmp_path_factory._given_basetemp = self.place / str(os.getpid())
        for place, after in zip(order, [*order[1:], None], strict=True):
            item = self.tests[place].item
            following = None if after is None else self.tests[after].item
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.has_failed:
                return place
        return None

    def _measure(self) -> None:
        """Run every test once, in another process, for nothing that is cached in one to be seen by mutants."""

        def measure() -> Any:
            tracer = coverage.Coverage(data_file=None, include=[str(path) for path in self.sources], config_file=False)
            found = []
            tracer.start()
            for place, test in enumerate(self.tests):
                tracer.switch_context(str(place))
                began, self.has_failed = time.perf_counter(), False
                is_good = self._run([place]) is None
                found.append((is_good, time.perf_counter() - began))
                if not is_good:
                    print(f"left out, for it fails as it is: {test.item.nodeid}", file=self.log)
            tracer.stop()
            data = tracer.get_data()
            lines = {name: data.contexts_by_lineno(name) for name in data.measured_files()}
            return found, lines

        code, answer = _in_process(measure, 3600.0)
        assert code == 0, f"the tests as they are ended with {code}"
        outcomes, lines = answer
        for test, (_, seconds) in zip(self.tests, outcomes, strict=True):
            test.seconds = seconds
        for name, contexts in lines.items():
            for line, places in contexts.items():
                good = {int(place) for place in places if place and outcomes[int(place)][0]}
                self.tests_by_line[name, line] = good
        print(f"{len(self.tests)} tests, {sum(test.seconds for test in self.tests):.0f} s", file=self.log)

    def _chosen(self, mutant: Mutant) -> list[int]:
        """The tests that run the changed line, in their order, as many as there is time for."""
        found: set[int] = set()
        for line in mutant.lines:
            found |= self.tests_by_line.get((str(mutant.path), line), set())
        key = f"{mutant.path.name} {mutant.function}"
        order = sorted(found, key=lambda place: (-self.tests[place].noticed[key], self.tests[place].seconds))
        chosen, left = [], self.most_seconds
        for place in order:
            left -= self.tests[place].seconds
            if chosen and left < 0:
                break
            chosen.append(place)
        return chosen

    def _try(self, mutant: Mutant, functions: dict[tuple[str, str, int], list[types.FunctionType]]) -> dict[str, Any]:
        chosen = self._chosen(mutant)
        result = {"file": mutant.path.name, "line": mutant.lines.start, "name": mutant.name, "tests": len(chosen)}
        if not chosen:
            return result | {"verdict": "not run"}
        live = functions.get((str(mutant.path), mutant.function, mutant.first_line), [])
        assert live, f"no function is left of {mutant.name}"

        def attempt() -> int | None:
            code = code_of(mutant)
            for function in live:
                # `__class__`, which super() needs, has to be there still where the mutant has no use for it.
                function.__code__ = code.replace(co_freevars=function.__code__.co_freevars)
            return self._run(chosen)

        limit = 10.0 + 5.0 * sum(self.tests[place].seconds for place in chosen)
        code, place = _in_process(attempt, limit)
        _unmount(self.place)
        if code is None:
            return result | {"verdict": "took too long"}
        if code:
            return result | {"verdict": "crashed"}
        if place is None:
            return result | {"verdict": "survived"}
        self.tests[place].noticed[f"{mutant.path.name} {mutant.function}"] += 1
        return result | {"verdict": "noticed", "by": self.tests[place].item.nodeid}


def _functions(paths: set[str]) -> dict[tuple[str, str, int], list[types.FunctionType]]:
    """Live functions by file, name and first line; what decorators have wrapped is among them."""
    found: dict[tuple[str, str, int], list[types.FunctionType]] = {}
    for each in gc.get_objects():
        if type(each) is types.FunctionType and each.__code__.co_filename in paths:
            code = each.__code__
            found.setdefault((code.co_filename, code.co_qualname, code.co_firstlineno), []).append(each)
    return found


def _unmount(place: Path) -> None:
    """Small disks that tests have mounted and were killed before they could unmount."""
    for line in reversed(Path("/proc/mounts").read_text(encoding="utf-8").splitlines()):
        if line.split()[1].startswith(f"{place}/"):
            subprocess.run(["umount", line.split()[1]], check=True)


def _in_process(act: Any, limit_seconds: float) -> tuple[int | None, Any]:
    """Do something in a forked process: its exit code, ``None`` where it took too long, and what it returns."""
    with tempfile.TemporaryFile() as answer:
        child = os.fork()
        if not child:
            code = 1
            with contextlib.suppress(BaseException):
                os.setsid()
                resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
                pickle.dump(act(), answer)
                answer.flush()
                code = 0
            os._exit(code)
        ends = time.monotonic() + limit_seconds
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done or time.monotonic() > ends:
                break
            time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError):  # its own children, too
            os.killpg(child, signal.SIGKILL)
        if not done:
            os.waitpid(child, 0)
            return None, None
        code = os.waitstatus_to_exitcode(status)
        answer.seek(0)
        return code, pickle.load(answer) if code == 0 else None


def interval(successes: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z, share = 1.96, successes / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return middle - reach, middle + reach


def trial(mutants: list[Mutant], sources: list[Path], tests: list[str], out: Path, most_seconds: float) -> Session:
    """Try mutants on the tests."""
    session = Session(mutants, sources, out, most_seconds)
    with tempfile.TemporaryDirectory() as place:
        # Over Flower slow tests start processes, of which mutants know nothing; elsewhere they merely take seconds.
        without_processes = ["-m", "not slow"] if any("flower" in test for test in tests) else []
        options = [
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-p",
            "no:terminal",
            *without_processes,
            f"--basetemp={place}/tests",
        ]
        pytest.main([*options, *tests], plugins=[session])
    return session


def main(words: list[str]) -> None:
    """Try the mutants of a package, and say how many were noticed."""
    parser = argparse.ArgumentParser(description="Which mutants of a package do its tests notice?")
    parser.add_argument("package", choices=PACKAGES)
    parser.add_argument("--sample", type=int, help="so many mutants, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", type=Path, help="only those that survived, by an earlier file of results")
    parser.add_argument("--only", default="", help="only files whose names begin so")
    parser.add_argument("--tests", nargs="*", help="other tests than the package's")
    parser.add_argument("--seconds", type=float, default=20.0, help="of tests for each mutant at most")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"), help="to which a line for each is added")
    given = parser.parse_args(words)
    sources, tests = PACKAGES[given.package]
    mutants = [mutant for path in sources if path.name.startswith(given.only) for mutant in mutants_of(path)]
    total = len(mutants)
    if given.again:
        lines = [json.loads(line) for line in given.again.read_text(encoding="utf-8").splitlines()]
        names = {line["name"].partition(" ")[2] for line in lines if line["verdict"] in ("survived", "not run")}
        mutants = [mutant for mutant in mutants if mutant.name.partition(" ")[2] in names]
    random.Random(given.seed).shuffle(mutants)  # wherever it is stopped, what was tried is drawn at random
    mutants = mutants[: given.sample]
    for path in sources:
        importlib.import_module(
            ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
        )
    given.out.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    results = trial(mutants, sources, given.tests or tests, given.out.resolve(), given.seconds).results
    verdicts = Counter(result["verdict"] for result in results)
    noticed = len(results) - verdicts["survived"] - verdicts["not run"]
    low, high = interval(noticed, max(len(results), 1))
    share = f"{noticed} of {len(results)} noticed, {noticed / max(len(results), 1):.1%} ({low:.1%} to {high:.1%})"
    print(f"{given.package}: {total} mutants; {share}; {dict(verdicts)}; {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
