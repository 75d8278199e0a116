"""Gradients and outputs of a block of clients: every way against ordinary autograd, and which way is taken."""

import pytest
import torch
from sample_modules import (
    BATCH,
    CROSS_ENTROPY,
    MODULES,
    NUM_CLIENTS,
    cohort_of,
    features_of,
    gradient_by_autograd,
    random,
    seeded,
)
from torch import nn

from selffl.errors import ConfigError
from selffl.models import build
from selffl.training import blocks
from selffl.training.blocks import gradient_of, outputs_of, quickest_way, softmax_regression_gradient
from selffl.training.flat import FlatModel

WAYS = ("auto", "vmap", "loop", "unfold")
SOFTMAX = "linear"

every_way = pytest.mark.parametrize(("name", "way"), [(name, way) for name in MODULES for way in WAYS])


@pytest.mark.parametrize("scale", [0.1, 1.0, 100.0])
@every_way
def test_gradients_of_a_cohort_equal_autograd_client_by_client(name, way, scale):
    module, model, params, features, labels = cohort_of(name, scale)
    found = gradient_of(model, CROSS_ENTROPY, way)(params, features, labels)
    assert found.shape == params.shape
    for client in range(NUM_CLIENTS):
        expected = gradient_by_autograd(module, params[client], features[client], labels[client])
        size = float(expected.abs().max())
        assert size > 1e-9 * scale
        torch.testing.assert_close(found[client], expected, rtol=1e-12, atol=1e-12 * size)


