"""EMNIST in both published formats, made up small."""

import gzip
import struct

import numpy as np
import pytest
import torch
from scipy.io import savemat

from selffl.data import emnist as module
from selffl.errors import DataError


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def made_up():
    """Upright pictures whose pixel (2, 5) is the label and (5, 2) its part, of all 62 classes."""
    rng = np.random.default_rng(0)
    parts = {}
    for number, (part, each) in enumerate((("train", 130), ("test", 40))):
        labels = rng.permutation(np.repeat(np.arange(62, dtype=np.uint8), each))
        images = rng.integers(0, 256, (len(labels), 28, 28), dtype=np.uint8)
        images[:, 2, 5], images[:, 5, 2] = labels, number
        parts[part] = images, labels
    return parts


def write_idx(folder, ending=".gz"):
    folder.mkdir(parents=True)
    for part, (images, labels) in made_up().items():
        for kind, array in (("images-idx3", images.swapaxes(1, 2)), ("labels-idx1", labels)):
            content = idx(np.ascontiguousarray(array))
            path = folder / f"emnist-byclass-{part}-{kind}-ubyte{ending}"
            path.write_bytes(gzip.compress(content, 1) if ending else content)


def write_mat(folder):
    folder.mkdir(parents=True)
    parts = {
        part: {"images": images.swapaxes(1, 2).reshape(-1, 784), "labels": labels[:, None]}
        for part, (images, labels) in made_up().items()
    }
    savemat(folder / "emnist-byclass.mat", {"dataset": parts | {"mapping": np.zeros((62, 2))}}, do_compression=True)


WRITERS = {
    "gz": lambda place: write_idx(place / "emnist"),
    "gzip folder": lambda place: write_idx(place / "emnist" / "gzip"),
    "plain": lambda place: write_idx(place / "emnist", ""),
    "MATLAB": lambda place: write_mat(place / "emnist"),
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("SELFFL_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("kind", WRITERS)
def test_all_formats_give_the_upright_letters_a_to_j(place, kind):
    WRITERS[kind](place)
    images, classes = module.images_and_labels()
    assert np.array_equal(images[:, 2, 5], classes + 36)
    assert sorted(images[:, 5, 2].tolist()) == [0] * 1300 + [1] * 400
    upright = {image.tobytes() for part in made_up().values() for image in part[0]}
    assert {image.tobytes() for image in images} <= upright
    assert np.bincount(classes).tolist() == [170] * 10


def test_at_most_so_many_of_a_letter_are_taken_training_part_first(place, monkeypatch):
    write_mat(place / "emnist")
    monkeypatch.setattr(module, "MAX_IMAGES_PER_LETTER", 150)
    images, classes = module.images_and_labels()
    assert np.bincount(classes).tolist() == [150] * 10
    assert (images[:, 5, 2] == 1).sum() == 200


def test_both_formats_are_the_same_federation(place):
    write_mat(place / "emnist")
    one = module.emnist(seed=2, num_clients=20, validation_fraction=0.1)
    write_idx(place / "data" / "emnist")
    assert len(module.files()) == 4  # idx files are taken where there are both
    two = module.emnist(**{key: value for key, value in one.source.items() if key != "name"})
    assert one.source["name"] == "emnist"
    assert one.fingerprint() == two.fingerprint()
    assert one.train.features.shape[1:] == (784,)
    assert (one.train.features.min(), one.train.features.max()) == (0.0, 1.0)
    label = one.train.features.view(-1, 28, 28)[:, 2, 5] * 255 - 36
    assert torch.equal(label.round().long(), one.train.labels)


def test_nothing_there_says_how_to_fetch_it(place):
    with pytest.raises(DataError, match="Run `selffl data fetch emnist`, put it into one of them"):
        module.emnist()


def test_damaged_files_are_refused_in_a_line(place):
    (place / "emnist").mkdir()
    (place / "emnist" / "emnist-byclass.mat").write_bytes(b"MATLAB 5.0 MAT-file" + b"\0" * 300)
    with pytest.raises(DataError, match=r"emnist-byclass.mat cannot be read \(.*\); expected EMNIST's by-class file"):
        module.emnist()
    wrong = {"images": np.zeros((5, 784)), "labels": np.zeros((5, 1))}
    savemat(place / "emnist" / "emnist-byclass.mat", {"dataset": {"train": wrong, "test": wrong}})
    with pytest.raises(DataError, match=r"holds images float64\(5, 784\), 5 labels"):
        module.emnist()
    write_idx(place / "data" / "emnist")
    images = place / "data" / "emnist" / "emnist-byclass-train-images-idx3-ubyte.gz"
    images.write_bytes(gzip.compress(idx(np.zeros((3, 28, 28), np.uint8))))
    with pytest.raises(DataError, match=r"holds images \(3, 28, 28\) for 8060 labels"):
        module.emnist()
