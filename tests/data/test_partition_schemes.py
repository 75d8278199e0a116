"""Partitions of pFedMe, FedProx's nist and the common ones: nobody's row twice, sizes as wanted, seeds that decide."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selffl.data import partition
from selffl.data.partition import (
    classes_per_client,
    dirichlet,
    five_of_ten_letters,
    three_classes_by_power_law,
)
from selffl.errors import ConfigError, DataError

CIFAR = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 6000))


def counts_of(client, labels, num_clients, num_classes=10):
    """Rows of each client and class, counted one by one."""
    found = np.zeros((num_clients, num_classes), dtype=int)
    for owner, label in zip(client.tolist(), labels.tolist(), strict=True):
        if owner >= 0:
            found[owner, label] += 1
    return found


# -------------------------------------------------------------------------------------------------------------- pFedMe


def test_pfedmes_numbers_dealt_out_by_hand():
    """The same numbers drawn once more; pools are counted down instead of sliced."""
    for seed, num_clients, factor in ((0, 20, 2), (1, 20, 2), (2, 20, 2), (3, 10, 2), (4, 30, 1)):
        client = three_classes_by_power_law(CIFAR, seed, num_clients)
        rng = np.random.default_rng(seed)
        for label in range(10):
            rng.permutation(np.flatnonzero(label == CIFAR))
        p = rng.lognormal(0.0, 2.0, (10, num_clients, 3))
        more = rng.integers(300, 601, (num_clients, 3))
        left = [6000 - 3 * num_clients] * 10
        expected = np.zeros((num_clients, 10), dtype=int)
        for u in range(num_clients):
            for j in range(3):
                label = (u + j) % 10
                share = p[label, u // (num_clients // 10), j] / p[label].sum()
                n = factor * (int(share * (6000 - num_clients)) + more[u, j])
                expected[u, label] = 10 + (n if n < left[label] else 0)
                left[label] -= expected[u, label] - 10
        assert counts_of(client, CIFAR, num_clients).tolist() == expected.tolist()


def test_pfedmes_clients_have_three_classes_and_ten_images_of_each_at_least():
    counts = counts_of(three_classes_by_power_law(CIFAR, 5), CIFAR, 20)
    for u in range(20):
        assert np.flatnonzero(counts[u]).tolist() == sorted((u + j) % 10 for j in range(3))
    assert counts[counts > 0].min() >= 10
    assert (counts.sum(0) < 6000).all()  # no pool is emptied


def test_the_random_additions_are_300_to_600_both_included():
    rng = np.random.default_rng(0)
    drawn = rng.integers(300, 600, 100_000, endpoint=True)
    assert (drawn.min(), drawn.max()) == (300, 600)
    counts = np.concatenate([counts_of(three_classes_by_power_law(CIFAR, s), CIFAR, 20).ravel() for s in range(4)])
    assert counts[(counts > 10)].min() >= 610  # ten and twice three hundred


def test_what_would_end_the_pool_is_not_given():
    pool, holds = np.arange(6), np.zeros((2, 1), dtype=int)
    for more, expected in (([[4], [9]], [0, 1, -1, -1, -1, -1]), ([[3], [1]], [0, 1, 0, 0, 0, -1])):
        found = partition._some_then_more(6, [pool], holds, 1, np.array(more))
        assert found.tolist() == expected  # one each, then the wishes one after the other


def test_pfedmes_images_must_suffice():
    with pytest.raises(DataError, match="class 0 has 60 images; expected more than 60"):
        three_classes_by_power_law(np.repeat(np.arange(10), 60), 0)
    with pytest.raises(DataError, match="num_clients is 15; expected a multiple of ten"):
        three_classes_by_power_law(CIFAR, 0, num_clients=15)


# ---------------------------------------------------------------------------------------------------- FedProx's nist


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    num_clients=st.integers(1, 60),
    held=st.integers(1, 10),
    rows=st.integers(130, 900),
)
def test_letters_are_dealt_as_wanted_or_scaled_down_alike(seed, num_clients, held, rows):
    labels = np.tile(np.arange(10), rows)
    counts = counts_of(five_of_ten_letters(labels, seed, num_clients, held), labels, num_clients)
    wanted = [max(2, int((v + 5) / held)) for v in np.random.default_rng(seed).lognormal(4, 1, num_clients)]
    for label in range(10):
        holders = [u for u in range(num_clients) if label in [(u + j) % 10 for j in range(held)]]
        assert np.flatnonzero(counts[:, label]).tolist() == holders
        total = sum(wanted[u] for u in holders)
        if total <= rows:
            assert counts[holders, label].tolist() == [wanted[u] for u in holders]
        else:
            rate = (rows - 2 * len(holders)) / (total - 2 * len(holders))
            for u in holders:
                assert counts[u, label] >= 2
                assert abs(counts[u, label] - (2 + rate * (wanted[u] - 2))) <= 1
                assert counts[u, label] <= wanted[u]
            assert rows - len(holders) <= counts[:, label].sum() <= rows


def test_letters_that_are_too_few_are_refused():
    labels = np.repeat(np.arange(10), [50] * 9 + [19])
    with pytest.raises(DataError, match=r"class 9 has 19 rows for 10 clients; expected two each. Take fewer clients"):
        five_of_ten_letters(labels, 0, num_clients=20)
    with pytest.raises(ConfigError, match="classes_per_client is 11; expected 1 to 10"):
        five_of_ten_letters(labels, 0, classes_per_client=11)
    with pytest.raises(ConfigError, match="num_clients is 0; expected 1 or more"):
        five_of_ten_letters(labels, 0, num_clients=0)


# ----------------------------------------------------------------------------------------------------------- Dirichlet


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) > 0),
    num_clients=st.integers(1, 12),
    concentration=st.sampled_from([1e-4, 0.05, 0.5, 3.0, 1e4]),
    least=st.integers(0, 5),
    seed=st.integers(0, 10**6),
)
def test_every_row_has_an_owner_and_everybody_has_the_least(sizes, num_clients, concentration, least, seed):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    if num_clients * least > len(labels):
        with pytest.raises(ConfigError, match=rf"{num_clients} clients with {least} rows want more than the"):
            dirichlet(labels, seed, num_clients, concentration, least)
        return
    client = dirichlet(labels, seed, num_clients, concentration, least)
    assert client.min() >= 0
    assert client.max() < num_clients
    assert np.bincount(client, minlength=num_clients).min() >= least
    assert np.array_equal(client, dirichlet(labels, seed, num_clients, concentration, least))


def test_mending_takes_one_row_at_a_time_from_the_largest(monkeypatch):
    """Proportions by hand: client 0 gets everything, of which the most is class 1."""

    class Fixed:
        permutation = staticmethod(lambda rows: rows)
        dirichlet = staticmethod(lambda alpha: np.eye(len(alpha))[0])

    monkeypatch.setattr(np.random, "default_rng", lambda seed: Fixed)
    labels = np.repeat([0, 1], [5, 7])
    counts = counts_of(dirichlet(labels, 0, 3, 1.0, least=2), labels, 3, 2)
    # 5 + 7: to client 1 go a 1 (7 of it), another 1 (6); then 5 are left of each: a 0, and a 1.
    assert counts.tolist() == [[4, 4], [0, 2], [1, 1]]


def test_the_concentration_says_how_alike_clients_are():
    labels = np.repeat(np.arange(10), 1000)
    alike = counts_of(dirichlet(labels, 0, 10, 1e5), labels, 10)
    assert abs(alike - 100).max() < 10
    apart = counts_of(dirichlet(labels, 0, 10, 1e-3), labels, 10)
    assert (apart.max(0) > 900).all()  # nearly all of a class with one client
    shares = np.concatenate([counts_of(dirichlet(labels, s, 10, 0.5, 0), labels, 10).ravel() for s in range(30)]) / 1000
    variance = 0.1 * 0.9 / (10 * 0.5 + 1)  # of a Dirichlet share
    assert shares.var() == pytest.approx(variance, rel=0.1)


@pytest.mark.parametrize("concentration", [0.0, -1.0, float("nan"), float("inf")])
def test_a_concentration_that_is_none_is_refused(concentration):
    with pytest.raises(ConfigError, match=r"concentration is .*; expected a number above 0"):
        dirichlet(CIFAR, 0, 10, concentration)


# --------------------------------------------------------------------------------------------------- a few classes each


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(20, 60), min_size=1, max_size=7),
    num_clients=st.integers(1, 20),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
def test_a_class_is_shared_evenly_by_its_holders(sizes, num_clients, seed, data):
    held = data.draw(st.integers(1, len(sizes)))
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    client = classes_per_client(labels, seed, num_clients, held)
    counts = counts_of(client, labels, num_clients, len(sizes))
    for label, size in enumerate(sizes):
        holders = [u for u in range(num_clients) if (label - u) % len(sizes) < held]
        assert np.flatnonzero(counts[:, label]).tolist() == holders
        if holders:
            assert counts[:, label].sum() == size
            assert np.ptp(counts[holders, label]) <= 1


def test_balanced_classes_make_clients_of_one_size():
    sizes = np.bincount(classes_per_client(CIFAR, 0, 100, 2))
    assert sizes.tolist() == [600] * 100


def test_more_holders_than_rows_are_refused():
    with pytest.raises(DataError, match="class 0 has 1 rows for 2 clients; expected one each"):
        classes_per_client(np.array([0, 1, 1]), 0, 2, 2)
    with pytest.raises(ConfigError, match="num_held is 3; expected 1 to 2"):
        classes_per_client(np.array([0, 1, 1]), 0, 2, 3)


# ---------------------------------------------------------------------------------------------------------- all of them

SMALL = np.tile(np.arange(10), 700)
EVERY = {
    "two": lambda seed: partition.two_digits_by_power_law(SMALL, seed, num_clients=20),
    "three": lambda seed: three_classes_by_power_law(SMALL, seed),
    "letters": lambda seed: five_of_ten_letters(SMALL, seed),
    "dirichlet": lambda seed: dirichlet(SMALL, seed, 20),
    "classes": lambda seed: classes_per_client(SMALL, seed, 20),
}


@pytest.mark.parametrize("name", EVERY)
def test_the_seed_decides_and_rows_are_drawn_at_random(name):
    first, again, other = (EVERY[name](seed) for seed in (0, 0, 1))
    assert first.dtype == np.int64
    assert first.shape == SMALL.shape
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    place = np.arange(len(SMALL))[first == 0] / len(SMALL)
    assert abs(place.mean() - 0.5) < 5 * (1 / 12 / len(place)) ** 0.5  # from all over the table, not its beginning


@pytest.mark.parametrize("labels", [np.array([0.5, 1.0]), np.array([[0], [1]])])
def test_labels_that_are_no_classes_are_refused(labels):
    with pytest.raises(DataError, match="expected one class number per row"):
        five_of_ten_letters(labels, 0)


def test_an_eleventh_class_is_refused_with_its_row():
    with pytest.raises(DataError, match="label 10 in row 1; expected classes 0 to 9"):
        five_of_ten_letters(np.array([0, 10]), 0)
    with pytest.raises(DataError, match="label -1 in row 0; expected classes 0 to 1"):
        classes_per_client(np.array([-1, 1]), 0, 1)
