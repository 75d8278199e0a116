"""A disk that is full, a folder that may not be written, a terminal that is closed: one line, and nothing is lost."""

import errno
import os
import re
import shutil
import signal
import stat
import subprocess
import time

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import selffl
from programs import become_selffl, fork
from selffl.data import load
from selffl.errors import CheckpointError
from selffl.state import files
from selffl.state.checkpoint import load_tensors, save_tensors, write_safetensors

WORDS = ("run", "digits", "-a", "fedavg", "--set", "num_local_steps=1", "--rounds", "2")


@pytest.fixture
def full_disk(tmp_path):
    """A function that mounts a disk of so many bytes, where this may be done, and says where."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(size):
        options = ["-t", "tmpfs", "-o", f"size={size}", "selffl-test", str(place)]
        if os.geteuid() != 0 or subprocess.run(["mount", *options], capture_output=True).returncode:
            pytest.skip("no disk can be mounted here")
        return place

    yield mount
    subprocess.run(["umount", str(place)], capture_output=True)


def filled(place, keep):
    """Fill a disk but for so many bytes."""
    free = os.statvfs(place)
    (place / "ballast").write_bytes(bytes(free.f_bavail * free.f_bsize - keep))


def test_a_checkpoint_that_does_not_fit_is_an_error_of_the_disk(full_disk):
    place = full_disk("64k")
    save_tensors(place / "a.safetensors", {"x": torch.arange(8)}, {})
    with pytest.raises(OSError, match="No space left on device") as raised:
        save_tensors(place / "a.safetensors", {"x": torch.zeros(100_000)}, {})
    assert raised.value.errno == errno.ENOSPC
    assert str(place / "a.safetensors") in raised.value.filename
    assert torch.equal(load_tensors(place / "a.safetensors")[0]["x"], torch.arange(8))  # the old one stays
    assert [path.name for path in place.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("keep", [0, 8192, 20480, 40960])
def test_a_run_on_a_full_disk_is_one_line_and_goes_on_when_there_is_room(full_disk, command_line, keep):
    place = full_disk("2m")
    whole = command_line(*WORDS, "--out", place / "whole", "--json")[1]
    filled(place, keep)
    code, output, messages = command_line(*WORDS, "--out", place / "run")
    assert (code, output) == (2, "")
    assert re.fullmatch(
        r"selffl: \S+/disk/run\S*: no space left to write it\. Make room and go on: what was finished before is "
        r"kept\.\n",
        messages.split("\r")[-1].splitlines(keepends=True)[-1],
    )
    (place / "ballast").unlink()
    code, output, _ = command_line(*WORDS, "--out", place / "run", "--resume", "--json")
    assert code == 0
    assert re.sub(r'"seconds": [^,]*', "", output) == re.sub(r'"seconds": [^,]*', "", whole)


def test_a_row_that_does_not_fit_names_its_file(full_disk):
    place = full_disk("64k")
    files.write_csv(place / "t.csv", [{"a": 1}])
    filled(place, 0)
    with pytest.raises(OSError, match="No space left on device") as raised:
        files.append_csv(place / "t.csv", [{"a": "x" * 8192}], ["a"])
    assert raised.value.filename == str(place / "t.csv")


def test_a_folder_that_may_not_be_written_is_one_line(full_disk, command_line):
    place = full_disk("64k")
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    code, output, messages = command_line(*WORDS, "--out", place / "run")
    assert (code, output) == (2, "")
    assert re.search(r"selffl: \S+/disk/run\S*: Read-only file system\. Check that it exists and may be", messages)


# --------------------------------------------------------------------------------------- what is left, and its modes


def test_the_files_of_a_run_have_one_mode(tmp_path, short):
    before = os.umask(0o027)
    try:
        fed = load("digits", num_clients=3)
        run = selffl.train(nn.Linear(64, 10), fed, short("fedavg"), rounds=1, participation=1.0, out=tmp_path / "run")
        run.export(tmp_path / "run" / "one.safetensors", [fed.clients[0]], full=True)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").iterdir()}
    assert len(modes) > 8
    assert set(modes.values()) == {0o640}


def test_a_file_is_what_safetensors_reads(tmp_path):
    tensors = {"a": torch.arange(5), "b": torch.ones(2, 3, dtype=torch.float64)}
    write_safetensors(tmp_path / "t", tensors, {"format": "pt"})
    back = load_file(tmp_path / "t")
    assert all(torch.equal(back[name], value) for name, value in tensors.items())
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_what_killed_writers_left_is_swept_after_a_day(tmp_path):
    path = tmp_path / "a.safetensors"
    (tmp_path / "a.safetensors.0123.part.x7.part").mkdir()
    (tmp_path / "a.safetensors.0123.part.x7.part" / ".tmpAbC123").write_bytes(b"half")
    (tmp_path / "a.safetensors.0123.part").write_bytes(b"half")
    (tmp_path / "mine.part").write_bytes(b"somebody's")
    save_tensors(path, {"x": torch.ones(1)}, {})
    assert len(list(tmp_path.iterdir())) == 4  # somebody may still be writing them
    long_ago = time.time() - files.STALE_SECONDS - 10
    for left in tmp_path.rglob("*"):
        os.utime(left, (long_ago, long_ago))
    save_tensors(path, {"x": torch.ones(1)}, {})
    assert sorted(left.name for left in tmp_path.iterdir()) == ["a.safetensors", "mine.part"]


# ------------------------------------------------------------------------------------------------------------ signals


def hang_up(words, folder, ignored):
    signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)  # the tests may run under nohup
    with open(folder / "said", "wb") as said:
        os.dup2(said.fileno(), 2)
    become_selffl(words, folder)


@pytest.mark.parametrize("ignored", [False, True], ids=["closed", "nohup"])
def test_a_closed_terminal_ends_a_run_as_ctrl_c_does(tmp_path, ignored):
    rounds = "4" if ignored else "2000"
    child = fork(hang_up, [*WORDS[:-1], rounds, "--out", "run"], tmp_path, ignored)
    ends = time.monotonic() + 60
    while not (tmp_path / "run" / "checkpoint.safetensors").exists() and time.monotonic() < ends:
        time.sleep(0.01)
    while not (tmp_path / "run" / "config.json").exists() and time.monotonic() < ends:
        time.sleep(0.01)
    os.kill(child, signal.SIGHUP)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ignored:
        assert code == 0
    else:
        assert code == 130
        assert (
            "The run is kept up to its last checkpoint. To resume: selffl run digits" in (tmp_path / "said").read_text()
        )


# -------------------------------------------------------------------------------------- records that are gone or short


@pytest.fixture(scope="module")
def begun(tmp_path_factory, short):
    place = tmp_path_factory.mktemp("begun") / "run"
    selffl.train(
        "softmax", load("digits", num_clients=4), short("self-fl"), rounds=3, participation=0.5, evaluate_every=1,
        evaluate_train=True, out=place,
    )  # fmt: skip
    return place


@pytest.mark.parametrize("file", ["history.csv", "participation.csv", "clients.csv"])
@pytest.mark.parametrize("how", ["deleted", "shortened", "emptied"])
def test_records_that_are_gone_are_noticed(begun, tmp_path, file, how):
    shutil.copytree(begun, tmp_path / "run")
    path = tmp_path / "run" / file
    lines = path.read_bytes().splitlines(keepends=True)
    if how == "deleted":
        path.unlink()
    else:
        path.write_bytes(b"".join(lines[:-1] if how == "shortened" else lines[:1]))
    with pytest.raises(CheckpointError, match=rf"{re.escape(file)} lacks .*; expected all\. Put the file back, load"):
        selffl.resume(tmp_path / "run", rounds=4)


@pytest.mark.parametrize("file", ["partition.csv", "summary.json", "participation.parquet", "clients.parquet"])
def test_what_can_be_made_again_is_made_again(begun, tmp_path, file):
    shutil.copytree(begun, tmp_path / "run")
    (tmp_path / "run" / file).unlink()
    run = selffl.resume(tmp_path / "run") if file == "summary.json" else selffl.resume(tmp_path / "run", rounds=4)
    assert run.summary["status"] == "finished"
    assert (tmp_path / "run" / file).is_file()
    if file in ("summary.json", "partition.csv"):
        assert (tmp_path / "run" / file).read_bytes() == (begun / file).read_bytes()
