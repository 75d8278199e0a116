"""How far scores and class frequencies are believed: against autograd, scipy's search and statsmodels' choice model."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from statsmodels.discrete.conditional_models import ConditionalLogit
from torch import nn

from selffl.maths.score_scale import (
    MAX_FREQUENCY_WEIGHT,
    MAX_STEP,
    MIN_SCORE_FACTOR,
    derivatives,
    next_factors,
)


def tensor(numbers):
    return torch.as_tensor(numbers, dtype=torch.float64)


def rows_of(num_clients, num_rows, num_classes, factors, seed=0):
    """Scores, shifts and classes of clients whose log-odds are t z + a s."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(num_clients, num_rows, num_classes))
    shift = np.log(rng.dirichlet(np.ones(num_classes), num_clients) * num_classes)
    odds = np.exp(factors[0] * scores + factors[1] * shift[:, None])
    chances = odds / odds.sum(-1, keepdims=True)
    chosen = (rng.random((num_clients, num_rows, 1)) > chances.cumsum(-1)).sum(-1)
    return tensor(scores), tensor(shift), torch.from_numpy(chosen)


def whole(labels, num_classes):
    return nn.functional.one_hot(labels, num_classes).double()


def soft(labels, num_classes):
    """Nine tenths of each row are of its class, a tenth is of the next."""
    return 0.9 * whole(labels, num_classes) + 0.1 * whole((labels + 1) % num_classes, num_classes)


def with_none(labels, num_classes):
    """Every third row has no class."""
    targets = whole(labels, num_classes)
    targets[:, ::3] = 0.0
    return targets


def surprise(scores, shift, targets, factors):
    """Minus the log-likelihood of one client's rows, row by row: torch's own cross-entropy, soft labels included."""
    total = tensor(0.0)
    for own, target in zip(scores, targets, strict=True):
        if target.sum() > 0:
            total = total + nn.functional.cross_entropy(factors[0] * own + factors[1] * shift, target)
    return total


@pytest.mark.parametrize("kind", [whole, soft, with_none])
@pytest.mark.parametrize(("num_rows", "num_classes"), [(7, 4), (1, 3), (5, 2)], ids=["several", "a row", "two classes"])
def test_derivatives_are_those_of_the_cross_entropy(kind, num_rows, num_classes):
    """Slope by autograd, curvature by autograd once more, and both by small differences."""
    scores, shift, labels = rows_of(3, num_rows, num_classes, (1.3, 0.6))
    targets, factors = kind(labels, num_classes), tensor([[1.0, 1.0], [2.5, 0.4], [0.3, 1.9]])
    found = derivatives(scores, shift, targets, factors)
    for m in range(3):

        def loss(at, m=m):
            return surprise(scores[m], shift[m], targets[m], at)

        if kind is not with_none or num_rows > 1:
            slope = torch.autograd.functional.jacobian(loss, factors[m])
            curvature = torch.autograd.functional.hessian(loss, factors[m])
            steps = 1e-5 * torch.eye(2, dtype=torch.float64)
            by_difference = torch.stack([(loss(factors[m] + h) - loss(factors[m] - h)) / 2e-5 for h in steps])
            torch.testing.assert_close(slope, by_difference, rtol=1e-6, atol=1e-8)
            assert slope.abs().min() > 1e-3
        else:
            slope, curvature = torch.zeros(2).double(), torch.zeros(2, 2).double()
        torch.testing.assert_close(found.slope[m], slope, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found.curvature[m], curvature, rtol=1e-10, atol=1e-12)


