"""`selffl bench --peers`: equal work, in turns, and one line for whoever is left out."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from programs import Script
from selffl.cli import bench_peers
from selffl.cli.bench_peers import Peer, environment, measure, unequal


def said(seconds, num_steps=40, accuracy=0.9):
    return {"seconds": seconds, "num_steps": num_steps, "accuracy": accuracy}


def test_who_took_other_steps_or_has_another_model_is_named():
    found = {
        "loop": said([1.0]),
        "products": {"seconds": [0.1], "num_steps": 0, "accuracy": None},
        "near": said([1.0], accuracy=0.915),
        "lazy": said([0.5], num_steps=20),
        "wrong": said([1.0], accuracy=0.87),
    }
    why = unequal(found, 40)
    assert set(why) == {"lazy", "wrong"}
    assert why["lazy"] == "its clients took 20 steps; expected 40, as everybody's"
    assert why["wrong"] == "its accuracy is 0.870; expected the loop's 0.900"


@pytest.fixture
def absent(monkeypatch, tmp_path):
    """A peer that pip cannot install."""
    monkeypatch.setitem(bench_peers.PEERS, "absent", Peer((str(tmp_path / "no-such-package"),)))
    monkeypatch.setattr(bench_peers.venv, "create", lambda place, with_pip: place.mkdir(parents=True))
    run = subprocess.run

    def by_this_python(command, **options):
        return run([sys.executable, *command[1:]], **options)

    monkeypatch.setattr(bench_peers.subprocess, "run", by_this_python)
    return "absent"


def test_what_pip_cannot_install_is_refused_with_its_words(absent, tmp_path):
    with pytest.raises(ChildProcessError, match=r"^ERROR: .*no-such-package"):
        environment(absent, tmp_path)
    assert not (tmp_path / "absent" / "installed.txt").exists()


@pytest.mark.slow
def test_libraries_take_turns_and_do_equal_work(absent, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_peers, "TOLERANCE", 0.5)  # three rounds of two clients
    monkeypatch.setattr(bench_peers, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Script}))
    record = measure([absent], clients=20, turns=2, cores=1, folder=tmp_path, places=tmp_path)
    assert record["sizes"] == {"clients": 20, "rows": 50, "cohort": 2, "steps": 20, "batch": 10}
    assert set(record["libraries"]) == {"loop", "products", "selffl"}
    for name, each in record["libraries"].items():
        assert len(each["seconds"]) == len(each["cpu_seconds"]) == 2
        assert each["num_steps"] == (0 if name == "products" else (3 + 2) * 2 * 20)
        assert each["peak_megabytes"] > 50
        assert each["versions"]["torch"]
    assert list(record["left_out"]) == [absent]
    assert json.loads(json.dumps(record)) == record


def test_a_process_that_ends_is_left_out_with_its_last_words(tmp_path):
    sizes = {"clients": 2, "rows": 50, "cohort": 1, "steps": 20, "batch": 10}
    with (
        bench_peers.started("no-library", sys.executable, sizes, 1, tmp_path) as worker,
        pytest.raises(ChildProcessError, match="invalid choice: 'no-library'"),
    ):
        worker.ask("")
