"""A whole federation on one machine, by the scripts that real sites use.

TLS and node authentication are on; every process listens on 127.0.0.1.  For demonstrations and tests: processes can be
killed as a power cut would, and everything ends with the ``with`` block.

::

    with LocalFederation(folder, app, clients=range(3)) as federation:
        federation.start()
        run = federation.submit(rounds=5)
        federation.wait_for_round(run, 5)
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from supervise import descendants

HERE = Path(__file__).resolve().parent
CONNECTION = "local"
Found = TypeVar("Found")


class DeploymentError(Exception):
    """A part of the federation did not do what was expected of it."""


@dataclass(frozen=True)
class Run:
    """An app that was submitted.

    Attributes:
        number: Flower's.
        out: Folder of its records.
    """

    number: int
    out: Path


class LocalFederation:
    """A SuperLink, its gate and a SuperNode for each client, each a process of its own.

    Args:
        folder: where keys, databases, memories, logs and records go; made if it is not there.
        app: folder of the Flower app that is submitted.
        clients: the clients' ids.
        port: of the SuperLink; the gate has the next, the nodes those after it.
        environment: variables to set for every process, besides those of this one.
        say: told what happens, one line at a time.
    """

    def __init__(
        self,
        folder: str | Path,
        app: str | Path,
        clients: Iterable[int | str],
        *,
        port: int = 9091,
        environment: Mapping[str, str] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.folder, self.app = Path(folder).resolve(), Path(app).resolve()
        self.clients = [str(client) for client in clients]
        self.port, self._say = port, say
        self._environment = self._surroundings(environment or {})
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    # ------------------------------------------------------------------------------------------------------- places

    @property
    def certificates(self) -> Path:
        """The server's, and the authority's beside them."""
        return self.folder / "server"

    @property
    def state(self) -> Path:
        """Of the SuperLink: its database, and runs whose ``out`` is relative."""
        return self.folder / "state"

    def key(self, client: int | str) -> Path:
        """A node's private key."""
        return self.folder / "keys" / f"site-{client}"

    def memory(self, client: int | str) -> Path:
        """Where a client keeps its memories."""
        return self.folder / "memory" / f"site-{client}"

    def log(self, name: int | str) -> Path:
        """Of a process: ``superlink``, ``gate``, or a client's id for its node."""
        return self.folder / "logs" / f"{self._process(name)}.log"

    def _process(self, name: int | str) -> str:
        return f"node-{name}" if str(name) in self.clients else str(name)

    # -------------------------------------------------------------------------------------------- from nothing to all

    def __enter__(self) -> LocalFederation:
        for path in (self.folder, self.folder / "logs", self.folder / "pids"):
            path.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Everything: certificates and keys, the server, its gate, the nodes registered and connected."""
        self.make_keys()
        self.start_superlink()
        self.start_gate()
        for client in self.clients:
            self.register(client)
        for client in self.clients:
            self.start_node(client)
        for client in self.clients:
            self.wait_for_node(client)

    def make_keys(self) -> None:
        """The authority, the server's certificate, a key for each node; those that are there are kept."""
        self._say("making the authority, the server's certificate and the nodes' keys")
        self.script("make-ca", str(self.folder / "ca"), "--keep")
        self.script(
            "make-server-certificate", "--ca", str(self.folder / "ca"), "--out", str(self.certificates),
            "--host", "localhost", "--keep",
        )  # fmt: skip
        for client in self.clients:
            self.script("make-node-key", str(self.folder / "keys"), f"site-{client}", "--keep")
        self.script("connect", CONNECTION, f"127.0.0.1:{self.port}", str(self.certificates / "ca.crt"), "--replace")

    def start_superlink(self, seconds: float = 60.0) -> None:
        """Start the SuperLink under a supervisor, and wait until it listens."""
        self._say(f"starting the SuperLink on 127.0.0.1:{self.port}: TLS, registered nodes only")
        command = [
            str(HERE / "superlink"), "--certificates", str(self.certificates), "--state", str(self.state),
            "--port", str(self.port),
        ]  # fmt: skip
        self._start("superlink", self._supervised("superlink", command))
        self.wait_for_superlink(seconds=seconds)

    def wait_for_superlink(self, since: int = 0, seconds: float = 60.0) -> None:
        """Until the SuperLink listens; ``since``: position in its log from which on that counts."""
        self.wait_for_log("superlink", "Uvicorn running on", since, seconds)

    def start_gate(self, seconds: float = 30.0) -> None:
        """Start the gate, and wait until it listens."""
        self._say(f"starting its gate on 127.0.0.1:{self.port + 1}: calls of nodes only")
        command = [
            sys.executable, str(HERE / "gate.py"), "--certificates", str(self.certificates),
            "--server", f"127.0.0.1:{self.port}", "--port", str(self.port + 1),
        ]  # fmt: skip
        self._start("gate", command)
        self._wait_for_port("gate", self.port + 1, seconds)

    def register(self, client: int | str) -> None:
        """Let a node in by its public key."""
        self._say(f"registering the key of site {client}")
        self.script("nodes", "register", f"site-{client}", f"{self.key(client)}.pub", "--connection", CONNECTION)

    def node_command(self, client: int | str, /, **changed: str) -> list[str]:
        """What starts a node; ``changed`` are options in the place of the usual ones."""
        port = self.port + 10 + (self.clients.index(str(client)) if str(client) in self.clients else 90)
        options = {
            "server": f"127.0.0.1:{self.port + 1}",
            "ca": str(self.certificates / "ca.crt"),
            "key": str(self.key(client)),
            "client": str(client),
            "memory": str(self.memory(client)),
            "state": str(self.folder / "nodes" / f"site-{client}"),
            "port": str(port),
        } | changed
        return [str(HERE / "supernode"), *(word for name in options for word in (f"--{name}", options[name]))]

    def start_node(self, client: int | str) -> None:
        """Start a client's SuperNode under a supervisor, which starts it again whenever it ends."""
        self._say(f"starting the SuperNode of site {client}")
        self._start(self._process(client), self._supervised(client, self.node_command(client)))

    def _supervised(self, name: int | str, command: Sequence[str]) -> list[str]:
        return [sys.executable, str(HERE / "supervise.py"), "--pid-file", str(self._pid_file(name)), "--", *command]

    def wait_for_node(self, client: int | str, since: int = 0, seconds: float = 120.0) -> None:
        """Until the node is let in; ``since``: position in its log from which on that counts."""
        self.wait_for_log(client, r"SuperNode ID: \d+", since, seconds)

    # ---------------------------------------------------------------------------------------------------------- a run

    def submit(self, *, out: str | Path = "runs/digits", **settings: int | float | str) -> Run:
        """Submit the app with settings of its run configuration."""
        path = self.state / out
        given = {"out": str(path), **{name.replace("_", "-"): value for name, value in settings.items()}}
        # A JSON string is a TOML string.
        words = [word for name in given for word in ("--run-config", f"{name}={json.dumps(given[name])}")]
        text = self._run(["flwr", "run", str(self.app), CONNECTION, *words], "the app could not be submitted")
        return self._submitted(text, path)

    def resume(self, out: Path, *options: str) -> Run:
        """Go on with the run in ``out`` from its last checkpoint, as an operator does."""
        words = ["selffl", "flower", "resume", str(out), "--app", str(self.app), "--connection", CONNECTION, *options]
        return self._submitted(self._run(words, "the run could not be resumed"), out)

    def _submitted(self, text: str, out: Path) -> Run:
        found = re.search(r"started run (\d+)", text)
        if found is None:
            raise DeploymentError(f"flwr does not say which run it has started: {_last_lines(text, 5)}")
        self._say(f"submitted run {found[1]}")
        return Run(int(found[1]), out)

    def history(self, out: Path) -> list[dict[str, str]]:
        """The rounds that a run has done so far."""
        try:
            with (out / "history.csv").open(encoding="utf-8", newline="") as file:
                return [row for row in csv.DictReader(file) if (row.get("round") or "").isdigit()]
        except FileNotFoundError:
            return []

    def wait_for_round(self, run: Run, number: int, seconds: float = 240.0) -> dict[str, str]:
        """Until a round is over: its row of the history."""

        def found() -> dict[str, str] | None:
            is_over = self._is_over(run)  # before the look: the last round is written, and then the run ends
            rows = {int(row["round"]): row for row in self.history(run.out)}
            if is_over and number not in rows:
                raise DeploymentError(f"the run has ended before round {number}. Its log:\n{self.run_log(run)}")
            return rows.get(number)

        return self._wait(found, seconds, f"round {number} of {run.out}", "superlink")

    def wait_for_end(self, run: Run, seconds: float = 240.0) -> None:
        """Until the run's process has ended; whether it has done all its rounds, its records say."""
        self._wait(lambda: self._is_over(run), seconds, f"the end of run {run.number}", "superlink")

    def _is_over(self, run: Run) -> bool:
        return re.search(rf"Finished task \d+ of run {run.number}\b", self.read_log("superlink")) is not None

    def run_log(self, run: Run) -> str:
        """What the server's app has said: which answers were left out, and why."""
        text = self._run(["flwr", "log", str(run.number), CONNECTION, "--show"], "there is no log of the run")
        return re.sub(r"\x1b\[[0-9;]*m", "", text)

    def rounds_remembered(self, client: int | str) -> dict[str, int]:
        """The last round that a client's memory has, by experiment."""
        from selffl.engines.flower.memory import memories

        found = {}
        for memory, last, _, problem in memories(self.memory(client)):
            if problem is not None:
                raise DeploymentError(f"the memory of client {client} cannot be read: {problem}")
            if memory.client == str(client) and last is not None:
                found[memory.experiment] = last
        return found

    # ------------------------------------------------------------------------------------------------------- mishaps

    def kill_node(self, client: int | str) -> None:
        """End a SuperNode and all its processes as a power cut would; its supervisor starts it again."""
        pid = self._pid(client)
        self._say(f"kill -9 {pid}: the SuperNode of site {client} and its processes")
        _kill([pid, *descendants(pid)])

    def kill_superlink(self) -> None:
        """End the SuperLink by SIGKILL; its supervisor ends what it leaves behind, and starts it again."""
        pid = self._pid("superlink")
        self._say(f"kill -9 {pid}: the SuperLink")
        _kill([pid])

    def stop_node(self, client: int | str) -> None:
        """End a node and its supervisor, as an operator does."""
        self._stop(self._process(client))

    def stop(self) -> None:
        """End everything: the nodes first, so that they can say goodbye."""
        for name in sorted(self._processes, key=lambda name: (name == "superlink", name == "gate")):
            self._stop(name, wait=name in ("superlink", "gate"))
        for name in list(self._processes):
            self._stop(name)

    # ------------------------------------------------------------------------------------------------------ processes

    def script(self, name: str, *arguments: str) -> str:
        """Run one of the scripts beside this file: what it prints."""
        return self._run([str(HERE / name), *arguments], f"{name} has failed")

    def position(self, name: int | str) -> int:
        """Where a process's log ends now."""
        path = self.log(name)
        return path.stat().st_size if path.exists() else 0

    def wait_for_log(self, name: int | str, pattern: str, since: int = 0, seconds: float = 120.0) -> re.Match[str]:
        """Until a process's log has a line of that pattern, beyond the position ``since``."""

        def found() -> re.Match[str] | None:
            return re.search(pattern, self.read_log(name, since))

        return self._wait(found, seconds, f"{pattern!r} in the log", name)

    def read_log(self, name: int | str, since: int = 0) -> str:
        """A process's log from a position on, without colours."""
        path = self.log(name)
        if not path.exists():
            return ""
        with path.open("rb") as file:
            file.seek(since)
            return re.sub(r"\x1b\[[0-9;]*m", "", file.read().decode(errors="replace"))

    def _start(self, name: str, command: Sequence[str]) -> None:
        running = self._processes.get(name)
        if running is not None and running.poll() is None:
            raise DeploymentError(f"{name} is running, as process {running.pid}; expected it not to. Stop it first.")
        with self.log(name.removeprefix("node-")).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment, cwd=self.folder
            )

    def _stop(self, name: str, wait: bool = True) -> None:
        process = self._processes.get(name)
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
        if not wait:
            return
        try:
            process.wait(timeout=20.0)
        except subprocess.TimeoutExpired:
            _kill([process.pid, *descendants(process.pid)])
            process.wait()
        del self._processes[name]

    def _run(self, command: Sequence[str], problem: str) -> str:
        done = subprocess.run(
            command, env=self._environment, cwd=self.folder, capture_output=True, text=True, check=False, timeout=180
        )
        if done.returncode:
            raise DeploymentError(f"{problem}: {_last_lines(done.stdout + done.stderr, 15)}")
        return done.stdout

    def _wait(self, found: Callable[[], Found | None], seconds: float, what: str, name: int | str) -> Found:
        """What ``found`` gives, once it gives anything; an error with the tail of the log that should say why not."""
        end = time.monotonic() + seconds
        while not (result := found()):
            process = self._processes.get(self._process(name))
            reason = None
            if process is not None and process.poll() is not None:
                reason = f"{self._process(name)} ended with status {process.returncode} before"
            elif time.monotonic() >= end:
                reason = f"nothing within {seconds:g} seconds of"
            if reason is not None and not (result := found()):
                tail = _last_lines(self.read_log(name), 25)
                raise DeploymentError(f"{reason} {what}. The end of {self.log(name)}:\n{tail}")
            time.sleep(0.1)
        return result

    def _wait_for_port(self, name: str, port: int, seconds: float) -> None:
        def is_open() -> bool:
            with socket.socket() as probe:
                probe.settimeout(1.0)
                return probe.connect_ex(("127.0.0.1", port)) == 0

        self._wait(is_open, seconds, f"listening on port {port}", name)

    def _pid_file(self, name: int | str) -> Path:
        return self.folder / "pids" / self._process(name)

    def _pid(self, name: int | str) -> int:
        try:
            return int(self._pid_file(name).read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            raise DeploymentError(f"{self._process(name)} is not running; expected it to. Start it first.") from None

    def _surroundings(self, changed: Mapping[str, str]) -> dict[str, str]:
        folder = Path(sys.executable).parent
        if shutil.which("flower-superlink", path=str(folder)) is None:
            raise DeploymentError(
                f"no flower-superlink beside {sys.executable}; expected the environment of selffl[flower]. Run this "
                "with its Python."
            )
        kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        return {
            **kept,
            "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "FLWR_HOME": str(self.folder / "cli"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",  # several processes share few cores
            **changed,
        }


def _last_lines(text: str, number: int) -> str:
    return "\n".join([line for line in text.splitlines() if line.strip()][-number:])


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
