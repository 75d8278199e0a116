"""Steps by products of rows end where plain steps end, for whoever has few rows."""

import pytest
import torch
from torch import nn

from selffl.algorithms.held_steps import Hold, descend_held
from selffl.algorithms.local_task import Walk
from selffl.algorithms.solver import descend
from selffl.data.federation import Federation, Rows
from selffl.training import few_rows
from selffl.training.flat import FlatModel
from selffl.training.model import ModelSource

NUM_FEATURES, NUM_CLASSES, BATCH_SIZE, RATE = 30, 4, 3, 0.2
SIZES = torch.tensor([5, 2, 11, 60, 4])  # the fourth has many rows for its steps; the second fewer than a minibatch


@pytest.fixture
def task():
    """A task of clients of different sizes, in double precision, as of new."""
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(int(SIZES.sum()), NUM_FEATURES, generator=draw, dtype=torch.float64)
    labels = torch.randint(NUM_CLASSES, (len(features),), generator=draw)
    rows = Rows(features, labels, torch.cat([torch.zeros(1, dtype=torch.int64), SIZES.cumsum(0)]))
    model = FlatModel(nn.Linear(NUM_FEATURES, NUM_CLASSES, dtype=torch.float64))
    source = ModelSource(
        Federation(range(len(SIZES)), rows, rows), model, nn.functional.cross_entropy, RATE, BATCH_SIZE
    )
    return lambda: source.task(torch.arange(len(SIZES)), 1)


def by_autograd(task, start, num_steps, penalty, anchor, first_draw):
    """One client and one step at a time, by torch's own layer, loss and derivative."""
    ended = []
    for client, own in enumerate(start):
        layer = nn.Linear(NUM_FEATURES, NUM_CLASSES, dtype=torch.float64)
        nn.utils.vector_to_parameters(own.clone(), layer.parameters())
        for step in range(int(num_steps[client])):
            features, labels = task.batch(first_draw + step, torch.tensor([client]))
            loss = nn.functional.cross_entropy(layer(features[0]), labels[0])
            flat = nn.utils.parameters_to_vector(layer.parameters())
            if anchor is not None:
                loss = loss + penalty / 2 * (flat - anchor[client]).square().sum()
            slopes = torch.autograd.grad(loss, list(layer.parameters()))
            with torch.no_grad():
                for part, slope in zip(layer.parameters(), slopes, strict=True):
                    part -= RATE * slope
        ended.append(nn.utils.parameters_to_vector(layer.parameters()).detach())
    return torch.stack(ended)


@pytest.mark.parametrize("penalty", [0.0, 0.7])
@pytest.mark.parametrize("num_steps", [6, torch.tensor([6, 3, 25, 4, 0])])
def test_steps_end_where_those_of_autograd_end(task, num_steps, penalty, monkeypatch):
    draw = torch.Generator().manual_seed(1)
    start, anchor = torch.randn(2, len(SIZES), NUM_CLASSES * (NUM_FEATURES + 1), generator=draw, dtype=torch.float64)
    monkeypatch.setattr(few_rows, "NUMBERS_AT_ONCE", 300)  # two or three clients at once
    monkeypatch.setattr("selffl.training.model.STEPS_AT_ONCE", 10)
    pulled = {"penalty": penalty, "anchor": anchor if penalty else None}
    steps = torch.as_tensor(num_steps).expand(len(SIZES))
    plain, tried = task(), task()
    walked = []
    by_rows = few_rows.walk_by_rows
    monkeypatch.setattr(
        "selffl.training.model.walk_by_rows", lambda *given: (walked.extend(given[2].tolist()), by_rows(*given))
    )
    before = start.clone()
    found = descend(tried, start, num_steps, first_draw=18, **pulled)  # of two blocks of minibatches
    expected = by_autograd(plain, start, steps, penalty, pulled["anchor"], 18)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    assert torch.equal(start, before)
    assert tried.num_gradients.tolist() == steps.tolist()
    assert 3 not in walked
    assert {0, 1, 2} <= set(walked)


