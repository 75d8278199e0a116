"""The cohort engine: who takes part, what is reported, and what is left alone."""

import math

import pytest
import torch
from scipy import stats

from selffl.algorithms import FedAvg, Local, SelfFL
from selffl.algorithms.averaging import PersonalMemory
from selffl.algorithms.records import map_tensors, tensors_of
from selffl.engines.cohort import CohortEngine, sample_cohort
from selffl.errors import DivergedError
from selffl.randomness import uniform
from selffl.training.gaussian import GaussianFederation


def gaussian(num_clients=6, seeds=0, learning_rate=1e-3, **options):
    return GaussianFederation.draw(
        seeds=torch.as_tensor(seeds),
        num_clients=num_clients,
        num_examples=(5, 40),
        global_mean=1.6,
        inter_variance=0.05,
        row_variance=0.1,
        learning_rate=learning_rate,
        **options,
    )


def origin(source):
    return torch.zeros_like(source.global_params)


# ------------------------------------------------------------------------------------------------------------- cohorts


@pytest.mark.parametrize(
    ("num_clients", "participation", "size"),
    [
        (100, 0.29, 29),  # 0.29 · 100 is 28.999999999999996 in floating point
        (100, 0.57, 57),
        (1000, 0.1, 100),
        (10, 0.3, 3),
        (20, 0.15, 3),
        (7, 0.3, 2),
        (7, 0.999, 6),
        (20, 1.0, 20),
        (20, 0.01, 1),  # never nobody
        (1, 1.0, 1),
        (1, 0.1, 1),
    ],
)
def test_the_size_of_a_cohort(num_clients, participation, size):
    clients = sample_cohort(3, 1, num_clients, participation)
    assert clients.shape == (size,)
    assert clients.tolist() == sorted(set(clients.tolist()))  # ascending, without replacement
    assert clients.min() >= 0
    assert clients.max() < num_clients


def test_float_trouble_is_real():
    assert math.floor(0.29 * 100) == 28


def test_everybody_is_sampled_equally_often():
    num_clients, rounds = 12, 1500
    counts = torch.zeros(num_clients, dtype=torch.int64)
    pairs = torch.zeros(num_clients, num_clients, dtype=torch.int64)
    for number in range(1, rounds + 1):
        clients = sample_cohort(7, number, num_clients, 0.25)
        counts[clients] += 1
        pairs[clients[0], clients[1]] += 1
    # sampling without replacement spreads less than independent draws, by (1 − C)·M/(M − 1): allow for it
    shrink = (1 - 0.25) * num_clients / (num_clients - 1)
    chi_square = ((counts - rounds * 0.25) ** 2 / (rounds * 0.25)).sum() / shrink
    assert 1e-3 < stats.chi2.sf(chi_square.item(), num_clients - 1) < 1 - 1e-3
    # two smallest of three: every pair i < j can come, with weights M − 1 − j for the third
    weights = torch.tensor([[float(j > i) * (num_clients - 1 - j) for j in range(12)] for i in range(12)])
    expected = rounds * weights / weights.sum()
    possible = expected > 0
    assert pairs[~possible].sum() == 0
    chi_square = ((pairs - expected) ** 2 / expected)[possible].sum()
    assert stats.chi2.sf(chi_square.item(), int(possible.sum()) - 1) > 1e-3


def test_rounds_and_seeds_draw_different_cohorts():
    cohorts = {
        (seed, number): tuple(sample_cohort(seed, number, 50, 0.2).tolist()) for seed in range(5) for number in range(5)
    }
    assert len(set(cohorts.values())) == 25


def test_the_smallest_lots_are_in():
    lots = uniform(5, "cohort", 2, torch.arange(9)).tolist()
    smallest = sorted(range(9), key=lambda client: lots[client])[:3]
    assert sample_cohort(5, 2, 9, 0.34).tolist() == sorted(smallest)


