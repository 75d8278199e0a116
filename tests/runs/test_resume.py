"""A run that is killed and taken up again ends with the same bits as one that was left alone."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import selffl
from selffl.algorithms import ALGORITHMS
from selffl.data import load as load_data
from selffl.errors import CheckpointError, ConfigError
from selffl.runs import folder
from selffl.runs.folder import RunFolder, read_records
from selffl.state.checkpoint import load_tensors
from selffl.state.files import locked

ROUNDS = 60
KILLED = """
import os, signal, sys
import torch
import selffl
from selffl.data import load
torch.set_num_threads(1)
out, algorithm, last = sys.argv[1], sys.argv[2], int(sys.argv[3])

def on_round(row):
    if row["round"] == last:
        os.kill(os.getpid(), signal.SIGKILL)

fed = load("digits", num_clients=12, seed=1, test_fraction=0.3)
selffl.train("softmax", fed, algorithm, rounds=60, participation=0.5, evaluate_every=10, out=out, on_round=on_round)
"""

QUICK = {"self-fl-augmented": {"max_convergence_steps": 50}}  # instead of 2,000


def train(out, algorithm="self-fl", rounds=ROUNDS, **options):
    fed = load_data("digits", num_clients=12, seed=1, test_fraction=0.3)
    return selffl.train(
        "softmax", fed, algorithm, rounds=rounds, participation=0.5, evaluate_every=10, out=out, **options
    )


def kill(out, algorithm, in_round):
    """Train in a process of its own that kills itself, as kill -9 would, in that round."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(out), algorithm, str(in_round)], check=False)
    assert done.returncode == -signal.SIGKILL


def without_time(content):
    if isinstance(content, dict):
        return {key: value for key, value in content.items() if key != "seconds"}
    return [without_time(row) for row in content]


def assert_same(found: Path, expected: Path):
    """All records but for the clock, and every bit of the state."""
    ours, theirs = read_records(found), read_records(expected)
    for name in ("history", "participation", "clients", "summary"):
        assert without_time(getattr(ours, name)) == without_time(getattr(theirs, name)), name
    (tensors, about), (others, other) = (load_tensors(path / "checkpoint.safetensors") for path in (found, expected))
    assert about["round"] == other["round"] == ROUNDS
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), others[name].reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("algorithm", ["self-fl", "ditto"])
def test_killed_in_round_37_of_60(tmp_path, algorithm):
    kill(tmp_path / "killed", algorithm, 37)
    interrupted = read_records(tmp_path / "killed")
    assert interrupted.history[-1]["round"] in (36, 37)  # an interrupted run can be reported on
    assert interrupted.summary["status"] == "running"
    run = selffl.resume(tmp_path / "killed")
    train(tmp_path / "whole", algorithm)
    assert_same(tmp_path / "killed", tmp_path / "whole")
    assert run.summary == read_records(tmp_path / "killed").summary
    assert [row["round"] for row in run.history] == list(range(1, ROUNDS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("in_round", [1, 10, 11, 59])
def test_killed_in_other_rounds(tmp_path, in_round):
    kill(tmp_path / "killed", "self-fl", in_round)
    selffl.resume(tmp_path / "killed")
    train(tmp_path / "whole")
    assert_same(tmp_path / "killed", tmp_path / "whole")


SLOW = """
import sys, time
import torch
import selffl
from selffl.data import load
torch.set_num_threads(1)
out, nap = sys.argv[1], lambda row: time.sleep(0.02)
if sys.argv[2] == "begin":
    fed = load("digits", num_clients=12, seed=1, test_fraction=0.3)
    selffl.train("softmax", fed, "self-fl", rounds=60, participation=0.5, evaluate_every=10, out=out, on_round=nap)
else:
    selffl.resume(out, on_round=nap)
"""


@pytest.mark.slow
def test_killed_from_outside_at_moments_that_nobody_chose(tmp_path):
    """Begun, killed, resumed, killed, resumed, killed, and at last let through."""
    out = tmp_path / "killed"
    for what, seconds in (("begin", 0.3), ("resume", 0.37), ("resume", 0.11)):
        with subprocess.Popen([sys.executable, "-c", SLOW, str(out), what]) as process:
            before = stamp(out)
            while stamp(out) == before and process.poll() is None:  # until it has written something
                time.sleep(0.005)
            time.sleep(seconds)
            process.kill()
    selffl.resume(out)
    train(tmp_path / "whole")
    assert_same(out, tmp_path / "whole")


def stamp(folder):
    path = folder / "history.csv"
    return path.stat().st_mtime_ns if path.exists() else None


@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - {"self-fl-cluster", "fedper", "fedrep"}))
def test_every_method_goes_on_from_a_checkpoint(tmp_path, algorithm):
    """The state of the middle is all that is needed: the files of a longer run, cut back to its round 10."""
    method = selffl.algorithm(algorithm, **QUICK.get(algorithm, {}))
    train(tmp_path / "whole", method, 20)
    train(tmp_path / "half", method, 10)
    run = selffl.resume(tmp_path / "half", rounds=20)
    whole = selffl.load(tmp_path / "whole")
    assert without_time(run.history) == without_time(whole.history)
    assert without_time(run.summary) == without_time(whole.summary)
    for client in whole.federation.clients:
        ours, theirs = (r.personal_model(client).state_dict() for r in (run, whole))
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_finished_run_is_returned_as_it_is(tmp_path):
    run = train(tmp_path / "run", rounds=10)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()}
    again = selffl.resume(tmp_path / "run")
    assert again.summary == run.summary
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()} == before


