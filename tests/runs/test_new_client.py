"""New clients: their models against plain minimisation, the run as it was, every method, and rows that are refused."""

import copy
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import selffl
from needs import NEEDS_LAYERS
from selffl.algorithms import ALGORITHMS, Ditto
from selffl.algorithms.averaging import ModelBroadcast, ModelServer
from selffl.algorithms.records import tensors_of
from selffl.algorithms.self_fl_auto import LEAST_SKEW
from selffl.data.federation import Rows
from selffl.errors import DataError, DivergedError, SelfFLError
from selffl.maths.frequencies import class_skew
from selffl.runs import new_client

FEATURES, CLASSES, BATCH = 5, 3, 10


def rows_of(seed, count, kind="classes"):
    """A client's rows: a direction of its own beside one that all share."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, FEATURES))
    slope = np.linspace(-1, 1, FEATURES)[:, None] * np.arange(1, CLASSES + 1) + 0.5 * rng.normal(
        size=(FEATURES, CLASSES)
    )
    if kind == "values":
        return x, x @ slope[:, :1] + 0.3 * rng.normal(size=(count, 1))
    return x, (x @ slope + rng.gumbel(size=(count, CLASSES))).argmax(1)


def federation(kind="classes", num_clients=8):
    parts = [rows_of(seed, 12 + 3 * seed, kind) for seed in range(num_clients)]
    client = np.repeat(np.arange(num_clients), [len(y) for _, y in parts])
    x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
    return selffl.Federation.from_arrays(x, y, client, 0.2).with_clusters([m % 2 for m in range(num_clients)])


def trained(algorithm, kind="classes", **options):
    """Some rounds in double precision, so that nothing but the method is left to differ."""
    torch.manual_seed(0)
    module = nn.Linear(FEATURES, 1 if kind == "values" else CLASSES)
    method = selffl.algorithm(algorithm) if isinstance(algorithm, str) else algorithm
    if method.name in NEEDS_LAYERS:
        module = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    if method.batch_norm == "kept":
        module = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES))
    if "max_convergence_steps" in vars(method):  # it would look for local optima for long
        method = replace(method, max_convergence_steps=20)
    return selffl.train(
        module, federation(kind), method,
        **{"rounds": 6, "participation": 0.5, "learning_rate": 0.05, "batch_size": BATCH, "dtype": torch.float64}
        | ({"loss": mse_loss} if kind == "values" else {}) | options,
    )  # fmt: skip


def flat(module):
    return torch.cat([part.detach().reshape(-1) for part in module.parameters()])


def minimum(objective, start):
    """Where a function of a vector is least, by scipy."""

    def both(point):
        at = torch.tensor(point, requires_grad=True)
        value = objective(at)
        value.backward()
        return value.item(), at.grad.numpy()

    found = minimize(both, start.numpy(), jac=True, method="L-BFGS-B", options={"maxiter": 5000, "ftol": 1e-15})
    return torch.tensor(found.x)


def logits(params, x):
    weight, bias = params[:-CLASSES].reshape(CLASSES, FEATURES), params[-CLASSES:]
    return torch.as_tensor(x) @ weight.T + bias


# ---------------------------------------------------------------------------------------------------------- the oracles


def precisions(run):
    """How hard each parameter is held: one over the variance of its group in closing visits; they differ."""
    closing = run._state.server.closing
    variances = closing.prior_variance * closing.prior_ratios
    found = 1.0 / variances.repeat_interleave(run._state.server.group_sizes)
    assert found.max() > 1.02 * found.min()
    return found


@pytest.mark.usefixtures("no_small_models")
@pytest.mark.parametrize("count", [1, 4, BATCH, 35])
def test_auto_finds_the_mode_of_the_newcomers_posterior(count):
    run = trained("self-fl-auto")
    x, y = rows_of(99, count)
    server, precision = run._state.server, precisions(run)
    own, everybodys = np.bincount(y, minlength=CLASSES), server.frequencies.double().numpy()
    scale, share = server.score_factors.tolist()
    centre = scale * flat(run.global_model())
    # Rows train with their own class frequencies on the scores, and without the classes that they lack.
    with np.errstate(divide="ignore"):
        on_top = torch.tensor(np.where(own > 0, np.log(own / count / everybodys), -30.0))

    def objective(params):
        loss = cross_entropy(logits(params, x) + on_top, torch.as_tensor(y), reduction="sum")
        return loss + (precision / 2 * (params - centre).square()).sum()

    expected = minimum(objective, centre)
    way = (expected - centre).norm()
    assert count == 1 or way > 0.01
    # It predicts with frequencies by credibility: so many rows of everybody's beside its own.
    rho = max(class_skew(server.same_class_rate, server.frequencies).item(), LEAST_SKEW)
    worth = (1.0 - rho) / rho
    believed = (own + worth * everybodys) / (count + worth) / everybodys
    expected[-CLASSES:] += torch.tensor(share * np.log(believed))
    assert (flat(run.welcome((x, y))) - expected).norm() < 0.01 * max(way, 1e-3)


@pytest.mark.usefixtures("no_small_models")
@pytest.mark.parametrize("count", [2, 30])
def test_auto_finds_the_posterior_mean_of_a_linear_model(count):
    run = trained("self-fl-auto", "values", learning_rate=0.02)
    x, y = rows_of(98, count, "values")
    centre, precision = flat(run.global_model()).numpy(), precisions(run).numpy()
    design = np.hstack([x, np.ones((count, 1))])
    # Twice the squares, as a squared error is not halved.
    left = 2 * design.T @ design + np.diag(precision)
    expected = np.linalg.solve(left, 2 * design.T @ y[:, 0] + precision * centre)
    found = flat(run.welcome((x, y))).numpy()
    assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected - centre)


@pytest.mark.parametrize("count", [3, 25])
def test_ditto_finds_the_minimum_near_the_global_model(count):
    run = trained(selffl.algorithm("ditto", penalty=0.5))
    x, y = rows_of(97, count)
    centre = flat(run.global_model())

    def objective(params):
        return cross_entropy(logits(params, x), torch.as_tensor(y)) + 0.25 * (params - centre).square().sum()

    expected = minimum(objective, centre)
    assert (flat(run.welcome((x, y))) - expected).norm() < 0.01 * (expected - centre).norm()


def test_self_fl_takes_the_steps_of_a_client_whose_variance_is_unknown():
    run = trained(selffl.algorithm("self-fl", initial_steps=7))
    x, y = rows_of(96, BATCH)
    model = run.global_model()
    descent = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(7):
        descent.zero_grad()
        cross_entropy(model(torch.as_tensor(x)), torch.as_tensor(y)).backward()
        descent.step()
    torch.testing.assert_close(flat(run.welcome((x, y))), flat(model), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("no_small_models")
def test_more_rows_move_the_model_further_and_none_do_not():
    run = trained("self-fl-auto")
    x, y = rows_of(95, 40)
    way = [(flat(run.welcome((x[:k], y[:k]))) - flat(run.global_model())).norm() for k in (0, 1, 5, 40)]
    assert way[0] == 0
    assert way == sorted(way)


# ------------------------------------------------------------------------------------------------- every method


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_gives_a_newcomer_a_model_and_leaves_the_run_as_it_was(name, monkeypatch, short):
    monkeypatch.setattr(new_client, "MAX_VISITS", 5)
    run = trained(short(name), rounds=4)
    x, y = rows_of(94, 4)
    states = {key: tensor.clone() for key, tensor in tensors_of(run._state).items()}
    first = flat(run._session.model.module).clone()
    models = [flat(run.personal_model(client)) for client in run.federation.clients]
    records = copy.deepcopy([run.history, run.clients, run.summary, run.participation])
    kept = run.federation.fingerprint(), torch.get_rng_state(), x.copy(), y.copy()

    model = run.welcome((x, y))

    assert type(model) is type(run.global_model())
    assert flat(model).isfinite().all()
    is_shared = selffl.algorithm(name).personalises == "nothing"
    assert torch.equal(flat(model), flat(run.global_model())) == is_shared
    assert torch.equal(flat(run.welcome((x, y))), flat(model))
    assert torch.equal(flat(run.welcome((x[:0], y[:0]))), flat(run.global_model()))
    now = tensors_of(run._state)
    assert now.keys() == states.keys()
    assert all(torch.equal(now[key].nan_to_num(nan=-1), tensor.nan_to_num(nan=-1)) for key, tensor in states.items())
    assert torch.equal(flat(run._session.model.module), first)
    assert all(map(torch.equal, models, (flat(run.personal_model(client)) for client in run.federation.clients)))
    assert records == [run.history, run.clients, run.summary, run.participation]
    assert run.federation.fingerprint() == kept[0]
    assert torch.equal(torch.get_rng_state(), kept[1])
    assert np.array_equal(x, kept[2])
    assert np.array_equal(y, kept[3])


@pytest.mark.parametrize(
    "name", [pytest.param("self-fl-auto", marks=pytest.mark.slow), "self-fl", "ditto", "apfl", "perfedavg"]
)
def test_newcomers_who_come_together_have_the_models_that_each_has_alone(name, monkeypatch, short):
    monkeypatch.setattr(new_client, "MAX_VISITS", 5)
    run = trained(short(name), batch_size=4, chunk_size=2)
    each = [rows_of(seed, count) for seed, count in ((90, 9), (91, 2), (92, 9), (93, 9), (94, 0))]
    offset = torch.tensor([0, *(len(y) for _, y in each)]).cumsum(0)
    x, y = (torch.as_tensor(np.concatenate(part)) for part in zip(*each, strict=True))
    found = new_client.make_new_client_models(run._session, run._state, Rows(x, y, offset))
    for params, own in zip(found, each, strict=True):
        torch.testing.assert_close(params, flat(run.welcome(own)), rtol=1e-9, atol=1e-9)


@dataclass(frozen=True)
class TollServer(ModelServer):
    """What each client has to pay."""

    toll: Tensor


@dataclass(frozen=True)
class TollBroadcast(ModelBroadcast):
    """What this one has."""

    toll: Tensor


@dataclass(frozen=True)
class Toll(Ditto):
    """A method of the user's own whose server keeps something of every client: 7 before it has taken part, then 1."""

    name = "toll"
    per_client = ("toll",)

    def start(self, params, population):
        return TollServer(params, torch.full((population.num_clients,), 7.0).to(params))

    def broadcast(self, server, clients):
        return TollBroadcast(server.params.expand(*clients.shape, -1), server.toll[clients])

    def client_round(self, broadcast, memory, task):
        upload, kept = super().client_round(broadcast, memory, task)
        return upload, replace(kept, params=broadcast.params + broadcast.toll.unsqueeze(-1))

    def server_round(self, server, clients, upload):
        return TollServer(super().server_round(server, clients, upload).params, server.toll.scatter(-1, clients, 1.0))


