"""The accountant against closed forms, and what it says when there is nothing to account for."""

import math
import sys

import pytest
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import norm

from selffl.errors import ConfigError
from selffl.privacy import epsilon, noise_for, row_epsilon, row_noise_for

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install 'selffl[privacy]'")

RUN = {"num_clients": 1000, "participation": 0.1, "rounds": 200, "delta": 1e-5}


def exact_epsilon(multiplier, rounds, delta):
    """Of normal noise without a draw: rounds together are one with multiplier / sqrt(rounds) (Balle and Wang, 2018)."""
    mu = math.sqrt(rounds) / multiplier

    def excess(eps):
        return norm.cdf(mu / 2 - eps / mu) - math.exp(eps) * norm.cdf(-mu / 2 - eps / mu) - delta

    return brentq(excess, 0, 500)


@pytest.mark.parametrize(("multiplier", "rounds"), [(2.0, 1), (5.0, 20), (30.0, 200)])
def test_everybody_in_every_round_is_the_normal_mechanism(multiplier, rounds):
    """Never below the exact value; above it by what Rényi's divergence costs."""
    found = epsilon(multiplier, num_clients=50, participation=1.0, rounds=rounds, delta=1e-5)
    exact = exact_epsilon(multiplier, rounds, 1e-5)
    assert exact <= found <= 1.25 * exact
    # And not above the textbook bound, α ρ T + log(1/δ) / (α − 1) at its best α.
    rho = rounds / (2 * multiplier**2)
    textbook = minimize_scalar(lambda a: a * rho + math.log(1e5) / (a - 1), bounds=(1.001, 500), method="bounded").fun
    assert found <= textbook * 1.001


def test_a_draw_protects_and_more_noise_and_fewer_rounds_do():
    whole = epsilon(4.0, **RUN | {"participation": 1.0})
    drawn = epsilon(4.0, **RUN)
    assert drawn < 0.3 * whole
    assert epsilon(8.0, **RUN) < drawn
    assert epsilon(4.0, **RUN | {"rounds": 50}) < drawn
    assert epsilon(0.0, **RUN) == math.inf


@pytest.mark.slow
def test_the_noise_for_an_epsilon_gives_it():
    multiplier = noise_for(4.0, **RUN)
    assert epsilon(multiplier, **RUN) == pytest.approx(4.0, rel=1e-3)
    assert epsilon(multiplier, **RUN) <= 4.0
    assert epsilon(multiplier * (1 - 2e-6), **RUN) > 4.0


@pytest.mark.parametrize("wanted", [0.1, 3.0, 1000.0])
def test_the_noise_is_the_least_on_either_side_of_one(wanted):
    everybody = RUN | {"participation": 1.0}
    multiplier = noise_for(wanted, **everybody)
    assert epsilon(multiplier, **everybody) <= wanted < epsilon(multiplier * (1 - 2e-6), **everybody)


def test_an_epsilon_that_no_noise_gives_is_refused():
    with pytest.raises(ConfigError, match=r"epsilon is 1e-12, and no noise gives so little at delta 1e-05"):
        noise_for(1e-12, **RUN | {"participation": 1.0})


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"num_clients": 0}, "num_clients is 0"),
        ({"participation": 1.5}, "participation is 1.5"),
        ({"rounds": 0}, "rounds is 0"),
        ({"delta": 0.0}, "delta is 0.0"),
        ({"delta": 1.0}, "delta is 1.0"),
    ],
)
def test_what_makes_no_sense_is_refused(changed, reason):
    with pytest.raises(ConfigError, match=reason):
        epsilon(1.0, **RUN | changed)
    with pytest.raises(ConfigError, match=reason):
        noise_for(1.0, **RUN | changed)


def test_without_the_library_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ConfigError, match=r"selffl\[privacy\]"):
        epsilon(1.0, **RUN)


ROWS = {"num_examples": 500, "batch_size": 20, "num_gradients": 300, "delta": 1e-5}


@pytest.mark.parametrize(("multiplier", "gradients"), [(2.0, 1), (5.0, 20), (30.0, 200)])
def test_gradients_of_all_rows_are_the_normal_mechanism(multiplier, gradients):
    found = row_epsilon(multiplier, num_examples=20, batch_size=50, num_gradients=gradients, delta=1e-5)
    exact = exact_epsilon(multiplier, gradients, 1e-5)
    assert exact <= found <= 1.25 * exact


def test_rows_are_counted_as_clients_are():
    """Drawing 20 of 500 rows 300 times is drawing 20 of 500 clients 300 times."""
    by_rounds = epsilon(2.0, num_clients=500, participation=0.04, rounds=300, delta=1e-5)
    assert row_epsilon(2.0, **ROWS) == pytest.approx(by_rounds, rel=1e-9)


def test_a_draw_of_nearly_all_rows_never_costs_more_than_all_of_them():
    whole = row_epsilon(1.0, **ROWS | {"num_examples": 20})
    assert row_epsilon(1.0, **ROWS | {"num_examples": 21}) <= whole
    assert row_epsilon(1.0, **ROWS) < 0.3 * whole
    assert row_epsilon(1.0, **ROWS | {"num_gradients": 0}) == 0.0
    assert row_epsilon(0.0, **ROWS) == math.inf


@pytest.mark.slow
def test_the_noise_for_rows_gives_their_epsilon():
    multiplier = row_noise_for(3.0, **ROWS)
    assert 2.9999 < row_epsilon(multiplier, **ROWS) <= 3.0


@pytest.mark.parametrize("name", ROWS)
def test_what_makes_no_sense_of_rows_is_refused(name):
    wrong = -1.0 if name == "delta" else -1
    with pytest.raises(ConfigError, match=f"{name} is {wrong}"):
        row_epsilon(1.0, **ROWS | {name: wrong})
