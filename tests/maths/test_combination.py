"""The weights of a combination of heads: against scipy's non-negative least squares, all subsets, and by hand."""

import itertools

import numpy as np
import pytest
import torch
from scipy.optimize import nnls

from selffl.maths.combination import combination_weights, feature_noise, least_on_simplex


def by_nnls(matrix):
    """min a'Qa on the simplex is min b'Qb - 2·1'b over b >= 0, scaled: |L'b - L⁻¹1|² with Q = LL'."""
    factor = np.linalg.cholesky(matrix)
    found, _ = nnls(factor.T, np.linalg.solve(factor, np.ones(len(matrix))), maxiter=10_000)
    return found / found.sum()


def by_subsets(matrix):
    """Every set of places that may be above 0: the best of those whose solution is."""
    best, found = np.inf, None
    for size in range(1, len(matrix) + 1):
        for places in map(list, itertools.combinations(range(len(matrix)), size)):
            part = np.linalg.solve(matrix[np.ix_(places, places)], np.ones(size))
            if (part > 0).all() and 1 / part.sum() < best:
                best, found = 1 / part.sum(), (places, part / part.sum())
    weights = np.zeros(len(matrix))
    weights[found[0]] = found[1]
    return weights


def matrices(number, size, rank, noise, seed=0):
    rng = np.random.default_rng(seed)
    factors = rng.normal(size=(number, size, rank)) + rng.normal(size=(number, 1, rank))
    return factors @ factors.transpose(0, 2, 1) + noise * np.eye(size) * rng.random((number, size, 1))


@pytest.mark.parametrize(("size", "rank"), [(2, 1), (5, 3), (12, 4), (40, 60), (40, 2)])
@pytest.mark.parametrize("noise", [1.0, 1e-4])
def test_the_least_on_the_simplex_is_that_of_scipy(size, rank, noise):
    many = matrices(30, size, rank, noise, seed=size + rank)
    found = least_on_simplex(torch.tensor(many)).numpy()
    assert (found >= 0).all()
    np.testing.assert_allclose(found.sum(1), 1.0, rtol=1e-12)
    for matrix, mine in zip(many, found, strict=True):
        exact = by_nnls(matrix)
        assert mine @ matrix @ mine <= exact @ matrix @ exact * (1 + 1e-9)
        np.testing.assert_allclose(mine, exact, atol=1e-6)
    if size == 40:
        assert 0 < (found == 0).mean() < 1


def test_the_least_on_the_simplex_is_the_best_of_all_subsets():
    many = matrices(50, 6, 3, 0.3, seed=9)
    found = least_on_simplex(torch.tensor(many)).numpy()
    for matrix, mine in zip(many, found, strict=True):
        np.testing.assert_allclose(mine, by_subsets(matrix), atol=1e-9)


@pytest.mark.parametrize("factor", [1e-9, 1e9])
def test_the_least_on_the_simplex_does_not_depend_on_the_unit(factor):
    many = torch.stack([torch.diag(torch.tensor([1.0, 2.0, 5.0])), torch.eye(3) + 1.0]).double()
    torch.testing.assert_close(least_on_simplex(factor * many), least_on_simplex(many))
    torch.testing.assert_close(least_on_simplex(factor * many)[0] * 17, torch.tensor([10.0, 5.0, 2.0]).double())


def test_what_is_singular_is_shared_or_taken_whole():
    zero = torch.zeros(1, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(least_on_simplex(zero), torch.full((1, 4), 0.25, dtype=torch.float64))
    certain = torch.diag(torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)).unsqueeze(0)
    torch.testing.assert_close(least_on_simplex(certain)[0], torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))


def test_a_client_takes_from_those_that_are_like_it():
    """Two groups: within one, clients are alike, so that who is less noisy counts for more (1/v); none of the other."""
    own = torch.tensor([[0.0, 1.0], [0.0, 1.0], [5.0, 0.0], [5.0, 0.0]], dtype=torch.float64).unsqueeze(-1)
    found = combination_weights(own, torch.tensor([0.1, 0.3, 0.2, 0.2], dtype=torch.float64))
    expected = torch.tensor([[0.75, 0.25, 0, 0]] * 2 + [[0, 0, 0.5, 0.5]] * 2, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01)
    assert (found[:2, 2:] == 0).logical_or(found[:2, 2:] >= 1e-3).all()


def test_weights_are_those_of_the_formula_and_blocks_change_nothing():
    generator = torch.Generator().manual_seed(4)
    own = torch.randn(7, 3, 4, generator=generator)
    noise = torch.rand(7, generator=generator)
    found = combination_weights(own, noise)
    for i in range(7):
        gaps = (own[i] - own).flatten(1).double().numpy()
        exact = by_nnls(gaps @ gaps.T + np.diag(noise.double().numpy()))
        exact[exact < 1e-3] = 0.0
        np.testing.assert_allclose(found[i].numpy(), exact / exact.sum(), atol=1e-5)
    assert found.dtype == torch.float32
    torch.testing.assert_close(combination_weights(own, noise, max_numbers=100), found, rtol=0, atol=1e-6)


def test_noise_is_the_variance_of_a_mean_where_there_is_one_class():
    """p = 1: (E|z|² − |μ|²)/N is the trace of the covariance over N; with classes, that of z times 1 for its class."""
    rng = np.random.default_rng(3)
    z, y = rng.normal(size=(30, 4)) + 2.0, rng.integers(3, size=30)
    for labels in (0 * y, y):
        counts = np.bincount(labels, minlength=3)
        groups = [z[labels == k] if counts[k] else np.zeros((1, 4)) for k in range(3)]
        means, squares = np.stack([g.mean(0) for g in groups]), np.stack([(g**2).sum(1).mean() for g in groups])
        arguments = (counts / 30, means, squares, np.array(30.0))
        found = feature_noise(*map(torch.tensor, arguments)).item()
        spread = np.eye(3)[labels][:, :, None] * z[:, None, :]
        assert found == pytest.approx(spread.var(0).sum() / 30, rel=1e-12)
