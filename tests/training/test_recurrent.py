"""LSTMs of a whole cohort against `nn.LSTM`, one client at a time by ordinary autograd."""

import copy
import itertools
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_modules import CROSS_ENTROPY, random, seeded
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import selffl
from selffl.budget import BUDGETS, Budget
from selffl.training import recurrent
from selffl.training.blocks import (
    LSTM_CLIENTS,
    LSTM_LOOP_FROM,
    gradient_of,
    outputs_of,
    quickest_way,
    silence_rnn_warning,
)
from selffl.training.flat import FlatModel

INPUTS, HIDDEN, ROWS, STEPS, NUM_CLIENTS = 3, 4, 5, 6, 3
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
SHAPES = list(itertools.product([1, 2, 3], [True, False], [True, False]))  # layers, batch_first, bias

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

ENOUGH = LSTM_CLIENTS["cpu"]  # clients to go by vmap


def converted(layer):
    layer = copy.deepcopy(layer)
    recurrent.convert_lstms(layer)
    assert "forward" in vars(layer)
    return layer


def layer_of(num_layers=1, batch_first=False, bias=True, dtype=torch.float64, size=(INPUTS, HIDDEN)):
    return seeded(lambda: nn.LSTM(*size, num_layers, batch_first=batch_first, bias=bias), dtype=dtype)


def arguments_of(layer, *clients, dtype=torch.float64, rows=ROWS, steps=STEPS):
    """Weights, inputs and first states, with axes of clients in front."""
    weights = {
        name: 0.7 * random(*clients, *part.shape, seed=number, dtype=dtype)
        for number, (name, part) in enumerate(layer.named_parameters())
    }
    order = (steps,) if rows is None else (rows, steps) if layer.batch_first else (steps, rows)
    inputs = random(*clients, *order, layer.input_size, seed=50, dtype=dtype)
    shape = (layer.num_layers, layer.hidden_size) if rows is None else (layer.num_layers, rows, layer.hidden_size)
    return weights, inputs, tuple(random(*clients, *shape, seed=seed, dtype=dtype) for seed in (51, 52))


def mixed(outputs, hidden, cell):
    """One number to which every output matters differently."""
    parts = [part.sin().flatten() for part in (outputs, hidden, cell)]
    return sum((torch.arange(len(part), dtype=part.dtype, device=part.device).cos() * part).sum() for part in parts)


def of_client(arguments, client):
    weights, inputs, states = arguments
    return {k: v[client] for k, v in weights.items()}, inputs[client], tuple(state[client] for state in states)


def by_autograd(layer, weights, inputs, states):
    """Outputs, last states and slopes of one client, by `nn.LSTM` and backward()."""
    layer = copy.deepcopy(layer)
    with torch.no_grad():
        for name, part in layer.named_parameters():
            part.copy_(weights[name])
    leaves = [tensor.clone().requires_grad_() for tensor in (inputs, *states)]
    outputs, (hidden, cell) = layer(leaves[0], tuple(leaves[1:]) or None)
    mixed(outputs, hidden, cell).backward()
    slopes = [part.grad for part in layer.parameters()] + [leaf.grad for leaf in leaves]
    return [tensor.detach() for tensor in (outputs, hidden, cell)] + slopes


def by_vmap(layer, weights, inputs, states, in_dims=0):
    """The same of all clients at once, by the converted layer."""
    twin = converted(layer)

    def run(weights, inputs, states):
        outputs, (hidden, cell) = torch.func.functional_call(twin, weights, (inputs, states or None))
        return mixed(outputs, hidden, cell), (outputs, hidden, cell)

    slope = torch.func.grad(run, argnums=(0, 1, 2), has_aux=True)
    slopes, outputs = torch.func.vmap(slope, in_dims)(weights, inputs, states)
    return [*outputs, *slopes[0].values(), slopes[1], *slopes[2]]


def assert_same(found, expected, dtype=torch.float64):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        bound = TOLERANCE[dtype] * max(1.0, float(other.abs().max()) if other.numel() else 0.0)
        torch.testing.assert_close(one, other, rtol=0.0, atol=bound)


