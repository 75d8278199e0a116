"""Rows of each class, and which number of a model is the bias of a class's score."""

import numpy as np
import pytest
import torch
from torch import nn

from selffl.data.federation import Federation
from selffl.training.flat import FlatModel
from selffl.training.model import ModelTask

CROSS, BINARY = nn.functional.cross_entropy, nn.functional.binary_cross_entropy_with_logits
CLIENT = np.repeat([0, 1, 2], [5, 1, 8])
RNG = np.random.default_rng(3)
FEATURES = torch.from_numpy(RNG.normal(size=(14, 4))).float()
LABELS = torch.from_numpy(RNG.integers(0, 3, 14))


def rows(labels):
    return Federation.from_arrays(FEATURES, labels, CLIENT, test_fraction=0.0).train


def counted(module, loss, labels, num_classes, clients=(2, 0)):
    model = FlatModel(module)
    task = ModelTask(model, loss, rows(labels), torch.tensor(clients), 0.1, 4, 0, 1)
    return task.class_counts(num_classes).tolist()


def test_rows_are_counted_by_class_and_client():
    expected = [np.bincount(LABELS[m == CLIENT], minlength=3).tolist() for m in (2, 0)]
    for loss in (CROSS, nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)):
        assert counted(nn.Linear(4, 3), loss, LABELS, 3) == expected


@pytest.mark.parametrize("axis", [False, True])
def test_one_score_tells_two_classes_apart(axis):
    labels = (LABELS > 0).float()
    expected = [[int((labels[m == CLIENT] == k).sum()) for k in (0, 1)] for m in (2, 0)]
    assert counted(nn.Linear(4, 1), BINARY, labels[:, None] if axis else labels, 2) == expected


@pytest.mark.parametrize(
    ("module", "loss", "labels"),
    [
        (nn.Linear(4, 3), nn.functional.mse_loss, LABELS),
        (nn.Linear(4, 3), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])), LABELS),
        (nn.Linear(4, 3, bias=False), CROSS, LABELS),
        (nn.Linear(4, 3), lambda outputs, labels: CROSS(outputs, labels), LABELS),
        (nn.Sequential(nn.Linear(4, 3), nn.Tanh()), CROSS, LABELS),
    ],
    ids=["squares", "weighted classes", "no bias", "a loss of one's own", "not added to the score"],
)
def test_where_nothing_is_known_of_classes_there_are_no_rows(module, loss, labels):
    assert counted(module, loss, labels, 3) == [[0.0] * 3] * 2


class Backwards(nn.Module):
    """Its last layer by name is the first to be used."""

    def __init__(self):
        super().__init__()
        self.second, self.first = nn.Linear(3, 3), nn.Linear(4, 3)

    def forward(self, features):
        return self.second(self.first(features))


@pytest.mark.parametrize(
    ("module", "place", "adds"),
    [
        (nn.Linear(4, 3), (12, 15), True),
        (nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 3), nn.LogSoftmax(-1)), (16, 19), True),
        (nn.Sequential(nn.Linear(4, 1)), (4, 5), True),
        (nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), (4, 5), False),
        (Backwards(), (24, 27), False),
        (nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), None, False),
        (nn.Linear(4, 3, bias=False), None, False),
    ],
    ids=["linear", "log-softmax", "one score", "one probability", "named backwards", "another layer last", "no bias"],
)
def test_a_bias_is_what_adds_to_the_scores(module, place, adds):
    model = FlatModel(module)
    assert (model.class_bias and tuple(model.class_bias)) == place
    assert model.adds_bias(FEATURES[:1]) is adds


def test_a_frozen_bias_is_none():
    module = nn.Linear(4, 3)
    module.bias.requires_grad_(False)
    assert FlatModel(module).class_bias is None


def test_a_shift_is_put_on_the_scores_and_nowhere_else():
    for width, shift in ((3, [1.0, -2.0, 0.5]), (1, [0.25, 1.0])):
        model = FlatModel(nn.Linear(4, width))
        before = model.params
        after = model.class_bias.added(before.expand(2, -1), torch.tensor([shift, shift]))
        more = model(after[1], FEATURES) - model(before, FEATURES)
        expected = torch.tensor(shift) if width > 1 else torch.tensor([0.75])
        torch.testing.assert_close(more, expected.expand(14, -1))
        torch.testing.assert_close(model.params, before, rtol=0, atol=0)
