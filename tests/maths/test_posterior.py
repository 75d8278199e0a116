from __future__ import annotations

import dataclasses
import os
import sys
import zlib
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from statsmodels.stats.meta_analysis import combine_effects

import selffl
from selffl.errors import ConfigError, DataError
from selffl.maths import posterior as maths

FORMS = ("paper", "exact")
EPSILON = 2.0**-52

both_forms = pytest.mark.parametrize("form", FORMS)
hypothesis_settings = settings(deadline=None, max_examples=int(os.environ.get("SELFFL_EXAMPLES", "30")))


# --- Oracles: none of them uses a formula or a function of src -------------------------------------------------------


def dense_posterior(z, variance, inter, tied=None):
    """Mean and covariance of (theta_0, theta_1 .. theta_M) given z, from the joint precision matrix.

    ``tied`` is the paper's postulated model for that client: theta_tied and theta_0 are one and the same variable.
    """
    num_clients = len(z)
    precision = np.zeros((num_clients + 1, num_clients + 1))
    linear = np.zeros(num_clients + 1)
    for m in range(num_clients):
        own = 0 if m == tied else m + 1
        precision[own, own] += 1 / variance[m]
        linear[own] += z[m] / variance[m]
        if m != tied:
            precision[np.ix_([0, own], [0, own])] += np.array([[1.0, -1.0], [-1.0, 1.0]]) / inter
    free = [index for index in range(num_clients + 1) if tied is None or index != tied + 1]
    covariance = np.linalg.inv(precision[np.ix_(free, free)])
    return covariance @ linear[free], np.diag(covariance)


def dense_oracle(z, variance, inter, form):
    """Every output, one coordinate at a time, as [M, P] and [P] arrays."""
    z, variance, inter = np.broadcast_arrays(z, variance, inter)
    shape = z.shape
    out = {name: np.empty(shape) for name in ("personal_mean", "personal_variance", "initial")}
    out |= {name: np.empty(shape[1]) for name in ("global_mean", "global_variance")}
    for p in range(shape[1]):
        column = z[:, p], variance[:, p], inter[0, p]
        mean, spread = dense_posterior(*column)
        out["global_mean"][p], out["global_variance"][p] = mean[0], spread[0]
        out["personal_mean"][:, p], out["personal_variance"][:, p] = mean[1:], spread[1:]
        for m in range(shape[0]):
            others = np.arange(shape[0]) != m
            rest, _ = dense_posterior(z[others, p], variance[others, p], inter[0, p])
            out["initial"][m, p] = rest[0]
            if form == "paper":
                mean, spread = dense_posterior(*column, tied=m)
                out["personal_mean"][m, p], out["personal_variance"][m, p] = mean[0], spread[0]
    out["gain"] = variance / out["personal_variance"]
    out["local_weight"] = out["personal_variance"] / variance
    return out


@dataclasses.dataclass
class Exact:
    """One client's quantities in rational arithmetic, and the largest terms of the sums they come from."""

    others_variance: Fraction
    initial: Fraction
    prior_variance: Fraction
    local_weight: Fraction
    personal_mean: Fraction
    personal_variance: Fraction
    others_term: Fraction  # largest |w_k z_k| / S_m among the others
    own_term: Fraction  # |w_m z_m| / S_m


def exact_client(z, variance, inter, form, m):
    z, variance, inter = [Fraction(x) for x in z], [Fraction(x) for x in variance], Fraction(inter)
    weight = [1 / (inter + x) for x in variance]
    others = [k for k in range(len(z)) if k != m]
    total = sum(weight[k] for k in others)
    initial = sum(weight[k] * z[k] for k in others) / total
    prior = 1 / total + (inter if form == "exact" else 0)
    own = prior / (prior + variance[m])
    return Exact(
        others_variance=1 / total,
        initial=initial,
        prior_variance=prior,
        local_weight=own,
        personal_mean=own * z[m] + (1 - own) * initial,
        personal_variance=own * variance[m],
        others_term=max(abs(weight[k] * z[k]) for k in others) / total,
        own_term=abs(weight[m] * z[m]) / total,
    )


def assert_matches_rationals(z, variance, inter, form):
    p = selffl.posterior(z, variance, inter, form)
    total = torch.tensor(inter + np.asarray(variance, dtype=np.float64)).unsqueeze(-1)
    others_variance = maths.others_variance(total).squeeze(-1).tolist()
    weight = [1 / (Fraction(inter) + Fraction(x)) for x in variance]
    terms = [w * Fraction(x) / sum(weight) for w, x in zip(weight, z, strict=True)]
    assert abs(Fraction(float(p.global_variance)) * sum(weight) - 1) <= Fraction(1e-12)
    assert abs(Fraction(float(p.global_mean)) - sum(terms)) <= Fraction(1e-12) * max(abs(term) for term in terms)
    for m in range(len(z)):
        want = exact_client(z, variance, inter, form, m)

        def close(found, expected, slack=Fraction(0)):
            return abs(Fraction(float(found)) - expected) <= Fraction(1e-12) * abs(expected) + slack

        # Sums of positive terms have no cancellation: a relative bound.
        assert close(others_variance[m], want.others_variance)
        assert close(p.prior_variance[m], want.prior_variance)
        assert close(p.local_weight[m], want.local_weight)
        assert close(p.gain[m], 1 / want.local_weight)
        assert close(p.personal_variance[m], want.personal_variance)
        # A mean of terms of either sign can cancel to nothing, so its error is compared with the largest term.  Two
        # roundings are inherent in the formulas used: Eq. (12) takes the client's own term out of the global mean
        # (a few ulps of that term), and k_m is a float (an ulp of k_m moves the mean by an ulp of the others' term).
        slack = Fraction(1e-12) * want.others_term + Fraction(8 * EPSILON) * want.own_term
        assert abs(Fraction(float(p.initial[m])) - want.initial) <= slack
        share = want.local_weight
        largest = max(share * abs(Fraction(z[m])), (1 - share) * want.others_term)
        slack = Fraction(1e-12) * largest + Fraction(4 * EPSILON) * want.others_term
        assert abs(Fraction(float(p.personal_mean[m])) - want.personal_mean) <= slack