def test_halves_are_walked_by_rows_too(task, monkeypatch):
    start = torch.zeros(len(SIZES), 2, NUM_CLASSES * (NUM_FEATURES + 1), dtype=torch.float64)
    found = descend(task().halves(), start, 6)
    monkeypatch.setattr(few_rows, "MOST_WORK", 0.0)
    halves = task().halves()
    torch.testing.assert_close(found, descend(halves, start, 6), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("num_steps", [7, torch.tensor([2, 3, 1, 4, 0])])
def test_later_walks_of_a_visit_end_where_plain_steps_end(task, num_steps, monkeypatch):
    """Products of rows are known then: of halves, and where steps meet fewer rows than there are."""
    draw = torch.Generator().manual_seed(3)
    start = torch.randn(len(SIZES), 2, NUM_CLASSES * (NUM_FEATURES + 1), generator=draw, dtype=torch.float64)
    by_half = num_steps if isinstance(num_steps, int) else num_steps.unsqueeze(-1)

    def visit(own):
        descend(own, start[:, 0], 25)
        return descend(own.halves(), start, by_half, first_draw=4), descend(own, start[:, 1], num_steps, first_draw=9)

    walked = task()
    found = visit(walked)
    # The third has more products than a model has numbers, the fourth has taken plain steps.
    assert [client in walked._known_products for client in range(len(SIZES))] == [True, True, False, False, True]
    for client in range(len(SIZES)):  # the same bits whoever is beside it
        alone = task()
        descend(alone, start[:, 0], torch.where(torch.arange(len(SIZES)) == client, 25, 0))
        assert torch.equal(descend(alone.halves(), start, by_half, first_draw=4)[client], found[0][client])
    monkeypatch.setattr(few_rows, "MOST_WORK", 0.0)
    plain = task()
    for walked_by_rows, expected in zip(found, visit(plain), strict=True):
        torch.testing.assert_close(walked_by_rows, expected, rtol=1e-9, atol=1e-10)
    assert walked.num_gradients.tolist() == plain.num_gradients.tolist()


@pytest.mark.parametrize("clients", [[2, 3, 4, 5], [5, 0, 3]])
def test_rows_that_are_gathered_are_multiplied_like_rows_where_they_lie(clients, monkeypatch):
    """Where clients follow each other and where they do not, in turns of two."""
    monkeypatch.setattr(few_rows, "CLIENTS_A_TURN", 2)
    draw = torch.Generator().manual_seed(4)
    features = torch.randn(40, NUM_FEATURES, generator=draw, dtype=torch.float64)
    numbers = torch.randint(40, (len(clients), 6), generator=draw)
    weights = torch.randn(2, 7, NUM_CLASSES, NUM_FEATURES, generator=draw, dtype=torch.float64).unbind(0)
    times = torch.randn(len(clients), 2, generator=draw, dtype=torch.float64)
    taken = torch.randn(len(clients), 6, NUM_CLASSES, generator=draw, dtype=torch.float64)
    lying = few_rows.LyingRows([features[own] for own in numbers], clients, 6)
    products, scores = lying.multiply(weights)
    gathered = few_rows.GatheredRows(features[numbers], torch.tensor(clients), products)
    same_products, same_scores = gathered.multiply(weights)
    assert same_products is products
    for found, expected in zip(same_scores, scores, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    written = torch.zeros(2, *weights[0].shape, dtype=torch.float64)
    for rows, out in zip((lying, gathered), written, strict=True):
        rows.write_sums(out, weights, times, taken)
    torch.testing.assert_close(written[1], written[0], rtol=1e-12, atol=1e-12)
    for place, client in enumerate(clients):
        expected = sum(factor * weight[client] for factor, weight in zip(times[place], weights, strict=True))
        expected = expected + taken[place].mT @ features[numbers[place]]
        torch.testing.assert_close(written[0, client], expected, rtol=1e-12, atol=1e-12)


def test_who_has_few_rows_is_said_of_each_client_alone():
    size, steps = torch.tensor([10, 50, 130, 50]), torch.tensor([20, 20, 20, 1])
    assert few_rows.have_few_rows(size, steps, 10, 784, 10).tolist() == [True, True, False, False]


def test_a_client_ends_with_the_same_bits_whoever_trains_beside_it(task):
    draw = torch.Generator().manual_seed(1)
    start = torch.randn(len(SIZES), NUM_CLASSES * (NUM_FEATURES + 1), generator=draw, dtype=torch.float64)
    rows = task()._rows
    source = ModelSource(
        Federation(range(len(SIZES)), rows, rows), FlatModel(nn.Linear(NUM_FEATURES, NUM_CLASSES).double()),
        nn.functional.cross_entropy, RATE, BATCH_SIZE,
    )  # fmt: skip
    together = descend(source.task(torch.arange(len(SIZES)), 1), start, 25)
    for client in range(len(SIZES)):
        alone = descend(source.task(torch.tensor([client]), 1), start[client : client + 1], 25)
        assert torch.equal(alone[0], together[client])


def held_by_autograd(task, start, anchor, pulls, num_steps, momentum, rates):
    """One client, one step and one tensor at a time: momentum, the implicit pull, and the mean of the second half."""
    ended = []
    for client, own in enumerate(start):
        layer = nn.Linear(NUM_FEATURES, NUM_CLASSES, dtype=torch.float64)
        centre = nn.Linear(NUM_FEATURES, NUM_CLASSES, dtype=torch.float64)
        nn.utils.vector_to_parameters(own.clone(), layer.parameters())
        nn.utils.vector_to_parameters(anchor[client].clone(), centre.parameters())
        velocity = [torch.zeros_like(part) for part in layer.parameters()]
        steps, keeps, rate = int(num_steps[client]), float(momentum[client]), float(rates[client])
        met = []
        for step in range(steps):
            features, labels = task.batch(step, torch.tensor([client]))
            loss = nn.functional.cross_entropy(layer(features[0]), labels[0])
            slopes = torch.autograd.grad(loss, list(layer.parameters()))
            reach = rate * sum(keeps**power for power in range(step + 1))
            for place, (part, slope) in enumerate(zip(layer.parameters(), slopes, strict=True)):
                velocity[place] = keeps * velocity[place] + slope
                pull = reach * float(pulls[client, place])
                target = list(centre.parameters())[place]
                with torch.no_grad():
                    part.copy_((part - rate * velocity[place] + pull * target) / (1.0 + pull))
            met.append(nn.utils.parameters_to_vector(layer.parameters()).detach())
        ended.append(torch.stack(met[steps // 2 :]).mean(0) if steps else own)
    return torch.stack(ended)


@pytest.mark.parametrize("num_steps", [7, torch.tensor([6, 3, 25, 4, 0], dtype=torch.int32)])
@pytest.mark.parametrize("by_tensor", [False, True])
def test_held_steps_end_where_those_of_autograd_end(task, num_steps, by_tensor, monkeypatch):
    draw = torch.Generator().manual_seed(2)
    start, anchor = torch.randn(2, len(SIZES), NUM_CLASSES * (NUM_FEATURES + 1), generator=draw, dtype=torch.float64)
    momentum = torch.rand(len(SIZES), generator=draw, dtype=torch.float64)
    variances = 0.1 + torch.rand(len(SIZES), 1 + by_tensor, generator=draw, dtype=torch.float64)
    share = torch.rand(len(SIZES), generator=draw, dtype=torch.float64)
    groups = [NUM_CLASSES * NUM_FEATURES, NUM_CLASSES] if by_tensor else [NUM_CLASSES * (NUM_FEATURES + 1)]
    monkeypatch.setattr("selffl.training.model.STEPS_AT_ONCE", 10)
    monkeypatch.setattr(few_rows, "MOST_WORK", 1e9)
    plain, tried = task(), task()
    hold = Hold.of(variances, torch.tensor(groups).expand(len(SIZES), -1), tried)
    found = descend_held(tried, start, anchor, hold, num_steps, momentum, share)
    steps = torch.as_tensor(num_steps).expand(len(SIZES))
    expected = held_by_autograd(plain, start, anchor, hold.pull.expand(-1, 2), steps, momentum, RATE * share)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    assert tried.num_gradients.tolist() == steps.tolist()
    monkeypatch.setattr(few_rows, "MOST_WORK", 0.0)
    monkeypatch.setattr("selffl.algorithms.held_steps.FACTORS_AT_ONCE", 3 * len(SIZES))
    one_by_one = descend_held(plain, start, anchor, hold, num_steps, momentum, share)
    torch.testing.assert_close(found, one_by_one, rtol=1e-9, atol=1e-10)


def test_parameters_that_are_held_one_by_one_are_not_walked(task):
    size = NUM_CLASSES * (NUM_FEATURES + 1)
    start = torch.zeros(len(SIZES), size, dtype=torch.float64)
    walk = Walk(torch.full((len(SIZES),), 6), 0, (start,), 0, None, [1] * size)
    assert task().walk(walk) is None


def test_the_bits_do_not_depend_on_how_many_threads_there_are(task):
    start = torch.randn(len(SIZES), NUM_CLASSES * (NUM_FEATURES + 1), dtype=torch.float64)
    before, found = torch.get_num_threads(), []
    for number in (1, 3):
        torch.set_num_threads(number)
        with pytest.MonkeyPatch.context() as changed:
            changed.setattr(few_rows, "CLIENTS_A_TURN", 1)
            found.append(descend(task(), start, 25))
    torch.set_num_threads(before)
    assert torch.equal(*found)
