"""Partitions of pFedBayes, pFedGraph and PFLlib, against the same numbers dealt out one by one."""

import numpy as np
import pytest

from selffl.data.partition import capped_dirichlet, class_blocks, evenly
from selffl.errors import ConfigError, DataError

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 600))


def counts_of(client, num_clients):
    """Rows of each client and class, counted one by one."""
    found = np.zeros((num_clients, 10), dtype=int)
    for owner, label in zip(client.tolist(), LABELS.tolist(), strict=True):
        if owner >= 0:
            found[owner, label] += 1
    return found


def test_blocks_of_two_classes_are_shared_evenly_by_the_clients_that_hold_them():
    """pFedGraph's: client i has classes 2 (i mod 5) and the next, and every class two halves."""
    counts = counts_of(class_blocks(LABELS, 3, 10, num_held=2), 10)
    for client in range(10):
        expected = [300 if label // 2 == client % 5 else 0 for label in range(10)]
        assert counts[client].tolist() == expected


def test_blocks_of_five_classes_have_as_many_rows_as_are_asked_for():
    """pFedBayes's: client u has classes (5 u + j) mod 10; what is left belongs to nobody."""
    client = class_blocks(LABELS, 0, 10, num_held=5, rows_each=100)
    counts = counts_of(client, 10)
    for u in range(10):
        held = {(5 * u + j) % 10 for j in range(5)}
        assert counts[u].tolist() == [100 if label in held else 0 for label in range(10)]
    assert (client < 0).sum() == 1000


def test_uneven_blocks_give_away_every_row_and_nobody_but_the_last_more_than_a_share():
    """PFLlib's: the same draws, dealt out by a loop."""
    counts = counts_of(class_blocks(LABELS, 7, 20, num_held=2, is_even=False), 20)
    rng = np.random.default_rng(7)
    for label in range(10):
        rng.permutation(np.flatnonzero(label == LABELS))
    expected = np.zeros((20, 10), dtype=int)
    for label in range(10):
        holders = [u for u in range(20) if label in {(2 * u) % 10, (2 * u + 1) % 10}]
        drawn = rng.integers(15, 150, 3).tolist()  # a tenth of 600 / 4 up to all of it
        for u, number in zip(holders, [*drawn, 600 - sum(drawn)], strict=True):
            expected[u, label] = number
    assert counts.tolist() == expected.tolist()
    assert counts.sum() == 6000


def by_lists(seed, num_clients, concentration, least):
    """As the authors write it: lists of rows by client, drawn again until all are large enough."""
    rng = np.random.default_rng(seed)
    while True:
        pools = [rng.permutation(np.flatnonzero(label == LABELS)) for label in range(10)]
        rows = [[] for _ in range(num_clients)]
        for pool in pools:
            shares = rng.dirichlet([concentration] * num_clients)
            shares = [p if len(own) < 6000 / num_clients else 0.0 for p, own in zip(shares, rows, strict=True)]
            total, cuts, begin = sum(shares), [], 0.0
            for share in shares[:-1]:
                begin += share / total
                cuts.append(int(begin * len(pool) + 1e-6))
            for own, part in zip(rows, np.split(pool, cuts), strict=True):
                own.extend(part.tolist())
        if min(map(len, rows)) >= least:
            return rows


@pytest.mark.parametrize(("num_clients", "least"), [(10, 10), (20, 1), (12, 60)])
def test_dirichlet_clients_that_are_full_get_nothing_more(num_clients, least):
    client = capped_dirichlet(LABELS, 5, num_clients, 0.1, least)
    for number, rows in enumerate(by_lists(5, num_clients, 0.1, least)):
        assert np.flatnonzero(client == number).tolist() == sorted(rows)
    assert (client >= 0).all()
    assert np.bincount(client).min() >= least


def test_clients_alike_have_parts_of_all_rows_in_a_random_order():
    client = evenly(LABELS[:25], 2, 4)
    assert sorted(np.bincount(client).tolist()) == [6, 6, 6, 7]
    assert np.array_equal(client, evenly(LABELS[:25], 2, 4))
    assert not np.array_equal(client, evenly(LABELS[:25], 3, 4))


def test_what_cannot_be_dealt_out_is_refused():
    with pytest.raises(ConfigError, match="as many holders"):
        class_blocks(LABELS, 0, 7, num_held=2)
    with pytest.raises(DataError, match="class 0 has 600 rows for 5 clients; expected 121 for each"):
        class_blocks(LABELS, 0, 10, num_held=5, rows_each=121)
    with pytest.raises(ConfigError, match="may never be drawn"):
        capped_dirichlet(LABELS, 0, 10, 0.1, least=301)
    with pytest.raises(ConfigError, match="concentration is 0"):
        capped_dirichlet(LABELS, 0, 10, 0.0)
