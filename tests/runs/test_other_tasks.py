"""Runs of other tasks than classes: what is recorded, against plain NumPy on the personal models."""

import json

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

import selffl
from selffl.errors import ConfigError, DataError

SIZES = (30, 12, 50, 8, 20, 16, 40, 9, 25, 33)
FAST = {"rounds": 4, "participation": 1.0, "learning_rate": 0.1, "evaluate_every": 2}


def table(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sum(SIZES), 3)).astype(np.float32)
    client = np.repeat(np.arange(len(SIZES)), SIZES)
    slope = rng.normal(size=(len(SIZES), 3)) * 0.5 + [1.0, -1.0, 0.5]
    y = (x * slope[client]).sum(1) + 0.1 * rng.normal(size=len(x))
    return x, y.astype(np.float32), client


def by_client(run, view="personal"):
    """(outputs, labels) of each client's test rows."""
    rows = run.federation.test
    found = []
    for number, client in enumerate(run.federation.clients):
        low, high = rows.offset[number : number + 2].tolist()
        model = run.personal_model(client) if view == "personal" else run.global_model()
        with torch.no_grad():
            found.append((model(rows.features[low:high]).numpy(), rows.labels[low:high].numpy()))
    return found


def squeezed(hidden=4):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 1), nn.Flatten(0))


@pytest.mark.parametrize("method", ["self-fl", "ditto", "fedavg", "perfedavg"])
def test_a_regression_has_errors_in_the_unit_of_its_targets(method, tmp_path):
    x, y, client = table()
    fed = selffl.Federation.from_arrays(x, y, client, 0.3)
    run = selffl.train(squeezed(), fed, method, loss=nn.functional.mse_loss, out=tmp_path / "run", **FAST)
    assert run.config.metrics == ("error",)
    for view, prefix in (("personal", ""), ("global", "global_")):
        pairs = by_client(run, view)
        errors = [np.sqrt(np.mean((guess - target) ** 2)) for guess, target in pairs]
        assert [row[f"{prefix}error"] for row in run.clients] == pytest.approx(errors, rel=1e-5)
        whole = np.sqrt(np.mean(np.concatenate([(guess - target) ** 2 for guess, target in pairs])))
        assert run.summary["weighted_error" if view == "personal" else "global_error"] == pytest.approx(whole, rel=1e-5)
        if view == "personal":
            assert run.summary["worst10_error"] == pytest.approx(max(errors), rel=1e-5)  # ten clients: one is a tenth
            assert run.summary["top10_error"] == pytest.approx(errors[int(np.argmax(SIZES))], rel=1e-5)
    assert run.summary["weighted_accuracy"] is None  # named for every task
    assert "weighted_accuracy" not in run.history[-1]
    assert run.history[-1]["weighted_error"] < y.std()  # it learned something
    again = selffl.load(tmp_path / "run")
    assert again.summary == run.summary
    assert again.history == run.history


def test_a_regression_goes_on_after_an_interruption_as_if_nothing_had_been(tmp_path):
    x, y, client = table()
    fed = selffl.Federation.from_arrays(x, y, client, 0.3)
    whole = selffl.train(squeezed(), fed, "self-fl", loss=nn.functional.mse_loss, fine_tune=(2,), **FAST)

    class InterruptError(Exception):
        pass

    def stop(row):
        if row["round"] == 3:
            raise InterruptError

    with pytest.raises(InterruptError):
        selffl.train(
            squeezed(), fed, "self-fl", loss=nn.functional.mse_loss, fine_tune=(2,), out=tmp_path / "r", on_round=stop,
            **FAST,
        )  # fmt: skip
    run = selffl.resume(tmp_path / "r")
    assert run.summary | {"seconds": 0} == whole.summary | {"seconds": 0}
    assert run.summary["global_after_2_worst10_error"] > 0


