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
    for loss in (CROSS, nn.CrossEntropyLoss()):
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
        (nn.Linear(4, 3), nn.CrossEntropyLoss(label_smoothing=0.1), LABELS),
        (nn.Linear(4, 3, bias=False), CROSS, LABELS),
        (nn.Linear(4, 3), lambda outputs, labels: CROSS(outputs, labels), LABELS),
        (nn.Sequential(nn.Linear(4, 3), nn.Tanh()), CROSS, LABELS),
    ],
    ids=["squares", "weighted classes", "smoothed labels", "no bias", "a loss of one's own", "not added to the score"],
)
def test_where_nothing_is_known_of_classes_there_are_no_rows(module, loss, labels):
    assert counted(module, loss, labels, 3) == [[0.0] * 3] * 2


def rows_of_half(task, slot, size):
    """Features and labels of one half of a client's rows, as its minibatches hold them: each row once."""
    found = {}
    for draw in range(-(-size // task.batch_size)):
        features, labels = (part[0] for part in task.batch(draw, torch.tensor([slot])))
        found |= {x.numpy().tobytes(): label for x, label in zip(features, labels, strict=True)}
    return list(found.values())


IGNORED = torch.where(torch.arange(14) % 4 == 1, 7, LABELS)
SOFT = torch.linspace(0.0, 1.0, 14)[:, None]
HALVED = {
    "three classes": (nn.Linear(4, 3), CROSS, LABELS),
    "rows without a class": (nn.Linear(4, 3), nn.CrossEntropyLoss(ignore_index=7), IGNORED),
    "one score": (nn.Linear(4, 1), BINARY, (LABELS > 0).float()[:, None]),
    "one score, soft labels": (nn.Linear(4, 1), BINARY, SOFT),
    "a network": (nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 3)), CROSS, LABELS),
}


def parts_of(label, num_classes, is_single):
    """1 for a row's class; of a soft label of two, a part of each."""
    if is_single:
        return [1.0 - float(label), float(label)]
    return [float(int(label) == k) for k in range(num_classes)]


@pytest.mark.parametrize("case", HALVED)
def test_scores_and_counts_of_halves_are_those_of_their_rows(case):
    """Client 1 has a single row: its second half has no row of any class."""
    module, loss, labels = HALVED[case]
    model, clients = FlatModel(module), (2, 1, 0)
    is_single, num_classes = model.class_bias.is_single, model.class_bias.num_classes
    halves = ModelTask(model, loss, rows(labels), torch.tensor(clients), 0.1, 3, 5, 2).halves()
    sizes = halves.num_examples.reshape(-1).tolist()
    assert sizes == [4, 4, 1, 0, 3, 2]
    counts = halves.class_counts(num_classes).reshape(6, num_classes)
    for slot, size in enumerate(sizes):
        own = [parts_of(label, num_classes, is_single) for label in rows_of_half(halves, slot, size)]
        assert len(own) == size
        expected = np.sum(own, axis=0) if own else np.zeros(num_classes)
        assert counts[slot].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    params = model.params + 0.1 * torch.arange(6.0)[:, None]  # a model for each slot
    scores, targets = halves.class_scores(params, 1)
    assert scores.shape == targets.shape == (6, 3, num_classes)
    for slot in range(6):
        features, answers = (part[0] for part in halves.batch(1, torch.tensor([slot])))
        own = model.load(params[slot])
        for row in range(3):
            with torch.no_grad():
                expected = own(features[row]).tolist()
            assert scores[slot, row].tolist() == pytest.approx([0.0] * is_single + expected, abs=1e-5)
            assert targets[slot, row].tolist() == pytest.approx(parts_of(answers[row], num_classes, is_single))
    assert (targets.sum(-1) == 0).any() == (case == "rows without a class")


def test_where_nothing_is_known_of_classes_there_are_no_scores():
    for module, loss in ((nn.Linear(4, 3), nn.MSELoss()), (nn.Linear(4, 3, bias=False), CROSS)):
        task = ModelTask(FlatModel(module), loss, rows(LABELS), torch.arange(3), 0.1, 3, 5, 2).halves()
        assert task.class_scores(FlatModel(module).params.expand(6, -1), 0) is None


class Backwards(nn.Module):
    """Its last layer by name is the first to be used."""

    def __init__(self):
        super().__init__()
        self.second, self.first = nn.Linear(3, 3), nn.Linear(4, 3)

    def forward(self, features):
        return self.second(self.first(features))


class BesideInputs(nn.Module):
    """Its bias is added to its outputs, and so are three of its inputs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, features):
        return self.linear(features) + features[:, :3]


@pytest.mark.parametrize(
    ("module", "place", "adds"),
    [
        (nn.Linear(4, 3), (12, 15, 0), True),
        (nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 3), nn.LogSoftmax(-1)), (16, 19, 10), True),
        (nn.Sequential(nn.Linear(4, 1)), (4, 5, 0), True),
        (nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), (4, 5, 0), False),
        (Backwards(), (24, 27, 12), False),
        (BesideInputs(), (12, 15, 0), False),
        (nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), None, False),
        (nn.Linear(4, 3, bias=False), None, False),
    ],
    ids=[
        "linear",
        "log-softmax",
        "one score",
        "one probability",
        "named backwards",
        "beside the inputs",
        "another layer last",
        "no bias",
    ],
)
def test_scores_are_what_the_last_layer_makes(module, place, adds):
    model = FlatModel(module)
    assert (model.class_bias and tuple(model.class_bias)) == place
    assert model.has_scores(FEATURES[:1]) is adds


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_layer_that_is_partly_frozen_makes_no_scores_of_its_own(part):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    getattr(module[1], part).requires_grad_(False)
    assert FlatModel(module).class_bias is None


def test_scores_are_made_larger_and_nothing_else_is():
    model = FlatModel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)))
    before = model.params
    after = model.class_bias.scale_scores(before, torch.tensor([2.0, 0.5]))
    for params, factor in zip(after, (2.0, 0.5), strict=True):
        torch.testing.assert_close(model(params, FEATURES), factor * model(before, FEATURES))
        torch.testing.assert_close(params[:20], before[:20], rtol=0, atol=0)
    torch.testing.assert_close(model.params, before, rtol=0, atol=0)


def test_what_everybody_has_is_made_larger_once():
    model = FlatModel(nn.Linear(4, 3))
    params, factor = model.params.expand(2, 5, -1), torch.tensor(1.5)
    alike = model.class_bias.scale_scores(params, factor.expand(2, 5))
    each = model.class_bias.scale_scores(params.clone(), torch.full((2, 5), 1.5))
    assert torch.equal(alike, each)
    assert alike.stride(-2) == 0
    torch.testing.assert_close(alike[1, 4], 1.5 * model.params, rtol=0, atol=0)


def test_a_shift_is_put_on_the_scores_and_nowhere_else():
    for width, shift in ((3, [1.0, -2.0, 0.5]), (1, [0.25, 1.0])):
        model = FlatModel(nn.Linear(4, width))
        before = model.params
        after = model.class_bias.add_shift(before.expand(2, -1), torch.tensor([shift, shift]))
        more = model(after[1], FEATURES) - model(before, FEATURES)
        expected = torch.tensor(shift) if width > 1 else torch.tensor([0.75])
        torch.testing.assert_close(more, expected.expand(14, -1))
        torch.testing.assert_close(model.params, before, rtol=0, atol=0)
