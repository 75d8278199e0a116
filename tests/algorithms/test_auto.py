"""self-fl-auto as an estimator: against maximum likelihood, mixed models and dense solves; and where it is hard."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import statsmodels.api as sm
import torch
import twins
from federations import AUTO as CONSTANTS
from federations import assert_closing_spread, classes_by_half, federation, gathered, run
from scipy.optimize import minimize, minimize_scalar
from torch import nn

import selffl
from selffl.algorithms import algorithm, self_fl_auto
from selffl.algorithms.records import map_tensors, tensors_of
from selffl.algorithms.rowwise import RowwiseTask
from selffl.engines.cohort import CohortEngine, sample_cohort
from selffl.errors import DivergedError
from selffl.maths.frequencies import class_skew
from selffl.maths.score_scale import next_factors
from selffl.training.flat import FlatModel
from selffl.training.gaussian import GaussianFederation
from selffl.training.model import ModelSource

MSE = nn.functional.mse_loss
AUTO = "self-fl-auto"

# ---------------------------------------------------------------------------------- the Gaussian model: both variances


def most_likely(estimate, variance):
    """σ_0² under which the estimates are most likely, θ_0 with it: z_m ~ N(θ_0, σ_0² + σ_m²) in every coordinate."""

    def centre(inter):
        weight = 1.0 / (inter + variance)
        return weight @ estimate / weight.sum()

    def surprise(log_inter):
        total = np.exp(log_inter) + variance
        squares = ((estimate - centre(np.exp(log_inter))) ** 2).sum(1)
        return 0.5 * (estimate.shape[1] * np.log(total).sum() + (squares / total).sum())

    return np.exp(minimize_scalar(surprise, bounds=(-15, 5), method="bounded", options={"xatol": 1e-9}).x)


def posterior_means(estimate, variance, inter):
    """E[θ_m | everybody], θ_0 having a flat prior: a dense solve for (θ_0, θ_1 … θ_M)."""
    num_clients = len(estimate)
    matrix = np.zeros((num_clients + 1, num_clients + 1))
    matrix[0, 0] = num_clients / inter
    matrix[0, 1:] = matrix[1:, 0] = -1.0 / inter
    matrix[1:, 1:] = np.diag(1.0 / inter + 1.0 / variance)
    seen = np.vstack([np.zeros((1, estimate.shape[1])), estimate / variance[:, None]])
    return np.linalg.solve(matrix, seen)[1:]


# rows or estimates, rows a client, participation, rounds; σ_0² to this part of itself, models to this part of what
# separates them from training alone.  What halves disagree on are squares of 600 normal numbers, with a standard error
# of √(2/600) = 6 %; of a quarter of the clients the last few rounds' are remembered.
GAUSSIAN = {
    "estimates": (False, (3, 40), 1.0, 80, 0.15, 0.1),
    "estimates of few rows": (False, (1, 5), 1.0, 100, 0.15, 0.1),
    "estimates, a quarter of the clients": (False, (3, 40), 0.25, 110, 0.2, 0.12),
    "many rows": (True, (30, 80), 1.0, 80, 0.15, 0.1),
    "few rows": (True, (3, 40), 1.0, 80, 0.15, 0.1),
}


@pytest.fixture(scope="module", params=GAUSSIAN)
def fitted(request):
    with_rows, examples, participation, rounds, *bounds = GAUSSIAN[request.param]
    source = federation(200, 3, examples=examples, with_rows=with_rows, seed=3)
    _, state, personal = run(algorithm(AUTO), source, rounds, participation=participation)
    return source.local_estimate.numpy(), source.intra_variance.numpy(), state.server, personal.numpy(), bounds


@pytest.mark.slow
def test_the_variance_between_clients_is_the_one_of_maximum_likelihood(fitted):
    estimate, variance, server, _, (bound, _) = fitted
    assert server.inter_variance.item() == pytest.approx(most_likely(estimate, variance), rel=bound)


@pytest.mark.slow
def test_personal_models_are_the_posterior_means(fitted):
    estimate, variance, _, personal, (_, bound) = fitted
    expected = posterior_means(estimate, variance, most_likely(estimate, variance))
    assert ((personal - expected) ** 2).mean() < bound**2 * ((estimate - expected) ** 2).mean()


@pytest.mark.slow
def test_the_interval_holds_the_variance_of_maximum_likelihood(fitted):
    """Its width is about that of 200 clients' squares of three numbers: no narrower than if they were known exactly."""
    estimate, variance, server, *_ = fitted
    low, high = (end.item() for end in algorithm(AUTO).inter_variance_interval(server))
    assert low < most_likely(estimate, variance) < high
    assert low <= server.inter_variance.item() <= high
    assert np.sqrt(2 / 600) < np.log(high / low) / (2 * 1.96) < 6 * np.sqrt(2 / 600)