# ------------------------------------------------------------------------------------------------------------ one layer


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [ROWS, None], ids=["rows", "one row"])
@pytest.mark.parametrize("with_states", [True, False])
@pytest.mark.parametrize(("num_layers", "batch_first", "bias"), SHAPES)
def test_outputs_states_and_slopes_are_those_of_each_client(num_layers, batch_first, bias, with_states, rows, dtype):
    layer = layer_of(num_layers, batch_first, bias, dtype)
    weights, inputs, states = arguments_of(layer, NUM_CLIENTS, dtype=dtype, rows=rows)
    found = by_vmap(layer, weights, inputs, states if with_states else ())
    for client in range(NUM_CLIENTS):
        own, row, state = of_client((weights, inputs, states), client)
        assert_same([part[client] for part in found], by_autograd(layer, own, row, state if with_states else ()), dtype)


@pytest.mark.parametrize(("num_layers", "batch_first", "bias"), SHAPES)
def test_it_is_the_same_function_without_vmap(num_layers, batch_first, bias):
    layer = layer_of(num_layers, batch_first, bias)
    arguments = arguments_of(layer)
    expected = by_autograd(layer, *arguments)
    assert_same(by_autograd(converted(layer), *arguments), expected)
    assert {name for name, _ in converted(layer).named_parameters()} == {name for name, _ in layer.named_parameters()}


def test_slopes_are_the_differences_quotients():
    layer = layer_of()
    weights, inputs, states = arguments_of(layer, 2, rows=2, steps=3)
    first = [state[:, 0] for state in states]
    tensors = [tensor.requires_grad_() for tensor in (inputs, *list(weights.values())[:3], *first)]

    def first_two(*given):
        return recurrent._Layer.apply(*given, True)[:2]

    assert torch.autograd.gradcheck(first_two, tensors)


@pytest.mark.parametrize("shared", list(itertools.product([True, False], repeat=4)))
def test_what_is_everybodys_need_not_be_given_to_each(shared):
    """Weights for inputs and for hidden states, inputs, states: any may lack the axis of clients."""
    layer = layer_of(2)
    weights, inputs, states = arguments_of(layer, NUM_CLIENTS)
    alike = {name: shared[0] if "ih" in name else shared[1] for name in weights}
    given = (
        {name: part[0] if alike[name] else part for name, part in weights.items()},
        inputs[0] if shared[2] else inputs,
        tuple(state[0] if shared[3] else state for state in states),
    )
    if all(shared):
        found = [part.expand(NUM_CLIENTS, *part.shape) for part in by_autograd(converted(layer), *given)]
    else:
        dims = (
            {name: None if alike[name] else 0 for name in weights},
            None if shared[2] else 0,
            None if shared[3] else 0,
        )
        found = by_vmap(layer, *given, in_dims=dims)
    for client in range(NUM_CLIENTS):
        own, row, state = of_client((weights, inputs, states), client)
        own = {name: weights[name][0] if alike[name] else part for name, part in own.items()}
        row, state = given[1] if shared[2] else row, given[2] if shared[3] else state
        assert_same([part[client] for part in found], by_autograd(layer, own, row, state))


def test_any_axis_may_be_that_of_the_clients_and_there_may_be_two():
    layer = layer_of(2)
    weights, inputs, states = arguments_of(layer, 2, NUM_CLIENTS)
    flat = by_vmap(
        layer,
        {name: part.flatten(0, 1) for name, part in weights.items()},
        inputs.flatten(0, 1),
        tuple(state.flatten(0, 1) for state in states),
    )
    moved = ({name: part.movedim(1, -1) for name, part in weights.items()}, inputs.movedim(1, 2), states)
    found = torch.func.vmap(lambda *given: by_vmap(layer, *given, in_dims=(dict.fromkeys(weights, -1), 1, 0)))(*moved)
    assert_same([part.flatten(0, 1) for part in found], flat)


def test_slopes_of_a_sum_over_the_clients_are_the_same():
    layer = layer_of(2)
    weights, inputs, states = arguments_of(layer, NUM_CLIENTS)
    twin = converted(layer)

    def total(weights):
        def run(*given):
            outputs, (hidden, cell) = torch.func.functional_call(twin, given[0], given[1:])
            return mixed(outputs, hidden, cell)

        return torch.func.vmap(run)(weights, inputs, states).sum()

    expected = by_vmap(layer, weights, inputs, states)[3 : 3 + len(weights)]
    assert_same(list(torch.func.grad(total)(weights).values()), expected)
    leaves = {name: part.clone().requires_grad_() for name, part in weights.items()}
    total(leaves).backward()
    assert_same([leaf.grad for leaf in leaves.values()], expected)


