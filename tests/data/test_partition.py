import numpy as np
import pytest

from selffl.data.partition import two_digits_by_power_law
from selffl.errors import DataError

LABELS = np.repeat(np.arange(10), 400)


def test_every_client_has_its_two_digits_and_no_other():
    client = two_digits_by_power_law(LABELS, seed=0, num_clients=100)
    for user in range(100):
        assert set(LABELS[client == user]) == {user % 10, (user + 1) % 10}


def test_every_client_has_at_least_five_of_both_and_no_row_has_two_owners():
    client = two_digits_by_power_law(LABELS, seed=1, num_clients=100)
    counts = np.array([[np.sum((client == u) & ((u + j) % 10 == LABELS)) for j in range(2)] for u in range(100)])
    assert counts.min() == 5
    assert counts.sum() == np.sum(client >= 0) <= len(LABELS)


def test_sizes_follow_a_power_law_and_use_most_of_the_pool():
    client = two_digits_by_power_law(np.repeat(np.arange(10), 7000), seed=0)
    sizes = np.bincount(client[client >= 0], minlength=1000)
    assert sizes.min() == 10
    assert sizes.max() > 20 * np.median(sizes)
    assert sizes.sum() > 0.97 * 70_000


def test_the_wishes_are_filled_in_order_until_the_pool_would_end():
    """The same numbers drawn once more, dealt out by hand."""
    client = two_digits_by_power_law(LABELS, seed=3, num_clients=20)
    rng = np.random.default_rng(3)
    for digit in range(10):
        rng.permutation(np.flatnonzero(digit == LABELS))
    wish = rng.lognormal(0.0, 2.0, (10, 2, 2))
    wish *= (400 - 20) / wish.sum((1, 2), keepdims=True)
    used = dict.fromkeys(range(10), 20)
    for user in range(20):
        for j in range(2):
            digit = (user + j) % 10
            extra = int(wish[digit, user // 10, j])
            extra = extra if used[digit] + extra < 400 else 0
            used[digit] += extra
            assert np.sum((client == user) & (digit == LABELS)) == 5 + extra


def test_the_seed_decides():
    first, again, other = (two_digits_by_power_law(LABELS, seed, num_clients=50) for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_too_few_images_and_odd_numbers_of_clients_are_refused():
    with pytest.raises(DataError, match="digit 0 has 400 images; expected more than 1000"):
        two_digits_by_power_law(LABELS, 0)
    with pytest.raises(DataError, match="multiple of ten"):
        two_digits_by_power_law(LABELS, 0, num_clients=15)
