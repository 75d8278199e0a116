"""Each model of grouped rows beside the same model fitted without it."""

import sys
import warnings

import numpy as np
import pytest
import statsmodels.api as sm
from sklearn.linear_model import LinearRegression
from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM

from selffl import SelfFLClassifier, SelfFLRegressor
from selffl.data.multilevel import GroupedRows
from selffl.errors import ConfigError
from selffl.studies.grouped_models import (
    R_INTERCEPTS,
    R_SLOPES,
    fit_estimator,
    fit_lme4,
    fit_means,
    fit_mixed_model,
    fit_per_group,
    fit_pooled,
    is_separable,
    predict_random_effects,
    residual_variance,
    why_no_lme4,
)

NUM_GROUPS = 12


def make_rows(seed=0, is_binary=False, num_groups=NUM_GROUPS, size=12):
    """Groups with an intercept and a first slope of their own; the third feature is the group's."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(num_groups), size)
    features = rng.normal(size=(len(owner), 3))
    features[:, 2] = rng.normal(size=num_groups)[owner]
    own = rng.normal(size=(num_groups, 2))
    score = features @ [1.0, -0.5, 0.3] + 0.8 * own[owner, 0] + 0.4 * own[owner, 1] * features[:, 0]
    noise = rng.normal(size=len(owner)) if not is_binary else rng.logistic(size=len(owner))
    outcome = (score + noise > 0).astype(np.int64) if is_binary else score + noise
    return GroupedRows(features, outcome, np.array([f"group {number:02d}" for number in owner]))


def split(rows):
    """Every fourth row to test, and the last group new."""
    is_test = (np.arange(len(rows.group)) % 4 == 0) | (rows.group == rows.group[-1])
    return rows.at(~is_test), rows.at(is_test)


# ---------------------------------------------------------------------------------------------------------- estimators


@pytest.fixture(scope="module", autouse=True)
def short_closing():
    """Estimates are looked at: clients train as long as the method says."""


@pytest.mark.parametrize("is_binary", [False, True])
def test_the_estimator_answers_as_it_does_by_itself(is_binary):
    train, test = split(make_rows(is_binary=is_binary))
    fit = fit_estimator(train, test, rounds=3)
    alone = (SelfFLClassifier if is_binary else SelfFLRegressor)(rounds=3)
    alone.fit(train.features, train.outcome, client=train.group)
    answer = (lambda *rows, **options: alone.predict_proba(*rows, **options)[:, 1]) if is_binary else alone.predict
    is_new = test.group == test.group[-1]
    assert is_new.any()
    assert np.array_equal(fit.prediction[is_new], answer(test.features[is_new]))
    known = test.at(~is_new)
    assert np.array_equal(fit.prediction[~is_new], answer(known.features, client=known.group))
    if is_binary:
        assert fit.variances == (2.0 * alone.run_.summary["inter_variance"],)
    assert fit.cpu_seconds > 0
    assert fit.note == ""


def test_the_estimators_variance_is_in_the_outcomes_unit():
    """Beside a mixed model: residuals of variance 4 and intercepts of variance 1, of rows in any unit."""
    rng = np.random.default_rng(3)
    owner = np.repeat(np.arange(60), rng.integers(15, 45, 60))
    features = rng.normal(size=(len(owner), 1))
    outcome = rng.normal(size=60)[owner] + 2.0 * rng.normal(size=len(owner))
    train = GroupedRows(features, outcome, np.array([f"group {number:02d}" for number in owner]))
    estimator = SelfFLRegressor(rounds=3).fit(features, outcome, client=train.group)
    found = direct_mixed_model(train, [0])
    assert residual_variance(estimator, train) == pytest.approx(found.scale, rel=0.03)
    fit = fit_estimator(train, train.at(np.arange(5)), rounds=3)
    expected = 2.0 * residual_variance(estimator, train) * estimator.run_.summary["inter_variance"]
    assert fit.variances == pytest.approx((expected,), rel=1e-9)


# -------------------------------------------------------------------------------------------------------- mixed models


def direct_mixed_model(train, varying):
    design = sm.add_constant(train.features)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sm.MixedLM(train.outcome, design, train.group, exog_re=design[:, varying]).fit(
            reml=True, method="powell"
        )


@pytest.mark.parametrize("slopes", [(), (0,)])
def test_the_mixed_model_is_that_of_statsmodels_with_its_random_effects(slopes):
    train, test = split(make_rows())
    fit = fit_mixed_model(train, test, slopes)
    varying = [0, *(1 + slope for slope in slopes)]
    found = direct_mixed_model(train, varying)
    design = sm.add_constant(test.features)
    expected = design @ found.fe_params
    for row, group in enumerate(test.group):
        if group in found.random_effects:
            expected[row] += design[row, varying] @ found.random_effects[group]
    assert np.allclose(fit.prediction, expected, atol=2e-3)  # two optimisers
    assert np.allclose(fit.variances, np.diag(found.cov_re), rtol=0.02)
    assert fit.note == ""


def test_random_effects_are_those_of_the_joint_normal_distribution():
    rng = np.random.default_rng(1)
    design, residual = rng.normal(size=(5, 2)), rng.normal(size=5)
    covariance = np.array([[2.0, 0.3], [0.3, 0.5]])
    precision = np.linalg.inv(covariance) + design.T @ design  # of the effects, given the rows, by Bayes
    assert np.allclose(
        predict_random_effects(design, residual, covariance), np.linalg.solve(precision, design.T @ residual)
    )
    singular = np.diag([1.0, 0.0])
    effects = predict_random_effects(design, residual, singular)
    assert effects[1] == 0
    assert np.isclose(effects[0], design[:, 0] @ residual / (1 + design[:, 0] @ design[:, 0]))


def test_a_mixed_model_that_does_not_converge_gives_way_and_says_so():
    rows = make_rows(num_groups=4, size=4)
    train = GroupedRows(
        np.column_stack([rows.features, rows.features[:, 0]]), rows.outcome, rows.group
    )  # twice the same
    fit = fit_mixed_model(train, train, (0, 3))
    assert fit.note.startswith("did not converge: ")
    assert np.isfinite(fit.prediction).all()


def test_the_mixed_logistic_regression_is_that_of_statsmodels():
    train, test = split(make_rows(is_binary=True))
    fit = fit_mixed_model(train, test)
    groups, owner = np.unique(train.group, return_inverse=True)
    design, indicator = sm.add_constant(train.features), np.eye(len(groups))[owner]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = BinomialBayesMixedGLM(train.outcome, design, indicator, np.zeros(len(groups), int)).fit_vb(
            sd=np.full(design.shape[1] + 1 + len(groups), 0.5)
        )
    effects = np.array([*found.vc_mean, 0.0])
    place = [list(groups).index(group) if group in groups else -1 for group in test.group]
    log_odds = sm.add_constant(test.features) @ found.fe_mean + effects[place]
    assert np.allclose(fit.prediction, 1 / (1 + np.exp(-log_odds)), atol=5e-3)  # from another start
    assert np.allclose(fit.variances, np.exp(2 * found.vcp_mean), rtol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("is_binary", [False, True])
def test_lme4_agrees_with_statsmodels(is_binary):
    if why_no_lme4():
        pytest.skip(why_no_lme4())
    train, test = split(make_rows(is_binary=is_binary, num_groups=20))
    fits = fit_lme4(train, test, (0,))
    assert list(fits) == [R_INTERCEPTS, R_SLOPES]
    for fit, slopes in zip(fits.values(), ((), (0,)), strict=True):
        other = fit_mixed_model(train, test, slopes)
        assert len(fit.variances) == 1 + len(slopes)
        # Two approximations of a likelihood without a closed form, or one likelihood.
        assert np.allclose(fit.prediction, other.prediction, atol=0.1 if is_binary else 2e-3)


def test_without_statsmodels_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "statsmodels.api", None)
    train, test = split(make_rows())
    with pytest.raises(ConfigError, match=r"^statsmodels is not installed; .* \[multilevel\]\.$"):
        fit_mixed_model(train, test)


# --------------------------------------------------------------------------------------------------- plain regressions


def test_the_pooled_regression_is_least_squares():
    train, test = split(make_rows())
    expected = LinearRegression().fit(train.features, train.outcome).predict(test.features)
    assert np.allclose(fit_pooled(train, test).prediction, expected)


def test_the_pooled_logistic_regression_is_maximum_likelihood():
    train, test = split(make_rows(is_binary=True))
    found = sm.Logit(train.outcome, sm.add_constant(train.features)).fit(disp=0)
    assert np.allclose(fit_pooled(train, test).prediction, found.predict(sm.add_constant(test.features)), atol=1e-4)


def test_a_group_has_its_own_regression_where_its_rows_decide_it():
    train, test = split(make_rows())
    few = (train.group == "group 00") & (np.cumsum(train.group == "group 00") > 3)  # three rows stay for three numbers
    train = train.at(~few)
    fit = fit_per_group(train, test)
    pooled = fit_pooled(train, test).prediction
    for group in ("group 00", test.group[-1]):
        assert np.array_equal(fit.prediction[test.group == group], pooled[test.group == group])
    own, asked = train.at(train.group == "group 03"), test.group == "group 03"
    alone = LinearRegression().fit(own.features[:, :2], own.outcome)  # the third feature is one number in a group
    assert np.allclose(fit.prediction[asked], alone.predict(test.features[asked][:, :2]))
    assert fit.note == f"{NUM_GROUPS - 2} of {NUM_GROUPS} groups have one"


@pytest.mark.parametrize(
    ("classes", "expected"),
    [([0, 0, 1, 1], True), ([0, 1, 1, 1], True), ([1, 1, 1, 1], True), ([0, 1, 0, 1], False), ([0, 1, 1, 0], False)],
)
def test_classes_are_separable_where_a_plane_has_no_row_on_its_wrong_side(classes, expected):
    design = np.column_stack([np.ones(4), np.arange(4.0)])
    assert is_separable(design, np.array(classes)) == expected


def test_group_means_are_shares_drawn_towards_everybodys():
    features = np.zeros((5, 1))
    train = GroupedRows(features, np.array([1.0, 3.0, 5.0, 5.0, 6.0]), np.array(list("aabbb")))
    test = GroupedRows(features[:3], np.zeros(3), np.array(list("abc")))
    assert np.allclose(fit_means(train, test).prediction, [2.0, 16 / 3, 4.0])
    train = GroupedRows(features, np.array([1, 1, 0, 0, 1]), np.array(list("aabbb")))
    test = GroupedRows(features[:3], np.zeros(3, dtype=np.int64), np.array(list("abc")))
    assert np.allclose(fit_means(train, test).prediction, [2.6 / 3, 1.6 / 4, 0.6])
