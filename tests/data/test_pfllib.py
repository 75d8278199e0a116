"""PFLlib's folders: rows and split as the files have them, nothing run by a pickle, and one line for what is wrong."""

import io
import json
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

import selffl
from selffl import Federation
from selffl.data.pfllib import ArraysOnly
from selffl.errors import ConfigError, DataError


def client_rows(number, size, shape=(1, 4, 4)):
    """Images and classes of a made-up client, of the types that PFLlib's generate_MNIST.py leaves."""
    rng = np.random.default_rng(number)
    return {"x": rng.normal(size=(size, *shape)).astype(np.float32), "y": rng.integers(0, 3, size)}


def write_file(path, record):
    """One file as PFLlib's save_file writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez_compressed(file, data=record)


def write(folder, train, test, **config):
    for part, records in (("train", train), ("test", test)):
        for number, record in enumerate(records):
            write_file(folder / part / f"{number}.npz", record)
    about = {"num_clients": len(train), "num_classes": 3, "non_iid": True, "balance": False, "partition": "dir"}
    about |= {"Size of samples for labels in clients": [], "alpha": 0.1, "batch_size": 10, **config}
    (folder / "config.json").write_text(json.dumps(about))


@pytest.fixture
def made(tmp_path):
    """A folder of twelve clients, and what is in it: as text, the number 10 would come before 2."""
    train = [client_rows(number, 4 + number) for number in range(12)]
    test = [client_rows(100 + number, 1 + number % 3) for number in range(12)]
    folder = tmp_path / "MNIST"
    write(folder, train, test)
    (folder / "train" / ".DS_Store").write_bytes(b"\0")
    return folder, train, test


def test_the_split_of_the_files_is_kept_bit_by_bit(made):
    folder, train, test = made
    found = Federation.from_pfllib(str(folder), trusted=True)
    assert found.clients == list(range(12))
    assert (found.source, found.classes, found.cluster, found.validation) == (None, None, None, None)
    for part, expected in ((found.train, train), (found.test, test)):
        assert torch.equal(part.features, torch.from_numpy(np.concatenate([record["x"] for record in expected])))
        assert torch.equal(part.labels, torch.from_numpy(np.concatenate([record["y"] for record in expected])))
        assert part.num_examples.tolist() == [len(record["y"]) for record in expected]


def test_the_rows_are_those_of_the_arrays(made):
    folder, train, _ = made
    found = Federation.from_pfllib(folder, trusted=True)
    x, y = (np.concatenate([record[name] for record in train]) for name in ("x", "y"))
    client = np.repeat(np.arange(12), [len(record["y"]) for record in train])
    expected = Federation.from_arrays(x, y, client, test_fraction=0)
    assert found.clients == expected.clients
    assert torch.equal(found.train.offset, expected.train.offset)
    for place in range(12):
        begin, end = found.train.offset[place : place + 2].tolist()
        mine, others = (
            [(*features.flatten().tolist(), label) for features, label in zip(
                part.features[begin:end], part.labels[begin:end].tolist(), strict=True
            )]
            for part in (found.train, expected.train)
        )  # fmt: skip
        assert sorted(mine) == sorted(others)  # from_arrays deals the rows out in a random order


def test_validation_rows_are_taken_from_the_training_rows(made):
    folder, train, _ = made
    whole = Federation.from_pfllib(folder, trusted=True)
    found = Federation.from_pfllib(folder, trusted=True, validation_fraction=0.25, seed=1)
    assert torch.equal(found.test.features, whole.test.features)
    assert found.validation.num_examples.tolist() == [round(0.25 * len(record["y"])) for record in train]
    assert torch.equal(found.num_examples, whole.num_examples)


@pytest.mark.parametrize("trusted", [False, None, 1, "yes"])
def test_nothing_is_opened_without_trust(made, trusted, monkeypatch):
    def opened(*args, **kwargs):
        raise AssertionError("a file was opened")

    monkeypatch.setattr(zipfile.ZipFile, "__init__", opened)
    monkeypatch.setattr(np, "load", opened)
    with pytest.raises(
        ConfigError, match=r"holds pickles, which can run code when they are read.*Pass trusted=True if"
    ):
        Federation.from_pfllib(made[0], trusted=trusted)
    with pytest.raises(AssertionError, match="a file was opened"):  # the trap is one
        Federation.from_pfllib(made[0], trusted=True)


class Hostile:
    """An object whose pickle makes a folder when it is read."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (os.mkdir, (str(self.marker),))


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("place", ["whole", "feature", "extra"])
def test_a_hostile_pickle_does_not_run(made, tmp_path, trusted, place):
    marker = tmp_path / "marker"
    record = {
        "whole": Hostile(marker),
        "feature": {"x": np.array([Hostile(marker)], dtype=object), "y": np.array([0])},
        "extra": {**client_rows(0, 3), "z": Hostile(marker)},
    }[place]
    write_file(made[0] / "test" / "3.npz", record)
    with pytest.raises((ConfigError, DataError)) as found:
        Federation.from_pfllib(made[0], trusted=trusted)
    assert not marker.exists()
    if trusted:
        assert "3.npz cannot be read (it names" in str(found.value)
        assert ".mkdir, which arrays do not need)" in str(found.value)
    with np.load(made[0] / "test" / "3.npz", allow_pickle=True) as file:  # the file does what it is said to do
        file["data"].item()
    assert marker.exists()


