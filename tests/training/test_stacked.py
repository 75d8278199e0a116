"""Gradients by one pass over the rows of all clients: against a plain loop, and modules for which it would be wrong."""

import copy
from functools import cache

import numpy as np
import pytest
import torch
from sample_modules import CROSS_ENTROPY, random, seeded
from torch import nn

import selffl
from selffl.adapters import bias_only, lora, train_only
from selffl.data.named import NamedFeatures
from selffl.errors import ConfigError
from selffl.training.blocks import gradient_of
from selffl.training.flat import FlatModel
from selffl.training.stacked import StackedGradient, repeated_blocks, stacked_copy

NUM_CLIENTS, NUM_ROWS, NUM_CLASSES = 5, 4, 3


class Block(nn.Module):
    """A layer of a transformer, as small as it gets."""

    def __init__(self):
        super().__init__()
        self.before = nn.LayerNorm(8)
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, rows):
        heads = (part(self.before(rows)) for part in (self.query, self.key, self.value))
        return rows + self.out(nn.functional.scaled_dot_product_attention(*heads))


class Reader(nn.Module):
    """Blocks, and a linear layer on the mean over places."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, NUM_CLASSES)

    def forward(self, rows):
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows.mean(-2))


def images():
    layers = (
        nn.Conv2d(2, 6, 3, stride=2),
        nn.GroupNorm(2, 6),
        nn.BatchNorm2d(6).eval(),
        nn.Conv2d(6, 6, 2),
        nn.Flatten(),
    )
    return nn.Sequential(*layers, nn.Linear(24, NUM_CLASSES))


def words():
    return nn.Sequential(nn.Embedding(9, 6), nn.Flatten(), nn.Linear(18, 7), nn.Tanh(), nn.Linear(7, NUM_CLASSES))


def dense():
    return nn.Sequential(nn.Linear(7, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def attending():
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(40, 3))


MODULES = {  # of what is trained, and of a row
    "adapters": (lambda: lora(dense(), 2, ["0", "3"], alpha=3.0), (7,)),
    "adapters, A trained": (lambda: lora(dense(), 2, ["0", "3"], train_a=True), (7,)),
    "adapters, no head": (lambda: lora(dense(), 2, ["3"], also=[]), (7,)),
    "adapted biases": (lambda: train_only(lora(dense(), 2, ["0"]), ["lora_B", "bias"]), (7,)),
    "images": (lambda: lora(images(), 2, ["0", "3"]), (2, 8, 8)),
    "one-dimensional": (lambda: lora(nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3)), 2), (2, 6)),
    "words": (lambda: lora(words(), 2, ["0", "2"]), (3,)),
    "attention": (lambda: lora(attending(), 2), (5, 8)),
    "blocks": (lambda: lora(Reader(), 2, ["query", "value"]), (5, 8)),
    "biases": (lambda: bias_only(dense()), (7,)),
    "biases of images": (lambda: bias_only(images()), (2, 8, 8)),
    "head": (lambda: train_only(dense(), ["3", "5.weight"]), (7,)),
    "part of a head": (lambda: train_only(nn.Sequential(dense()), ["0.5.weight", "0.1.bias"]), (7,)),
    "adapter alone": (lambda: lora(nn.Linear(7, 3), 2, [""], also=[]), (7,)),
}


def rows_of(name, shape, num_clients=NUM_CLIENTS, num_rows=NUM_ROWS):
    if name == "words":
        return torch.randint(9, (num_clients, num_rows, *shape), generator=torch.Generator().manual_seed(2))
    return random(num_clients, num_rows, *shape, seed=2)


def block_of(module, rows, seed=5):
    model = FlatModel(module)
    params = model.params + 0.3 * random(len(rows), len(model.params), seed=seed).to(model.params)
    labels = torch.randint(NUM_CLASSES, rows.shape[:2], generator=torch.Generator().manual_seed(seed))
    return model, params, rows, labels


def by_plain_loop(model, params, rows, labels):
    """Each client's module by itself."""
    found = []
    for own, some, right in zip(params, rows, labels, strict=True):
        module = copy.deepcopy(model.module)
        trained = [part for part in module.parameters() if part.requires_grad]
        with torch.no_grad():
            nn.utils.vector_to_parameters(own, trained)
        slopes = torch.autograd.grad(CROSS_ENTROPY(module(some), right), trained)
        found.append(torch.cat([slope.reshape(-1) for slope in slopes]))
    return torch.stack(found)


