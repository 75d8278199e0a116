"""A server that is stopped anywhere goes on to the same records, and a folder that is not its own is left alone."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'selffl[flower]'")
sys.path.append(str(Path(__file__).parent.parent / "engines" / "flower"))

from wire import Small, WireGrid

import selffl
from selffl.data.federation import Federation
from selffl.engines.flower import server
from selffl.errors import CheckpointError, ConfigError, QuorumError
from selffl.flower import personal_model
from selffl.runs import folder
from selffl.state.checkpoint import load_tensors
from selffl.training.flat import FlatModel

SETTINGS = {"rounds": 3, "participation": 0.5, "evaluate_every": 2}
BEGIN = ["history.csv", "participation.csv", "config.json"]
ROUND = ["participation.csv", "history.csv", "checkpoint.safetensors"]
EVALUATION = ["clients.csv", "summary.json", *BEGIN]
WRITES = ["checkpoint.safetensors", *BEGIN, *ROUND, *ROUND, *EVALUATION, *ROUND, *EVALUATION, "model.safetensors"]


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    """No power cut is looked at here."""
    monkeypatch.setattr("selffl.state.files.os.fsync", lambda handle: None)


class Killed(BaseException):
    pass


class Writes:
    """The files that a server writes, in their order; before number ``last`` it is killed, or within a table's line."""

    def __init__(self, monkeypatch, last=None):
        self.names, self.last = [], last
        for module, name in (
            (folder, "write_csv"), (folder, "append_csv"), (folder, "write_json"), (server, "save_tensors"),
        ):  # fmt: skip
            monkeypatch.setattr(module, name, self.watched(getattr(module, name)))

    def watched(self, write):
        def called(path, *args):
            self.names.append(path.name)
            if len(self.names) == self.last:
                if write.__name__ == "append_csv":
                    with path.open("a", encoding="utf-8") as file:
                        file.write("2,1")
                raise Killed
            write(path, *args)

        return called


def left(small):
    """What a run leaves, but for the time it took."""
    found = asdict(folder.read_records(small.out))
    for row in (*found["history"], found["summary"]):
        del row["seconds"]
    tensors, about = load_tensors(small.out / "model.safetensors")
    found["model"] = about, {name: tensor.tolist() for name, tensor in tensors.items()}
    found["personal"] = personal(small)
    found["metrics"] = folder.read_config(small.out).metrics
    return found


def personal(small):
    models = [personal_model(small.module(), small.memory, "first", client) for client in Small.clients]
    return [FlatModel(model).params.tolist() for model in models]


