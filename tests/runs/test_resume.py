"""A run that is killed and taken up again ends with the same bits as one that was left alone."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

import selffl
from needs import NEEDS_BATCH_NORM, NEEDS_CLUSTERS, NEEDS_LAYERS, ONE_OF_A_KIND
from programs import fork
from selffl.data import load as load_data
from selffl.errors import CheckpointError, ConfigError
from selffl.runs import folder
from selffl.runs.folder import RunFolder, read_records
from selffl.state.checkpoint import load_tensors
from selffl.state.files import locked

ROUNDS = 30
EVALUATED_EVERY = 5
KILLED_IN = (17, 1, 5, 6, 29)


def train(out, algorithm=None, rounds=ROUNDS, model="softmax", **options):
    algorithm = algorithm or selffl.algorithm("self-fl", initial_steps=3, max_local_steps=6)
    fed = load_data("digits", num_clients=12, seed=1, test_fraction=0.3)
    options = {"participation": 0.5, "evaluate_every": EVALUATED_EVERY} | options
    return selffl.train(model, fed, algorithm, rounds=rounds, out=out, **options)


def train_and_be_killed(out, last):
    """A run that kills itself, as kill -9 would, in a round."""
    train(out, on_round=lambda row: os.kill(os.getpid(), signal.SIGKILL) if row["round"] == last else None)


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory):
    """Runs that were killed in the round that their folder is named after; to be copied."""
    place = tmp_path_factory.mktemp("killed")
    for last in KILLED_IN:
        child = fork(train_and_be_killed, place / str(last), last)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, last
    return place


@pytest.fixture
def killed(killed_once, tmp_path):
    """A copy of a run that was killed in round 17."""
    return shutil.copytree(killed_once / "17", tmp_path / "killed")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same run, left alone."""
    place = tmp_path_factory.mktemp("whole") / "run"
    train(place)
    return place


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory):
    """A run of ten rounds, to be copied."""
    place = tmp_path_factory.mktemp("finished") / "run"
    train(place, rounds=10)
    return place


@pytest.fixture
def finished(finished_once, tmp_path):
    """A copy of a run of ten rounds."""
    return shutil.copytree(finished_once, tmp_path / "run")


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


def test_killed_in_the_middle(killed, whole):
    interrupted = read_records(killed)
    assert interrupted.history[-1]["round"] in (16, 17)  # an interrupted run can be reported on
    assert interrupted.summary["status"] == "running"
    run = selffl.resume(killed)
    assert_same(killed, whole)
    assert run.summary == read_records(killed).summary
    assert [row["round"] for row in run.history] == list(range(1, ROUNDS + 1))


@pytest.mark.parametrize("in_round", KILLED_IN[1:])
def test_killed_in_other_rounds(tmp_path, killed_once, whole, in_round):
    shutil.copytree(killed_once / str(in_round), tmp_path / "killed")
    selffl.resume(tmp_path / "killed")
    assert_same(tmp_path / "killed", whole)


def train_slowly(out, what):
    def nap(_):
        time.sleep(0.02)

    train(out, on_round=nap) if what == "begin" else selffl.resume(out, on_round=nap)


@pytest.mark.slow
def test_killed_from_outside_at_moments_that_nobody_chose(tmp_path, whole):
    """Begun, killed, resumed, killed, resumed, killed, and at last let through."""
    out = tmp_path / "killed"
    for what, number, seconds in (("begin", 7, 0.013), ("resume", 13, 0.037), ("resume", 18, 0.021)):
        child, until = fork(train_slowly, out, what), time.monotonic() + 60
        while rounds_of(out) < number and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    selffl.resume(out)
    assert_same(out, whole)


def rounds_of(folder):
    """How many rounds its history has."""
    path = folder / "history.csv"
    return path.read_bytes().count(b"\n") - 1 if path.exists() else 0


@pytest.mark.parametrize("algorithm", sorted(set(ONE_OF_A_KIND) - NEEDS_BATCH_NORM - NEEDS_CLUSTERS))
def test_every_kind_of_method_goes_on_from_a_checkpoint(tmp_path, algorithm, short):
    """The state of the middle is all that is needed: a run of two rounds, gone on with, is one of four."""
    method, model = short(algorithm), "mlp" if algorithm in NEEDS_LAYERS else "softmax"
    often = {"evaluate_every": 2, "participation": 0.75}  # so that a client's variance is known when the run goes on
    train(tmp_path / "whole", method, 4, model, **often)
    train(tmp_path / "half", method, 2, model, **often)
    run = selffl.resume(tmp_path / "half", rounds=4)
    whole = selffl.load(tmp_path / "whole")
    assert without_time(run.history) == without_time(whole.history)
    assert without_time(run.summary) == without_time(whole.summary)
    for client in whole.federation.clients:
        ours, theirs = (r.personal_model(client).state_dict() for r in (run, whole))
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_finished_run_is_returned_as_it_is(finished):
    before = {path.name: path.stat().st_mtime_ns for path in finished.iterdir()}
    assert selffl.resume(finished).summary == read_records(finished).summary
    assert {path.name: path.stat().st_mtime_ns for path in finished.iterdir()} == before


def test_a_line_that_the_kill_cut_off_is_no_obstacle(killed, whole):
    for name in ("history.csv", "participation.csv"):
        with (killed / name).open("a", encoding="utf-8") as file:
            file.write("18,6,12")
    (killed / "checkpoint.safetensors.part").write_bytes(b"half")
    selffl.resume(killed)
    assert_same(killed, whole)


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


def test_two_processes_cannot_write_one_run(killed):
    """The second is refused while the first holds the folder, and may once it is gone."""
    before = (killed / "history.csv").read_bytes()
    with locked(killed), pytest.raises(ConfigError, match="another process is writing"):
        selffl.resume(killed)
    assert (killed / "history.csv").read_bytes() == before
    assert selffl.resume(killed).summary["status"] == "finished"


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


def test_other_rows_are_refused_also_for_a_named_data_set(finished):
    with pytest.raises(ConfigError, match="not the one"):
        selffl.resume(finished, rounds=20, federation=load_data("digits", num_clients=12, seed=9))


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
def test_damaged_records_are_one_clear_line(finished, name, edit):
    path = finished / name
    changed = edit(path.read_text(encoding="utf-8"))
    assert changed != path.read_text(encoding="utf-8")
    path.write_text(changed, encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        selffl.resume(finished, rounds=20)
    assert "\n" not in str(caught.value)


def test_a_history_with_a_hole_is_not_gone_on_with(finished):
    (finished / "history.csv").unlink()
    with pytest.raises(CheckpointError, match="lacks rounds"):
        selffl.resume(finished, rounds=20)


def test_a_corrupt_checkpoint_is_one_clear_line_and_touches_nothing(finished):
    out = finished
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


def test_a_checkpoint_of_another_method_is_refused(tmp_path, finished):
    train(tmp_path / "b", "fedavg", 10)
    shutil.copy(tmp_path / "b" / "checkpoint.safetensors", finished / "checkpoint.safetensors")
    with pytest.raises(CheckpointError, match="lacks"):
        selffl.load(finished)


def test_the_summary_on_disk_is_valid_json_all_along(tmp_path):
    seen = []

    def look(row):
        if (tmp_path / "run" / "summary.json").is_file():
            seen.append(json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))["rounds"])

    train(tmp_path / "run", rounds=15, on_round=look)
    assert set(seen) == {5, 10}
    assert os.listdir(tmp_path) == ["run"]