@pytest.mark.parametrize(
    "name", ["builtins.eval", "os.system", "numpy.load", "numpy.ndarray.tofile", "functools.partial"]
)
def test_only_what_rebuilds_arrays_is_looked_up(name):
    module, _, attribute = name.partition(".")
    with pytest.raises(pickle.UnpicklingError, match=f"names {name}"):
        ArraysOnly(io.BytesIO()).find_class(module, attribute)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_arrays_are_read_as_any_numpy_has_written_them(protocol):
    values = {"x": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "y": np.array([1, 0], dtype=">i2"), "n": [1, "a"]}
    text = pickle.dumps(values, protocol)
    if protocol == 2:  # keeps bytes as text to be encoded again, as no NumPy of Python 3 writes them to a file
        with pytest.raises(pickle.UnpicklingError, match=r"names _codecs\.encode"):
            ArraysOnly(io.BytesIO(text)).load()
        return
    for core in (b"numpy._core.multiarray", b"numpy.core.multiarray"):  # NumPy 2 and 1
        if protocol == 4:  # the names carry their length
            given = text.replace(b"\x16numpy._core.multiarray", bytes([len(core)]) + core)
            given = given[:3] + (len(given) - 12).to_bytes(8, "little") + given[11:]  # and so does the whole
        else:
            given = text.replace(b"numpy._core.multiarray", core)
        found = ArraysOnly(io.BytesIO(given)).load()
        assert core in given
        assert found["n"] == [1, "a"]
        for key in "xy":
            assert np.array_equal(found[key], values[key])


def test_types_are_read_as_pfllib_reads_them(made):
    folder, train, test = made
    for records in (train, test):
        for record in records:
            record["x"], record["y"] = record["x"].astype(np.float64), record["y"].astype(np.float32)
    write(folder, train, test)
    found = Federation.from_pfllib(folder, trusted=True)
    assert (found.train.features.dtype, found.train.labels.dtype) == (torch.float32, torch.int64)
    for records in (train, test):  # Shakespeare: the numbers of letters, and labels in a list
        for record in records:
            record["x"], record["y"] = np.abs(record["x"]).astype(np.int64), record["y"].astype(int).tolist()
    write(folder, train, test)
    found = Federation.from_pfllib(folder, trusted=True)
    assert (found.train.features.dtype, found.train.labels.dtype) == (torch.int64, torch.int64)


def test_a_config_may_be_absent_or_old(made):
    folder, _, _ = made
    expected = Federation.from_pfllib(folder, trusted=True).fingerprint()
    (folder / "config.json").write_text('{"num_clients": 12}')  # without num_classes, as older versions wrote it
    assert Federation.from_pfllib(folder, trusted=True).fingerprint() == expected
    (folder / "config.json").unlink()  # as generate_Shakespeare.py leaves it
    assert Federation.from_pfllib(folder, trusted=True).fingerprint() == expected


def test_a_client_without_test_rows_is_kept(made):
    folder, _, _ = made
    empty = client_rows(0, 0)
    write_file(folder / "test" / "5.npz", {"x": empty["x"], "y": empty["y"]})
    assert Federation.from_pfllib(folder, trusted=True).test.num_examples[5] == 0
    write_file(folder / "train" / "5.npz", {"x": empty["x"], "y": empty["y"]})
    with pytest.raises(DataError, match=r"train.5\.npz has no rows; expected at least one to train on"):
        Federation.from_pfllib(folder, trusted=True)


def remove(name):
    return lambda folder: (folder / name).unlink()


def replace_by(name, record):
    return lambda folder: write_file(folder / name, record)


def text_of(name, text):
    return lambda folder: (folder / name).write_bytes(text)


def cut_off(folder):
    path = folder / "train" / "2.npz"
    path.write_bytes(path.read_bytes()[:200])


def cut_pickle_off(folder):
    path = folder / "train" / "2.npz"
    with zipfile.ZipFile(path) as archive:
        text = archive.read("data.npy")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.npy", text[:-100])


def move_part(folder):
    (folder / "test").rename(folder / "tests")


def empty_part(folder):
    for path in (folder / "test").iterdir():
        path.unlink()


def plain_arrays(folder):
    np.savez(folder / "train" / "2.npz", data=np.zeros(3))


def other_arrays(folder):
    np.savez(folder / "train" / "2.npz", x=np.zeros((3, 1)), y=np.zeros(3))


