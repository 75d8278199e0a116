"""CIFAR-10 in three formats, made up small, and the real one where it is."""

import hashlib
import os
import pickle

import numpy as np
import pytest
import torch
from PIL import Image, features

from selffl.data import cifar10 as module
from selffl.errors import ConfigError, DataError


def made_up(name, count=300):
    """A batch as dictionaries have it: pixels channel by channel, the first of which says the class."""
    rng = np.random.default_rng(list(module.BATCHES).index(name))
    labels = rng.permutation(np.resize(np.arange(10), count))
    pixels = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
    pixels[:, 0] = labels
    return labels.tolist(), pixels


def binary(labels, pixels):
    return b"".join(bytes([label]) + row.tobytes() for label, row in zip(labels, pixels, strict=True))


def write_binary(folder, name, labels, pixels):
    (folder / "cifar-10-batches-bin").mkdir(parents=True, exist_ok=True)
    (folder / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(binary(labels, pixels))


def write_pickle(folder, name, labels, pixels):
    (folder / "cifar-10-batches-py").mkdir(parents=True, exist_ok=True)
    content = {b"batch_label": b"one of six", b"labels": labels, b"data": pixels, b"filenames": [b"a.png"]}
    (folder / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(content, protocol=2))


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("SELFFL_DATA", str(tmp_path))
    monkeypatch.setattr(
        module, "BATCHES", {name: hashlib.md5(binary(*made_up(name))).hexdigest() for name in module.BATCHES}
    )
    return tmp_path / "cifar10"


@pytest.mark.parametrize("write", [write_binary, write_pickle])
def test_pixels_and_classes_are_those_of_the_file(place, write):
    for name in module.BATCHES:
        write(place, name, *made_up(name))
    for name, file in zip(module.BATCHES, module.files(), strict=True):
        labels, pixels = made_up(name)
        batch = file.load()
        assert batch[:, 0].tolist() == labels
        assert np.array_equal(batch[:, 1:], pixels)


def test_batches_are_decoded_once_until_a_file_is_another(place):
    for name in module.BATCHES:
        write_binary(place, name, *made_up(name))
    images, labels = module.images_and_labels()
    again, _ = module.images_and_labels()
    assert np.shares_memory(images, again)
    for array in (images, labels):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    os.utime(module.files()[2].find(), ns=(1, 1))
    read_anew, _ = module.images_and_labels()
    assert not np.shares_memory(images, read_anew)
    assert np.array_equal(images, read_anew)


def test_a_quarter_of_each_clients_images_of_each_class_is_held_out(place):
    for name in module.BATCHES:
        write_binary(place, name, *made_up(name))
    fed = module.cifar10(seed=1)
    assert fed.num_clients == 20
    assert fed.train.features.shape[1:] == (3, 32, 32)
    assert fed.train.features.dtype == torch.float32
    assert (fed.train.features.min(), fed.train.features.max()) == (-1.0, 1.0)
    for rows in (fed.train, fed.test):
        assert torch.equal(((rows.features[:, 0, 0, 0] + 1) * 127.5).round().long(), rows.labels)
    every = fed.class_counts()
    held = torch.zeros_like(every)
    for client in range(20):
        low, high = fed.test.offset[client : client + 2].tolist()
        for label in fed.test.labels[low:high].tolist():
            held[client, label] += 1
    assert ((held - every / 4).abs() <= 0.5).all()
    rows = torch.cat([fed.train.features, fed.test.features])
    assert len({row.numpy().tobytes() for row in rows}) == len(rows)  # nobody's image twice
    options = {"partition": "three-classes", "seed": 1, "test_fraction": 0.25, "validation_fraction": 0.0}
    assert fed.source == {"name": "cifar10", **options}


@pytest.mark.slow
@pytest.mark.skipif(not features.check("webp"), reason="this Pillow has no WebP")
def test_a_mosaic_is_its_tiles(tmp_path):
    rng = np.random.default_rng(0)
    tiles = np.tile(rng.integers(0, 256, (100, 32, 32, 3), dtype=np.uint8), (100, 1, 1, 1))
    tiles[:, 0, 0] = np.arange(10_000)[:, None] // [1, 10, 100] % 256  # which tile it is
    strips = [np.concatenate(list(tiles[100 * row : 100 * row + 100]), axis=1) for row in range(100)]
    mosaic = np.concatenate(strips, axis=0)
    Image.fromarray(mosaic).save(tmp_path / "data_batch_2.webp", lossless=True, quality=0, method=0)
    labels = rng.integers(0, 10, 60_000, dtype=np.uint8)
    np.savez(tmp_path / "labels.npz", train=labels[:50_000], test=labels[50_000:])
    batch = module.read_batch(tmp_path / "data_batch_2.webp")
    assert np.array_equal(batch[:, 0], labels[10_000:20_000])
    assert np.array_equal(batch[:, 1:].reshape(-1, 3, 32, 32), tiles.transpose(0, 3, 1, 2))


def test_a_pickle_that_would_do_something_else_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made by a pickle"),)

    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": Evil()}))
    with pytest.raises(DataError, match=r"it names posix.mkdir, which arrays do not need"):
        module.read_batch(tmp_path / "data_batch_1")
    assert not (tmp_path / "made by a pickle").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.bin", b"x" * 100),
        ("a.webp", b"RIFF"),
        ("a", b""),
        ("a", b"no pickle"),
        ("a", pickle.dumps({})),
        ("a", pickle.dumps([1])),
        ("a", pickle.dumps({b"data": 3, b"labels": [1]})),
    ],
)
def test_files_that_are_no_batches_are_refused_in_a_line(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=r"cannot be read \(.*expected a batch of CIFAR-10") as error:
        module.read_batch(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_damaged_batch_is_refused(place):
    name = next(iter(module.BATCHES))
    labels, pixels = made_up(name)
    pixels[7, 9] ^= 1
    for write in (write_binary, write_pickle):
        write(place, name, labels, pixels)
        with pytest.raises(DataError, match=r"holds a batch of MD5 .*; expected .*It is damaged"):
            module.files()[0].load()


@pytest.mark.slow
def test_the_real_pictures():
    try:
        found = module.cifar10()
    except DataError as error:
        pytest.skip(str(error))
    counts = found.class_counts()
    assert ((counts > 0).sum(1) == 3).all()
    assert counts.sum(0).max() < 6000
    assert 40_000 < int(counts.sum()) < 60_000
    assert found.train.features.mean().abs() < 0.1


@pytest.mark.parametrize(("partition", "num_clients"), [("dirichlet", 10), ("classes", 10), ("alike", 10)])
def test_pfedgraphs_clients_share_the_test_images(place, partition, num_clients):
    for name in module.BATCHES:
        write_binary(place, name, *made_up(name))
    fed = module.cifar10(partition=f"pfedgraph-{partition}", seed=1, validation_fraction=0.2)
    assert fed.num_clients == num_clients
    assert fed.num_examples.sum() - len(fed.test.labels) == 5 * 300
    labels, pixels = made_up("test_batch")
    expected = (pixels.reshape(-1, 3, 1024)[0, :, :3] / 255 - np.array([[0.4914], [0.4822], [0.4465]])) / np.array(
        [[0.2023], [0.1994], [0.2010]]
    )
    for client in range(num_clients):
        begin, end = fed.test.offset[client : client + 2].tolist()
        assert fed.test.labels[begin:end].tolist() == labels
        assert np.allclose(fed.test.features[begin].flatten(1)[:, :3], expected, atol=1e-5)
    with pytest.raises(ConfigError, match="tested on the published test images"):
        module.cifar10(partition=f"pfedgraph-{partition}", test_fraction=0.1)


@pytest.mark.parametrize(
    ("partition", "num_clients"), [("pfllib-dirichlet", 20), ("pfllib-classes", 20), ("knnper", 200)]
)
def test_other_partitions_divide_all_images(place, partition, num_clients):
    for name in module.BATCHES:
        write_binary(place, name, *made_up(name))
    fed = module.cifar10(partition=partition, seed=1, test_fraction=0.25)
    assert fed.num_clients == num_clients
    assert fed.num_examples.sum() == 6 * 300
    assert (fed.train.features.min(), fed.train.features.max()) == (-1.0, 1.0)
    with pytest.raises(ConfigError, match="partition of cifar10"):
        module.cifar10(partition="pfllib")
