"""The stand-in for FEMNIST: ten letters, five to a client."""

import hashlib
import string

import numpy as np
import pytest
import torch

from selffl.data import letters as module
from selffl.errors import ConfigError, DataError


@pytest.fixture
def small(tmp_path, monkeypatch):
    """600 made-up pictures of each letter; the first four pixels are the letter's number in bits."""
    rng = np.random.default_rng(0)
    label = rng.permutation(np.repeat(np.arange(26, dtype=np.uint8), 600))
    pictures = rng.integers(0, 2, (len(label), 128), dtype=np.uint8)
    pictures[:, :5] = label[:, None] >> np.arange(5) & 1
    (tmp_path / "ocr_letters").mkdir()
    path = tmp_path / "ocr_letters" / "ocr_letters.npz"
    np.savez(path, bits=np.packbits(pictures, axis=1), label=label)
    monkeypatch.setenv("SELFFL_DATA", str(tmp_path))
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_pictures_keep_their_letters(small):
    fed = module.letters(num_clients=40, scale="bits")
    assert fed.num_clients == 40
    for rows in (fed.train, fed.test):
        assert rows.features.dtype == torch.float32
        assert rows.features.shape[1:] == (128,)
        assert set(rows.features.unique().tolist()) == {0.0, 1.0}
        number = (rows.features[:, :5] * 2.0 ** torch.arange(5)).sum(1).long()
        expected = torch.tensor([string.ascii_lowercase.index(letter) for letter in "acegilnoru"])
        assert torch.equal(number, expected[rows.labels])
    held = fed.class_counts() > 0
    for client in range(40):
        assert set(held[client].nonzero().flatten().tolist()) == {(client + j) % 10 for j in range(5)}


def test_other_letters_and_the_source(small):
    fed = module.letters(seed=3, num_clients=20, chosen="zyxwvutsrq", validation_fraction=0.1, scale="bits")
    number = (fed.train.features[:, :5] * 2.0 ** torch.arange(5)).sum(1).long()
    assert torch.equal(number, 25 - fed.train.labels)
    options = dict(fed.source)
    assert options.pop("name") == "letters"
    assert module.letters(**options).fingerprint() == fed.fingerprint()


def test_pixels_are_standardised_over_all_pictures(small):
    """By hand: the ten letters' pictures, whoever gets them and whether anybody does."""
    bits, standard = (module.letters(num_clients=40, scale=scale) for scale in ("bits", "standard"))
    pictures, labels = module.read_letters(small)
    wanted = np.isin(labels, [string.ascii_lowercase.index(letter) for letter in "acegilnoru"])
    every = pictures[wanted].reshape(-1, 128).astype(np.float64)
    mean, deviation = every.mean(0), np.sqrt(((every - every.mean(0)) ** 2).mean(0))
    expected = (bits.train.features.double().numpy() - mean) / (deviation + 0.001)
    np.testing.assert_allclose(
        standard.train.features.numpy(), expected, atol=2e-4
    )  # float32 sums over thousands of rows
    assert torch.equal(standard.train.labels, bits.train.labels)
    with pytest.raises(ConfigError, match="scale is 'grey'"):
        module.letters(scale="grey")


@pytest.mark.parametrize("chosen", ["abc", "aacegilnor", "ACEGILNORU", "acegilnoruw"])
def test_ten_different_letters_are_wanted(small, chosen):
    with pytest.raises(ConfigError, match=f"^chosen is '{chosen}'; expected ten different letters"):
        module.letters(chosen=chosen)


def test_a_damaged_file_is_refused(small, monkeypatch):
    small.write_bytes(small.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"has SHA-256 .*; expected .*damaged or another file"):
        module.letters()
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(small.read_bytes()).hexdigest())
    with pytest.raises(DataError, match=r"cannot be read"):
        module.letters()


def test_the_real_letters():
    try:
        pictures, labels = module.files()[0].load()
    except DataError as error:
        pytest.skip(str(error))
    assert pictures.shape == (52_152, 16, 8)
    assert np.bincount(labels)[[0, 9, 25]].tolist() == [4034, 189, 1094]  # published counts of a, j and z
    fed = module.letters()
    sizes = fed.num_examples
    assert fed.num_clients == 200
    assert sizes.min() >= 10
    assert 15_000 < int(sizes.sum()) < 21_000
