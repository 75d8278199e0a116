"""Scores of probabilities against torchmetrics, scikit-learn and plain NumPy."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics
from torchmetrics.classification import MulticlassCalibrationError

from selffl.maths.calibration import brier_score, calibration_error, log_loss


def answers(seed, num_classes=5, num_rows=700):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, num_classes, generator=generator, dtype=torch.float64) * 2
    labels = torch.where(
        torch.rand(num_rows, generator=generator) < 0.6,
        logits.argmax(-1),
        torch.randint(num_classes, (num_rows,), generator=generator),
    )
    return logits.softmax(-1), labels


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_bins", [1, 15])
def test_the_calibration_error_is_that_of_torchmetrics(seed, num_bins):
    chances, labels = answers(seed)
    wanted = MulticlassCalibrationError(num_classes=5, n_bins=num_bins, norm="l1")(chances, labels)
    assert calibration_error(chances, labels, num_bins) == pytest.approx(float(wanted), abs=1e-6)


def test_the_calibration_error_over_bins_of_equally_many_rows():
    chances, labels = answers(0, num_rows=703)
    confidence, is_right = chances.max(-1).values.numpy(), (chances.argmax(-1) == labels).numpy()
    parts = np.array_split(np.argsort(confidence), 15)
    wanted = sum(len(part) / 703 * abs(confidence[part].mean() - is_right[part].mean()) for part in parts)
    assert calibration_error(chances, labels, even=True) == pytest.approx(wanted)


def test_answers_that_are_sure_and_wrong_are_as_bad_as_can_be():
    sure = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    right, wrong = torch.tensor([0, 0]), torch.tensor([1, 1])
    for even in (False, True):
        assert calibration_error(sure, right, even=even) == 0.0
        assert calibration_error(sure, wrong, even=even) == 1.0
    assert brier_score(sure, right) == 0.0
    assert brier_score(sure, wrong) == 2.0
    assert log_loss(sure, right) == 0.0
    assert 30 < log_loss(sure, wrong) < 40  # finite


def test_log_loss_and_brier_score_are_those_of_scikit_learn_and_numpy():
    chances, labels = answers(1)
    assert log_loss(chances, labels) == pytest.approx(sklearn_metrics.log_loss(labels, chances))
    outcome = np.eye(5)[labels.numpy()]
    assert brier_score(chances, labels) == pytest.approx(((chances.numpy() - outcome) ** 2).sum(1).mean())
    two, labels = answers(2, num_classes=2)
    wanted = 2 * sklearn_metrics.brier_score_loss(labels, two[:, 1])
    assert brier_score(two, labels) == pytest.approx(wanted)
