"""Meta-analysis of clients: against metafor and statsmodels, dense matrices, quadrature and simulation."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import statsmodels.api as sm
from hypothesis import given, settings
from hypothesis import strategies as st
from published import (
    CISAPRIDE,
    DATA,
    LEFT_OUT_MEAN,
    LEFT_OUT_SPREAD,
    METAFOR,
    METAFOR_BLUP,
    METAFOR_PROFILE,
    METAFOR_SLOPE,
    RAUDENBUSH,
    STUDENTISED,
    WEEKS,
)
from scipy import stats
from statsmodels.stats.meta_analysis import combine_effects

import selffl
from selffl.errors import ConfigError, DataError, SelfFLError

METHODS = ("dl", "pm", "ml", "reml")


def analysis(name, method, **options):
    estimate, variance, covariate = DATA[name]
    return selffl.meta_analysis(estimate, variance, covariate=covariate, method=method, **options)


# --- metafor, statsmodels, pimeta ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "method"), METAFOR)
def test_equals_metafor(name, method):
    m = analysis(name, method)
    test = m.heterogeneity
    found = (
        m.inter_variance, *m.inter_variance_interval, m.mean, m.mean_standard_error, *m.mean_interval,
        test.statistic, test.p_value, 100 * test.i_squared, test.h_squared,
    )  # fmt: skip
    assert found == pytest.approx(METAFOR[name, method], rel=2e-6, abs=1e-9)  # a maximum has half of its digits
    estimate, variance, covariate = DATA[name]
    assert selffl.estimate_inter_variance(estimate, variance, method, covariate=covariate) == m.inter_variance


@pytest.mark.parametrize(("name", "method"), METAFOR_SLOPE)
def test_the_slope_equals_metafor(name, method):
    slope = analysis(name, method).slope
    assert (slope.value, slope.standard_error, *slope.interval, slope.p_value) == pytest.approx(
        METAFOR_SLOPE[name, method], rel=2e-6
    )


@pytest.mark.parametrize(("name", "method"), METAFOR_PROFILE)
def test_the_profile_likelihood_equals_metafor(name, method):
    found = analysis(name, method).inter_variance_profile
    assert found == pytest.approx(METAFOR_PROFILE[name, method], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", METAFOR_BLUP)
def test_personal_means_are_metafors_predictions(name):
    m, (mean, error) = analysis(name, "reml"), METAFOR_BLUP[name]
    assert m.personal_mean == pytest.approx(mean, abs=1e-7)
    assert np.sqrt(m.personal_variance) == pytest.approx(error, abs=1e-7)


def test_leaving_one_out_equals_metafor():
    found = selffl.meta_analysis(*RAUDENBUSH).leave_one_out()
    assert found.mean == pytest.approx(LEFT_OUT_MEAN, abs=1e-7)
    assert found.inter_variance == pytest.approx(LEFT_OUT_SPREAD, abs=1e-7)
    assert found.surprise == pytest.approx(STUDENTISED, rel=1e-5)


def test_printed_numbers_of_the_documentation_of_metafor():
    m = selffl.meta_analysis(*RAUDENBUSH)
    assert round(m.mean / math.sqrt(m.mean_variance), 2) == 1.62
    fixed = selffl.meta_analysis(*DATA["bcg"][:2], inter_variance=0.0)
    assert round(fixed.mean, 4) == -0.4303
    assert [round(analysis("collins", method).inter_variance, 3) for method in ("dl", "ml", "reml")] == [
        0.23, 0.239, 0.301,
    ]  # fmt: skip


def test_cisapride_equals_the_vignette_of_pimeta():
    m = selffl.meta_analysis(*CISAPRIDE, method="dl")
    assert (round(m.inter_variance, 3), round(math.exp(m.mean), 3)) == (0.718, 4.141)


@pytest.mark.parametrize("name", ["raudenbush", "bcg", "collins"])
@pytest.mark.parametrize(("method", "theirs"), [("dl", "dl"), ("pm", "iterated")])
def test_equals_statsmodels(name, method, theirs):
    estimate, variance, _ = DATA[name]
    want = combine_effects(estimate, variance, method_re=theirs, use_t=True, atol=1e-12)
    m = selffl.meta_analysis(estimate, variance, method=method)
    assert m.inter_variance == pytest.approx(want.tau2, rel=1e-6)
    assert m.mean == pytest.approx(want.mean_effect_re, rel=1e-6)
    assert m.mean_standard_error == pytest.approx(want.sd_eff_w_re_hksj, rel=1e-6)
    assert m.mean_interval == pytest.approx(want.conf_int()[3], rel=1e-6)
    assert m.heterogeneity.statistic == pytest.approx(want.q, rel=1e-9)
    if method == "dl":
        assert m.heterogeneity.i_squared == pytest.approx(want.i2, rel=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_the_line_is_that_of_weighted_least_squares(method):
    estimate, variance = RAUDENBUSH
    m = selffl.meta_analysis(estimate, variance, covariate=WEEKS, method=method, new_covariate=10.0)
    want = sm.WLS(estimate, sm.add_constant(WEEKS), weights=1 / (m.inter_variance + variance)).fit()
    # Its estimated scale is Hartung and Knapp's factor.
    assert m.slope.value == pytest.approx(want.params[1], rel=1e-9)
    assert m.slope.standard_error == pytest.approx(want.bse[1], rel=1e-9)
    assert m.slope.interval == pytest.approx(want.conf_int()[1], rel=1e-9)
    assert m.slope.p_value == pytest.approx(want.pvalues[1], rel=1e-8)
    at = want.get_prediction([[1.0, WEEKS.mean()]])
    assert m.mean_interval == pytest.approx(at.conf_int()[0], rel=1e-9)
    there = want.get_prediction([[1.0, 10.0]])
    spread = math.sqrt(m.inter_variance + float(there.var_pred_mean[0]) / want.scale)
    reach = stats.t.ppf(0.975, 19 - 3) * spread
    assert m.prediction_interval == pytest.approx(
        (there.predicted_mean[0] - reach, there.predicted_mean[0] + reach), rel=1e-9
    )


def test_the_prediction_interval_is_that_of_higgins_thompson_and_spiegelhalter():
    estimate, variance = RAUDENBUSH
    m = selffl.meta_analysis(estimate, variance, level=0.9)
    reach = stats.t.ppf(0.95, 17) * math.sqrt(m.inter_variance + 1 / (1 / (m.inter_variance + variance)).sum())
    assert m.prediction_interval == pytest.approx((m.mean - reach, m.mean + reach), rel=1e-12)


# --- Integration over sigma_0^2 --------------------------------------------------------------------------------------


def dense_personal_density(estimate, variance, covariate, client, points):
    """Posterior density of one client's parameter, from dense matrices and adaptive quadrature over sigma_0."""
    num_clients = len(estimate)
    design = np.ones((num_clients, 1)) if covariate is None else np.column_stack([np.ones(num_clients), covariate])

    def joint(deviation):
        total = np.diag(deviation**2 + variance)
        precision = design.T @ np.linalg.solve(total, design)
        coefficients = np.linalg.solve(precision, design.T @ np.linalg.solve(total, estimate))
        residual = estimate - design @ coefficients
        log = np.linalg.slogdet(total)[1] + np.linalg.slogdet(precision)[1]
        height = math.exp(-0.5 * (log + residual @ np.linalg.solve(total, residual)))
        share = deviation**2 / (deviation**2 + variance[client])
        spread = design[client] @ np.linalg.solve(precision, design[client])
        mean = share * estimate[client] + (1 - share) * design[client] @ coefficients
        return height, mean, share * variance[client] + (1 - share) ** 2 * spread

    rows = np.array([joint(deviation) for deviation in np.linspace(0.0, 60.0, 4001)])
    rows[0, 0] /= 2  # the trapezium rule
    weight = rows[:, 0] / rows[:, 0].sum()
    return [weight @ stats.norm.cdf(point, rows[:, 1], np.sqrt(rows[:, 2])) for point in points]