@pytest.mark.parametrize("kind", ["two outputs", "one logit", "one score"])
def test_two_classes_have_an_auc_within_each_client_that_has_both(kind):
    x, y, client = table()
    label = (y > 0).astype(np.int64)
    label[client == 3] = 1  # this one has one class only
    label[client == 5] = 0
    module, loss = squeezed(), nn.functional.binary_cross_entropy_with_logits
    given = label.astype(np.float32)
    if kind == "two outputs":
        torch.manual_seed(1)
        module, loss, given = nn.Linear(3, 2), nn.functional.cross_entropy, label
    elif kind == "one score":

        def loss(outputs, labels):
            return (outputs - labels).square().mean()

        given = label
    fed = selffl.Federation.from_arrays(x, given, client, 0.3)
    run = selffl.train(module, fed, "ditto", loss=loss, **FAST)
    expected, rows = [], []
    for (outputs, labels), record in zip(by_client(run), run.clients, strict=True):
        scores = outputs[:, 1] - outputs[:, 0] if kind == "two outputs" else outputs
        if len(set(labels.tolist())) == 2:
            expected.append(roc_auc_score(labels, scores))
            rows.append(len(labels))
            assert record["auc"] == pytest.approx(expected[-1])
        else:
            assert record["auc"] is None
        if kind == "one score":
            assert "accuracy" not in record
        else:
            assert record["accuracy"] == pytest.approx(np.mean((scores > 0) == labels))
    assert 0 < len(expected) < len(SIZES)
    assert run.summary["weighted_auc"] == pytest.approx(np.average(expected, weights=rows))
    assert run.summary["worst10_auc"] == pytest.approx(min(expected))


def test_nobody_with_both_classes_is_no_fault():
    x, _, client = table()
    fed = selffl.Federation.from_arrays(x, client % 2, client, 0.3)
    run = selffl.train(nn.Linear(3, 2), fed, "fedavg", **FAST)
    assert run.summary["weighted_auc"] is None
    assert run.summary["weighted_accuracy"] is not None


def test_labels_that_no_metric_fits_are_measured_by_their_loss():
    """Counts under a Poisson loss: one output, whole numbers beyond 0 and 1."""
    x, y, client = table()
    counts = np.clip(np.round(np.exp(y / 3)), 0, 9).astype(np.int64)
    counts[0] = 5

    def loss(outputs, labels):
        return nn.functional.poisson_nll_loss(outputs, labels.float())

    fed = selffl.Federation.from_arrays(x, counts, client, 0.3)
    run = selffl.train(squeezed(), fed, "self-fl", loss=loss, **FAST)
    expected = [np.mean(np.exp(out) - label * out) for out, label in by_client(run)]
    assert [row["loss"] for row in run.clients] == pytest.approx(expected, rel=1e-4)
    assert run.summary["worst10_loss"] == pytest.approx(max(expected), rel=1e-4)


def test_outputs_of_another_shape_than_the_targets_are_refused_before_training():
    x, y, client = table()
    fed = selffl.Federation.from_arrays(x, y, client, 0.3)
    with pytest.raises(ConfigError, match=r"squeeze\(-1\)"):
        selffl.train(nn.Linear(3, 1), fed, "fedavg", loss=nn.functional.mse_loss, **FAST)


@pytest.mark.parametrize("kind", ["one logit", "one score", "values"])
def test_labels_may_have_a_last_axis_of_one(kind):
    x, y, client = table()
    label = (y > 0).astype(np.int64)[:, None]
    loss = nn.functional.mse_loss
    if kind == "one logit":
        loss, label = nn.functional.binary_cross_entropy_with_logits, label.astype(np.float32)
    elif kind == "one score":

        def loss(outputs, labels):
            return (outputs - labels).square().mean()

    else:
        label = y[:, None]
    fed = selffl.Federation.from_arrays(x, label, client, 0.3)
    torch.manual_seed(0)
    run = selffl.train(nn.Linear(3, 1), fed, "ditto", loss=loss, **FAST)
    metric = {"one logit": "accuracy", "one score": "auc", "values": "error"}[kind]
    found = [record[metric] for record in run.clients]
    for (outputs, labels), value in zip(by_client(run), found, strict=True):
        if metric == "accuracy":
            assert value == pytest.approx(np.mean((outputs > 0) == labels))
        elif metric == "error":
            assert value == pytest.approx(np.sqrt(np.mean((outputs - labels) ** 2)), rel=1e-5)
        elif value is not None:
            assert value == pytest.approx(roc_auc_score(labels[:, 0], outputs[:, 0]))


