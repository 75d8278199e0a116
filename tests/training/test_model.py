"""Any module as a task: its minibatches, its gradients, and whole runs against an ordinary PyTorch loop."""

import copy
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from sample_modules import CROSS_ENTROPY, gradient_by_autograd, random, seeded
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from needs import ONE_OF_A_KIND
from selffl.algorithms import algorithm
from selffl.algorithms.records import tensors_of
from selffl.data.digits import digits
from selffl.data.federation import Rows
from selffl.engines.cohort import CohortEngine, sample_cohort
from selffl.errors import ConfigError
from selffl.training import minibatches as drawing
from selffl.training.model import FlatModel, ModelSource, ModelTask

# --------------------------------------------------------------------------------------------------------- minibatches

SIZES = (1, 3, 7, 4, 50, 200, 2)


def numbered_rows(sizes=SIZES):
    """Rows that carry their own number as label, and twice that as feature."""
    offset = torch.tensor([0, *sizes]).cumsum(0)
    number = torch.arange(int(offset[-1]))
    return Rows(2.0 * number.unsqueeze(-1), number, offset)


def task_of(clients, *, sizes=SIZES, batch_size=4, seed=5, round_number=3):
    clients = torch.as_tensor(clients)
    model = FlatModel(nn.Linear(1, 2))
    return ModelTask(model, CROSS_ENTROPY, numbered_rows(sizes), clients, 0.1, batch_size, seed, round_number)


def drawn(task, position, draws):
    """Row numbers of those minibatches of the client at a position of the cohort."""
    found = []
    for draw in draws:
        features, labels = task.batch(draw, torch.tensor([position]))
        assert torch.equal(features, 2.0 * labels.unsqueeze(-1))  # features and labels of the same rows
        assert labels.shape == (1, task.batch_size)
        found.append(labels[0].tolist())
    return found


@pytest.mark.parametrize("batch_size", [1, 3, 4, 16])
@pytest.mark.parametrize("client", range(len(SIZES)))
def test_each_epoch_visits_each_row_of_a_client_exactly_once(client, batch_size):
    size = SIZES[client]
    own = list(range(sum(SIZES[:client]), sum(SIZES[: client + 1])))
    task = task_of(range(len(SIZES)), batch_size=batch_size)
    num_draws = 3 * math.ceil(size / batch_size) + 40  # through at least three epochs and three blocks
    sequence = [row for batch in drawn(task, client, range(num_draws)) for row in batch]
    epochs = [sequence[start : start + size] for start in range(0, len(sequence) - size + 1, size)]
    assert len(epochs) >= 3
    for epoch in epochs:
        assert sorted(epoch) == own
    assert set(sequence) == set(own)  # the epoch that is cut off has no other rows either
    if size > 10:  # 7! orders are few enough to meet one again
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)  # each in an order of its own


def test_a_client_with_fewer_rows_than_a_minibatch_meets_them_again():
    task = task_of([0, 1], batch_size=16)
    assert drawn(task, 0, [0, 1]) == [[0] * 16] * 2
    counts = torch.tensor(drawn(task, 1, range(3))).flatten().bincount(minlength=4)
    assert counts.tolist() == [0, 16, 16, 16]  # 48 draws of 3 rows: each sixteen times


def test_noise_is_the_same_alone_and_in_a_cohort_and_differs_by_all_that_it_is_keyed_by():
    like, slots = torch.zeros(3, 400), torch.arange(3)
    noise = task_of([4, 2, 5]).noise(6, slots, like)
    assert noise.dtype == torch.float32
    assert abs(noise.std().item() - 1) < 0.06
    assert torch.equal(task_of([2]).noise(6, slots[:1], like[:1])[0], noise[1])
    others = [
        task_of([4, 2, 5]).noise(7, slots, like),
        task_of([4, 2, 5], seed=6).noise(6, slots, like),
        task_of([4, 2, 5], round_number=4).noise(6, slots, like),
        noise.roll(1, 0),
    ]
    for other in others:
        assert abs(torch.corrcoef(torch.stack([noise.flatten(), other.flatten()]))[0, 1]) < 0.12