@pytest.mark.slow
@pytest.mark.parametrize("has_covariate", [False, True])
def test_ends_of_personal_intervals_are_quantiles_of_the_dense_posterior(has_covariate):
    rng = np.random.default_rng(3)
    variance = np.array([0.2, 1.0, 0.5, 2.0, 0.1, 0.7, 0.3])
    covariate = rng.normal(size=7) if has_covariate else None
    estimate = rng.normal(1.0, np.sqrt(0.5 + variance))
    m = selffl.meta_analysis(estimate, variance, covariate=covariate, level=0.9)
    for client in (0, 3):
        areas = dense_personal_density(estimate, variance, covariate, client, m.personal_interval[client])
        assert areas == pytest.approx([0.05, 0.95], abs=2e-4)


def test_without_uncertainty_of_the_spread_intervals_are_those_of_the_posterior():
    estimate, variance = RAUDENBUSH
    m = selffl.meta_analysis(estimate, variance, inter_variance=0.02)
    p = selffl.posterior(estimate, variance, 0.02)
    reach = stats.norm.ppf(0.975) * np.sqrt(p.personal_variance)
    np.testing.assert_allclose(m.personal_interval, np.stack([p.personal_mean - reach, p.personal_mean + reach], 1))
    assert not m.is_integrated
    assert m.inter_variance_interval is m.inter_variance_profile is None