@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_those_of_a_plain_loop(name):
    make, shape = MODULES[name]
    model, params, rows, labels = block_of(seeded(make, dtype=torch.float64), rows_of(name, shape))
    expected = by_plain_loop(model, params, rows, labels)
    found = gradient_of(model, CROSS_ENTROPY, "stacked")(params, rows, labels)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10 * float(expected.abs().max()))
    assert not found.requires_grad
    lone = gradient_of(model, CROSS_ENTROPY, "stacked")(params[:1], rows[:1], labels[:1])
    torch.testing.assert_close(lone, expected[:1], rtol=1e-10, atol=1e-10 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["attention", "blocks"])
def test_and_where_blocks_are_computed_again(name):
    make, shape = MODULES[name]
    model, params, rows, labels = block_of(seeded(make, dtype=torch.float64), rows_of(name, shape))
    expected = by_plain_loop(model, params, rows, labels)
    found = gradient_of(model, CROSS_ENTROPY, "recomputed")(params, rows, labels)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10 * float(expected.abs().max()))


def kept(model, way, params, rows, labels):
    """Bytes that a gradient keeps for its backward pass, of tensors that do not share memory."""
    gradient, sizes = gradient_of(model, CROSS_ENTROPY, way), {}
    gradient(params, rows, labels)

    def note(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        gradient(params, rows, labels)
    return sum(sizes.values())


def test_blocks_computed_again_keep_less():
    make, shape = MODULES["blocks"]
    arguments = block_of(seeded(make), rows_of("blocks", shape, num_rows=64).float())
    assert kept(arguments[0], "recomputed", *arguments[1:]) < 0.7 * kept(arguments[0], "stacked", *arguments[1:])


def test_which_blocks_are_computed_again():
    assert [type(part) for part in repeated_blocks(attending())] == [nn.TransformerEncoderLayer] * 2
    reader = Reader()
    assert repeated_blocks(reader) == list(reader.blocks)
    assert repeated_blocks(lora(dense(), 2, ["0", "3"])) == []
    nested = nn.Sequential(nn.Linear(8, 8), nn.Sequential(Block(), Block(), nn.Tanh()))
    assert repeated_blocks(nested) == list(nested[1][:2])


def test_a_module_without_blocks_is_refused():
    model, *given = block_of(seeded(MODULES["adapters"][0]), rows_of("adapters", (7,)).float())
    with pytest.raises(ConfigError, match=r"\(it has no blocks, two or more of a kind in an nn\.Sequential or nn"):
        gradient_of(model, CROSS_ENTROPY, "recomputed")(*given)


def test_rows_by_name():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.head = nn.Linear(4, 6), nn.Embedding(5, 6), nn.Linear(6, 3)

        def forward(self, x, word):
            return self.head(torch.tanh(self.left(x) + self.right(word)))

    model = FlatModel(seeded(lambda: lora(Two(), 2, ["left", "right"])))
    words = torch.randint(5, (NUM_CLIENTS, NUM_ROWS), generator=torch.Generator().manual_seed(1))
    rows = NamedFeatures({"x": random(NUM_CLIENTS, NUM_ROWS, 4).float(), "word": words})
    params = model.params + 0.3 * random(NUM_CLIENTS, len(model.params)).float()
    labels = torch.zeros(NUM_CLIENTS, NUM_ROWS, dtype=torch.int64)
    stacked, loop = (gradient_of(model, CROSS_ENTROPY, way)(params, rows, labels) for way in ("stacked", "loop"))
    torch.testing.assert_close(stacked, loop, rtol=1e-4, atol=1e-6)


def test_half_precision():
    make, shape = MODULES["blocks"]
    module = seeded(make)
    exact, params, rows, labels = block_of(module, rows_of("blocks", shape).float())
    expected = gradient_of(exact, CROSS_ENTROPY, "loop")(params, rows, labels)
    for way in ("stacked", "recomputed"):
        found = gradient_of(FlatModel(module, precision="bfloat16"), CROSS_ENTROPY, way)(params, rows, labels)
        assert 1e-4 < float((found - expected).abs().max() / expected.abs().max()) < 0.05


def test_a_parameter_that_is_not_used_has_no_slope():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(7, 3), nn.Linear(7, 3)

        def forward(self, rows):
            return self.used(rows)

    model, *given = block_of(seeded(lambda: lora(Idle(), 2, ["used"], also=["idle"])), rows_of("", (7,)).float())
    found = gradient_of(model, CROSS_ENTROPY, "stacked")(*given)
    named = model.parts(found[0])
    assert named["idle.weight"].abs().max() == 0
    assert named["used.lora_B.weight"].abs().max() > 0


# -------------------------------------------------------------------------------------------------- which way is taken


class Watched(StackedGradient):
    """Notes how many clients it is called for."""

    calls: list[int] = []  # noqa: RUF012

    def __call__(self, model, params, features, labels):
        self.calls.append(len(params))
        return super().__call__(model, params, features, labels)


@pytest.fixture
def calls(monkeypatch):
    monkeypatch.setattr("selffl.training.blocks.StackedGradient", Watched)
    Watched.calls = []
    return Watched.calls


def wide():
    return nn.Sequential(nn.Linear(7, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))


def test_it_is_taken_where_most_is_frozen(calls):
    adapted = block_of(lora(wide(), 2), rows_of("", (7,)).float())
    gradient_of(adapted[0], CROSS_ENTROPY)(*adapted[1:])
    assert calls == [NUM_CLIENTS]
    gradient_of(adapted[0], CROSS_ENTROPY)(*(each[:1] for each in adapted[1:]))  # a lone client by the loop
    gradient_of(adapted[0], CROSS_ENTROPY, "vmap")(*adapted[1:])
    whole = block_of(wide(), rows_of("", (7,)).float())
    gradient_of(whole[0], CROSS_ENTROPY)(*whole[1:])
    assert calls == [NUM_CLIENTS]


class Odd(nn.Module):
    """A body, adapted, within a module that does something that rows of many clients cannot stand."""

    def __init__(self, what):
        super().__init__()
        self.what, self.body, self.calls = what, wide(), 0
        self.norm, self.drop = nn.BatchNorm1d(7), nn.Dropout(0.5)

    def forward(self, rows):
        head = self.body[4]
        if self.what == "mean of rows":
            rows = rows - rows.mean(0)
        if self.what == "largest row, seldom":  # which no numbers of this test reach
            rows = rows / rows.abs().max().clamp(min=100.0)
        if self.what == "rows before":
            rows = rows.cumsum(0)
        if self.what == "number of rows" and len(rows) > 3 * NUM_ROWS:
            rows = 2.0 * rows
        if self.what == "share of the rows":
            rows = rows / len(rows)
        if self.what == "places first":
            return self.body(rows.unflatten(-1, (7, 1)).transpose(0, 1).expand(-1, -1, 7)).transpose(0, 1).mean(1)
        if self.what == "a table":
            return self.body(rows) + self.body(torch.eye(7)[:NUM_CLIENTS]).sum(0)
        if self.what == "weight taken":
            return nn.functional.linear(self.body[:4](rows), head.weight, head.bias)
        if self.what == "bias taken":
            return self.body(rows) + (0.0 if head.bias is None else head.bias)
        if self.what == "calls":
            self.calls += 1
            rows = rows if self.calls < 1000 else 2.0 * rows
        if self.what == "numbers" and bool((rows > 1e9).any()):
            return -self.body(rows)
        if self.what == "words among numbers":
            rows = rows + torch.eye(7)[rows[:, 0].long().clamp(0, 6)]
        if self.what == "norm":
            rows = self.norm(rows)
        if self.what == "dropout":
            rows = self.drop(rows)
        return self.body(rows)


def odd(what):
    module = lora(seeded(lambda: Odd(what)), 2, ["2"], also=["body.4"])
    module.norm.train(what == "norm")
    module.drop.train(what == "dropout")
    return module


ODD = {
    "mean of rows": "its rows are not computed apart",
    "largest row, seldom": "its rows look at each other",
    "rows before": "its rows are not computed apart",
    "number of rows": "its rows are not computed apart",
    "share of the rows": "its rows are not computed apart",
    "places first": "its rows are not computed apart",
    "a table": "its rows are not computed apart",
    "weight taken": "its rows are not computed apart",
    "bias taken": "its rows are not computed apart",
    "numbers": "it looks at numbers to decide what to do",
    "words among numbers": "it makes whole numbers of others",
    "dropout": "it has dropout",
}


def test_what_clients_train_is_not_in_the_copy():
    copied = stacked_copy(FlatModel(odd("weight taken")), False).module.body
    assert copied[4].weight.isnan().all()
    assert copied[4].bias is None
    assert copied[2].lora_B.weight.isnan().all()
    assert not copied[2].base.weight.isnan().any()


@pytest.mark.parametrize("what", ODD)
def test_a_module_for_which_it_would_be_wrong_goes_another_way(what, calls):
    model, params, rows, labels = block_of(odd(what), rows_of("", (7,)).float())
    keys = [torch.arange(NUM_CLIENTS).unsqueeze(-1)] if what == "dropout" else []
    with pytest.raises(ConfigError, match=rf"Odd cannot take the rows of many clients in one pass \({ODD[what]}"):
        gradient_of(model, CROSS_ENTROPY, "stacked")(params, rows, labels, *keys)
    found, loop = (gradient_of(model, CROSS_ENTROPY, way)(params, rows, labels, *keys) for way in ("auto", "loop"))
    torch.testing.assert_close(found, loop, rtol=1e-4, atol=1e-6)
    assert not calls


def test_a_count_of_rows_is_looked_at_for_each_number_of_clients(calls):
    model, params, rows, labels = block_of(odd("number of rows"), rows_of("", (7,)).float())
    gradient = gradient_of(model, CROSS_ENTROPY)
    for number in (2, 3, 4, 5):
        given = params[:number], rows[:number], labels[:number]
        torch.testing.assert_close(gradient(*given), by_plain_loop(model, *given), rtol=1e-4, atol=1e-6)
    assert calls == [2, 3]


def test_what_changes_when_it_is_called_is_not_stacked():
    model, *given = block_of(odd("calls"), rows_of("", (7,)).float())
    with pytest.raises(ConfigError, match="it changes when it is called"):
        gradient_of(model, CROSS_ENTROPY, "stacked")(*given)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: train_only(images(), ["0"]), r"it trains 0\.weight; expected adapters, nn\.Linear, and biases of"),
        (lambda: train_only(dense(), ["1"]), r"it trains 1\.weight; expected adapters"),
        (lambda: bias_only(attending()), r"it trains .*self_attn\.out_proj\.bias; expected adapters"),
        (lambda: lora(images(), 2, ["0"], train_a=True), r"it trains 0\.lora_A\.weight; expected adapters"),
    ],
)
def test_other_trained_parts_are_refused(make, why):
    shape = (5, 8) if "out_proj" in why else (7,) if why.startswith("it trains 1") else (2, 8, 8)
    model, *given = block_of(seeded(make), rows_of("", shape).float())
    with pytest.raises(ConfigError, match=rf"\({why}.*\)\. Train it with gradients='vmap'\.$"):
        gradient_of(model, CROSS_ENTROPY, "stacked")(*given)


