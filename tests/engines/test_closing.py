"""The closing visit: once training is over each client goes on by itself, and nothing else changes."""

import pytest
import torch
from torch import nn

import selffl
from needs import NEEDS_CLUSTERS, NEEDS_LAYERS
from selffl.algorithms import ALGORITHMS, SelfFLAuto, algorithm
from selffl.algorithms.records import map_tensors, tensors_of
from selffl.algorithms.rowwise import RowwiseTask
from selffl.budget import BUDGETS, Budget
from selffl.data import load
from selffl.engines.cohort import CohortEngine
from selffl.engines.serial import serial_engine
from selffl.errors import SelfFLError
from selffl.training.flat import FlatModel
from selffl.training.gaussian import GaussianFederation
from selffl.training.model import ModelSource

AUTO, ROUNDS = "self-fl-auto", 6


@pytest.fixture(scope="module", autouse=True)
def short_closing():
    """Clients train as long as the method says: it is looked at how long that is."""


@pytest.fixture(scope="module")
def source():
    federation = load("digits", num_clients=12, seed=2, test_fraction=0.3)
    return ModelSource(federation, FlatModel(nn.Linear(64, 10)), nn.functional.cross_entropy, 0.05, 5, seed=1)


def trained(source, name=AUTO, rounds=ROUNDS, chunk_size=None):
    engine = CohortEngine(algorithm(name), source, 0.4, 1, chunk_size)
    return engine, engine.advance(engine.start(torch.zeros(650)), rounds)


def copied(state):
    return {name: tensor.clone() for name, tensor in tensors_of(state).items()}


def test_models_are_those_of_a_visit_by_hand(source):
    """Client by client: what it is sent does not change, and the visit has the minibatches of the next round."""
    engine, state = trained(source, rounds=2)
    found, method = engine.personal(state, is_over=True), engine.algorithm
    assert 0 < int((state.num_rounds > 0).sum()) < 12
    for m in range(12):
        client = torch.tensor([m])
        if not state.num_rounds[m]:  # it has the global model (D10)
            assert torch.equal(found[m], state.server.params)
            continue
        memory = map_tensors(lambda tensor, m=m: tensor[m : m + 1], state.memory)
        memory = method.closing_visit(method.broadcast(state.server, client), memory, source.task(client, 3), 2)
        assert torch.equal(found[m], method.personal(state.server.params, memory, source.task(client, 3))[0])
        assert not torch.allclose(found[m], engine.personal(state)[m], atol=1e-3)