def federation(seed, num_clients, num_params=None):
    rng = np.random.default_rng(seed)
    shape = (num_clients,) if num_params is None else (num_clients, num_params)
    return rng.normal(1.0, 2.0, shape), rng.uniform(0.05, 3.0, shape), rng.uniform(0.1, 2.0)


# --- 1a. Dense solve of the joint Gaussian ---------------------------------------------------------------------------

SHAPES = [  # local_estimate, intra_variance, inter_variance -> shape of the variances that come out
    ((7,), (), (), (7,)),
    ((7,), (7,), (), (7,)),
    ((7, 3), (), (), (7,)),
    ((7, 3), (7,), (), (7,)),
    ((7, 3), (7, 3), (), (7, 3)),
    ((7, 3), (), (3,), (7, 3)),
    ((7, 3), (7,), (3,), (7, 3)),
    ((7, 3), (7, 3), (3,), (7, 3)),
    ((3, 3), (3,), (), (3,)),
    ((2, 1), (2,), (1,), (2, 1)),
]


@both_forms
@pytest.mark.parametrize(("estimate_shape", "intra_shape", "inter_shape", "spread_shape"), SHAPES)
def test_equals_dense_solve_of_the_joint_gaussian(form, estimate_shape, intra_shape, inter_shape, spread_shape):
    rng = np.random.default_rng(zlib.crc32(repr((estimate_shape, intra_shape, inter_shape)).encode()))
    z = rng.normal(1.0, 2.0, estimate_shape)
    intra, inter = rng.uniform(0.05, 3.0, intra_shape), rng.uniform(0.1, 2.0, inter_shape)
    p = selffl.posterior(z, intra, inter, form)

    coordinates = estimate_shape[1:]
    per_client = {"personal_mean": estimate_shape, "initial": estimate_shape}
    per_client |= dict.fromkeys(("personal_variance", "gain", "local_weight"), spread_shape)
    whole = {"global_mean": coordinates, "global_variance": spread_shape[1:]}
    block = z.reshape(estimate_shape[0], -1)
    by_client = intra[:, None] if intra.ndim == 1 else intra
    want = dense_oracle(block, by_client, inter, form)
    for name, shape in per_client.items():
        found = getattr(p, name)
        assert found.shape == shape
        np.testing.assert_allclose(found.reshape(estimate_shape[0], -1) + 0 * block, want[name], rtol=1e-10, atol=1e-12)
    for name, shape in whole.items():
        found = getattr(p, name)
        assert found.shape == shape
        np.testing.assert_allclose(found.reshape(-1) + 0 * block[0], want[name], rtol=1e-10, atol=1e-12)
    assert p.form == form
    assert p.prior_variance.shape == p.intra_variance.shape == spread_shape
    np.testing.assert_array_equal(p.intra_variance.reshape(estimate_shape[0], -1) + 0 * block, by_client + 0 * block)


@both_forms
def test_two_clients_worked_by_hand(form):
    # w = 1/(1+1), 1/(1+3); the others' variance is 4 for client 0 and 2 for client 1.
    p = selffl.posterior([0.0, 6.0], [1.0, 3.0], 1.0, form)
    assert float(p.global_mean) == pytest.approx(2.0, rel=1e-15)
    assert float(p.global_variance) == pytest.approx(4 / 3, rel=1e-15)
    assert p.initial.tolist() == [6.0, 0.0]
    prior = {"paper": [4.0, 2.0], "exact": [5.0, 3.0]}[form]
    assert p.prior_variance == pytest.approx(prior)
    assert p.local_weight == pytest.approx([prior[0] / (prior[0] + 1), prior[1] / (prior[1] + 3)])
    assert p.personal_mean == pytest.approx([6 / (prior[0] + 1), 6 * prior[1] / (prior[1] + 3)])


def test_exact_is_the_default_form():
    z, variance, inter = federation(0, 4)
    default = selffl.posterior(z, variance, inter)
    assert default.form == "exact"
    np.testing.assert_array_equal(default.gain, selffl.posterior(z, variance, inter, "exact").gain)
    assert (default.gain < selffl.posterior(z, variance, inter, "paper").gain).all()


@both_forms
def test_independent_federations_can_be_stacked_in_front(form):
    rng = np.random.default_rng(5)
    z, variance = torch.tensor(rng.normal(size=(2, 3, 6, 4))), torch.tensor(rng.uniform(0.1, 2.0, (2, 3, 6, 1)))
    inter = torch.tensor(rng.uniform(0.1, 2.0, (2, 3, 1, 1)))
    mean, spread = maths.global_posterior(z, inter + variance)
    personal = maths.personal_posterior(z, variance, inter, form)
    assert mean.shape == (2, 3, 4)
    assert spread.shape == (2, 3, 1)
    for index in np.ndindex(2, 3):
        p = selffl.posterior(z[index], variance[index].squeeze(-1), inter[index].item(), form)
        torch.testing.assert_close(mean[index], p.global_mean)
        torch.testing.assert_close(spread[index].squeeze(-1), p.global_variance)
        want = p.personal_mean, p.personal_variance, p.local_weight, p.initial, p.prior_variance
        for found, expected in zip(personal, want, strict=True):
            torch.testing.assert_close(found[index].squeeze(-1) if expected.ndim == 1 else found[index], expected)


# --- 1b. Random-effects meta-analysis --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_global_posterior_is_the_random_effects_estimate_of_statsmodels(seed):
    rng = np.random.default_rng(seed)
    variance = rng.uniform(0.05, 1.0, 15)
    z = rng.normal(0.0, np.sqrt(1.0 + variance))
    meta = combine_effects(z, variance, method_re="dl")
    assert meta.tau2 > 0.1
    p = selffl.posterior(z, variance, meta.tau2)
    assert float(p.global_mean) == pytest.approx(meta.mean_effect_re, rel=1e-12)
    assert float(p.global_variance) == pytest.approx(meta.var_eff_w_re, rel=1e-12)


def test_global_posterior_without_spread_is_the_fixed_effects_estimate_of_statsmodels():
    z, variance, _ = federation(1, 15)
    meta = combine_effects(z, variance, method_re="dl")
    p = selffl.posterior(z, variance, 0.0)
    assert float(p.global_mean) == pytest.approx(meta.mean_effect_fe, rel=1e-12)
    assert float(p.global_variance) == pytest.approx(meta.var_eff_w_fe, rel=1e-12)


