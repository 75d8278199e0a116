"""The estimators: scikit-learn's own checks, and whose model answers which row."""

import copy
import io
import pickle

import joblib
import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_digits, make_regression
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, GroupKFold, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import selffl
from selffl.errors import ConfigError, DataError, DivergedError
from selffl.estimator import DEFAULT_ALGORITHM, SelfFLClassifier, SelfFLRegressor
from selffl.models import build

# Checks that cannot hold, each with its reason; there are none.
EXPECTED_FAILURES: dict[str, str] = {}

OPTIONS = {"rounds": 6, "batch_size": 10}


FEW_STEPS = selffl.algorithm(DEFAULT_ALGORITHM, num_local_steps=5)


@pytest.mark.slow
@parametrize_with_checks(
    [SelfFLClassifier(algorithm=FEW_STEPS, rounds=1), SelfFLRegressor(algorithm=FEW_STEPS, rounds=1)],
    expected_failed_checks=lambda _: EXPECTED_FAILURES,
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def opposed(num_clients=4, rows=60, seed=0):
    """Clients of whom every second calls everything by the other's name."""
    rng = np.random.default_rng(seed)
    client = np.repeat([f"ward {m}" for m in range(num_clients)], rows)
    x = rng.normal(size=(len(client), 3)) * [1.0, 50.0, 0.01] + [0.0, 1e3, -7.0]
    turned = np.repeat(np.arange(num_clients) % 2 == 1, rows)
    above = x[:, 0] > 0
    return x, np.where(above ^ turned, "sick", "well"), client


@pytest.fixture(scope="module")
def fitted():
    x, y, client = opposed()
    return SelfFLClassifier(**OPTIONS).fit(x, y, client=client)


# -------------------------------------------------------------------------------------------------- whose model answers


def test_each_client_is_answered_by_its_own_model(fitted):
    x, y, client = opposed(seed=1)
    assert fitted.score(x, y, client=client) > 0.9
    swapped = np.roll(client, 60)
    assert fitted.score(x, y, client=swapped) < 0.1
    assert fitted.classes_.tolist() == ["sick", "well"]
    assert fitted.clients_ == ["ward 0", "ward 1", "ward 2", "ward 3"]
    assert fitted.n_features_in_ == 3
    assert set(fitted.predict(x, client=client)) == {"sick", "well"}
    shares = fitted.predict_proba(x, client=client)
    assert shares.sum(1) == pytest.approx(1.0)
    assert (fitted.classes_[shares.argmax(1)] == fitted.predict(x, client=client)).all()


@pytest.mark.slow
def test_the_models_are_those_of_the_run(fitted):
    """By hand: rows standardised by scikit-learn, the module of the run, a softmax."""
    x, y, client = opposed()
    scaler = StandardScaler().fit(x)
    assert fitted.mean_ == pytest.approx(scaler.mean_)
    assert fitted.scale_ == pytest.approx(scaler.scale_)
    rows = torch.tensor(scaler.transform(x))
    for name in fitted.clients_:
        own = client == name
        model = fitted.run_.personal_model(name).module.double()
        expected = model(rows[own]).softmax(-1).detach().numpy()
        assert fitted.predict_proba(x[own], client=client[own]) == pytest.approx(expected, abs=1e-9)
    fed = selffl.Federation.from_arrays(rows.float(), (y == "well").astype(int), client, 0.0)
    same = selffl.train(
        "softmax", fed, DEFAULT_ALGORITHM, rounds=OPTIONS["rounds"], batch_size=10, participation=1.0, learning_rate=0.1
    )
    own = fitted.run_.personal_model("ward 2").module
    torch.testing.assert_close(same.personal_model("ward 2").weight, own.weight.float())


def test_unknown_clients_and_none_have_the_global_model(fitted):
    x, _, _ = opposed(seed=1)
    rows = torch.tensor((x - fitted.mean_) / fitted.scale_)
    expected = fitted.run_.global_model().module.double()(rows).softmax(-1).detach().numpy()
    assert fitted.predict_proba(x) == pytest.approx(expected, abs=1e-9)
    with pytest.warns(UserWarning, match="rows of 'nobody' are answered by the global model"):
        assert fitted.predict_proba(x, client=["nobody"] * len(x)) == pytest.approx(expected, abs=1e-9)
    mixed = np.where(np.arange(len(x)) % 2, "nobody", "ward 1")
    with pytest.warns(UserWarning, match="rows of 'nobody'"):
        found = fitted.predict_proba(x, client=mixed)
    assert found[1::2] == pytest.approx(expected[1::2], abs=1e-9)
    assert np.abs(found[::2] - expected[::2]).max() > 0.1


def test_without_clients_all_rows_are_one_clients_whatever_the_method():
    x, y, _ = opposed(num_clients=1)
    for algorithm in (DEFAULT_ALGORITHM, "local", "ditto", "fedavg"):  # the global model of local is never trained
        model = SelfFLClassifier(algorithm=algorithm, **OPTIONS).fit(x, y)
        assert model.score(x, y) > 0.95, algorithm
        assert len(model.clients_) == 1


def test_regression_by_client_in_the_targets_own_units():
    rng = np.random.default_rng(0)
    client = np.repeat([3, 1, 2], 80)
    x = rng.normal(size=(240, 2)) * [1.0, 1e3]
    y = 1e4 + 3e3 * (client - 2) * x[:, 0] - x[:, 1]
    model = SelfFLRegressor(**OPTIONS).fit(x, y, client=client)
    assert model.clients_ == [1, 2, 3]
    assert model.score(x, y, client=client) > 0.9
    assert model.score(x, y) < 0.5
    slope = model.predict([[1.0, 0.0]], client=[3]) - model.predict([[0.0, 0.0]], client=[3])
    assert slope == pytest.approx([3e3], rel=0.2)
    assert model.target_mean_ == pytest.approx(y.mean())
    assert model.target_scale_ == pytest.approx(y.std())


def along_a_line(num_clients=8):
    """Scikit-learn's diabetes, clients by where a row lies in one direction: the outer ones are far from the mean."""
    x, y = load_diabetes(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    rng = np.random.default_rng(1)
    client = np.argsort(np.argsort(x @ rng.normal(size=x.shape[1]))) * num_clients // len(x)
    return x, y, client, rng.random(len(x)) < 0.3


@pytest.mark.parametrize("batch_size", [20, 1])
@pytest.mark.parametrize("algorithm", [DEFAULT_ALGORITHM, "fedavg", "local"])
def test_linear_regression_takes_steps_that_its_rows_bear(batch_size, algorithm):
    x, y, client, held_out = along_a_line()
    rows, asked = (x[~held_out], y[~held_out]), (x[held_out], y[held_out])
    model = SelfFLRegressor(algorithm=algorithm, batch_size=batch_size, rounds=10)
    model.fit(*rows, client=client[~held_out])
    assert model.score(*asked, client=client[held_out]) > 0.3


@pytest.mark.slow
@pytest.mark.parametrize(("num_features", "num_rows", "batch_size"), [(100, 2000, 20), (10, 1000, 1)])
def test_linear_regression_settles_where_rows_have_many_features_for_a_minibatch(num_features, num_rows, batch_size):
    """Ten times smaller with momentum: with half of what plain steps bear R² is 0.3 and 0.6."""
    x, y = make_regression(num_rows, num_features, noise=1.0, random_state=0)
    client = np.arange(num_rows) % 5
    # Of twenty steps a visit eight are on each half of the rows, and the prior mean lags behind: small steps need time.
    plain, heavy = (
        SelfFLRegressor(algorithm=name, batch_size=batch_size, rounds=rounds)
        for name, rounds in (("fedavg", 10), (DEFAULT_ALGORITHM, 40 if batch_size == 1 else 20))
    )
    assert plain.fit(x, y, client=client).score(x, y, client=client) > 0.95
    assert heavy.fit(x, y, client=client).score(x, y, client=client) > 0.95
    assert heavy.run_.config.learning_rate < plain.run_.config.learning_rate < 0.1


def test_plain_steps_are_half_of_the_largest_that_settle():
    """One client with all its rows in every step: then these are 2 over the largest eigenvalue, and it is seen."""
    x, y = make_regression(40, 3, random_state=0)
    z = np.hstack([(x - x.mean(0)) / x.std(0), np.ones((40, 1))])
    largest = 2 * np.linalg.eigvalsh(z.T @ z / 40)[-1]
    varies = 2 * (z**2).sum(1).max() / 40
    rate = SelfFLRegressor(algorithm="local", batch_size=40, rounds=1).fit(10 * x, y).run_.config.learning_rate
    assert rate == pytest.approx(min(0.1, 1 / (largest + varies)), rel=1e-5)
    calm = SelfFLRegressor(algorithm="local", batch_size=40, learning_rate=1.9 / largest).fit(x, y)
    assert calm.score(x, y) > 0.99
    with pytest.raises(DivergedError):
        SelfFLRegressor(algorithm="local", batch_size=40, learning_rate=2.2 / largest, rounds=60).fit(x, y).score(x, y)


def test_rows_that_bear_the_usual_steps_get_them():
    x, y = make_regression(300, 1, random_state=0)
    model = SelfFLRegressor(algorithm="fedavg", batch_size=100, rounds=2).fit(x, y, client=np.arange(300) % 3)
    assert model.run_.config.learning_rate == 0.1


def test_a_client_that_makes_steps_tiny_is_named():
    x, y = make_regression(100, 3, random_state=0)
    client = np.repeat(["near", "far"], 50)
    x[client == "far"] *= 1e3
    with pytest.warns(UserWarning, match="are all that the rows of 'far' bear"):
        SelfFLRegressor(rounds=1, standardise=False).fit(x, y, client=client)


@pytest.mark.slow
def test_a_learning_rate_that_is_asked_for_is_taken():
    x, y, client, held_out = along_a_line()
    with_it = SelfFLRegressor(algorithm="fedavg", learning_rate=0.1, rounds=20).fit(
        x[~held_out], y[~held_out], client=client[~held_out]
    )
    assert with_it.run_.config.learning_rate == 0.1
    assert with_it.score(x[held_out], y[held_out], client=client[held_out]) < -1e3  # these rows do not bear it
    for model, target in ((SelfFLClassifier(), y > 150), (SelfFLRegressor(_small), y)):
        assert model.set_params(rounds=1).fit(x, target, client=client).run_.config.learning_rate == 0.1


def _small(num_features, num_outputs):
    return nn.Sequential(nn.Linear(num_features, 4), nn.Tanh(), nn.Linear(4, num_outputs))


def test_scores_weigh_rows(fitted):
    x, y, client = opposed(seed=1)
    is_right = fitted.predict(x, client=client) == y
    assert not is_right.all()
    assert fitted.score(x, y, client=client, sample_weight=is_right.astype(float)) == 1.0


@pytest.mark.slow
def test_on_digits_it_is_about_as_good_as_what_all_rows_together_give():
    x, y = load_digits(return_X_y=True)
    client = np.random.default_rng(0).integers(0, 10, len(y))
    learn = np.arange(len(y)) % 3 > 0
    ours = SelfFLClassifier(rounds=20).fit(x[learn], y[learn], client=client[learn])
    theirs = make_pipeline(StandardScaler(), LogisticRegression()).fit(x[learn], y[learn])
    found = ours.score(x[~learn], y[~learn], client=client[~learn])
    assert found > theirs.score(x[~learn], y[~learn]) - 0.02 > 0.93


# ---------------------------------------------------------------------------------------------------------- the model


@pytest.mark.slow
def test_any_module_a_function_that_makes_one_or_a_name():
    x, y, client = opposed()

    def network(num_features, num_classes):
        return nn.Sequential(nn.Linear(num_features, 8), nn.Tanh(), nn.Linear(8, num_classes))

    before = torch.get_rng_state()
    short = OPTIONS | {"rounds": 2}
    first, second = (SelfFLClassifier(network, **short).fit(x, y, client=client) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert (first.predict_proba(x, client=client) == second.predict_proba(x, client=client)).all()
    other = SelfFLClassifier(network, random_state=1, **short).fit(x, y, client=client)
    assert (first.predict_proba(x, client=client) != other.predict_proba(x, client=client)).any()
    module = network(3, 2)
    kept = copy.deepcopy(module.state_dict())
    assert SelfFLClassifier(module, **OPTIONS).fit(x, y, client=client).score(x, y, client=client) > 0.9
    assert all(torch.equal(module.state_dict()[name], kept[name]) for name in kept)
    assert SelfFLClassifier("softmax", **OPTIONS).fit(x, y, client=client).score(x, y, client=client) > 0.9


@pytest.mark.parametrize("shape", [(-1, 1), (-1,)])
def test_a_regression_takes_modules_with_and_without_an_axis_for_the_one_output(shape):
    x = np.random.default_rng(0).normal(size=(100, 2))
    model = nn.Sequential(nn.Linear(2, 1), nn.Unflatten(1, (1, 1)), nn.Flatten(0 if shape == (-1,) else 1))
    assert SelfFLRegressor(model, **OPTIONS).fit(x, x @ [1.0, 2.0]).score(x, x @ [1.0, 2.0]) > 0.95


def test_images_as_they_are():
    x, y = load_digits(return_X_y=True)
    images = np.repeat(np.repeat(x[:90].reshape(-1, 1, 8, 8), 2, 2), 2, 3)
    model = SelfFLClassifier(build("cnn", (1, 16, 16), 10), FEW_STEPS, rounds=1).fit(
        images, y[:90], client=np.arange(90) % 3
    )
    assert model.predict(images, client=np.arange(90) % 3).shape == (90,)
    assert model.mean_.shape == (1, 16, 16)
    with pytest.raises(ValueError, match="dim"):
        SelfFLClassifier().fit(images, y[:90])


@pytest.mark.slow
def test_scales_do_not_matter_unless_it_is_said():
    x, y, client = opposed()
    narrow, wide = (
        SelfFLClassifier(**OPTIONS).fit(rows, y, client=client).predict_proba(rows, client=client)
        for rows in (x, x * 1e6 + 3.0)
    )
    assert narrow == pytest.approx(wide, abs=1e-3)
    plain = SelfFLClassifier(standardise=False, **OPTIONS).fit(x[:, :1], y, client=client)
    assert (plain.mean_.tolist(), plain.scale_.tolist()) == ([0.0], [1.0])
    constant = SelfFLClassifier(**OPTIONS).fit(np.c_[x, np.full(len(x), 0.1)], y, client=client)
    assert constant.scale_[-1] == 1.0


# ---------------------------------------------------------------------------------------------- in scikit-learn's world


def test_it_is_cloned_and_set_like_any_other():
    model = SelfFLClassifier(selffl.models.build("softmax", 3, 2), selffl.algorithm("ditto", penalty=0.3), rounds=7)
    twin = clone(model)
    assert twin.get_params()["rounds"] == 7
    assert twin.algorithm == model.algorithm
    assert twin.model is not model.model
    assert not hasattr(twin, "classes_")
    assert model.set_params(rounds=9).rounds == 9
    assert SelfFLClassifier().algorithm == SelfFLRegressor().algorithm == DEFAULT_ALGORITHM


@pytest.mark.parametrize("dump", [pickle.dumps, None], ids=["pickle", "joblib"])
def test_models_are_pickled_and_rows_are_not(dump, fitted):
    x, _, client = opposed(seed=1)
    if dump is None:
        file = io.BytesIO()
        joblib.dump(fitted, file)
        content = file.getvalue()
        file.seek(0)
        back = joblib.load(file)
    else:
        content = dump(fitted)
        back = pickle.loads(content)
    assert (back.predict_proba(x, client=client) == fitted.predict_proba(x, client=client)).all()
    assert not hasattr(back, "run_")
    assert hasattr(fitted, "run_")
    assert fitted.run_.federation.train.features[:1].numpy().tobytes() not in content
    assert pickle.dumps(fitted.run_.federation.train.features[:1].numpy()) not in content


def test_columns_have_names():
    x, y, client = opposed()
    table = pd.DataFrame(x, columns=["age", "dose", "rate"])
    model = SelfFLClassifier(**OPTIONS).fit(table, pd.Series(y), client=pd.Series(client))
    assert model.feature_names_in_.tolist() == ["age", "dose", "rate"]
    assert model.score(table, y, client=pd.Series(client)) > 0.9
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(table.rename(columns={"age": "years"}))


@pytest.mark.slow
def test_a_search_and_a_pipeline_hand_the_clients_on():
    x, y, client = opposed()
    folds = StratifiedKFold(3, shuffle=True, random_state=0)  # rows lie client by client
    with sklearn.config_context(enable_metadata_routing=True):
        model = SelfFLClassifier(**OPTIONS).set_fit_request(client=True).set_score_request(client=True)
        search = GridSearchCV(model, {"algorithm": ["fedavg", "self-fl-auto"]}, cv=folds).fit(x, y, client=client)
        assert search.best_params_ == {"algorithm": "self-fl-auto"}
        assert search.best_score_ > 0.85  # with the clients' own models: the global one knows nothing
        assert search.score(x, y, client=client) > 0.9
        model = model.set_predict_request(client=True)
        pipe = make_pipeline(PolynomialFeatures(2, include_bias=False), model).fit(x, y, client=client)
        assert pipe.score(x, y, client=client) > 0.9
        assert (pipe.predict(x, client=client) == y).mean() == pipe.score(x, y, client=client)
    # Without routing a search hands on what fit is given, and scores by the global model.
    search = GridSearchCV(SelfFLClassifier(**OPTIONS), {"rounds": [5]}, cv=GroupKFold(2))
    search.fit(x, y, groups=client, client=client)
    assert search.best_estimator_.clients_ == ["ward 0", "ward 1", "ward 2", "ward 3"]
    pipe = make_pipeline(StandardScaler(), SelfFLClassifier(**OPTIONS))
    assert pipe.fit(x, y, selfflclassifier__client=client).predict(x, client=client).shape == y.shape


@pytest.mark.slow
@pytest.mark.parametrize("state", [None, np.random.RandomState(3)], ids=["none", "a generator"])
def test_random_states_of_other_kinds(state):
    x, y, client = opposed()
    first, second = (SelfFLClassifier(random_state=state, rounds=2).fit(x, y, client=client) for _ in range(2))
    assert first.run_.config.seed != second.run_.config.seed
    one, same = (
        SelfFLClassifier(random_state=np.random.RandomState(3), rounds=2).fit(x, y).run_.config.seed for _ in range(2)
    )
    assert one == same


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("options", "rows", "kind", "reason"),
    [
        ({"model": 7}, {}, ConfigError, "model is 7; expected a torch module"),
        ({"model": nn.Linear(3, 4)}, {}, ConfigError, r"gives outputs of shape \(4,\) for a row; expected \(2,\)"),
        ({"model": nn.Linear(3, 1)}, {}, ConfigError, "cross_entropy cannot fit"),
        ({}, {"client": ["a"]}, DataError, "X has 240 rows and client 1; expected as many of each"),
        ({}, {"client": [None] * 240}, DataError, "the client column holds NaN; expected an id in every row"),
        ({}, {"client": "ward"}, DataError, "expected one id per row"),
        ({}, {"y": ["sick"] * 240}, DataError, "y holds 1 class; expected 2 or more classes"),
        ({}, {"y": ["sick"] * 240}, ValueError, "y holds 1 class"),
    ],
)
def test_mistakes_are_told_in_a_line(options, rows, kind, reason):
    x, y, client = opposed()
    with pytest.raises(kind, match=reason) as found:
        SelfFLClassifier(**options).fit(**{"X": x, "y": y, "client": client} | rows)
    assert len(str(found.value).splitlines()) == 1


def test_rows_to_predict_need_a_client_each(fitted):
    with pytest.raises(DataError, match="X has 2 rows and client 1; expected as many of each"):
        fitted.predict([[0.0, 0.0, 0.0]] * 2, client=["ward 1"])