ROWS = client_rows(2, 6)
WORDS = np.empty((3, 2), dtype=object)
WORDS[:] = [[[4, 5, 0], 2], [[7, 0, 0], 1], [[1, 2, 3], 3]]
MALFORMED = {
    "no test file": (remove("test/11.npz"), "test/11.npz is missing; expected both files of each client"),
    "no train file": (remove("train/11.npz"), "train/11.npz is missing; expected both files of each client"),
    "a gap": (lambda folder: (remove("train/3.npz")(folder), remove("test/3.npz")(folder)),
              "train/3.npz is missing; expected both files of each client, and clients numbered from 0 without a gap"),
    "one more": (replace_by("train/12.npz", ROWS), "has files of client 12, and config.json says that there are 12"),
    "no part": (move_part, "MNIST has no folder test; expected train and test"),
    "empty part": (empty_part, "test holds no .npz files; expected 0.npz, 1.npz and so on"),
    "odd name": (replace_by("train/01.npz", ROWS), "train/01.npz has no client's number for a name"),
    "word": (replace_by("train/one.npz", ROWS), "train/one.npz has no client's number for a name"),
    "other classes": (replace_by("train/2.npz", {**ROWS, "y": [0, 1, 7, 0, 0, 0]}),
                      "train/2.npz: y is 7 in row 2; expected classes below 3, the num_classes of config.json"),
    "config cut off": (text_of("config.json", b'{"num_clients"'), "config.json cannot be read ("),
    "config a list": (text_of("config.json", b"[]"), "config.json holds a list; expected a dictionary"),
    "config of text": (text_of("config.json", b'{"num_clients": "12"}'), "config.json: num_clients is '12'; expected"),
    "cut off": (cut_off, "train/2.npz cannot be read ("),
    "pickle cut off": (cut_pickle_off, "train/2.npz cannot be read (pickle data was truncated)"),
    "no archive": (text_of("train/2.npz", b"hello"), "train/2.npz cannot be read (File is not a zip file)"),
    "plain array": (plain_arrays, "train/2.npz: data is of type float64; expected PFLlib's files"),
    "other arrays": (other_arrays, "train/2.npz holds x.npy, y.npy; expected PFLlib's files"),
    "no dictionary": (replace_by("train/2.npz", [None, "a"]), "train/2.npz: data is no"),
    "no labels": (replace_by("train/2.npz", {"x": ROWS["x"]}), "train/2.npz has no y among: x; expected"),
    "fewer labels": (replace_by("train/2.npz", {**ROWS, "y": ROWS["y"][:4]}), "train/2.npz: x has 6 rows and y 4"),
    "other shape": (replace_by("train/2.npz", client_rows(2, 6, (3, 4, 4))),
                    "train/2.npz: rows of x have shape (3, 4, 4); expected (1, 4, 4), as in"),
    "other test shape": (replace_by("test/2.npz", client_rows(2, 6, (16,))), "test/2.npz: rows of x have shape (16,)"),
    "table of labels": (replace_by("train/2.npz", {**ROWS, "y": np.eye(6)}), "train/2.npz: y has shape (6, 6)"),
    "text": (replace_by("train/2.npz", {"x": WORDS, "y": np.zeros(3)}), "2.npz: x holds lists of words with their"),
    "ragged": (replace_by("train/2.npz", {"x": [[1.0], [2.0, 3.0]], "y": [0, 1]}), "x has rows of different lengths"),
    "names": (replace_by("train/2.npz", {**ROWS, "y": list("abcdef")}), "train/2.npz: y is of type <U1 and shape (6,)"),
    "fractions": (replace_by("train/2.npz", {**ROWS, "y": [0, 0.5, 0, 0, 0, 0]}), "2.npz: y is 0.5 in row 1; expected"),
    "negative": (replace_by("train/2.npz", {**ROWS, "y": [0, 1, 0, 0, -1, 0]}), "train/2.npz: y is -1 in row 4"),
    "NaN": (replace_by("train/2.npz", {**ROWS, "x": np.full((6, 1, 4, 4), np.nan)}), "2.npz: x holds NaN or infinity"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_folder_is_named_in_one_line(made, case):
    change, said = MALFORMED[case]
    change(made[0])
    with pytest.raises(DataError) as found:
        Federation.from_pfllib(made[0], trusted=True)
    assert said in str(found.value).replace("\\", "/")
    assert "\n" not in str(found.value)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="nowhere is no folder; expected one with the folders train and test"):
        Federation.from_pfllib(tmp_path / "nowhere", trusted=True)


def test_a_pfllib_folder_is_trained_on_saved_and_resumed(made, tmp_path):
    fed = Federation.from_pfllib(made[0], trusted=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    options = {"learning_rate": 0.1, "batch_size": 4, "seed": 0}
    method = selffl.algorithm("ditto", num_local_steps=4)
    whole = selffl.train(model, fed, method, rounds=3, **options)
    selffl.train(model, fed, method, rounds=2, out=tmp_path / "run", **options)
    run = selffl.resume(tmp_path / "run", rounds=3)
    assert run.federation.fingerprint() == fed.fingerprint()
    assert [row["client"] for row in run.clients] == list(range(12))
    for client in (0, 11):
        for mine, theirs in zip(
            whole.personal_model(client).parameters(), run.personal_model(client).parameters(), strict=True
        ):
            assert torch.equal(mine, theirs)