# --- 1c. Rational arithmetic -----------------------------------------------------------------------------------------

magnitudes = st.floats(-12.0, 12.0).map(lambda exponent: float(10.0**exponent))
signed_magnitudes = st.one_of(st.just(0.0), magnitudes, magnitudes.map(lambda value: -value))
inter_variances = st.one_of(st.just(0.0), magnitudes)


@st.composite
def federations(draw, min_clients=2, max_clients=7):
    num_clients = draw(st.integers(min_clients, max_clients))
    z = draw(st.lists(signed_magnitudes, min_size=num_clients, max_size=num_clients))
    variance = draw(st.lists(magnitudes, min_size=num_clients, max_size=num_clients))
    return z, variance, draw(inter_variances)


@both_forms
@hypothesis_settings
@given(case=federations())
@example(case=([1.0, -2.0, 3.0], [1e-12, 1e8, 1e12], 0.0))  # one client holds all but 1e-20 of the precision
@example(case=([1e6, -2e-6, 3.0], [1e8, 1e-12, 1e12], 0.0))
@example(case=([5.0, 5.0, -7.0, -7.0], [1e-12, 1e-12, 1e12, 1e12], 1e-12))
@example(case=([1e12, 1e-12], [1.0, 1.0], 1.0))
def test_equals_rational_arithmetic_over_24_orders_of_magnitude(form, case):
    assert_matches_rationals(*case, form)


@both_forms
def test_client_that_holds_all_but_1e_minus_20_of_the_precision_still_sees_the_others(form):
    z, variance = [3.0, 7.0, 9.0], [1e-8, 2e12, 2e12]
    p = selffl.posterior(z, variance, 0.0, form)
    assert p.initial[0] == pytest.approx(8.0, rel=1e-14)
    assert p.prior_variance[0] == pytest.approx(1e12, rel=1e-14)
    assert p.gain[1] == pytest.approx(2e20, rel=1e-12)
    assert p.local_weight[1] == pytest.approx(5e-21, rel=1e-12, abs=0)


# --- 1d. Local steps -------------------------------------------------------------------------------------------------


def steps_in_high_precision(own_variance, other_variance, inter, form, learning_rate, batch_size):
    with mpmath.workdps(80):
        own, other, inter = mpmath.mpf(own_variance), mpmath.mpf(other_variance), mpmath.mpf(inter)
        prior = other + inter * (2 if form == "exact" else 1)
        left = 1 - mpmath.mpf(learning_rate) / (batch_size * own)
        return mpmath.log(own / (own + prior)) / mpmath.log(left)


@both_forms
@pytest.mark.parametrize("contraction", [1e-18, 1e-9, 1e-3, 0.5, 0.99])
@pytest.mark.parametrize(
    ("own", "other", "inter"),
    [
        (1e12, 1e-12, 0.0),
        (1e12, 1e-12, 1e-12),
        (1e-12, 1e12, 0.0),
        (1e-12, 1.0, 1e12),
        (0.1, 0.2, 1.0),
        (1.0, 1e-9, 0.0),
    ],
)
def test_local_steps_equal_high_precision_logarithms(form, contraction, own, other, inter):
    p = selffl.posterior([0.0, 1.0], [own, other], inter, form)
    for batch_size in (1, 10):
        learning_rate = contraction * batch_size * own
        want = steps_in_high_precision(own, other, inter, form, learning_rate, batch_size)
        found = float(p.num_local_steps(learning_rate, batch_size)[0])
        # 1 - 0.99 magnifies the rounding of the ratio a hundredfold; nothing else does.
        assert abs(found - want) <= 1e-13 * want


@hypothesis_settings
@given(own=magnitudes, other=magnitudes, inter=inter_variances, contraction=st.floats(1e-12, 0.9))
def test_local_steps_equal_high_precision_logarithms_at_random(own, other, inter, contraction):
    learning_rate = contraction * own
    for form in FORMS:
        want = steps_in_high_precision(own, other, inter, form, learning_rate, 1)
        found = selffl.posterior([0.0, 1.0], [own, other], inter, form).num_local_steps(learning_rate)[0]
        assert abs(float(found) - want) <= 1e-13 * want


# --- 2. Limits -------------------------------------------------------------------------------------------------------