def test_many_clients_leave_nothing_to_integrate():
    rng = np.random.default_rng(4)
    variance = rng.uniform(0.1, 1.0, 3000)
    estimate = rng.normal(0.0, np.sqrt(1.0 + variance))
    m = selffl.meta_analysis(estimate, variance)
    reach = stats.norm.ppf(0.975) * np.sqrt(m.personal_variance)
    assert m.is_integrated
    np.testing.assert_allclose(m.personal_interval[:, 0], m.personal_mean - reach, atol=0.01)
    np.testing.assert_allclose(m.personal_interval[:, 1], m.personal_mean + reach, atol=0.01)


# --- The next client -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [1e-3, 0.3, 4.0, 1e3])
@pytest.mark.parametrize("inter_variance", [0.0, 0.5, 20.0])
def test_probability_of_gain_has_its_closed_form_where_the_spread_is_known(own, inter_variance):
    m = selffl.meta_analysis([0.0, 1.0, 3.0], [0.5, 1.0, 2.0], inter_variance=inter_variance, new_variance=own)
    prior = inter_variance + m.mean_variance
    assert m.gain_probability == pytest.approx(0.5 + math.atan(math.sqrt(own / prior) / 2) / math.pi, abs=1e-6)


def test_probability_of_gain_is_how_often_a_client_gains():
    rng = np.random.default_rng(5)
    estimate, variance, own, count = (
        np.array([0.2, 1.4, -0.3, 0.9, 2.2]),
        np.array([0.3, 0.5, 0.2, 0.8, 0.4]),
        0.6,
        10**6,
    )
    m = selffl.meta_analysis(estimate, variance, new_variance=own)
    prior = m.inter_variance + m.mean_variance
    trust = prior / (prior + own)
    # Draw sigma_0 from its posterior on a grid, then the mean, the new client and its error.
    grid = np.linspace(0.0, 40.0, 40_001)
    total = grid[:, None] ** 2 + variance
    precision = (1 / total).sum(1)
    mean = (estimate / total).sum(1) / precision
    log = -0.5 * (np.log(total).sum(1) + np.log(precision) + ((estimate - mean[:, None]) ** 2 / total).sum(1))
    height = np.exp(log - log.max())
    picked = rng.choice(len(grid), count, p=height / height.sum())
    truth = rng.normal(mean[picked], np.sqrt(grid[picked] ** 2 + 1 / precision[picked]))
    error = rng.normal(0.0, math.sqrt(own), count)
    offered = trust * (truth + error) + (1 - trust) * m.mean
    share = (np.abs(offered - truth) < np.abs(error)).mean()
    assert m.gain_probability == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / count))


def test_the_new_clients_variance_is_the_median_unless_it_is_said():
    m = selffl.meta_analysis([0.0, 1.0, 3.0, 2.0], [0.5, 1.0, 2.0, 4.0])
    assert m.new_variance == 1.5
    assert selffl.meta_analysis([0.0, 1.0, 3.0], [0.5, 1.0, 2.0], new_variance=9.0).gain_probability > (
        selffl.meta_analysis([0.0, 1.0, 3.0], [0.5, 1.0, 2.0]).gain_probability
    )


# --- Coverage --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_with_five_clients_integrated_intervals_hold_and_plug_in_intervals_do_not():
    rng = np.random.default_rng(6)
    num_repeats = 120
    plug_in, integrated, means, spreads, nexts = [], [], [], [], []
    for _ in range(num_repeats):
        variance = np.exp(rng.uniform(math.log(0.1), math.log(10.0), 5))
        truth = rng.normal(1.6, 1.0, 5)
        m = selffl.meta_analysis(rng.normal(truth, np.sqrt(variance)), variance)
        plug_in.append(np.mean(np.abs(m.personal_mean - truth) <= 1.96 * np.sqrt(m.personal_variance)))
        integrated.append(np.mean((m.personal_interval[:, 0] <= truth) & (truth <= m.personal_interval[:, 1])))
        means.append(m.mean_interval[0] <= 1.6 <= m.mean_interval[1])
        spreads.append(m.inter_variance_interval[0] <= 1.0 <= m.inter_variance_interval[1])
        nexts.append(m.prediction_interval[0] <= rng.normal(1.6, 1.0) <= m.prediction_interval[1])
    error = np.std(integrated, ddof=1) / math.sqrt(num_repeats)
    assert np.mean(integrated) > 0.95 - 3 * error
    assert np.mean(plug_in) < 0.95 - 6 * error  # what the command printed before
    assert np.mean(means) > 0.9
    assert np.mean(spreads) == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / num_repeats))
    assert np.mean(nexts) > 0.8