def test_shared_weights_are_refused():
    body = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))
    body[2].weight = body[0].weight
    model, *given = block_of(body, rows_of("", (7,)).float())
    with pytest.raises(ConfigError, match="parts of it share what they train"):
        gradient_of(model, CROSS_ENTROPY, "stacked")(*given)


def test_normalising_by_batches_is_refused():
    model = FlatModel(odd("norm"))
    with pytest.raises(ConfigError, match="it normalises by batches"):
        gradient_of(model, CROSS_ENTROPY, "stacked")(
            model.params.expand(2, -1), torch.ones(2, 4, 7), torch.zeros(2, 4, dtype=torch.int64)
        )


# ------------------------------------------------------------------------------------------------------- whole runs


def federation():
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(90, 5, 8)).astype(np.float32)
    return selffl.Federation.from_arrays(rows, draw.integers(0, 3, 90), np.arange(90) % 6, seed=0)


def train(method, rounds, **settings):
    module = lora(seeded(Reader), 2, ["query", "value"])
    few = selffl.algorithm(method, num_local_steps=5)
    return selffl.train(
        module, federation(), few, rounds=rounds, participation=0.7, learning_rate=0.05, **settings
    )  # fmt: skip


@cache
def trained_by(method, way):
    return train(method, 2, gradients=way).global_model().state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "self-fl-auto"])
@pytest.mark.parametrize("way", ["stacked", "recomputed"])
def test_a_run_has_the_numbers_of_the_loop(method, way):
    first, second = trained_by(method, way), trained_by(method, "loop")
    for name, entry in first.items():
        torch.testing.assert_close(entry, second[name], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_run_that_is_resumed_has_the_same_bits(tmp_path):
    given = {"method": "self-fl-auto", "gradients": "recomputed"}
    whole = train(rounds=3, out=tmp_path / "whole", **given).global_model().state_dict()
    train(rounds=2, out=tmp_path / "part", **given)
    again = selffl.resume(tmp_path / "part", rounds=3, trusted=True).global_model().state_dict()
    assert all(torch.equal(entry, again[name]) for name, entry in whole.items())
