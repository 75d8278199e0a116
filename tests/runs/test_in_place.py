"""Modules that work in place on their input answer as they do out of place, and alter nobody's rows."""

import numpy as np
import pytest
import torch
from torch import nn

import selffl

METHODS = ("self-fl", "self-fl-auto", "ditto", "pfedme", "perfedavg")


class OutOfPlace(nn.Module):
    """Standardises its rows, then one layer; new tensors all the way."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer((x - 1.0) / 2.0)


class InPlace(OutOfPlace):
    """The same function, written over its input."""

    def forward(self, x):
        x -= 1.0
        x /= 2.0
        return self.layer(x)


def made(kind):
    torch.manual_seed(0)
    return kind()


def drawn_rows():
    drawn = np.random.default_rng(0)
    rows = torch.from_numpy(drawn.normal(1.0, 2.0, size=(240, 3)).astype(np.float32))
    client = np.repeat(["a", "b", "c", "d"], 60)
    return rows, (rows[:, 0] > 1.0).long(), client


def federation():
    return selffl.Federation.from_arrays(*drawn_rows(), test_fraction=0.3)


@pytest.mark.parametrize(
    ("method", "gradients"), [*((method, "vmap") for method in METHODS), ("ditto", "loop"), ("ditto", "unfold")]
)
def test_a_module_in_place_trains_and_answers_as_out_of_place(method, gradients, short):
    fed, settings = federation(), {"rounds": 2, "participation": 1.0, "evaluate_every": 1, "gradients": gradients}
    before = [part.clone() for part in (fed.train.features, fed.test.features)]
    expected = selffl.train(made(OutOfPlace), fed, short(method), **settings)
    found = selffl.train(made(InPlace), fed, short(method), **settings)
    for altered, own in zip((fed.train.features, fed.test.features), before, strict=True):
        assert torch.equal(altered, own)
    for client in fed.clients:
        pairs = zip(
            found.personal_model(client).parameters(), expected.personal_model(client).parameters(), strict=True
        )
        assert all(torch.equal(*pair) for pair in pairs)
    for ours, theirs in zip(found.history, expected.history, strict=True):
        assert ours["weighted_accuracy"] == theirs["weighted_accuracy"]


@pytest.mark.slow
def test_arrays_that_are_asked_about_stay_as_they_are():
    fed = federation()
    few = selffl.algorithm("self-fl-auto", num_local_steps=5)
    runs = [selffl.train(made(kind), fed, few, rounds=3, participation=1.0) for kind in (OutOfPlace, InPlace)]
    rows = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
    given = torch.from_numpy(rows.copy())
    expected, found = (run.probabilities("a", given) for run in runs)
    assert np.array_equal(np.asarray(found), np.asarray(expected))
    assert np.array_equal(given.numpy(), rows)
    labels = torch.tensor([0, 1] * 4)
    models = [run.welcome((given, labels)) for run in runs]
    assert np.array_equal(given.numpy(), rows)
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours, theirs)


def test_a_relu_in_place_on_rows_that_it_leaves_alone_is_noticed():
    # All rows of the probe are positive; some others are not.
    rows = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    rows[:20] = rows[:20].abs()
    fed = selffl.Federation.from_arrays(rows, (rows[:, 0] > 0).long(), np.repeat([0, 1, 2], 20), test_fraction=0.3)
    before = fed.test.features.clone()
    selffl.train(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2)), fed, rounds=2)
    assert torch.equal(fed.test.features, before)


@pytest.mark.slow
@pytest.mark.parametrize("standardise", [True, False])
def test_an_estimator_leaves_the_arrays_alone(standardise):
    pytest.importorskip("sklearn")
    features, labels, client = drawn_rows()
    rows = features.double().numpy()
    few, found = selffl.algorithm("self-fl-auto", num_local_steps=5), []
    for kind in (OutOfPlace, InPlace):
        model = selffl.SelfFLClassifier(made(kind), algorithm=few, rounds=3, standardise=standardise)
        given = rows.copy()
        model.fit(given, labels.numpy(), client=client)
        found += [model.predict_proba(given, client=client), model.predict_proba(given)]
        assert np.array_equal(given, rows)
    assert np.array_equal(found[0], found[2])
    assert np.array_equal(found[1], found[3])