def test_the_worst_tenth_is_of_those_that_have_a_number():
    """Thirty clients, of whom ten have both classes: the worst of these, not the mean of three."""
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(30), 20)
    x = rng.normal(size=(600, 3)).astype(np.float32)
    y = np.where(client < 10, x[:, 0] + rng.normal(size=600) > 0, 0).astype(np.int64)
    run = selffl.train(nn.Linear(3, 2), selffl.Federation.from_arrays(x, y, client, 0.5), "fedavg", **FAST)
    found = [row["auc"] for row in run.clients if row["auc"] is not None]
    assert len(found) == 10
    assert run.summary["worst10_auc"] == pytest.approx(min(found))


def test_a_number_that_is_not_there_is_empty_in_training_too(tmp_path):
    x, _, client = table()
    fed = selffl.Federation.from_arrays(x, client % 2, client, 0.3)
    run = selffl.train(nn.Linear(3, 2), fed, "fedavg", evaluate_train=True, out=tmp_path / "run", **FAST)
    assert run.summary["train_auc"] is None
    assert selffl.load(tmp_path / "run").summary == run.summary
    assert "NaN" not in (tmp_path / "run" / "summary.json").read_text()


def test_a_regression_recorded_with_empty_accuracies_goes_on(tmp_path):
    """As runs were written before metrics followed the task."""
    x, y, client = table()
    fed = selffl.Federation.from_arrays(x, y, client, 0.3)
    whole = selffl.train(squeezed(), fed, "fedavg", loss=nn.functional.mse_loss, out=tmp_path / "run", **FAST)
    place = tmp_path / "run"
    lines = (place / "history.csv").read_text().splitlines()
    (place / "history.csv").write_text(
        "\n".join([f"{lines[0]},weighted_accuracy", *(f"{line}," for line in lines[1:])]) + "\n"
    )
    config = json.loads((place / "config.json").read_text())
    del config["config"]["metrics"]
    (place / "config.json").write_text(json.dumps(config))
    run = selffl.resume(place, rounds=6)
    assert run.summary["rounds"] == 6
    assert run.history[3]["weighted_error"] == whole.summary["weighted_error"]
    selffl.load(place).save(tmp_path / "copy")


def test_word_numbers_of_an_unknown_table_are_refused():
    x, _, client = table()
    fed = selffl.Federation.from_arrays(np.zeros((len(x), 5), dtype=np.int64), client % 2, client)
    with pytest.raises(ConfigError, match=r"which words its numbers stand for; expected model_options=\{'embeddings'"):
        selffl.train("lstm", fed, "fedavg", **FAST)
    with pytest.raises(ConfigError, match="model_options are for a model given by name"):
        selffl.train(nn.Linear(5, 2), fed, "fedavg", model_options={"hidden": 3}, **FAST)


def test_binary_cross_entropy_wants_labels_from_0_to_1():
    x, y, client = table()
    fed = selffl.Federation.from_arrays(x, np.sign(y), client, 0.3)
    with pytest.raises(DataError, match=r"^labels under binary cross-entropy run from -1 to 1; expected 0 to 1"):
        selffl.train(squeezed(), fed, "fedavg", loss=nn.functional.binary_cross_entropy_with_logits, **FAST)


