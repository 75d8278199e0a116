"""The studies' models: what they are, and that a seed alone decides their parameters."""

import numpy as np
import pytest
import torch
from torch import nn

from selffl.data.text import Embeddings
from selffl.errors import ConfigError
from selffl.models import MODELS, build, text

SHAPES = {"softmax": (20,), "mlp": (20,), "cnn": (3, 32, 32), "lstm": (5,), "wakeword": (1, 40, 76)}


@pytest.fixture(autouse=True)
def vectors(monkeypatch):
    """Word vectors for the LSTM, from no file."""
    table = Embeddings(("good", "bad"), np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32))
    monkeypatch.setattr(text, "read_embeddings", lambda name: table)


def test_every_model_has_a_shape_here():
    assert set(SHAPES) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_a_seed_decides_the_parameters_and_the_global_state_has_no_part(name):
    def made(seed, world):
        torch.manual_seed(world)
        before = torch.get_rng_state()
        module = build(name, SHAPES[name], 4, seed)
        assert torch.equal(torch.get_rng_state(), before)
        return nn.utils.parameters_to_vector(module.parameters())

    assert torch.equal(made(3, world=1), made(3, world=2))
    # Softmax regression draws nothing: it starts at 0.
    assert torch.equal(made(3, world=1), made(4, world=1)) == (name == "softmax")


@pytest.mark.parametrize("name", MODELS)
def test_rows_give_one_output_per_class(name):
    module = build(name, SHAPES[name], 4)
    rows = torch.zeros(5, *SHAPES[name], dtype=torch.int64 if name == "lstm" else torch.float32)
    assert module(rows).shape == (5, 4)


def test_the_cnn_is_the_tutorials():
    """https://pytorch.org/tutorials/beginner/blitz/cifar10_tutorial.html, layer by layer."""
    module = build("cnn", (3, 32, 32), 10)
    shapes = [tuple(part.shape) for part in module.parameters() if part.ndim > 1]
    assert shapes == [(6, 3, 5, 5), (16, 6, 5, 5), (120, 400), (84, 120), (10, 84)]
    assert sum(part.numel() for part in module.parameters()) == 62_006
    conv1, conv2, first, second, third = [part for part in module if list(part.parameters())]
    images = torch.rand(2, 3, 32, 32)
    pool, relu = nn.MaxPool2d(2, 2), torch.relu
    hidden = torch.flatten(pool(relu(conv2(pool(relu(conv1(images)))))), 1)
    assert torch.equal(module(images), third(relu(second(relu(first(hidden))))))


@pytest.mark.parametrize("side", [(16, 16), (28, 28), (17, 40)])
def test_the_cnn_takes_other_images(side):
    assert build("cnn", (1, *side), 3)(torch.zeros(2, 1, *side)).shape == (2, 3)


def test_the_mlp_has_one_hidden_layer_of_rectified_units():
    module = build("mlp", 20, 4, hidden=6)
    first, second = (part for part in module if isinstance(part, nn.Linear))
    rows = torch.randn(5, 20, generator=torch.Generator().manual_seed(0))
    by_hand = (rows @ first.weight.T + first.bias).clamp(min=0) @ second.weight.T + second.bias
    assert first.out_features == 6
    assert torch.allclose(module(rows), by_hand)
    assert build("mlp", (1, 8, 8), 3)(torch.zeros(2, 1, 8, 8)).shape == (2, 3)


def test_softmax_takes_images_too():
    assert build("softmax", (1, 8, 8), 3)(torch.zeros(2, 1, 8, 8)).shape == (2, 3)
    assert type(build("softmax", 64, 3)) is nn.Linear


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cn", 4, 2), r"unknown model 'cn'; did you mean 'cnn'\? Expected one of: cnn, lstm, mlp, softmax, wakeword"),
        (("cnn", 784, 10), r"rows have shape \(784,\); expected images"),
        (("cnn", (3, 12, 32), 10), r"rows have shape \(3, 12, 32\); expected images"),
        (("softmax", (), 10), r"rows have shape \(\); expected sizes"),
        (("softmax", 0, 10), r"rows have shape \(0,\); expected sizes"),
        (("softmax", 4, 1), r"num_classes is 1; expected 2 or more"),
        (("softmax", 4, 2, -1), r"seed is -1; expected"),
        (("lstm", (3, 4), 2), r"rows have shape \(3, 4\); expected word numbers"),
        (("wakeword", (40, 76), 2), r"rows have shape \(40, 76\); expected spectrograms"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(arguments, message):
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        build(*arguments)
    assert "\n" not in str(caught.value)


def test_options_go_to_the_model_and_unknown_ones_are_named_with_their_nearest_neighbour():
    assert build("lstm", 5, 2, hidden=7).lstm.hidden_size == 7
    with pytest.raises(ConfigError, match=r"^unknown option of model lstm 'hiden'; did you mean 'hidden'\?"):
        build("lstm", 5, 2, hiden=7)
    with pytest.raises(ConfigError, match=r"^model softmax has no options; expected none, found hidden\.$"):
        build("softmax", 5, 2, hidden=7)
