"""The engine for finding mistakes: the numbers of the cohort engine, and errors that say whose they are."""

import numpy as np
import pytest
import torch
from torch import nn

import selffl
from selffl.algorithms import FedAvg
from selffl.errors import ConfigError, DataError, SelfFLError

SETTINGS = {"rounds": 4, "participation": 0.75, "learning_rate": 0.1, "evaluate_every": 2, "batch_size": 4}


def federation():
    draw = np.random.default_rng(0)
    return selffl.Federation.from_arrays(
        draw.normal(size=(80, 5)).astype(np.float32), draw.integers(0, 3, 80), np.repeat(list("abcd"), 20)
    )


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


@pytest.mark.parametrize("name", ["self-fl-auto", "self-fl", "ditto", "fedavg"])
def test_the_numbers_are_those_of_the_cohort_engine(name, short):
    serial, cohort = (
        selffl.train(network(), federation(), short(name), engine=engine, gain=True, **SETTINGS)
        for engine in ("serial", "cohort")
    )
    assert serial.config.engine == "serial"
    assert serial.summary["gradient_evaluations"] == cohort.summary["gradient_evaluations"]
    for client in "abcd":
        ours, theirs = (run.personal_model(client).state_dict() for run in (serial, cohort))
        for key in ours:
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=1e-6)
    for ours, theirs in zip(serial.clients, cohort.clients, strict=True):
        assert ours["alone_log_loss"] == pytest.approx(theirs["alone_log_loss"], rel=1e-4)


class Fragile(nn.Module):
    """A model that cannot take rows whose first feature is large, which one client has from its second round on."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.calls = 0

    def forward(self, x):
        if not torch._C._functorch.is_batchedtensor(x) and float(x[:, 0].max()) > 50:
            self.calls += 1
            if self.calls > 20:
                raise ValueError("too large\nby far")
        return self.layer(x)


def test_an_error_says_which_client_round_and_stage():
    rows = federation()
    rows.train.features[int(rows.train.offset[1]) : int(rows.train.offset[2]), 0] = 100.0  # all that b has
    with pytest.raises(SelfFLError, match=r"^client 'b', round \d, while training: ValueError: too large by far$") as e:
        selffl.train(Fragile(), rows, "fedavg", engine="serial", **SETTINGS)
    assert isinstance(e.value.__cause__, ValueError)


class Broken(FedAvg):
    """Fails where it is told to."""

    stage = ""

    def personal(self, *given):
        if self.stage == "personal":
            raise DataError("no model.")
        return super().personal(*given)

    def server_round(self, *given):
        if self.stage == "server_round":
            raise KeyError("params")
        return super().server_round(*given)


@pytest.mark.parametrize(
    ("stage", "kind", "message"),
    [
        ("personal", DataError, r"^client 'a', round 2, while its personal model was made: no model\.$"),
        ("server_round", SelfFLError, r"^round 1, while the server combined what it was sent: KeyError: 'params'$"),
    ],
)
def test_errors_of_other_stages(stage, kind, message, monkeypatch):
    monkeypatch.setattr(Broken, "stage", stage)
    with pytest.raises(kind, match=message):
        selffl.train(network(), federation(), Broken(), engine="serial", **SETTINGS)


def test_what_it_cannot_be_combined_with_is_refused():
    for given in ({"chunk_size": 2}, {"gradients": "vmap"}):
        with pytest.raises(ConfigError, match=r"engine is 'serial'.*; expected neither beside it"):
            selffl.train(network(), federation(), "fedavg", engine="serial", **SETTINGS | given)