# --- Properties ------------------------------------------------------------------------------------------------------

MOVING = ("mean", "mean_interval", "prediction_interval", "personal_mean", "personal_interval")
SQUARED = ("inter_variance", "inter_variance_interval", "mean_variance", "personal_variance")


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000), power=st.integers(-100, 100), shift=st.floats(-10.0, 10.0))
def test_the_analysis_moves_and_scales_with_the_estimates(seed, power, shift):
    rng = np.random.default_rng(seed)
    variance, factor = rng.uniform(0.1, 2.0, 6), 2.0**power
    estimate = rng.normal(0.0, np.sqrt(1.0 + variance))
    plain = selffl.meta_analysis(estimate, variance, method="pm")
    moved = selffl.meta_analysis((estimate + shift) * factor, variance * factor**2, method="pm")
    for name in MOVING:
        np.testing.assert_allclose(
            getattr(moved, name), (np.array(getattr(plain, name)) + shift) * factor, rtol=1e-7, atol=1e-7 * factor
        )
    for name in SQUARED:
        np.testing.assert_allclose(
            getattr(moved, name), np.array(getattr(plain, name)) * factor**2, rtol=1e-6, atol=1e-8 * factor**2
        )
    assert moved.gain_probability == pytest.approx(plain.gain_probability, abs=1e-6)


def test_a_covariate_that_says_everything_leaves_no_spread():
    x = np.arange(8.0)
    m = selffl.meta_analysis(3.0 + 2.0 * x, 0.1, covariate=x, new_covariate=20.0)
    assert (m.inter_variance, m.slope.value, m.mean) == pytest.approx((0.0, 2.0, 10.0))
    assert m.personal_mean == pytest.approx(3.0 + 2.0 * x)
    assert np.mean(m.prediction_interval) == pytest.approx(43.0)
    assert m.new_covariate == pytest.approx(20.0)
    assert selffl.meta_analysis(3.0 + 2.0 * x, 0.1).new_covariate is None
    assert selffl.meta_analysis(3.0 + 2.0 * x, 0.1).inter_variance > 10.0


def test_the_others_personal_means_are_those_of_an_analysis_without_the_client():
    estimate, variance = np.array([1.0, 2.0, 6.0, 3.0, 2.5]), np.array([0.5, 0.4, 0.6, 0.2, 1.0])
    m = selffl.meta_analysis(estimate, variance)
    found = m.leave_one_out()
    kept = [0, 1, 3, 4]
    alone = selffl.meta_analysis(estimate[kept], variance[kept])
    assert found.personal_mean[2, kept] == pytest.approx(alone.personal_mean, rel=1e-6)
    assert found.personal_mean[2, 2] == pytest.approx(alone.mean, rel=1e-6)
    assert found.largest_move[2] == pytest.approx(np.abs(alone.personal_mean - m.personal_mean[kept]).max(), rel=1e-6)


def test_leaving_the_only_other_value_of_a_covariate_out_has_no_answer():
    found = selffl.meta_analysis([1.0, 3.0, 2.0, 6.0], 0.5, covariate=[0, 1, 0, 0]).leave_one_out()
    assert np.isnan(found.mean).tolist() == [False, True, False, False]


# --- What cannot be told ---------------------------------------------------------------------------------------------


def test_two_clients_have_no_prediction_and_no_integration():
    m = selffl.meta_analysis([1.0, 2.0], [0.1, 0.1])
    assert m.prediction_interval is None
    assert not m.is_integrated
    assert selffl.meta_analysis([1.0, 2.0, 4.0], [0.1, 0.1, 0.1]).is_integrated
    with pytest.raises(DataError, match="2 clients found; expected at least 3"):
        m.leave_one_out()


def test_a_lone_client_with_a_given_spread_keeps_what_it_has():
    m = selffl.meta_analysis([2.0], [1.0], inter_variance=1.0)
    assert m.mean_interval is m.heterogeneity is m.prediction_interval is None
    assert (m.mean, m.personal_mean.tolist(), m.gain.tolist()) == (2.0, [2.0], [1.0])


