"""The trial of priors: closing visits are held as hard as suits rows that models were not trained on."""

import numpy as np
import pytest
import torch
from torch import nn

import selffl
from selffl.algorithms import algorithm
from selffl.algorithms.auto_trial import MULTIPLES, PriorTrial, TrialUpload
from selffl.algorithms.records import map_tensors, tensors_of
from selffl.data import load
from selffl.engines import cohort
from selffl.engines.cohort import CohortEngine
from selffl.engines.limits import PrivacyOptions
from selffl.engines.rounds import trial_after
from selffl.engines.serial import serial_engine
from selffl.training.flat import FlatModel
from selffl.training.model import ModelSource

AUTO = algorithm("self-fl-auto", num_local_steps=5)


@pytest.fixture(scope="module")
def source():
    federation = load("digits", num_clients=12, seed=2, test_fraction=0.3)
    return ModelSource(federation, FlatModel(nn.Linear(64, 10)), nn.functional.cross_entropy, 0.05, 5, seed=1)


def trained(source, rounds=3, **options):
    engine = CohortEngine(AUTO, source, 0.4, 1, **options)
    return engine, engine.advance(engine.start(torch.zeros(650)), rounds)


def copied(state):
    return map_tensors(torch.clone, state)


@pytest.mark.parametrize(
    ("losses", "squares", "multiple"),
    [
        ((-1.0, -3.0, -2.0, 5.0), 1.0, MULTIPLES[1]),
        ((-1.0, -3.0, -2.0, 5.0), 9.7, MULTIPLES[1]),  # of twelve clients: 9 + 9/12
        ((-1.0, -3.0, -2.0, 5.0), 9.8, 1.0),  # within a standard error
        ((0.5, 0.1, -2.0, -7.0), 9.8, MULTIPLES[3]),
        ((0.5, 0.1, 2.0, 7.0), 1.0, 1.0),
        ((0.0, 0.0, 0.0, 0.0), 0.0, 1.0),  # nobody has two halves
    ],
)
def test_the_multiple_that_surely_loses_least_is_taken(source, losses, squares, multiple):
    _, state = trained(source, 1)
    upload = TrialUpload(torch.tensor(losses), torch.full((4,), squares))
    found = PriorTrial(AUTO, 1).server_round(state.server, torch.arange(12), upload)
    assert found.closing_multiple.item() == pytest.approx(multiple)
    before = tensors_of(state.server)
    assert all(torch.equal(part, before[name]) for name, part in tensors_of(found).items() if "multiple" not in name)


def test_a_trial_leaves_all_as_it_was_but_the_multiple(source):
    engine, state = trained(source)
    before = copied(state)
    concluded = engine.conclude(state)
    for name, part in tensors_of(concluded).items():
        if name != "server.closing_multiple":
            assert torch.equal(part.nan_to_num(), tensors_of(before)[name].nan_to_num()), name
    assert concluded.server.closing_multiple.item() in (1.0, *torch.tensor(MULTIPLES).tolist())


def test_a_run_that_goes_on_forgets_the_multiple(source):
    engine, state = trained(source)
    concluded = engine.conclude(copied(state))
    held = map_tensors(torch.clone, concluded)
    held.server.closing_multiple.fill_(100.0)
    on, plain = engine.advance(held, 1), engine.advance(state, 1)
    assert on.server.closing_multiple.item() == 1.0
    for name, part in tensors_of(on).items():
        assert torch.equal(part.nan_to_num(), tensors_of(plain)[name].nan_to_num()), name


def test_uploads_are_the_same_in_chunks_and_one_client_at_a_time(source):
    engine, state = trained(source)
    everybody, task = torch.arange(12), source.task(torch.arange(12), 4)
    trial = engine.for_trial(3).algorithm
    whole, kept = trial.client_round(trial.broadcast(state.server, everybody), state.memory, task)
    assert all(
        torch.equal(*pair) for pair in zip(tensors_of(kept).values(), tensors_of(state.memory).values(), strict=True)
    )
    for m in range(12):
        one = torch.tensor([m])
        memory = map_tensors(lambda tensor, m=m: tensor[m : m + 1], state.memory)
        alone, _ = trial.client_round(trial.broadcast(state.server, one), memory, source.task(one, 4))
        torch.testing.assert_close(alone.excess_losses[0], whole.excess_losses[m], rtol=1e-4, atol=1e-3)
    chunked, same = trained(source, chunk_size=5)
    assert torch.equal(chunked.conclude(same).server.closing_multiple, engine.conclude(state).server.closing_multiple)
    serial = serial_engine(engine, list(range(12)))
    assert serial.conclude(state).server.closing_multiple == engine.conclude(state).server.closing_multiple


def test_no_more_clients_try_than_there_are_to(source, monkeypatch):
    monkeypatch.setattr(cohort, "MOST_IN_TRIAL", 5)
    engine, state = trained(source)
    asked = []
    visit = PriorTrial.client_round
    monkeypatch.setattr(
        PriorTrial,
        "client_round",
        lambda trial, sent, memory, task: asked.append(task.shape[-1]) or visit(trial, sent, memory, task),
    )
    engine.conclude(state)
    assert sum(asked) == 5


def test_nothing_is_tried_where_it_could_not_be_trusted_or_hidden():
    plain = PrivacyOptions()
    assert isinstance(trial_after(AUTO, 3, "none", plain), PriorTrial)
    assert trial_after(AUTO, 3, "hierarchy", plain) is None
    assert trial_after(AUTO, 3, "none", PrivacyOptions(clip=1.0, max_weight=1.0)) is None
    assert trial_after(algorithm("self-fl-auto", prior_precision=10.0), 3, "none", plain) is None
    assert trial_after(algorithm("fedbabu"), 3, "none", plain) is None


def test_an_upload_beyond_a_clients_rows_is_not_possible(source):
    _, state = trained(source)
    losses = torch.tensor([[9.0, 0, 0, 0], [0, 0, -8.0, 0]])
    upload = TrialUpload(losses, losses.square())
    bound = PriorTrial(AUTO, 3).bounds(state.server, torch.arange(2), upload, torch.tensor([8.0, 8.0]))["excess_losses"]
    inside = (upload.excess_losses >= bound.least) & (upload.excess_losses <= bound.most)
    assert inside.all(-1).tolist() == [False, True]


def regression(slope_spread, rounds, rate, seed=0):
    """60 clients of 16 rows of y = θ_m·x + noise, and the run of so many rounds, all of them taking part."""
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(60), 16)
    slopes = np.array([2.0, -1.0, 1.5]) + slope_spread * rng.normal(size=(60, 3))
    x = rng.normal(size=(len(client), 3))
    y = (x * slopes[client]).sum(1, keepdims=True) + 0.3 * rng.normal(size=(len(client), 1))
    fed = selffl.Federation.from_arrays(x.astype("float32"), y.astype("float32"), client, test_fraction=0.25, seed=0)
    torch.manual_seed(0)
    options = {"rounds": rounds, "learning_rate": rate, "seed": 0, "evaluate_every": rounds}
    run = selffl.train(nn.Linear(3, 1), fed, "self-fl-auto", loss=nn.functional.mse_loss, **options)
    return run.summary


def test_clients_may_leave_a_global_model_that_is_hardly_trained():
    """All have the same slopes, and nobody has learned them: far from the global model, near each other."""
    assert regression(0.0, rounds=2, rate=0.002)["closing_multiple"] < 1.0


def test_clients_alike_stay_with_a_global_model_that_is_trained():
    assert regression(0.0, rounds=30, rate=0.05)["closing_multiple"] >= 1.0
