"""The supervisor: starts again what ends, with growing pauses, and ends when it is told to."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SUPERVISE = Path(__file__).resolve().parents[2] / "deploy" / "supervise.py"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are another matter there")


def until(is_true, seconds=20.0):
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def noted(folder, other_than=None):
    """The process id that the supervisor keeps; it writes it once the command is started, so perhaps a little later."""
    path = folder / "pid"
    until(lambda: path.exists() and int(path.read_text()) != other_than)
    return int(path.read_text())


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def supervised(tmp_path):
    """Start a supervisor of a shell script; it is ended with the test, however that ends."""
    started = []

    def start(script, *options):
        log = (tmp_path / "log").open("wb")
        command = [sys.executable, SUPERVISE, "--pid-file", tmp_path / "pid", *options, "--", "sh", "-c", script]
        started.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path))
        log.close()
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.mark.slow
def test_what_fails_is_started_again_after_growing_pauses(tmp_path, supervised):
    process = supervised("date +%s.%N >> times; exit 3", "--pause", "0.2", "--longest", "0.8")
    times = tmp_path / "times"
    until(lambda: times.exists() and len(times.read_text().splitlines()) >= 6)
    process.terminate()
    assert process.wait(20) == 0
    at = [float(line) for line in times.read_text().splitlines()]
    pauses = [after - before for before, after in itertools.pairwise(at)]
    for pause, expected in zip(pauses, (0.2, 0.4, 0.8, 0.8, 0.8), strict=False):
        assert pause >= expected
    log = (tmp_path / "log").read_text()
    assert "sh has ended with status 3; started again in 0.2 s." in log
    assert log.count("started again in 0.8 s.") >= 2
    assert "1.6 s" not in log


def test_what_ran_for_long_is_started_again_at_once(tmp_path, supervised):
    process = supervised("echo x >> runs; sleep 0.3", "--pause", "0.1", "--steady", "0.2")
    until(lambda: (tmp_path / "runs").exists() and (tmp_path / "runs").read_text().count("x") >= 4)
    process.terminate()
    process.wait(20)
    assert "started again in 0.2 s." not in (tmp_path / "log").read_text()


def test_sigterm_reaches_the_command_and_ends_both(tmp_path, supervised):
    process = supervised("trap 'echo goodbye > said; exit 0' TERM; touch ready; while :; do sleep 0.05; done")
    until((tmp_path / "ready").exists)
    child = noted(tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert (tmp_path / "said").read_text() == "goodbye\n"
    assert not is_alive(child)
    assert not (tmp_path / "pid").exists()


def test_sigterm_in_a_pause_ends_it(tmp_path, supervised):
    process = supervised("exit 1", "--pause", "60", "--longest", "60")
    until(lambda: "started again" in (tmp_path / "log").read_text())
    process.terminate()
    assert process.wait(10) == 0


def test_a_command_that_does_not_listen_is_killed(tmp_path, supervised):
    process = supervised("trap '' TERM; touch ready; while :; do sleep 0.05; done", "--grace", "0.5")
    until((tmp_path / "ready").exists)
    child = noted(tmp_path)
    process.terminate()
    assert process.wait(20) == 0
    assert not is_alive(child)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")
def test_nothing_of_a_killed_command_lives_on(tmp_path, supervised):
    # A child, and one in a session of its own: two nodes must not write one memory.
    process = supervised(
        'sleep 300 & echo $! >> orphans; setsid sleep 300 & echo $! >> orphans; touch "ready$$"; wait', "--pause", "0.1"
    )
    until(lambda: list(tmp_path.glob("ready*")))
    first = noted(tmp_path)
    orphans = [int(line) for line in (tmp_path / "orphans").read_text().split()]
    os.kill(first, signal.SIGKILL)
    until(lambda: len(list(tmp_path.glob("ready*"))) == 2)
    assert not any(map(is_alive, orphans))
    assert "has ended by signal SIGKILL" in (tmp_path / "log").read_text()
    assert is_alive(noted(tmp_path, other_than=first))
    process.terminate()
    process.wait(20)
    assert not any(is_alive(int(line)) for line in (tmp_path / "orphans").read_text().split())


def test_the_command_does_not_ignore_interrupts(tmp_path, supervised):
    # A shell's background jobs ignore SIGINT, by which Flower's processes end themselves.
    script = (
        'import os, signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN, file=open("ignores", "w")); '
        "os.kill(os.getppid(), signal.SIGTERM)"
    )
    python, supervise = sys.executable, str(SUPERVISE)
    subprocess.run(
        ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", python, supervise, "--", python, "-c", script],
        cwd=tmp_path, check=True, timeout=30, capture_output=True,
    )  # fmt: skip
    assert (tmp_path / "ignores").read_text() == "False\n"


def test_arguments(tmp_path):
    def run(*words):
        return subprocess.run([sys.executable, SUPERVISE, *words], capture_output=True, text=True, check=False)

    assert run().returncode == 2
    assert "no command; expected one after --." in run("--pause", "1").stderr
    assert "not a number of seconds above 0" in run("--pause", "0", "--", "true").stderr
    missing = run("--", str(tmp_path / "nothing"))
    assert (missing.returncode, "No such file" in missing.stderr) == (127, True)
