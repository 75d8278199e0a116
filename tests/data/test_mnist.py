import gzip
import hashlib
import struct
import tracemalloc

import numpy as np
import pytest
import torch

from selffl.data import locate
from selffl.data import mnist as module
from selffl.errors import ConfigError, DataError


def digest(fed):
    """SHA-256 of training and test rows, as they lie."""
    found = hashlib.sha256()
    for rows in (fed.train, fed.test):
        for name in ("features", "labels", "offset"):
            found.update(getattr(rows, name).numpy().tobytes())
    return found.hexdigest()


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


ARRAY = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


def test_plain_and_gzipped_files_are_read(tmp_path):
    (tmp_path / "a").write_bytes(idx(ARRAY))
    (tmp_path / "a.gz").write_bytes(gzip.compress(idx(ARRAY)))
    for name in ("a", "a.gz"):
        assert np.array_equal(module.read_idx(tmp_path / name), ARRAY)


def test_the_checksum_is_that_of_the_uncompressed_content(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(idx(ARRAY), compresslevel=1))
    digest = hashlib.md5(idx(ARRAY)).hexdigest()
    assert np.array_equal(module.read_idx(tmp_path / "a.gz", digest), ARRAY)
    with pytest.raises(DataError, match=f"has MD5 {digest}; expected 0000"):
        module.read_idx(tmp_path / "a.gz", "0000")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with nothing"),
        (b"PNG\x00", "begins with 504e4700"),
        (idx(ARRAY)[:7], "ends inside its header"),
        (idx(ARRAY)[:-1], "holds 23 bytes; its header says"),
        (idx(ARRAY) + b"x", "holds more bytes; its header says"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, content, message):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError, match=message):
        module.read_idx(tmp_path / "a")


def test_a_bomb_is_not_unpacked_further_than_its_header_says(tmp_path):
    """64 MB of zeros in 64 kB: as many behind a header that asks for 24 bytes, or for more than any data set has."""
    zeros = bytes(1 << 26)
    (tmp_path / "small.gz").write_bytes(gzip.compress(idx(ARRAY) + zeros))
    huge = bytes([0, 0, 8, 2]) + struct.pack(">II", 1 << 20, 1 << 20)
    (tmp_path / "huge.gz").write_bytes(gzip.compress(huge + zeros))
    tracemalloc.start()
    with pytest.raises(DataError, match=r"holds more bytes; its header says \(2, 3, 4\)"):
        module.read_idx(tmp_path / "small.gz")
    with pytest.raises(DataError, match=r"says that it holds 1,099,511,627,776 bytes; expected at most 1,073,741,824"):
        module.read_idx(tmp_path / "huge.gz")
    assert tracemalloc.get_traced_memory()[1] < 1 << 23
    tracemalloc.stop()


def test_a_gzip_file_with_any_byte_changed_is_refused(tmp_path):
    """A damaged stream fails in several ways, or reads as other bytes: the checksum notices those."""
    digest = hashlib.md5(idx(ARRAY)).hexdigest()
    whole = gzip.compress(idx(ARRAY))
    refused = 0
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0x55
        (tmp_path / "a.gz").write_bytes(damaged)
        try:
            found = module.read_idx(tmp_path / "a.gz", digest)
        except DataError:
            refused += 1
        else:  # the time stamp and the like
            assert np.array_equal(found, ARRAY)
    assert refused > len(whole) - 12


def test_a_cut_gzip_file_is_refused(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(idx(ARRAY))[:-9])
    with pytest.raises(DataError, match="cannot be read"):
        module.read_idx(tmp_path / "a.gz")


def test_files_are_looked_for_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SELFFL_DATA", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = locate.DataFile("set", ("a.gz", "a"), module.read_idx)
    with pytest.raises(DataError, match=r"a\.gz of set was not found in .*named.*Put it into one of them"):
        file.find()
    for place in ("cache/selffl", "data", "named"):  # each found before the one made earlier
        (tmp_path / place / "set").mkdir(parents=True)
        (tmp_path / place / "set" / "a").write_bytes(b"")
        assert file.find().resolve() == tmp_path / place / "set" / "a"


def test_a_federation_of_small_images(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    parts = {}
    for name, count in (("train", 12_000), ("t10k", 3_000)):
        parts[f"{name}-images-idx3-ubyte"] = rng.integers(0, 256, (count, 2, 2), dtype=np.uint8)
        parts[f"{name}-labels-idx1-ubyte"] = np.resize(np.arange(10, dtype=np.uint8), count)
    (tmp_path / "mnist").mkdir()
    for name, array in parts.items():
        (tmp_path / "mnist" / name).write_bytes(idx(array))
    monkeypatch.setenv("SELFFL_DATA", str(tmp_path))
    monkeypatch.setattr(module, "FILES", {name: hashlib.md5(idx(a)).hexdigest() for name, a in parts.items()})
    found = module.mnist(seed=0)
    assert found.num_clients == 1000
    sizes = found.train.num_examples + found.test.num_examples
    assert sizes.min() >= 10
    assert found.train.features.shape[1] == 4
    every = torch.cat([found.train.features, found.test.features])
    assert every.mean(0).abs().max() < 0.05  # standardised over the pool, of which few rows go unused
    assert (every.std(0) - 1).abs().max() < 0.05
    tuned = module.mnist(seed=0, validation_fraction=0.2)
    assert torch.equal(tuned.test.features, found.test.features)
    assert int(tuned.validation.num_examples.sum()) > 2000
    assert tuned.source["validation_fraction"] == 0.2


def test_the_real_files_give_fedproxs_sample():
    try:
        found = module.mnist(seed=0)
    except DataError as error:
        pytest.skip(str(error))
    sizes = found.train.num_examples + found.test.num_examples
    assert sizes.min() == 10
    assert 68_000 < int(sizes.sum()) < 70_000  # published: 69,035
    assert found.train.labels.unique().tolist() == list(range(10))
    assert digest(found) == "8a8ad292033ace56226a05993a346ecdc43e44fb424041a6bcd1e5e7d3bacfaf"  # results rest on it
    options = {"partition": "two-digits", "seed": 0, "test_fraction": 0.1, "validation_fraction": 0.0}
    assert found.source == {"name": "mnist", **options}


def test_pfedbayess_clients_train_on_a_thousand_images_of_five_digits(monkeypatch):
    labels = np.repeat(np.arange(10, dtype=np.uint8), 5100)
    images = np.repeat(labels, 4).reshape(-1, 2, 2) * 25
    monkeypatch.setattr(module, "images_and_labels", lambda: (images, labels))
    fed = module.mnist(partition="five-digits", test_fraction=0.8, seed=3)
    assert fed.num_clients == 10
    assert fed.train.num_examples.tolist() == [1000] * 10
    assert fed.test.num_examples.tolist() == [4000] * 10
    for client, counts in enumerate(fed.class_counts().tolist()):
        assert counts == [1000 * (label // 5 == client % 2) for label in range(10)]
    assert torch.allclose(fed.train.features[:, 0], fed.train.labels * 25 / 127.5 - 1)
    with pytest.raises(ConfigError, match="partition of mnist"):
        module.mnist(partition="three-classes")