def test_a_minibatch_asked_for_twice_is_the_same():
    task = task_of([4, 2, 5])
    first = drawn(task, 2, range(40))
    assert drawn(task, 2, reversed(range(40))) == first[::-1]
    assert drawn(task, 2, [39, 0, 17, 0]) == [first[39], first[0], first[17], first[0]]


@pytest.mark.parametrize("cohort", [[4], [4, 2], [2, 4], [0, 1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1, 0], [5, 4, 0]])
@pytest.mark.parametrize("batch_size", [1, 4, 60])
def test_minibatches_do_not_depend_on_who_else_takes_part(cohort, batch_size):
    alone = drawn(task_of([4], batch_size=batch_size), 0, range(50))
    assert drawn(task_of(cohort, batch_size=batch_size), cohort.index(4), range(50)) == alone


@pytest.mark.parametrize("ahead", [1, 2, 3, 16, 50, 64])
@pytest.mark.parametrize("batch_size", [1, 4, 60])
def test_minibatches_do_not_depend_on_how_many_are_looked_up_at_once(monkeypatch, ahead, batch_size):
    cohort = [4, 0, 5, 1]
    expected = [drawn(task_of(cohort, batch_size=batch_size), position, range(50)) for position in range(4)]
    monkeypatch.setattr(drawing, "BATCHES_AHEAD", ahead)
    task = task_of(cohort, batch_size=batch_size)
    assert [drawn(task, position, range(50)) for position in range(4)] == expected


@pytest.mark.parametrize(("rows_ahead", "number"), [(1 << 22, 5), (4 * 4 * 60, 7)])
def test_a_long_visit_looks_further_and_further_ahead(monkeypatch, rows_ahead, number):
    """After 20 and 20 minibatches 40, 80 and 160, or as many as there is room for."""
    met = []
    monkeypatch.setattr(drawing, "ROWS_AHEAD", rows_ahead)
    task = task_of([4, 0, 5, 1], batch_size=4)
    whole = task.minibatches.places
    task.minibatches.places = lambda draws: met.append(draws) or whole(draws)
    found = drawn(task, 2, range(320))
    assert len(met) == number
    assert [draw for draws in met for draw in draws] == list(range(met[-1].stop))
    assert [drawn(task_of([5], batch_size=4), 0, [draw])[0] for draw in (0, 39, 40, 119, 120, 319)] == [
        found[draw] for draw in (0, 39, 40, 119, 120, 319)
    ]


def test_a_block_of_clients_gets_what_each_gets_alone():
    task = task_of([4, 0, 5, 1])
    for rows in ([0, 1, 2, 3], [3, 1], [2], [2, 0, 3]):
        features, labels = task.batch(21, torch.tensor(rows))
        assert features.shape == (len(rows), 4, 1)
        assert labels.tolist() == [drawn(task, row, [21])[0] for row in rows]


def test_seeds_rounds_and_clients_have_minibatches_of_their_own():
    sizes = (40, 40)
    orders = {
        (seed, number, client): tuple(
            row - 40 * client
            for batch in drawn(task_of([client], sizes=sizes, seed=seed, round_number=number), 0, range(10))
            for row in batch
        )
        for seed in range(3)
        for number in range(1, 4)
        for client in range(2)
    }
    assert len(set(orders.values())) == len(orders)


def test_every_row_comes_first_equally_often():
    rounds = 400
    first = [drawn(task_of([1], sizes=(2, 5), round_number=number), 0, [0])[0][0] for number in range(rounds)]
    counts = torch.tensor(first).bincount(minlength=7)[2:]
    chi_square = ((counts - rounds / 5) ** 2 / (rounds / 5)).sum().item()
    assert chi_square < 18.5  # one in a thousand, four degrees of freedom


def test_lots_that_differ_in_their_last_bits_order_rows_the_same_in_any_cohort(monkeypatch):
    """Seen with true lots too: one client of 30,000 rows beside 400 of one row, B = 1875, seed 0 or 1."""
    uniform = drawing.uniform
    monkeypatch.setattr(drawing, "uniform", lambda *keys: 0.5 + 2.0**-40 * uniform(*keys))
    sizes = (1,) * 300 + (200,)
    alone = drawn(task_of([300], sizes=sizes), 0, range(50))
    assert drawn(task_of(range(301), sizes=sizes), 300, range(50)) == alone