@pytest.mark.parametrize("room", [1, 4 * NUM_CLIENTS * ROWS * 4 * HIDDEN, 1 << 22])
def test_without_slopes_to_come_nothing_is_kept_and_the_outputs_are_the_same(monkeypatch, room):
    monkeypatch.setitem(BUDGETS, "cpu", Budget(gate_numbers=room))
    layer = layer_of(2)
    arguments = arguments_of(layer, NUM_CLIENTS)
    kept = []
    plain = recurrent._forward

    def noted(*given, **options):
        found = plain(*given, **options)
        kept.append(found[2].numel() + found[3].numel())
        return found

    monkeypatch.setattr(recurrent, "_forward", noted)
    with torch.no_grad():
        outputs, states = torch.func.vmap(
            lambda *given: torch.func.functional_call(converted(layer), given[0], given[1:])
        )(*arguments)
    assert kept == [0, 0]
    assert_same([outputs, *states], by_vmap(layer, *arguments)[:3])
    assert min(kept[2:]) > 0


@pytest.mark.parametrize("used", ["outputs", "hidden", "cell"])
def test_outputs_that_nobody_uses_have_no_part(used):
    layer = layer_of(2)
    weights, inputs, states = arguments_of(layer, NUM_CLIENTS)

    def slopes(module, weights, inputs, states):
        def chosen(weights):
            outputs, (hidden, cell) = torch.func.functional_call(module, weights, (inputs, states))
            return {"outputs": outputs, "hidden": hidden, "cell": cell}[used].sin().sum()

        return torch.func.grad(chosen)(weights)

    found = torch.func.vmap(lambda *given: slopes(converted(layer), *given))(weights, inputs, states)
    for client in range(NUM_CLIENTS):
        expected = slopes(layer, *of_client((weights, inputs, states), client))
        assert_same([part[client] for part in found.values()], list(expected.values()))


def test_nothing_that_is_given_is_altered():
    layer = layer_of(2)
    weights, inputs, states = arguments_of(layer, NUM_CLIENTS)
    before = [tensor.clone() for tensor in (*weights.values(), inputs, *states)]
    by_vmap(layer, weights, inputs, states)
    for tensor, kept in zip((*weights.values(), inputs, *states), before, strict=True):
        assert torch.equal(tensor, kept)
    first = inputs[0].requires_grad_()
    found = converted(layer)(first)[0]
    slope = torch.ones_like(found)
    torch.autograd.grad(found, first, slope)
    assert torch.equal(slope, torch.ones_like(found))


def test_states_of_another_shape_are_refused_as_nn_lstm_does():
    layer = layer_of(2)
    _, inputs, (hidden, cell) = arguments_of(layer)
    for states in ((hidden[:, :1], cell[:, :1]), (hidden, cell[..., :2])):
        for module in (layer, converted(layer)):
            with pytest.raises(RuntimeError, match="Expected hidden"):
                module(inputs, states)


def test_inputs_that_nn_lstm_refuses_are_refused():
    with pytest.raises(ValueError, match="2D or 3D"):
        converted(layer_of())(random(2, STEPS, ROWS, INPUTS))


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(0, 5), *[st.integers(1, 5)] * 3),
    num_layers=st.integers(1, 3),
    batch_first=st.booleans(),
    bias=st.booleans(),
    with_states=st.booleans(),
)
def test_whatever_the_shapes(sizes, num_layers, batch_first, bias, with_states):
    num_clients, rows, steps, *size = sizes
    layer = layer_of(num_layers, batch_first, bias, size=size)
    weights, inputs, states = arguments_of(layer, num_clients, rows=rows, steps=steps)
    found = by_vmap(layer, weights, inputs, states if with_states else ())
    for client in range(num_clients):
        own, row, state = of_client((weights, inputs, states), client)
        assert_same([part[client] for part in found], by_autograd(layer, own, row, state if with_states else ()))


