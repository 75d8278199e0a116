"""Shares of classes among neighbours, against scikit-learn and by hand."""

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from selffl.maths.neighbours import likeliest_share, neighbour_shares, squared_distances


def made_up(rows=40, asked=15, features=5, classes=3, seed=1):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(rows, features)), rng.integers(classes, size=rows), rng.normal(size=(asked, features))


@pytest.mark.parametrize("number", [1, 7, 40])
def test_shares_are_those_of_scikit_learn(number):
    x, y, asked = made_up()
    there = KNeighborsClassifier(number, weights=lambda distance: np.exp(-(distance**2) / 5)).fit(x, y)
    targets = torch.eye(3, dtype=torch.float64)[torch.tensor(y)]
    distances = squared_distances(torch.tensor(asked), torch.tensor(x))
    found = neighbour_shares(distances, targets, number, 5)
    np.testing.assert_allclose(found.numpy(), there.predict_proba(asked), atol=1e-12)


def test_clients_beside_each_other_and_rows_that_do_not_count_change_nothing():
    sets = [made_up(rows, seed=rows) for rows in (6, 9)]
    alone, together = [], torch.full((2, 15, 9), torch.inf, dtype=torch.float64)
    targets = torch.ones(2, 9, 3, dtype=torch.float64)
    for client, (x, y, asked) in enumerate(sets):
        distances = squared_distances(torch.tensor(asked), torch.tensor(x))
        together[client, :, : len(x)], targets[client, : len(x)] = distances, torch.eye(3)[torch.tensor(y)].double()
        alone.append(neighbour_shares(distances, targets[client, : len(x)], 8, 5))
    torch.testing.assert_close(neighbour_shares(together, targets, 8, 5), torch.stack(alone))


def test_who_has_nobody_has_no_shares_and_those_as_far_as_the_last_count_all():
    targets = torch.eye(2, dtype=torch.float64)[torch.tensor([0, 1, 1, 0])]
    apart = torch.tensor([[4.0, 4.0, 4.0, 9.0], [torch.inf] * 4, [1e6, 2e6, 3e6, 4e6]], dtype=torch.float64)
    found = neighbour_shares(apart, targets, 2, 1)
    torch.testing.assert_close(found, torch.tensor([[1 / 3, 2 / 3], [0.0, 0.0], [1.0, 0.0]], dtype=torch.float64))


def test_the_share_is_the_likeliest_of_the_grid():
    """Two rows of class 0, by neighbours 0.9 and 0.1, by the model 0.2 and 0.6: (.2 + .7 s)(.6 - .5 s) has its top."""
    shares = torch.tensor([[[0.9, 0.1], [0.1, 0.9]]], dtype=torch.float64)
    probabilities = torch.tensor([[[0.2, 0.8], [0.6, 0.4]]], dtype=torch.float64)
    targets = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]], dtype=torch.float64)
    top = (0.7 * 0.6 - 0.5 * 0.2) / (2 * 0.7 * 0.5)
    assert abs(likeliest_share(shares, probabilities, targets).item() - top) <= 0.005 + 1e-12
    assert likeliest_share(shares, probabilities, 0 * targets).item() == 0.0
    assert likeliest_share(shares, shares, targets).item() == 0.0  # where it makes no difference, none
    impossible = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]], dtype=torch.float64)
    assert 0 < likeliest_share(impossible, probabilities[:, [0, 0]], targets).item() < 1
