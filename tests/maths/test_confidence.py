"""The confidence of a classifier against dense matrices, samples of the posterior, and models that are fitted again."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from selffl.maths.confidence import (
    Moderation,
    information,
    learned_moderation,
    left_out,
    log_odds,
    log_odds_variance,
    moderate,
)


def posterior(num_rows, num_params, seed=0, precision=0.7):
    """Gradients and weights of a client's rows, gradients of others, and the dense covariance."""
    rng = np.random.default_rng(seed)
    own, weights = rng.normal(size=(num_rows, num_params)), rng.uniform(0.0, 1.0, num_rows)
    others = rng.normal(size=(4, num_params))
    dense = np.linalg.inv((own.T * weights) @ own + precision * np.eye(num_params))
    return own, weights, others, dense


@pytest.mark.parametrize(("num_rows", "num_params"), [(0, 3), (1, 5), (6, 20), (30, 4)])
def test_the_variance_of_log_odds_is_that_of_the_dense_posterior(num_rows, num_params):
    own, weights, others, dense = posterior(num_rows, num_params)
    products = (torch.from_numpy(a) for a in ((others**2).sum(1), own @ others.T, own @ own.T, weights))
    found = log_odds_variance(*products, 0.7)
    np.testing.assert_allclose(found.numpy(), np.einsum("xp,pq,xq->x", others, dense, others), rtol=1e-10)


@pytest.mark.parametrize("mean", [-3.0, -0.5, 0.0, 1.0, 4.0])
@pytest.mark.parametrize("precision", [0.2, 1.0, 30.0])
def test_a_moderated_answer_is_the_mean_answer_over_the_posterior(mean, precision):
    own, weights, others, dense = posterior(6, 20, precision=precision)
    samples = np.random.default_rng(1).multivariate_normal(np.zeros(20), dense, size=200_000) @ others[0] + mean
    products = (torch.from_numpy(a) for a in ((others[:1] ** 2).sum(1), own @ others[:1].T, own @ own.T, weights))
    variance = log_odds_variance(*products, precision)
    found = moderate(torch.tensor([[0.0, mean]], dtype=torch.float64), variance).softmax(-1)[0, 1]
    assert float(found) == pytest.approx(np.mean(1 / (1 + np.exp(-samples))), abs=0.02)  # as good as the probit is
    if precision == 0.2 and mean == 4.0:
        assert abs(float(found) - 1 / (1 + np.exp(-mean))) > 0.05  # which is far from the answer at the mode


def test_a_row_left_out_is_seen_as_by_a_model_that_is_fitted_without_it():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(40, 6))
    labels = (features @ rng.normal(size=6) + rng.logistic(size=40) > 0).astype(int)
    precision = 2.0

    def fitted(chosen):
        model = LogisticRegression(C=1 / precision, fit_intercept=False, tol=1e-12, max_iter=10_000)
        return model.fit(features[chosen], labels[chosen]).coef_[0]

    sign = 2 * labels - 1
    own = features * sign[:, None]  # gradient of the log-odds of each row's label
    chance = torch.from_numpy(1 / (1 + np.exp(-own @ fitted(np.arange(40)))))
    found = left_out(torch.from_numpy(own @ own.T), information(chance, 0.5), chance, precision)
    for row in range(40):
        others = np.delete(np.arange(40), row)
        without = fitted(others)
        shift = own[row] @ (fitted(np.arange(40)) - without)
        assert float(found.shift[row]) == pytest.approx(shift, rel=0.15, abs=0.002)
        q = 1 / (1 + np.exp(-own[others] @ without))
        dense = np.linalg.inv((own[others].T * (q * (1 - q))) @ own[others] + precision * np.eye(6))
        assert float(found.variance[row]) == pytest.approx(own[row] @ dense @ own[row], rel=0.15)


def test_the_information_runs_from_the_empirical_to_the_expected():
    chance = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    empirical, expected = (1 - chance) ** 2, chance * (1 - chance)
    torch.testing.assert_close(information(chance, 0.0), empirical)
    torch.testing.assert_close(information(chance, 0.5), expected)
    torch.testing.assert_close(information(chance, 0.25), (empirical * expected).sqrt())


@given(
    # The smallest numbers that there are have no half.
    st.lists(st.floats(-50, 50, allow_subnormal=False), min_size=2, max_size=6),
    st.floats(0, 1e6),
    st.floats(0.06, 256),
    st.floats(0, 1),
)
def test_moderation_keeps_the_order_of_classes(logits, variance, scale, share):
    given = torch.tensor(logits, dtype=torch.float64)
    found = moderate(given, torch.tensor(variance, dtype=torch.float64), Moderation(scale, share))
    assert torch.equal(found.argsort(stable=True), given.argsort(stable=True))


def labelled(num_rows, scale, share, seed=0):
    """Rows whose labels are drawn with the moderated probabilities."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num_rows, 4, generator=generator, dtype=torch.float64)
    variance = torch.rand(num_rows, generator=generator, dtype=torch.float64) * 200
    chances = (logits * (scale / (1 + share * torch.pi / 8 * variance).sqrt())[:, None]).softmax(-1)
    return logits, torch.multinomial(chances, 1, generator=generator)[:, 0], variance


@pytest.mark.parametrize(("scale", "share"), [(1.0, 0.0), (2.5, 0.0), (0.5, 0.0), (3.0, 0.1), (8.0, 1.0)])
def test_the_moderation_that_labels_follow_is_found(scale, share):
    found = learned_moderation(*labelled(10_000, scale, share))
    variance = torch.tensor([0.0, 20.0, 200.0], dtype=torch.float64)
    one = torch.ones(3, 1, dtype=torch.float64)
    wanted = moderate(one, variance, Moderation(scale, share))
    torch.testing.assert_close(moderate(one, variance, found), wanted, rtol=0.12, atol=0.0)


def test_a_row_far_off_is_a_slip():
    logits, labels, variance = labelled(2_000, 2.0, 0.0)
    before = learned_moderation(logits, labels, variance)
    logits[:2] = 0.0
    logits[[0, 1], labels[:2]] = -500.0
    assert learned_moderation(logits, labels, variance) == before


def test_few_rows_change_little():
    logits = torch.tensor([[3.0, 0.0], [0.0, 2.0], [4.0, 0.0]], dtype=torch.float64)
    found = learned_moderation(logits, torch.tensor([0, 1, 0]), torch.ones(3, dtype=torch.float64))
    assert 1.0 <= found.scale < 2.0  # all are right, and no scale would be too large by them alone
    assert found.share == 0.0


def test_log_odds_are_those_of_a_class_against_all_others():
    logits = torch.randn(50, 3, dtype=torch.float64) * 3
    classes = torch.arange(50) % 3
    chance = logits.softmax(-1).gather(-1, classes[:, None])[:, 0]
    torch.testing.assert_close(log_odds(logits, classes), (chance / (1 - chance)).log())
    sure = torch.tensor([[800.0, 0.0, 0.0]], dtype=torch.float64)
    assert float(log_odds(sure, torch.tensor([0]))) == pytest.approx(800.0 - np.log(2.0))