@pytest.mark.parametrize(
    ("rows", "num_rounds", "visits"),
    [
        ((1, 100, 200, 201, 6400, 10**6), 1000, (8, 128, 128, 256, 1000, 1000)),  # of ten steps, with B = 8
        ((1, 100, 200, 201, 6400, 10**6), 128, (8, 128, 128, 128, 128, 128)),
        ((1, 3, 10**6), 5, (5, 5, 5)),
        ((1, 3, 10**6), 1, (4, 4, 4)),
    ],
)
def test_a_visit_is_as_long_as_fifty_passes_over_the_rows(rows, num_rounds, visits):
    """In powers of two visits of ten steps, no more than there were rounds, but at least four."""
    task = LengthOnly(torch.Size((len(rows),)), torch.tensor(rows), 0.1, 8)
    found = algorithm(AUTO, num_local_steps=10).closing_steps(task, num_rounds)
    assert found.tolist() == [10 * number for number in visits]
    epochs = algorithm(AUTO, num_local_epochs=2).closing_steps(task, num_rounds)
    assert epochs.tolist() == [2 * -(-size // 8) * max(min(32, num_rounds), 4) for size in rows]


class LengthOnly(RowwiseTask):
    """Rows that are counted and never looked at."""

    batch = batch_gradient = noise = halves = mean_losses = None


def test_the_state_stays_and_training_goes_on_as_if_nobody_had_asked(source):
    engine, state = trained(source)
    before = copied(state)
    engine.personal(state, is_over=True)
    for name, tensor in tensors_of(state).items():
        assert torch.equal(tensor.nan_to_num(), before[name].nan_to_num()), name
    _, whole = trained(source, rounds=ROUNDS + 3)
    for name, tensor in tensors_of(engine.advance(state, 3)).items():
        assert torch.equal(tensor.nan_to_num(), tensors_of(whole)[name].nan_to_num()), name


@pytest.mark.slow
def test_models_are_the_same_for_some_clients_in_chunks_and_one_at_a_time(source):
    engine, state = trained(source)
    expected = engine.personal(state, is_over=True)
    for size in (1, 5):
        parts = [engine.personal(state, some, is_over=True) for some in torch.arange(12).split(size)]
        assert torch.equal(torch.cat(parts), expected)
    chunked, same = trained(source, chunk_size=5)
    assert torch.equal(chunked.personal(same, is_over=True), expected)
    serial = serial_engine(engine, list(range(12)))
    alone = [serial.personal(state, torch.tensor([m]), is_over=True) for m in range(12)]
    assert torch.equal(torch.cat(alone), expected)


@pytest.mark.parametrize(("chunk_size", "most"), [(None, 4), (3, 3)])
def test_no_more_clients_train_at_once_than_in_a_round(chunk_size, most, source, monkeypatch):
    engine, state = trained(source, chunk_size=chunk_size)
    visit, at_once = SelfFLAuto.closing_visit, []

    def watched(method, sent, memory, task, num_rounds):
        at_once.append(task.shape[-1])
        return visit(method, sent, memory, task, num_rounds)

    monkeypatch.setattr(SelfFLAuto, "closing_visit", watched)
    engine.personal(state, is_over=True)
    assert max(at_once) == most
    assert sum(at_once) == 12


def test_clients_make_their_visit_once_however_often_they_are_asked(source, monkeypatch):
    engine, state = trained(source, rounds=2)
    visit, visits = SelfFLAuto.closing_visit, []
    monkeypatch.setattr(SelfFLAuto, "closing_visit", lambda *given: visits.append(1) or visit(*given))
    found = engine.personal(state, is_over=True)
    made, expected = len(visits), found.clone()
    found.zero_()  # it is the caller's own
    assert torch.equal(engine.personal(state, torch.arange(12), is_over=True), expected)
    assert torch.equal(engine.personal(state, is_over=True).zero_(), 0 * expected)
    assert torch.equal(engine.personal(state, is_over=True), expected)
    assert len(visits) == made
    later = engine.advance(state, 1)
    assert not torch.equal(engine.personal(later, is_over=True), expected)
    assert torch.equal(engine.personal(state, is_over=True), expected)
    assert len(visits) == 3 * made


def test_models_that_are_too_large_are_made_anew(source, monkeypatch):
    engine, state = trained(source, rounds=2)
    monkeypatch.setitem(BUDGETS, "cpu", Budget(evaluated_numbers=5 * 650))
    visit, visits = SelfFLAuto.closing_visit, []
    monkeypatch.setattr(SelfFLAuto, "closing_visit", lambda *given: visits.append(1) or visit(*given))
    for clients in ([0, 1, 2], [3, 4], [5, 6], [0, 1, 2], [3, 4], [5, 6]):  # the third is one too many
        engine.personal(state, torch.tensor(clients), is_over=True)
    assert len(visits) == 4


def test_federations_side_by_side_have_the_models_of_one_at_a_time():
    def closed(seeds):
        source = GaussianFederation.draw(
            seeds=torch.as_tensor(seeds), num_clients=9, num_examples=(3, 12), global_mean=1.6, inter_variance=0.05,
            row_variance=0.1, learning_rate=1e-3, with_rows=True,
        )  # fmt: skip
        engine = CohortEngine(algorithm(AUTO), source, 0.3, source.seeds)
        state = engine.advance(engine.start(source.global_params - 0.5), 2)
        return engine.personal(state, is_over=True), engine.personal(state), state.num_rounds > 0

    together, before, has_trained = closed([4, 5])
    assert (together != before).any(-1).equal(has_trained)
    assert not has_trained.all()
    for place, seed in enumerate((4, 5)):
        torch.testing.assert_close(together[place], closed(seed)[0], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if not ALGORITHMS[name]().has_closing_visit])
def test_methods_without_a_closing_visit_have_the_models_they_had(name, source, short):
    if name in NEEDS_LAYERS | NEEDS_CLUSTERS:
        pytest.skip("needs layers or clusters")
    engine = CohortEngine(short(name), source, 0.4, 1)
    state = engine.advance(engine.start(torch.zeros(650)), 2)
    assert torch.equal(engine.personal(state, is_over=True), engine.personal(state))


class Broken(SelfFLAuto):
    """Fails once training is over."""

    def closing_visit(self, *given):
        raise KeyError("params")


def test_an_error_says_whose_visit_it_was():
    federation = load("digits", num_clients=3, seed=2)
    with pytest.raises(SelfFLError, match=r"^client 0, round 3, while it trained on by itself: KeyError: 'params'$"):
        selffl.train("softmax", federation, Broken(), engine="serial", rounds=2, participation=1.0)
