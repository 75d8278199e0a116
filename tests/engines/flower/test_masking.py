"""Masks: the sum is the plain sum, one part looks random, and who drops out takes nothing along and shows nothing."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'selffl[flower]'")

from selffl.engines.flower import masking
from selffl.engines.flower.masking import Member, from_ring, join, least_threshold, split, to_ring, unmask
from selffl.errors import DivergedError, RefusedError

SESSION = "a session"


def members(number, session=SESSION):
    return [Member(bytes([client]) * 32, session, client) for client in range(number)]


def agreed(everybody):
    book = {member.number: member.public_keys for member in everybody}
    threshold = least_threshold(len(book))
    given = {member.number: member.give_shares(book, threshold) for member in everybody}
    kept = {receiver: {sender: given[sender][receiver] for sender in given} for receiver in book}
    return book, threshold, kept


@pytest.mark.parametrize("dropped", [(), (1,), (0, 4)], ids=str)
def test_the_sum_is_that_of_those_who_stay_to_the_stated_precision(dropped):
    everybody = members(5)
    book, threshold, kept = agreed(everybody)
    values = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1e3
    stayed = [member for member in everybody if member.number not in dropped]
    masked = {m.number: to_ring(values[m.number], 5) + m.mask(book, threshold, 1000) for m in stayed}
    revealed = {m.number: m.reveal(book, threshold, kept[m.number], sorted(masked)) for m in stayed}
    found = from_ring(unmask(masked, book, SESSION, threshold, revealed))
    expected = values[[m.number for m in stayed]].sum(0)
    assert (found - expected).abs().max() <= len(stayed) * 2.0**-33 * (1 + 1e-6)
    fewest = dict(itertools.islice(revealed.items(), threshold))
    assert from_ring(unmask(masked, book, SESSION, threshold, fewest)).equal(found)
    if not dropped:  # all masks but the own ones cancel
        seeds = sum(masking.stretch(m.seed, 1000) for m in stayed)
        assert np.array_equal(sum(masked.values()) - seeds, sum(to_ring(row, 5) for row in values))


def test_a_single_part_looks_uniformly_random_whatever_is_in_it():
    first, *_ = everybody = members(3)
    book, threshold, _ = agreed(everybody)
    for values in (torch.zeros(20_000), torch.full((20_000,), 1e8)):
        sent = to_ring(values, 3) + first.mask(book, threshold, 20_000)
        assert stats.kstest(sent / 2.0**64, "uniform").pvalue > 1e-3
        assert stats.chisquare(np.bincount((sent & np.uint64(255)).astype(int), minlength=256)).pvalue > 1e-3
    # Another session, another mask: a round that is asked for again shows no difference of two answers.
    later = members(3, "a later session")
    other, threshold, _ = agreed(later)
    assert not np.any(first.mask(book, threshold, 1000) == later[0].mask(other, threshold, 1000))


def test_all_others_masks_but_the_own_one_leave_a_part_hidden():
    """The server and all but two clients: what is left of one part is the mask that the two share."""
    everybody = members(4)
    book, threshold, _ = agreed(everybody)
    sent = everybody[0].mask(book, threshold, 5000)
    for other in everybody[2:]:
        key = other._derived("masking")
        sent = sent + masking.pair_mask(key, book[0].masking, SESSION, other.number, 0, 5000)
    assert stats.kstest((sent - masking.stretch(everybody[0].seed, 5000)) / 2.0**64, "uniform").pvalue > 1e-3


def test_shares_make_a_secret_and_one_fewer_says_nothing():
    secret = bytes(range(32))
    shares = split(secret, 3, [1, 2, 3, 4, 5])
    for some in itertools.combinations(shares, 3):
        assert join({point: shares[point] for point in some}, 3) == secret
    with pytest.raises(RefusedError, match="2 shares of a secret have come; expected 3"):
        join({1: shares[1], 2: shares[2]}, 3)
    with pytest.raises(RefusedError, match="do not fit together"):
        join({1: shares[1], 2: shares[2], 3: shares[4]}, 3)


def test_a_client_refuses_a_session_in_which_it_would_show():
    first, *_ = everybody = members(5)
    book, threshold, kept = agreed(everybody)
    with pytest.raises(RefusedError, match="2 clients are to be summed"):
        first.mask({0: book[0], 1: book[1]}, 2, 10)
    with pytest.raises(RefusedError, match="2 of them can make a secret"):
        first.give_shares(book, 2)
    with pytest.raises(RefusedError, match="other keys of this client than its own"):
        first.mask(book | {0: book[1]}, threshold, 10)
    with pytest.raises(RefusedError, match="answers of 2 clients of 5; expected 3 or more"):
        first.reveal(book, threshold, kept[0], [0, 1])
    with pytest.raises(RefusedError, match="share of client number 1 cannot be read"):
        first.reveal(book, threshold, kept[0] | {1: kept[1][1]}, [0, 1, 2])


@pytest.mark.parametrize("value", [2.0**31, float("nan"), float("inf")])
def test_what_does_not_fit_is_refused_in_a_line(value):
    with pytest.raises(DivergedError, match=r"to be summed in secret is .*; expected less than 5.36871e\+08"):
        to_ring(torch.tensor([0.0, value]), 4)
