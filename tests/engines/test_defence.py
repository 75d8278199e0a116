"""Robust aggregation: for every method that can have it, with the same bits however it is run, and worth having."""

from functools import cache

import pytest
import torch
from test_left_out import lying

import selffl
from selffl.algorithms import ALGORITHMS, FedAvg, SelfFL, SelfFLAuto, algorithm
from selffl.algorithms.contract import Algorithm
from selffl.data.digits import digits
from selffl.engines.defence import ROBUST, check_defence
from selffl.errors import ConfigError

DEFENCES = ROBUST[1:]


@pytest.fixture(scope="module")
def rows():
    return digits(num_clients=10)


def trained(rows, method, robust, **changed):
    given = {"rounds": 3, "participation": 1.0, "seed": 1, "learning_rate": 0.1, **changed}
    return selffl.train("softmax", rows, method, robust=robust, **given)


def can_have(name):
    found = []
    for robust in DEFENCES:
        try:
            check_defence(robust, algorithm(name))
        except ConfigError:
            continue
        found.append(robust)
    return found


def test_who_can_have_which_defence():
    """Averages have all but that by the hierarchy, which needs one; Self-FL's spread is lost in a median."""
    expected = {name: ["clip", "median", "trimmed"] for name in ALGORITHMS}
    for name in ("self-fl", "self-fl-exact", "self-fl-augmented", "self-fl-cluster"):
        expected[name] = ["clip", "trimmed", "hierarchy"]
    expected |= {"self-fl-auto": [*DEFENCES], "self-fl-sums": [*DEFENCES], "local": [], "fedpac": []}
    assert {name: can_have(name) for name in ALGORITHMS} == expected


@pytest.mark.parametrize(
    ("method", "robust", "expected"),
    [
        (
            "fedavg",
            "hierarchy",
            "robust is 'hierarchy', and fedavg cannot have it: it has no variance .* or one of clip,",
        ),
        (
            "self-fl",
            "median",
            "robust is 'median', and self-fl cannot have it: .* Expected 'none', or one of clip, trimm",
        ),
        ("local", "clip", "local cannot have it: its clients learn nothing .* another method, such as fedavg"),
        ("fedavg", "krum", "robust is 'krum'; expected 'none' or 'clip' or 'median' or 'trimmed' or 'hier"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(method, robust, expected, rows):
    with pytest.raises(ConfigError, match=expected) as raised:
        trained(rows, method, robust)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("method", "robust"),
    [
        (FedAvg(5), "clip"),
        (FedAvg(5), "median"),
        (SelfFL(initial_steps=5), "trimmed"),
        (SelfFL(initial_steps=5), "hierarchy"),
        (SelfFLAuto(5), "hierarchy"),
    ],
    ids=lambda given: getattr(given, "name", given),
)
def test_it_is_the_same_bits_in_chunks_and_after_a_resume(method, robust, rows, tmp_path):
    whole = trained(rows, method, robust)
    chunked = trained(rows, method, robust, chunk_size=3, out=tmp_path / "run", rounds=2)
    resumed = selffl.resume(tmp_path / "run", rounds=3)
    assert chunked.config.robust == robust
    for run in (trained(rows, method, robust, chunk_size=3), resumed):
        assert torch.equal(run._state.server.params, whole._state.server.params)
        assert torch.equal(run._session.engine.personal(run._state), whole._session.engine.personal(whole._state))


def flipped(upload):
    """Ten times as far, in the other direction."""
    name = "change" if hasattr(upload, "change") else "params"
    return type(upload)(**vars(upload) | {name: -10.0 * getattr(upload, name)})


LIARS = (2, 5)


def honest_accuracy(rows, method, robust):
    """Of the global model on the rows of honest clients."""
    run = trained(rows, method, robust, rounds=12, evaluate_every=12)
    found = [row["global_accuracy"] for client, row in enumerate(run.clients) if client not in LIARS]
    return sum(found) / len(found)


@pytest.fixture(scope="module")
def undefended(rows):
    """A function of a method: the accuracy without liars, and with them."""

    @cache
    def call(method):
        return honest_accuracy(rows, method, "none"), honest_accuracy(rows, lying(method, flipped, LIARS), "none")

    return call


@pytest.mark.slow
@pytest.mark.parametrize("robust", ["clip", "hierarchy"])
@pytest.mark.parametrize("method", [FedAvg(10), SelfFL(initial_steps=10), SelfFLAuto(10)], ids=lambda each: each.name)
def test_two_of_ten_who_flip_their_signs_ruin_it_only_without_defence(method, robust, rows, undefended):
    if robust not in can_have(method.name):
        pytest.skip("refused")
    usual, ruined = undefended(method)
    assert ruined < usual - 0.4
    assert honest_accuracy(rows, lying(method, flipped, LIARS), robust) > ruined + 0.25


def test_a_method_of_ones_own_has_it_by_what_it_averages(rows):
    class Own(FedAvg):
        name = "own"

    assert type(Own()).inter_variance is Algorithm.inter_variance
    found = trained(rows, Own(5), "trimmed", rounds=1)
    assert torch.equal(found._state.server.params, trained(rows, FedAvg(5), "trimmed", rounds=1)._state.server.params)
