"""Metrics follow from outputs, labels and loss; their values against scikit-learn and NumPy."""

import math
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from torch import nn

from selffl.data.federation import Rows
from selffl.errors import ConfigError
from selffl.training.evaluation import check_rows
from selffl.training.flat import FlatModel
from selffl.training.metrics import (
    CLASSES,
    ONE_LOGIT,
    ONE_PROBABILITY,
    ONE_SCORE,
    TWO_CLASSES,
    VALUES,
    Majority,
    auc,
    balanced_accuracy,
    measure_of,
)

F = nn.functional


@given(
    scores=st.lists(st.integers(-5, 5), min_size=2, max_size=60),
    data=st.data(),
)
@settings(deadline=None)
def test_auc_is_scikit_learns_with_ties(scores, data):
    labels = data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)))
    found = auc(torch.tensor(scores, dtype=torch.float32), torch.tensor(labels).long())
    if len(set(labels)) < 2:
        assert np.isnan(found)
    else:
        assert found == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


def test_a_score_that_is_not_a_number_has_no_rank():
    assert np.isnan(auc(torch.tensor([float("nan"), 0.0, 1.0]), torch.tensor([1, 0, 0])))


def own_loss(outputs, labels):
    return (outputs - labels).abs().mean()


@pytest.mark.parametrize(
    ("loss", "outputs", "labels", "expected"),
    [
        (F.cross_entropy, (2, 5), [0, 3], CLASSES),
        (F.cross_entropy, (2, 2), [0, 1], TWO_CLASSES),
        (F.binary_cross_entropy_with_logits, (2,), [0.0, 1.0], ONE_LOGIT),
        (nn.BCEWithLogitsLoss(), (2,), [0.0, 1.0], ONE_LOGIT),
        (nn.BCELoss(), (2,), [0.0, 1.0], ONE_PROBABILITY),
        (F.binary_cross_entropy, (2, 1), [0.0, 1.0], ONE_PROBABILITY),
        (own_loss, (2, 1), [0, 1], ONE_SCORE),
        (own_loss, (2, 1), [0.0, 1.0], ONE_SCORE),
        (partial(F.binary_cross_entropy_with_logits, pos_weight=torch.ones(1)), (2,), [0.0, 1.0], ONE_SCORE),
        (F.mse_loss, (2,), [0.0, 1.0], VALUES),
        (F.mse_loss, (2, 3), [[0.0, 1.0, 2.0]] * 2, VALUES),
        (own_loss, (2, 1), [0.5, 2.5], VALUES),
    ],
)
def test_what_is_measured_follows_from_the_task(loss, outputs, labels, expected):
    assert measure_of(loss, torch.zeros(outputs), torch.tensor(labels)) is expected


@pytest.mark.parametrize(
    ("outputs", "labels"),
    [((2, 1), [7, 8]), ((2, 3, 4), [[0, 1, 2, 0]] * 2), ((2, 3), [0.5, 0.5])],
    ids=["counts", "a class per place", "values of another shape"],
)
def test_where_no_metric_fits_the_loss_is_one(outputs, labels):
    def loss(outputs, labels):
        return outputs.sum() * 0 + labels.double().sum() / len(labels)

    measure = measure_of(loss, torch.zeros(outputs), torch.tensor(labels))
    assert measure.metrics == ("loss",)
    (found,) = measure.of_rows(torch.zeros(outputs), torch.tensor(labels))
    assert found.tolist() == torch.tensor(labels).double().reshape(2, -1).sum(1).tolist()


def test_numbers_of_rows_are_what_they_say():
    logits, labels = torch.tensor([[1.0, 3.0], [2.0, 2.0], [5.0, 1.0]]), torch.tensor([1, 0, 1])
    numbers = TWO_CLASSES.of_rows(logits, labels)
    assert numbers[0].tolist() == [2.0, 0.0, -4.0]
    right = TWO_CLASSES.averaged("accuracy", numbers, labels)
    assert right.tolist() == CLASSES.of_rows(logits, labels)[0].tolist() == [True, True, False]
    assert ONE_PROBABILITY.of_rows(torch.tensor([[0.5], [0.9]]), torch.tensor([0.0, 1.0]))[0].tolist() == pytest.approx(
        [0.0, np.log(9)]
    )
    assert VALUES.of_rows(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 2.0]]))[0].tolist() == [2.0]
    assert VALUES.of_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, 2.0]))[0].tolist() == [4.0, 0.0]