def content(path):
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != ".lock"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was not stopped, and the files it wrote."""
    small = Small(tmp_path_factory.mktemp("whole"))
    with pytest.MonkeyPatch.context() as patch:
        writes = Writes(patch)
        small.serve(**SETTINGS)
    return left(small), writes.names


def test_every_write_of_a_run_is_known(whole):
    found, names = whole
    assert (sorted(names[:4]), names[4:]) == (sorted(WRITES[:4]), WRITES[4:])
    assert found["summary"]["status"] == "finished"
    assert [row["weighted_accuracy"] is not None for row in found["history"]] == [False, True, True]


@pytest.mark.parametrize("number", range(1, len(WRITES) + 1))
def test_a_server_killed_at_any_write_goes_on_to_the_same_records(number, whole, tmp_path, monkeypatch):
    small = Small(tmp_path)
    with monkeypatch.context() as patch:
        Writes(patch, number)
        with pytest.raises(Killed):
            small.serve(**SETTINGS)
    small.serve(**SETTINGS)
    assert left(small) == whole[0]


def test_a_server_killed_again_and_again_goes_on_to_the_same_records(whole, tmp_path, monkeypatch):
    small, kills = Small(tmp_path), 0
    for _ in range(20):
        with monkeypatch.context() as patch:
            Writes(patch, 9)
            try:
                small.serve(**SETTINGS)
                break
            except Killed:
                kills += 1
    assert kills > 3
    assert left(small) == whole[0]


def stopping(small, kind, number, after=0):
    """A grid whose server dies when so many clients have answered the messages of a kind in a round."""
    answered = []

    def fault(message, answer):
        if message.metadata.group_id == str(number):
            if len(answered) == after:
                raise Killed
            answered.append(message)
        return [answer(message)]

    return {kind: fault}


def test_an_evaluation_made_up_for_has_the_memories_of_its_own_round(whole, tmp_path):
    """Nobody answers the evaluation of round 2; round 3 is trained; the server dies before it has heard of it."""
    short = Small(tmp_path / "short")
    short.serve(**SETTINGS | {"rounds": 2})
    small = Small(tmp_path / "long")
    dies = stopping(small, "train", 3, after=1) | {"evaluate": lambda message, answer: []}
    with pytest.raises(Killed):
        small.serve(small.grid(dies), **SETTINGS)
    with pytest.raises(Killed):
        small.serve(small.grid(stopping(small, "train", 3)), **SETTINGS)
    assert personal(small) == personal(short)
    assert small_row(small) == {**whole[0]["history"][1]}
    small.serve(**SETTINGS)
    assert left(small) == whole[0]
    assert personal(small) != personal(short)


def small_row(small):
    row = folder.read_records(small.out).history[1]
    del row["seconds"]
    return row


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("lost", ["last line", "a line within", "all lines"])
def test_records_behind_the_checkpoint_are_refused(lost, tmp_path):
    small = Small(tmp_path)
    small.serve(**SETTINGS)
    path = small.out / "history.csv"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = {"last line": lines[:-1], "a line within": lines[:2] + lines[3:], "all lines": lines[:1]}[lost]
    path.write_text("".join(kept), encoding="utf-8")
    before = content(small.out)
    with pytest.raises(CheckpointError, match=r"history.csv lacks rounds before the checkpoint of round 3"):
        small.serve(**SETTINGS | {"rounds": 4})
    assert content(small.out) == before


def test_a_checkpoint_without_its_configuration_is_refused(tmp_path):
    small = Small(tmp_path)
    small.serve(**SETTINGS)
    (small.out / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"holds a checkpoint of round 3 and no config.json"):
        small.serve(**SETTINGS | {"rounds": 4})


@pytest.mark.parametrize("checkpoint_every", [0, 1])
def test_the_folder_of_a_run_of_train_is_refused_and_left_as_it_is(checkpoint_every, tmp_path):
    small, parts = Small(tmp_path), [Small.rows(client) for client in Small.clients]
    features, labels = (torch.cat([part[place] for part in parts]) for place in (0, 1))
    clients = torch.cat([torch.full((len(part[0]),), client) for client, part in enumerate(parts)])
    federation = Federation.from_arrays(features, labels, clients, test_fraction=0.3)
    selffl.train(
        small.module(), federation, "self-fl", out=small.out, rounds=2, participation=1.0, learning_rate=0.05,
        batch_size=4, seed=3, checkpoint_every=checkpoint_every,
    )  # fmt: skip
    before = content(small.out)
    with pytest.raises(ConfigError, match=r"not over Flower|of a run whose"):
        small.serve(**SETTINGS)
    assert content(small.out).keys() == before.keys()
    assert content(small.out) == before


def test_fewer_rounds_than_were_done_are_refused(tmp_path):
    small = Small(tmp_path)
    small.serve(**SETTINGS)
    before = content(small.out)
    with pytest.raises(ConfigError, match="rounds is 2, and the run is at round 3; expected that or more"):
        small.serve(**SETTINGS | {"rounds": 2})
    assert content(small.out) == before


def test_a_second_server_in_the_same_folder_is_refused_and_the_first_goes_on(whole, tmp_path):
    small, refused = Small(tmp_path), []

    def second(message, answer):
        if not refused:
            with pytest.raises(ConfigError, match="another process is writing the run in") as found:
                small.serve(**SETTINGS)
            refused.append(found)
        return [answer(message)]

    small.serve(small.grid(second), **SETTINGS)
    assert refused
    assert left(small) == whole[0]


def test_another_run_of_the_same_experiment_is_refused_by_the_clients(tmp_path):
    small = Small(tmp_path)
    small.serve(rounds=1)
    kept = content(next(small.memory.iterdir()))
    with pytest.raises(QuorumError, match="remembers another run of experiment first; expected the one that it began"):
        small.serve(rounds=1, seed=4, out=tmp_path / "other")
    assert content(next(small.memory.iterdir())) == kept
    small.serve(rounds=2)  # the first one goes on


def test_another_name_than_the_checkpoints_is_refused(tmp_path):
    small = Small(tmp_path)
    small.serve(rounds=1)
    with pytest.raises(ConfigError, match="experiment is 'second'; expected 'first', as the checkpoint has it"):
        small.serve(experiment="second")
    with pytest.raises(ConfigError, match="experiment is ''; expected a name"):
        small.serve(experiment="")


def test_other_clients_than_the_checkpoints_are_refused(tmp_path):
    small = Small(tmp_path)
    small.serve(rounds=1)
    small.clients = range(5)
    with pytest.raises(ConfigError, match="is of a run whose clients is"):
        small.serve(WireGrid(small.client(), Small.nodes))
    about = json.loads((small.out / "config.json").read_text(encoding="utf-8"))
    assert about["config"]["rounds"] == 1
