"""Row-level privacy of whole runs: nothing that is sent knows of a row but by noisy gradients, and ε counts them."""

import math

import pytest
import torch
from torch import nn

import selffl
from needs import NEEDS_BATCH_NORM
from selffl.algorithms import ALGORITHMS, algorithm
from selffl.algorithms.records import tensors_of
from selffl.data.federation import Federation, Rows
from selffl.engines.rounds import GatheredUploads
from selffl.errors import ConfigError
from selffl.training import model as training_model

SIZES = (6, 9, 14, 8)
NOISY = {"row_clip": 0.5, "row_noise_multiplier": 2.0}
TRAINED = {"rounds": 3, "participation": 0.75, "seed": 1, "batch_size": 5, "evaluate_every": 0}
REFUSING = [name for name in ALGORITHMS if algorithm(name).no_row_privacy is not None]
TAKING = [name for name in ALGORITHMS if name not in {*REFUSING, *NEEDS_BATCH_NORM}]


def federation(seed=0):
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(2):
        x, y = torch.randn(sum(SIZES), 6, generator=generator), torch.randint(3, (sum(SIZES),), generator=generator)
        parts.append(Rows(x, y, torch.tensor([0, *SIZES]).cumsum(0)))
    return Federation(range(len(SIZES)), *parts, cluster=torch.tensor([0, 0, 1, 1]))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def sent_by(name, rows, short, patch, **settings):
    """Every number that clients send in a run, client by client."""
    found, add = [], GatheredUploads.add

    def watched(self, clients, upload):
        found.extend(tensors_of(upload).values())
        return add(self, clients, upload)

    with patch.context() as inner:
        inner.setattr(GatheredUploads, "add", watched)
        run = selffl.train(network(), rows, short(name), **TRAINED | settings)
    return found, run


@pytest.mark.parametrize("name", TAKING)
def test_what_is_sent_is_made_of_noisy_gradients_and_nothing_else(name, short, monkeypatch):
    """With rows taken out of gradients, clients of other rows send the same bits."""
    monkeypatch.setattr(training_model, "clipped_mean", lambda gradient, params, batch, most: torch.zeros_like(params))
    first, second = (sent_by(name, federation(seed), short, monkeypatch, **NOISY)[0] for seed in (0, 1))
    assert len(first) == len(second) > 0
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_that_test_would_see_a_row(name, short, monkeypatch):
    first, second = (sent_by(name, federation(seed), short, monkeypatch, **NOISY)[0] for seed in (0, 1))
    assert not all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("name", REFUSING)
def test_other_methods_say_in_a_line_what_they_send(name, short):
    with pytest.raises(ConfigError, match=f"row_clip is 0.5, and {name} cannot have it: its clients ") as raised:
        selffl.train(network(), federation(), short(name), **TRAINED, **NOISY)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedrep", "self-fl-sums", "self-fl"])
def test_it_is_the_same_bits_after_a_resume_and_to_rounding_in_chunks(name, short, tmp_path):
    whole = selffl.train(network(), federation(), short(name), **TRAINED, **NOISY)
    selffl.train(network(), federation(), short(name), **{**TRAINED, "rounds": 1}, **NOISY, out=tmp_path / "run")
    resumed = selffl.resume(tmp_path / "run", rounds=3, trusted=True)
    assert (resumed.config.row_clip, resumed.config.row_noise_multiplier) == (0.5, 2.0)
    in_chunks = selffl.train(network(), federation(), short(name), **TRAINED, **NOISY, chunk_size=2)
    for field, tensor in tensors_of(whole._state.server).items():
        assert torch.equal(tensors_of(resumed._state.server)[field].nan_to_num(), tensor.nan_to_num())
        torch.testing.assert_close(tensors_of(in_chunks._state.server)[field], tensor, equal_nan=True)
    assert resumed.summary["row_epsilon"] == whole.summary["row_epsilon"]


def test_a_model_that_stays_at_home_has_no_noise():
    """DITTO's personal models, after a round without a pull, do not know of it."""
    method = algorithm("ditto", penalty=0.0, num_local_steps=4)
    once = TRAINED | {"rounds": 1}
    noisy, plain = (selffl.train(network(), federation(), method, **once, **more) for more in (NOISY, {}))
    assert torch.equal(noisy._state.memory.params, plain._state.memory.params)
    assert not torch.equal(noisy._state.server.params, plain._state.server.params)


def test_a_method_that_takes_more_gradients_than_it_says_is_refused():
    class Greedy(type(algorithm("fedavg"))):
        def sent_gradients(self, steps_per_epoch):
            return self.num_local_steps - 1

    with pytest.raises(ConfigError, match=r"took 4 noisy gradients in a visit, more than it says"):
        selffl.train(network(), federation(), Greedy(4), **TRAINED, **NOISY)
    with pytest.raises(ConfigError, match="two gradients of one minibatch"):
        selffl.train(network(), federation(), algorithm("perfedavg", order="hessian-free"), **TRAINED, **NOISY)


def test_records_have_epsilon_of_each_client_and_the_largest(tmp_path):
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install 'selffl[privacy]'")
    from selffl.privacy import row_epsilon

    method = algorithm("fedavg", num_local_epochs=2)
    run = selffl.train(network(), federation(), method, **TRAINED, **NOISY, out=tmp_path / "run", evaluate_clients=2)
    gradients = [2 * math.ceil(size / 5) * int(count) for size, count in zip(SIZES, run._state.num_rounds, strict=True)]
    each = [
        row_epsilon(2.0, num_examples=size, batch_size=5, num_gradients=count, delta=1e-5)
        for size, count in zip(SIZES, gradients, strict=True)
    ]
    assert [row["row_epsilon"] for row in run.clients] == [each[row["client"]] for row in run.clients]
    assert (run.summary["row_epsilon"], run.summary["row_delta"]) == (max(each), 1e-5)
    assert selffl.load(tmp_path / "run", trusted=True).summary["row_epsilon"] == max(each)
    assert "row_epsilon" not in selffl.train(network(), federation(), method, **TRAINED).summary
