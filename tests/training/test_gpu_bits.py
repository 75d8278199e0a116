"""On one GPU the same seed gives the same bits twice: linear and convolutional networks; test_threads.py is for CPUs.

Embeddings and LSTMs are not here: their gradients add up in an order that the GPU chooses.
"""

import pytest
import torch
from torch import nn

import selffl
from selffl.algorithms.records import tensors_of
from selffl.data.digits import digits

METHODS = ("fedavg", "ditto", "self-fl", "self-fl-exact", "self-fl-auto", "scaffold")
DEVICES = [
    "cpu",  # where what is compared can be seen to be enough
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]


def network(kind):
    torch.manual_seed(0)
    if kind == "linear":
        return nn.Linear(64, 10)
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def trained(kind, method, device, short, seed=1):
    rows = digits(num_clients=8, seed=3)
    return selffl.train(
        network(kind), rows, short(method), rounds=6, participation=0.5, learning_rate=0.05, seed=seed, device=device
    )


def numbers_of(run):
    """All bits that a run ends with."""
    found = {
        f"{part}.{name}": tensor.cpu()
        for part in ("server", "memory")
        for name, tensor in tensors_of(getattr(run._state, part)).items()
    }
    scores = {name: value for name, value in run.summary.items() if name.endswith("_accuracy")}
    assert found
    assert scores
    return found, scores


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["linear", "cnn"])
@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_bits_twice(method, kind, device, short):
    (first, scores), (second, again) = (numbers_of(trained(kind, method, device, short)) for _ in range(2))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor.nan_to_num(), second[name].nan_to_num()), name
    assert scores == again


def test_another_seed_gives_other_bits(short):
    (first, _), (second, _) = (numbers_of(trained("linear", "fedavg", "cpu", short, seed)) for seed in (1, 2))
    assert not torch.equal(first["server.params"], second["server.params"])