@both_forms
def test_no_spread_gives_everybody_the_global_model(form):
    z, variance, _ = federation(2, 9, 4)
    p = selffl.posterior(z, variance, 0.0, form)
    np.testing.assert_allclose(p.personal_mean, np.broadcast_to(p.global_mean, z.shape), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(p.personal_variance, np.broadcast_to(p.global_variance, z.shape), rtol=1e-12)


def test_both_forms_agree_without_spread_and_only_there():
    z, variance, _ = federation(3, 9)
    paper, exact = (selffl.posterior(z, variance, 0.0, form) for form in FORMS)
    np.testing.assert_array_equal(paper.personal_mean, exact.personal_mean)
    np.testing.assert_array_equal(paper.gain, exact.gain)
    paper, exact = (selffl.posterior(z, variance, 0.1, form) for form in FORMS)
    assert (exact.local_weight > paper.local_weight * 1.01).all()


@both_forms
def test_endless_spread_leaves_each_client_on_its_own(form):
    z, variance, _ = federation(4, 9)
    p = selffl.posterior(z, variance, 1e14, form)
    np.testing.assert_allclose(p.personal_mean, z, atol=1e-11)
    np.testing.assert_allclose(p.personal_variance, variance, rtol=1e-11)
    np.testing.assert_allclose(p.gain, 1.0, rtol=1e-11)
    assert float(p.global_mean) == pytest.approx(z.mean(), rel=1e-11)
    assert float(p.global_variance) == pytest.approx(1e14 / 9, rel=1e-11)


@both_forms
def test_spread_too_large_to_add_to_stays_finite(form):
    p = selffl.posterior([0.0, 1.0, 5.0], [1.0, 2.0, 3.0], 1.7e308, form)
    assert p.personal_mean.tolist() == pytest.approx([0.0, 1.0, 5.0], abs=1e-300)
    assert p.gain.tolist() == [1.0, 1.0, 1.0]
    assert float(p.global_mean) == pytest.approx(2.0)


@both_forms
def test_one_certain_client_among_others_keeps_its_estimate(form):
    z, variance = np.array([3.0, 1.0, -4.0]), np.array([0.0, 0.5, 2.0])
    p = selffl.posterior(z, variance, 1.0, form)
    assert p.personal_mean[0] == 3.0
    assert p.personal_variance[0] == 0.0
    assert p.gain[0] == 1.0
    np.testing.assert_allclose(p.global_mean, np.average(z, weights=1 / (1 + variance)), rtol=1e-14)
    near = selffl.posterior(z, [1e-14, 0.5, 2.0], 1.0, form)  # the limit from above, everywhere
    for name in ("personal_mean", "personal_variance", "gain", "initial", "global_variance"):
        np.testing.assert_allclose(getattr(p, name), getattr(near, name), rtol=1e-12, atol=1e-13)


@both_forms
def test_one_certain_client_without_spread_is_everybodys_model(form):
    p = selffl.posterior([3.0, 1.0, -4.0], [0.0, 0.5, 2.0], 0.0, form)
    assert float(p.global_mean) == 3.0
    assert float(p.global_variance) == 0.0
    assert p.personal_mean.tolist() == [3.0, 3.0, 3.0]
    assert p.personal_variance.tolist() == [0.0, 0.0, 0.0]
    assert p.gain.tolist() == [1.0, np.inf, np.inf]
    assert p.initial == pytest.approx([0.0, 3.0, 3.0])  # the others of client 0 weigh 4 : 1
    assert p.prior_variance == pytest.approx([0.4, 0.0, 0.0])


@both_forms
def test_several_certain_clients_with_spread_keep_their_estimates(form):
    z = [3.0, 1.0, -4.0, 8.0]
    p = selffl.posterior(z, [0.0, 0.0, 2.0, 0.0], 0.5, form)
    assert p.personal_mean[[0, 1, 3]].tolist() == [3.0, 1.0, 8.0]
    assert p.gain[[0, 1, 3]].tolist() == [1.0, 1.0, 1.0]
    others_variance = 0.5 / 3
    prior = others_variance + (0.5 if form == "exact" else 0.0)
    assert p.gain[2] == pytest.approx(1 + 2.0 / prior)
    assert p.personal_mean[2] == pytest.approx((4.0 * 2.0 - 4.0 * prior) / (2.0 + prior))


@both_forms
def test_several_certain_clients_without_spread_share_equally(form):
    p = selffl.posterior([3.0, 1.0, -4.0, 8.0], [0.0, 0.0, 2.0, 0.0], 0.0, form)
    assert float(p.global_mean) == pytest.approx(4.0)
    assert p.personal_mean == pytest.approx([4.0] * 4)
    assert p.personal_variance.tolist() == [0.0] * 4
    assert p.gain == pytest.approx([3.0, 3.0, np.inf, 3.0])
    assert p.local_weight == pytest.approx([1 / 3, 1 / 3, 0.0, 1 / 3])
    assert p.initial == pytest.approx([4.5, 5.5, 4.0, 2.0])


@both_forms
def test_certainty_is_judged_per_coordinate(form):
    p = selffl.posterior([[1.0, 1.0], [3.0, 3.0]], [[0.0, 1.0], [0.0, 1.0]], [0.0, 0.0], form)
    np.testing.assert_allclose(p.gain, [[2.0, 2.0], [2.0, 2.0]])
    p = selffl.posterior([[1.0, 1.0], [3.0, 3.0]], [[0.0, 0.0], [0.0, 1.0]], [0.0, 0.0], form)
    np.testing.assert_allclose(p.gain, [[2.0, 1.0], [2.0, np.inf]])
    np.testing.assert_allclose(p.personal_mean, [[2.0, 1.0], [2.0, 1.0]])


@both_forms
@pytest.mark.parametrize("variance", [0.0, 0.7])
@pytest.mark.parametrize("inter", [0.0, 1.0])
def test_lone_client_keeps_what_it_has(form, variance, inter):
    p = selffl.posterior([5.0], [variance], inter, form)
    assert float(p.global_mean) == 5.0
    assert float(p.global_variance) == inter + variance
    assert p.personal_mean.tolist() == [5.0]
    assert p.personal_variance.tolist() == [variance]
    assert p.gain.tolist() == p.local_weight.tolist() == [1.0]
    assert p.initial.tolist() == [5.0]
    assert p.prior_variance.tolist() == [np.inf]


def test_lone_client_would_train_for_ever_on_its_own_data():
    assert selffl.posterior([5.0], [0.7], 1.0).num_local_steps(0.1).tolist() == [np.inf]
    assert maths.rounded_steps(torch.tensor([torch.inf]), 40).tolist() == [40]


@both_forms
def test_a_million_clients_are_right(form):
    rng = np.random.default_rng(6)
    num_clients = 10**6
    variance = 10.0 ** rng.uniform(-6, 6, num_clients)
    inter = 0.01
    z = rng.normal(3.0, np.sqrt(inter + variance))
    p = selffl.posterior(z, variance, inter, form)

    wide = variance.astype(np.longdouble)
    weight = 1 / (inter + wide)
    rest = weight.sum() - weight
    start = ((weight * z).sum() - weight * z) / rest
    prior = 1 / rest + (inter if form == "exact" else 0.0)
    own = prior / (prior + wide)
    want = {
        "global_mean": (weight * z).sum() / weight.sum(),
        "global_variance": 1 / weight.sum(),
        "initial": start,
        "personal_mean": own * z + (1 - own) * start,
        "personal_variance": own * wide,
        "gain": 1 / own,
        "local_weight": own,
    }
    for name, expected in want.items():
        found = getattr(p, name)
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, expected.astype(np.float64), rtol=1e-10)


@both_forms
@pytest.mark.parametrize("inter", [0.0, 1e-12, 1.0, 1e12])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_float32_stays_float32_and_finite_over_24_orders_of_magnitude(form, inter, kind):
    variance = np.logspace(-12, 12, 25, dtype=np.float32)
    z = np.random.default_rng(7).normal(1.0, 1.0, 25).astype(np.float32)
    make = torch.tensor if kind == "torch" else np.asarray
    p = selffl.posterior(make(z), make(variance), inter, form)
    wide = selffl.posterior(z.astype(np.float64), variance.astype(np.float64), np.float64(np.float32(inter)), form)
    for field in dataclasses.fields(p):
        if field.name != "form":
            found, expected = getattr(p, field.name), getattr(wide, field.name)
            assert found.dtype == (torch.float32 if kind == "torch" else np.float32)
            assert np.isfinite(np.asarray(found)).all()
            # Variances and weights are sums of positive terms; z is of size 1, hence the absolute part for means.
            np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-5 if "mean" in field.name else 0.0)


