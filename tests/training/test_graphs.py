"""On a GPU the launches of a gradient are recorded: its numbers stay, and what changes between calls is not."""

import copy
import gc
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from sample_modules import CROSS_ENTROPY, seeded
from torch import nn

import selffl
from selffl.adapters import lora
from selffl.training import graphs
from selffl.training.blocks import gradient_of
from selffl.training.flat import FlatModel
from selffl.training.graphs import GraphedGradient, python_state

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
NUM_CLIENTS, NUM_ROWS = 6, 5


class Counting(nn.Linear):
    """Divides by how often it was called."""

    def __init__(self):
        super().__init__(8, 3)
        self.calls = 0

    def forward(self, rows):
        self.calls += 1
        return super().forward(rows) / self.calls


class Looking(nn.Linear):
    """Looks at a number to decide what to do."""

    def __init__(self):
        super().__init__(8, 3)

    def forward(self, rows):
        return super().forward(rows) if bool(rows.sum() > -1e9) else rows


class LastOfLSTM(nn.Module):
    """Classes of what an LSTM ends with."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, rows):
        return self.head(self.lstm(rows)[0][:, -1])


def network():
    return nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Dropout(0.5), nn.Linear(7, 3))


def convolutions():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


def blocks():
    layer = nn.TransformerEncoderLayer(8, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(32, 3))


MODULES = {
    "linear": (lambda: nn.Linear(8, 3), (8,), ["auto", "vmap", "loop"]),
    "network": (network, (8,), ["auto", "loop"]),
    "convolutions": (convolutions, (1, 8, 8), ["auto", "vmap", "loop", "unfold"]),
    "lstm": (LastOfLSTM, (4, 8), ["auto", "vmap", "loop"]),
    "adapters": (lambda: lora(blocks(), 2), (4, 8), ["auto", "vmap", "stacked", "recomputed"]),
}
CASES = [(name, way) for name, (_, _, ways) in MODULES.items() for way in ways]


def block(model, row, seed, num_clients=NUM_CLIENTS):
    """What a gradient is given: models, rows, labels, and keys of masks where there are any."""
    draw = torch.Generator().manual_seed(seed)
    params = model.params.cpu() + 0.1 * torch.randn(num_clients, len(model.params), generator=draw).abs()
    rows = torch.randn(num_clients, NUM_ROWS, *row, generator=draw)
    labels = torch.randint(3, (num_clients, NUM_ROWS), generator=draw)
    keys = torch.randint(1 << 40, (num_clients, 1), generator=draw)
    return [each.cuda() for each in (params, rows, labels, *([keys] if model.leaves_out else []))]


@needs_gpu
@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_recorded_gradient_is_the_gradient(name, way):
    make, row, _ = MODULES[name]
    model = FlatModel(seeded(make).cuda())
    gradient = gradient_of(model, CROSS_ENTROPY, way)
    for seed in range(graphs.CALLS_BEFORE + 4):
        given = block(model, row, seed)
        before = [each.clone() for each in given]
        found = gradient(*given)
        torch.testing.assert_close(found, gradient.func.function(model, *before), rtol=1e-5, atol=1e-6)
        assert all(map(torch.equal, given, before))
    assert len(gradient.func._graphs) == 1


@needs_gpu
@pytest.mark.parametrize("way", ["stacked", "recomputed"])
def test_one_pass_over_all_rows_has_the_same_bits_again(way):
    model = FlatModel(seeded(MODULES["adapters"][0]).cuda())
    gradient, given = gradient_of(model, CROSS_ENTROPY, way), block(model, (4, 8), 0)
    first = gradient(*given)
    assert all(torch.equal(gradient(*given), first) for _ in range(graphs.CALLS_BEFORE + 4))


@needs_gpu
def test_what_was_found_before_stays():
    model = FlatModel(seeded(lambda: nn.Linear(8, 3)).cuda())
    gradient = gradient_of(model, CROSS_ENTROPY)
    found = [gradient(*block(model, (8,), seed)) for seed in range(graphs.CALLS_BEFORE + 4)]
    again = [gradient.func.function(model, *block(model, (8,), seed)) for seed in range(graphs.CALLS_BEFORE + 4)]
    torch.testing.assert_close(found, again, rtol=1e-5, atol=1e-6)


@needs_gpu
def test_each_shape_has_its_graph_up_to_a_number(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    model = FlatModel(seeded(lambda: nn.Linear(8, 3)).cuda())
    gradient = gradient_of(model, CROSS_ENTROPY)
    for seed in range(graphs.CALLS_BEFORE + 4):
        for num_clients in (2, 3, 4):
            given = block(model, (8,), seed, num_clients)
            torch.testing.assert_close(gradient(*given), gradient.func.function(model, *given), rtol=1e-5, atol=1e-6)
    assert len(gradient.func._graphs) == 2


@needs_gpu
@pytest.mark.parametrize("kind", [Counting, Looking])
def test_a_module_that_cannot_stand_still_is_called_every_time(kind):
    model, twin = (FlatModel(seeded(kind).cuda()) for _ in range(2))
    gradient = gradient_of(model, CROSS_ENTROPY, "loop")
    plain = partial(gradient_of(twin, CROSS_ENTROPY, "loop").func.function, twin)
    for seed in range(graphs.CALLS_BEFORE + 4):
        given = block(model, (8,), seed)
        torch.testing.assert_close(gradient(*given), plain(*given), rtol=1e-5, atol=1e-6)
    assert not gradient.func._graphs


def test_on_a_cpu_every_call_is_a_call(monkeypatch):
    monkeypatch.setattr(graphs, "CALLS_BEFORE", 0)
    calls, model = [], FlatModel(nn.Linear(2, 1))
    gradient = GraphedGradient(lambda model, params: calls.append(params) or params)
    for _ in range(3):
        gradient(model, torch.zeros(1, 3))
    assert len(calls) == 3


def test_attributes_that_change_are_seen():
    model = FlatModel(Counting())
    before = python_state(model.training_modules)
    assert python_state(model.training_modules) == before
    model.train_at(model.params, torch.zeros(1, 8))
    assert python_state(model.training_modules) != before


def test_a_gradient_is_made_once_for_a_model_and_a_loss():
    model = FlatModel(nn.Linear(8, 3))
    made = gradient_of(model, CROSS_ENTROPY).func
    assert gradient_of(model, CROSS_ENTROPY).func is made
    assert gradient_of(model, CROSS_ENTROPY, "loop").func is not made
    assert gradient_of(model, nn.functional.mse_loss).func is not made


def test_a_copy_of_a_model_makes_gradients_of_its_own():
    model = FlatModel(seeded(lambda: nn.Linear(8, 3)))
    gradient = gradient_of(model, CROSS_ENTROPY)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found = gradient_of(again, CROSS_ENTROPY)
        assert found is not gradient
        given = model.params.expand(2, -1).clone(), torch.ones(2, 4, 8), torch.zeros(2, 4, dtype=torch.int64)
        assert torch.equal(found(*given), gradient(*given))


@pytest.mark.parametrize("name", MODULES)
def test_a_model_that_has_trained_is_freed_with_its_last_user(name):
    """At once, without Python's search for cycles, which may come many runs later: graphs hold gigabytes of a GPU."""
    make, row, _ = MODULES[name]
    rows = np.random.default_rng(0).normal(size=(24, *row)).astype(np.float32)
    federation = selffl.Federation.from_arrays(rows, np.arange(24) % 3, np.arange(24) // 3 % 4, seed=0)

    def models():
        return {id(found) for found in gc.get_objects() if type(found) is FlatModel}

    gc.collect()
    gc.disable()
    try:
        before = models()
        selffl.train(make(), federation, "self-fl-auto" if name == "linear" else "ditto", rounds=1)
        assert models() <= before
    finally:
        gc.enable()