def test_before_the_first_report_and_with_one_client_nothing_is_known_of_the_interval():
    source = federation(1, examples=(20, 20))
    chosen = algorithm(AUTO)
    _, state, _ = run(chosen, source, 3)
    for server in (chosen.start(source.global_params, source.population), state.server):
        assert all(end.isnan() for end in chosen.inter_variance_interval(server))


def test_a_variance_by_hand_has_no_interval():
    chosen = algorithm(AUTO, prior_precision=4.0)
    _, state, _ = run(chosen, federation(6), 3)
    assert state.server.inter_variance.item() == 0.25
    assert chosen.inter_variance_interval(state.server) is None


def test_clients_of_a_single_row_tell_nothing_and_are_not_counted():
    source, chosen = federation(12, examples=(1, 3), with_rows=True), algorithm(AUTO)
    with_halves = int((source.num_examples > 1).sum())
    assert 1 < with_halves < 12
    _, state, _ = run(chosen, source, 10)
    assert state.server.num_reporting.item() == pytest.approx(with_halves)


def test_a_checkpoint_from_before_there_were_intervals_has_one_a_round_later():
    """Squares that were not kept begin with the next cohort's, not with 0: nothing looks surer than it is."""
    chosen, source = algorithm(AUTO), federation(60, 3, with_rows=True, examples=(3, 40))
    engine = CohortEngine(chosen, source)
    state = engine.advance(engine.start(source.global_params), 30)
    start = chosen.start(source.global_params, source.population)
    old = replace(state.server, spread_products=start.spread_products, num_reporting=start.num_reporting)
    assert all(end.isnan() for end in chosen.inter_variance_interval(old))
    (low, high), (expected_low, expected_high) = (
        chosen.inter_variance_interval(engine.advance(replace(state, server=server), 1).server)
        for server in (old, state.server)
    )
    assert (high - low).item() == pytest.approx((expected_high - expected_low).item(), rel=0.3)
    assert low < expected_high
    assert high > expected_low


# ------------------------------------------------------------------------------------------- regression: mixed models


class Intercept(nn.Module):
    """One number, whatever the features."""

    def __init__(self):
        super().__init__()
        self.level = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, features):
        return self.level.expand(*features.shape[:-1], 1)


def levels(spread, num_clients=150, rows=(8, 40), seed=1):
    """y = θ_m + noise of variance 1, θ_m ~ N(2, spread²): values, and whose they are."""
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(num_clients), rng.integers(rows[0], rows[1] + 1, num_clients))
    return (2.0 + spread * rng.normal(size=num_clients))[client] + rng.normal(size=len(client)), client


def regression(module, features, values, client, *, batch_size, rate=0.02, rounds=40):
    fed = selffl.Federation.from_arrays(features, values[:, None], client, test_fraction=0.0)
    source = ModelSource(fed, FlatModel(module.double()), MSE, rate, batch_size, seed=0)
    engine = CohortEngine(algorithm(AUTO), source)
    state = engine.advance(engine.start(source.model.params), rounds)
    return state.server, engine.personal(state).numpy()


@pytest.mark.slow
def test_a_random_intercept_is_that_of_statsmodels():
    """MixedLM by maximum likelihood; σ_0² of the method is in units of twice the residual variance."""
    values, client = levels(0.3)
    fit = sm.MixedLM(values, np.ones((len(values), 1)), groups=client).fit(reml=False)
    between = float(np.asarray(fit.cov_re)[0, 0])
    server, personal = regression(Intercept(), np.zeros((len(values), 1)), values, client, batch_size=20, rounds=48)
    assert 2 * fit.scale * server.inter_variance.item() == pytest.approx(between, rel=0.1)
    assert server.prior_rows.item() == pytest.approx(fit.scale / between, rel=0.35)
    assert server.params.item() == pytest.approx(fit.fe_params[0], abs=0.3 * fit.bse_fe[0])
    best = fit.fe_params[0] + np.array([np.asarray(fit.random_effects[m])[0] for m in range(len(personal))])
    alone = np.bincount(client, values) / np.bincount(client)
    for other in (alone, np.full_like(alone, fit.fe_params[0])):
        assert ((personal[:, 0] - best) ** 2).mean() < 0.2**2 * ((other - best) ** 2).mean()


def variances_of(server):
    """Of each group of parameters ``[G]``."""
    return server.inter_variance * server.variance_ratios


def halved(source, t, m, half=None, split=0):
    """Minibatches of a client, or of one half of its rows: features and labels by number."""
    task = source.task(torch.tensor([m]), t + 1)
    task, slot = (task, 0) if half is None else (task.halves(split), half)
    return lambda draw: [part[0].numpy() for part in task.batch(draw, torch.tensor([slot]))]


