"""FedProx's synthetic rows: what was said of them holds."""

import numpy as np
import pytest

from selffl.data.synthetic import synthetic
from selffl.errors import ConfigError


def rows_of(fed, client):
    low, high = fed.train.offset[client : client + 2].tolist()
    return fed.train.features[low:high].double().numpy(), fed.train.labels[low:high].numpy()


def test_sizes_are_fifty_and_a_lognormal():
    sizes = synthetic(num_clients=400, test_fraction=0.0).num_examples.numpy()
    assert sizes.min() >= 50
    logs = np.log(np.maximum(sizes - 50, 1))
    assert abs(np.median(logs) - 4) < 0.4  # 5 standard errors of a median: 5 · 1.25 · 2 / 20 is 0.6
    assert abs(np.percentile(logs, 84) - np.median(logs) - 2) < 0.4


def test_features_have_the_stated_variances():
    fed = synthetic(num_clients=60, test_fraction=0.0)
    within = np.concatenate([rows_of(fed, client)[0] - rows_of(fed, client)[0].mean(0) for client in range(60)])
    expected = [1 / j**1.2 for j in range(1, 61)]
    assert within.var(0) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("beta", [0.0, 3.0])
def test_centres_are_spread_by_beta(beta):
    fed = synthetic(beta=beta, num_clients=150, test_fraction=0.0)
    centres = np.stack([rows_of(fed, client)[0].mean(0) for client in range(150)])
    # v_kj = B_k + N(0, 1): the mean over j has variance β² + 1/60, what is left of it 1.
    assert centres.mean(1).std() == pytest.approx((beta**2 + 1 / 60) ** 0.5, rel=0.2)
    assert (centres - centres.mean(1, keepdims=True)).std() == pytest.approx(1, rel=0.05)


def test_labels_are_a_linear_rule_of_each_client():
    """Multinomial logistic regression, fitted by somebody else, finds the rule."""
    from sklearn.linear_model import LogisticRegression

    fed = synthetic(alpha=0.0, beta=0.0, num_clients=20, test_fraction=0.0, seed=1)
    client = int((fed.class_counts() >= 10).sum(1).argmax())
    assert (fed.class_counts()[client] >= 10).sum() >= 3
    x, y = rows_of(fed, client)
    fit = LogisticRegression(C=1e4, max_iter=5000).fit(x, y)
    assert fit.score(x, y) > 0.98


def test_iid_clients_share_one_rule_and_one_centre():
    fed = synthetic(is_iid=True, num_clients=40, test_fraction=0.0)
    means = np.stack([rows_of(fed, client)[0].mean(0)[0] * len(rows_of(fed, client)[0]) ** 0.5 for client in range(40)])
    assert 0.7 < means.std() < 1.4  # the first feature has variance 1: its mean N(0, 1/n)
    shares = fed.class_counts().double()
    shares /= shares.sum(1, keepdim=True)
    apart = synthetic(num_clients=40, test_fraction=0.0).class_counts().double()
    apart /= apart.sum(1, keepdim=True)
    assert shares.std(0).mean() < 0.3 * apart.std(0).mean()


def test_alpha_cancels():
    """u_k moves the scores of all classes alike; clients' rules differ by the unit entries alone."""
    small, large = (synthetic(alpha=a, test_fraction=0.0, seed=4) for a in (0.0, 50.0))
    assert small.num_examples.tolist() == large.num_examples.tolist()
    same = np.mean([np.mean(rows_of(small, k)[1] == rows_of(large, k)[1]) for k in range(30)])
    assert same > 0.99


def test_the_source_makes_it_again():
    fed = synthetic(alpha=0.5, beta=0.25, num_clients=7, test_fraction=0.2, validation_fraction=0.1, seed=3)
    options = dict(fed.source)
    assert options.pop("name") == "synthetic"
    assert synthetic(**options).fingerprint() == fed.fingerprint()
    assert synthetic(**options | {"seed": 4}).fingerprint() != fed.fingerprint()


@pytest.mark.parametrize("option", [{"alpha": -1.0}, {"beta": float("nan")}, {"num_clients": 0}, {"seed": -1}])
def test_options_that_are_none_are_refused(option):
    with pytest.raises(ConfigError, match=rf"^{next(iter(option))} is .*; expected"):
        synthetic(**option)
