"""Which loss follows from labels and outputs, which cannot fit them, and the names of both."""

import numpy as np
import pytest
import torch
from torch import nn

from selffl.data.federation import Rows
from selffl.errors import ConfigError, DataError
from selffl.training.evaluation import check_rows
from selffl.training.flat import FlatModel
from selffl.training.losses import (
    NAMES,
    OWN_LOSSES,
    default_loss,
    is_scale_equivariant,
    logistic_loss,
    loss_named,
    name_of,
    squared_error,
)
from selffl.training.metrics import COUNTS, ONE_LOGIT, VALUES, measure_of

F = nn.functional
CLASSES, ZEROS_AND_ONES = torch.tensor([0, 2, 1, 1]), torch.tensor([0, 1, 1, 0])
VALUED, COUNTED = torch.tensor([0.5, -2.0, 1.0, 3.0]), torch.tensor([0, 7, 2, 1])
SINGLE, FLAT, THREE = torch.zeros(2, 1), torch.zeros(2), torch.zeros(2, 3)


def own_squares(outputs, labels):
    """A user's own loss."""
    return (outputs - labels).square().mean()


@pytest.mark.parametrize(
    ("outputs", "labels", "expected"),
    [
        (THREE, CLASSES, F.cross_entropy),
        (THREE, ZEROS_AND_ONES, F.cross_entropy),
        (torch.zeros(2, 3, 5), torch.ones(4, 5, dtype=torch.int64), F.cross_entropy),
        (SINGLE, ZEROS_AND_ONES, logistic_loss),
        (FLAT, ZEROS_AND_ONES, logistic_loss),
        (SINGLE, VALUED, squared_error),
        (FLAT, VALUED, squared_error),
        (FLAT, VALUED[:, None], squared_error),
        (SINGLE, VALUED[:, None], squared_error),
        (FLAT, ZEROS_AND_ONES.float(), squared_error),
        (THREE, torch.rand(4, 3), squared_error),
    ],
)
def test_the_loss_follows_from_labels_and_outputs(outputs, labels, expected):
    assert default_loss(outputs, labels) is expected


@pytest.mark.parametrize(
    ("outputs", "labels", "said"),
    [
        (SINGLE, COUNTED, r"int64 from 0 to 7, one number per row, and outputs of shape \(1,\).*poisson_nll_loss"),
        (FLAT, CLASSES, "outputs of one number per row"),
        (THREE, VALUED, r"float32 from -2 to 3, one number per row, and outputs of shape \(3,\)"),
        (THREE, torch.rand(4, 2), r"shape \(2,\) per row, and outputs of shape \(3,\)"),
        (THREE, torch.ones(4, 3, dtype=torch.int64), "no loss follows"),
    ],
)
def test_where_no_loss_follows_one_line_says_what_was_found(outputs, labels, said):
    with pytest.raises(ConfigError, match=said) as raised:
        default_loss(outputs, labels)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 2)])
def test_the_squared_error_is_numpys(shape):
    drawn = np.random.default_rng(0)
    outputs, labels = drawn.normal(size=shape), drawn.normal(size=shape)
    expected = np.mean((outputs - labels) ** 2)
    assert float(squared_error(torch.tensor(outputs), torch.tensor(labels))) == pytest.approx(expected)
    if shape == (5, 1):
        assert float(squared_error(torch.tensor(outputs), torch.tensor(labels[:, 0]))) == pytest.approx(expected)


def test_the_logistic_loss_is_numpys():
    logits, labels = np.random.default_rng(0).normal(size=6), np.array([0, 1, 1, 0, 1, 0])
    expected = np.mean(np.log1p(np.exp(np.where(labels == 1, -logits, logits))))
    for outputs in (torch.tensor(logits), torch.tensor(logits)[:, None]):
        assert float(logistic_loss(outputs, torch.tensor(labels))) == pytest.approx(expected)


def test_every_loss_is_found_by_its_name_and_named():
    for name in NAMES:
        assert name_of(loss_named(name)) == name
    assert set(OWN_LOSSES) <= set(NAMES)
    assert not set(OWN_LOSSES) & set(dir(F))  # the name says which
    assert name_of(own_squares) is None
    assert name_of(nn.MSELoss()) is None
    with pytest.raises(AttributeError):
        loss_named("sqared_error")


@pytest.mark.parametrize("loss", [F.mse_loss, nn.MSELoss(), F.l1_loss, nn.L1Loss(), squared_error])
def test_a_loss_that_scales_with_its_labels_says_so(loss):
    assert is_scale_equivariant(loss)
    outputs, labels = torch.randn(9, generator=torch.Generator().manual_seed(0)), torch.linspace(-1.0, 2.0, 9)
    gradients = []
    for scale in (1.0, 10.0):
        leaf = (scale * outputs).requires_grad_()
        gradients.append(torch.autograd.grad(loss(leaf, scale * labels), leaf)[0])
    factor = gradients[1] / gradients[0]  # one for all rows
    assert torch.allclose(factor, factor[0].expand(9))


@pytest.mark.parametrize(
    "loss",
    [F.huber_loss, F.cross_entropy, logistic_loss, F.poisson_nll_loss, nn.MSELoss(reduction="sum"), own_squares],
)
def test_of_other_losses_nothing_is_claimed(loss):
    assert not is_scale_equivariant(loss)


# ------------------------------------------------------------------------------------------------------ what cannot fit


