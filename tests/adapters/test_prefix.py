"""Learned keys and values beside those of a row: what they add, what is trained, and cohorts against a loop."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import selffl
from selffl.adapters import merge, prefix
from selffl.errors import ConfigError
from selffl.training.blocks import gradient_of
from selffl.training.flat import FlatModel

LENGTH, HEADS, WIDTH = 3, 2, 8


def body(batch_first=True):
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 12, dropout=0.0, batch_first=batch_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(4 * WIDTH, 5))


def moved(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for part in module.parameters():
            if part.requires_grad:
                part += 0.4 * torch.randn(part.shape, generator=generator)
    return module


def rows(*shape):
    return torch.randn(*shape, 4, WIDTH, generator=torch.Generator().manual_seed(4))


def by_hand(base, keys, values, given):
    """Row by row, head by head: softmax(q k') v of the row, and softmax(q p') u of the prefix."""
    found = []
    for row in given:
        query, key, value = (row @ base.in_proj_weight.T + base.in_proj_bias).chunk(3, -1)
        heads = []
        for part in torch.arange(WIDTH).chunk(HEADS):
            scale = len(part) ** -0.5
            own = (query[:, part] @ key[:, part].T * scale).softmax(-1) @ value[:, part]
            heads.append(own + (query[:, part] @ keys[:, part].T * scale).softmax(-1) @ values[:, part])
        found.append(base.out_proj(torch.cat(heads, -1)))
    return torch.stack(found)


@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_with_a_prefix_by_hand(need_weights):
    torch.manual_seed(0)
    base = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    nn.init.normal_(base.in_proj_bias)
    adapted = moved(prefix(nn.Sequential(base), LENGTH, also=[]))[0]
    given = rows(2)
    expected = by_hand(base, adapted.prefix_keys.weight, adapted.prefix_values.weight, given)
    torch.testing.assert_close(adapted(given, given, given, need_weights=need_weights)[0], expected)
    assert (expected - base(given, given, given)[0]).abs().max() > 0.1


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_module_starts_as_it_is_and_answers_the_same_with_and_without_gradients(batch_first):
    plain = body(batch_first)
    before = copy.deepcopy(plain.state_dict())
    adapted = prefix(plain, LENGTH)
    given = rows(6)
    torch.testing.assert_close(adapted(given), plain(given), rtol=1e-5, atol=1e-6)
    moved(adapted)
    answer = adapted(given)
    assert (answer - plain(given)).abs().max() > 0.1
    with torch.no_grad():  # where torch has a fast path, which knows of no prefix
        torch.testing.assert_close(adapted.eval()(given), answer, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(entry, before[name]) for name, entry in plain.state_dict().items())


def test_values_and_the_head_are_trained_and_keys_are_common():
    adapted = prefix(body(), LENGTH)
    names = [name for name, part in adapted.named_parameters() if part.requires_grad]
    values = [f"0.layers.{layer}.self_attn.prefix_values.weight" for layer in (0, 1)]
    assert names == [*values, "2.weight", "2.bias"]
    again, other = prefix(body(), LENGTH), prefix(body(), LENGTH, seed=1)
    keys = [each[0].layers[0].self_attn.prefix_keys.weight for each in (adapted, again, other)]
    assert torch.equal(keys[0], keys[1])
    assert not torch.equal(keys[0], keys[2])
    assert not torch.equal(keys[0], adapted[0].layers[1].self_attn.prefix_keys.weight)
    one = prefix(body(), LENGTH, ["layers.1.self_attn"], also=[])
    assert [name for name, part in one.named_parameters() if part.requires_grad] == values[1:]


@pytest.mark.parametrize("way", ["auto", "vmap", "loop", "stacked", "recomputed"])
def test_a_cohort_has_the_gradients_of_a_loop_over_plain_modules(way):
    model = FlatModel(prefix(body(), LENGTH))
    torch.manual_seed(6)
    params = model.params + 0.4 * torch.randn(4, len(model.params))
    given, labels = rows(4, 6), torch.randint(0, 5, (4, 6))
    found = gradient_of(model, nn.functional.cross_entropy, way)(params, given, labels)
    for client in range(4):
        own = model.load(params[client])
        leaves = [part for part in own.parameters() if part.requires_grad]
        slopes = torch.autograd.grad(nn.functional.cross_entropy(own(given[client]), labels[client]), leaves)
        expected = torch.cat([slope.reshape(-1) for slope in slopes])
        torch.testing.assert_close(found[client], expected, rtol=1e-4, atol=1e-6)


def test_outputs_are_linear_in_the_values_of_one_layer():
    torch.manual_seed(0)
    adapted = prefix(nn.Sequential(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)), LENGTH, also=[])[0]
    given, answers = rows(3), []
    first, second = torch.randn(2, LENGTH, WIDTH)
    for values in (first, second, (first + second) / 2):
        with torch.no_grad():
            adapted.prefix_values.weight.copy_(values)
            answers.append(adapted(given, given, given)[0])
    torch.testing.assert_close(answers[2], (answers[0] + answers[1]) / 2)


def test_a_run_trains_them():
    draw = np.random.default_rng(0)
    given, labels = draw.normal(size=(72, 4, WIDTH)).astype(np.float32), draw.integers(0, 5, 72)
    fed = selffl.Federation.from_arrays(given, labels, np.arange(72) % 6, seed=0)
    run = selffl.train(prefix(body().eval(), LENGTH), fed, rounds=2, participation=1.0, learning_rate=0.1)
    assert run.personal_model(0)[0].layers[0].self_attn.prefix_values.weight.abs().max() > 0
    assert "0.layers.0.self_attn.prefix_values.weight" in run.inter_variances()


def test_what_cannot_be_done_is_said():
    with pytest.raises(ConfigError, match=r"^Linear has no attention of torch's; expected nn\.MultiheadAttention\."):
        prefix(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"no attention named 'cross'; expected names or endings among 0\.layers\.0"):
        prefix(body(), targets=["cross"])
    with pytest.raises(ConfigError, match=r"^targets are 'self_attn'; expected a list"):
        prefix(body(), targets="self_attn")
    with pytest.raises(ConfigError, match=r"^length is 0; expected a whole number"):
        prefix(body(), 0)
    with pytest.raises(ConfigError, match=r"^seed is -1; expected a whole number"):
        prefix(body(), seed=-1)
    odd = nn.Sequential(nn.MultiheadAttention(8, 2, kdim=4), nn.Linear(8, 2))
    with pytest.raises(ConfigError, match="is attention with keys or values of another width"):
        prefix(odd)
    with pytest.raises(ConfigError, match="has learned keys and values, which plain attention has not"):
        merge(prefix(body()))