@every_way
def test_and_in_single_precision(name, way):
    module, model, params, features, labels = cohort_of(name, scale=0.1, dtype=torch.float32)
    found = gradient_of(model, CROSS_ENTROPY, way)(params, features, labels)
    assert found.dtype == torch.float32
    for client in range(NUM_CLIENTS):
        expected = gradient_by_autograd(module, params[client], features[client], labels[client])
        torch.testing.assert_close(found[client], expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("way", WAYS)
def test_a_lone_client_has_the_gradient_it_has_in_a_cohort(way):
    _, model, params, features, labels = cohort_of("mlp")
    gradient = gradient_of(model, CROSS_ENTROPY, way)
    torch.testing.assert_close(
        gradient(params[:1], features[:1], labels[:1]), gradient(params, features, labels)[:1], rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_another_loss(way):
    module = seeded(lambda: nn.Linear(3, 1), dtype=torch.float64)
    params, features, targets = random(2, 4), random(2, 5, 3, seed=1), random(2, 5, 1, seed=2)
    found = gradient_of(FlatModel(module), nn.functional.mse_loss, way)(params, features, targets)
    for client in range(2):
        expected = gradient_by_autograd(
            module, params[client], features[client], targets[client], nn.functional.mse_loss
        )
        torch.testing.assert_close(found[client], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_that_is_not_used_has_no_slope(way):
    class Idle(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.idle = nn.Parameter(torch.ones(4))

    params, labels = random(2, 12, dtype=torch.float32), torch.tensor([[0, 1], [1, 1]])
    found = gradient_of(FlatModel(Idle()), CROSS_ENTROPY, way)(params, torch.ones(2, 2, 3), labels)
    named = FlatModel(Idle()).parts(found[0])
    assert named["idle"].tolist() == [0.0] * 4
    assert named["weight"].abs().max() > 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["linear", "mlp", "cnn"])
def test_gradients_alter_nothing_they_are_given(name, way):
    _, model, params, features, labels = cohort_of(name)
    kept = [tensor.clone() for tensor in (params, features, labels, model.params)]
    with torch.no_grad():  # nor do they mind where they are called
        found = gradient_of(model, CROSS_ENTROPY, way)(params, features, labels)
    assert not found.requires_grad
    for tensor, before in zip((params, features, labels, model.params), kept, strict=True):
        assert torch.equal(tensor, before)
        assert not tensor.requires_grad
    assert all(part.grad is None for part in model.module.parameters())


@pytest.mark.parametrize("way", WAYS)
def test_one_model_seen_by_many_clients_will_do(way):
    _, model, params, features, labels = cohort_of("mlp")
    shared = params[0].expand(NUM_CLIENTS, -1)
    gradient = gradient_of(model, CROSS_ENTROPY, way)
    torch.testing.assert_close(gradient(shared, features, labels), gradient(shared.clone(), features, labels))


# ---------------------------------------------------------------------------------------------------------- closed form


def test_only_a_plain_linear_layer_under_cross_entropy_has_the_closed_form(monkeypatch):
    class Doubled(nn.Linear):
        def forward(self, features):
            return 2 * super().forward(features)

    used = []

    def noted(*arguments):
        used.append(True)
        return softmax_regression_gradient(*arguments)

    monkeypatch.setattr(blocks, "softmax_regression_gradient", noted)

    def chosen(module, loss=CROSS_ENTROPY, gradients="auto", labels=None):
        used.clear()
        model = FlatModel(module)
        labels = torch.tensor([[0, 1], [3, 2]]) if labels is None else labels
        gradient_of(model, loss, gradients)(model.params.expand(2, -1), torch.ones(2, 2, 3), labels)
        return bool(used)

    assert chosen(nn.Linear(3, 4))
    assert not chosen(nn.Linear(3, 4), gradients="vmap")
    assert not chosen(nn.Linear(3, 4, bias=False))
    assert not chosen(Doubled(3, 4))
    assert not chosen(nn.Sequential(nn.Linear(3, 4)))
    assert not chosen(nn.Linear(3, 4), lambda outputs, labels: 2 * CROSS_ENTROPY(outputs, labels))
    assert not chosen(nn.Linear(3, 4), labels=torch.full((2, 2, 4), 0.25))  # probabilities, not classes


@pytest.mark.parametrize("scale", [0.1, 1.0, 1000.0])
def test_the_closed_form_equals_autograd_over_the_cohort(scale):
    _, model, params, features, labels = cohort_of(SOFTMAX, scale)
    by_autograd = gradient_of(model, CROSS_ENTROPY, "vmap")
    closed = softmax_regression_gradient(params, features, labels)
    torch.testing.assert_close(closed, by_autograd(params, features, labels), rtol=1e-12, atol=1e-12)


# -------------------------------------------------------------------------------------------------------- outputs, ways


@every_way
def test_outputs_of_a_block_are_the_modules(name, way):
    _, model, params, features, _ = cohort_of(name)
    chosen = quickest_way(model, params, features) if way == "auto" else way
    found = outputs_of(model, params, features, chosen)
    for client in range(NUM_CLIENTS):
        torch.testing.assert_close(found[client], model(params[client], features[client]), rtol=1e-12, atol=1e-12)


def test_a_convolution_of_much_work_is_done_client_by_client_on_a_cpu():
    def way(side, num_clients, batch_size):
        model = FlatModel(build("cnn", (3, side, side), 10))
        features = torch.zeros(num_clients, batch_size, 3, side, side)
        return quickest_way(model, model.params.expand(num_clients, -1), features)

    assert way(32, 5, 20) == "loop"  # 12 million multiplications
    assert way(32, 5, 2) == "vmap"
    assert way(16, 5, 4) == "vmap"
    assert way(16, 1, 4) == "loop"


def test_the_work_of_convolutions_is_counted():
    model = FlatModel(build("cnn", (3, 32, 32), 10))
    by_hand = 6 * 28 * 28 * 3 * 25 + 16 * 10 * 10 * 6 * 25
    assert model.convolution_work(torch.zeros(1, 3, 32, 32), model.params) == by_hand
    assert FlatModel(nn.Linear(2, 2)).convolution_work(torch.zeros(1, 2), torch.zeros(6)) == 0
    assert not any(part._forward_hooks for part in model.module.modules())


def test_an_unknown_way_is_refused():
    with pytest.raises(ConfigError, match=r"^unknown gradients 'vmpa'; did you mean 'vmap'\? Expected one of: auto, "):
        gradient_of(FlatModel(nn.Linear(2, 2)), CROSS_ENTROPY, "vmpa")


class Deciding(nn.Linear):
    """A module that looks at numbers to decide what to do."""

    def forward(self, rows):
        return super().forward(rows if rows.sum() > 0 else -rows)


def test_what_cannot_be_vectorised_is_said_in_one_line_and_the_loop_can():
    model = FlatModel(Deciding(3, 2))
    arguments = model.params.expand(2, -1), torch.ones(2, BATCH, 3), torch.zeros(2, BATCH, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"^Deciding cannot be computed .* Train it with gradients='loop'\.$"):
        gradient_of(model, CROSS_ENTROPY, "vmap")(*arguments)
    by_loop = gradient_of(model, CROSS_ENTROPY, "loop")(*arguments)
    assert by_loop.isfinite().all()
    assert torch.equal(gradient_of(model, CROSS_ENTROPY)(*arguments), by_loop)


def test_other_errors_are_not_taken_for_it():
    model = FlatModel(nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(RuntimeError, match=r"shape|size"):
        gradient_of(model, CROSS_ENTROPY)(model.params.expand(2, -1), torch.ones(2, 4, 5), torch.ones(2, 4).long())


# ------------------------------------------------------------------------------------------------------------- unfolded


@pytest.mark.parametrize("name", ["cnn", "other convolutions", "one-dimensional convolution", "mlp"])
def test_unfolded_convolutions_are_the_same_function(name):
    module = seeded(MODULES[name][0], dtype=torch.float64)
    model = FlatModel(module)
    features = features_of(name, 3)
    torch.testing.assert_close(model.unfolded(model.params, features), module(features), rtol=1e-12, atol=1e-12)
    assert torch.equal(model.unfolded.params, model.params)
    plain = [part for part in model.unfolded.module.modules() if type(part) is nn.Conv2d and "forward" in vars(part)]
    assert len(plain) == {"cnn": 1, "other convolutions": 2}.get(name, 0)  # not the grouped one that pads to "same"
    assert not any("forward" in vars(part) for part in module.modules())


def test_an_unfolded_convolution_takes_one_image_too():
    module = seeded(lambda: nn.Sequential(nn.Conv2d(2, 3, 3)), dtype=torch.float64)
    image = random(2, 6, 5)
    torch.testing.assert_close(FlatModel(module).unfolded.module(image), module(image), rtol=1e-12, atol=1e-12)
