"""Kill the real code at its first, second, third … file operation, let it go on, and compare what it leaves.

A process is forked, and counts what it does to files below a folder: opening one for writing, the first write into it
(which is torn: half of it arrives), fsync, rename, delete, make, change of mode, and every write into slots of clients'
memory (half of them arrive).  At the n-th it kills itself, as a
power cut would.  Another process then does what a user does, the same call or command once more, and what lies in
the folder has to be what an undisturbed run leaves: tensors and records bit by bit, but for seconds.

    python tests/kill_points.py            every point of every scenario, `make kill-points`
    python tests/kill_points.py compare    those of one
    python tests/kill_points.py --fast     copies of the folder at every point instead of kills
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import csv
import functools
import hashlib
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyarrow import parquet
from torch import nn

import selffl
from programs import become_selffl, fork
from selffl.algorithms.records import tensors_of
from selffl.reports import figures, page
from selffl.runs import folder as files
from selffl.state.checkpoint import load_tensors
from selffl.state.disk import SlotFile
from selffl.studies.result import Chart, Figure, Series

UNMEASURED = {"seconds", "environment", "command"}  # differ from run to run

# ---------------------------------------------------------------------------------------------------------- the points


class Killer:
    """Counts file operations below a folder, and kills its process at one of them."""

    def __init__(self, root: Path, number: int | None) -> None:
        self.root, self.number, self.count = root.resolve(), number, 0

    def reach(self, path: Any) -> bool:
        """Count an operation; whether it is the one to die at."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        if not Path(os.fsdecode(path)).absolute().is_relative_to(self.root):
            return False
        self.count += 1
        return self.is_due()

    def is_due(self) -> bool:
        """Whether this is the operation to die at."""
        return self.count == self.number

    def die(self) -> None:
        """End, without a chance to tidy up."""
        os.kill(os.getpid(), signal.SIGKILL)

    def tear_slots(self, fill_half: Callable[[], None]) -> None:
        """End in the middle of a write into slots."""
        fill_half()
        self.die()

    def arm(self) -> None:
        """Watch what this process does from here on."""
        for name in ("fsync", "replace", "rename", "unlink", "remove", "mkdir", "rmdir", "chmod"):
            setattr(os, name, self._watched(getattr(os, name)))
        real = io.open

        def opened(path: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
            is_written = set(mode) & set("wax+")
            if is_written and not isinstance(path, int) and self.reach(path):
                self.die()
            file = real(path, mode, *more, **options)
            if is_written and not isinstance(path, int):
                self._tear(file, path)
            return file

        builtins.open = io.open = opened  # type: ignore[assignment]
        fill = SlotFile.write

        def filled(file: SlotFile, slots: Any, rows: Any) -> None:
            if self.reach(file.path):
                self.tear_slots(lambda: fill(file, slots[: len(slots) // 2], rows[: len(slots) // 2]))
            fill(file, slots, rows)

        SlotFile.write = filled  # type: ignore[method-assign]

    def _watched(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *more: Any, **options: Any) -> Any:
            if self.reach(path):
                self.die()
            return real(path, *more, **options)

        return call

    def _tear(self, file: Any, path: Any) -> None:
        """Have the first write into a file count, and only half of it arrive where it is the one to die at."""
        real = file.write

        def write(content: Any) -> Any:
            if not content:  # a try, whether the file takes text or bytes
                return real(content)
            with contextlib.suppress(AttributeError):
                del file.write
            if self.reach(path):
                half = len(content) // 2
                real(content[:half])
                file.flush()
                self.die()
                return half + real(content[half:])
            return real(content)

        with contextlib.suppress(AttributeError):
            file.write = write


class Camera(Killer):
    """Does not kill: at every operation it keeps a copy of what a kill would have left in the folder."""

    def __init__(self, root: Path, shots: Path) -> None:
        super().__init__(root, None)
        self.shots, self.is_open = shots, True

    def is_due(self) -> bool:
        """Always, but where half of a write is made for a copy alone."""
        return self.is_open

    def die(self) -> None:
        """Copy the folder, and live on."""
        shutil.copytree(self.root, self.shots / str(self.count))

    def tear_slots(self, fill_half: Callable[[], None]) -> None:
        """Write half in a process of its own, whose map of the file is not this one's, and copy what that leaves."""
        if child := os.fork():
            os.waitpid(child, 0)
            return
        number, self.is_open = self.count, False
        fill_half()
        self.count = number
        self.die()
        os.kill(os.getpid(), signal.SIGKILL)


# -------------------------------------------------------------------------------------------------------- what is done


class Own(nn.Linear):
    """A module of the user's own, which is pickled."""


def federation() -> selffl.Federation:
    """Three clients of the user's own, with classes."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    return selffl.Federation.from_arrays(x, (x[:, 0] > 0).astype(int), list("abc") * 20, test_fraction=0.3)


FEW = {"participation": 0.7, "evaluate_every": 1}
IS_SHORT = False  # whether scenarios have the rounds that differ, without those that do the same once more


def train(root: Path) -> None:
    """A run with everything that one can have; where it was begun, it goes on."""
    if (root / "run" / files.CONFIG).is_file():
        selffl.resume(root / "run", trusted=True)
    else:
        torch.manual_seed(0)
        method = selffl.algorithm("self-fl-exact", initial_steps=2, max_local_steps=2)
        rounds = 2 if IS_SHORT else 3
        selffl.train(Own(3, 2), federation(), method, rounds=rounds, out=root / "run", gain=True, **FEW)


def begin(root: Path) -> None:
    """A run that has ended, to go on with."""
    method = selffl.algorithm("self-fl-auto", num_local_steps=2)
    selffl.train(nn.Linear(3, 2), federation(), method, rounds=2, out=root / "run", **FEW)


def go_on(root: Path) -> None:
    """For three rounds more."""
    selffl.resume(root / "run", rounds=4 if IS_SHORT else 5)


def keep_on_disk(root: Path) -> None:
    """A run whose clients' memories lie on disk, with checkpoints that lag behind; where it was begun, it goes on."""
    if (root / "run" / files.CONFIG).is_file():
        selffl.resume(root / "run")
    else:
        torch.manual_seed(0)
        method = selffl.algorithm("self-fl-exact", initial_steps=2, max_local_steps=2)  # `go_on` has self-fl-auto
        more = FEW | {"rounds": 6, "evaluate_every": 3, "checkpoint_every": 2, "chunk_size": 2}
        selffl.train(nn.Linear(3, 2), federation(), method, out=root / "run", client_memory="disk", **more)


def command(*words: str) -> Callable[[Path], None]:
    """What runs a command in a folder."""

    def act(root: Path) -> None:
        for number in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        become_selffl(words, root)

    return act


def nothing(root: Path) -> None:
    """No preparation."""


ALONE = ("--processes", "1")
STEPS = ("--set", "num_local_steps=1", "--rounds", "2")
SCENARIOS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {  # preparation, and what is killed
    "train": (nothing, train),
    "resume": (begin, go_on),
    "disk": (nothing, keep_on_disk),
    "run": (nothing, command("run", "digits", "-a", "ditto", *STEPS, "--out", "run", "--resume")),
    "compare": (
        nothing,
        command("compare", "digits", "-a", "fedavg,local", "--seeds", "1", "--rounds", "1", *ALONE, "--out", "c"),
    ),
    "paper": (nothing, command("paper", "run", "limits", "--quick", *ALONE, "--out", "p")),
}

DRAWING = ("compare", "paper")
COMMANDS = ("run", *DRAWING)  # which end the process that they run in

# ------------------------------------------------------------------------------------------------------ what is left


def content(root: Path) -> dict[str, Any]:
    """What lies in a folder, by file, without what differs from run to run; nor what a killed writer leaves."""
    memories = functools.cache(_memories)  # of this moment
    return {
        str(path.relative_to(root)): _content(path, memories)
        for path in sorted(root.rglob("*"))
        if path.is_file() and not any(part.endswith((".part", ".lock")) for part in path.relative_to(root).parts)
    }


def _content(path: Path, memories: Callable[[Path], dict[str, torch.Tensor]]) -> Any:
    if path.suffix == ".safetensors":
        tensors, about = load_tensors(path)
        return {name: value.numpy().tobytes() for name, value in tensors.items()}, _measured(about)
    if path.suffix == ".slots":
        return memories(path.parent.parent)[path.stem].numpy().tobytes()
    if path.suffix == ".json":
        return _measured(json.loads(path.read_text(encoding="utf-8")))
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            return _measured(list(csv.DictReader(file)))
    if path.suffix == ".parquet":
        return _measured(parquet.read_table(path).to_pylist())
    if path.suffix == ".html":
        return path.read_text(encoding="utf-8").rstrip().endswith("</html>")
    return path.read_bytes()


def _memories(run: Path) -> dict[str, torch.Tensor]:
    """Clients' memories in the slots that a run's checkpoint refers to, which are checked by their sums."""
    memory = selffl.load(run)._state.memory
    return tensors_of(memory.read(torch.arange(len(memory.slots))))


def _measured(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _measured(value) for key, value in found.items() if key not in UNMEASURED}
    return [_measured(value) for value in found] if isinstance(found, list) else found


# -------------------------------------------------------------------------------------------------------- experiments


def in_process(act: Callable[[Path], None], root: Path, killer: Killer | None = None) -> tuple[int, int]:
    """Do it in a process of its own, which may be killed at an operation: how it ended, and how many it came to."""
    reading, writing = os.pipe()
    killer = killer or Killer(root, None)

    def counted() -> None:
        real = os._exit

        def leave(code: int) -> None:
            os.write(writing, str(killer.count).encode())
            real(code)

        os._exit = leave  # type: ignore[assignment]
        killer.arm()
        act(root)

    child = fork(counted)
    os.close(writing)
    with os.fdopen(reading) as told:
        count = told.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(count or 0)


@functools.cache
def warm_up(is_drawing: bool) -> None:
    """Have in memory what every process would load for itself otherwise."""
    with tempfile.TemporaryDirectory() as place:
        train(Path(place))
    if is_drawing:
        page._plotly()
        chart = Chart("x", "x", "y", [Series("self-fl", [1, 2], [1, 2])])
        figures.draw(Figure("x", "x", [chart])).savefig(io.BytesIO())


def digest(root: Path) -> str:
    """Of all files of a folder: names, modes and bytes."""
    found = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        found.update(f"{path.relative_to(root)}\0{path.stat().st_mode}\0".encode())
        if path.is_file():
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


class Experiment:
    """A scenario, what it leaves undisturbed, and how many points there are to kill it at."""

    def __init__(self, name: str, place: Path) -> None:
        warm_up(name in DRAWING)
        self.prepare, self.act = SCENARIOS[name]
        self.name, self.place = name, place
        self.start = place / f"{name}-start"
        self.start.mkdir(parents=True)
        code, _ = in_process(self.prepare, self.start)
        assert code == 0, f"{name}: the preparation ended with {code}"
        root = self._root("whole")
        code, self.points = in_process(self.act, root)
        assert code == 0, f"{name}: undisturbed, it ended with {code}"
        self.states = 0  # different ones that kills leave; known once all points are tried
        self.expected = content(root)

    def _root(self, name: str) -> Path:
        root = self.place / self.name  # always the same: records name their folders
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(self.start, root)
        return root

    def differences(self, number: int) -> list[str]:
        """Kill it there and go on: what is not as it should be."""
        root = self._root(str(number))
        code, _ = in_process(self.act, root, Killer(root, number))
        if code != -signal.SIGKILL:
            return [f"it ended with {code} instead of being killed"]
        return self._differences_after_going_on(root)

    def all_differences(self) -> dict[int, list[str]]:
        """By point, what is not as it should be, of all points: one process meets them all and leaves a copy at each.

        From there this one goes on, or one of its own where it would end.  Points that leave the same files with the
        same bytes, as before and after an fsync, are tried once: what goes on knows nothing but the files.
        """
        shots = self.place / f"{self.name}-shots"
        root = self._root("photographed")
        code, points = in_process(self.act, root, Camera(root, shots))
        assert code == 0, f"{self.name}: photographed, it ended with {code}"
        assert points == self.points, f"{self.name}: {points} operations instead of {self.points}"
        assert content(root) == self.expected, f"{self.name}: photographing changed what it leaves"
        known: dict[str, list[str]] = {}
        found = {}
        for number in range(1, points + 1):
            shot = shots / str(number)
            key = digest(shot)
            if key not in known:
                shutil.rmtree(root)
                shutil.move(shot, root)
                known[key] = self._differences_after_going_on(root, here=self.name not in COMMANDS)
            found[number] = known[key]
        self.states = len(known)
        return found

    def _differences_after_going_on(self, root: Path, *, here: bool = False) -> list[str]:
        if here:
            try:
                self.act(root)
            except Exception as error:
                return [f"going on ended with {error!r}"]
        elif code := in_process(self.act, root)[0]:
            return [f"going on ended with {code}"]
        found = content(root)
        names = sorted(set(found) | set(self.expected))
        return [name for name in names if found.get(name) != self.expected.get(name)]


def main(words: Sequence[str] | None = None) -> int:
    """Every point of the scenarios; how many went wrong.  The ``words`` are those of the command line, or given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="SCENARIO", help=f"of {', '.join(SCENARIOS)}; all without it")
    parser.add_argument("--fast", action="store_true", help="copies of the folder at every point instead of kills")
    asked = parser.parse_args(words)
    if unknown := set(asked.names) - set(SCENARIOS):
        parser.error(f"no scenario: {', '.join(sorted(unknown))}")
    wrong, is_fast = 0, asked.fast
    with tempfile.TemporaryDirectory() as place:
        for name in asked.names or SCENARIOS:
            began, experiment, bad = time.perf_counter(), Experiment(name, Path(place)), 0
            points = range(1, experiment.points + 1)
            each = experiment.all_differences() if is_fast else None
            for number in points:
                if found := each[number] if each else experiment.differences(number):
                    bad += 1
                    print(f"{name}, operation {number}: {', '.join(found)}", flush=True)
            seconds = time.perf_counter() - began
            states = f" ({experiment.states} states)" if is_fast else ""
            print(f"{name}: {experiment.points} points{states}, {bad} went wrong, {seconds:.0f} s", flush=True)
            wrong += bad
    return wrong


if __name__ == "__main__":
    sys.modules["kill_points"] = sys.modules["__main__"]
    Own.__module__ = "kill_points"  # where its pickle is looked for
    os.cpu_count = lambda: 1
    sys.exit(1 if main() else 0)