def test_a_line_that_the_kill_cut_off_is_no_obstacle(tmp_path):
    kill(tmp_path / "killed", "self-fl", 37)
    for name in ("history.csv", "participation.csv"):
        with (tmp_path / "killed" / name).open("a", encoding="utf-8") as file:
            file.write("38,6,12")
    (tmp_path / "killed" / "checkpoint.safetensors.part").write_bytes(b"half")
    selffl.resume(tmp_path / "killed")
    train(tmp_path / "whole")
    assert_same(tmp_path / "killed", tmp_path / "whole")


def test_a_run_is_loaded_as_of_its_checkpoint(tmp_path):
    """Evaluated every round, saved every fifth, killed in the ninth: models and numbers are those of the fifth."""
    out = tmp_path / "run"

    def stop(row):
        if row["round"] == 9:
            raise KeyboardInterrupt

    fed = load_data("digits", num_clients=12, seed=1, test_fraction=0.3)
    with pytest.raises(KeyboardInterrupt):
        selffl.train(
            "softmax", fed, "ditto", rounds=20, participation=0.5, evaluate_every=1, checkpoint_every=5, out=out,
            on_round=stop,
        )  # fmt: skip
    assert read_records(out).summary["rounds"] == 8
    found = selffl.load(out)
    assert [row["round"] for row in found.history] == [1, 2, 3, 4, 5]
    assert (found.summary["rounds"], found.summary["status"]) == (5, "running")
    right = sum(
        int((found.personal_model(client)(fed.test.features[low:high]).argmax(1) == fed.test.labels[low:high]).sum())
        for client, (low, high) in zip(fed.clients, fed.test.offset.unfold(0, 2, 1).tolist(), strict=True)
    )
    assert found.summary["weighted_accuracy"] == right / len(fed.test.labels)


def test_two_processes_cannot_write_one_run(tmp_path):
    """The second is refused while the first holds the folder, and may once it is gone."""
    kill(tmp_path / "run", "self-fl", 37)
    before = (tmp_path / "run" / "history.csv").read_bytes()
    with locked(tmp_path / "run"), pytest.raises(ConfigError, match="another process is writing"):
        selffl.resume(tmp_path / "run")
    assert (tmp_path / "run" / "history.csv").read_bytes() == before
    assert selffl.resume(tmp_path / "run").summary["status"] == "finished"


