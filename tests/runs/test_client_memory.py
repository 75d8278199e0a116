"""Runs whose clients' memories lie on disk have the numbers of runs in memory, and survive what runs survive."""

import json
import shutil

import pytest
import torch

import selffl
from selffl.algorithms.records import tensors_of
from selffl.budget import BUDGETS, Budget
from selffl.data import load
from selffl.errors import CheckpointError, ConfigError
from selffl.runs import folder as files
from selffl.state.disk import DiskMemory

SETTINGS = {"rounds": 3, "participation": 0.25, "evaluate_every": 1, "chunk_size": 2}
METHODS = {
    "fedavg": {"num_local_steps": 2},
    "ditto": {"num_local_steps": 2},
    "scaffold": {"num_local_steps": 2},
    "self-fl": {"initial_steps": 2, "max_local_steps": 3},
    "self-fl-auto": {"num_local_steps": 2},
}


@pytest.fixture(scope="module")
def fed():
    return load("digits", num_clients=12, seed=0)


def method(name):
    return selffl.algorithm(name, **METHODS[name])


def unmeasured(rows):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def assert_same(run, other):
    assert unmeasured(run.history) == unmeasured(other.history)
    assert unmeasured(run.clients) == unmeasured(other.clients)
    assert run.participation == other.participation
    for name, tensor in tensors_of(run._state.server).items():
        assert torch.equal(tensor.nan_to_num(), tensors_of(other._state.server)[name].nan_to_num()), name
    for client in run.federation.clients:
        models = [each.personal_model(client).state_dict() for each in (run, other)]
        assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.parametrize("name", METHODS)
def test_the_numbers_are_those_of_a_run_in_memory(fed, tmp_path, name):
    plain = selffl.train("softmax", fed, method(name), client_memory="memory", **SETTINGS)
    disk = selffl.train("softmax", fed, method(name), client_memory="disk", out=tmp_path / "run", **SETTINGS)
    assert isinstance(disk._state.memory, DiskMemory)
    assert_same(plain, disk)
    assert_same(plain, selffl.load(tmp_path / "run"))


def test_with_optimisers_kept_and_without_a_folder(fed):
    more = SETTINGS | {"optimiser": "momentum", "keep_optimiser": True}
    runs = [selffl.train("softmax", fed, method("ditto"), client_memory=place, **more) for place in ("memory", "disk")]
    assert_same(*runs)


def test_a_run_that_is_made_longer_is_as_if_it_had_been_asked_for_at_once(fed, tmp_path):
    whole = selffl.train("softmax", fed, method("ditto"), client_memory="memory", **SETTINGS | {"rounds": 5})
    selffl.train("softmax", fed, method("ditto"), client_memory="disk", out=tmp_path / "run", **SETTINGS)
    assert_same(whole, selffl.resume(tmp_path / "run", rounds=5))


def test_files_of_another_moment_are_told(fed, tmp_path):
    """A checkpoint of round 1 with the files of round 3: slots have been given to other clients since."""

    def keep(row):
        if row["round"] == 2:
            shutil.copytree(tmp_path / "run", tmp_path / "early")

    more = SETTINGS | {"out": tmp_path / "run", "client_memory": "disk", "on_round": keep}
    selffl.train("softmax", fed, method("self-fl-auto"), **more)
    shutil.rmtree(tmp_path / "early" / files.CLIENT_MEMORY)
    shutil.copytree(tmp_path / "run" / files.CLIENT_MEMORY, tmp_path / "early" / files.CLIENT_MEMORY)
    with pytest.raises(CheckpointError, match="their sums differ"):
        selffl.resume(tmp_path / "early")


def test_a_checkpoint_holds_numbers_by_client_and_no_models(fed, tmp_path):
    run = selffl.train("softmax", fed, method("ditto"), client_memory="disk", out=tmp_path / "run", **SETTINGS)
    tensors, _ = files.load_tensors(tmp_path / "run" / files.CHECKPOINT)
    of_clients = {name: tensor.numel() for name, tensor in tensors.items() if not name.startswith("server.")}
    assert of_clients == dict.fromkeys(("memory.slots", "memory.sums", "num_gradients", "num_rounds"), 12)
    took_part = int((run._state.num_rounds > 0).sum())
    assert took_part < 12
    assert int((run._state.memory.slots >= 0).sum()) == took_part


def test_a_run_is_saved_with_its_memories(fed, tmp_path):
    run = selffl.train("softmax", fed, method("ditto"), client_memory="disk", **SETTINGS)
    run.save(tmp_path / "saved")
    found = selffl.load(tmp_path / "saved")
    assert found._state.memory.folder.path == tmp_path / "saved" / files.CLIENT_MEMORY
    assert_same(run, found)


def test_what_is_too_much_for_memory_lies_on_disk_and_that_is_said(fed, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(BUDGETS, "cpu", Budget(client_memory_bytes=12 * 651 * 4))
    short = SETTINGS | {"rounds": 1}
    run = selffl.train("softmax", fed, method("ditto"), out=tmp_path / "a", **short)
    assert run.config.client_memory == "memory"  # 650 parameters and a clock
    assert not caplog.records
    monkeypatch.setitem(BUDGETS, "cpu", Budget(client_memory_bytes=12 * 651 * 4 - 1))
    run = selffl.train("softmax", fed, method("ditto"), out=tmp_path / "b", **short)
    assert run.config.client_memory == "disk"
    assert "12 clients may come to keep 0 GB, which lies on disk" in caplog.text
    config = json.loads((tmp_path / "b" / files.CONFIG).read_text())
    assert config["config"]["client_memory"] == "disk"
    # A run of an earlier version does not say, and was in memory.
    config = json.loads((tmp_path / "a" / files.CONFIG).read_text())
    del config["config"]["client_memory"]
    (tmp_path / "a" / files.CONFIG).write_text(json.dumps(config))
    assert_same(selffl.load(tmp_path / "a"), run)


def test_what_cannot_be_had_with_it_is_refused(fed):
    with pytest.raises(ConfigError, match="client_memory is 'disk', and gain is True"):
        selffl.train("softmax", fed, client_memory="disk", gain=True)
    with pytest.raises(ConfigError, match="client_memory is 'paper'"):
        selffl.train("softmax", fed, client_memory="paper")
