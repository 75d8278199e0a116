"""Studies of folders that other libraries have made: what is written for them runs as it is."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

import selffl
from selffl.cli.init import study_files
from selffl.cli.init_folder import folder_study
from selffl.errors import ConfigError, DataError
from selffl.studies.own import read_study

NUM_CLIENTS = 4


def rows_of(number, size, shape, whole=False):
    """Rows of a client whose class is seen in their mean."""
    rng = np.random.default_rng(number)
    y = np.arange(size) % 2
    x = rng.random((size, *shape)) / 2 + y.reshape(-1, *(1 for _ in shape)) / 2
    return (np.rint(255 * x).astype(int) if whole else x), y


def write_leaf(folder, shape, parts=("train", "test"), whole=False, num_clients=NUM_CLIENTS):
    for part in parts:
        data = {}
        for number in range(num_clients):
            x, y = rows_of(number + (100 if part == "test" else 0), 12 if part != "test" else 4, shape, whole)
            data[f"user-{number:02}"] = {"x": x.tolist(), "y": y.astype(float).tolist()}  # as FedProx writes classes
        (folder / part).mkdir(parents=True)
        about = {"users": list(data), "num_samples": [len(one["y"]) for one in data.values()], "user_data": data}
        (folder / part / "data.json").write_text(json.dumps(about))


def write_pfllib(folder, shape, whole=False, num_clients=NUM_CLIENTS):
    for part, size in (("train", 12), ("test", 4)):
        (folder / part).mkdir(parents=True)
        for number in range(num_clients):
            x, y = rows_of(number + (100 if part == "test" else 0), size, shape, whole)
            data = {"x": x if whole else x.astype(np.float32), "y": y}
            np.savez_compressed(folder / part / f"{number}.npz", data=data)


def write_study(folder, study, rounds=5):
    """The files of a study, as `selffl init` fills them in."""
    values = {**study.values, "model": "model", "model_reason": [], "rounds": rounds}
    folder.mkdir(parents=True)
    for name, text in study_files(folder, "study_folder.py", values, study.num_clients).items():
        (folder / name).write_text(text, encoding="utf-8")


CASES = {
    "LEAF's digits": ("leaf", write_leaf, (784,), {}, "a small convolutional network on images (1, 28, 28)"),
    "LEAF's rows": ("leaf", write_leaf, (6,), {}, "softmax regression"),
    "LEAF's rows, whole": ("leaf", write_leaf, (2, 3), {"whole": True}, "softmax regression"),
    "PFLlib's images": ("pfllib", write_pfllib, (3, 16, 16), {}, "a small convolutional network on images (3, 16, 16)"),
    "PFLlib's pixels": ("pfllib", write_pfllib, (1, 20, 20), {"whole": True}, "network on images (1, 20, 20)"),
    "PFLlib's signals": ("pfllib", write_pfllib, (9, 1, 8), {}, "softmax regression"),
}
LONG = ("LEAF's digits", "LEAF's rows", "LEAF's rows, whole", "PFLlib's images", "PFLlib's pixels")
GO_ON = ("LEAF's rows", "PFLlib's signals")  # of each kind of folder one


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in LONG else []) for case in CASES]
)
def test_a_study_of_a_folder_runs_as_it_is_written(case, command_line, tmp_path):
    kind, write, shape, options, model = CASES[case]
    write(tmp_path / "rows", shape, **options)
    study = folder_study(kind, Path("rows"), Path("deep/mine"), trusted=kind == "pfllib")
    assert study.num_clients == NUM_CLIENTS
    assert study.about["rows"] == {"train": 48, "test": 16}
    assert study.summary[0] == (
        "64 rows of 4 clients in 2 classes: 48 to train on and 16 to test, as the folder splits them."
    )
    assert model in study.summary[1]
    assert ("whole numbers" in study.summary[-1]) == bool(options)
    write_study(Path("deep/mine"), study, rounds=4 if "network" in model else 8)  # whose rounds are dear
    few = ("--set", "num_local_steps=8")
    code, out, err = command_line("run", "deep/mine", "--out", "out", *few)
    assert code == 0, err
    assert "4 clients\n  accuracy" in out
    run = selffl.load("out", trusted=True)
    assert run.federation.train.features.is_floating_point()
    assert run.summary["weighted_accuracy"] > 0.8
    assert sum(len(rows.labels) for rows in run.federation.parts.values()) == 64
    if case in GO_ON:
        code, _, err = command_line(
            "run", "deep/mine", "--out", "out", *few, "--rounds", str(run.summary["rounds"] + 1), "--resume"
        )
        assert code == 0, err


def test_the_rows_are_those_of_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_leaf(tmp_path / "rows", (6,))
    write_study(Path("mine"), folder_study("leaf", Path("rows"), Path("mine")))
    found = read_study(Path("mine")).federation(3)
    expected = selffl.Federation.from_leaf("rows", labels="classes")
    assert found.fingerprint() == expected.fingerprint()


def test_files_without_a_split_are_split_by_the_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_leaf(tmp_path / "rows", (6,), parts=("all_data",))
    study = folder_study("leaf", Path("rows/all_data/data.json"), Path("mine"))
    assert study.summary[0].endswith("32 to train on and 16 to test, three tenths of each client's to test.")
    write_study(Path("mine"), study)
    problem = read_study(Path("mine"))
    assert problem.federation(0).test.num_examples.tolist() == [4] * NUM_CLIENTS
    assert not torch.equal(problem.federation(0).test.features, problem.federation(1).test.features)


def test_what_no_study_can_be_made_of_is_refused(tmp_path):
    write_pfllib(tmp_path / "pfllib", (4,))
    with pytest.raises(ConfigError, match=r"holds pickles, which can run code when they are read.*Add --trusted if"):
        folder_study("pfllib", tmp_path / "pfllib", tmp_path / "mine")
    write_leaf(tmp_path / "alone", (4,), num_clients=1)
    with pytest.raises(DataError, match="alone has one client; expected rows of at least two clients"):
        folder_study("leaf", tmp_path / "alone", tmp_path / "mine")

    def file_of(x, y):
        data = {user: {"x": x, "y": y} for user in "ab"}
        path = tmp_path / "file.json"
        path.write_text(json.dumps({"users": ["a", "b"], "num_samples": [2, 2], "user_data": data}))
        return path

    with pytest.raises(DataError, match=r"user 'a': x holds text; expected numbers\. Pass encode= to Federation"):
        folder_study("leaf", file_of(["to be", "or not"], [0, 1]), tmp_path / "mine")
    with pytest.raises(DataError, match="labels of a single class; expected something to predict"):
        folder_study("leaf", file_of([[1.0], [2.0]], [0, 0]), tmp_path / "mine")
    with pytest.raises(DataError, match=r"user 'a': y is 0\.5 in row 0; expected classes"):
        folder_study("leaf", file_of([[1.0], [2.0]], [0.5, 1.0]), tmp_path / "mine")


@pytest.mark.parametrize(
    ("num_clients", "participation", "rounds"),
    [(None, 0.5, 40), (3, 1.0, 40), (16, 0.62, 40), (25, 0.4, 50), (60, 0.17, 120), (100, 0.1, 200), (5000, 0.1, 200)],
)
def test_each_client_takes_part_twenty_times(num_clients, participation, rounds, tmp_path):
    found = study_files(tmp_path, "study.py", {"title": '"made up"'}, num_clients)["study.toml"]
    settings = tomllib.loads(found)
    assert (settings["participation"], settings["rounds"]) == (participation, rounds)
    assert rounds * participation >= 20