# --- 3. Kinds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [list, tuple, np.asarray])
def test_lists_and_numpy_come_back_as_numpy_float64(make):
    p = selffl.posterior(make([1.0, 2.0, 6.0]), make([0.5, 0.5, 0.5]), 1.0)
    for field in dataclasses.fields(p):
        if field.name != "form":
            value = getattr(p, field.name)
            assert isinstance(value, np.ndarray)
            assert value.dtype == np.float64
    assert isinstance(p.num_local_steps(0.01), np.ndarray)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_one_torch_argument_makes_the_answer_torch(position):
    arguments = [[1.0, 2.0, 6.0], [0.5, 0.5, 0.5], 1.0]
    arguments[position] = torch.tensor(arguments[position], dtype=torch.float64)
    p = selffl.posterior(*arguments)
    for field in dataclasses.fields(p):
        if field.name != "form":
            assert isinstance(getattr(p, field.name), torch.Tensor)
            assert getattr(p, field.name).dtype == torch.float64
    assert isinstance(p.num_local_steps(0.01), torch.Tensor)
    np.testing.assert_array_equal(p.personal_mean, selffl.posterior([1.0, 2.0, 6.0], 0.5, 1.0).personal_mean)


@pytest.mark.parametrize("make", [list, np.asarray, torch.tensor])
def test_whole_numbers_are_taken_as_reals(make):
    p = selffl.posterior(make([1, 2, 7]), make([1, 1, 1]), 1)
    assert np.issubdtype(np.asarray(p.global_mean).dtype, np.floating)
    assert float(p.global_mean) == pytest.approx(10 / 3, rel=1e-6)
    assert float(p.global_variance) == pytest.approx(2 / 3, rel=1e-6)


def test_big_endian_and_half_precision_arrays_are_widened():
    want = selffl.posterior([1.0, 2.0, 6.0], 0.5, 1.0)
    for dtype in (">f8", np.float16):
        found = selffl.posterior(np.array([1.0, 2.0, 6.0], dtype=dtype), 0.5, 1.0)
        np.testing.assert_array_equal(found.personal_mean, want.personal_mean)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_arguments_are_left_as_they_were(kind):
    z, variance, _ = federation(8, 5)
    if kind == "torch":
        z, variance = torch.tensor(z), torch.tensor(variance)
    copies = np.asarray(z).copy(), np.asarray(variance).copy()
    selffl.posterior(z, variance, 0.0, "exact").num_local_steps(0.1)
    np.testing.assert_array_equal(z, copies[0])
    np.testing.assert_array_equal(variance, copies[1])


OUTPUTS = ("global_mean", "global_variance", "personal_mean", "personal_variance", "gain", "initial", "local_weight")


@both_forms
@pytest.mark.parametrize("num_clients", [2, 3, 5])
@pytest.mark.parametrize("num_params", [None, 2])
def test_gradients_flow_and_equal_finite_differences(form, num_clients, num_params):
    z, variance, inter = (
        torch.tensor(value, dtype=torch.float64, requires_grad=True)
        for value in federation(9 + num_clients, num_clients, num_params)
    )

    def outputs(z, variance, inter):
        p = selffl.posterior(z, variance, inter, form)
        return (*(getattr(p, name) for name in OUTPUTS), p.num_local_steps(0.01))

    assert torch.autograd.gradcheck(outputs, (z, variance, inter))


@both_forms
def test_gradients_are_right_between_clients_of_equal_variance(form):
    variance = torch.tensor([1.0, 1.0], dtype=torch.float64, requires_grad=True)
    p = selffl.posterior(torch.tensor([0.0, 1.0], dtype=torch.float64), variance, 0.0, form)
    (gradient,) = torch.autograd.grad(p.global_mean, variance)  # v_0 / (v_0 + v_1)
    assert gradient.tolist() == [0.25, -0.25]


@both_forms
def test_gradient_of_a_lone_client_is_its_own(form):
    variance = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    p = selffl.posterior(torch.tensor([1.0], dtype=torch.float64), variance, 0.5, form)
    (gradient,) = torch.autograd.grad(p.personal_variance.sum(), variance)
    assert gradient.tolist() == [1.0]


# --- 4. Properties ---------------------------------------------------------------------------------------------------

ordinary = st.floats(-10.0, 10.0)
ordinary_variances = st.floats(1e-3, 1e3)


@st.composite
def ordinary_federations(draw, min_clients=2, max_clients=8):
    num_clients = draw(st.integers(min_clients, max_clients))
    z = draw(st.lists(ordinary, min_size=num_clients, max_size=num_clients))
    variance = draw(st.lists(ordinary_variances, min_size=num_clients, max_size=num_clients))
    return np.array(z), np.array(variance), draw(st.one_of(st.just(0.0), ordinary_variances))


def assert_close(found, expected, size=10.0):
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12 * size)


PER_CLIENT = ("personal_mean", "personal_variance", "gain", "initial", "local_weight", "prior_variance")


@both_forms
@hypothesis_settings
@given(case=ordinary_federations(), data=st.data())
def test_order_of_clients_does_not_matter(form, case, data):
    z, variance, inter = case
    order = np.array(data.draw(st.permutations(range(len(z)))))
    p = selffl.posterior(z, variance, inter, form)
    q = selffl.posterior(z[order], variance[order], inter, form)
    assert_close(q.global_mean, p.global_mean)
    assert_close(q.global_variance, p.global_variance)
    for name in PER_CLIENT:
        assert_close(getattr(q, name), getattr(p, name)[order])


@both_forms
@hypothesis_settings
@given(case=ordinary_federations(), by=st.floats(-100.0, 100.0))
def test_shifting_the_estimates_shifts_the_means_and_nothing_else(form, case, by):
    z, variance, inter = case
    p, q = selffl.posterior(z, variance, inter, form), selffl.posterior(z + by, variance, inter, form)
    for name in ("global_mean", "personal_mean", "initial"):
        assert_close(getattr(q, name), getattr(p, name) + by, size=100.0)
    for name in ("global_variance", "personal_variance", "gain", "local_weight", "prior_variance"):
        np.testing.assert_array_equal(getattr(q, name), getattr(p, name))


