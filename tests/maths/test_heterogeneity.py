from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from statsmodels.stats.meta_analysis import combine_effects

import selffl
from selffl.errors import ConfigError, DataError
from selffl.maths.heterogeneity import restricted_log_likelihood
from selffl.maths.hierarchy import read_hierarchy

METHODS = ("dl", "pm", "ml", "reml")

every_method = pytest.mark.parametrize("method", METHODS)


def simulate(seed, num_clients, inter, smallest=0.01, largest=1.0):
    rng = np.random.default_rng(seed)
    variance = np.exp(rng.uniform(np.log(smallest), np.log(largest), num_clients))
    return rng.normal(1.6, np.sqrt(inter + variance)), variance


def dense_restricted_log_likelihood(inter, estimate, variance):
    """log p(contrasts of z): from dense matrices, with an orthonormal basis of what the shared mean does not touch."""
    num_clients = len(estimate)
    basis = np.linalg.svd(np.ones((1, num_clients)))[2][1:]
    covariance = basis @ np.diag(inter + variance) @ basis.T
    contrast = basis @ estimate
    return -0.5 * (np.linalg.slogdet(covariance)[1] + contrast @ np.linalg.solve(covariance, contrast))


def dense_reml(estimate, variance):
    """Maximised on a fine grid over everything between the smallest variance and the widest spread, then polished."""

    def cost(log_inter):
        return -dense_restricted_log_likelihood(np.exp(log_inter), estimate, variance)

    low, high = np.log(variance.min() * 1e-3), np.log(np.ptp(estimate) ** 2 * len(estimate))
    grid = np.linspace(low, high, 600)
    best = grid[np.argmin([cost(point) for point in grid])]
    width = grid[1] - grid[0]
    top = minimize_scalar(cost, bounds=(best - width, best + width), method="bounded", options={"xatol": 1e-10})
    return 0.0 if dense_restricted_log_likelihood(0.0, estimate, variance) >= -top.fun else float(np.exp(top.x))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["dl", "chi2"])
def test_dl_equals_statsmodels(seed, name):
    z, variance = simulate(seed, 12, 0.5)
    want = combine_effects(z, variance, method_re=name).tau2
    assert want > 0
    assert selffl.estimate_inter_variance(z, variance, "dl") == pytest.approx(want, rel=1e-11)


def test_dl_is_zero_where_the_moment_estimate_is_negative():
    z, variance = simulate(1, 12, 0.0)
    z = 1.6 + 0.3 * (z - 1.6)
    assert combine_effects(z, variance, method_re="dl").tau2 < 0
    assert selffl.estimate_inter_variance(z, variance, "dl") == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_balanced_reml_equals_the_mixed_model_of_statsmodels(seed):
    rng = np.random.default_rng(seed)
    num_clients, num_rows = 15, 8
    rows = rng.normal(1.6, 0.8, (num_clients, 1)) + rng.normal(0.0, 0.7, (num_clients, num_rows))
    within = rows.var(1, ddof=1).mean() / num_rows  # MSW / n, REML's own sigma^2 in the balanced case
    found = selffl.estimate_inter_variance(rows.mean(1), within, "reml")
    assert found == pytest.approx(rows.mean(1).var(ddof=1) - within, rel=1e-6)
    groups = np.repeat(np.arange(num_clients), num_rows)
    mixed = sm.MixedLM(rows.ravel(), np.ones((rows.size, 1)), groups).fit(reml=True)
    assert mixed.scale / num_rows == pytest.approx(within, rel=1e-4)
    assert found == pytest.approx(float(mixed.cov_re[0, 0]), rel=1e-3)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("num_clients", "inter"), [(3, 0.5), (8, 0.05), (20, 2.0)])
def test_unbalanced_reml_equals_a_dense_restricted_likelihood(seed, num_clients, inter):
    z, variance = simulate(seed, num_clients, inter)
    want = dense_reml(z, variance)
    assert selffl.estimate_inter_variance(z, variance, "reml") == pytest.approx(want, rel=1e-5, abs=1e-12)


BIMODAL = [  # estimates, variances; found by search
    ([-0.271, -11.221, -0.021], [0.0247, 17.6189, 0.0002]),  # the lower hill is the higher one
    ([-0.396, 0.011, -0.173, -0.017, 0.013, 0.011], [0.0115, 0.0009, 0.0086, 0.0003, 0.0002, 0.0006]),  # the upper one
    ([0.375, -0.05, -9.03, -3.686], [0.0108, 0.001, 13.0966, 4.1095]),
    ([-6.721, -0.928, 1.469, 1.539, 5.618], [14.437, 7.0587, 0.0066, 0.1262, 3.2637]),  # zero beats a hill at 4
]


