"""Personal models of a run are made once each, are nobody's to alter, and no more are kept than fit."""

import numpy as np
import pytest
import torch

import selffl
from selffl.budget import BUDGETS, Budget
from selffl.runs.personal import PersonalModelCache
from selffl.runs.session import Session


@pytest.fixture
def made(monkeypatch):
    """The places of clients whose models were made, in order."""
    places, make = [], Session.personal

    def watched(self, state, position):
        places.append(position)
        return make(self, state, position)

    monkeypatch.setattr(Session, "personal", watched)
    return places


def trained():
    rng = np.random.default_rng(0)
    x, client = rng.normal(size=(60, 3)), np.repeat(list("abc"), 20)
    fed = selffl.Federation.from_arrays(x.astype(np.float32), (x[:, 0] > 0).astype(int), client, 0.3)
    method = selffl.algorithm("self-fl-auto", num_local_steps=3)
    return selffl.train("softmax", fed, method, rounds=2, participation=1.0)


def test_each_is_made_once_whoever_asks(made, tmp_path):
    run = trained()
    made.clear()
    first = run.personal_model("b").state_dict()
    run.predict(np.zeros((2, 3), np.float32), ["b", "c"])
    run.calibration()
    run.export(tmp_path / "all.safetensors")
    assert sorted(made) == [0, 1, 2]
    assert all(torch.equal(first[key], tensor) for key, tensor in run.personal_model("b").state_dict().items())


def test_who_alters_a_model_alters_no_other(made):
    run = trained()
    model = run.personal_model("a")
    before = [part.clone() for part in model.parameters()]
    with torch.no_grad():
        for part in model.parameters():
            part.fill_(7.0)
    assert all(map(torch.equal, before, run.personal_model("a").parameters()))


def test_no_more_are_kept_than_fit(made, monkeypatch):
    run = trained()
    monkeypatch.setitem(BUDGETS, "cpu", Budget(evaluated_numbers=2 * 8))
    models = PersonalModelCache(run._session, run._state)
    made.clear()
    for position in (0, 1, 0, 1, 2, 1, 0):
        assert torch.equal(models[position], run._session.engine.personal(
            run._state, torch.tensor([position]), is_over=True)[0])  # fmt: skip
    assert made == [0, 1, 2, 0]