@both_forms
@hypothesis_settings
@given(case=ordinary_federations(), by=st.one_of(st.floats(0.01, 100.0), st.floats(-100.0, -0.01)))
def test_scaling_estimates_and_variances_scales_the_answer(form, case, by):
    z, variance, inter = case
    p = selffl.posterior(z, variance, inter, form)
    q = selffl.posterior(z * by, variance * by**2, inter * by**2, form)
    for name in ("global_mean", "personal_mean", "initial"):
        assert_close(getattr(q, name), getattr(p, name) * by, size=10.0 * abs(by))
    for name in ("global_variance", "personal_variance", "prior_variance"):
        np.testing.assert_allclose(getattr(q, name), getattr(p, name) * by**2, rtol=1e-11)
    for name in ("gain", "local_weight"):
        np.testing.assert_allclose(getattr(q, name), getattr(p, name), rtol=1e-11)


@both_forms
@hypothesis_settings
@given(case=federations(min_clients=1))
def test_means_stay_within_the_hull(form, case):
    z, variance, inter = case
    p = selffl.posterior(z, variance, inter, form)
    rounding = 1e-12 * np.abs(z).max()
    assert min(z) - rounding <= float(p.global_mean) <= max(z) + rounding
    for m in range(len(z)):
        low, high = sorted((z[m], float(p.initial[m])))
        assert low - rounding <= p.personal_mean[m] <= high + rounding
        others = z[:m] + z[m + 1 :] or z
        assert min(others) - rounding <= p.initial[m] <= max(others) + rounding


@hypothesis_settings
@given(case=federations(min_clients=1), z=signed_magnitudes, variance=magnitudes)
def test_another_client_never_widens_the_global_posterior(case, z, variance):
    before = selffl.posterior(*case)
    after = selffl.posterior([*case[0], z], [*case[1], variance], case[2])
    assert float(after.global_variance) <= float(before.global_variance) * (1 + 4 * EPSILON)
    precision = 1 / Fraction(float(before.global_variance)) + 1 / (Fraction(case[2]) + Fraction(variance))
    assert float(after.global_variance * precision) == pytest.approx(1.0, rel=1e-12)


@both_forms
@hypothesis_settings
@given(case=federations(min_clients=1))
def test_gain_is_at_least_one_and_consistent(form, case):
    p = selffl.posterior(*case, form)
    assert (p.gain >= 1.0).all()
    assert ((p.local_weight > 0.0) & (p.local_weight <= 1.0)).all()
    np.testing.assert_allclose(p.gain * p.personal_variance, case[1], rtol=1e-12)


@hypothesis_settings
@given(case=federations(min_clients=1))
def test_exact_form_is_never_surer_than_the_papers(case):
    paper, exact = (selffl.posterior(*case, form) for form in FORMS)
    assert (exact.personal_variance >= paper.personal_variance * (1 - 4 * EPSILON)).all()
    assert (exact.gain <= paper.gain * (1 + 4 * EPSILON)).all()


@both_forms
@settings(deadline=None, max_examples=40)
@given(case=ordinary_federations(), num_steps=st.integers(1, 200), batch_size=st.sampled_from([1, 10]), data=st.data())
def test_gradient_descent_lands_on_the_personal_mean(form, case, num_steps, batch_size, data):
    z, variance, inter = case
    m = data.draw(st.integers(0, len(z) - 1))
    others = np.arange(len(z)) != m
    prior = 1 / (1 / (inter + variance[others])).sum() + (inter if form == "exact" else 0.0)
    contraction = -np.expm1(np.log(variance[m] / (variance[m] + prior)) / num_steps)
    learning_rate = contraction * variance[m] * batch_size

    p = selffl.posterior(z, variance, inter, form)
    assert p.num_local_steps(learning_rate, batch_size)[m] == pytest.approx(num_steps, rel=1e-9)
    theta = p.initial[m]
    for _ in range(num_steps):
        theta -= learning_rate * (theta - z[m]) / (variance[m] * batch_size)
    assert theta == pytest.approx(p.personal_mean[m], rel=1e-10, abs=1e-10)


# --- 5. Simulation ---------------------------------------------------------------------------------------------------


def simulate(inter, smallest, largest, num_draws=400, num_clients=20):
    rng = np.random.default_rng(11)
    variance = 0.1 / rng.integers(smallest, largest + 1, (num_clients, num_draws))
    theta = rng.normal(1.6, np.sqrt(inter), variance.shape)
    z = rng.normal(theta, np.sqrt(variance))
    error = {form: ((selffl.posterior(z, variance, inter, form).personal_mean - theta) ** 2).mean(0) for form in FORMS}
    return error | {"local": ((z - theta) ** 2).mean(0)}


def test_heterogeneous_case_exact_form_is_no_worse_than_local_and_the_papers_is_twice_as_bad():
    error = simulate(inter=1.0, smallest=10, largest=200)
    difference = error["exact"] - error["local"]
    assert difference.mean() <= 2 * difference.std(ddof=1) / np.sqrt(len(difference))
    assert 1.5 < error["paper"].mean() / error["local"].mean() < 2.5
    assert error["local"].mean() == pytest.approx(0.0015, rel=0.1)


def test_homogeneous_case_federating_pays_in_both_forms():
    error = simulate(inter=0.001, smallest=10, largest=20)
    assert error["exact"].mean() < 0.2 * error["local"].mean()
    assert error["paper"].mean() < 0.3 * error["local"].mean()
    assert error["exact"].mean() < error["paper"].mean()


@both_forms
def test_posterior_variance_of_the_exact_form_is_the_error_that_is_made(form):
    rng = np.random.default_rng(12)
    variance = np.array([0.05, 0.2, 1.0, 3.0, 0.5])
    theta = rng.normal(1.6, 0.7, (5, 20_000))
    p = selffl.posterior(rng.normal(theta, np.sqrt(variance)[:, None]), variance, 0.49, form)
    ratio = ((p.personal_mean - theta) ** 2).mean(1) / p.personal_variance
    if form == "exact":
        np.testing.assert_allclose(ratio, 1.0, atol=5 * np.sqrt(2 / 20_000))
    else:
        assert (ratio > 1.05).all()  # D11: the paper's form is surer than it should be