def test_a_long_run_is_saved_by_the_clock(tmp_path, monkeypatch):
    """Evaluations far apart: a checkpoint comes all the same, and the numbers do not notice."""
    monkeypatch.setattr(folder, "LOST_SECONDS", 0.0)
    saved = []
    write = RunFolder.add_checkpoint
    monkeypatch.setattr(
        RunFolder,
        "add_checkpoint",
        lambda self, state, seconds: (saved.append(state.round_number), write(self, state, seconds)),
    )
    run = train(tmp_path / "often", rounds=15, checkpoint_every=15)
    assert saved == list(range(16))
    monkeypatch.undo()
    plain = train(tmp_path / "plain", rounds=15, checkpoint_every=15)
    assert without_time(run.history) == without_time(plain.history)
    ours, theirs = (r.global_model().state_dict() for r in (run, plain))
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_run_cannot_go_back(tmp_path):
    train(tmp_path / "run", rounds=20)
    before = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(ConfigError, match="rounds is 3, and the run is at round 20"):
        selffl.resume(tmp_path / "run", rounds=3)
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_a_run_saved_late_goes_on_and_is_saved_again(tmp_path):
    fed = load_data("digits", num_clients=12, seed=1, test_fraction=0.3)
    selffl.train("softmax", fed, "ditto", rounds=4, checkpoint_every=0).save(tmp_path / "run")
    run = selffl.resume(tmp_path / "run", rounds=8)
    again = selffl.load(tmp_path / "run")
    assert again.summary["rounds"] == run.summary["rounds"] == 8
    ours, theirs = (r.global_model().state_dict() for r in (run, again))
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_other_rows_are_refused_also_for_a_named_data_set(tmp_path):
    train(tmp_path / "run", rounds=10)
    with pytest.raises(ConfigError, match="not the one"):
        selffl.resume(tmp_path / "run", rounds=20, federation=load_data("digits", num_clients=12, seed=9))


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("history.csv", lambda text: text.replace("round,", "number,", 1)),
        ("history.csv", lambda text: text.replace("\n3,", "\nthree,", 1)),
        ("history.csv", lambda text: text + "11\n"),
        ("history.csv", lambda text: text + "11," * 40 + "\n"),
        ("participation.csv", lambda text: text.replace("client", "who", 1)),
        ("clients.csv", lambda text: text.replace("client", "who", 1)),
        ("summary.json", lambda text: "[]"),
        ("summary.json", lambda text: text[:-5]),
        ("config.json", lambda text: text.replace('"cross_entropy"', '"no_such_loss"')),
        ("config.json", lambda text: text.replace('"float32"', '"float33"')),
        ("config.json", lambda text: text.replace('"num_classes"', '"classes"')),
    ],
)
def test_damaged_records_are_one_clear_line(tmp_path, name, edit):
    train(tmp_path / "run", rounds=10)
    path = tmp_path / "run" / name
    changed = edit(path.read_text(encoding="utf-8"))
    assert changed != path.read_text(encoding="utf-8")
    path.write_text(changed, encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        selffl.resume(tmp_path / "run", rounds=20)
    assert "\n" not in str(caught.value)


def test_a_history_with_a_hole_is_not_gone_on_with(tmp_path):
    train(tmp_path / "run", rounds=10)
    (tmp_path / "run" / "history.csv").unlink()
    with pytest.raises(CheckpointError, match="lacks rounds"):
        selffl.resume(tmp_path / "run", rounds=20)


def test_a_corrupt_checkpoint_is_one_clear_line_and_touches_nothing(tmp_path):
    out = tmp_path / "run"
    train(out, rounds=10)
    path = out / "checkpoint.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    before = {entry.name: entry.read_bytes() for entry in out.iterdir()}
    for call in (selffl.load, selffl.resume):
        with pytest.raises(CheckpointError, match="damaged") as caught:
            call(out)
        assert "\n" not in str(caught.value)
    assert {entry.name: entry.read_bytes() for entry in out.iterdir()} == before
    path.unlink()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        selffl.resume(out)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"version": 1}', '{"version": 99, "config": {}}', '{"version": 1, "config": {"a": 1}}']
)
def test_a_corrupt_configuration_is_one_clear_line(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        selffl.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_another_method_is_refused(tmp_path):
    train(tmp_path / "a", "self-fl", 10)
    train(tmp_path / "b", "fedavg", 10)
    shutil.copy(tmp_path / "b" / "checkpoint.safetensors", tmp_path / "a" / "checkpoint.safetensors")
    with pytest.raises(CheckpointError, match="lacks"):
        selffl.load(tmp_path / "a")


def test_the_summary_on_disk_is_valid_json_all_along(tmp_path):
    seen = []

    def look(row):
        if (tmp_path / "run" / "summary.json").is_file():
            seen.append(json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))["rounds"])

    train(tmp_path / "run", rounds=30, on_round=look)
    assert set(seen) == {10, 20}
    assert os.listdir(tmp_path) == ["run"]
