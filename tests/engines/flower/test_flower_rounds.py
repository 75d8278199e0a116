"""Over Flower the methods give the numbers of the cohort engine, and what is wrong with an answer stays out of them."""

import logging
import math

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'selffl[flower]'")

from flwr.app import Array, Context, Error, Message, RecordDict
from wire import RUN, WireGrid, over_the_wire, sealed

from selffl.algorithms import ALGORITHMS, algorithm
from selffl.algorithms.contract import Population, tensors_of
from selffl.data import load
from selffl.data.federation import Federation, Rows
from selffl.engines.cohort import CohortEngine, sample_cohort
from selffl.engines.flower.client import client_app, personal_model
from selffl.engines.flower.server import server_app
from selffl.errors import ConfigError, QuorumError
from selffl.training.flat import FlatModel
from selffl.training.model import ModelSource

NUM_CLIENTS, ROUNDS, SEED = 8, 4, 3
SETTINGS = {"participation": 0.5, "learning_rate": 0.05, "batch_size": 5, "seed": SEED}
OPTIONS = {"self-fl-augmented": {"max_convergence_steps": 60}, "self-fl-cluster": {"clusters": "variance"}}
LAYERED = ("fedper", "fedrep")
NODES = {1000 + 37 * (client * 5 % 8): client for client in range(NUM_CLIENTS)}  # not in the order of the clients


@pytest.fixture(scope="module")
def federation():
    return load("digits", num_clients=NUM_CLIENTS, seed=2)


def of_client(federation, client):
    """(x_train, y_train, x_test, y_test) of one client."""
    parts = []
    for rows in (federation.train, federation.test):
        own = slice(int(rows.offset[client]), int(rows.offset[client + 1]))
        parts += [rows.features[own], rows.labels[own]]
    return tuple(parts)


def linear():
    torch.manual_seed(0)
    return nn.Linear(64, 10)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))


class Setting:
    """A federation, a model and a method, with everything that is needed to run them over the wire."""

    def __init__(self, federation, folder, method, module=None):
        self.federation, self.folder, self.method = federation, folder, method
        self.module = module or linear()
        self.ended = None

    def client(self, **changed):
        given = {"algorithm": self.method, "memory_dir": self.folder / "clients", **changed}
        return client_app(self.module, lambda client: of_client(self.federation, client), **given)

    def run(self, grid, rounds=ROUNDS, **changed):
        def end(strategy):
            self.ended = strategy

        given = {**SETTINGS, "experiment": "first", "connect_seconds": 0, "quorum": 0.5, **changed}
        app = server_app(self.module, self.method, range(NUM_CLIENTS), rounds=rounds, on_end=end, **given)
        app(grid, Context(RUN, 1, {}, RecordDict(), {}))
        return self.ended.state

    def personal(self):
        models = [personal_model(self.module, self.folder / "clients", "first", m) for m in range(NUM_CLIENTS)]
        return torch.stack([FlatModel(model).params for model in models])

    def cohort(self, rounds=ROUNDS):
        source = ModelSource(
            self.federation, FlatModel(self.module), nn.functional.cross_entropy, SETTINGS["learning_rate"],
            SETTINGS["batch_size"], SEED,
        )  # fmt: skip
        engine = CohortEngine(self.method, source, SETTINGS["participation"], SEED)
        state = engine.advance(engine.start(source.model.params), rounds)
        return state, engine.personal(state)


def assert_same(found, expected, *, bits):
    (state, personal), (wanted, wanted_personal) = found, expected
    tolerance = {"rtol": 0, "atol": 0 if bits else 1e-6, "equal_nan": True}
    ours, theirs = tensors_of(state.server), tensors_of(wanted.server)
    assert ours.keys() == theirs.keys()
    if not bits:  # variances are sums of squares of as many numbers as there are parameters
        tolerance = {"rtol": 1e-4, "atol": 1e-6, "equal_nan": True}
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], **tolerance, msg=lambda m, n=name: f"{n}: {m}")
    tolerance |= {"rtol": 0}
    torch.testing.assert_close(state.server.params, wanted.server.params, **tolerance)
    torch.testing.assert_close(personal, wanted_personal, **tolerance)
    assert state.num_gradients.equal(wanted.num_gradients)
    assert state.num_rounds.equal(wanted.num_rounds)


# --------------------------------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - set(LAYERED)))
def test_softmax_regression_has_the_bits_of_the_cohort_engine(name, federation, tmp_path):
    setting = Setting(federation, tmp_path, algorithm(name, **OPTIONS.get(name, {})))
    state = setting.run(WireGrid(setting.client(), NODES))
    assert state.round_number == ROUNDS
    assert_same((state, setting.personal()), setting.cohort(), bits=True)


@pytest.mark.parametrize("name", ["self-fl", "self-fl-exact", "ditto", "fedavg", *LAYERED])
def test_a_network_has_the_numbers_of_the_cohort_engine(name, federation, tmp_path):
    """Alone it goes by autograd, in a cohort by vmap: equal to rounding."""
    setting = Setting(federation, tmp_path, algorithm(name), network())
    state = setting.run(WireGrid(setting.client(), NODES))
    assert_same((state, setting.personal()), setting.cohort(), bits=False)
