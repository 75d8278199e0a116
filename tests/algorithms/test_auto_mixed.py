"""The closing rounds of small linear models: against mixed models of statsmodels, and dense or scipy's solutions."""

from dataclasses import replace

import numpy as np
import pytest
import statsmodels.api as sm
import torch
from scipy.optimize import minimize
from torch import nn

import selffl
from selffl.algorithms import algorithm, auto_mixed
from selffl.algorithms.auto_closing import ClosingRound
from selffl.algorithms.auto_mixed import NUM_MIXED_ROUNDS, MixedRound
from selffl.algorithms.auto_records import MixedUpload
from selffl.algorithms.posterior_mode import MOST_COEFFICIENTS, find_modes, find_order
from selffl.algorithms.records import map_tensors, tensors_of
from selffl.engines import cohort
from selffl.engines.cohort import CohortEngine
from selffl.engines.serial import serial_engine
from selffl.maths import mixed_model
from selffl.maths.mixed_model import for_blocks
from selffl.training.flat import FlatModel
from selffl.training.model import ModelSource

AUTO = algorithm("self-fl-auto", num_local_steps=5)
MSE, CROSS_ENTROPY = nn.functional.mse_loss, nn.functional.cross_entropy


def grouped(num_groups=30, rows=(3, 12), seed=4):
    """Rows whose intercept and slope vary together: features, outcomes, groups."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(num_groups), rng.integers(*rows, num_groups))
    x = rng.normal(size=(len(group), 1))
    own = rng.multivariate_normal([1.0, -0.5], [[0.8, 0.4], [0.4, 0.5]], num_groups)[group]
    return x, own[:, :1] + own[:, 1:] * x + 0.7 * rng.normal(size=x.shape), group


def linear_source(x, y, group, module=None, loss=MSE, rate=0.05):
    fed = selffl.Federation.from_arrays(x.astype("float32"), y, group, test_fraction=0.0)
    torch.manual_seed(0)
    return ModelSource(fed, FlatModel(module or nn.Linear(x.shape[1], 1)), loss, rate, 5, seed=1)


def concluded(source, rounds=4, **options):
    engine = CohortEngine(AUTO, source, 1.0, 1, **options)
    return engine, engine.conclude(engine.advance(engine.start(source.model.params), rounds))


@pytest.fixture(scope="module")
def data():
    x, y, group = grouped()
    return x, y.astype("float32"), group


@pytest.fixture
def no_shrinkage(monkeypatch):
    monkeypatch.setattr(mixed_model, "ALIKE_CLIENTS", 0.0)
    monkeypatch.setattr(auto_mixed, "shrink_to_none", lambda covariance, errors: covariance)


@pytest.mark.usefixtures("no_shrinkage")
def test_a_run_of_few_rounds_is_the_mixed_model_of_statsmodels(data):
    """Covariance, centre, residuals and every group's own coefficients, from four rounds of training."""
    x, y, group = data
    design = np.column_stack([np.ones(len(x)), x])
    expected = sm.MixedLM(y[:, 0].astype(float), design, group, exog_re=design).fit(reml=True)
    engine, state = concluded(linear_source(*data))
    mixed = state.server.closing.mixed
    # The model's order: the slope first; the unit is twice the variance of residuals.
    covariance = mixed.covariance.flip(0, 1).double().numpy() * 2.0 * expected.scale
    np.testing.assert_allclose(covariance, expected.cov_re, rtol=0.01)
    centre = AUTO.global_model(state.server).flip(0).numpy()
    np.testing.assert_allclose(centre, expected.fe_params, atol=1e-3)
    own = engine.personal(state, is_over=True).flip(1).numpy()
    effects = np.array([np.asarray(expected.random_effects[m]) for m in range(len(own))])
    np.testing.assert_allclose(own, expected.fe_params + effects, atol=4e-3)
    assert AUTO.inter_variance(state.server).item() == pytest.approx(
        np.diag(expected.cov_re).mean() / 2 / expected.scale, rel=0.01
    )
    ratios = AUTO.group_variances(state.server).flip(0).numpy() * 2.0 * expected.scale
    np.testing.assert_allclose(ratios, np.diag(expected.cov_re), rtol=0.01)
    low, high = AUTO.inter_variance_interval(state.server)
    assert 0.3 < low / AUTO.inter_variance(state.server) < 0.9
    assert 1.1 < high / AUTO.inter_variance(state.server) < 3.0


