"""Features of a model, and gradients of objectives of them, against plain autograd, one client at a time."""

import copy

import pytest
import torch
from torch import nn

from selffl.algorithms.features import join_extra, require_head
from selffl.algorithms.layers import Head
from selffl.algorithms.population import Population
from selffl.algorithms.solver import descend
from selffl.data.federation import Rows
from selffl.errors import ConfigError
from selffl.training.features import check_head, features_of
from selffl.training.flat import FlatModel
from selffl.training.model import ModelTask

CROSS_ENTROPY = nn.functional.cross_entropy
SIZES, RATE, BATCH = (7, 4, 9), 0.2, 3
WAYS = ("vmap", "loop", "unfold")


def network(middle=None):
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, stride=2), *([middle] if middle else []), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)
    ).double()


def rows():
    generator = torch.Generator().manual_seed(6)
    features = torch.randn(sum(SIZES), 1, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (sum(SIZES),), generator=generator)
    return Rows(features, labels, torch.tensor([0, *SIZES]).cumsum(0))


def task_of(module, gradients="auto"):
    return ModelTask(FlatModel(module), CROSS_ENTROPY, rows(), torch.arange(3), RATE, BATCH, 0, 1, gradients)


def models(module):
    """Three models around the module's own."""
    params = FlatModel(module).params
    noise = torch.randn(3, len(params), generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return params + 0.1 * noise.abs()


def load(module, params):
    return FlatModel(module).load(params)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("middle", [None, nn.BatchNorm2d(2), nn.Dropout(0.5)])
def test_features_are_what_the_last_layer_is_given(way, middle):
    module = network(middle)
    model, params = FlatModel(module), models(module)
    inputs = rows().features[:12].reshape(3, 4, 1, 8, 8)
    with torch.no_grad():
        expected = torch.stack([load(module, own)[:-1](these) for own, these in zip(params, inputs, strict=True)])
    torch.testing.assert_close(features_of(model, params, inputs, way), expected, rtol=1e-12, atol=1e-12)
    task = task_of(module)
    batch = task.batch(0, torch.arange(3))
    with torch.no_grad():
        expected = torch.stack([load(module, own)[:-1](these) for own, these in zip(params, batch[0], strict=True)])
    torch.testing.assert_close(task.features(params, batch), expected, rtol=1e-12, atol=1e-12)


def objective(seen, extra, shift, centre):
    """Two losses, one of which sees features and scores as they are given; a pull on the mean feature."""
    own = seen.features.detach() @ extra.reshape(3, 18).T
    pull = (seen.features.mean(0) - centre).square().mean()
    return seen.loss(seen.scores + shift, seen.labels) + seen.loss(seen.scores.detach() + own, seen.labels) + pull


def by_hand(module, steps, task, extra, shift, centre):
    """The same for one client by torch's own SGD, body, head and extra numbers each by what it is trained on."""
    module, extra = copy.deepcopy(module).train(), extra.clone().requires_grad_()
    for draw in range(steps):
        features, labels = task(draw)
        seen = module[:-1](features)
        scores = module[-1](seen)
        loss = CROSS_ENTROPY(scores + shift, labels) + (seen.mean(0) - centre).square().mean()
        personal = CROSS_ENTROPY(scores.detach() + seen.detach() @ extra.reshape(3, 18).T, labels)
        slopes = torch.autograd.grad(loss, list(module.parameters()))
        (slope,) = torch.autograd.grad(personal, extra)
        with torch.no_grad():
            for part, step in zip(module.parameters(), slopes, strict=True):
                part -= RATE * step
            extra -= RATE * slope
    return extra.detach(), FlatModel(module).params


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("middle", [None, nn.BatchNorm2d(2)])
def test_training_on_an_objective_is_that_of_plain_autograd(way, middle):
    module, steps = network(middle), 4
    task, size = task_of(module, way), sum(part.numel() for part in module.parameters())
    params = models(module)
    extra, shift, centre = (torch.randn(3, n, dtype=torch.float64) for n in (54, 3, 18))
    found = descend(task.with_objective(objective, 54, (shift, centre)), join_extra(extra, params), steps)
    assert task.num_gradients.tolist() == [steps] * 3
    assert found.shape == (3, 54 + params.shape[1])
    for m in range(3):
        batches = lambda draw, m=m: tuple(part[0] for part in task.batch(draw, torch.tensor([m])))  # noqa: E731
        own, trained = by_hand(load(module, params[m]), steps, batches, extra[m], shift[m], centre[m])
        torch.testing.assert_close(found[m], torch.cat([own, trained]), rtol=1e-9, atol=1e-12)
        assert (found[m, 54:] - params[m])[:size].abs().max() > 1e-2
        assert (found[m, :54] - extra[m]).abs().max() > 1e-2


def test_clients_may_take_different_numbers_of_steps():
    module = network()
    params, constants = models(module), (torch.zeros(3, 3).double(), torch.ones(3, 18).double())
    start = join_extra(torch.zeros(3, 54).double(), params)
    found = descend(task_of(module).with_objective(objective, 54, constants), start, torch.tensor([1, 5, 3]))
    for m, steps in enumerate((1, 5, 3)):
        every = descend(task_of(module).with_objective(objective, 54, constants), start, steps)
        torch.testing.assert_close(found[m], every[m], rtol=1e-12, atol=1e-12)


def test_the_head_is_the_last_linear_layer():
    module = network()
    model, params = FlatModel(module), models(module)
    size = len(model.params)
    assert model.head == check_head(model, rows().features) == Head(size - 57, 3, 18, True)
    assert (model.head.bias_start, model.head.stop) == (size - 3, size)
    z = torch.randn(3, 4, 18, dtype=torch.float64)
    for own, features, found in zip(params, z, model.head.scores(params, z), strict=True):
        torch.testing.assert_close(found, load(module, own)[-1](features).detach())
    bare = FlatModel(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2, bias=False)))
    assert bare.head == check_head(bare, torch.randn(1, 4)) == Head(25, 2, 5, False)
    assert FlatModel(nn.Linear(4, 3)).head == Head(0, 3, 4, True)


