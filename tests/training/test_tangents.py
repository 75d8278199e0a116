"""Gradients of log-odds, and their products in blocks, against ordinary autograd."""

import pytest
import torch
from torch import nn

from selffl.budget import BUDGETS, Budget
from selffl.errors import ConfigError
from selffl.training import tangents
from selffl.training.flat import FlatModel
from selffl.training.metrics import CLASSES, ONE_LOGIT, ONE_PROBABILITY, ONE_SCORE, TWO_CLASSES, VALUES, by_loss


def network(kind):
    torch.manual_seed(0)
    last = {CLASSES: [nn.Linear(4, 3)], ONE_LOGIT: [nn.Linear(4, 1), nn.Flatten(0)]}
    last[ONE_PROBABILITY] = [nn.Linear(4, 1), nn.Sigmoid()]
    return FlatModel(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), *last[kind]).double())


def log_odds_gradient(model, kind, features, label):
    """By autograd, from the probability of the class."""
    params = model.params.requires_grad_()
    outputs = model(params, features[None])
    if kind == CLASSES:
        chance = outputs.softmax(-1)[0, label]
    else:
        one = outputs.sigmoid() if kind == ONE_LOGIT else outputs
        chance = one.squeeze() if label else 1 - one.squeeze()
    (gradient,) = torch.autograd.grad((chance / (1 - chance)).log(), params)
    return gradient


@pytest.mark.parametrize("gradients", ["auto", "loop", "vmap"])
@pytest.mark.parametrize("kind", [CLASSES, ONE_LOGIT, ONE_PROBABILITY])
def test_products_are_those_of_gradients_by_autograd(kind, gradients, monkeypatch):
    model = network(kind)
    left, right = torch.randn(5, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    num_classes = 3 if kind == CLASSES else 2
    classes = torch.arange(5) % num_classes, torch.arange(7) % num_classes
    rows = [
        torch.stack([log_odds_gradient(model, kind, x, int(k)) for x, k in zip(part, named, strict=True)])
        for part, named in zip((left, right), classes, strict=True)
    ]
    own = tangents.Tangents(model, model.params, kind, gradients)
    variances = torch.linspace(0.5, 2.0, len(model.params), dtype=torch.float64)
    found = own.products((left, classes[0]), (right, classes[1]), variances)
    torch.testing.assert_close(found[0], rows[0] @ torch.diag(variances) @ rows[1].T)
    torch.testing.assert_close(found[1], (rows[1] @ torch.diag(variances) @ rows[1].T).diagonal())
    logits = own.logits(right)
    outputs = model(model.params, right)
    if kind == CLASSES:
        torch.testing.assert_close(logits, outputs)
    else:
        one = outputs.flatten().sigmoid() if kind == ONE_LOGIT else outputs.flatten()
        torch.testing.assert_close(logits.softmax(-1), torch.stack([1 - one, one], -1))

    seen = []
    whole = tangents.Tangents.rows
    monkeypatch.setitem(BUDGETS, "cpu", Budget(gradient_numbers=4 * len(model.params)))
    monkeypatch.setattr(tangents.Tangents, "rows", lambda self, x, k: seen.append(len(x)) or whole(self, x, k))
    again = own.products((left, classes[0]), (right, classes[1]), variances)
    assert max(seen) == 2  # rows at a time
    torch.testing.assert_close(again[0], found[0])
    torch.testing.assert_close(again[1], found[1])


def test_labels_are_numbers_of_classes():
    assert tangents.class_labels(torch.tensor([2, 0]), CLASSES).tolist() == [2, 0]
    assert tangents.class_labels(torch.tensor([[1.0], [0.0]]), ONE_LOGIT).tolist() == [1, 0]


def test_a_probability_of_one_has_finite_log_odds():
    sure = tangents.class_logits(torch.tensor([0.0, 1.0]), ONE_PROBABILITY)
    assert sure.isfinite().all()
    assert sure[1, 1] > 10


def test_outputs_that_are_no_log_odds_are_refused():
    cross, binary = nn.functional.cross_entropy, nn.functional.binary_cross_entropy_with_logits
    for measure, loss in ((CLASSES, cross), (TWO_CLASSES, nn.CrossEntropyLoss()), (ONE_LOGIT, binary)):
        tangents.check_classifies(measure, loss)
    squared = nn.functional.mse_loss
    for measure, loss in ((VALUES, squared), (CLASSES, squared), (ONE_SCORE, squared), (by_loss(cross), cross)):
        with pytest.raises(ConfigError, match=r"^the task is measured by \w+ under the loss \w+; expected classes"):
            tangents.check_classifies(measure, loss)
