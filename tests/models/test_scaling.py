"""The layer that standardises, against NumPy; it is part of a model, and is not trained."""

import numpy as np
import pytest
import torch
from torch import nn

import selffl
from selffl.models import Standardise


def test_columns_have_mean_zero_and_spread_one():
    rows = np.random.default_rng(0).normal([5e4, -3.0, 0.0], [1e4, 1e-3, 2.0], size=(500, 3))
    found = Standardise.of(torch.from_numpy(rows).float())(torch.from_numpy(rows).float())
    expected = (rows - rows.mean(0)) / rows.std(0, ddof=1)
    assert found.numpy() == pytest.approx(expected, abs=2e-3)


def test_a_column_that_never_changes_is_left_at_zero():
    rows = torch.tensor([[7.0, 1.0], [7.0, 2.0]])
    assert Standardise.of(rows)(rows)[:, 0].tolist() == [0.0, 0.0]


@pytest.mark.slow
def test_training_leaves_it_alone_and_models_take_raw_rows(tmp_path):
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.normal(4e4, 1e4, 200), rng.normal(size=200)]).astype(np.float32)
    y = (x[:, 0] > 4e4).astype(int)
    fed = selffl.Federation.from_arrays(x, y, np.arange(200) % 5, test_fraction=0.2)
    first = Standardise.of(fed.train.features)
    run = selffl.train(
        nn.Sequential(first, nn.Linear(2, 2)), fed, "ditto", rounds=20, participation=1.0, out=tmp_path / "run"
    )
    assert run.summary["weighted_accuracy"] > 0.9
    again = selffl.load(tmp_path / "run", trusted=True).personal_model(3)  # the library's class: it unpickles anywhere
    assert torch.equal(again[0].mean, first.mean)
    assert again(torch.tensor([[9e4, 0.0], [1e3, 0.0]])).argmax(1).tolist() == [1, 0]