@pytest.mark.parametrize(("z", "variance"), BIMODAL)
def test_reml_finds_the_higher_of_two_hills(z, variance):
    z, variance = np.array(z), np.array(variance)
    points = np.exp(np.linspace(-18.0, 6.0, 400))
    heights = np.array([dense_restricted_log_likelihood(point, z, variance) for point in points])
    rises = np.flatnonzero(np.diff(np.sign(np.diff(heights))) != 0)
    assert len(rises) >= 2  # more than one turning point: the case is what it says
    found = selffl.estimate_inter_variance(z, variance, "reml")
    assert found == pytest.approx(dense_reml(z, variance), rel=1e-5, abs=1e-12)
    assert dense_restricted_log_likelihood(found, z, variance) >= heights.max() - 1e-9


def test_restricted_log_likelihood_equals_the_dense_one_up_to_a_constant():
    z, variance = simulate(7, 6, 0.5)
    points = [0.0, 1e-3, 0.1, 1.0, 50.0]
    clients = read_hierarchy(z, variance)
    difference = [
        restricted_log_likelihood(point / clients.unit**2, clients)
        - dense_restricted_log_likelihood(point, z, variance)
        for point in points
    ]
    np.testing.assert_allclose(difference, difference[0], atol=1e-10)


@every_method
def test_equal_variances_give_the_sample_variance_less_the_noise(method):
    z = np.array([1.0, 2.0, 6.0, 4.0, 9.0])
    found = selffl.estimate_inter_variance(z, 0.5, method)
    assert found == pytest.approx(z.var(ddof=0 if method == "ml" else 1) - 0.5, rel=1e-7)


@every_method
@pytest.mark.parametrize("value", [0.0, 3.0, -1e6])
def test_zero_where_estimates_agree(method, value):
    assert selffl.estimate_inter_variance([value] * 5, [0.1, 0.2, 0.3, 0.4, 0.5], method) == 0.0


@every_method
def test_zero_where_the_spread_is_no_more_than_the_noise(method):
    assert selffl.estimate_inter_variance([1.0, 1.1, 0.9, 1.05], [1.0, 2.0, 1.5, 1.0], method) == 0.0


def test_reml_takes_clients_without_uncertainty():
    z = np.array([1.0, 2.0, 6.0, 4.0])
    assert selffl.estimate_inter_variance(z, 0.0, "reml") == pytest.approx(z.var(ddof=1), rel=1e-7)
    mixed = [0.0, 0.3, 0.0, 0.5]
    near = selffl.estimate_inter_variance(z, np.maximum(mixed, 1e-9), "reml")
    assert selffl.estimate_inter_variance(z, mixed, "reml") == pytest.approx(near, rel=1e-6)


@every_method
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), factor=st.floats(1e-3, 1e3), shift=st.floats(-10.0, 10.0))
def test_estimate_scales_with_the_square_and_ignores_shifts_and_order(method, seed, factor, shift):
    z, variance = simulate(seed, 9, 0.5)
    order = np.random.default_rng(seed).permutation(9)
    plain = selffl.estimate_inter_variance(z, variance, method)
    moved = selffl.estimate_inter_variance((z[order] + shift) * factor, variance[order] * factor**2, method)
    # A maximum is located to the root of the rounding of its height, about 1e-8 of its width.
    assert moved == pytest.approx(plain * factor**2, rel=1e-5, abs=1e-9 * factor**2)


@every_method
def test_many_clients_recover_the_spread(method):
    z, variance = simulate(8, 4000, 0.5)
    standard_error = np.sqrt(2 / (1 / (0.5 + variance) ** 2).sum())
    slack = 4 if method in ("ml", "reml") else 8  # moments weigh less well
    assert selffl.estimate_inter_variance(z, variance, method) == pytest.approx(0.5, abs=slack * standard_error)


def test_reml_is_the_default():
    z, variance = simulate(9, 10, 0.5)
    found = {method: selffl.estimate_inter_variance(z, variance, method) for method in METHODS}
    assert found["reml"] != found["dl"]
    assert selffl.estimate_inter_variance(z, variance) == found["reml"]


