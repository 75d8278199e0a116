"""What is to be seen while something trains, and what a shell completes."""

import csv
import io
import itertools
import json
import os
import re
import runpy
import select
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from programs import become_selffl
from selffl.cli import live, names
from selffl.studies.arms import Arm, run_arms
from selffl.studies.comparison import Comparison, run, table
from selffl.studies.problems import DIGITS
from selffl.studies.result import Job

ROOT = Path(__file__).parent.parent
SMALL = replace(
    DIGITS, rounds=4, participation=0.5, data_options={"test_fraction": 0.3, "num_clients": 6}, num_local_steps=5
)


# ----------------------------------------------------------------------------------------------------------- completion


def test_the_names_that_complete_are_the_registries():
    expected = runpy.run_path(str(ROOT / "tools" / "write_names.py"))["text"]()
    assert names.FILE.read_text(encoding="utf-8") == expected, "names.json is out of date: run `make names`"


COMPLETED = {
    "run di": {"digits"},
    "run my": {"my-study"},
    "run digits --algorithm ditto": {"ditto", "ditto-equal"},
    "run digits --algorithm ditto --set pen": {"penalty="},
    "run digits --set max": {"max_gradient_norm=", "max_weight="},
    "run digits --set num": {"num_local_steps=", "num_local_epochs="},
    "run digits --algorithm self-fl --set max": {"max_local_steps=", "max_gradient_norm=", "max_weight="},
    "run digits --set learn": {"learning_rate=", "learning_rate_schedule="},
    "run digits --device cu": {"cuda"},
    "compare digits --algorithms self-fl,loc": {"self-fl,local"},
    "compare digits --algorithms local,loc": set(),
    "data show letter": {"letters"},
    "paper run limi": {"limits"},
    "run digits --algo": {"--algorithm"},
    "compar": {"compare"},
}
COMPLETE = """
import json, os, sys
from selffl.cli import main
for words in json.load(sys.stdin):  # each in a process of its own, which need not import the command line again
    print("line:", words, flush=True)
    child = os.fork()
    if child == 0:
        os.environ |= {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        try:
            main()
        except SystemExit:
            pass
        print("torch:", "torch" in sys.modules, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def completed(tmp_path_factory):
    """For each line what is printed, word by word, in a folder that holds a study."""
    place = tmp_path_factory.mktemp("completed")
    (place / "my-study").mkdir()
    (place / "my-study" / "study.toml").write_text("", encoding="utf-8")
    found = subprocess.run(
        [sys.executable, "-c", COMPLETE], cwd=place, env=os.environ | {"_SELFFL_COMPLETE": "complete_bash"},
        input=json.dumps([f"selffl {line}" for line in COMPLETED]), capture_output=True, text=True, check=True,
    )  # fmt: skip
    parts = found.stdout.split("line: selffl ")[1:]
    return {part.split("\n")[0]: part.split("\n")[1:-1] for part in parts}


@pytest.mark.slow
@pytest.mark.parametrize("line", COMPLETED)
def test_a_shell_completes_names(completed, line):
    *words, last = completed[line]
    assert {word for word in words if word} == COMPLETED[line]
    assert last == "torch: False"


# -------------------------------------------------------------------------------------------------------------- one run


def drawn(view, width, **options):
    """What a terminal of that width shows."""
    screen = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, **options)
    screen.print(view)
    return screen.file.getvalue().splitlines()


def a_run(rounds=20):
    clock = iter(range(1000))
    view = live.RunView("self-fl-auto on digits, seed 0", 40, clock=lambda: next(clock))
    for number in range(1, rounds + 1):
        is_scored = number % 2 == 0
        view.note(
            {
                "round": number,
                "num_local_steps": 20.0 + number,
                "inter_variance": 0.5 / number,
                "intra_variance": 0.0 if number == 1 else 0.25,
                "weighted_accuracy": 0.5 + number / 100 if is_scored else None,
                "global_accuracy": 0.4 if is_scored else None,
                "worst10_accuracy": 0.25 if is_scored else None,
            }
        )
    return view


def test_a_sparkline_has_room_and_ends_with_the_last_value():
    assert live.sparkline([0, 1, 2, 3], 4) == "▁▃▅▇"
    assert live.sparkline([0, 1], 6) == "▁▁▁▇▇▇"
    assert live.sparkline([5, 5, 5], 3) == "▁▁▁"
    assert live.sparkline([1, 2], 1) == "▇"
    assert live.sparkline([], 10) == live.sparkline([1, 2], 0) == ""
    long = live.sparkline([0.0] * 99 + [1.0], 12)
    assert len(long) == 12
    assert long == "▁" * 11 + "▇"


def test_a_score_of_nothing_is_a_score():
    view = a_run()
    view.note(dict(view.last) | {"worst10_accuracy": 0.0, "global_accuracy": None})
    assert view.line() == "round 20 of 40: accuracy 70.0 %, worst tenth 0.0 %, steps 40.0"


@pytest.mark.parametrize("width", [120, 80, 60, 45, 30])
def test_a_run_is_shown_in_any_width(width):
    lines = drawn(a_run(), width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    for part in ("20 of 40", "70.0 %", "40.0 %", "25.0 %", "40.0", "0.025", "0.25"):
        assert part in text
    assert re.search(r"memory +[\d.]+ [MG]B", text)
    assert ("▁" in text) == (width >= live.WIDE)
    assert len(lines) == 10  # one line each, whatever the width


def test_time_left_follows_the_pace():
    view = a_run(20)  # the clock ticks once at the beginning, and once when it is drawn: 20 rounds in one second
    assert "0:01 left" in "\n".join(drawn(view, 80))
    assert live.clock_time(3725) == "1:02:05"


def test_no_time_is_told_before_a_twentieth_is_done():
    view = live.RunView("x", 100)
    for number, is_told in ((1, False), (4, False), (5, True)):
        view.note({"round": number, "weighted_accuracy": 0.5})
        assert ("left" in "\n".join(drawn(view, 80))) is is_told


def test_a_run_that_has_shown_nothing_yet_and_one_of_errors():
    assert "0 of 7" in "\n".join(drawn(live.RunView("x", 7), 80))
    view = live.RunView("x", 7)
    view.note({"round": 1, "weighted_error": 0.1234567, "worst10_error": 2.0, "global_error": 0.5})
    text = "\n".join(drawn(view, 80))
    assert "error" in text
    assert "0.1235" in text
    assert "accuracy" not in text


def test_memory_is_that_of_the_process():
    status = Path("/proc/self/status").read_text(encoding="ascii")
    resident = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024
    assert abs(live.memory() - resident) < 0.2 * resident


# ------------------------------------------------------------------------------------------------------ several methods


def made_up(folder):
    """Runs in every state: two of one method done, one at work, one interrupted before, one diverged."""
    entries = []

    def arm(label, seed, status=None, accuracy=None, rounds=0, is_old=False, choosing=False):
        place = folder / f"{label}-{seed}"
        place.mkdir()
        entries.append({"label": label, "seed": seed, "place": place.name, "rounds": 10, "is_choosing": choosing})
        if rounds:
            with (place / "history.csv").open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(["round", "weighted_accuracy", "worst10_accuracy", "global_accuracy"])
                for number in range(1, rounds + 1):
                    writer.writerow([number, *([accuracy] * 3 if number == 2 else [""] * 3)])
                file.write("99,0.9")  # of a line that is being written
            if is_old:
                os.utime(place / "history.csv", (1, 1))
        if status:
            row = {f"{part}_accuracy": accuracy for part in ("weighted", "worst10", "global")}
            (place / "summary.json").write_text(json.dumps({"status": status, **row}), encoding="utf-8")

    arm("self-fl", 0, "finished", 0.9)
    arm("self-fl", 1, "finished", 0.8)
    arm("self-fl", 2, "running", 0.1, rounds=5)
    arm("ditto", 0, "running", 0.625, rounds=3)
    arm("ditto", 1, None)
    arm("local", 0, "running", 0.5, rounds=4, is_old=True)
    arm("fedavg", 0, "diverged", None)
    arm("ditto 0.1", 0, "finished", 0.5, choosing=True)
    (folder / ".arms.json").write_text(json.dumps(entries), encoding="utf-8")


def test_a_comparison_fills_in(tmp_path):
    view = live.ArmsView("digits", tmp_path)
    assert "0 of 0 runs" in "\n".join(drawn(view, 80))
    made_up(tmp_path)
    lines = drawn(view, 100)
    rows = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]] for line in lines if "│" in line
    }
    error = np.std([90, 80], ddof=1) / 2**0.5
    assert rows["self-fl"] == ["2/3", *[f"85.0 ± {error:.1f}"] * 3, "round 5 of 10"]
    assert rows["ditto"] == ["0/2", *["62.5 …"] * 3, "round 3 of 10"]
    assert rows["local"] == ["0/1", "", "", "", "waiting"]  # what lies there is of an earlier time
    assert rows["fedavg"] == ["1/1", "", "", "", "1 diverged"]
    assert rows["choosing options"] == ["1/1", "", "", "", "done"]
    assert "4 of 8 runs" in lines[-1]


@pytest.mark.parametrize("width", [100, 80, 64, 50, 40, 30])
def test_a_comparison_is_shown_in_any_width(tmp_path, width):
    made_up(tmp_path)
    view = live.ArmsView("digits", tmp_path)
    lines = drawn(view, width)
    assert max(map(len, lines)) <= width
    assert len(lines) == 11
    assert any("85.0 ± 5.0" in line for line in lines)


@pytest.mark.parametrize("width", [100, 80, 64])
def test_names_of_methods_are_whole(tmp_path, width):
    labels = ("self-fl-augmented", "self-fl-auto", "fedavg fine-tuned")
    view = live.ArmsView("digits", tmp_path)
    entries = [{"label": x, "seed": 0, "place": x, "rounds": 100, "is_choosing": False} for x in labels]
    for entry in entries:
        (tmp_path / entry["place"]).mkdir()
        row = {f"{part}_accuracy": 0.9 for part in ("weighted", "worst10", "global")}
        (tmp_path / entry["place"] / "summary.json").write_text(json.dumps({"status": "finished", **row}))
    (tmp_path / ".arms.json").write_text(json.dumps(entries), encoding="utf-8")
    names = [line.split("│")[1].strip() for line in drawn(view, width) if "│" in line]
    assert names == ["method", *labels]


def test_the_table_ends_as_the_studys_own(tmp_path):
    view = live.ArmsView("digits", tmp_path)
    compared = Comparison(SMALL, {}, ("fedavg", "local"), is_tuned=False, num_seeds=2)
    outcomes, notes = run(compared, Job(folder=tmp_path))
    rows = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]]
        for line in drawn(view, 100)
        if "│" in line
    }
    for line in table(compared, outcomes, notes):
        assert rows[line["method"]][:3] == ["2/2", line["accuracy"], line["worst 10 %"]]


def test_work_that_is_announced_later_is_seen(tmp_path):
    view = live.ArmsView("digits", tmp_path)
    run_arms(SMALL, [(Arm("fedavg", "fedavg"), 0)], Job(folder=tmp_path), 0, 2)
    view.look()
    run_arms(SMALL, [(Arm("local", "local"), 0)], Job(folder=tmp_path), 1, 2)
    view.look()
    assert [arm.label for arm in view.arms.values()] == ["fedavg", "local"]
    assert all(arm.is_over for arm in view.arms.values())
    # A new beginning forgets what was announced before.
    run_arms(SMALL, [(Arm("local", "local"), 1)], Job(folder=tmp_path), 0, 1)
    assert len(json.loads((tmp_path / ".arms.json").read_text(encoding="utf-8"))) == 1


# ------------------------------------------------------------------------------------------------- not on a terminal


@pytest.fixture
def command(command_line):
    """A function that runs the command line here, not on a terminal: its output and its messages."""

    def call(*words):
        code, out, err = command_line(*words)
        assert code == 0
        return out, err

    return call


def test_elsewhere_it_is_quiet_but_for_what_is_asked(command):
    words = ("run", "digits", "--rounds", "4", "--set", "participation=0.1")
    assert command(*words, "--out", "a")[1] == ""
    lines = command(*words, "--out", "b", "--verbose")[1].splitlines()
    assert [line.split(":")[0] for line in lines] == [f"round {number} of 4" for number in (1, 2, 3, 4)]
    last = json.loads(Path("b/summary.json").read_text(encoding="utf-8"))
    assert f"accuracy {100 * last['weighted_accuracy']:.1f} %" in lines[-1]


def test_a_comparison_says_which_runs_are_done(command):
    words = ("compare", "digits", "-a", "fedavg,local", "--seeds", "1", "--rounds", "2", "--processes", "1", "-v")
    out, err = command(*words, "--json")
    assert err.splitlines() == ["1 of 2 runs: fedavg, seed 0", "2 of 2 runs: local, seed 0"]
    record = json.loads(out)
    assert [line["method"] for line in record["table"]] == ["fedavg", "local"]
    assert record["command"].startswith("selffl compare digits")


# ------------------------------------------------------------------------------------------------------- on a terminal

pty = pytest.importorskip("pty", reason="no pseudo-terminals here")


def on_a_terminal(*words, cwd, columns=80, interrupt_when=None, resize_to=None, **environment):
    """Run `selffl WORDS...` in a terminal of 24 lines; exit code, and everything that was written to it."""
    import fcntl
    import termios

    def size(width):
        fcntl.ioctl(handle, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))

    variables = os.environ | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"} | environment
    for name in ("COLUMNS", "LINES", *(() if "NO_COLOR" in environment else ("NO_COLOR",))):
        variables.pop(name, None)
    child, handle = pty.fork()
    if child == 0:
        become_selffl(words, cwd, variables)
    size(columns)
    written, until = b"", time.monotonic() + 120
    while time.monotonic() < until:
        if select.select([handle], [], [], 0.1)[0]:
            try:
                piece = os.read(handle, 65536)
            except OSError:  # the other side is closed
                break
            if not piece:
                break
            written += piece
        if resize_to and b"round" in written:
            size(resize_to)
            resize_to = None
        if interrupt_when and re.search(interrupt_when, written):
            os.write(handle, b"\x03")
            interrupt_when = None
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), written.decode("utf-8")


def screen_of(text):
    """The lines that are left on the screen, by the few signs that move the cursor or clear a line."""
    lines, row, column = [""], 0, 0
    text = re.sub(r"\x1b\]8;[^\x1b]*\x1b\\", "", text)  # links
    for sign in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
        if sign == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif sign == "\r":
            column = 0
        elif sign.startswith("\x1b["):
            count = int(re.sub(r"\D", "", sign) or 1)
            if sign.endswith("A"):
                row = max(row - count, 0)
            elif sign.endswith("K"):
                lines[row] = ""
        else:
            lines[row] = lines[row][:column].ljust(column) + sign + lines[row][column + len(sign) :]
            column += len(sign)
    return [line for line in lines if line.strip()]


RUN = ("run", "digits", "--rounds", "30", "--out", "here", "--set", "num_local_steps=2")


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "environment"), [(80, {}), (40, {"NO_COLOR": "1"})])
def test_a_run_on_a_terminal_leaves_its_summary_and_nothing_else(tmp_path, columns, environment):
    code, text = on_a_terminal(*RUN, cwd=tmp_path, columns=columns, resize_to=columns + 10, **environment)
    assert code == 0
    is_coloured = re.search(r"\x1b\[(?:\d+;)*3[0-8](?:;\d+)*m", text) is not None
    assert is_coloured == (not environment)  # colours are off where nobody wants them
    assert "self-fl-auto on digits, seed 0" in text
    assert re.search(r"\d+ of 30", text)
    assert text.count("\x1b[?25h") == text.count("\x1b[?25l") == 1  # the cursor is back
    left = screen_of(text)
    said = " ".join(" ".join(left).split())
    assert said.startswith("self-fl-auto on digits, seed 0: 30 rounds, 40 clients accuracy ")
    assert left[-1] == f"Records and models: {tmp_path / 'here'}"  # whole, however narrow
    assert f"{(tmp_path / 'here').as_uri()}\x1b\\" in text  # and a link


@pytest.mark.slow
def test_a_run_that_fails_on_a_terminal_leaves_a_sentence_that_breaks_between_words(tmp_path):
    code, text = on_a_terminal(*RUN, "-a", "pfedme", "--set", "learning_rate=1e30", cwd=tmp_path)
    assert code == 2
    assert text.count("\x1b[?25h") == text.count("\x1b[?25l")
    left = screen_of(text)
    assert left[0].startswith("selffl: ")
    assert 1 < len(left) < 5
    assert max(map(len, left)) <= 80
    assert all(len(line) + 1 + len(after.split()[0]) > 80 for line, after in itertools.pairwise(left))


@pytest.mark.slow
def test_an_interruption_on_a_terminal_ends_every_process_and_says_how_to_go_on(tmp_path):
    words = ("compare", "digits", "--algorithms", "self-fl,local", "--seeds", "2", "--rounds", "3000", "--out", "here")
    code, text = on_a_terminal(*words, "--processes", "2", cwd=tmp_path, columns=120, interrupt_when=rb"round \d+")
    assert code == 130
    left = screen_of(text)
    assert left[-2:] == [
        "Runs that are done are kept. To resume: selffl compare digits --algorithms self-fl,local --seeds 2 --rounds "
        "3000 --out here",
        "selffl: stopped. What was finished is kept.",
    ]
    assert not [line for line in left if "│" in line]
    here = str(tmp_path)
    alive = [path for path in Path("/proc").glob("[0-9]*/cwd") if path.exists() and os.readlink(path) == here]
    assert alive == []