# --- 6. Decisions ----------------------------------------------------------------------------------------------------


def test_d7_one_step_where_one_step_overshoots():
    p = selffl.posterior([0.0, 1.0, 2.0], [0.1, 0.0, 10.0], 1.0)
    steps = p.num_local_steps(learning_rate=0.1)  # contraction 1, infinite, 0.01
    assert steps[:2].tolist() == [1.0, 1.0]
    assert steps[2] > 1.0
    assert p.num_local_steps(learning_rate=50.0).tolist() == [1.0, 1.0, 1.0]
    assert selffl.posterior([0.0], [0.1], 1.0).num_local_steps(1.0).tolist() == [1.0]


def test_d7_just_below_the_overshoot_is_the_formula():
    p = selffl.posterior([0.0, 1.0], [0.1, 0.1], 1.0, "paper")
    ratio = 1 + 1.1 / 0.1
    assert p.num_local_steps(0.1 * 0.999)[0] == pytest.approx(np.log(ratio) / -np.log(0.001), rel=1e-10)


def test_d6_learning_rate_is_divided_by_the_batch_size():
    p = selffl.posterior([0.0, 1.0], [0.1, 0.1], 1.0)
    np.testing.assert_allclose(p.num_local_steps(0.5, batch_size=10), p.num_local_steps(0.05), rtol=1e-12)
    assert p.num_local_steps(0.5, batch_size=10)[0] > 1.0
    assert p.num_local_steps(0.5)[0] == 1.0


def test_d7_rounds_to_nearest_at_least_one_at_most_the_cap():
    steps = torch.tensor([0.0, 0.2, 1.4, 1.6, 2.4, 39.4, 39.6, 40.4, 1e30, torch.inf], dtype=torch.float64)
    rounded = maths.rounded_steps(steps, max_local_steps=40)
    assert rounded.tolist() == [1, 1, 1, 2, 2, 39, 40, 40, 40, 40]
    assert rounded.dtype == torch.int64


def test_steps_scale_to_a_block_of_clients():
    intra, prior = torch.tensor([[0.1], [0.2]], dtype=torch.float64), torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    found = maths.local_steps(intra, prior, 0.01, batch_size=2)
    want = [np.log1p(10.0) / -np.log1p(-0.05), np.log1p(15.0) / -np.log1p(-0.025)]
    assert found.shape == (2, 1)
    assert found.squeeze(-1).tolist() == pytest.approx(want)


@hypothesis_settings
@given(case=ordinary_federations())
def test_initial_params_equal_the_others_mean_when_fed_estimates_and_global_mean(case):
    z, variance, inter = case
    estimate, total = torch.tensor(z).unsqueeze(-1), torch.tensor(inter + variance).unsqueeze(-1)
    weight = 1 / (inter + variance)
    global_mean = torch.tensor([weight @ z / weight.sum()])
    found = maths.initial_params(global_mean, estimate, total, maths.others_variance(total)).squeeze(-1)
    for m in range(len(z)):
        others = np.arange(len(z)) != m
        want = weight[others] @ z[others] / weight[others].sum()
        # G - (w_m / S_m)(z_m - G) magnifies the rounding of G by w_m / S_m.
        assert float(found[m]) == pytest.approx(want, abs=1e-13 * (1 + weight[m] / weight[others].sum()))


def test_lone_client_starts_at_the_global_model():
    total = torch.tensor([[0.6]])
    start = maths.initial_params(
        torch.tensor([1.0, 2.0]), torch.tensor([[5.0, 7.0]]), total, maths.others_variance(total)
    )
    assert start.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("variance", [[0.0, 1.0, 1.0], [0.0, 0.0, 1.0]])
def test_certain_clients_without_spread_start_at_the_global_model(variance):
    estimate, total = torch.tensor([[1.0], [2.0], [6.0]]), torch.tensor(variance).unsqueeze(-1)
    global_mean, _ = maths.global_posterior(estimate, total)
    found = maths.initial_params(global_mean, estimate, total, maths.others_variance(total))
    assert found.tolist() == [global_mean.tolist()] * 3  # for client 2 because the others know everything


# --- Precision of means, relative to the largest weighted contribution alone ------------------------------------------


def test_initial_does_not_feel_the_clients_own_estimate():
    p = selffl.posterior([1e-3, 2e-3, 1e8], [1.0, 1.0, 1.0], 1.0)
    assert p.initial[2] == pytest.approx(1.5e-3, rel=1e-12, abs=0)  # found 1.49999559e-3


def test_personal_mean_of_an_almost_certain_client_keeps_the_others_small_contribution():
    p = selffl.posterior([0.0, 1e12], [1e-12, 1e12], 0.0)
    assert p.personal_mean[0] == pytest.approx(1e-12, rel=1e-12, abs=0)  # found 0


# --- 7. Bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_numbers_that_are_not_finite_are_counted(bad, make):
    with pytest.raises(DataError, match=r"local_estimate holds 2 value\(s\)"):
        selffl.posterior(make([1.0, bad, bad]), 0.1, 1.0)
    with pytest.raises(DataError, match=r"intra_variance holds 1 value\(s\)"):
        selffl.posterior(make([1.0, 2.0, 3.0]), make([0.1, 0.1, bad]), 1.0)
    with pytest.raises(DataError, match=r"inter_variance holds 1 value\(s\)"):
        selffl.posterior(make([1.0, 2.0, 3.0]), 0.1, bad)