def test_the_server_knows_of_a_newcomer_what_it_knew_of_everybody_at_first():
    run = trained(Toll(), participation=1.0)
    assert (run._state.server.toll == 1.0).all()
    torch.testing.assert_close(flat(run.welcome(rows_of(93, 3))), flat(run.global_model()) + 7.0)


@pytest.fixture
def visits(monkeypatch):
    """A list with an entry for every visit."""
    found = []
    once = new_client.ModelTask  # the local work of one visit
    monkeypatch.setattr(new_client, "ModelTask", lambda *given, **more: (found.append(1), once(*given, **more))[1])
    return found


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if ALGORITHMS[name]().newcomer_visits == 1])
def test_a_method_that_learns_its_variance_by_taking_part_is_visited_once(name, visits):
    trained(name).welcome(rows_of(88, 3 * BATCH))
    assert len(visits) == 1


@pytest.mark.usefixtures("no_small_models")
def test_visits_end_where_the_model_no_longer_moves_and_at_the_bound(visits, monkeypatch):
    run, own = trained("self-fl-auto"), rows_of(92, 5)
    run.welcome(own)
    assert 1 < len(visits) < new_client.MAX_VISITS
    visits.clear()
    monkeypatch.setattr(new_client, "TOLERANCE", 0.0)
    monkeypatch.setattr(new_client, "MAX_VISITS", 3)
    run.welcome(own)
    assert len(visits) == 3