class Named(nn.Module):
    """A head that is given its input by name."""

    def __init__(self):
        super().__init__()
        self.body, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.last(input=self.body(x).tanh())


def test_an_input_that_is_given_by_name_is_caught():
    module, rows = Named(), torch.randn(1, 5, 4)
    model = FlatModel(module)
    torch.testing.assert_close(features_of(model, model.params[None], rows, "vmap"), module.body(rows).tanh().detach())


class Twice(nn.Module):
    """A last layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.body, self.last = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.last(self.body(x)))


class Backwards(nn.Module):
    """The layer that is made last comes first."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.first(x))


class Tied(nn.Module):
    """A head whose weight is the body's, too."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head((x @ self.head.weight).tanh())


def frozen(part):
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    getattr(module[-1], part).requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3)), r"of Sequential \(1\) is Conv1d; expected an"),
        (nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), r"of Sequential \(1\) is LayerNorm; expected an"),
        (nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), r"outputs of Sequential are not those of its last layer \(0"),
        (nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 3)), "for one vector of features a row; expected"),
        (Twice(), r"outputs of Twice are not those of its last layer \(last\)"),
        (Backwards(), r"outputs of Backwards are not those of its last layer \(first\)"),
        (Tied(), r"outputs of Tied are not those of its last layer \(head\)"),
        (frozen("bias"), "is Linear; expected an nn.Linear that is trained as a whole"),
    ],
)
def test_a_model_without_features_is_refused_in_a_line(module, said):
    with pytest.raises(ConfigError, match=said) as error:
        check_head(FlatModel(module), torch.rand(2, 4) + 0.5)
    assert "\n" not in str(error.value)


def test_a_method_that_needs_a_head_says_so():
    model = FlatModel(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)))
    with pytest.raises(ConfigError, match=r"^fedrod needs the input of the last layer, and that of the model \(1\) is"):
        require_head("fedrod", Population(3, layers=model.layers, head=model.head))
    assert require_head("fedrod", Population(3, head=Head(0, 3, 4, True))) == Head(0, 3, 4, True)