def test_a_client_of_variance_zero_is_where_it_says():
    m = selffl.meta_analysis([1.0, 2.0, 4.0], [0.0, 0.5, 1.0], method="pm")
    assert m.personal_interval[0].tolist() == [1.0, 1.0]
    assert m.personal_mean[0] == 1.0


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([1.0], [1.0]), {}, "expected at least two clients"),
        (([1.0, 2.0], 1.0), {"covariate": [1.0, 2.0]}, "expected at least three clients"),
        (([1.0, 2.0, 3.0], 1.0), {"covariate": [1.0, 1.0, 1.0]}, "covariate is 1 for every client"),
        (([1.0, 2.0, 3.0], 1.0), {"covariate": [1.0, 2.0]}, r"covariate has shape \(2,\)"),
        (([1.0, 2.0, 3.0], 1.0), {"covariate": [1.0, 2.0, np.nan]}, "covariate holds 1 value"),
        (([1.0, 2.0, 3.0], 1.0), {"new_covariate": 1.0}, "new_covariate is given without a covariate"),
        (([1.0, 2.0, 3.0], 1.0), {"level": 1.0}, "level is 1.0; expected a probability"),
        (([1.0, 2.0, 3.0], 1.0), {"level": 0.0}, "level is 0.0; expected a probability"),
        (([1.0, 2.0, 3.0], 1.0), {"level": "x"}, "level is 'x'; expected a probability"),
        (([1.0, 2.0, 3.0], 1.0), {"new_variance": -1}, "new_variance is -1.0; expected a number, 0 or more"),
        (([1.0, 2.0, 3.0], 1.0), {"inter_variance": 10**400}, "inter_variance is a whole number of"),
        (([1.0, 2.0, 3.0], 1.0), {"method": "sj"}, "unknown inter-variance method 'sj'"),
        (([1.0, 2.0, 3.0], [0.0, 0.0, 1.0]), {"inter_variance": 0.0}, "2 clients of variance 0 differ"),
        (([1.0, 2.0, 3.0], [0.0, 0.1, 1.0]), {"method": "ml"}, "without a maximum"),
        (([1.0, 2.0, 3.0], 0.0), {"covariate": [1.0, 2.0, 3.0]}, "estimates on one line"),
    ],
)  # fmt: skip
def test_what_cannot_be_analysed_is_said_in_one_line(arguments, options, message):
    with pytest.raises((DataError, ConfigError), match=message) as caught:
        selffl.meta_analysis(*arguments, **options)
    assert "\n" not in str(caught.value)
    assert "--" not in str(caught.value)


# --- The largest and the smallest floats -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["pm", "reml", "dl"])
def test_estimates_whose_square_no_float_holds_are_one_line(method):
    for z, variance in (([1e300, 2, 3], 1.0), ([1.7e308, -1.7e308], 1.0), ([1e300, 2.0], 5e-324)):
        with pytest.raises(DataError, match=r"local_estimate spans .* whose square no float holds"):
            selffl.estimate_inter_variance(z, variance, method)


@pytest.mark.parametrize("method", METHODS)
def test_the_smallest_variances_give_the_limit(method):
    z = [1.0, 2.0, 6.0]
    want = np.var(z) if method == "ml" else np.var(z, ddof=1)
    assert selffl.estimate_inter_variance(z, 5e-324, method) == pytest.approx(want, rel=1e-6)
    m = selffl.meta_analysis(z, 5e-324, method=method)
    np.testing.assert_allclose(m.personal_interval, np.array([z, z]).T, atol=1e-10)


def test_certain_clients_far_apart_are_one_line():
    with pytest.raises(DataError, match="whose square no float holds"):
        selffl.estimate_inter_variance([1.7e308, 0.0], 0.0)


any_float = st.floats(allow_nan=False, allow_infinity=False)
any_variance = st.floats(min_value=0.0, allow_nan=False, allow_infinity=False)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), num_clients=st.integers(1, 5), method=st.sampled_from(METHODS), is_tame=st.booleans())
def test_finite_numbers_give_an_answer_or_an_error_of_the_family(data, num_clients, method, is_tame):
    values = st.floats(-1e100, 1e100) if is_tame else any_float
    columns = (values, any_variance, values)
    z, variance, x = (data.draw(st.lists(c, min_size=num_clients, max_size=num_clients)) for c in columns)
    options = {
        "covariate": data.draw(st.sampled_from([None, x])),
        "inter_variance": data.draw(st.one_of(st.none(), any_variance)),
    }
    try:
        m = selffl.meta_analysis(z, variance, method=method, **options)
    except SelfFLError:
        return
    for field in dataclasses.fields(m):
        if field.name not in ("method", "slope", "_hierarchy") and getattr(m, field.name) is not None:
            assert not np.isnan(np.array(getattr(m, field.name), dtype=float)).any(), field.name
    assert m.gain_probability is None or 0.0 <= m.gain_probability <= 1.0 + 1e-9
