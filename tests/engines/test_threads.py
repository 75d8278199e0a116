"""The same bits on one thread and on two, for every method without σ₀² and BatchNorm.

Those are sums over all numbers of a cohort or a batch, which torch shares out between threads above 32,768 numbers:
methods with them agree to rounding.
"""

import pytest
import torch
from torch import nn

import selffl
from needs import NEEDS_CLUSTERS
from selffl.algorithms import ALGORITHMS, algorithm
from selffl.algorithms.records import tensors_of
from selffl.data.digits import digits

# The registry's names of each class: a method with other weights or another formula for a number adds no other sums.
ONE_OF_A_KIND = list({type(make()): name for name, make in reversed(ALGORITHMS.items())}.values())


@pytest.fixture(scope="module")
def rows():
    return digits(num_clients=6, seed=1)


def network(name):
    """Large enough for torch to share out: a cohort has 40,000 parameters, above what it takes threads for."""
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(128)] if algorithm(name).batch_norm == "kept" else []
    return nn.Sequential(nn.Linear(64, 128), *norm, nn.ReLU(), nn.Linear(128, 10))


def trained(name, rows, short, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        if name in NEEDS_CLUSTERS:
            method = algorithm(name, clusters="variance", num_clusters=2, initial_steps=5, max_local_steps=10)
        else:
            method = short(name)
        run = selffl.train(network(name), rows, method, rounds=1, participation=0.7, seed=1)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_one_thread_and_two_give_the_same_bits(name, rows, short, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # said by the user: small models then keep to it, too
    method = algorithm(name)
    is_shared_out = method.batch_norm == "kept" or method.has_inter_variance
    one, two = (trained(name, rows, short, threads) for threads in (1, 2))
    for part in ("server", "memory"):
        first, second = (tensors_of(getattr(run._state, part)) for run in (one, two))
        assert first.keys() == second.keys()
        for field, tensor in first.items():
            if is_shared_out:
                torch.testing.assert_close(tensor, second[field], rtol=1e-4, atol=1e-6, equal_nan=True)
            else:
                assert torch.equal(tensor.nan_to_num(), second[field].nan_to_num()), f"{part}.{field}"
    if is_shared_out:
        return
    scores = [{key: value for key, value in run.summary.items() if key != "seconds"} for run in (one, two)]
    assert scores[0] == scores[1]
