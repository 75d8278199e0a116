"""A clock that jumps, by years and both ways: no number depends on it, and no file that counts is taken for old."""

import itertools
import json
import os
import time

import pytest
import torch
from torch import nn

import selffl
from kill_points import content, federation
from selffl.state import files

YEAR = 365 * 86400.0
JUMPS = (0.0, 10 * YEAR, -10 * YEAR, 1.0, -2 * 86400.0, 3 * 86400.0)


@pytest.fixture
def jumping(monkeypatch):
    """Each look at the clock shows another year."""
    real, jumps = time.time, itertools.cycle(JUMPS)
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))


def train(root, rounds=4):
    torch.manual_seed(0)
    method = selffl.algorithm("self-fl-exact", initial_steps=2, max_local_steps=2)
    selffl.train(
        nn.Linear(3, 2), federation(), method, out=root / "run", rounds=rounds, participation=0.7,
        evaluate_every=1, gain=True, seed=3,
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    root = tmp_path_factory.mktemp("undisturbed")
    train(root)
    return content(root)


def test_a_run_under_a_clock_that_jumps_is_the_same_to_the_bit(expected, tmp_path, jumping):
    assert time.time() != pytest.approx(time.time(), abs=YEAR)
    train(tmp_path)
    assert content(tmp_path) == expected
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert 0 <= summary["seconds"] < 3600


@pytest.mark.parametrize("written", [0.0, 4e9], ids=["1970", "2096"])
def test_a_run_whose_files_are_of_another_time_goes_on_to_the_same_bits(written, expected, tmp_path, jumping):
    train(tmp_path, rounds=2)
    for path in (tmp_path / "run").rglob("*"):
        os.utime(path, (written, written))
    selffl.resume(tmp_path / "run", rounds=4)
    assert content(tmp_path) == expected


def test_only_what_a_killed_writer_left_is_swept_whatever_the_clock_says(tmp_path, monkeypatch):
    kept, stray = tmp_path / "a.json", tmp_path / "a.json.0123456789ab.part"
    files.write_json(kept, {"x": 1})
    stray.write_text("half")
    files.write_json(kept, {"x": 1})
    assert stray.exists()  # somebody may be writing it
    monkeypatch.setattr(time, "time", lambda: 0.0)  # all files are of the future then
    files.write_json(kept, {"x": 2})
    assert stray.exists()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 4e9)
    files.write_json(kept, {"x": 3})
    assert not stray.exists()
    assert json.loads(kept.read_text(encoding="utf-8")) == {"x": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