def test_negative_variances_are_named():
    with pytest.raises(DataError, match=r"intra_variance is -0\.25 at its smallest"):
        selffl.posterior([1.0, 2.0], [0.1, -0.25], 1.0)
    with pytest.raises(DataError, match=r"inter_variance is -3 at its smallest"):
        selffl.posterior([1.0, 2.0], 0.1, -3)
    assert selffl.posterior([1.0, 2.0], 0.1, -0.0).gain == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 0.1, 1.0), r"local_estimate has shape \(\); expected \[clients\]"),
        (([], 0.1, 1.0), r"local_estimate has shape \(0,\)"),
        ((np.zeros((0, 3)), 0.1, 1.0), r"local_estimate has shape \(0, 3\)"),
        ((np.zeros((2, 3, 4)), 0.1, 1.0), r"local_estimate has shape \(2, 3, 4\)"),
        (([1.0, 2.0, 3.0], [0.1, 0.2], 1.0), r"intra_variance has shape \(2,\); expected a scalar, \[3\]"),
        (([1.0, 2.0, 3.0], [[0.1], [0.2], [0.3]], 1.0), r"intra_variance has shape \(3, 1\)"),
        ((np.zeros((3, 2)), [0.1, 0.2], 1.0), r"intra_variance has shape \(2,\)"),
        ((np.zeros((3, 2)), np.ones((2, 3)), 1.0), r"intra_variance has shape \(2, 3\)"),
        (([1.0, 2.0, 3.0], 0.1, [1.0, 1.0, 1.0]), r"inter_variance has shape \(3,\)"),
        ((np.zeros((3, 2)), 0.1, [1.0, 1.0, 1.0]), r"inter_variance has shape \(3,\)"),
        ((np.zeros((3, 2)), 0.1, np.ones((3, 2))), r"inter_variance has shape \(3, 2\)"),
    ],
)
def test_wrong_shapes_are_named(arguments, message):
    with pytest.raises(DataError, match=message):
        selffl.posterior(*arguments)


@pytest.mark.parametrize("bad", [["a", "b"], [[1.0, 2.0], [3.0]], [{}, {}], [1 + 2j, 0j]])
def test_what_is_not_numbers_is_refused(bad):
    with pytest.raises(DataError, match="local_estimate is not an array of numbers"):
        selffl.posterior(bad, 0.1, 1.0)
    with pytest.raises(DataError, match="intra_variance is not an array of numbers"):
        selffl.posterior([1.0, 2.0], bad, 1.0)


def test_message_about_strings_quotes_the_string():
    with pytest.raises(DataError, match="'banana'"):
        selffl.posterior(["banana", "1"], 0.1, 1.0)


@pytest.mark.parametrize("form", ["Exact", "bayes", "", None])
def test_unknown_form_is_quoted(form):
    with pytest.raises(ConfigError, match=f"form is {form!r}; expected 'paper' or 'exact'"):
        selffl.posterior([1.0, 2.0], 0.1, 1.0, form=form)


@pytest.mark.parametrize("learning_rate", [0, -0.5, float("nan"), float("inf")])
def test_learning_rate_must_be_positive(learning_rate):
    p = selffl.posterior([1.0, 2.0], 0.1, 1.0)
    with pytest.raises(ConfigError, match=f"learning_rate is {learning_rate}; expected a number above 0"):
        p.num_local_steps(learning_rate)


@pytest.mark.parametrize("batch_size", [0, -1, 1.5])
def test_batch_size_must_be_positive(batch_size):
    with pytest.raises(ConfigError, match=f"batch_size is {batch_size}; expected a whole number, 1 or more"):
        selffl.posterior([1.0, 2.0], 0.1, 1.0).num_local_steps(0.01, batch_size)


@pytest.mark.parametrize("bad", ["x", None, [1, 2], 10**400, pytest.param(10**5000, id="10^5000"), {}])
def test_options_that_are_no_numbers_are_refused(bad):
    p = selffl.posterior([1.0, 2.0], 0.1, 1.0)
    for arguments in ((bad,), (0.1, bad)):
        with pytest.raises(ConfigError, match=r"^(learning_rate|batch_size) is .*; expected") as caught:
            p.num_local_steps(*arguments)
        assert len(str(caught.value)) < 120


@pytest.mark.parametrize(
    "arguments", [(10**400, 1, 1), ([10**400, 1], 1, 1), ([1, 2], 10**400, 1), ([1, 2], 1, 10**400)]
)
def test_whole_numbers_beyond_any_float_are_refused(arguments):
    with pytest.raises(DataError, match="is not an array of numbers"):
        selffl.posterior(*arguments)


# --- 8. The largest and the smallest floats ---------------------------------------------------------------------------


@both_forms
def test_the_largest_floats_give_the_answer_of_ordinary_ones(form):
    shape = np.array([1.0, 0.5, -1.0, 0.0])
    plain = selffl.posterior(shape, [1.0, 0.5, 0.25, 1.0], 0.5, form)
    large = selffl.posterior(shape * 1.7e308, np.array([1.0, 0.5, 0.25, 1.0]) * 1.7e308, 0.85e308, form)
    for name in ("global_mean", "personal_mean", "initial", "personal_variance"):
        np.testing.assert_allclose(getattr(large, name), getattr(plain, name) * 1.7e308, rtol=1e-14)
    for name in ("gain", "local_weight"):
        np.testing.assert_allclose(getattr(large, name), getattr(plain, name), rtol=1e-14)


any_float = st.floats(allow_nan=False, allow_infinity=False)
any_variance = st.floats(min_value=0.0, allow_nan=False, allow_infinity=False)


def test_a_mean_that_rounding_makes_larger_than_any_float_is_the_largest():
    largest = sys.float_info.max
    p = selffl.posterior([largest, largest, 0.0], [0.0, 8.397009068969044e306, 0.0], largest, "exact")
    assert p.initial[2] == largest
    assert np.isfinite([p.global_mean, *p.personal_mean, *p.initial]).all()


@both_forms
@settings(deadline=None, max_examples=100)
@given(data=st.data(), num_clients=st.integers(1, 5))
def test_finite_numbers_never_give_what_is_no_number(form, data, num_clients):
    z = data.draw(st.lists(any_float, min_size=num_clients, max_size=num_clients))
    variance = data.draw(st.lists(any_variance, min_size=num_clients, max_size=num_clients))
    p = selffl.posterior(z, variance, data.draw(any_variance), form)
    for name in ("global_mean", "personal_mean", "initial"):
        found = getattr(p, name)
        assert (found <= max(z)).all() or np.allclose(found.max(), max(z), rtol=1e-12)
        assert (found >= min(z)).all() or np.allclose(found.min(), min(z), rtol=1e-12)
    assert (p.personal_variance <= np.array(variance)).all()
    assert (p.gain >= 1.0).all()
    rate, size = data.draw(st.floats(min_value=5e-324, max_value=1.7e308)), data.draw(st.integers(1, 10**300))
    assert not np.isnan(p.num_local_steps(rate, size)).any()
