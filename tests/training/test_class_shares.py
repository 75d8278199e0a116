"""Accuracy by a client's shares of the classes, against rows that are repeated in these proportions."""

import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import selffl
from selffl.data.rows import Rows
from selffl.training.class_shares import ShareWeightedAccuracy

GENERATOR = torch.Generator().manual_seed(0)
OUTPUTS, LABELS = torch.randn(60, 3, generator=GENERATOR), torch.randint(3, (60,), generator=GENERATOR)


def test_weights_are_what_repeating_rows_comes_to():
    """Shares of 1/6, 3/6 and 2/6 as rows of each class once, three times and twice."""
    shares = ShareWeightedAccuracy({"a": torch.tensor([1, 3, 2], dtype=torch.float64) / 6})
    right, asked = 0, 0
    for output, label in zip(OUTPUTS.tolist(), LABELS.tolist(), strict=True):
        times = (1, 3, 2)[label]
        right += times * (output.index(max(output)) == label)
        asked += times
    assert shares.for_client("a")(OUTPUTS, LABELS) == pytest.approx(right / asked)


def test_rows_of_no_class_of_a_client_cannot_test_it():
    shares = ShareWeightedAccuracy({0: torch.tensor([0.0, 0.0, 1.0])})
    assert math.isnan(shares.for_client(0)(OUTPUTS, torch.zeros(60, dtype=torch.int64)))


def shared_test(seed=0):
    """Three clients of different classes that are all tested on the same rows."""
    rng = np.random.default_rng(seed)
    y = np.concatenate([rng.choice(3, 40, p=p) for p in ((0.8, 0.2, 0.0), (0.1, 0.1, 0.8), (0.3, 0.3, 0.4))])
    x = (rng.normal(size=(120, 4)) + np.eye(3, 4)[y]).astype(np.float32)
    fed = selffl.Federation.from_arrays(x, y, np.repeat(list("abc"), 40), 0.0, validation_fraction=0.25)
    test_y = torch.arange(3).repeat(10)
    test_x = torch.randn(30, 4, generator=torch.Generator().manual_seed(1)) + torch.eye(3, 4)[test_y]
    test = Rows(test_x.repeat(3, 1), test_y.repeat(3), torch.arange(4) * 30)
    return selffl.Federation(fed.clients, fed.train, test, fed.validation), y, test_x, test_y


def test_a_run_measures_each_client_by_its_own_shares():
    fed, y, test_x, test_y = shared_test()
    metric = ShareWeightedAccuracy.of(fed)
    torch.manual_seed(0)
    run = selffl.train(
        nn.Linear(4, 3),
        fed,
        selffl.algorithm("local", num_local_steps=5),
        rounds=3,
        participation=1.0,
        metrics={"share_accuracy": selffl.Metric(pickle.loads(pickle.dumps(metric)))},
    )
    for place, row in enumerate(run.clients):
        share = np.bincount(y[40 * place : 40 * place + 40], minlength=3) / 40  # training and validation rows
        is_right = (run.personal_model(row["client"])(test_x).argmax(-1) == test_y).numpy()
        by_class = [is_right[test_y.numpy() == label].mean() for label in range(3)]
        assert row["share_accuracy"] == pytest.approx(float(share @ by_class))  # classes have as many test rows
    mean = np.mean([row["share_accuracy"] for row in run.clients])
    assert run.summary["weighted_share_accuracy"] == pytest.approx(mean)
