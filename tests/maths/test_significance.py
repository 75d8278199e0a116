"""The corrected resampled t test and Holm's correction, against the papers' formulas and statsmodels."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.multitest import multipletests

from selffl.maths.significance import FRESH_DRAWS, LEVEL, holm_p_values, paired_p_value

NUM_REPEATS, NUM_TRAIN, NUM_TEST = 5, 90, 10


def p_value(gaps, test_per_train):
    gaps = np.asarray(gaps)
    error = gaps.std(ddof=1) / math.sqrt(len(gaps))
    return paired_p_value(float(gaps.mean()), float(error), len(gaps), test_per_train=test_per_train)


def by_hand(gaps, num_train, num_test):
    """Nadeau and Bengio (2003): mean / sqrt((1/J + n2/n1) S^2), against t of J - 1 degrees of freedom."""
    count = len(gaps)
    mean = sum(gaps) / count
    variance = sum((gap - mean) ** 2 for gap in gaps) / (count - 1)
    statistic = mean / math.sqrt((1 / count + num_test / num_train) * variance)
    return 2 * (1 - stats.t.cdf(abs(statistic), count - 1))


@given(
    st.lists(st.floats(-1, 1), min_size=2, max_size=12).filter(lambda gaps: np.std(gaps) > 1e-3),
    st.integers(1, 1000),
    st.integers(1, 1000),
)
def test_the_corrected_test_is_that_of_the_paper(gaps, num_train, num_test):
    assert p_value(gaps, num_test / num_train) == pytest.approx(by_hand(gaps, num_train, num_test), abs=1e-9)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=12).filter(lambda gaps: np.std(gaps) > 1e-3))
def test_over_fresh_draws_it_is_the_plain_paired_t_test(gaps):
    assert p_value(gaps, FRESH_DRAWS) == pytest.approx(stats.ttest_1samp(gaps, 0.0).pvalue, abs=1e-9)


def test_a_p_value_of_3_percent_becomes_one_of_7():
    gaps = (0.011, 0.001, 0.014, 0.003, 0.008)
    assert p_value(gaps, FRESH_DRAWS) == pytest.approx(0.038, abs=0.001)
    assert p_value(gaps, 1 / 9) == pytest.approx(0.070, abs=0.001)


@pytest.mark.parametrize(
    ("mean", "error", "count", "expected"),
    [
        (1.0, math.nan, 1, math.nan),
        (math.nan, 0.1, 5, math.nan),
        (0.0, 0.0, 5, 1.0),
        (0.1, 0.0, 5, 0.0),
        (0.1, 0.0, 1, math.nan),
        (math.nan, 0.0, 5, math.nan),
    ],
)
def test_where_there_is_nothing_to_test(mean, error, count, expected):
    assert paired_p_value(mean, error, count, test_per_train=1 / 9) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 10])
def test_holms_correction_is_that_of_statsmodels(size):
    p_values = (np.random.default_rng(size).uniform(0, 1, size) ** 3).tolist()
    p_values[-1] = p_values[0]  # a tie, where there are two
    assert holm_p_values(p_values) == pytest.approx(multipletests(p_values, method="holm")[1].tolist(), abs=1e-12)


def test_holm_leaves_out_what_was_not_tested():
    found = holm_p_values([math.nan, 0.01, math.nan, 0.04])
    assert found == pytest.approx([math.nan, 0.02, math.nan, 0.04], nan_ok=True)
    assert holm_p_values([]) == []


def test_under_the_null_only_the_corrected_test_keeps_its_level():
    """Two classifiers that are equally good, on five splits of the same hundred rows, over and over.

    Each is fitted to the training rows (a centroid on one of two features that say as much), so that splits differ in
    both what is trained and what is tested; over all populations neither is better.
    """
    rng = np.random.default_rng(0)
    num_rows, trials = NUM_TRAIN + NUM_TEST, 2000
    rejected = {FRESH_DRAWS: 0, NUM_TEST / NUM_TRAIN: 0}
    for _ in range(trials):
        labels = rng.integers(0, 2, num_rows)
        features = labels[:, None] + 1.5 * rng.standard_normal((num_rows, 2))
        gaps = []
        for _ in range(NUM_REPEATS):
            order = rng.permutation(num_rows)
            train, test = order[:NUM_TRAIN], order[NUM_TRAIN:]
            ones, zeros = (features[train][labels[train] == k].mean(0) for k in (1, 0))
            is_right = (features[test] > (ones + zeros) / 2) == labels[test, None]
            gaps.append(np.subtract(*is_right.mean(0)))
        for ratio in rejected:
            rejected[ratio] += p_value(gaps, ratio) < LEVEL
    plain, corrected = (count / trials for count in rejected.values())
    deviation = math.sqrt(LEVEL * (1 - LEVEL) / trials)
    assert plain > LEVEL + 4 * deviation
    assert corrected < LEVEL + 3 * deviation