@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_a_seed_for_each_repeat_equals_single_calls(shape):
    seeds = torch.arange(100, 100 + math.prod(shape)).reshape(shape)
    together = sample_cohort(seeds, 9, 30, 0.2)
    assert together.shape == (*shape, 6)
    for place in range(seeds.numel()):
        alone = sample_cohort(int(seeds.flatten()[place]), 9, 30, 0.2)
        assert together.reshape(-1, 6)[place].tolist() == alone.tolist()


# --------------------------------------------------------------------------------------------------------------- rounds


def test_the_start_is_round_zero_and_nothing_spent():
    source = gaussian(5)
    engine = CohortEngine(Local(), source)
    state = engine.start(torch.tensor([2.5], dtype=torch.float64))
    assert state.round_number == 0
    assert state.num_gradients.tolist() == [0] * 5
    assert state.num_gradients.dtype == torch.int64
    assert state.server.params.tolist() == [2.5]
    assert state.memory.params.shape == (5, 1)
    assert engine.personal(state).tolist() == [[2.5]] * 5


def test_every_round_is_reported_with_its_number_cohort_upload_and_server():
    source = gaussian(8)
    engine = CohortEngine(SelfFL(), source, participation=0.4, seed=5)
    reports = []
    state = engine.advance(engine.start(origin(source)), 3, reports.append)
    state = engine.advance(state, 2, reports.append)
    assert [report.round_number for report in reports] == [1, 2, 3, 4, 5]
    for report in reports:
        assert report.clients.tolist() == sample_cohort(5, report.round_number, 8, 0.4).tolist()
        assert report.upload.params.shape == (3, 1)
    assert reports[-1].server is state.server
    assert reports[0].server is not reports[1].server
    assert state.round_number == 5