@every_method
@pytest.mark.parametrize("make", [list, np.asarray, torch.tensor])
def test_any_kind_of_array_gives_a_plain_float(method, make):
    found = selffl.estimate_inter_variance(make([1, 2, 6]), make([0.5, 0.5, 0.5]), method)
    assert type(found) is float
    assert found == pytest.approx(14 / 3 - 0.5 if method == "ml" else 6.5, rel=1e-6)


@pytest.mark.parametrize(("gap", "variance"), [(1.0, [1e-12, 1e12]), (1e8, [1e-9, 1e9])])
def test_dl_of_two_clients_of_very_different_certainty_is_the_closed_form(gap, variance):
    want = max(0.0, (gap**2 - sum(variance)) / 2)
    assert selffl.estimate_inter_variance([0.0, gap], variance, "dl") == pytest.approx(want, rel=1e-9)


def test_reml_sees_a_small_spread_beside_clients_that_know_nothing():
    sure, variance = simulate(10, 20, 1e-4, smallest=1e-6, largest=2e-6)
    z, all_variance = np.append(sure, [1e6, -1e6]), np.append(variance, [1e12, 1e12])
    want = selffl.estimate_inter_variance(sure, variance, "reml")
    assert selffl.estimate_inter_variance(z, all_variance, "reml") == pytest.approx(want, rel=0.01)  # found 50 and more


def test_reml_is_zero_beside_one_client_without_uncertainty():
    assert selffl.estimate_inter_variance([1.0, 1.1, 0.9], [0.0, 1.0, 1.0], "reml") == 0.0


@every_method
@pytest.mark.parametrize(
    ("z", "shape"), [([], r"\(0,\)"), ([1.0], r"\(1,\)"), ([[1.0, 2.0]], r"\(1, 2\)"), (1.0, r"\(\)")]
)
def test_fewer_than_two_clients_or_more_than_one_axis_are_named(method, z, shape):
    with pytest.raises(DataError, match=f"local_estimate has shape {shape}; expected at least two clients"):
        selffl.estimate_inter_variance(z, 0.1, method)


@every_method
@pytest.mark.parametrize(
    ("z", "variance"),
    [
        ([1.0, np.nan], [0.1, 0.1]),
        ([1.0, np.inf], [0.1, 0.1]),
        ([1.0, 2.0], [0.1, np.nan]),
        ([1.0, 2.0], [0.1, np.inf]),
        ([1.0, 2.0], [0.1, -0.1]),
    ],
)
def test_numbers_that_cannot_be_are_refused(method, z, variance):
    with pytest.raises(DataError, match=r"finite|0 or more"):
        selffl.estimate_inter_variance(z, variance, method)


def test_message_about_bad_numbers_says_what_was_found():
    with pytest.raises(DataError, match=r"-0\.25"):
        selffl.estimate_inter_variance([1.0, 2.0], [0.1, -0.25])
    with pytest.raises(DataError, match="1 value"):
        selffl.estimate_inter_variance([1.0, np.nan], [0.1, 0.1])


@pytest.mark.parametrize(
    ("z", "variance"), [([1.0, 2.0, 3.0], [0.1, 0.2]), (["a", "b"], [0.1, 0.1]), ([1.0, 2.0], ["a", "b"])]
)
def test_arrays_that_do_not_fit_are_a_data_error(z, variance):
    with pytest.raises(DataError, match=r"shape|numbers"):
        selffl.estimate_inter_variance(z, variance)


def test_reml_refuses_certain_clients_that_agree():
    with pytest.raises(DataError, match="2 clients have variance 0 and the same estimate"):
        selffl.estimate_inter_variance([0.0, 0.0, 2.0], [0.0, 0.0, 1.0])
    assert selffl.estimate_inter_variance([0.0, 0.0, 2.0, 2.1], [0.0, 1e-9, 0.1, 0.0]) > 0.1


def test_dl_refuses_clients_without_uncertainty():
    with pytest.raises(ConfigError, match=r"2 client\(s\) have variance 0"):
        selffl.estimate_inter_variance([1.0, 2.0, 3.0], [0.0, 0.1, 0.0], "dl")


def test_unknown_method_is_quoted_with_the_nearest():
    with pytest.raises(ConfigError, match="unknown inter-variance method 'rml'; did you mean 'reml'"):
        selffl.estimate_inter_variance([1.0, 2.0], [0.1, 0.1], "rml")