def test_a_new_group_gets_its_best_prediction(data):
    """By a dense solve with what closing rounds have learned."""
    x, y, group = data
    fed = selffl.Federation.from_arrays(x.astype("float32"), y, group, test_fraction=0.2, seed=0)
    torch.manual_seed(0)
    run = selffl.train(nn.Linear(1, 1), fed, "self-fl-auto", rounds=4, loss=MSE, learning_rate=0.05, seed=0)
    server = run._state.server
    rows = np.array([[0.3], [-1.2], [2.0]], "float32"), np.array([[2.5], [2.0], [3.0]], "float32")
    found = run.welcome(rows)
    design = np.column_stack([rows[0], np.ones(3)])
    centre = AUTO.global_model(server).double().numpy()
    covariance = server.closing.mixed.covariance.double().numpy()
    spread = design @ covariance @ design.T + np.eye(3) / 2.0
    expected = centre + covariance @ design.T @ np.linalg.solve(spread, rows[1][:, 0] - design @ centre)
    own = torch.cat([part.reshape(-1) for part in found.parameters()]).detach().numpy()
    np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)


def test_the_global_model_is_the_centre_once_training_is_over(data):
    """It is what is handed on, evaluated, and given to groups without rows and to those that never took part."""
    x, y, group = data
    fed = selffl.Federation.from_arrays(x.astype("float32"), y, group, test_fraction=0.2, seed=0)
    torch.manual_seed(0)
    settings = {"rounds": 4, "loss": MSE, "learning_rate": 0.05, "seed": 0, "participation": 0.1}
    run = selffl.train(nn.Linear(1, 1), fed, "self-fl-auto", **settings)
    server = run._state.server
    centre = torch.stack([server.params[0], server.params[1]]) + server.closing.mixed.centre
    shift = server.closing.mixed.centre.norm()
    assert shift > 0.01

    def numbers(model):
        return torch.cat([part.detach().reshape(-1) for part in model.parameters()])

    torch.testing.assert_close(numbers(run.global_model()), centre, rtol=0, atol=1e-6)
    absent = [row["client"] for row in run.clients if row["rounds"] == 0]
    assert absent
    for client in absent:
        torch.testing.assert_close(numbers(run.personal_model(client)), centre, rtol=0, atol=1e-6)
    left = fed.test.features[:, 0] * centre[0] + centre[1] - fed.test.labels[:, 0]
    assert run.summary["global_error"] == pytest.approx(left.square().mean().sqrt().item(), rel=1e-5)
    nobody = run.predict(np.array([[0.5], [-1.0]], "float32"))
    np.testing.assert_allclose(nobody["prediction"], [0.5 * centre[0] + centre[1], centre[1] - centre[0]], rtol=1e-5)


def softmax_rows(num_clients=3, seed=0):
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(num_clients), (25, 6, 1))
    return rng.normal(size=(len(client), 2)), rng.integers(3, size=len(client)), client


