from __future__ import annotations

from fractions import Fraction
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selffl.maths.variance import Spread

hypothesis_settings = settings(deadline=None, max_examples=60)


def vectors(seed, *shape, offset=0.0):
    return torch.tensor(np.random.default_rng(seed).normal(offset, 1.0, shape))


def updated(rows):
    """Row by row, from nothing."""
    return reduce(Spread.update, rows, Spread.empty(rows[0]))


def two_pass(rows):
    """NumPy's variance, summed over coordinates."""
    return np.asarray(rows).var(axis=-2).sum(-1)


def recursion(rows, is_squared):
    """Appendix C, Eq. (22), literally, for one coordinate; ``is_squared`` is correction D1."""
    mean = variance = 0.0
    for t, x in enumerate(rows, start=1):
        previous, mean = mean, (t - 1) / t * mean + x / t
        step = mean - previous
        variance = (t - 1) / t * variance + (t - 1) / t * (step**2 if is_squared else step) + (x - mean) ** 2 / t
    return variance


def assert_same(found, expected, **tolerance):
    for name in ("count", "mean", "squares"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), **tolerance)


@pytest.mark.parametrize("build", [Spread.of, updated])
@pytest.mark.parametrize("count", [1, 2, 3, 50])
def test_variance_equals_numpy_two_pass(build, count):
    rows = vectors(0, count, 7)
    spread = build(rows)
    assert float(spread.count) == count
    np.testing.assert_allclose(spread.mean, rows.mean(0), rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(spread.variance(), two_pass(rows), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("build", [Spread.of, updated])
def test_a_large_offset_costs_no_more_than_the_rounding_of_the_rows(build):
    rows = vectors(1, 200, 3, offset=1e8)  # the textbook mean of squares minus square of mean is off by 100 % here
    centred = (rows - 1e8).numpy()  # exact: both are doubles within a factor of two
    np.testing.assert_allclose(build(rows).variance(), two_pass(centred), rtol=1e-6)


def test_one_vector_has_no_spread():
    spread = updated(vectors(2, 1, 4))
    assert float(spread.variance()) == 0.0
    assert float(spread.variance("sum")) == 0.0


def test_nothing_has_no_spread():
    spread = Spread.empty(torch.zeros(5, 3))
    assert spread.count.tolist() == [0.0] * 5
    assert spread.variance().tolist() == [0.0] * 5


@hypothesis_settings
@given(st.lists(st.floats(-100.0, 100.0), min_size=1, max_size=30))
def test_equals_the_papers_recursion_with_the_square(rows):
    found = float(updated(torch.tensor(rows, dtype=torch.float64).unsqueeze(-1)).variance())
    assert found == pytest.approx(recursion(rows, is_squared=True), rel=1e-11, abs=1e-10)
    assert found == pytest.approx(float(np.var(rows)), rel=1e-11, abs=1e-10)


def test_d1_the_recursion_as_printed_is_something_else():
    rows = [1.0, 4.0, 2.0, 8.0]
    found = float(updated(torch.tensor(rows, dtype=torch.float64).unsqueeze(-1)).variance())
    assert found == pytest.approx(7.1875)
    assert recursion(rows, is_squared=True) == pytest.approx(7.1875)
    assert abs(recursion(rows, is_squared=False) - found) > 0.1


def test_sum_is_count_times_mean():
    rows = vectors(3, 12, 5)
    for spread in (Spread.of(rows), updated(rows)):
        assert float(spread.variance("mean")) == pytest.approx(float(two_pass(rows)), rel=1e-12)
        assert float(spread.variance("sum")) == pytest.approx(12 * float(two_pass(rows)), rel=1e-12)
        assert float(spread.variance()) == float(spread.variance("mean"))


def test_vectors_count_with_the_sum_over_coordinates():
    rows = torch.tensor([[0.0, 0.0], [2.0, 4.0]])
    assert float(Spread.of(rows).variance()) == 1.0 + 4.0
    assert float(Spread.of(rows).variance("sum")) == 2 * (1.0 + 4.0)


@hypothesis_settings
@given(shards=st.lists(st.integers(0, 6), min_size=1, max_size=8), seed=st.integers(0, 1000), data=st.data())
def test_any_sharding_merged_in_any_order_equals_the_whole(shards, seed, data):
    total = sum(shards)
    rows = vectors(seed, max(total, 1), 3, offset=5.0)[:total]
    ends = np.cumsum(shards)
    parts = [
        updated(rows[end - size : end]) if size else Spread.empty(torch.zeros(3, dtype=torch.float64))
        for size, end in zip(shards, ends, strict=True)
    ]
    order = data.draw(st.permutations(range(len(parts))))
    merged = reduce(Spread.merge, [parts[index] for index in order])
    assert float(merged.count) == total
    if total:
        assert_same(merged, Spread.of(rows), rtol=1e-12, atol=1e-12)


def test_merging_is_associative_and_commutative():
    a, b, c = (Spread.of(vectors(seed, count, 4, offset=seed)) for seed, count in ((4, 3), (5, 8), (6, 1)))
    assert_same(a.merge(b).merge(c), a.merge(b.merge(c)), rtol=1e-13, atol=1e-13)
    assert_same(a.merge(b), b.merge(a), rtol=1e-13, atol=1e-13)


def test_merging_with_nothing_changes_nothing():
    spread = Spread.of(vectors(7, 5, 4, offset=1e8))
    nothing = Spread.empty(spread.mean)
    assert_same(spread.merge(nothing), spread, rtol=0, atol=0)
    assert_same(nothing.merge(spread), spread, rtol=0, atol=0)
    assert_same(nothing.merge(nothing), nothing, rtol=0, atol=0)


def test_cohort_axis_with_a_different_count_for_each_client():
    histories = [vectors(seed, count, 3, offset=seed) for seed, count in ((0, 4), (1, 1), (2, 9), (3, 2))]
    parts = [Spread.of(history) for history in histories]
    cohort = Spread(*(torch.stack([getattr(part, name) for part in parts]) for name in ("count", "mean", "squares")))
    news = vectors(9, 4, 3)
    grown = cohort.update(news)
    assert grown.count.tolist() == [5.0, 2.0, 10.0, 3.0]
    assert grown.mean.shape == (4, 3)
    for m, history in enumerate(histories):
        whole = np.vstack([history, news[m : m + 1]])
        assert float(grown.variance()[m]) == pytest.approx(float(two_pass(whole)), rel=1e-12)
        np.testing.assert_allclose(grown.mean[m], whole.mean(0), rtol=1e-12)


def test_clients_without_history_merge_beside_clients_with_one():
    history = Spread.of(vectors(10, 2, 6, 3))
    seen = torch.tensor([1.0, 0.0], dtype=torch.float64)
    cohort = Spread(history.count * seen, history.mean * seen.unsqueeze(-1), history.squares * seen)
    merged = cohort.merge(history)
    assert merged.count.tolist() == [12.0, 6.0]
    torch.testing.assert_close(merged.variance(), history.variance())


def test_leading_axes_are_independent():
    rows = vectors(11, 2, 5, 8, 3)
    found = Spread.of(rows)
    assert found.count.shape == found.squares.shape == (2, 5)
    assert found.mean.shape == (2, 5, 3)
    np.testing.assert_allclose(found.variance(), two_pass(rows), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept(dtype):
    spread = updated(vectors(12, 5, 3).to(dtype)).merge(Spread.of(vectors(13, 4, 3).to(dtype)))
    for value in (spread.count, spread.mean, spread.squares, spread.variance(), spread.variance("sum")):
        assert value.dtype == dtype


def test_update_leaves_the_old_spread_alone():
    spread = Spread.of(vectors(14, 5, 3))
    before = [value.clone() for value in (spread.count, spread.mean, spread.squares)]
    spread.update(vectors(15, 3)).merge(spread)
    for found, expected in zip((spread.count, spread.mean, spread.squares), before, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_spread_of_no_vectors_is_empty():
    spread = Spread.of(vectors(16, 5, 3))
    assert_same(spread.merge(Spread.of(torch.zeros(0, 3, dtype=torch.float64))), spread)


def exact_sums(numbers, bits):
    """How many floats, which are whole multiples of 2^-bits, their sum and that of their squares, in whole numbers."""
    whole = [int(number) for number in (numbers.double() * 2.0**bits).tolist()]
    return np.array([len(whole), sum(whole), sum(each * each for each in whole)], dtype=object)


def exact_spread(sums, bits):
    """Mean and sum of squared distances of floats with these sums."""
    count, total, squares = sums
    return Fraction(total, count << bits), (squares - Fraction(total**2, count)) / (1 << 2 * bits)


@pytest.mark.parametrize(
    ("dtype", "bits", "of_mean", "of_variance"), [(torch.float32, 14, 3e-4, 1e-3), (torch.float64, 43, 1e-9, 1e-9)]
)
def test_the_millionth_update_is_as_exact_as_the_first(dtype, bits, of_mean, of_variance):
    """Mean 1,000, spread 0.01, against whole numbers.  All updates one by one: 85 s, error 4e-4 and 3e-12."""
    numbers = torch.tensor(1000 + 0.01 * np.random.default_rng(0).standard_normal(1_000_000)).to(dtype)
    spread = Spread.of(numbers[:-2000].unsqueeze(-1))
    # The sum of a million floats is not exact either: begin where two passes would.
    sums = exact_sums(numbers[:-2000], bits)
    mean, squares = exact_spread(sums, bits)
    spread = Spread(spread.count, torch.tensor([float(mean)], dtype=dtype), torch.tensor(float(squares), dtype=dtype))
    for number in numbers[-2000:]:
        spread = spread.update(number.unsqueeze(0))
    mean, squares = exact_spread(sums + exact_sums(numbers[-2000:], bits), bits)
    assert spread.count == 1_000_000
    assert abs(float(spread.mean) - float(mean)) <= of_mean
    assert float(spread.variance()) == pytest.approx(float(squares / 1_000_000), rel=of_variance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_goes_on_counting(dtype):
    spread = Spread.empty(torch.zeros(2, dtype=dtype))
    for number in range(2500):
        spread = spread.update(torch.full((2,), float(number % 2), dtype=dtype))
    assert spread.count == 2500  # in the models' own type it would stay at 2,048 or 256
    assert float(spread.variance()) == pytest.approx(0.5, rel=0.02)


def test_whole_numbers_are_exact_up_to_two_to_the_24():
    last = Spread(torch.tensor(2.0**24 - 1), torch.zeros(1), torch.tensor(1.0))
    assert last.update(torch.zeros(1)).count == 2**24
