"""`selffl bench --peers`: the same rounds by other libraries, each in an environment and a process of its own.

Environments are made once, in the user's cache.  Processes take turns, round by round; at the end each says how many
steps its clients took and how right its model is, and who did other work than the loop is left out.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selffl.data.locate import cache

WORKER = Path(__file__).with_name("bench_worker.py")
LOOP, PRODUCTS, OURS = "loop", "products", "selffl"
ROWS, STEPS, BATCH = 50, 20, 10
WARM_UP_ROUNDS = 3  # of a worker: its first, one with as many threads as cores, one with a single thread
TOLERANCE = 0.02  # by which an accuracy may differ from the loop's: minibatches and cohorts are drawn differently
# On a network of its own, in which there is nobody but itself; whatever it starts ends with it.
UNSHARE = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--map-root-user")
APART = (*UNSHARE, "sh", "-c", 'ip link set lo up; exec "$@"', "sh")


@dataclass(frozen=True)
class Peer:
    """Another library: what pip is asked for."""

    packages: tuple[str, ...]
    is_apart: bool = False  # whether it has to be kept off the network


TORCH = "torch==2.13.0"
PEERS = {
    "fedjax": Peer(("fedjax==0.0.17", "jax<0.6", "jaxlib<0.6")),  # later ones lack what it calls
    "pfl": Peer(("pfl==0.6.0", TORCH)),
    "fluke": Peer(("fluke-fl==0.8.1", TORCH)),
    "flower": Peer(("flwr[simulation]==1.41.0", TORCH), is_apart=True),  # Ray listens on every interface
}


@dataclass
class Worker:
    """A process that runs rounds of one library, one at a time."""

    process: subprocess.Popen[str]
    log: Path
    turns: list[dict[str, float]] = field(default_factory=list)

    def ask(self, line: str) -> dict[str, Any]:
        """The process's answer to a line; `ChildProcessError` with what it said last where it has ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            if line:
                self.process.stdin.write(line + "\n")
                self.process.stdin.flush()
            found = self.process.stdout.readline()
        except BrokenPipeError:
            found = ""
        if not found:
            said = [each for each in self.log.read_text(errors="replace").splitlines() if each.strip()]
            raise ChildProcessError(said[-1] if said else f"it ended with status {self.process.wait()}")
        answer: dict[str, Any] = json.loads(found)
        return answer


def environment(name: str, folder: Path | None = None) -> Path:
    """The Python of a peer's environment, which is made if there is none; `ChildProcessError` where pip fails."""
    peer, place = PEERS[name], (folder or cache() / "peers") / name
    made, wanted = place / "installed.txt", "\n".join(peer.packages) + "\n"
    python = place / "bin" / "python"
    if made.is_file() and made.read_text(encoding="utf-8") == wanted:
        return python
    shutil.rmtree(place, ignore_errors=True)
    venv.create(place, with_pip=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *peer.packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise ChildProcessError(said[0] if said else f"pip ended with status {done.returncode}")
    made.write_text(wanted, encoding="utf-8")
    return python


@contextmanager
def started(name: str, python: Path, sizes: Mapping[str, int], cores: int, folder: Path) -> Iterator[Worker]:
    """A worker of a library, which is ready once it has answered the first time."""
    words = [word for key, value in (*sizes.items(), ("cores", cores)) for word in (f"--{key}", str(value))]
    before = APART if name in PEERS and PEERS[name].is_apart else ()
    log = folder / f"{name}.log"
    surroundings = os.environ | {"OMP_NUM_THREADS": str(cores), "OMP_WAIT_POLICY": "passive"}
    with log.open("w", encoding="utf-8") as said:
        process = subprocess.Popen(
            [*before, str(python), str(WORKER), name, *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, env=surroundings,
        )  # fmt: skip
    try:
        yield Worker(process, log)
    finally:
        process.kill()
        process.communicate()


def measure(
    peers: Sequence[str], *, clients: int, turns: int, cores: int, folder: Path, places: Path | None = None
) -> dict[str, Any]:
    """The record of all libraries, taking turns; under ``left_out`` those that could not, and why.

    ``folder`` is where processes write what they say, ``places`` where environments lie.
    """
    sizes = {"clients": clients, "rows": ROWS, "cohort": max(clients // 10, 1), "steps": STEPS, "batch": BATCH}
    left_out: dict[str, str] = {}
    workers: dict[str, Worker] = {}
    with ExitStack() as stack:
        for name in (LOOP, PRODUCTS, OURS, *peers):
            try:
                python = Path(sys.executable) if name not in PEERS else environment(name, places)
                workers[name] = stack.enter_context(started(name, python, sizes, cores, folder))
                workers[name].ask("")
            except (ChildProcessError, OSError) as error:
                workers.pop(name, None)
                left_out[name] = str(error)
        for _ in range(turns):
            for worker in workers.values():
                worker.turns.append(worker.ask("round"))
        clocks = ("seconds", "cpu_seconds")  # of the processor: of its process, all threads together
        found = {
            name: {clock: [turn[clock] for turn in worker.turns] for clock in clocks} | worker.ask("end")
            for name, worker in workers.items()
        }
    for name, why in unequal(found, (WARM_UP_ROUNDS + turns) * sizes["cohort"] * STEPS).items():
        left_out[name] = why
        del found[name]
    machine = f"{platform.machine()}, {cores} of {os.cpu_count()} cores, Python {platform.python_version()}"
    record = {"machine": machine, "sizes": sizes, "turns": turns, "tolerance": TOLERANCE}
    return record | {"load": list(os.getloadavg()), "libraries": found, "left_out": left_out}


def unequal(found: Mapping[str, Mapping[str, Any]], num_steps: int) -> dict[str, str]:
    """Who did other work than was asked for, and what: other numbers of steps, or a model that is not the loop's."""
    why = {}
    for name, each in found.items():
        if name == PRODUCTS:
            continue
        gap = each["accuracy"] - found[LOOP]["accuracy"]
        if each["num_steps"] != num_steps:
            why[name] = f"its clients took {each['num_steps']} steps; expected {num_steps}, as everybody's"
        elif abs(gap) > TOLERANCE:
            why[name] = f"its accuracy is {each['accuracy']:.3f}; expected the loop's {found[LOOP]['accuracy']:.3f}"
    return why