# ------------------------------------------------------------------------------------------------- where it works


def test_a_saved_run_serves_new_clients_as_the_one_that_was_trained(tmp_path):
    run, own = trained("self-fl-auto", out=tmp_path / "run"), rows_of(91, 6)
    before = {file: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    opened = selffl.load(tmp_path / "run")
    assert torch.equal(flat(opened.welcome(own)), flat(run.welcome(own)))
    assert {file: file.read_bytes() for file in (tmp_path / "run").iterdir()} == before


def test_rows_may_come_as_lists_whole_numbers_names_or_a_federation():
    fed = selffl.Federation.from_csv(_table(), client="site", label="ill")
    assert fed.classes == ["no", "yes"]
    run = selffl.train("softmax", fed, "self-fl-auto", rounds=3, participation=1.0)
    expected = flat(run.welcome((np.array([[1.0, 2.0], [0.0, 4.0]], dtype=np.float32), np.array([1, 0]))))
    assert not torch.equal(expected, flat(run.global_model()))
    alone = selffl.Federation.from_arrays(torch.tensor([[1.0, 2.0], [0.0, 4.0]]), [1, 0], ["me", "me"], test_fraction=0)
    order = [int(label == 0) for label in alone.train.labels]  # as the federation has shuffled them
    again = [[[1, 2], [0, 4]][k] for k in order], [["yes", "no"][k] for k in order]
    for rows in (([[1, 2], [0, 4]], ["yes", "no"]), ([[1.0, 2.0], [0.0, 4.0]], [True, False])):
        torch.testing.assert_close(flat(run.welcome(rows)), expected)
    torch.testing.assert_close(flat(run.welcome(alone)), flat(run.welcome(again)))


def test_a_newcomer_that_holds_one_class_means_that_class():
    run = selffl.train(
        "softmax", selffl.Federation.from_csv(_table(), client="site", label="ill"), "self-fl-auto", rounds=3
    )
    ill = _table(["me,1,2,yes", "me,2,2,yes"])
    alone = selffl.Federation.from_csv(ill, client="site", label="ill", test_fraction=0)
    with pytest.raises(DataError, match="has a preparation of its own; expected that of the run"):
        run.welcome(alone)
    alone = selffl.Federation.from_csv(ill, client="site", label="ill", test_fraction=0, preparation=run.preparation)
    rows = [[1, 2], [2, 2]]
    torch.testing.assert_close(flat(run.welcome(alone)), flat(run.welcome((rows, ["yes", "yes"]))))
    torch.testing.assert_close(flat(run.welcome(ill)), flat(run.welcome(alone)))
    assert not torch.allclose(flat(run.welcome(alone)), flat(run.welcome((rows, ["no", "no"]))))


def _table(lines=("a,1,2,no", "a,3,1,yes", "b,2,2,no", "b,0,1,yes", "b,4,4,yes")):
    from pathlib import Path
    from tempfile import mkdtemp

    path = Path(mkdtemp()) / "rows.csv"
    path.write_text("\n".join(["site,age,dose,ill", *lines]) + "\n", encoding="utf-8")
    return path


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["self-fl-auto", "self-fl-cluster", "ditto", "fedper"])
def test_on_a_gpu_as_on_the_cpu(name):
    own = rows_of(90, 30)
    models = [trained(name, device=device).welcome(own) for device in ("cpu", "cuda")]
    assert next(models[1].parameters()).is_cuda
    torch.testing.assert_close(flat(models[1]).cpu(), flat(models[0]), rtol=1e-6, atol=1e-8)