def test_products_added_in_place_as_on_a_gpu_are_the_same(monkeypatch):
    layer = layer_of(2, batch_first=True)
    arguments = arguments_of(layer, NUM_CLIENTS)
    before = [tensor.clone() for tensor in (*arguments[0].values(), arguments[1], *arguments[2])]
    expected = by_vmap(layer, *arguments)
    monkeypatch.setattr(recurrent, "_buffer", lambda *_: None)
    assert_same(by_vmap(layer, *arguments), expected)
    assert all(map(torch.equal, before, (*arguments[0].values(), arguments[1], *arguments[2])))


@needs_gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_gpu_says_the_same(dtype):
    layer = layer_of(2, batch_first=True, dtype=dtype)
    arguments = arguments_of(layer, NUM_CLIENTS, dtype=dtype)
    weights, inputs, states = arguments
    there = {k: v.cuda() for k, v in weights.items()}, inputs.cuda(), tuple(state.cuda() for state in states)
    found = by_vmap(copy.deepcopy(layer).cuda(), *there)
    assert_same([part.cpu() for part in found], by_vmap(layer, *arguments), dtype)


# --------------------------------------------------------------------------------------------------------- whole models


WORDS, CLASSES = 13, 3


class Reader(nn.Module):
    """Frozen embedding, a recurrent layer over seven words, the last output, a linear layer."""

    def __init__(self, kind=nn.LSTM, width=HIDDEN, is_frozen=True, **options):
        super().__init__()
        self.words = nn.Embedding(WORDS, INPUTS).requires_grad_(not is_frozen)
        self.memory = kind(INPUTS, width, batch_first=True, **options)
        self.head = nn.Linear(width * (2 if self.memory.bidirectional else 1), CLASSES)

    def forward(self, rows):
        return self.head(self.memory(self.words(rows))[0][:, -1])


class Packed(Reader):
    """Rows that end at their first 0, which no vmap can follow."""

    def forward(self, rows):
        lengths = (rows != 0).cumprod(1).sum(1).clamp(min=1).cpu()
        packed = pack_padded_sequence(self.words(rows), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.memory(packed)[1][0][-1])


def tokens(*shape, seed=0):
    return torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(seed))


def readers(make, num_clients=NUM_CLIENTS, rows=ROWS):
    """A model and a block of clients."""
    model = FlatModel(seeded(make, dtype=torch.float64))
    params = model.params + 0.3 * random(num_clients, len(model.params))
    labels = torch.randint(CLASSES, (num_clients, rows), generator=torch.Generator().manual_seed(1))
    return model, params, tokens(num_clients, rows, 7), labels


def only_the_head_is_trained():
    reader = Reader()
    reader.memory.requires_grad_(False)
    return reader


@pytest.mark.parametrize("way", ["vmap", "unfold", "auto"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Reader(num_layers=2),
        lambda: Reader(bias=False),
        lambda: Reader(is_frozen=False),
        lambda: Reader(num_layers=2, dropout=0.5).eval(),
        only_the_head_is_trained,
    ],
    ids=["frozen words", "no bias", "words", "still dropout", "head alone"],
)
def test_a_classifier_goes_by_vmap_as_by_the_loop(make, way):
    model, params, features, labels = readers(make, num_clients=ENOUGH)
    found = gradient_of(model, CROSS_ENTROPY, way)(params, features, labels)
    expected = gradient_of(model, CROSS_ENTROPY, "loop")(params, features, labels)
    assert float(expected.abs().max()) > 1e-3
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-12)
    if way != "auto":
        with torch.no_grad():
            outputs = [outputs_of(model, params, features, each) for each in (way, "loop")]
        torch.testing.assert_close(*outputs, rtol=0.0, atol=1e-12)


def test_the_module_itself_is_left_alone_and_shares_its_parameters():
    model, *_ = readers(lambda: Reader(num_layers=2))
    for twin in (model.vectorised, model.unfolded):
        assert twin.module is not model.module
        assert "forward" in vars(twin.module.memory)
        # A frozen embedding may be large.
        own, theirs = dict(model.module.named_parameters()), dict(twin.module.named_parameters())
        assert list(own) == list(theirs)
        assert all(own[name] is theirs[name] for name in own)
    assert "forward" not in vars(model.module.memory)
    plain = FlatModel(nn.Linear(2, 2))
    assert plain.vectorised is plain


