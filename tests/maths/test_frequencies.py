"""Class frequencies of clients: against plain loops, moments of the Dirichlet, and a search for the best estimate."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from selffl.maths.frequencies import MAX_SKEW, class_shift, class_shifts, class_skew, row_shift, same_class_rate

counts_of = arrays(np.int64, st.tuples(st.integers(1, 4), st.just(3)), elements=st.integers(0, 6))


def everybodys(weights):
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


@given(counts_of, st.lists(st.floats(0.1, 1.0), min_size=3, max_size=3), st.floats(0.01, 0.99))
def test_shifts_turn_everybodys_frequencies_into_the_clients_own(counts, weights, rho):
    pi, alpha = everybodys(weights), (1.0 - rho) / rho
    found = class_shift(torch.from_numpy(counts).double(), pi, torch.full((len(counts),), rho, dtype=torch.float64))
    for own, shift in zip(counts, found, strict=True):
        expected = [(n + alpha * p) / (own.sum() + alpha) for n, p in zip(own.tolist(), pi.tolist(), strict=True)]
        assert (pi * shift.exp()).tolist() == pytest.approx(expected, rel=1e-9)


@given(counts_of)
def test_nothing_is_shifted_where_clients_do_not_differ_or_have_no_rows(counts):
    pi, none = everybodys([1, 2, 3]), torch.zeros(len(counts), dtype=torch.float64)
    assert (class_shift(torch.from_numpy(counts).double(), pi, none) == 0).all()
    assert (class_shift(torch.zeros(1, 3, dtype=torch.float64), pi, none[:1] + 0.7).abs() < 1e-12).all()


@given(counts_of)
def test_rows_that_train_have_their_own_frequencies_and_no_class_that_they_lack(counts):
    pi = everybodys([1, 2, 3])
    found = row_shift(torch.from_numpy(counts).double(), pi)
    for own, shift in zip(counts, found, strict=True):
        if not own.sum():
            assert shift.tolist() == [0.0] * 3
            continue
        assert (pi * shift.exp()).tolist() == pytest.approx((own / own.sum()).tolist(), rel=1e-9, abs=1e-12)


@given(counts_of)
def test_pairs_of_one_class_are_counted_pair_by_pair(counts):
    found = same_class_rate(torch.from_numpy(counts).double())
    for own, share in zip(counts, found.tolist(), strict=True):
        rows = np.repeat(np.arange(3), own)
        pairs = [a == b for a, b in itertools.combinations(rows, 2)]
        assert share == pytest.approx(np.mean(pairs) if pairs else np.nan, nan_ok=True)


@pytest.mark.parametrize("alpha", [0.3, 2.0, 20.0])
def test_the_skew_is_that_of_the_dirichlet_that_frequencies_were_drawn_from(alpha):
    """Its variance is π(1 − π)/(1 + α); three rows a client are enough, as pairs are unbiased."""
    rng, pi = np.random.default_rng(5), np.array([0.5, 0.3, 0.15, 0.05])
    drawn = rng.dirichlet(alpha * pi, size=40_000)
    counts = torch.from_numpy(rng.multinomial(3, drawn)).double()
    found = class_skew(same_class_rate(counts).mean(), torch.from_numpy(pi))
    assert found.item() == pytest.approx(1.0 / (1.0 + alpha), abs=0.006)


def test_no_linear_estimate_of_a_clients_frequencies_is_better():
    """Frequencies that are no Dirichlet's: one or two of five classes, equally often."""
    rng, num_classes, rows = np.random.default_rng(6), 5, 4
    own = rng.permuted(np.tile([[0.5, 0.5, 0, 0, 0]], (20_000, 1)), axis=1)
    own[::2] = rng.permuted(np.tile([[1.0, 0, 0, 0, 0]], (10_000, 1)), axis=1)
    counts, pi = rng.multinomial(rows, own), torch.full((num_classes,), 0.2, dtype=torch.float64)
    rho = class_skew(same_class_rate(torch.from_numpy(counts).double()).mean(), pi)
    estimate = (pi * class_shift(torch.from_numpy(counts).double(), pi, rho.expand(len(counts))).exp()).numpy()
    least = min(((z * counts / rows + (1 - z) * 0.2 - own) ** 2).mean() for z in np.linspace(0, 1, 101))
    assert ((estimate - own) ** 2).mean() == pytest.approx(least, rel=0.002)


def test_the_skew_stays_within_its_bounds():
    pi = torch.tensor([0.5, 0.5])
    assert class_skew(torch.tensor([0.2, 0.5, 1.0]), pi).tolist() == pytest.approx([0.0, 0.0, MAX_SKEW])
    assert class_skew(torch.tensor(0.0), torch.empty(0)).item() == 0.0


def test_nothing_is_known_of_the_skew_without_pairs_or_where_all_rows_are_of_one_class():
    assert class_skew(torch.tensor([torch.nan, 1.0]), torch.tensor([[0.5, 0.5], [0.0, 1.0]])).tolist() == [0.0, 0.0]


def test_nothing_is_added_for_a_class_that_nobody_has():
    pi, rho = torch.tensor([0.25, 0.0, 0.75], dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    found = class_shift(torch.tensor([2.0, 0.0, 0.0], dtype=torch.float64), pi, rho)
    assert found.tolist() == pytest.approx([np.log(3 / 0.25 * 0.75 / 3), 0.0, np.log(1 / 3)])
    # Frequencies that leave out what a client has are wrong, and are not taken for right.
    assert class_shift(torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64), pi, rho)[1].item() == np.inf


@given(counts_of)
def test_the_shifts_of_all_clients_are_of_pooled_rows_and_of_all_pairs(counts):
    found = class_shifts(torch.from_numpy(counts).double())
    pi = counts.sum(0) / max(counts.sum(), 1)
    pairs = [
        np.mean([a == b for a, b in itertools.combinations(np.repeat(np.arange(3), own), 2)])
        for own in counts
        if own.sum() > 1
    ]
    chance = (pi**2).sum()
    rho = min(max((np.mean(pairs) - chance) / (1 - chance), 0.0), MAX_SKEW) if pairs and chance < 1 else 0.0
    for own, shift in zip(counts, found.tolist(), strict=True):
        expected = [
            np.log((rho * n + (1 - rho) * p) / (rho * own.sum() + 1 - rho) / p) if p else 0.0
            for n, p in zip(own.tolist(), pi.tolist(), strict=True)
        ]
        assert shift == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_federations_side_by_side_are_each_as_alone():
    counts = torch.randint(0, 4, (3, 3, 3), generator=torch.Generator().manual_seed(2)).double()
    pi, rho = torch.tensor([0.2, 0.3, 0.5]).double(), torch.tensor([0.1, 0.5, 0.9]).double()
    for place in range(3):
        torch.testing.assert_close(row_shift(counts, pi)[place], row_shift(counts[place], pi))
        torch.testing.assert_close(class_shift(counts, pi, rho)[place], class_shift(counts[place], pi, rho))
        torch.testing.assert_close(same_class_rate(counts)[place], same_class_rate(counts[place]), equal_nan=True)