def test_derivatives_of_a_client_are_the_sums_over_its_rows():
    scores, shift, labels = rows_of(1, 9, 3, (0.8, 1.1))
    targets, factors = whole(labels, 3), tensor([[1.2, 0.7]])
    every = derivatives(scores, shift, targets, factors)
    single = [derivatives(scores[:, [i]], shift, targets[:, [i]], factors) for i in range(9)]
    torch.testing.assert_close(every.slope, sum(one.slope for one in single), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(every.curvature, sum(one.curvature for one in single), rtol=1e-12, atol=1e-12)


def converged(scores, shift, targets, num_rounds=30):
    """Where rounds over the same rows of all clients arrive."""
    factors = torch.ones(2, dtype=torch.float64)
    for _ in range(num_rounds):
        parts = derivatives(scores, shift, targets, factors.expand(len(scores), 2))
        slope, curvature = parts.slope.sum(0), parts.curvature.sum(0)
        factors = next_factors(factors, curvature, curvature @ factors - slope)
    return factors


@pytest.mark.parametrize("truth", [(1.0, 1.0), (3.0, 1.5), (0.6, 0.2)])
@pytest.mark.parametrize("kind", [whole, soft, with_none])
@pytest.mark.parametrize("num_rows", [1, 20])
def test_factors_are_the_most_likely_with_their_prior(truth, kind, num_rows):
    """scipy's search for the minimum of the plain sum over rows and of |(t, a) - 1|^2/2."""
    scores, shift, labels = rows_of(6, num_rows, 3, truth, seed=3)
    targets = kind(labels, 3)

    def objective(at):
        z = at[0] * scores.numpy() + at[1] * shift.numpy()[:, None]
        log_chances = z - np.log(np.exp(z).sum(-1, keepdims=True))
        return -(targets.numpy() * log_chances).sum() + 0.5 * ((at - 1.0) ** 2).sum()

    best = minimize(objective, [1.0, 1.0], method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-13}).x
    assert best[0] > MIN_SCORE_FACTOR  # else it is the bound that would be tested
    assert best[1] > 0.0
    assert converged(scores, shift, targets).tolist() == pytest.approx(best, abs=1e-6)


def test_without_the_prior_it_is_the_choice_model_of_statsmodels():
    """At its estimates nothing slopes, and the curvature is one over their covariance."""
    scores, shift, labels = rows_of(40, 10, 3, (1.8, 0.7), seed=5)
    targets = whole(labels, 3)
    regressors = torch.stack([scores, shift[:, None].expand_as(scores)], dim=-1).reshape(-1, 2).numpy()
    fit = ConditionalLogit(targets.reshape(-1).numpy(), regressors, groups=np.repeat(np.arange(400), 3)).fit(disp=0)
    found = derivatives(scores, shift, targets, tensor(fit.params).expand(40, 2))
    assert found.slope.sum(0).abs().max() < 1e-3 * found.curvature.sum(0).abs().max()
    assert torch.linalg.inv(found.curvature.sum(0)).numpy() == pytest.approx(fit.cov_params(), rel=1e-4)
    assert fit.params == pytest.approx([1.8, 0.7], abs=0.4)


def test_without_rows_both_factors_are_1():
    none = torch.zeros(2, dtype=torch.float64)
    for before in ([1.0, 1.0], [1.7, 0.4]):
        assert next_factors(tensor(before), torch.zeros(2, 2, dtype=torch.float64), none).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ([1e3, -1e3], [1.0 + MAX_STEP, 1.0 - MAX_STEP]),
        ([-1e3, 1e3], [MIN_SCORE_FACTOR, MIN_SCORE_FACTOR * MAX_FREQUENCY_WEIGHT]),
        ([1.5, 0.75], [1.5, 0.75]),
        ([0.6, 1.9], [0.6, 0.6 * MAX_FREQUENCY_WEIGHT]),
    ],
)
def test_a_round_moves_factors_no_further_than_it_may(wanted, found):
    curvature = 1e12 * torch.eye(2, dtype=torch.float64)
    moved = next_factors(torch.ones(2, dtype=torch.float64), curvature, curvature @ tensor(wanted))
    assert moved.tolist() == pytest.approx(found, abs=1e-9)


def test_a_round_that_says_nothing_finite_moves_nothing():
    before = tensor([[1.4, 0.6], [1.4, 0.6]])
    curvature = torch.eye(2, dtype=torch.float64).repeat(2, 1, 1)
    curvature[0] = torch.nan
    moved = next_factors(before, curvature, 1.4 * torch.ones(2, 2, dtype=torch.float64))
    assert moved[0].tolist() == [1.4, 0.6]
    assert moved[1].tolist() == pytest.approx([1.2, 1.2])