class Flat(nn.Linear):
    """A linear layer with one output, without an axis of its own."""

    def __init__(self):
        super().__init__(3, 1)

    def forward(self, x):
        return super().forward(x).squeeze(-1)


def made_rows(labels):
    features = torch.randn(len(labels), 3, generator=torch.Generator().manual_seed(0))
    return Rows(features, labels, torch.tensor([0, len(labels)]))


def zero(module):
    """The module as it starts without opinion: all outputs are the same."""
    for part in module.parameters():
        nn.init.zeros_(part)
    return module


REFUSED = {
    "cross-entropy, one output, values": (Flat, F.cross_entropy, VALUED, "needs one output for each class"),
    "cross-entropy, one output, classes": (Flat, nn.CrossEntropyLoss(), ZEROS_AND_ONES, "needs one output"),
    "cross-entropy, an axis of 1": (lambda: nn.Linear(3, 1), F.cross_entropy, ZEROS_AND_ONES, "needs one output"),
    "cross-entropy, values": (lambda: nn.Linear(3, 2), F.cross_entropy, VALUED, "whole numbers, or probabilities"),
    "cross-entropy, values of the outputs' shape": (
        lambda: nn.Linear(3, 2), F.cross_entropy, torch.tensor([[0.5, 0.5], [0.5, 0.5], [3.0, -2.0]]),
        "whole numbers, or probabilities",
    ),
    "mse, classes": (lambda: nn.Linear(3, 4), F.mse_loss, CLASSES, "For classes leave loss out"),
    "mse as a module, classes": (lambda: nn.Linear(3, 2), nn.MSELoss(), ZEROS_AND_ONES, "For classes leave loss out"),
    "l1, classes": (lambda: nn.Linear(3, 4), F.l1_loss, CLASSES, "For classes leave loss out"),
    "huber, classes": (lambda: nn.Linear(3, 4), F.huber_loss, CLASSES, "For classes leave loss out"),
    "mse, shapes": (lambda: nn.Linear(3, 1), F.mse_loss, VALUED, "squeeze"),
    "l1, shapes": (lambda: nn.Linear(3, 1), nn.L1Loss(), VALUED, "squeeze"),
    "poisson, shapes": (lambda: nn.Linear(3, 1), F.poisson_nll_loss, COUNTED, "squeeze"),
    "own, shapes": (lambda: nn.Linear(3, 1), own_squares, VALUED, "squeeze"),
    "a sum of torch's": (Flat, nn.MSELoss(reduction="sum"), VALUED, "is the sum of their losses"),
    "an own sum": (
        lambda: nn.Linear(3, 3), lambda outputs, labels: F.cross_entropy(outputs, labels, reduction="sum"), CLASSES,
        "is the sum of their losses",
    ),
    "no gradient": (
        lambda: nn.Linear(3, 3), lambda outputs, labels: (outputs.argmax(-1) != labels).float().mean(), CLASSES,
        "cannot take",
    ),
}  # fmt: skip


@pytest.mark.parametrize("start", [lambda module: module, zero], ids=["drawn", "zeros"])
@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_that_cannot_fit_is_refused(case, start):
    module, loss, labels, said = REFUSED[case]
    torch.manual_seed(0)
    with pytest.raises((ConfigError, DataError), match=said) as raised:
        check_rows(FlatModel(start(module())), loss, made_rows(labels))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("module", "loss", "labels"),
    [
        (lambda: nn.Linear(3, 2), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0])), ZEROS_AND_ONES),
        (lambda: nn.Linear(3, 2), F.cross_entropy, torch.tensor([[0.25, 0.75], [1.0, 0.0]])),
        (lambda: nn.Linear(3, 1), squared_error, VALUED),
        (lambda: nn.Linear(3, 1), logistic_loss, ZEROS_AND_ONES),
        (Flat, F.huber_loss, VALUED),
        (Flat, F.binary_cross_entropy_with_logits, ZEROS_AND_ONES.float()),
        (lambda: nn.Sequential(Flat(), nn.Sigmoid()), F.binary_cross_entropy, ZEROS_AND_ONES.float()),
        # A user's own over pairs of rows, which cannot be split.
        (Flat, lambda outputs, labels: F.mse_loss(outputs[1:] - outputs[:-1], labels[1:] - labels[:-1]), VALUED),
    ],
)
def test_a_loss_that_fits_is_taken(module, loss, labels):
    torch.manual_seed(0)
    check_rows(FlatModel(module()), loss, made_rows(labels))


def test_what_is_measured_knows_the_losses():
    assert measure_of(squared_error, SINGLE, VALUED) is VALUES
    assert measure_of(squared_error, FLAT, ZEROS_AND_ONES.float()) is VALUES
    assert measure_of(logistic_loss, SINGLE, ZEROS_AND_ONES) is ONE_LOGIT
    for loss in (F.poisson_nll_loss, nn.PoissonNLLLoss()):
        assert measure_of(loss, FLAT, COUNTED) is COUNTS
        assert measure_of(loss, FLAT, COUNTED.float()) is COUNTS
    assert measure_of(nn.PoissonNLLLoss(log_input=False), FLAT, COUNTED.float()) is VALUES


def test_the_error_of_counts_is_that_of_their_rates():
    log_rates = torch.tensor([0.0, 1.0, -1.0])
    (found,) = COUNTS.of_rows(log_rates, torch.tensor([0, 3, 1]))
    assert found.numpy() == pytest.approx((np.exp([0.0, 1.0, -1.0]) - [0, 3, 1]) ** 2)