def test_a_loss_that_is_a_class_and_names_that_are_not_there():
    x, y, client = table()
    fed = selffl.Federation.from_arrays(x, y, client, 0.3)
    with pytest.raises(ConfigError, match=r"^loss is the class MSELoss; expected .* MSELoss\(\)\.$"):
        selffl.train(squeezed(), fed, "fedavg", loss=nn.MSELoss, **FAST)
    with pytest.raises(ConfigError, match=r"^model_options is 3; expected a dictionary"):
        selffl.train(squeezed(), fed, "fedavg", loss=nn.functional.mse_loss, model_options=3, **FAST)
    found = selffl.train(squeezed(), fed, "fedavg", loss=nn.functional.mse_loss, **FAST).evaluate()
    assert repr(found).startswith("Evaluation(error of ")
    for ask in (found.of_clients, found.weighted, found.worst):
        with pytest.raises(ConfigError, match=r"^unknown metric 'f1'; .*error"):
            ask("f1", "personal")
        with pytest.raises(ConfigError, match=r"^unknown view 'mine'; .*personal"):
            ask("error", "mine")


@pytest.mark.parametrize("has_axis", [True, False])
def test_values_without_a_loss_are_learned_by_their_squared_error(has_axis, tmp_path):
    x, y, client = table()
    fed = selffl.Federation.from_arrays(x, y, client, 0.3)
    torch.manual_seed(0)
    module = nn.Linear(3, 1) if has_axis else nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    run = selffl.train(module, fed, "self-fl", out=tmp_path / "run", **FAST | {"rounds": 8})
    assert run.config.loss == "squared_error"
    torch.manual_seed(0)
    stated = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    expected = selffl.train(stated, fed, "self-fl", loss=nn.functional.mse_loss, **FAST | {"rounds": 8})
    assert run.summary["weighted_error"] == pytest.approx(expected.summary["weighted_error"], rel=1e-4)
    assert run.summary["weighted_error"] < 0.7 * y.std()
    # A module is given, so that nothing is unpickled: the loss is found by its name.
    again = selffl.load(tmp_path / "run", model=module)
    assert (again.config.loss, again.summary) == ("squared_error", run.summary)
    longer = selffl.resume(tmp_path / "run", model=module, rounds=9)
    assert longer.summary["rounds"] == 9


@pytest.mark.slow
def test_two_classes_and_one_output_without_a_loss_are_told_apart(tmp_path):
    x, y, client = table()
    fed = selffl.Federation.from_arrays(x, (y > 0).astype(int), client, 0.3)
    torch.manual_seed(0)
    run = selffl.train(nn.Linear(3, 1), fed, out=tmp_path / "run", **FAST | {"rounds": 8, "evaluate_every": 0})
    assert (run.config.loss, run.config.metrics) == (
        "logistic_loss",
        ("accuracy", "auc", "balanced_accuracy", "log_loss"),
    )
    for (outputs, labels), record in zip(by_client(run), run.clients, strict=True):
        assert record["accuracy"] == pytest.approx(np.mean((outputs[:, 0] > 0) == labels))
    assert run.summary["weighted_accuracy"] > 0.85  # where either class is half of the rows
    assert selffl.load(tmp_path / "run").summary == run.summary
    assert run.probabilities(0).shape[1] == 2


def test_counts_are_measured_by_their_rates():
    x, y, client = table()
    counts = np.random.default_rng(1).poisson(np.exp(0.3 * y))
    fed = selffl.Federation.from_arrays(x, counts, client, 0.3)
    run = selffl.train(squeezed(), fed, "fedavg", loss=nn.functional.poisson_nll_loss, **FAST)
    assert run.config.metrics == ("error",)
    expected = [np.sqrt(np.mean((np.exp(guess) - target) ** 2)) for guess, target in by_client(run)]
    assert [row["error"] for row in run.clients] == pytest.approx(expected, rel=1e-5)


def test_a_run_of_an_older_release_has_its_loss_by_torchs_name(tmp_path):
    x, y, client = table()
    fed = selffl.Federation.from_arrays(x, y, client, 0.3)
    run = selffl.train(squeezed(), fed, "fedavg", loss=nn.functional.huber_loss, out=tmp_path / "run", **FAST)
    assert run.config.loss == "huber_loss"
    assert selffl.load(tmp_path / "run", model=squeezed()).summary == run.summary