# ------------------------------------------------------------------------------------------------------ what is refused

GOOD = np.zeros((2, FEATURES))
WRONG = {
    "NaN": ((np.full((2, FEATURES), np.nan), [0, 1]), "x holds NaN or infinity, first in row 0"),
    "another shape": ((np.zeros((2, 4)), [0, 1]), "a row of the new client has shape (4,); expected (5,)"),
    "an axis too many": (
        (np.zeros((2, 1, FEATURES)), [0, 1]),
        "of the new client has shape (1, 5); expected (5,)",
    ),
    "labels of another shape": ((GOOD, [[0], [1]]), "a label of the new client has shape (1,); expected ()"),
    "a label beyond the outputs": ((GOOD, [0, 3]), "client 'new' has the label 3, and Linear has 3 outputs"),
    "a label below none": ((GOOD, [0, -1]), "y is -1 in row 1"),
    "labels that are no classes": ((GOOD, [1.0, 1.5]), "the label 1.5 of the new client is no class"),
    "names where there are none": ((GOOD, ["no", "yes"]), "y is of type"),
    "other numbers of rows and labels": ((GOOD, [0, 1, 2]), "x has 2 rows and y 3"),
    "no pair": (GOOD[0], "rows are a ndarray; expected a pair (features, labels)"),
    "nothing": (None, "rows are a NoneType; expected a pair (features, labels)"),
    "several clients": (federation(), "the federation has 8 clients; expected the new client alone"),
}


@pytest.fixture(scope="module")
def ditto():
    return trained("ditto")


@pytest.mark.parametrize("wrong", WRONG)
def test_rows_that_do_not_fit_are_told_in_a_line(ditto, wrong):
    rows, reason = WRONG[wrong]
    with pytest.raises(DataError) as told:
        ditto.welcome(rows)
    assert reason in str(told.value)
    assert "\n" not in str(told.value)


def test_a_class_that_nobody_knows_is_told_with_the_nearest():
    run = selffl.train("softmax", selffl.Federation.from_csv(_table(), client="site", label="ill"), rounds=1)
    with pytest.raises(SelfFLError, match="unknown class 'yess'; did you mean 'yes'"):
        run.welcome(([[1.0, 2.0]], ["yess"]))


def test_a_model_that_leaves_the_finite_numbers_is_no_model():
    run = trained("ditto", "values")
    x, y = rows_of(89, 5, "values")
    with pytest.raises(DivergedError, match="the new client's model by ditto is not finite"):
        run.welcome((x * 1e6, y))