def test_modes_are_those_that_scipy_finds():
    """Of three classes, whose coefficients vary together by score; one direction does not vary at all."""
    x, y, client = softmax_rows()
    source = linear_source(x, y, client, nn.Linear(2, 3), CROSS_ENTROPY)
    rng = np.random.default_rng(1)
    side = rng.normal(size=(3, 2))
    covariance, anchor = side @ side.T, rng.normal(size=(3, 9))
    order = find_order(source.population)
    assert order == [0, 1, 6, 2, 3, 7, 4, 5, 8]
    task = source.task(torch.arange(3), 1)
    found = find_modes(task, torch.tensor(anchor), torch.tensor(covariance).expand(3, 3, 3), torch.tensor(order))
    root = np.kron(np.eye(3), side)
    double = FlatModel(nn.Linear(2, 3).double())
    for m in range(3):
        rows = torch.tensor(x[client == m].astype("float32")).double(), torch.tensor(y[client == m])

        def objective(point, m=m, rows=rows):
            point = torch.tensor(point, requires_grad=True)
            model = torch.tensor(anchor[m]).index_add(0, torch.tensor(order), torch.tensor(root) @ point)
            value = CROSS_ENTROPY(double(model, rows[0]), rows[1], reduction="sum") + point.square().sum() / 2
            return value.item(), torch.autograd.grad(value, point)[0].numpy()

        best = minimize(objective, np.zeros(6), jac=True, method="BFGS", options={"gtol": 1e-9})
        np.testing.assert_allclose(found.deviation[m].numpy(), root @ best.x, atol=1e-6)
        assert found.value[m].item() == pytest.approx(best.fun, rel=1e-9)
        held = for_blocks(torch.tensor(covariance), 3) @ found.score[m]
        torch.testing.assert_close(held, found.deviation[m], rtol=1e-4, atol=1e-6)


def test_a_mode_is_found_where_classes_are_apart_and_hardly_held():
    """Rows that a line separates: the mode is far out, where the loss hardly bends."""
    x = np.concatenate([np.linspace(-2.0, -0.5, 20), np.linspace(0.5, 2.0, 20)])[:, None]
    source = linear_source(x, (x[:, 0] > 0).astype(int), np.zeros(40, int), nn.Linear(1, 2), CROSS_ENTROPY)
    covariance = 1e4 * torch.eye(2, dtype=torch.float64).expand(1, 2, 2)
    order = torch.tensor(find_order(source.population))
    found = find_modes(source.task(torch.tensor([0]), 1), torch.zeros(1, 4).double(), covariance, order)
    held = covariance[0, 0, 0] * found.score
    torch.testing.assert_close(held, found.deviation, rtol=1e-3, atol=1e-3)
    assert found.deviation.abs().max() > 5.0
    assert found.value.item() < 0.1


@pytest.mark.parametrize(
    ("module", "is_small"),
    [
        (lambda: nn.Linear(MOST_COEFFICIENTS - 1, 1), True),
        (lambda: nn.Linear(MOST_COEFFICIENTS, 1), False),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(3, 4)), True),
        (lambda: nn.Linear(3, 2, bias=False), True),
        (lambda: nn.Linear(10, 4), False),  # of 44 parameters those of one tensor vary alike
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)), False),
        (lambda: nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 1)), False),
    ],
)
def test_small_linear_models_are_told_by_their_layers(module, is_small):
    x = np.random.default_rng(0).normal(size=(8, 3))
    model = FlatModel(module())
    source = linear_source(x, x[:, :1].astype("float32"), np.repeat([0, 1], 4), model.module)
    rounds = AUTO.closing_rounds(5, source.population)
    assert [type(each) for each in rounds] == [MixedRound] * (NUM_MIXED_ROUNDS * is_small) + [ClosingRound] * 2
    assert bool(find_order(source.population)) is is_small
    assert not algorithm("self-fl-auto", prior_precision=2.0).closing_rounds(5, source.population)


@pytest.mark.parametrize("outcome", ["numbers", "classes"])
def test_outcomes_decide_which_closing_rounds_are_held(outcome, monkeypatch):
    """Modes of classes that few rows separate are far away: a mixed model of them would be too sure of itself."""
    x, y, group = grouped()
    loss = MSE
    if outcome == "classes":
        y, loss = (y[:, 0] > 0).astype("int64"), nn.functional.cross_entropy
    held = []
    for kind in (MixedRound, ClosingRound):
        step = kind.server_round
        monkeypatch.setattr(
            kind, "server_round", lambda self, *given, step=step: held.append(type(self)) or step(self, *given)
        )
    module = nn.Linear(1, 1 if outcome == "numbers" else 2)
    _, state = concluded(linear_source(x, y, group, module, loss))
    assert held == ([MixedRound] * NUM_MIXED_ROUNDS if outcome == "numbers" else [ClosingRound] * 2)
    assert bool(state.server.closing.mixed.covariance.isnan().all()) is (outcome == "classes")
    assert state.server.closing.inter_variance.isfinite()


