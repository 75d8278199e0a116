"""Clients cut from one set of pictures: whose rows are whose, and that what differs is what a kind says."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from selffl.data import regimes
from selffl.data.regimes import KINDS, regime
from selffl.errors import ConfigError

IMAGES, LABELS = load_digits(return_X_y=True)
# No two of the images are the same, so an image names its row.
ROW = {image.tobytes(): number for number, image in enumerate(IMAGES.astype(np.float32))}


@pytest.fixture
def no_shift(monkeypatch):
    """Cameras that are all alike, so that an image can be found again."""
    for name in ("CONTRAST_SPREAD", "OFFSET_SPREAD", "MAX_NOISE"):
        monkeypatch.setattr(regimes, name, 0.0)


def parts(fed):
    return [part for part in (fed.train, fed.validation, fed.test) if part is not None]


def originals(fed):
    """Of each row given out: its number among the images, its client, and what it is called."""
    features, owner, labels = (
        torch.cat([getattr(part, name) for part in parts(fed)]).numpy() for name in ("features", "owner", "labels")
    )
    rows = np.array([ROW[image.tobytes()] for image in (features + 1.0) * 8.0])
    return rows, owner, labels


def frequencies(fed):
    """Rows of each class ``[clients, classes]``."""
    return sum(np.asarray(fed.class_counts(part)) for part in ("train", "test"))


@pytest.mark.parametrize("sizes", ["even", "lognormal"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("no_shift")
def test_no_row_is_given_out_twice_and_each_keeps_its_label(kind, sizes):
    for seed in (0, 1):
        rows, owner, labels = originals(regime("digits", kind, sizes, seed=seed, validation_fraction=0.2))
        assert len(set(rows)) == len(rows) > 1300
        is_renamed = labels != LABELS[rows]
        if kind != "exchanged":
            assert not is_renamed.any()
            continue
        clients = np.unique(owner[is_renamed])
        assert len(clients) == 14  # of 40, a third
        # All rows of these clients, and by pairs: 0 is called 1 and 1 is called 0.
        assert is_renamed.tolist() == np.isin(owner, clients).tolist()
        swapped = {0: 1, 1: 0, 2: 3, 3: 2, 4: 5, 5: 4, 6: 7, 7: 6, 8: 9, 9: 8}
        assert [swapped[label] for label in LABELS[rows][is_renamed]] == labels[is_renamed].tolist()


def test_a_shift_is_each_clients_own_and_leaves_labels_and_owners_alone():
    fed = regime("digits", "shifted", seed=3)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CONTRAST_SPREAD", "OFFSET_SPREAD", "MAX_NOISE"):
            patch.setattr(regimes, name, 0.0)
        plain = regime("digits", "shifted", seed=3)
    for shifted, as_taken in zip(parts(fed), parts(plain), strict=True):
        assert torch.equal(shifted.labels, as_taken.labels)
        assert torch.equal(shifted.offset, as_taken.offset)
    # A line through each client's pixels: its contrast and its offset are those of a client, and they differ.
    sizes = fed.train.num_examples.tolist()
    lines = np.array(
        [
            np.polyfit(x.numpy().ravel(), y.numpy().ravel(), 1)
            for x, y in zip(plain.train.features.split(sizes), fed.train.features.split(sizes), strict=True)
        ]
    )
    assert np.log(lines[:, 0]).std() == pytest.approx(regimes.CONTRAST_SPREAD, rel=0.3)
    pixel = (IMAGES / 8.0).std()
    assert lines[:, 1].std() / pixel == pytest.approx(regimes.OFFSET_SPREAD, rel=0.3)
    assert abs(np.log(lines[:, 0]).mean()) < 0.2


def test_alike_clients_have_the_frequencies_of_all_rows_and_others_do_not():
    overall = np.bincount(LABELS) / len(LABELS)

    def surprise(kind):
        """The chi-squared statistic over all clients, per degree of freedom: 1 by chance alone."""
        counts = frequencies(regime("digits", kind))
        expected = counts.sum(1, keepdims=True) * overall
        return ((counts - expected) ** 2 / expected).sum() / (len(counts) * 9)

    assert 0.75 < surprise("alike") < 1.25
    found = [surprise(kind) for kind in ("dirichlet-1", "dirichlet-0.3", "dirichlet-0.1")]
    assert 2 < found[0] < found[1] < found[2]


def test_clients_with_a_few_classes_have_the_next_ones_round_and_round():
    counts = frequencies(regime("digits", "few"))
    assert [set(np.flatnonzero(each)) for each in counts[:10]] == [{n, (n + 1) % 10} for n in range(10)]


def test_sizes_are_even_or_spread_and_tiny_clients_have_a_median_of_eight():
    even, spread = (regime("digits", "alike", sizes) for sizes in ("even", "lognormal"))
    assert set(even.train.num_examples.tolist()) == {30}
    assert set(even.test.num_examples.tolist()) == {10}
    sizes = (spread.train.num_examples + spread.test.num_examples).double()
    assert float(sizes.mean()) == pytest.approx(40, abs=1)
    assert float(sizes.log().std()) == pytest.approx(regimes.SIZE_SPREAD, rel=0.3)
    for sizes in ("even", "lognormal"):
        tiny = regime("digits", "tiny", sizes).train.num_examples.double()
        assert abs(float(tiny.median()) - 8) <= 1
        assert len(tiny) > 140


def test_the_same_seed_makes_the_same_federation_and_another_another():
    for kind in KINDS:
        made = [regime("digits", kind, "lognormal", seed=seed).fingerprint() for seed in (5, 5, 6)]
        assert made[0] == made[1] != made[2]


def test_validation_rows_are_taken_from_the_training_rows():
    whole, parted = regime("digits", "alike"), regime("digits", "alike", validation_fraction=0.2)
    assert torch.equal(whole.test.features, parted.test.features)
    assert whole.validation is None
    assert set(parted.validation.num_examples.tolist()) == {8}  # a fifth of the 40 rows that each has
    assert set(parted.train.num_examples.tolist()) == {22}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("digit", "alike"), r"unknown pictures 'digit'; did you mean 'digits'\?"),
        (("digits", "alik"), r"unknown kind 'alik'; did you mean 'alike'\?"),
        (("digits", "alike", "equal"), r"sizes is 'equal'; expected 'even' or 'lognormal'\.$"),
    ],
)
def test_an_unknown_name_is_refused_in_one_line(arguments, message):
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        regime(*arguments)
    assert "\n" not in str(caught.value)


# -------------------------------------------------------------------------------------------------- other pictures


def test_cifar_pictures_have_three_channels_and_keep_their_labels(monkeypatch):
    """Made-up batches: every byte of a picture says which class it is of."""
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.arange(6000) % 10).astype(np.uint8)
    images = (20 * labels)[:, None].repeat(3072, 1).reshape(-1, 3, 32, 32)
    monkeypatch.setattr(regimes.cifar10, "images_and_labels", lambda: (images, labels))
    monkeypatch.setitem(regimes.PICTURES, "cifar10", regimes.PICTURES["cifar10"]._replace(num_clients=12))
    fed = regime("cifar10", "few")
    assert fed.train.features.shape[1:] == (3, 32, 32)
    assert torch.allclose((fed.train.features[:, 0, 0, 0] + 1) * 127.5 / 20, fed.train.labels.float(), atol=1e-4)
    assert [int((each > 0).sum()) for each in fed.class_counts("train")] == [3] * 12
    assert regime("cifar10", "few", is_flat=True).train.features.shape[1:] == (3072,)


def test_mnist_pictures_are_standardised_by_one_scale(monkeypatch):
    rng = np.random.default_rng(0)
    labels = (np.arange(3000) % 10).astype(np.uint8)
    images = rng.integers(0, 200, (3000, 28, 28)).astype(np.uint8)
    images[:, 0, 0] = labels
    monkeypatch.setattr(regimes.mnist, "images_and_labels", lambda: (images, labels))
    monkeypatch.setitem(regimes.PICTURES, "mnist", regimes.PICTURES["mnist"]._replace(num_clients=10))
    fed = regime("mnist", "alike")
    assert fed.train.features.shape[1:] == (1, 28, 28)
    corner = fed.train.features[:, 0, 0, 0] * images.std() + images.mean()
    assert torch.allclose(corner, fed.train.labels.float(), atol=1e-2)


def test_letters_are_the_ten_most_frequent(monkeypatch):
    """Made-up letters: the first pixels count to the number of the letter, in twos."""
    rng = np.random.default_rng(0)
    alphabet = regimes.letters.ALPHABET
    every = rng.integers(0, len(alphabet), 8000)
    bits = (every[:, None] >> np.arange(5) & 1).reshape(-1, 5, 1)
    monkeypatch.setattr(regimes.letters, "files", lambda: [SimpleNamespace(load=lambda: (bits, every))])
    monkeypatch.setitem(regimes.PICTURES, "letters", regimes.PICTURES["letters"]._replace(num_clients=10))
    fed = regime("letters", "alike")
    read = (((fed.train.features > 0) * 2 ** torch.arange(5)).sum(1)).tolist()
    assert [alphabet[number] for number in read] == [regimes.letters.FREQUENT[label] for label in fed.train.labels]
    assert len(set(fed.train.labels.tolist())) == 10
