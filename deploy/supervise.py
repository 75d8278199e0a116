#!/usr/bin/env python3
"""Keep a command running: start it again whenever it ends, after pauses that grow to a bound.

A SuperNode that died is refused under its key until the server has missed its heartbeats, for about a minute: it has
to be started again until it is let in.  Where systemd or Docker does that, this is not needed.

SIGTERM and SIGINT end the command, and then this.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType


class Supervisor:
    """One command, for as long as nobody ends it.

    Args:
        command: what to run.
        pause: seconds before the first restart; each that follows at once doubles it.
        longest: seconds that no pause exceeds.
        steady: seconds after which a command that ran counts as well started, and the pause is the first again.
        grace: seconds that it has to end when asked, before it is killed.
        pid_file: where the command's process id is kept.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        pause: float = 1.0,
        longest: float = 15.0,
        steady: float = 60.0,
        grace: float = 15.0,
        pid_file: Path | None = None,
    ) -> None:
        self._command, self._pid_file = list(command), pid_file
        self._first, self._longest, self._steady, self._grace = pause, longest, steady, grace
        self._child: subprocess.Popen[bytes] | None = None
        self._is_over = False

    def run(self) -> int:
        """Until a signal: the exit status, which is 0 then, and 127 if there is no such command."""
        _adopt_orphans()
        # The handlers come first: a command that is started while a signal is ignored ignores it, too.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        pause = self._first
        while not self._is_over:
            began = time.monotonic()
            try:
                # A group of its own: what it leaves behind can be ended with it.
                child = self._child = subprocess.Popen(self._command, start_new_session=True)
            except OSError as error:
                _say(f"cannot start {self._command[0]}: {error.strerror}; expected a command that is there.")
                return 127
            self._note(child.pid)
            if self._is_over:  # the signal came before there was anything to end
                self._end()
            status = child.wait()
            self._clear(child)
            _reap()
            if self._is_over:
                break
            if time.monotonic() - began >= self._steady:
                pause = self._first
            _say(f"{self._command[0]} has ended {_how(status)}; started again in {pause:g} s.")
            self._sleep(pause)
            pause = min(2 * pause, self._longest)
        self._note(None)
        _say(f"{self._command[0]} is ended.")
        return 0

    def _end(self, number: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        if self._is_over and number == signal.SIGALRM and self._child is not None:
            self._clear(self._child)  # it had its grace
            return
        self._is_over = True
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()
            signal.signal(signal.SIGALRM, self._end)
            signal.setitimer(signal.ITIMER_REAL, self._grace)

    def _clear(self, child: subprocess.Popen[bytes]) -> None:
        """End what is left of a command: two nodes must not write one memory, nor two servers one run."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        for pid in descendants(os.getpid()):  # those that made a group of their own
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._is_over and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))

    def _note(self, pid: int | None) -> None:
        if self._pid_file is None:
            return
        if pid is None:
            self._pid_file.unlink(missing_ok=True)
            return
        new = self._pid_file.with_name(self._pid_file.name + ".new")
        new.write_text(f"{pid}\n", encoding="ascii")
        new.replace(self._pid_file)


def _adopt_orphans() -> None:
    """Become the parent of what the command's processes leave behind, as far as the system can (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def descendants(pid: int) -> list[int]:
    """Children of a process, and theirs; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [pid]
    for parent in found:  # which grows as it goes
        found.extend(children.get(parent, []))
    return found[1:]


def _reap() -> None:
    """Let go of orphans that were killed."""
    end = time.monotonic() + 5.0
    with suppress(ChildProcessError):
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)


def _how(status: int) -> str:
    return f"by signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} supervise: {text}", file=sys.stderr, flush=True)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="supervise.py", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--pause", type=_seconds, default=1.0, help="seconds before the first restart (%(default)s)")
    parser.add_argument("--longest", type=_seconds, default=15.0, help="seconds of the longest pause (%(default)s)")
    parser.add_argument(
        "--steady", type=_seconds, default=60.0, help="seconds after which a start has succeeded (%(default)s)"
    )
    parser.add_argument("--grace", type=_seconds, default=15.0, help="seconds to end in before a kill (%(default)s)")
    parser.add_argument("--pid-file", type=Path, help="where to keep the command's process id")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --: what to run")
    found = parser.parse_args(arguments)
    command = found.command[1:] if found.command[:1] == ["--"] else found.command
    if not command:
        parser.error("no command; expected one after --.")
    return Supervisor(
        command,
        pause=found.pause,
        longest=found.longest,
        steady=found.steady,
        grace=found.grace,
        pid_file=found.pid_file,
    ).run()


if __name__ == "__main__":
    sys.exit(main())