def test_a_strength_by_hand_is_a_ridge_in_closing_visits(data):
    x, y, group = data
    source = linear_source(*data)
    engine = CohortEngine(algorithm("self-fl-auto", num_local_steps=5, prior_precision=3.0), source, 1.0, 1)
    state = engine.conclude(engine.advance(engine.start(source.model.params), 3))
    centre = state.server.params.double().numpy()
    for m, own in enumerate(engine.personal(state, is_over=True).double().numpy()):
        design = np.column_stack([x[group == m].astype("float32"), np.ones((group == m).sum())])
        left = 2.0 * design.T @ design + 3.0 * np.eye(2)
        expected = np.linalg.solve(left, 2.0 * design.T @ y[group == m][:, 0] + 3.0 * centre)
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-5)


def test_clients_find_a_centre_that_hardly_any_training_has_found():
    """All have the same slopes, and nobody has learned them: each client's own model has them nevertheless."""
    rng = np.random.default_rng(0)
    group, x = np.repeat(np.arange(60), 12), rng.normal(size=(720, 3))
    y = (x @ [[2.0], [-1.0], [1.5]] + 0.3 * rng.normal(size=(720, 1))).astype("float32")
    engine, state = concluded(linear_source(x, y, group, rate=0.002), rounds=2)
    assert (state.server.params[:3] - torch.tensor([2.0, -1.0, 1.5])).norm() > 1.0
    own = engine.personal(state, is_over=True)[:, :3]
    assert (own - torch.tensor([2.0, -1.0, 1.5])).norm(dim=1).max() < 0.1
    assert AUTO.inter_variance(state.server).item() < 0.01


