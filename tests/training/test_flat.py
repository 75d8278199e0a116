"""A module as a function of one vector: there and back, and what is no such function."""

import copy

import pytest
import torch
from sample_modules import CROSS_ENTROPY, MODULES, features_of, random, seeded
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from selffl.errors import ConfigError
from selffl.training.blocks import gradient_of
from selffl.training.flat import FlatModel


@pytest.mark.parametrize("name", MODULES)
def test_a_flat_model_is_its_module(name):
    make = MODULES[name][0]
    module = seeded(make, dtype=torch.float64)
    features = features_of(name, 3)
    model = FlatModel(module)
    assert torch.equal(model.params, parameters_to_vector(module.parameters()))
    assert not model.params.requires_grad
    torch.testing.assert_close(model(model.params, features), module(features), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", MODULES)
def test_parameters_make_the_round_trip(name):
    make = MODULES[name][0]
    module, other = seeded(make, dtype=torch.float64), seeded(make, seed=1, dtype=torch.float64)
    model, features = FlatModel(module), features_of(name, 3)
    before = model.params
    params = random(len(before), seed=5)
    vector_to_parameters(params, other.parameters())
    torch.testing.assert_close(model(params, features), other(features), rtol=1e-14, atol=1e-14)
    assert torch.equal(FlatModel(other).params, params)
    assert torch.equal(model.params, before)  # the module itself is left alone


def test_params_are_a_copy():
    module = nn.Linear(2, 2)
    params = FlatModel(module).params
    kept = params.clone()
    with torch.no_grad():
        module.weight.zero_()
    assert torch.equal(params, kept)


def test_frozen_parameters_are_neither_trained_nor_sent():
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    module[0].requires_grad_(False)
    flat = FlatModel(module)
    assert len(flat.params) == 4 * 2 + 2
    features = torch.randn(5, 3)
    torch.testing.assert_close(flat(flat.params, features), module(features))
    moved = flat(torch.zeros_like(flat.params), features)
    torch.testing.assert_close(moved, torch.zeros(5, 2))
    frozen_layer = torch.nn.Linear(3, 2)
    frozen_layer.weight.requires_grad_(False)
    gradient = gradient_of(FlatModel(frozen_layer), CROSS_ENTROPY)
    assert gradient(torch.zeros(1, 2), torch.randn(1, 5, 3), torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 2)


def test_a_module_without_parameters_is_refused():
    with pytest.raises(ConfigError, match="ReLU has no parameters to train; expected some that require"):
        FlatModel(nn.ReLU())


@pytest.mark.parametrize(
    ("module", "where"),
    [
        (nn.Sequential(nn.Linear(3, 4), nn.AlphaDropout(0.25)), r"AlphaDropout \(1\) that leaves out 0\.25"),
        (nn.LSTM(3, 4, num_layers=2, dropout=0.1), r"LSTM \(\) that leaves out 0\.1"),
        (nn.TransformerEncoderLayer(8, 2, 16), r"MultiheadAttention \(self_attn\) that leaves out 0\.1"),
    ],
)
def test_parts_that_are_random_within_themselves_are_refused_in_one_line_unless_they_are_still(module, where):
    with pytest.raises(ConfigError, match=rf"has {where} at random within itself; expected .* or call eval") as caught:
        FlatModel(module)
    assert "\n" not in str(caught.value)
    FlatModel(copy.deepcopy(module).eval())


def test_dropout_of_nothing_is_none():
    FlatModel(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0)))


# ------------------------------------------------------------------------------------------------------ there and back


@pytest.mark.parametrize("name", MODULES)
def test_a_loaded_module_has_those_parameters_and_is_a_copy(name):
    model = FlatModel(seeded(MODULES[name][0], dtype=torch.float64))
    before, features = model.params, features_of(name, 3)
    params = random(len(before), seed=5)
    loaded = model.load(params)
    assert torch.equal(parameters_to_vector(loaded.parameters()), params)
    torch.testing.assert_close(loaded(features), model(params, features), rtol=1e-14, atol=1e-14)
    with torch.no_grad():
        for part in loaded.parameters():
            part.zero_()
    assert torch.equal(model.params, before)
    assert torch.equal(params, random(len(before), seed=5))


def test_a_loaded_module_has_the_type_of_the_parameters():
    model = FlatModel(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
    assert {part.dtype for part in model.load(model.params.double()).parameters()} == {torch.float64}


@pytest.mark.parametrize("shape", [(5,), (7,), (1, 6), ()])
def test_parameters_of_another_shape_are_not_loaded(shape):
    with pytest.raises(ConfigError, match=r"^params have shape \(.*\); expected one vector of 6 parameters\.$"):
        FlatModel(nn.Linear(2, 2)).load(torch.zeros(shape))


@pytest.mark.parametrize("name", MODULES)
def test_a_state_dict_is_flattened_in_the_models_order_whatever_its_own(name):
    model = FlatModel(seeded(MODULES[name][0], dtype=torch.float64))
    params = random(len(model.params), seed=5)
    state = model.load(params).state_dict()
    assert torch.equal(model.flatten(dict(reversed(state.items()))), params)
    assert torch.equal(model.flatten({key: value.float() for key, value in state.items()}), params.float().double())


def with_frozen_layer():
    module = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    module[0].requires_grad_(False)
    return FlatModel(module)


def test_frozen_entries_may_be_left_out_or_the_same():
    model = with_frozen_layer()
    state = model.module.state_dict()
    assert torch.equal(model.flatten(state), model.params)
    assert torch.equal(model.flatten({key: value for key, value in state.items() if key[0] == "1"}), model.params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"0.weight": torch.zeros(4, 3)}, "'0.weight' is not trained, and that state_dict has other values"),
        ({"1.weight": torch.zeros(4, 2)}, r"'1.weight' has shape \(4, 2\) in that state_dict; expected \(2, 4\)"),
        ({"1.weight": None}, "Sequential misses '1.weight' of that state_dict; expected the entries 0.weight, 0.bias"),
        ({"1.weight": None, "1.bias": None}, "Sequential misses '1.weight' and 1 more of"),
        ({"head": torch.zeros(2)}, "Sequential does not know 'head' of that state_dict"),
    ],
)
def test_a_state_dict_of_another_module_is_refused_in_one_line(change, message):
    model = with_frozen_layer()
    state = {key: value for key, value in (model.module.state_dict() | change).items() if value is not None}
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        model.flatten(state)
    assert "\n" not in str(caught.value)


def test_tied_entries_have_to_agree():
    model = FlatModel(seeded(MODULES["tied"][0]))
    state = dict(model.load(torch.ones(len(model.params))).state_dict())
    assert torch.equal(model.flatten(state), torch.ones(len(model.params)))
    with pytest.raises(ConfigError, match=r"^'back.weight' is not trained, and that state_dict has other values"):
        model.flatten(state | {"back.weight": torch.zeros(5, 5)})
