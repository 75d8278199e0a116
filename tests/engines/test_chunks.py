"""Clients trained a few at a time are trained as if they had been trained all at once.

Same bits where every client's numbers are computed on their own: the Gaussian task, and softmax regression by batched
matrix products, whose kernels take one client after the other.  Uploads are added in float64: of models in float32 the
sum has the same bits in any order, of models in float64 it may differ in the last digits.  Within 1e-5 where a network
goes through ``vmap``, which folds the clients into one larger product or convolution.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

import selffl
from needs import NEEDS_CLUSTERS, NEEDS_HEAD, NEEDS_LAYERS
from selffl.algorithms import ALGORITHMS, Layer, algorithm
from selffl.algorithms.layers import ClassBias, Head
from selffl.algorithms.population import Population
from selffl.algorithms.records import tensors_of
from selffl.data import load
from selffl.engines.cohort import CohortEngine
from selffl.errors import ConfigError
from selffl.training.flat import FlatModel
from selffl.training.gaussian import GaussianFederation
from selffl.training.model import ModelSource

CHUNKS = (1, 7, None)


def digits(module, num_clients=30):
    federation = load("digits", num_clients=num_clients, seed=2, test_fraction=0.3)
    return ModelSource(federation, FlatModel(module), nn.functional.cross_entropy, 0.05, 5, seed=1)


def after(source, method, chunk_size, start, rounds=4, participation=0.5, seed=1):
    engine = CohortEngine(method, source, participation, seed, chunk_size)
    state = engine.advance(engine.start(start), rounds)
    return {**tensors_of(state), "personal": engine.personal(state)}


def assert_same_bits(found, expected, rtol=0.0):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=rtol, atol=rtol, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - NEEDS_LAYERS - NEEDS_CLUSTERS))
def test_softmax_regression_has_the_same_bits_whatever_the_chunk(name, short):
    source = digits(nn.Linear(64, 10), num_clients=18)
    seven, every = (after(source, short(name), size, torch.zeros(650), 2) for size in CHUNKS[1:])
    assert_same_bits(seven, every)
    assert every["num_gradients"].sum() > 0


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - NEEDS_LAYERS - NEEDS_HEAD - NEEDS_CLUSTERS))
def test_the_gaussian_model_has_the_same_numbers_whatever_the_chunk(name, short):
    source = GaussianFederation.draw(
        seeds=torch.tensor([3, 4, 5]), num_clients=17, num_examples=(5, 40), global_mean=1.6, inter_variance=0.05,
        row_variance=0.1, learning_rate=1e-4,
    )  # fmt: skip
    start = torch.zeros_like(source.global_params)
    method = short(name)
    one, seven, every = (after(source, method, size, start, 3, seed=source.seeds) for size in CHUNKS)
    rtol = 1e-12 if method.uploads_add else 0.0  # the order of a sum of float64 shows in its last digits
    assert_same_bits(one, every, rtol)
    assert_same_bits(seven, every, rtol)


class Body(nn.Module):
    """A small network with a convolution and two linear layers."""

    def __init__(self):
        super().__init__()
        self.convolution, self.hidden, self.head = nn.Conv2d(1, 4, 3), nn.Linear(144, 16), nn.Linear(16, 10)

    def forward(self, x):
        seen = torch.relu(self.convolution(x.reshape(-1, 1, 8, 8)))
        return self.head(torch.relu(self.hidden(seen.flatten(1))))


@pytest.mark.parametrize("name", ["fedavg", "self-fl", "self-fl-auto", "ditto", *sorted(NEEDS_LAYERS | NEEDS_HEAD)])
def test_a_network_is_within_1e_5_whatever_the_chunk(name, short):
    torch.manual_seed(3)
    source = digits(Body(), num_clients=16)
    start = source.model.params
    seven, every = (after(source, short(name), size, start, 2) for size in CHUNKS[1:])
    for key in ("server.params", "personal"):
        torch.testing.assert_close(seven[key], every[key], rtol=1e-5, atol=1e-5)


def test_a_chunk_larger_than_the_cohort_is_the_cohort():
    source = digits(nn.Linear(64, 10))
    assert_same_bits(*(after(source, algorithm("ditto"), size, torch.zeros(650)) for size in (1000, None)))


def test_models_of_some_clients_are_those_of_all():
    source = digits(nn.Linear(64, 10))
    for name in ("self-fl", "perfedavg", "fedavg"):
        engine = CohortEngine(algorithm(name), source, 0.3, 1)
        state = engine.advance(engine.start(torch.zeros(650)), 3)
        some = torch.tensor([4, 0, 29])
        assert torch.equal(engine.personal(state, some), engine.personal(state)[some])


@pytest.mark.parametrize("size", [0, -1, 2.5, True])
def test_a_chunk_of_nobody_is_refused(size):
    with pytest.raises(ConfigError, match="chunk_size"):
        selffl.train("softmax", load("digits", num_clients=5, seed=2), "fedavg", rounds=1, chunk_size=size)


def test_clients_know_how_often_they_took_part():
    source = digits(nn.Linear(64, 10))
    found = after(source, algorithm("fedavg"), 4, torch.zeros(650), rounds=5, participation=0.2)
    assert found["num_rounds"].sum() == 5 * 6
    assert torch.equal(found["num_gradients"], 20 * found["num_rounds"])


def test_the_population_has_the_models_layers_and_the_federations_clusters_and_rows():
    source = digits(Body())
    assert torch.equal(source.population.num_examples, source.federation.train.num_examples)
    assert replace(source.population, num_examples=None) == Population(
        30,
        layers=(Layer("convolution", 0, 40), Layer("hidden", 40, 2360), Layer("head", 2360, 2530)),
        class_bias=ClassBias(2520, 2530, 2360),
        group_sizes=(36, 4, 2304, 16, 160, 10),
        head=Head(2360, 10, 16, True),
    )


@pytest.mark.parametrize(("module", "sizes"), [(nn.Linear(31, 1), (1,) * 32), (nn.Linear(32, 1), (32, 1))])
def test_in_a_small_model_each_parameter_may_vary_by_itself(module, sizes):
    assert digits(module).population.group_sizes == sizes