@pytest.mark.slow
def test_the_same_whatever_trains_them(data):
    source = linear_source(*data)
    engine, state = concluded(source)
    chunked, same = concluded(source, chunk_size=7)
    serial = serial_engine(engine, list(range(30)))
    again = serial.conclude(engine.advance(engine.start(source.model.params), 4))
    for other in (same, again):
        for name, part in tensors_of(other.server.closing).items():
            torch.testing.assert_close(part, tensors_of(state.server.closing)[name], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(
        chunked.personal(same, is_over=True), engine.personal(state, is_over=True), rtol=1e-3, atol=1e-4
    )


def test_nothing_else_changes_and_a_run_that_goes_on_forgets(data):
    source = linear_source(*data)
    engine = CohortEngine(AUTO, source, 1.0, 1)
    state = engine.advance(engine.start(source.model.params), 3)
    before = map_tensors(torch.clone, state)
    ended = engine.conclude(map_tensors(torch.clone, state))
    for name, part in tensors_of(ended).items():
        if name.startswith("server.closing."):
            assert part.isfinite().all(), name
        else:
            assert torch.equal(part.nan_to_num(), tensors_of(before)[name].nan_to_num()), name
    on, plain = engine.advance(ended, 1), engine.advance(state, 1)
    for name, part in tensors_of(on).items():
        assert torch.equal(part.nan_to_num(), tensors_of(plain)[name].nan_to_num()), name


def test_some_of_many_clients_say_what_all_would(monkeypatch):
    """Of 120 groups 40 are asked in each of the rounds, others each time."""
    source = linear_source(*[part.astype("float32") if part.dtype == float else part for part in grouped(120, (6, 12))])
    _, everybody = concluded(source)
    monkeypatch.setattr(cohort, "MOST_IN_CLOSING", 40)
    asked = []
    visit = MixedRound.client_round
    monkeypatch.setattr(
        MixedRound,
        "client_round",
        lambda closing, sent, memory, task: asked.append(task.clients.tolist()) or visit(closing, sent, memory, task),
    )
    _, some = concluded(source)
    assert [len(clients) for clients in asked] == [40] * NUM_MIXED_ROUNDS
    assert len(set(map(tuple, asked))) == NUM_MIXED_ROUNDS
    full, part = (AUTO.inter_variance(state.server).item() for state in (everybody, some))
    assert part == pytest.approx(full, rel=0.25)
    ends = [AUTO.inter_variance_interval(state.server) for state in (everybody, some)]
    widths = [(high - low).item() for low, high in ends]
    assert widths[1] == pytest.approx(widths[0], rel=0.35)
    moved = [state.server.params + state.server.closing.mixed.centre for state in (everybody, some)]
    torch.testing.assert_close(*moved, rtol=0.0, atol=0.1)


@pytest.mark.parametrize(
    "lie",
    [
        lambda upload: replace(upload, score_products=100.0 * upload.score_products),
        lambda upload: replace(upload, information_products=0.0 * upload.information_products),
        lambda upload: replace(upload, num_examples=upload.num_examples + 100.0),
        lambda upload: replace(upload, variation=-upload.variation),
        lambda upload: replace(upload, information=-upload.information),
        lambda upload: replace(upload, score=upload.score * torch.nan),
    ],
)
def test_what_cannot_be_is_left_out(data, monkeypatch, lie):
    """One client of thirty; the others say what they would without it."""
    source = linear_source(*data)
    engine = CohortEngine(AUTO, source, 1.0, 1)
    state = engine.advance(engine.start(source.model.params), 2)
    visit = MixedRound.client_round

    def visit_with_a_liar(closing, sent, memory, task):
        upload, memory = visit(closing, sent, memory, task)
        lied, is_liar = lie(upload), torch.arange(30) == 7
        return map_tensors(
            lambda a, b: torch.where(is_liar.reshape(-1, *[1] * (a.ndim - 1)), a, b), lied, upload
        ), memory

    honest = engine.conclude(state).server
    monkeypatch.setattr(MixedRound, "client_round", visit_with_a_liar)
    found = engine.conclude(state).server
    assert AUTO.inter_variance(found).item() == pytest.approx(AUTO.inter_variance(honest).item(), rel=0.3)
    assert AUTO.inter_variance(found) != AUTO.inter_variance(honest)


def test_a_client_can_send_no_products_but_those_of_what_it_says():
    """By dense sums over both scores of two coefficients each."""
    rng = np.random.default_rng(2)
    score = rng.normal(size=(3, 4))
    root = rng.normal(size=(3, 4, 4))
    information = root @ root.transpose(0, 2, 1)
    products = sum(each[:, :, None] * each[:, None, :] for each in (score[:, :2], score[:, 2:]))
    of_information = mixed_model.information_products_of(torch.tensor(information), 2)
    rows = torch.tensor([5.0, 0.0, 7.0])
    upload = MixedUpload(
        rows, torch.tensor(score), torch.tensor(products), torch.tensor(information), of_information, rows, rows, rows
    )
    bounds = MixedRound(AUTO, 5, 1).bounds(None, torch.arange(3), upload, rows)
    for name, exact in (("score_products", torch.tensor(products)), ("information_products", of_information)):
        low, high, _ = bounds[name]
        largest = exact.abs().amax((-2, -1), keepdim=True)
        assert bool((low < exact).all() and (exact < high).all()), name
        assert bool((high - low <= 0.01 * largest).all()), name
    low, high, diagonal = bounds["the diagonal of information"]
    assert (low, high) == (0.0, np.inf)
    assert torch.equal(diagonal, torch.tensor(np.diagonal(information, axis1=1, axis2=2)))
    assert bounds["decided"][:2] == (0.0, 4)
    assert bounds["num_examples"].least.tolist() == [1.0, 0.0, 1.0]
