"""The embedded digits: real images, given out once, a few classes to each client."""

import hashlib

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from selffl.data import digits as digits_module
from selffl.data.digits import digits
from selffl.errors import ConfigError

IMAGES, LABELS = load_digits(return_X_y=True)


def all_rows(fed):
    """Features and labels of all clients, training rows first."""
    return torch.cat([fed.train.features, fed.test.features]), torch.cat([fed.train.labels, fed.test.labels])


def sizes(fed):
    return fed.train.num_examples + fed.test.num_examples


def labels_of(fed, client):
    found = []
    for rows in (fed.train, fed.test):
        low, high = rows.offset[client : client + 2].tolist()
        found += rows.labels[low:high].tolist()
    return found


def tensors(fed):
    return [getattr(rows, name) for rows in (fed.train, fed.test) for name in ("features", "labels", "offset")]


@pytest.mark.parametrize(("num_clients", "classes", "seed"), [(40, 3, 0), (10, 2, 1), (100, 5, 2), (1, 10, 3)])
def test_no_image_is_given_out_twice_and_each_has_its_label(num_clients, classes, seed):
    # no two of the images are the same, so an image names its row
    row = {image.tobytes(): number for number, image in enumerate(IMAGES.astype(np.float32))}
    assert len(row) == len(IMAGES)
    features, labels = all_rows(digits(num_clients, classes, seed=seed))
    originals = ((features + 1.0) * 8.0).numpy()
    given = [row[image.tobytes()] for image in originals]
    assert len(set(given)) == len(given)
    assert labels.tolist() == LABELS[given].tolist()


def test_most_images_are_used():
    assert 0.95 * len(IMAGES) < len(all_rows(digits())[0]) <= len(IMAGES)


def test_pixels_lie_between_minus_one_and_one():
    features, labels = all_rows(digits())
    assert features.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert features.shape[1:] == (64,)
    assert (features.min(), features.max()) == (-1.0, 1.0)


@pytest.mark.parametrize(("num_clients", "classes"), [(40, 3), (40, 1), (25, 10), (290, 3), (124, 7)])
def test_each_client_has_its_classes_and_two_images_of_each_at_least(num_clients, classes):
    fed = digits(num_clients, classes)
    assert fed.clients == list(range(num_clients))
    for client in range(num_clients):
        counts = np.bincount(labels_of(fed, client), minlength=10)
        assert set(np.flatnonzero(counts)) == {(client + step) % 10 for step in range(classes)}
        assert counts[counts > 0].min() >= 2


@pytest.mark.parametrize("seed", range(5))
def test_sizes_differ_by_far(seed):
    found = sizes(digits(seed=seed))
    assert found.max() > 5 * found.min()
    assert found.max() > 3 * found.median()  # a long tail, not one small client
    assert (found - found.to(torch.float64).mean() > 0).sum() < 20  # most are below the mean


@pytest.mark.parametrize("test_fraction", [0.0, 0.2, 0.3, 0.7])
def test_the_test_share_is_per_client(test_fraction):
    fed = digits(20, test_fraction=test_fraction)
    share = test_fraction * sizes(fed)
    assert ((fed.test.num_examples - share).abs() <= 0.5).all()
    assert (fed.train.num_examples >= 1).all()


def test_the_same_seed_is_the_same_federation():
    for first, second in zip(tensors(digits(seed=6)), tensors(digits(seed=6)), strict=True):
        assert torch.equal(first, second)


def test_another_seed_is_another_federation():
    one, two = digits(seed=0), digits(seed=1)
    assert sizes(one).tolist() != sizes(two).tolist()
    assert not torch.equal(one.train.features[:6], two.train.features[:6])


def test_the_defaults_are_forty_clients_with_three_digits_and_a_test_share_of_three_tenths():
    for first, second in zip(tensors(digits()), tensors(digits(40, 3, 0.3, 0)), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("classes", [0, -1, 11])
def test_classes_that_do_not_exist_are_refused(classes):
    with pytest.raises(ConfigError, match=f"^classes_per_client is {classes}; expected 1 to 10"):
        digits(classes_per_client=classes)


@pytest.mark.parametrize(("num_clients", "classes", "most"), [(0, 3, 290), (-2, 3, 290), (291, 3, 290), (88, 10, 87)])
def test_more_clients_than_there_are_images_for_are_refused(num_clients, classes, most):
    with pytest.raises(ConfigError, match=f"^num_clients is {num_clients}; expected 1 to {most} with {classes}"):
        digits(num_clients, classes)


@pytest.mark.parametrize("classes", range(1, 11))
def test_as_many_clients_as_are_allowed_all_get_their_images(classes):
    most = int(174 * 10 / (2 * classes))  # the rarest digit has 174 images
    found = sizes(digits(most, classes))
    assert len(found) == most
    assert (found >= 2 * classes).all()
    with pytest.raises(ConfigError):
        digits(most + 1, classes)


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (0, "dc853a3eb3df0dee977eb6c87ac2cf14aff7514affa6c0aac39c32485bbb8c5e"),
        (3, "9d42ac1c32f558f4b487c2a2a1caf22fbadf9b8e9c02d441b96b2a435359c3fd"),
    ],
)
def test_the_split_is_what_it_always_was(seed, expected):
    """Published results rest on it."""
    found = hashlib.sha256()
    for tensor in tensors(digits(seed=seed)):
        found.update(tensor.numpy().tobytes())
    assert found.hexdigest() == expected


def test_rows_for_validation_come_out_of_the_training_rows():
    plain, tuned = digits(), digits(validation_fraction=0.2)
    assert torch.equal(plain.test.features, tuned.test.features)
    assert plain.validation is None
    together = torch.cat([tuned.train.features, tuned.validation.features])
    assert sorted(together.tolist()) == sorted(plain.train.features.tolist())


def test_the_source_makes_it_again():
    fed = digits(12, 4, 0.2, 5, 0.1)
    options = dict(fed.source)
    assert options.pop("name") == "digits"
    for first, second in zip(tensors(fed), tensors(digits(**options)), strict=True):
        assert torch.equal(first, second)


def test_a_bad_test_share_is_refused():
    with pytest.raises(ConfigError, match="test_fraction is 1"):
        digits(test_fraction=1)


def test_the_images_are_scikit_learns(monkeypatch):
    images, labels = digits_module.images_and_labels()
    expected, shown = load_digits(return_X_y=True)
    assert (images == expected).all()
    assert (labels == shown).all()
    assert labels.dtype == shown.dtype
    monkeypatch.setattr(digits_module, "find_spec", lambda name: None)  # should the file ever move
    again, _ = digits_module.images_and_labels()
    assert (again == expected).all()
