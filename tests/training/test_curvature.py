"""First and second derivatives of the loss of all rows: against torch's own, client by client."""

import numpy as np
import pytest
import torch
from torch import nn

import selffl
from selffl.training.flat import FlatModel
from selffl.training.model import ModelSource

SIZES = (7, 1, 30, 12)


def source_of(module, loss, labels, batch_size=5):
    generator = torch.Generator().manual_seed(0)
    client = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    features = torch.randn(sum(SIZES), 3, generator=generator)
    labels = labels(features, generator)
    fed = selffl.Federation.from_arrays(features, labels, client, test_fraction=0.0)
    torch.manual_seed(1)
    return ModelSource(fed, FlatModel(module()), loss, 0.1, batch_size), (features, labels, client)


def classes(features, generator):
    return torch.randint(3, (len(features),), generator=generator)


def values(features, generator):
    return torch.randn(len(features), 2, generator=generator)


def by_class(outputs, labels):
    """A mean over rows that weigh by their class, as torch has it."""
    return nn.functional.cross_entropy(outputs, labels, weight=torch.tensor([1.0, 5.0, 0.2]).to(outputs))


def looking(outputs, labels):
    """A loss that asks for numbers, which vmap cannot give."""
    return nn.functional.mse_loss(outputs, labels) * (2.0 if float(labels.sum().item()) > -1e9 else 1.0)


class Frozen(nn.Module):
    """A linear model of features that nobody trains."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x).tanh())


@pytest.mark.parametrize(
    ("module", "loss", "labels"),
    [
        (lambda: nn.Linear(3, 3), nn.functional.cross_entropy, classes),
        (lambda: nn.Linear(3, 2), nn.functional.mse_loss, values),
        (Frozen, nn.functional.cross_entropy, classes),
        (lambda: nn.Linear(3, 3), by_class, classes),
        (lambda: nn.Linear(3, 2), looking, values),
    ],
)
def test_derivatives_are_those_of_each_client_alone(module, loss, labels):
    source, (features, labels, client) = source_of(module, loss, labels)
    task = source.task(torch.tensor([2, 0, 1]), 1)
    generator = torch.Generator().manual_seed(3)
    params = torch.randn(3, source.model.num_parameters, generator=generator, dtype=torch.float64)
    found = task.derivatives(params)
    double = FlatModel(source.model.module.double())
    precise = [part.double() if part.is_floating_point() else part for part in (features, labels)]
    for place, m in enumerate((2, 0, 1)):
        own = [part[client == m] for part in precise]

        def total(point, own=own):
            return loss(double(point, own[0]), own[1]) * len(own[1])

        torch.testing.assert_close(found.loss[place], total(params[place]))
        torch.testing.assert_close(
            found.gradient[place], torch.autograd.functional.jacobian(total, params[place]), rtol=1e-9, atol=1e-9
        )
        torch.testing.assert_close(
            found.curvature[place], torch.autograd.functional.hessian(total, params[place]), rtol=1e-9, atol=1e-9
        )
        squared = SIZES[m] * 2.0 if loss is nn.functional.mse_loss else 0.0
        assert found.num_errors[place] == squared
    passes = 1 + source.model.num_parameters
    assert task.num_gradients.tolist() == [passes * -(-SIZES[m] // 5) for m in (2, 0, 1)]


def test_rows_that_fill_blocks_up_do_not_count(monkeypatch):
    """Clients of other sizes beside it, or none: the same to rounding."""
    source, _ = source_of(lambda: nn.Linear(3, 3), nn.functional.cross_entropy, classes)
    params = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 12)))
    whole = source.task(torch.arange(4), 1).derivatives(params)
    for m in range(4):
        alone = source.task(torch.tensor([m]), 1).derivatives(params[m : m + 1])
        for one, several in zip(alone, whole, strict=True):
            torch.testing.assert_close(one[0], several[m], rtol=1e-12, atol=1e-12)
