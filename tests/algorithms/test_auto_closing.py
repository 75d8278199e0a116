"""The closing rounds of self-fl-auto: once training is over it is learned once more how far clients differ."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

import selffl
from selffl.algorithms import algorithm
from selffl.algorithms.auto_closing import MOST_CLOSING_CHANGE, NUM_CLOSING_ROUNDS, ClosingRound, ClosingUpload
from selffl.algorithms.population import Population
from selffl.algorithms.records import map_tensors, tensors_of
from selffl.data import load
from selffl.engines import cohort
from selffl.engines.claims import Claims
from selffl.engines.cohort import CohortEngine
from selffl.engines.limits import PrivacyOptions
from selffl.engines.rounds import GatheredUploads, closing_rounds_after
from selffl.engines.serial import serial_engine
from selffl.training.flat import FlatModel
from selffl.training.model import ModelSource

AUTO = algorithm("self-fl-auto", num_local_steps=5)
POPULATION = Population(12)

pytestmark = pytest.mark.usefixtures("no_small_models")


@pytest.fixture(scope="module")
def source():
    federation = load("digits", num_clients=12, seed=2, test_fraction=0.3)
    return ModelSource(federation, FlatModel(nn.Linear(64, 10)), nn.functional.cross_entropy, 0.05, 5, seed=1)


def trained(source, rounds=3, **options):
    engine = CohortEngine(AUTO, source, 0.4, 1, **options)
    return engine, engine.advance(engine.start(torch.zeros(650)), rounds)


def copied(state):
    return map_tensors(torch.clone, state)


def of_two_groups(agreements, disagreements, number=12.0, deviation=0.0):
    """Sums over so many clients whose deviations, of 650 numbers, add up to this one in every coordinate."""
    total = torch.full((650,), deviation, dtype=torch.float64)
    each = torch.tensor([640.0, 10.0], dtype=torch.float64) * (deviation / number) ** 2
    numbers = torch.tensor(number, dtype=torch.float64)
    return ClosingUpload(
        num_examples=30 * numbers,
        has_halves=numbers,
        deviation=total,
        deviation_squares=number * each,
        agreements=number * torch.tensor(agreements, dtype=torch.float64),
        disagreements=number * torch.tensor(disagreements, dtype=torch.float64),
        squared_disagreements=torch.zeros(2, dtype=torch.float64),
        spread_products=torch.ones(3, dtype=torch.float64),
        undecided=numbers,
        temperature=numbers,
    )


def test_rounds_add_up_so_that_one_counts_by_what_it_shows(source):
    _, state = trained(source, 1)
    first = ClosingRound(AUTO, 1, 1).server_round(state.server, torch.arange(12), of_two_groups([6.0, 0.0], [2.0, 1.0]))
    assert AUTO.inter_variance(first).item() == pytest.approx(6.0 / 3.0)
    both = ClosingRound(AUTO, 1, 2).server_round(first, torch.arange(12), of_two_groups([50.0, 40.0], [160.0, 40.0]))
    assert AUTO.inter_variance(both).item() == pytest.approx(96.0 / 203.0)
    # Halves of twelve clients disagree on 81 nats of the weights and 20.5 of the biases: both have their own variance.
    own = {name: (a / b) for name, a, b in (("weights", 56.0, 162.0), ("biases", 40.0, 41.0))}
    for found, name, nats in zip(AUTO.group_variances(both).tolist(), own, (81.0, 20.5), strict=True):
        share = 12 * nats / (12 * nats + 10)
        expected = math.exp(share * math.log(own[name]) + (1 - share) * math.log(96.0 / 203.0))
        assert found == pytest.approx(expected, rel=1e-5)
    assert both.inter_variance == state.server.inter_variance  # from which training would go on


def test_what_all_clients_have_in_common_is_no_difference_but_a_way_to_go(source):
    """All deviate by as much in every coordinate: the centre is not where they would have it."""
    _, state = trained(source, 1)
    sums = of_two_groups([6.4, 0.1], [2.0, 1.0], deviation=12 * 0.1)
    found = ClosingRound(AUTO, 1, 1).server_round(state.server, torch.arange(12), sums)
    assert AUTO.closing_prior(found)[0].item() == pytest.approx(6.5 / 3.0, rel=1e-5)
    # In common they have 0.1² in each of 650 coordinates.
    least = state.server.inter_variance.item() / MOST_CLOSING_CHANGE
    assert AUTO.inter_variance(found).item() == pytest.approx(least, rel=1e-5)
    assert AUTO.closing_multiple(found).item() == pytest.approx(least / (6.5 / 3.0), rel=1e-5)


def test_the_centre_goes_where_all_clients_would_have_it(source):
    """All deviate by 0.1 in every coordinate, and by nothing else: the centre goes there, and training does not."""
    _, state = trained(source, 1)
    everybody, theta = torch.arange(12), state.server.params
    first = ClosingRound(AUTO, 1, 1).server_round(
        state.server, everybody, of_two_groups([6.4, 0.1], [2.0, 1.0], deviation=1.2)
    )
    torch.testing.assert_close(AUTO.global_model(first), theta + 0.1)
    assert torch.equal(AUTO.closing_broadcast(first, everybody).params[3], AUTO.global_model(first))
    assert torch.equal(AUTO.broadcast(first, everybody).params[3], theta)
    assert torch.equal(first.params, theta)
    # The next round measures from there, and finds half as much in the other direction.
    sums = of_two_groups([1.6, 0.025], [2.0, 1.0], deviation=-0.6)
    both = ClosingRound(AUTO, 1, 2).server_round(first, everybody, sums)
    torch.testing.assert_close(AUTO.global_model(both), theta + 0.05)
    assert both.closing.common.sum().item() == pytest.approx(650 * 0.05**2)


def test_the_centre_stays_where_clients_deviate_by_chance(source):
    """Deviations that are as long as those of clients who have nothing in common add up to no way to go."""
    _, state = trained(source, 1)
    sums = of_two_groups([6.0, 0.1], [2.0, 1.0], deviation=1.2)
    sums = dataclasses.replace(sums, deviation_squares=12 * 12 * sums.deviation_squares)
    found = ClosingRound(AUTO, 1, 1).server_round(state.server, torch.arange(12), sums)
    assert torch.equal(AUTO.global_model(found), state.server.params)


@pytest.mark.parametrize("disagreements", [[0.0, 0.0], [-2.0, 1.0], [math.nan, 1.0]])
def test_a_round_that_shows_nothing_changes_nothing(source, disagreements):
    _, state = trained(source, 1)
    sums = of_two_groups([6.0, 1.0], disagreements)
    found = ClosingRound(AUTO, 1, 1).server_round(state.server, torch.arange(12), sums)
    assert all(tensor.isnan().all() for tensor in tensors_of(found.closing).values())
    assert AUTO.inter_variance(found) == state.server.inter_variance
    assert AUTO.closing_multiple(found) == 1.0
    # A later one counts as the first.
    later = ClosingRound(AUTO, 1, 2).server_round(found, torch.arange(12), of_two_groups([6.0, 0.0], [2.0, 1.0]))
    assert AUTO.inter_variance(later).item() == pytest.approx(2.0)


def test_closing_rounds_leave_all_as_it_was_but_what_they_say(source):
    engine, state = trained(source)
    before = copied(state)
    concluded = engine.conclude(state)
    for name, part in tensors_of(concluded).items():
        if name.startswith("server.closing."):
            assert part.isfinite().all(), name
        else:
            assert torch.equal(part.nan_to_num(), tensors_of(before)[name].nan_to_num()), name


def test_a_run_that_goes_on_forgets_what_closing_rounds_said(source):
    engine, state = trained(source)
    on, plain = engine.advance(engine.conclude(copied(state)), 1), engine.advance(state, 1)
    for name, part in tensors_of(on).items():
        assert torch.equal(part.nan_to_num(), tensors_of(plain)[name].nan_to_num()), name
        assert not name.startswith("server.closing.") or part.isnan().all()


@pytest.mark.slow
def test_uploads_are_the_same_in_chunks_and_one_client_at_a_time(source):
    engine, state = trained(source)
    everybody, task = torch.arange(12), source.task(torch.arange(12), 4)
    asked = engine.closing_engines(3)[0].algorithm
    whole, kept = asked.client_round(asked.broadcast(state.server, everybody), state.memory, task)
    assert all(
        torch.equal(*pair) for pair in zip(tensors_of(kept).values(), tensors_of(state.memory).values(), strict=True)
    )
    for m in range(12):
        one = torch.tensor([m])
        memory = map_tensors(lambda tensor, m=m: tensor[m : m + 1], state.memory)
        alone, _ = asked.client_round(asked.broadcast(state.server, one), memory, source.task(one, 4))
        for name, part in tensors_of(alone).items():
            torch.testing.assert_close(part[0], tensors_of(whole)[name][m], rtol=2e-3, atol=1e-4)
    chunked, same = trained(source, chunk_size=5)
    serial = serial_engine(engine, list(range(12)))
    found = engine.conclude(state).server.closing
    for other in (chunked.conclude(same), serial.conclude(state)):
        for name, part in tensors_of(other.server.closing).items():
            torch.testing.assert_close(part, tensors_of(found)[name], rtol=2e-3, atol=1e-4)


def test_rows_are_cut_in_other_ways_than_in_training(source):
    """Each way has each row once, in halves as large; no two ways are the same."""
    task, found = source.task(torch.tensor([3]), 1), []
    for split in range(5):
        halves = task.halves(split)
        assert halves.num_examples.tolist() == task.halves().num_examples.tolist()
        order = halves.minibatches.order[: int(task.num_examples)]
        found.append(frozenset(order[: int(halves.num_examples[0, 0])].tolist()))
        assert sorted(order.tolist()) == sorted(task.halves().minibatches.order.tolist())
    assert len(set(found)) == 5


def test_no_more_clients_take_part_than_there_are_to(source, monkeypatch):
    monkeypatch.setattr(cohort, "MOST_IN_CLOSING", 5)
    engine, state = trained(source)
    asked = []
    visit = ClosingRound.client_round
    monkeypatch.setattr(
        ClosingRound,
        "client_round",
        lambda closing, sent, memory, task: asked.append(task.shape[-1]) or visit(closing, sent, memory, task),
    )
    engine.conclude(state)
    assert sum(asked) == 5 * NUM_CLOSING_ROUNDS


def test_there_are_none_where_they_could_not_be_defended_or_hidden():
    plain = PrivacyOptions()
    numbers = [each.number for each in closing_rounds_after(AUTO, 3, POPULATION, "none", plain)]
    assert numbers == list(range(1, 1 + NUM_CLOSING_ROUNDS))
    assert not closing_rounds_after(AUTO, 3, POPULATION, "hierarchy", plain)
    assert not closing_rounds_after(AUTO, 3, POPULATION, "none", PrivacyOptions(clip=1.0, max_weight=1.0))
    assert not closing_rounds_after(algorithm("self-fl-auto", prior_precision=10.0), 3, POPULATION, "none", plain)
    assert not closing_rounds_after(algorithm("fedbabu"), 3, POPULATION, "none", plain)


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


@pytest.mark.slow
def test_clients_may_leave_a_global_model_that_is_hardly_trained():
    """All have the same slopes, and nobody has learned them: far from the global model, near each other."""
    found = regression(0.0, rounds=2, rate=0.002)
    assert found["closing_multiple"] < 0.2
    assert found["inter_variance"] < 0.05


@pytest.mark.slow
def test_clients_alike_stay_with_a_global_model_that_is_trained():
    found = regression(0.0, rounds=30, rate=0.05)
    assert found["inter_variance"] / found["closing_multiple"] < 0.01


@pytest.mark.slow
def test_the_same_spread_is_found_whatever_training_began_from(monkeypatch):
    """Of four coefficients three vary, by 0.25; in units of twice the variance about the line, 0.09."""
    found = []
    for precision in (0.1, 10.0, 1000.0):
        monkeypatch.setattr("selffl.algorithms.self_fl_auto.FIRST_PRECISION", precision)
        found.append(regression(0.5, rounds=12, rate=0.05)["inter_variance"])
    assert max(found) < 1.25 * min(found)
    assert 0.6 < found[0] / (3 / 4 * 0.25 / (2 * 0.09)) < 1.4


@pytest.mark.parametrize("times", [3.0, 1e3, 1e12, 1e30])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_one_client_moves_the_centre_by_little_whatever_it_claims(source, times, sign):
    """One of twelve sends models so many times as far away, and squares that fit them."""
    engine, state = trained(source)
    everybody = torch.arange(12)
    asked = engine.closing_engines(3)[0].algorithm
    sent = asked.broadcast(state.server, everybody)
    honest, _ = asked.client_round(sent, state.memory, source.task(everybody, 4))

    def centre_after(upload):
        gathered = GatheredUploads(asked, 0, Claims(asked, state.server, source.population.num_examples, 0))
        gathered.add(everybody, upload)
        server = asked.server_round(state.server, gathered.clients, gathered.upload())
        return AUTO.closing_centre(server), gathered

    def lie(tensor, factor):
        return torch.cat([tensor[:1] * factor, tensor[1:]])

    deviation = lie(honest.deviation, sign * times)
    squares = torch.stack([part.square().sum(-1) for part in deviation.split([640, 10], dim=-1)], dim=-1)
    lying, gathered = centre_after(dataclasses.replace(honest, deviation=deviation, deviation_squares=squares))
    plain, _ = centre_after(honest)
    assert lying.isfinite().all()
    reach = 10 * float(honest.deviation.norm(dim=-1).quantile(0.75)) / 12
    assert float((lying - plain).norm()) <= reach + float((plain - state.server.params).norm())
    if times > 10:  # it is named, or left out
        assert gathered.held_back or gathered.left_out