def test_no_round_at_all_is_the_same_state():
    source = gaussian()
    engine = CohortEngine(SelfFL(), source)
    state = engine.advance(engine.start(origin(source)), 2)
    again = engine.advance(state, 0)
    assert again.round_number == 2
    for name, tensor in tensors_of(again).items():
        torch.testing.assert_close(tensor, tensors_of(state)[name], rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("method", [SelfFL(), Local(), FedAvg()])
@pytest.mark.parametrize("seeds", [4, [4, 5]])
def test_advancing_leaves_its_input_alone(method, seeds):
    source = gaussian(6, seeds=seeds)
    engine = CohortEngine(method, source, participation=0.5, seed=torch.as_tensor(seeds))
    state = engine.advance(engine.start(origin(source)), 3)
    kept = map_tensors(torch.clone, state)
    after = engine.advance(state, 3)
    for name, tensor in tensors_of(state).items():
        torch.testing.assert_close(tensor, tensors_of(kept)[name], rtol=0, atol=0, equal_nan=True, msg=name)
    assert state.round_number == 3
    assert not torch.equal(after.num_gradients, state.num_gradients)


@pytest.mark.parametrize("num_clients", [1, 6])
@pytest.mark.parametrize("method", [Local(num_local_steps=3), SelfFL(), FedAvg()])
def test_a_state_that_is_consumed_gives_the_same_and_takes_no_second_block(method, num_clients):
    source = gaussian(num_clients)
    engine = CohortEngine(method, source, participation=0.5)
    expected = engine.advance(engine.start(origin(source)), 4)
    middle = engine.advance(engine.start(origin(source)), 2, consume=True)
    blocks = {name: tensor.data_ptr() for name, tensor in tensors_of(middle.memory).items()}
    found = engine.advance(middle, 2, consume=True)
    for name, tensor in tensors_of(expected).items():
        torch.testing.assert_close(tensors_of(found)[name], tensor, rtol=0, atol=0, equal_nan=True)
    assert {name: tensor.data_ptr() for name, tensor in tensors_of(found.memory).items()} == blocks


class KeepsWhatItGot(Local):
    """One whose newcomers are handed the model itself, not a copy of it."""

    def newcomer(self, params):
        return PersonalMemory(params, torch.zeros_like(params[..., 0]))


@pytest.mark.parametrize("num_clients", [1, 3])
def test_memories_that_are_written_into_are_never_the_initial_model(num_clients):
    source = gaussian(num_clients)
    first = origin(source)
    engine = CohortEngine(KeepsWhatItGot(num_local_steps=3), source)
    state = engine.advance(engine.start(first), 2, consume=True)
    assert torch.equal(first, origin(source))
    assert (state.memory.params != 0).all()


def test_a_client_that_is_not_sampled_keeps_its_memory():
    source = gaussian(6)
    engine = CohortEngine(Local(num_local_steps=2), source, participation=0.5)
    reports = []
    before = engine.advance(engine.start(origin(source)), 4)
    after = engine.advance(before, 1, reports.append)
    seen = reports[0].clients.tolist()
    unseen = [client for client in range(6) if client not in seen]
    assert torch.equal(after.memory.params[unseen], before.memory.params[unseen])
    assert (after.memory.params[seen] != before.memory.params[seen]).all()
    assert after.memory.clock.tolist() == [
        clock + (client in seen) for client, clock in enumerate(before.memory.clock.tolist())
    ]
    assert after.num_gradients[unseen].tolist() == before.num_gradients[unseen].tolist()
    assert (after.num_gradients[seen] == before.num_gradients[seen] + 2).all()


def test_the_task_is_asked_for_by_cohort_and_round():
    asked = []

    class Listening:
        shape, population = torch.Size(), gaussian(6).population

        def task(self, clients, round_number):
            asked.append((clients.tolist(), round_number))
            return gaussian(6).task(clients, round_number)

    engine = CohortEngine(FedAvg(num_local_steps=1), Listening(), participation=0.5, seed=2)
    state = engine.advance(engine.start(torch.zeros(1, dtype=torch.float64)), 2)
    engine.personal(state)
    cohorts = [(sample_cohort(2, number, 6, 0.5).tolist(), number) for number in (1, 2)]
    assert asked == [*cohorts, (list(range(6)), 3)]


@pytest.mark.parametrize("method", [FedAvg(num_local_steps=50), SelfFL(initial_steps=50, max_local_steps=50)])
def test_a_huge_learning_rate_is_reported_as_divergence(method):
    source = gaussian(6, learning_rate=1e5)
    engine = CohortEngine(method, source)
    expected = (
        rf"6 of 6 clients of {method.name} sent .* in round \d+ \(client 0: .* NaN .*\); expected .*learning rate"
    )
    with pytest.raises(DivergedError, match=expected):
        engine.advance(engine.start(origin(source)), 20)


def test_a_client_whose_variance_overflows_is_left_out_by_name(caplog):
    """Models of 1e160 and more are finite, but their variances are not."""
    rate = torch.full((4,), 1e-3, dtype=torch.float64)
    rate[0] = 5.0
    source = gaussian(4, learning_rate=rate)
    engine = CohortEngine(SelfFL(), source, names=["a", "b", "c", "d"])
    reports = []
    state = engine.advance(engine.start(origin(source)), 12, reports.append)
    assert state.server.params.isfinite().all()
    assert reports[-1].clients.tolist() == [1, 2, 3]
    assert reports[-1].num_gradients.shape == (3,)
    assert "round 12: client a is left out: params " in caplog.text


def test_divergence_of_one_repeat_is_divergence():
    rate = torch.tensor([[1e-3] * 4, [1e5] * 4], dtype=torch.float64)
    source = gaussian(4, seeds=[0, 1], learning_rate=rate)
    engine = CohortEngine(FedAvg(num_local_steps=50), source, seed=torch.tensor([0, 1]))
    with pytest.raises(DivergedError):
        engine.advance(engine.start(origin(source)), 20)