def rows_of_halves(task, position):
    """The rows of both halves of the client at a position of the cohort, as its minibatches show them."""
    halves = task.halves()
    sizes = halves.num_examples[position].tolist()
    return [
        {row for batch in drawn(halves, 2 * position + half, range(-(-size // task.batch_size) + 1)) for row in batch}
        if size
        else set()
        for half, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("client", range(len(SIZES)))
def test_two_halves_share_no_row_and_miss_none(client):
    own = set(range(sum(SIZES[:client]), sum(SIZES[: client + 1])))
    first, second = rows_of_halves(task_of(range(len(SIZES))), client)
    assert first | second == own
    assert not first & second
    assert len(first) == -(-len(own) // 2)


def test_halves_are_the_same_in_every_round_and_cohort_and_differ_by_seed():
    expected = rows_of_halves(task_of(range(len(SIZES))), 5)
    assert rows_of_halves(task_of([5], round_number=9), 0) == expected
    assert rows_of_halves(task_of([2, 5, 0]), 1) == expected
    assert rows_of_halves(task_of([5], seed=6), 0) != expected
    # Neither the first rows nor every other one: rows may come in an order that means something.
    begin = sum(SIZES[:5])
    assert 30 < len(expected[0] & set(range(begin, begin + 100))) < 70
    assert 30 < len(expected[0] & set(range(begin, begin + 200, 2))) < 70


def test_gradients_of_halves_are_counted_by_client():
    task = task_of(range(len(SIZES)))
    halves = task.halves()
    slots = torch.tensor([0, 1, 4, 5, 13])
    halves.batch_gradient = lambda params, batch: torch.zeros_like(params)
    halves.gradient(torch.zeros(5, 4), None, slots)
    assert task.num_gradients.tolist() == [2, 0, 2, 0, 0, 0, 1]
    halves.measure_halves(*torch.zeros(2, len(SIZES), 2, 4), [3, 1])
    assert task.num_gradients.tolist() == [4, 2, 4, 2, 2, 2, 3]


def test_gradients_of_the_same_clients_are_added_up_when_they_are_read():
    task = task_of(range(3))
    task.batch_gradient = lambda params, batch: torch.zeros_like(params)
    some, others = torch.tensor([2, 0]), torch.tensor([1, 2])
    for slots in (some, some, some, others, some):
        task.gradient(torch.zeros(2, 4), None, slots)
    assert task.num_gradients.tolist() == [4, 1, 5]
    assert task.num_gradients.tolist() == [4, 1, 5]
    task.gradient(torch.zeros(2, 4), None, some)
    assert task.num_gradients.tolist() == [5, 1, 6]


def test_both_models_are_measured_on_half_a_minibatch_of_each_half():
    task = task_of([4, 5], batch_size=5)
    halves = task.halves()
    models = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(0))
    halves._gradient = lambda params, features, labels: params * labels.double().sum(1, keepdim=True).float()
    deviations = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(1))
    first, second = deviations.unbind(1)
    along = torch.stack([first, second, (first - second) / 2])
    found = halves.measure_halves(models, deviations, [3, 1])
    assert found.slope_changes.shape == (2, 2, 3, 2)
    assert found.temperature.tolist() == [1.0, 1.0]
    for client in range(2):
        for half in range(2):
            seen = sum(drawn(halves, 2 * client + half, [0])[0][:3])
            change = (first[client] - second[client]) * seen * along[:, client]
            expected = torch.stack([change[:, :3].sum(-1), change[:, 3]], dim=-1)
            torch.testing.assert_close(found.slope_changes[client, half], expected)


@pytest.mark.parametrize("sizes", [[650], [640, 10], [320, 320, 10]])
def test_slopes_of_softmax_regression_are_those_of_its_gradients(sizes):
    module = seeded(lambda: nn.Linear(64, 10))
    source = ModelSource(digits(6, seed=2), FlatModel(module), CROSS_ENTROPY, 0.1, 5, seed=4)
    halves = source.task(torch.tensor([3, 0]), 2).halves()
    models, anchors = random(2, 4, 650, dtype=torch.float32)
    batch, deviations = halves.batch(0, torch.arange(4)), models - anchors
    found, _ = halves.compare_halves(models, deviations, batch, sizes)
    first, second = deviations.view(2, 2, 650).unbind(1)
    along, others = torch.stack([first, second, (first - second) / 2]), anchors + deviations[[1, 0, 3, 2]]
    for slot in range(4):
        rows = batch[0][slot], batch[1][slot]
        change = gradient_by_autograd(module, models[slot], *rows) - gradient_by_autograd(module, others[slot], *rows)
        for direction, each in enumerate(along):
            expected = torch.stack([part.sum() for part in (change * each[slot // 2]).split(sizes)])
            torch.testing.assert_close(found[slot, direction], expected, rtol=1e-4, atol=1e-4)


def test_a_tasks_gradient_is_that_of_its_minibatch_and_is_counted():
    fed = digits(6, seed=2)
    module = seeded(lambda: nn.Linear(64, 10))
    source = ModelSource(fed, FlatModel(module), CROSS_ENTROPY, 0.1, 5, seed=4)
    task = source.task(torch.tensor([3, 0, 5]), 2)
    rows = torch.tensor([2, 0])
    params = random(2, 650, dtype=torch.float32)
    features, labels = task.batch(7, rows)
    found = task.gradient(params, (features, labels), rows)
    for place in range(2):
        expected = gradient_by_autograd(module, params[place], features[place], labels[place])
        torch.testing.assert_close(found[place], expected, rtol=1e-5, atol=1e-6)
    assert task.num_gradients.tolist() == [1, 0, 1]


# --------------------------------------------------------------------------------------- whole runs against plain loops
#
# One client at a time, modules, torch.optim.SGD and loss.backward(); only the minibatches come from the library, each
# from a task of that one client. Models are averaged parameter by parameter.


def plain_federation(source, module):
    """The same clients and minibatches, a module of their own, and a count of the gradients each has spent."""
    sizes = source.federation.train.num_examples.tolist()
    return SimpleNamespace(source=source, module=module, num_examples=sizes, num_gradients=[0] * len(sizes))


def trained(plain, params, client, number, num_steps, *, anchor=None, penalty=0.0):
    """A vector of parameters after so many steps of SGD, as anybody would write it."""
    module = copy.deepcopy(plain.module)
    vector_to_parameters(params.clone(), module.parameters())
    optimiser = torch.optim.SGD(module.parameters(), lr=plain.source.learning_rate)
    task = plain.source.task(torch.tensor([client]), number)
    for draw in range(num_steps):
        features, labels = task.batch(draw, torch.tensor([0]))
        loss = CROSS_ENTROPY(module(features[0]), labels[0])
        if anchor is not None:
            loss = loss + penalty / 2 * (parameters_to_vector(module.parameters()) - anchor).square().sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    plain.num_gradients[client] += num_steps
    return parameters_to_vector(module.parameters()).detach()


def mean_model(models, weights):
    return sum(weight * model for weight, model in zip(weights, models, strict=True)) / sum(weights)


def plain_fedavg(plain, params, cohorts, num_local_steps):
    for number, cohort in enumerate(cohorts, start=1):
        models = [trained(plain, params, m, number, num_local_steps) for m in cohort]
        params = mean_model(models, [plain.num_examples[m] for m in cohort])
    return params, [params] * len(plain.num_examples)


def plain_ditto(plain, params, cohorts, num_local_steps, penalty):
    personal = {}
    for number, cohort in enumerate(cohorts, start=1):
        models = []
        for m in cohort:
            models.append(trained(plain, params, m, number, num_local_steps))
            personal[m] = trained(
                plain, personal.get(m, params), m, number, num_local_steps, anchor=params, penalty=penalty
            )
        params = mean_model(models, [plain.num_examples[m] for m in cohort])
    return params, [personal.get(m, params) for m in range(len(plain.num_examples))]


def empirical_variance(models):
    """Trace, by two passes, over the number of models."""
    stacked = torch.stack(models).to(torch.float64)
    return float((stacked - stacked.mean(0)).square().sum() / len(models))


def plain_self_fl(plain, params, cohorts, initial_steps, max_local_steps, form):
    """Algorithm 1 with the decisions of docs/equations.md; also returns every round's steps before rounding."""
    num_clients = len(plain.num_examples)
    inter_variance, reported, past = 0.0, {}, {m: [] for m in range(num_clients)}
    wanted = []
    for number, cohort in enumerate(cohorts, start=1):
        known = list(reported.values())
        usual = sum(known) / len(known) if known else None  # D3: stands for a variance that is not known
        models, fresh = [], {}
        for m in cohort:
            own = empirical_variance(past[m]) if len(past[m]) >= 2 else None
            if own is None or usual is None:
                start, num_steps = params, min(initial_steps, max_local_steps)
            else:
                others = sum(1 / (inter_variance + reported.get(k, usual)) for k in cohort if k != m)
                start = params - (1 / (inter_variance + own)) / others * (past[m][-1] - params)
                precision = others if form == "paper" else 1 / (inter_variance + 1 / others)
                contraction = plain.source.learning_rate / (plain.source.batch_size * own)
                right = precision / (1 / own + precision)
                real = 1.0 if contraction >= 1 else math.log(right) / math.log(1 - contraction)
                wanted.append(real)
                num_steps = round(max(1.0, min(real, max_local_steps)))
            model = trained(plain, start, m, number, num_steps)
            models.append(model)
            past[m].append(model)
            if own is not None:
                fresh[m] = own
        reported.update(fresh)
        inter_variance = empirical_variance(models) * len(models)  # D2: the sum, not the mean
        known = list(reported.values())
        usual = sum(known) / len(known) if known else 0.0
        weights = [1 / (inter_variance + reported.get(m, usual)) for m in cohort]
        share = len(cohort) / num_clients
        params = (1 - share) * params + share * mean_model(models, weights)
    return params, [past[m][-1] if past[m] else params for m in range(num_clients)], wanted


TRAINED = {
    "linear": lambda: nn.Linear(64, 10),
    "mlp": lambda: nn.Sequential(nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 10)),
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}


def in_dtype(fed, dtype):
    def cast(rows):
        return dataclasses.replace(rows, features=rows.features.to(dtype))

    return dataclasses.replace(fed, train=cast(fed.train), test=cast(fed.test))


def prepared(kind, dtype, participation, rounds):
    """The federation for the engine, the plain one, the first model and the cohorts of each round."""
    module = seeded(TRAINED[kind], seed=1, dtype=dtype)
    source = ModelSource(in_dtype(digits(8, seed=3), dtype), FlatModel(module), CROSS_ENTROPY, 0.05, 5, seed=9)
    cohorts = [sample_cohort(2, number, 8, participation).tolist() for number in range(1, rounds + 1)]
    return source, plain_federation(source, module), parameters_to_vector(module.parameters()).detach(), cohorts


def engine_run(source, method, first, participation, rounds):
    engine = CohortEngine(method, source, participation, seed=2)
    state = engine.advance(engine.start(first), rounds)
    return state, engine.personal(state)


def assert_runs_agree(state, personal, params, models, plain, dtype):
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(state.server.params, params, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(personal, torch.stack(models), rtol=tolerance, atol=tolerance)
    assert personal.dtype == state.server.params.dtype == dtype
    assert state.num_gradients.tolist() == plain.num_gradients


every_setting = pytest.mark.parametrize(
    ("kind", "dtype", "participation"),
    [
        ("linear", torch.float32, 1.0),
        ("linear", torch.float64, 0.5),
        ("mlp", torch.float32, 0.5),
        ("mlp", torch.float64, 1.0),
    ],
)


@every_setting
def test_fedavg_equals_a_plain_loop(kind, dtype, participation):
    source, plain, first, cohorts = prepared(kind, dtype, participation, rounds=3)
    params, models = plain_fedavg(plain, first, cohorts, num_local_steps=7)
    state, personal = engine_run(source, algorithm("fedavg", num_local_steps=7), first, participation, 3)
    assert (params - first).abs().max() > 0.02  # something was learned
    assert_runs_agree(state, personal, params, models, plain, dtype)


@every_setting
def test_ditto_equals_a_plain_loop(kind, dtype, participation):
    source, plain, first, cohorts = prepared(kind, dtype, participation, rounds=3)
    params, models = plain_ditto(plain, first, cohorts, num_local_steps=6, penalty=0.7)
    method = algorithm("ditto", num_local_steps=6, penalty=0.7)
    state, personal = engine_run(source, method, first, participation, 3)
    assert (models[cohorts[0][0]] - params).abs().max() > 0.02  # personal and global are different models
    assert_runs_agree(state, personal, params, models, plain, dtype)


@pytest.mark.parametrize("form", ["paper", "exact"])
@every_setting
def test_self_fl_equals_a_plain_loop(kind, dtype, participation, form):
    rounds = 4 if participation == 1.0 else 7
    source, plain, first, cohorts = prepared(kind, dtype, participation, rounds)
    params, models, wanted = plain_self_fl(plain, first, cohorts, initial_steps=5, max_local_steps=12, form=form)
    method = algorithm("self-fl", form=form, initial_steps=5, max_local_steps=12)
    state, personal = engine_run(source, method, first, participation, rounds)
    # the equation was used, with answers that differ between clients, and none so near a half that rounding is luck
    assert len({round(min(value, 12)) for value in wanted}) > 1
    assert all(abs(value % 1 - 0.5) > 1e-3 for value in wanted if value < 12)
    assert_runs_agree(state, personal, params, models, plain, dtype)


# ---------------------------------------------------------------------------------------------------------- ModelSource


def test_a_source_tells_the_engine_what_it_may_know():
    fed = digits(6)
    source = ModelSource(fed, FlatModel(nn.Linear(64, 10)), CROSS_ENTROPY, 0.1, 5)
    assert source.shape == ()
    assert source.population.num_clients == 6
    assert source.population.intra_variance is None
    assert source.population.inter_variance is None
    task = source.task(torch.tensor([4, 1]), 2)
    assert task.shape == (2,)
    assert task.num_examples.tolist() == fed.train.num_examples[[4, 1]].tolist()
    assert (task.learning_rate, task.batch_size) == (0.1, 5)


def test_variances_that_are_not_known_cannot_be_called_known():
    source = ModelSource(digits(6), FlatModel(nn.Linear(64, 10)), CROSS_ENTROPY, 0.1, 5)
    with pytest.raises(ConfigError, match="the federation states no variances"):
        CohortEngine(algorithm("self-fl", variances="known"), source).start(source.model.params)


@pytest.mark.parametrize("name", [*ONE_OF_A_KIND, "perfedavg"])  # whose personal models adapt as they are asked for
def test_test_rows_are_out_of_reach(name, short):
    """Whatever the test rows hold, no bit of a trained model, personal adaptation included, is another."""
    fed = dataclasses.replace(digits(6, seed=1), cluster=torch.tensor([0, 1, 0, 1, 0, 1]))
    poison = dataclasses.replace(
        fed.test, features=torch.full_like(fed.test.features, torch.nan), labels=torch.full_like(fed.test.labels, 99)
    )
    runs = []
    for known in (fed, dataclasses.replace(fed, test=poison)):
        source = ModelSource(known, FlatModel(seeded(TRAINED["mlp"])), CROSS_ENTROPY, 0.05, 5, seed=3)
        engine = CohortEngine(short(name), source, participation=0.5)
        state = engine.advance(engine.start(source.model.params), 2)
        runs.append({**tensors_of(state), "personal": engine.personal(state)})
    for key, tensor in runs[0].items():
        torch.testing.assert_close(runs[1][key], tensor, rtol=0, atol=0, equal_nan=True, msg=key)
    assert runs[0]["personal"].isfinite().all()