@pytest.mark.slow
@pytest.mark.usefixtures("no_small_models")
def test_a_regression_equals_its_twin():
    """The gradient of squared errors is the mean of 2 e x; the last client has a single row, and no second half."""
    sizes = (7, 30, 12, 1, 9)
    x, y, client = classes(sizes)
    source = source_of(nn.Linear(5, 1), rows=(x, x[:, :1] + y[:, None], client), loss=MSE, rate=0.02)

    def gradient(t, m, half=None, split=0):
        minibatch = halved(source, t, m, half, split)

        def slope(model, draw, short=False):
            features, values = (part[: 3 if short else 6] for part in minibatch(draw))
            own = np.column_stack([features, np.ones(len(features))])
            return (2.0 * (own @ np.array(model) - values[:, 0])[:, None] * own).mean(0).tolist()

        return slope

    def temperature(t, m, models, draw, split):
        """Twice the mean squared error of both models on the rows of both halves that are looked at."""
        errors = []
        for half in (0, 1):
            features, values = (part[:3] for part in halved(source, t, m, half, split)(draw))
            own = np.column_stack([features, np.ones(len(features))])
            errors += [2.0 * ((own @ np.array(model) - values[:, 0]) ** 2).mean() for model in models]
        return float(np.mean(errors))

    problem = {
        "temperature": temperature,
        "start": source.model.params.tolist(),
        "cohorts": [sample_cohort(1, t + 1, 5, 0.6).tolist() for t in range(6)],
        "gradient": gradient,
        "half_gradient": lambda t, m, split=0: [gradient(t, m, half, split) for half in (0, 1)],
        "half_terms": [((size + 1) // 2, size // 2) for size in sizes],
        "terms": [float(size) for size in sizes],
        "examples": [float(size) for size in sizes],
        "rates": [0.02] * 5,
        "groups": [1] * 6,
        "batch_size": source.batch_size,
        "closing": 6,
    }
    expected = twins.run_self_fl_auto(problem, num_local_steps=5, **CONSTANTS)
    state, personal, closed = trained(source, with_closed=True)
    assert state.server.params.tolist() == pytest.approx(expected["global"], rel=1e-9)
    assert state.server.inter_variance.item() == pytest.approx(expected["trained_inter_variance"], rel=1e-9)
    assert variances_of(state.server).tolist() == pytest.approx(expected["trained_of_group"], rel=1e-9)
    interval = [end.item() for end in algorithm(AUTO).inter_variance_interval(state.server)]
    assert interval == pytest.approx(expected["interval"], rel=1e-8)
    assert len(set(expected["trained_of_group"])) > 1
    assert state.server.prior_rows.item() == pytest.approx(expected["trained_prior_rows"], rel=1e-9)
    torch.testing.assert_close(personal, torch.tensor(expected["personal"], dtype=torch.float64), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(closed, torch.tensor(expected["closed"], dtype=torch.float64), rtol=1e-9, atol=1e-12)
    assert ((closed - personal).norm(dim=-1) > 1e-3).equal(state.num_rounds > 0)
    assert_closing_spread(state.server, expected, 1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("no_small_models")
@pytest.mark.parametrize("num_scores", [3, 1])
def test_a_classifier_equals_its_twin(num_scores):
    """Rows are (p − e)(x, 1); clients differ in how often they have which class, and one has a single row.

    A single score tells two classes apart: its bias is the second's, less the first's.
    """
    num_classes, num_weights = max(num_scores, 2), 5 * num_scores
    generator = np.random.default_rng(4)
    client = np.repeat(np.arange(6), (9, 30, 12, 1, 8, 20))
    features = torch.from_numpy(generator.normal(size=(len(client), 5)))
    common = generator.random(len(client)) < 0.7
    labels = torch.from_numpy(np.where(common, client % num_classes, (client + 1) % num_classes))
    counts = [np.bincount(labels[client == m], minlength=num_classes).tolist() for m in range(6)]
    if num_scores == 1:
        bias, given, loss = [(5, -1), (5, 1)], labels.double()[:, None], nn.functional.binary_cross_entropy_with_logits
    else:
        bias, given, loss = [(15, 1), (16, 1), (17, 1)], labels, nn.functional.cross_entropy
    source = source_of(nn.Linear(5, num_scores), rows=(features, given, client), rate=0.1, loss=loss)

    def gradient(t, m, half=None, split=0):
        minibatch = halved(source, t, m, half, split)

        def slope(model, draw, short=False):
            own, answers = (part[: 3 if short else 6] for part in minibatch(draw))
            flat = np.array(model)
            scores = own @ flat[:num_weights].reshape(num_scores, 5).T + flat[num_weights:]
            if num_scores == 1:
                scores = np.column_stack([0.0 * scores, scores])
            chances = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
            error = (chances - np.eye(num_classes)[answers.reshape(-1).astype(int)])[:, -num_scores:]
            rows = np.column_stack([(error[:, :, None] * own[:, None]).reshape(len(own), num_weights), error])
            return rows.mean(0).tolist()

        return slope

    def scores(t, m, half):
        own, answers = halved(source, t, m, half)(0)

        def of_rows(model):
            flat = np.array(model)
            found = own @ flat[:num_weights].reshape(num_scores, 5).T + flat[num_weights:]
            found = np.column_stack([0.0 * found, found]) if num_scores == 1 else found
            return list(zip(found.tolist(), answers.reshape(-1).astype(int).tolist(), strict=True))

        return of_rows

    sizes = [float(sum(own)) for own in counts]
    problem = {
        "start": source.model.params.tolist(),
        "cohorts": [sample_cohort(1, t + 1, 6, 0.6).tolist() for t in range(6)],
        "gradient": gradient,
        "half_gradient": lambda t, m, split=0: [gradient(t, m, half, split) for half in (0, 1)],
        "half_terms": [((size + 1) // 2, size // 2) for size in sizes],
        "terms": sizes,
        "examples": sizes,
        "rates": [0.1] * 6,
        "classes": counts,
        "half_classes": classes_by_half(source, num_classes),
        "scores": scores,
        "batch_size": source.batch_size,
        "closing": 6,
        "bias": bias,
        "scorers": range(num_weights + num_scores),
        "groups": [1] * (num_weights + num_scores),
    }
    expected = twins.run_self_fl_auto(problem, num_local_steps=5, **CONSTANTS)
    assert 0.1 < expected["skew"] < 0.9
    assert max(abs(factor - 1.0) for factor in expected["factors"]) > 0.05
    state, personal, closed = trained(source, with_closed=True)
    assert state.server.score_factors.tolist() == pytest.approx(expected["factors"], rel=1e-9)
    assert state.server.frequencies.tolist() == pytest.approx(expected["frequencies"], rel=1e-12)
    skew = class_skew(state.server.same_class_rate, state.server.frequencies).item()
    assert skew == pytest.approx(expected["skew"], rel=1e-9)
    assert state.server.inter_variance.item() == pytest.approx(expected["trained_inter_variance"], rel=1e-7)
    assert variances_of(state.server).tolist() == pytest.approx(expected["trained_of_group"], rel=1e-7)
    assert len(set(expected["trained_of_group"])) > 1
    torch.testing.assert_close(personal, torch.tensor(expected["personal"], dtype=torch.float64), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(closed, torch.tensor(expected["closed"], dtype=torch.float64), rtol=1e-7, atol=1e-9)
    assert ((closed - personal).norm(dim=-1) > 1e-3).equal(state.num_rounds > 0)
    assert_closing_spread(state.server, expected, 1e-6)


@pytest.mark.slow
def test_a_row_at_a_time_is_enough_for_the_order_of_magnitude():
    """The variance of one residual can be next to nothing; nothing may be divided by it."""
    values, client = levels(1.0)
    server, _ = regression(Intercept(), np.zeros((len(values), 1)), values, client, batch_size=1)
    assert 0.5 < 2 * server.inter_variance.item() < 2.0


@pytest.mark.slow
def test_a_regression_of_several_parameters_is_that_of_maximum_likelihood():
    """y_m ~ N(X_m θ_0, X_m Σ X_mᵀ + σ²), Σ diagonal: each coefficient differs between clients by a variance of its own.

    Not to a few percent: residuals of the rows that a model was fitted to are too small, by γ_m/N_m of their squares.
    """
    rng = np.random.default_rng(5)
    client = np.repeat(np.arange(100), rng.integers(10, 50, 100))
    features = rng.normal(size=(len(client), 2))
    x = np.column_stack([features, np.ones(len(client))])
    truth = np.array([1.0, -1.0, 2.0]) + np.array([0.2, 0.5, 1.0]) * rng.normal(size=(100, 3))
    values = (x * truth[client]).sum(1) + 0.8 * rng.normal(size=len(client))
    parts = [(x[client == m], values[client == m]) for m in range(100)]

    products = np.array([own.T @ own for own, _ in parts])

    def surprise(guess):
        """By Woodbury's identity and its determinant: matrices of three coefficients, not of all rows."""
        inter, noise, centre = np.exp(guess[:3]), np.exp(guess[3]), guess[4:]
        error = values - x @ centre
        slopes = np.array([np.bincount(client, column * error) for column in x.T]).T
        inner = products + np.diag(noise / inter)
        explained = (slopes * np.linalg.solve(inner, slopes[..., None])[..., 0]).sum()
        logs = len(values) * np.log(noise) + np.linalg.slogdet(inner * inter / noise)[1].sum()
        return logs + ((error**2).sum() - explained) / noise

    best = minimize(
        surprise, [*np.log([0.04, 0.25, 1.0, 0.64]), 1.0, -1.0, 2.0], method="BFGS", options={"gtol": 0.01}
    ).x
    inter, noise, centre = np.exp(best[:3]), np.exp(best[3]), best[4:]
    expected = np.array(
        [
            centre + inter * (own.T @ np.linalg.solve((inter * own) @ own.T + noise * np.eye(len(y)), y - own @ centre))
            for own, y in parts
        ]
    )
    server, personal = regression(nn.Linear(2, 1), features, values, client, batch_size=20, rate=0.05)
    found = 2 * noise * (server.inter_variance * server.variance_ratios).numpy()
    assert np.log(found) == pytest.approx(np.log(inter), abs=np.log(1.7))  # from 0.02 to 1.3
    alone = np.array([np.linalg.lstsq(own, y, rcond=None)[0] for own, y in parts])
    assert ((personal - expected) ** 2).mean() < 0.3**2 * ((alone - expected) ** 2).mean()


# ------------------------------------------------------------------------------------------------ reductions and limits


def test_among_clients_of_one_size_the_shared_model_is_fedavgs():
    for with_rows in (False, True):
        source = federation(7, examples=(20, 20), resample=True, with_rows=with_rows)
        _, state, _ = run(algorithm(AUTO, num_local_steps=4), source, 8, participation=0.6)
        _, fedavg, _ = run(algorithm("fedavg", num_local_steps=4), source, 8, participation=0.6)
        torch.testing.assert_close(state.server.latest, fedavg.server.params, rtol=1e-12, atol=0)
        assert not torch.equal(state.server.params, state.server.latest)


def test_the_smaller_the_variance_between_clients_the_nearer_they_stay():
    source, clients, chosen = federation(5, rate=2e-3), torch.arange(5), algorithm(AUTO, num_local_steps=40)
    server = chosen.start(source.global_params, source.population)
    memory = chosen.newcomer(server.params.expand(5, -1))
    gaps = []
    for variance in (1e-12, 1e-3, 1e-2, 1e12):
        sent = chosen.broadcast(replace(server, inter_variance=torch.tensor(variance, dtype=torch.float64)), clients)
        _, kept = chosen.client_round(sent, memory, source.task(clients, 1))
        gaps.append((kept.model(sent.params) - sent.params).norm(dim=-1))
    assert (gaps[0] < 1e-9).all()
    assert (gaps[1] < 0.9 * gaps[2]).all()
    assert (gaps[2] < gaps[3]).all()
    # Without a prior it is each client's own optimum that is trained for.
    apart = (source.local_estimate - server.params).norm(dim=-1)
    torch.testing.assert_close(gaps[3][-1], apart[-1], rtol=0.2, atol=0)


@pytest.mark.parametrize(("disagreement", "shares"), [(5.0, (0.5, 0.25)), (1e-6, (1.0, 1.0))])
def test_parameters_that_nobody_decides_go_with_the_rest(disagreement, shares):
    """Halves agree on next to nothing, so that the variance of both groups falls, though they disagree on one alone; no
    further once that is next to nothing, too."""
    source, clients, chosen = federation(5, is_grouped=True), torch.arange(5), algorithm(AUTO)
    server = chosen.start(source.global_params, source.population)
    memory = chosen.newcomer(server.params.expand(5, -1))
    upload, _ = chosen.client_round(chosen.broadcast(server, clients), memory, source.task(clients, 1))
    squares = torch.tensor([0.001 * disagreement, 0.0], dtype=torch.float64)
    sent = replace(
        gathered(chosen, upload),
        deviation=torch.zeros_like(server.params),
        deviation_squares=squares,
        difference_squares=squares / 2,
        disagreements=torch.tensor([disagreement, 0.0], dtype=torch.float64),
        squared_disagreements=torch.tensor([disagreement, 0.0], dtype=torch.float64),
    )
    first = 1.0 / self_fl_auto.FIRST_PRECISION
    for share in shares:
        server = chosen.server_round(server, clients, sent)
        assert variances_of(server).tolist() == pytest.approx([share * first, share * first], rel=1e-5)


@pytest.mark.slow
def test_what_values_are_measured_in_changes_nothing():
    """Values of other units have models of other units, and σ_0², in units of the loss, stays."""
    module, (x, y, client) = nn.Linear(5, 1), classes((7, 30, 12, 4, 9))
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    values, scale = x[:, :1] * (1 + client[:, None]) + y[:, None], 2.0**12
    (plain, models), (other, scaled) = (
        trained(source_of(module, rows=(x, values * unit, client), loss=MSE, rate=0.05), 20) for unit in (1.0, scale)
    )
    torch.testing.assert_close(scaled / scale, models, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(variances_of(other.server), variances_of(plain.server), rtol=1e-9, atol=0)
    assert variances_of(plain.server).unique().numel() > 1


def test_a_client_that_is_away_follows_the_prior_by_what_it_leans_on_it():
    source = federation(6, examples=(2, 60))
    _, state, personal = run(algorithm(AUTO), source, 12)
    shift = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
    later = algorithm(AUTO).personal(state.server.params + shift, state.memory, source.task(torch.arange(6), 13))
    weight = state.memory.prior_weight
    torch.testing.assert_close(later - personal, weight.unsqueeze(-1) * shift, rtol=1e-9, atol=1e-12)
    worth = weight * source.num_examples / (1.0 - weight)  # n_0, the same for everybody
    torch.testing.assert_close(worth, worth[:1].expand(6), rtol=1e-9, atol=0)
    assert (state.memory.prior_weight.argsort(descending=True) == source.num_examples.argsort()).all()


def test_the_predicted_gain_is_one_over_what_the_rows_weigh():
    source = federation(6, examples=(2, 60))
    chosen = algorithm(AUTO)
    _, state, _ = run(chosen, source, 12, participation=0.3)
    expected = 1.0 + state.server.prior_rows / source.num_examples
    torch.testing.assert_close(chosen.gains(state.server, source.num_examples), expected, rtol=1e-12, atol=0)


# ------------------------------------------------------------------------------------------------- rows as they come


def drawn(seeds, **options):
    settings = {"num_clients": 9, "num_examples": (3, 12), "global_mean": 1.6, "inter_variance": 0.05}
    settings |= {"row_variance": 0.1, "learning_rate": 1e-3, "with_rows": True}
    return GaussianFederation.draw(seeds=torch.as_tensor(seeds), **(settings | options))


def outcome(source, chunk_size=None, rounds=8):
    engine = CohortEngine(algorithm(AUTO), source, 0.5, source.seeds, chunk_size)
    state = engine.advance(engine.start(source.global_params - 0.5), rounds)
    return tensors_of(state) | {"personal": engine.personal(state)}


def test_federations_of_rows_side_by_side_are_those_one_at_a_time():
    together = outcome(drawn([4, 5, 6]))
    for place, seed in enumerate((4, 5, 6)):
        for name, expected in outcome(drawn(seed)).items():
            found = together[name][place]
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15, equal_nan=True, msg=name)


def test_rows_in_chunks_have_the_numbers_of_all_at_once():
    """But for the order in which uploads are added."""
    every = outcome(drawn([4, 5]))
    for size in (1, 3):
        for name, found in outcome(drawn([4, 5]), size).items():
            torch.testing.assert_close(found, every[name], rtol=1e-12, atol=1e-14, equal_nan=True, msg=name)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def classes(sizes, seed=2, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)
    client = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    x = torch.randn(sum(sizes), 5, generator=rng, dtype=dtype)
    return x, torch.randint(3, (sum(sizes),), generator=rng), client


def source_of(module, sizes=(7, 30, 12, 4, 9), batch_size=6, rate=0.1, loss=nn.functional.cross_entropy, rows=None):
    x, y, client = classes(sizes) if rows is None else rows
    fed = selffl.Federation.from_arrays(x, y, client, test_fraction=0.0)
    return ModelSource(fed, FlatModel(module.double()), loss, rate, batch_size, seed=3)


def trained(source, rounds=6, *, with_closed=False):
    """The last state and everybody's model; and everybody's once training is over, if asked for."""
    engine = CohortEngine(algorithm(AUTO, num_local_steps=5), source, 0.6, 1)
    state = engine.advance(engine.start(source.model.params), rounds)
    if not with_closed:
        return state, engine.personal(state)
    personal, concluded = engine.personal(state), engine.conclude(state)
    return concluded, personal, engine.personal(concluded, is_over=True)


# ------------------------------------------------------------------------------ how far scores and frequencies count


def mixtures(num_clients=60, size=40, seed=0):
    """Rows around the mean of their class, and the one linear model that has their log-odds.

    Clients differ in how often they have which class and in nothing else.
    """
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(4, 5)) * 0.7
    client = np.repeat(np.arange(num_clients), size)
    often = rng.dirichlet(np.full(4, 0.5), num_clients)
    labels = np.array([rng.choice(4, p=often[m]) for m in client])
    biases = np.log(np.bincount(labels) / len(labels)) - (means**2).sum(1) / 2
    rows = torch.from_numpy(means[labels] + rng.normal(size=(len(labels), 5))), torch.from_numpy(labels), client
    return rows, torch.from_numpy(np.concatenate([means.reshape(-1), biases]))


def factors_after(rows, start, *, rate, rounds):
    source = source_of(nn.Linear(5, 4), rows=rows, batch_size=20, rate=rate)
    engine = CohortEngine(algorithm(AUTO, num_local_steps=10), source)
    return engine.advance(engine.start(start), rounds).server.score_factors.tolist()


@pytest.mark.parametrize("axes", [(), (3,)], ids=["a federation", "side by side"])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_factors_are_learned_from_running_means(axes, share):
    """Means in which a round weighs its share; over that share they are sums of as many rounds as they remember."""
    rng = np.random.default_rng(0)

    def curvature():
        root = rng.normal(size=(*axes, 2, 2))
        return root @ np.swapaxes(root, -1, -2)

    old, slope, known_pull = (rng.uniform(0.5, 1.5, (*axes, 2)) for _ in range(3))
    known, new = curvature(), curvature()
    pull = np.einsum("...ij,...j->...i", new, old) - slope
    curvatures, pulls = (1 - share) * known + share * new, (1 - share) * known_pull + share * pull
    server = SimpleNamespace(
        params=torch.zeros(*axes, 4, dtype=torch.float64),
        score_factors=torch.tensor(old),
        factor_curvature=torch.tensor(known),
        factor_pull=torch.tensor(known_pull),
    )
    upload = SimpleNamespace(factor_curvature=torch.tensor(new), factor_slope=torch.tensor(slope))
    found = algorithm(AUTO).factors_round(server, upload, torch.full(axes, share, dtype=torch.float64))
    np.testing.assert_allclose(found[1].numpy(), curvatures, rtol=1e-12)
    np.testing.assert_allclose(found[2].numpy(), pulls, rtol=1e-12)
    expected = next_factors(torch.tensor(old), torch.tensor(curvatures / share), torch.tensor(pulls / share))
    np.testing.assert_allclose(found[0].numpy(), expected.numpy(), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("too_small", [0.5, 1.0, 3.0])
def test_scores_that_are_too_small_are_found_to_be(too_small):
    """The right scores over a number, in a model that hardly moves: t is that number, and frequencies count whole."""
    rows, right = mixtures()
    found = factors_after(rows, right / too_small, rate=1e-9, rounds=12)
    assert found == pytest.approx([too_small, 1.0], rel=0.15)


@pytest.mark.slow
def test_a_model_that_has_not_been_trained_to_its_end_adds_less_of_the_frequencies():
    rows, right = mixtures()
    start = torch.zeros_like(right)
    early, late = (factors_after(rows, start, rate=rate, rounds=rounds) for rate, rounds in ((0.003, 4), (0.3, 25)))
    assert early[0] > 2.0
    assert early[1] / early[0] < 0.5
    assert late == pytest.approx([1.0, 1.0], abs=0.12)


# ----------------------------------------------------------------------------------------------------- where it is hard


def all_finite(state, personal):
    """Of closing rounds nothing is known before they have been."""
    return personal.isfinite().all() and not any(
        part.isinf().any() or (part.isnan().any() and "intra" not in name and ".closing." not in name)
        for name, part in tensors_of(state).items()
    )


def test_a_client_whose_rows_are_all_alike_has_a_model():
    x, y, client = classes((7, 30, 12, 4, 9))
    x[client == 1], y[client == 1] = x[10].clone(), 2
    state, personal = trained(source_of(network(), rows=(x, y, client)))
    assert all_finite(state, personal)


@pytest.mark.parametrize(("sizes", "batch_size"), [((1, 1, 1, 1, 1), 6), ((1, 30, 2, 1, 9), 6), ((1, 30, 2, 1, 9), 1)])
@pytest.mark.parametrize("kind", ["classes", "values"])
def test_clients_of_one_row_and_minibatches_of_one(kind, sizes, batch_size):
    x, y, client = classes(sizes)
    if kind == "values":
        rows, loss, module = (x, x[:, :1] + y[:, None], client), MSE, nn.Linear(5, 1)
    else:
        rows, loss, module = (x, y, client), nn.functional.cross_entropy, network()
    state, personal = trained(source_of(module, batch_size=batch_size, rows=rows, loss=loss, rate=0.02), 12)
    if max(sizes) > 1:
        assert all_finite(state, personal)
    else:  # nobody has two halves: nothing is learned of either variance, and c stays where it began
        assert personal.isfinite().all()
        assert state.server.prior_rows.isnan()
        assert state.server.inter_variance.item() == 1.0 / self_fl_auto.FIRST_PRECISION
    assert (personal != state.server.params).any(-1)[state.num_rounds > 0].all()


def test_a_model_that_fits_from_the_start_stays():
    """No row has a gradient: nothing is decided, nothing is known, and nothing moves."""
    x, _, client = classes((7, 30, 12, 4, 9))
    module = nn.Linear(5, 1)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    source = source_of(module, rows=(x, torch.zeros(len(x), 1, dtype=torch.float64), client), loss=MSE)
    state, personal = trained(source)
    assert (personal == 0.0).all()
    assert state.server.prior_rows.isnan()
    assert state.server.inter_variance.item() == 1.0 / self_fl_auto.FIRST_PRECISION


@pytest.mark.slow
def test_one_that_comes_to_fit_stays_finite():
    """Two clients without noise, trained until nothing is left to learn."""
    x, _, client = classes((6, 6))
    values = x @ torch.tensor([[1.0], [2.0], [0.0], [0.0], [-1.0]], dtype=torch.float64)
    engine = CohortEngine(algorithm(AUTO), source_of(nn.Linear(5, 1), rows=(x, values, client), loss=MSE))
    state = engine.advance(engine.start(engine.source.model.params), 60)
    assert all_finite(state, engine.personal(state))
    assert (engine.personal(state)[:, :5] - torch.tensor([1.0, 2.0, 0, 0, -1.0])).abs().max() < 0.02


@pytest.mark.parametrize("rate", [1e3, 1e30])
def test_too_large_a_learning_rate_is_said_in_one_line(rate, tmp_path):
    x, y, client = classes((7, 30, 12, 4, 9), dtype=torch.float32)
    fed = selffl.Federation.from_arrays(x, (x[:, :1] + y[:, None]), client, test_fraction=0.2, seed=0)
    folder = tmp_path / "run"
    with pytest.raises(DivergedError, match="Lower the learning rate") as raised:
        selffl.train(nn.Linear(5, 1), fed, AUTO, loss=MSE, rounds=20, learning_rate=rate, seed=0, out=folder)
    assert "\n" not in str(raised.value)
    with pytest.raises(selffl.SelfFLError):  # no state that is not finite has been kept
        selffl.resume(folder)


def test_a_client_whose_own_model_has_left_the_finite_numbers_keeps_it_to_itself():
    chosen, source = algorithm(AUTO, num_local_steps=3), source_of(network())
    clients = torch.arange(5)
    engine = CohortEngine(chosen, source)
    state = engine.advance(engine.start(source.model.params), 3)
    sent = chosen.broadcast(state.server, clients)
    sound, _ = chosen.client_round(sent, state.memory, source.task(clients, 4))
    broken = map_tensors(torch.clone, state.memory)
    broken.personal_offset[2] = broken.first_half_offset[2] = torch.nan
    upload, kept = chosen.client_round(sent, broken, source.task(clients, 4))
    others = [0, 1, 3, 4]
    for name, part in tensors_of(upload).items():
        torch.testing.assert_close(part[others], tensors_of(sound)[name][others], rtol=1e-9, atol=1e-12)
    assert torch.equal(upload.change[2], sound.change[2])
    assert kept.personal_offset[others].isfinite().all()
    server = chosen.server_round(state.server, clients, map_tensors(lambda part: part.double().sum(0), upload))
    assert server.params.isfinite().all()
    assert server.inter_variance == state.server.inter_variance  # a round that says nothing moves nothing


def test_a_frozen_layer_stays_and_is_nobodys():
    module = network()
    module[0].requires_grad_(False)
    before = module[0].weight.clone()
    x, y, client = classes((17, 30, 12, 14, 19), dtype=torch.float32)
    fed = selffl.Federation.from_arrays(x, y, client, test_fraction=0.2, seed=0)
    result = selffl.train(module, fed, AUTO, rounds=4, participation=1.0, learning_rate=0.1, seed=0)
    for number in range(5):
        own = result.personal_model(number)
        assert torch.equal(own[0].weight, before)
        assert not torch.equal(own[2].weight, module[2].weight)


def test_a_task_without_single_rows_says_what_it_lacks():
    """One that knows gradients alone is no `RowwiseTask`, and cannot be made into one by inheriting."""

    class Bare(RowwiseTask):
        def batch(self, draw, slots):
            return None

        def batch_gradient(self, params, batch):
            return params

    with pytest.raises(TypeError, match=r"abstract methods? .*halves"):
        Bare(torch.Size([2]), torch.tensor([3, 4]), 0.1)