OTHERS = {
    "GRU": lambda: Reader(nn.GRU),
    "RNN": lambda: Reader(nn.RNN),
    "both ways": lambda: Reader(bidirectional=True),
    "subclass": lambda: Reader(type("Own", (nn.LSTM,), {})),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_recurrent_layers_are_done_client_by_client(name):
    model, params, features, labels = readers(OTHERS[name], num_clients=ENOUGH)
    assert model.needs_loop
    assert quickest_way(model, params, features) == "loop"
    by_loop = gradient_of(model, CROSS_ENTROPY, "loop")(params, features, labels)
    assert torch.equal(gradient_of(model, CROSS_ENTROPY)(params, features, labels), by_loop)
    assert float(by_loop.abs().max()) > 1e-3


def test_projections_are_looped():
    assert FlatModel(nn.LSTM(INPUTS, HIDDEN, proj_size=2)).needs_loop
    assert not FlatModel(nn.LSTM(INPUTS, HIDDEN)).needs_loop


def test_an_lstm_in_a_module_that_vmap_cannot_follow_is_looped():
    model, params, features, labels = readers(Packed, num_clients=ENOUGH)
    assert not model.needs_loop
    assert not model.is_vectorisable(features[0], params[0])
    assert quickest_way(model, params, features) == "loop"
    assert gradient_of(model, CROSS_ENTROPY)(params, features, labels).abs().max() > 1e-3


def test_on_a_cpu_many_clients_with_small_blocks_go_by_vmap():
    def way(width, num_clients, rows):
        model, params, features, _ = readers(lambda: Reader(width=width), num_clients, rows)
        return quickest_way(model, params, features)

    rows = LSTM_LOOP_FROM // 20
    assert way(20, ENOUGH, rows - 1) == "vmap"
    assert way(20, ENOUGH, rows) == "loop"
    assert way(20, ENOUGH - 1, rows - 1) == "loop"
    assert way(40, ENOUGH, rows - 1) == "loop"


@pytest.mark.parametrize("make", [lambda: Reader(num_layers=2), Packed, *OTHERS.values()])
def test_a_federation_of_tokens_is_trained_the_same_either_way(make):
    num_clients, rows = 12, 6
    features, client = tokens(num_clients * rows, 7, seed=4), torch.arange(num_clients).repeat_interleave(rows)
    fed = selffl.Federation.from_arrays(features, features[:, -1] % CLASSES, client, test_fraction=0.3)
    module = seeded(make)
    ways = ["auto", "loop", *(["vmap"] if not FlatModel(module).needs_loop and type(module) is Reader else [])]
    runs = [
        selffl.train(module, fed, selffl.algorithm("fedavg", num_local_steps=4), rounds=2, participation=1.0,
                     learning_rate=0.5, batch_size=4, dtype=torch.float64, gradients=way)
        for way in ways
    ]  # fmt: skip
    params = [FlatModel(run.global_model()).params for run in runs]
    assert float((params[0] - FlatModel(module.double()).params).abs().max()) > 0.01  # it has learnt something
    for other in params[1:]:
        torch.testing.assert_close(params[0], other, rtol=0.0, atol=1e-10)
    scores = [[{**row, "seconds": 0.0} for row in run.history] for run in runs]
    for found in scores:
        for row, first in zip(found, scores[0], strict=True):
            assert [name for name in row if row[name] is None] == [name for name in first if first[name] is None]
            measured = [name for name in row if row[name] is not None]
            # Log losses differ in their last bits.
            assert [row[name] for name in measured] == pytest.approx([first[name] for name in measured], rel=1e-9)


def test_cudnns_remark_on_scattered_weights_is_not_passed_on():
    remark = "RNN module weights are not part of single contiguous chunk of memory. This means ..."
    with silence_rnn_warning():
        warnings.warn(remark, UserWarning, stacklevel=1)
    with pytest.warns(UserWarning, match="something else"), silence_rnn_warning():
        warnings.warn("something else", UserWarning, stacklevel=1)