@pytest.mark.parametrize(
    ("measure", "outputs"),
    [
        (CLASSES, torch.tensor([[1.0, 3.0, 0.0], [2.0, 2.0, -1.0], [5.0, 1.0, 1.0]])),
        (TWO_CLASSES, torch.tensor([[1.0, 3.0], [2.0, 2.0], [5.0, 1.0]])),
        (ONE_LOGIT, torch.tensor([[2.0], [0.0], [-4.0]])),
        (ONE_PROBABILITY, torch.tensor([[0.9], [0.5], [0.1]])),
    ],
)
def test_the_log_loss_of_a_row_is_that_of_torch(measure, outputs):
    labels = torch.tensor([1, 0, 1]) if outputs.shape[1] > 1 else torch.tensor([1.0, 0.0, 1.0])
    losses = {ONE_LOGIT: F.binary_cross_entropy_with_logits, ONE_PROBABILITY: F.binary_cross_entropy}
    reduced = outputs if outputs.shape[1] > 1 else outputs[:, 0]
    expected = losses.get(measure, F.cross_entropy)(reduced, labels, reduction="none")
    assert measure.of_rows(outputs, labels)[1].tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_a_probability_of_nothing_has_a_finite_log_loss():
    found = ONE_PROBABILITY.of_rows(torch.tensor([[0.0], [1.0], [1.0]]), torch.tensor([1.0, 1.0, 0.0]))[1]
    assert found.tolist() == [100.0, 0.0, 100.0]  # as in torch's binary cross-entropy


@given(st.integers(0, 10_000))
@settings(deadline=None)
def test_balanced_accuracy_is_that_of_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    num_rows = int(rng.integers(1, 40))
    labels, answers, group = rng.integers(0, 4, num_rows), rng.integers(0, 4, num_rows), rng.integers(0, 6, num_rows)
    found = balanced_accuracy(*(torch.tensor(a) for a in (labels == answers, labels, group)), num_groups=6)
    for number, value in enumerate(found.tolist()):
        own = labels[group == number], answers[group == number]
        if len(set(own[0])) < 2:
            assert math.isnan(value)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # answers that are nobody's class
            assert value == pytest.approx(balanced_accuracy_score(*own))


def test_the_majority_class_is_counted_by_hand():
    """Four clients: one with a class of its own, a tie, one without rows to train on, one without rows to test on."""
    train = Rows(torch.zeros(9, 1), torch.tensor([2, 2, 0, 1, 0, 0, 1, 0, 0]), torch.tensor([0, 3, 7, 7, 9]))
    tested = Rows(torch.zeros(6, 1), torch.tensor([2, 0, 0, 1, 0, 2]), torch.tensor([0, 2, 4, 6, 6]))
    found = Majority.of(CLASSES, train, tested)
    assert found.own.tolist() == [1, 1, 1, 0]  # classes 2, 0 (of 0, 0, 1, 1), and 0, the federation's
    assert found.federation.tolist() == [1, 1, 1, 0]
    assert found.largest_share == pytest.approx(5 / 9)
    assert Majority.of(VALUES, train, tested) is None


def test_a_loss_that_would_hold_every_row_against_every_other_is_refused():
    """Outputs [B, 1] against labels [B]: torch broadcasts to [B, B] with no more than a warning."""
    rows = Rows(torch.zeros(4, 3), torch.rand(4), torch.tensor([0, 4]))
    with pytest.raises(ConfigError, match=r"outputs of shape \(1,\) per row.* squeeze\(-1\)"):
        check_rows(FlatModel(nn.Linear(3, 1)), F.mse_loss, rows)
    squeezed = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    assert check_rows(FlatModel(squeezed), F.mse_loss, rows) is VALUES
