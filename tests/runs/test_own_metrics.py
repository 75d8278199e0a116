"""Metrics of the user's own: per client on all of its rows, against scikit-learn on the models that are handed out."""

import json
import math
import warnings

import numpy as np
import pytest
import torch
import torchmetrics
from sklearn.metrics import f1_score, log_loss, roc_auc_score
from torch import nn

import selffl
from selffl.budget import BUDGETS, Budget
from selffl.errors import CheckpointError, ConfigError
from selffl.training.metrics import Metric, own_metrics

SIZES = (40, 12, 60, 3, 1, 25, 80, 30, 16, 21)  # the fifth has no test rows
OPTIONS = {"rounds": 4, "participation": 1.0, "learning_rate": 0.1, "evaluate_every": 2}
CLASSES = 3
TASK = ("accuracy", "balanced_accuracy", "log_loss")  # what the task is measured by anyway


def federation(classes=CLASSES, seed=0):
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(len(SIZES)), SIZES)
    x = rng.normal(size=(len(client), 4)).astype(np.float32)
    y = (x @ rng.normal(size=(4, classes)) + rng.normal(size=(len(SIZES), classes))[client]).argmax(1)
    y[client == 1] = 0  # one class only
    return selffl.Federation.from_arrays(x, y, [f"site {k}" for k in client], 0.3)


def model(classes=CLASSES):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, classes))


def mean_log_loss(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels)


def share_of_class_0(outputs, labels):
    return float((labels == 0).float().mean())


def torchs(classes=CLASSES):
    return {
        "f1": torchmetrics.F1Score("multiclass", num_classes=classes, average="macro"),
        "auroc": torchmetrics.AUROC("multiclass", num_classes=classes),
        "logloss": Metric(mean_log_loss, higher_is_better=False),
        "zeros": share_of_class_0,
    }


def macro_f1(outputs, labels):
    """torchmetrics leaves out classes that are neither there nor foretold."""
    guess = outputs.argmax(1)
    seen = sorted(set(labels.tolist()) | set(guess.tolist()))
    return f1_score(labels, guess, labels=seen, average="macro", zero_division=0)


def outputs_of(run, view):
    """(outputs, labels) of each client that has test rows, else None."""
    rows, found = run.federation.test, {}
    for number, client in enumerate(run.federation.clients):
        low, high = rows.offset[number : number + 2].tolist()
        own = run.personal_model(client) if view == "personal" else run.global_model()
        with torch.no_grad():
            found[client] = (
                (own(rows.features[low:high]).numpy(), rows.labels[low:high].numpy()) if high > low else None
            )
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("method", "room"), [("ditto", 300), ("fedavg", None)])
def test_every_number_is_that_of_scikit_learn(method, room, monkeypatch):
    """Also where outputs come in pieces, of which a client has several."""
    if room:
        monkeypatch.setitem(BUDGETS, "cpu", Budget(evaluated_numbers=room))
    chunk = {"chunk_size": 4 if room else None}  # clients that are evaluated at once
    run = selffl.train(model(), federation(), method, metrics=torchs(), evaluate_train=True, **OPTIONS, **chunk)
    assert run.config.metrics == (*TASK, "f1", "auroc", "logloss", "zeros")
    oracles = {
        "f1": macro_f1,
        "logloss": lambda outputs, labels: log_loss(
            labels, torch.tensor(outputs).double().softmax(1).numpy(), labels=range(CLASSES)
        ),
        "zeros": lambda _, labels: np.mean(labels == 0),
    }
    sizes = dict(zip(run.federation.clients, run.federation.test.num_examples.tolist(), strict=True))
    for name, oracle in oracles.items():
        for view, prefix in (("personal", ""), ("global", "global_")):
            pairs = outputs_of(run, view)
            expected = {client: oracle(*own) for client, own in pairs.items() if own is not None}
            found = {row["client"]: row[f"{prefix}{name}"] for row in run.clients}
            assert [client for client, value in found.items() if value is None] == [
                client for client, own in pairs.items() if own is None
            ]
            assert {client: found[client] for client in expected} == pytest.approx(expected, rel=1e-5)
            there = list(expected)
            assert len(there) == len(SIZES) - 1
            weighted = sum(expected[c] * sizes[c] for c in there) / sum(sizes[c] for c in there)
            score = f"global_{name}" if prefix else f"weighted_{name}"
            assert run.summary[score] == run.history[-1][score] == pytest.approx(weighted, rel=1e-5)
            if not prefix:
                values = [expected[client] for client in there]
                worst = max(values) if name == "logloss" else min(values)  # nine clients: one is a tenth
                assert run.summary[f"worst10_{name}"] == pytest.approx(worst, rel=1e-5)
                largest = run.federation.clients[int(run.federation.train.num_examples.argmax())]
                assert run.summary[f"top10_{name}"] == pytest.approx(expected[largest], rel=1e-5)
    assert run.summary["train_zeros"] == pytest.approx(float((run.federation.train.labels == 0).float().mean()))
    assert run.history[0]["weighted_f1"] is None  # not evaluated in that round


def test_an_auroc_of_one_class_is_none_and_does_not_count():
    """torchmetrics warns that it is meaningless, and says 0."""
    metrics = {"auroc": torchmetrics.AUROC("binary")}

    def scores(outputs, labels):
        return outputs[:, 1] - outputs[:, 0]

    class Difference(torchmetrics.classification.BinaryAUROC):
        def update(self, outputs, labels):
            super().update(scores(outputs, labels), labels)

    metrics["auroc"] = Difference()
    run = selffl.train(model(2), federation(2), "local", metrics=metrics, **OPTIONS)
    expected = {}
    for client, own in outputs_of(run, "personal").items():
        if own is not None and len(set(own[1].tolist())) == 2:
            expected[client] = roc_auc_score(own[1], scores(*own))
    assert 1 < len(expected) < len(SIZES) - 1
    assert {row["client"]: row["auroc"] for row in run.clients if row["auroc"] is not None} == pytest.approx(expected)
    # The measure of the task is the same thing, by other code.
    assert [row["auroc"] for row in run.clients] == pytest.approx([row["auc"] for row in run.clients])
    for part in ("weighted", "worst10", "top10", "global"):
        assert run.summary[f"{part}_auroc"] == pytest.approx(run.summary[f"{part}_auc"])


@pytest.mark.slow
def test_metrics_change_nothing_else():
    fed = federation()
    one = selffl.train(model(), fed, "ditto", fine_tune=(2,), **OPTIONS)
    two = selffl.train(model(), fed, "ditto", fine_tune=(2,), metrics=torchs(), **OPTIONS)
    for row, other in ((one.summary, two.summary), *zip(one.clients, two.clients, strict=True)):
        assert {name: other[name] for name in row if name != "seconds"} == {
            name: value for name, value in row.items() if name != "seconds"
        }
    assert two.summary["personal_after_2_worst10_f1"] > 0
    assert two.summary["global_after_2_weighted_f1"] != two.summary["global_f1"]
    shared = selffl.train(model(), fed, "fedavg", fine_tune=(2,), metrics=torchs(), **OPTIONS).summary
    assert shared["global_after_2_weighted_f1"] == shared["personal_after_2_weighted_f1"]  # made once for both


def in_place(outputs, labels):
    """The hinge loss as it is often written."""
    labels[labels == 0] = -1
    outputs[outputs < 0] = 0
    return float((1 - outputs.mean(1) * labels).clamp(min=0).mean())


def test_a_metric_that_writes_into_what_it_is_given_alters_no_rows():
    fed = federation()
    before = fed.fingerprint()
    selffl.train(model(), fed, "local", metrics={"hinge": in_place}, evaluate_train=True, **OPTIONS)
    assert fed.fingerprint() == before


def test_a_regression_with_a_metric_of_torchmetrics():
    fed = federation()
    values = selffl.Federation.from_arrays(
        fed.train.features, fed.train.features[:, 0].sin(), fed.train.owner, test_fraction=0.3
    )
    net = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    metrics = {"mae": torchmetrics.MeanAbsoluteError(), "r2": torchmetrics.functional.r2_score}
    with pytest.raises(ConfigError, match=r"metric 'r2' fails for client \d+ \(ValueError: Needs at least two samples"):
        selffl.train(net, values, "fedavg", loss=nn.functional.mse_loss, metrics=metrics, **OPTIONS)
    del metrics["r2"]
    run = selffl.train(net, values, "fedavg", loss=nn.functional.mse_loss, metrics=metrics, **OPTIONS)
    assert run.config.metrics == ("error", "mae")
    assert run.config.own_metrics == {"mae": False}
    by_client = {
        client: np.abs(own[0] - own[1]).mean() for client, own in outputs_of(run, "global").items() if own is not None
    }
    found = {row["client"]: row["mae"] for row in run.clients if row["mae"] is not None}
    assert found == pytest.approx(by_client, rel=1e-4, abs=1e-6)
    assert run.summary["worst10_mae"] == pytest.approx(max(by_client.values()), rel=1e-4, abs=1e-6)


def test_the_users_instance_is_left_as_it_was_and_ours_keeps_no_rows(tmp_path):
    given = torchmetrics.AUROC("multiclass", num_classes=CLASSES)
    given.update(torch.eye(3).repeat(3, 1), torch.arange(9) % 3)
    kept = [part.clone() for part in given.preds]
    run = selffl.train(model(), federation(), "local", metrics={"auroc": given}, out=tmp_path / "a", **OPTIONS)
    assert len(given.preds) == len(kept) == 1
    assert torch.equal(given.preds[0], kept[0])
    assert run._session.metrics["auroc"].function.preds == []
    outputs, labels = torch.eye(3).repeat(2, 1), torch.tensor([0, 1, 2, 1, 2, 0])
    fresh = torchmetrics.AUROC("multiclass", num_classes=CLASSES)(outputs, labels)
    assert Metric(given).of_client("auroc", "a", outputs, labels) == pytest.approx(float(fresh))


def test_outputs_of_a_client_come_at_once_and_in_the_order_of_its_rows():
    seen = []

    def watched(outputs, labels):
        seen.append((outputs.clone(), labels.clone()))
        return len(labels)

    fed = federation()
    run = selffl.train(model(), fed, "fedavg", metrics={"rows": watched}, **OPTIONS | {"evaluate_every": 0})
    assert [row["rows"] for row in run.clients] == [n or None for n in fed.test.num_examples.tolist()]
    expected = [own for own in outputs_of(run, "global").values() if own is not None]
    views = seen[1:]  # the first is the trial before training
    assert len(views) == 2 * len(expected)
    for outputs, labels in expected:
        assert sum(torch.allclose(torch.tensor(outputs), a, atol=1e-6) and np.array_equal(labels, b) for a, b in (
            (a, b) for a, b in views if a.shape == outputs.shape
        )) == 2  # fmt: skip


# -------------------------------------------------------------------------------------------------- saved and taken up


@pytest.mark.slow
def test_a_run_with_metrics_is_saved_loaded_and_resumed(tmp_path):
    fed, few = federation(), selffl.algorithm("ditto", num_local_steps=5)
    whole = selffl.train(model(), fed, few, metrics=torchs(), **OPTIONS)
    selffl.train(model(), fed, few, metrics=torchs(), out=tmp_path / "a", **OPTIONS | {"rounds": 2})
    config = json.loads((tmp_path / "a" / "config.json").read_text())["config"]
    assert config["own_metrics"] == {"f1": True, "auroc": True, "logloss": False, "zeros": True}
    loaded = selffl.load(tmp_path / "a", trusted=True)
    assert loaded.evaluate().scores() == pytest.approx(
        {name: value for name, value in loaded.summary.items() if name in loaded.evaluate().scores()}, nan_ok=True
    )
    resumed = selffl.resume(tmp_path / "a", rounds=4, trusted=True)
    same = {name: value for name, value in resumed.summary.items() if name != "seconds"}
    assert same == {name: value for name, value in whole.summary.items() if name != "seconds"}
    assert selffl.load(tmp_path / "a", trusted=True).clients == whole.clients


def test_metrics_may_be_passed_again_and_then_nothing_is_unpickled(tmp_path):
    selffl.train(model(), federation(), "local", metrics=torchs(), out=tmp_path / "a", **OPTIONS)
    (tmp_path / "a" / "module.pt").unlink()
    with pytest.raises(ConfigError, match="has its own metrics; pass metrics as well, or leave out model"):
        selffl.load(tmp_path / "a", model=model())
    with pytest.raises(ConfigError, match="the metrics are f1; expected f1, auroc, logloss, zeros, as the run in"):
        selffl.load(tmp_path / "a", model=model(), metrics={"f1": share_of_class_0})
    turned = torchs() | {"logloss": mean_log_loss}
    with pytest.raises(ConfigError, match=r"metric 'logloss' has higher_is_better=True; expected False, as in the run"):
        selffl.load(tmp_path / "a", model=model(), metrics=turned)
    run = selffl.load(tmp_path / "a", model=model(), metrics=dict(reversed(torchs().items())))
    assert list(run.config.own_metrics) == list(torchs())
    assert run.config.metrics == (*TASK, *torchs())
    assert run.evaluate().weighted("f1", "personal") == pytest.approx(run.summary["weighted_f1"])
    with pytest.raises(CheckpointError, match=r"holds no module\.pt"):
        selffl.load(tmp_path / "a", trusted=True)


def test_what_cannot_be_pickled_is_said_before_training(tmp_path):
    with pytest.raises(CheckpointError, match="the module, loss, method or metrics cannot be pickled"):
        selffl.train(model(), federation(), "local", metrics={"one": lambda *_: 1.0}, out=tmp_path / "a", **OPTIONS)
    assert selffl.train(model(), federation(), "local", metrics={"one": lambda *_: 1.0}, **OPTIONS)


def test_a_folder_of_before_there_were_metrics_is_read(tmp_path):
    selffl.train(model(), federation(), "fedavg", out=tmp_path / "a", **OPTIONS)
    path = tmp_path / "a" / "config.json"
    content = json.loads(path.read_text())
    for name in ("own_metrics", "optimiser"):
        del content["config"][name]
    path.write_text(json.dumps(content))
    run = selffl.load(tmp_path / "a")
    assert run.config.own_metrics == {}
    assert run.config.optimiser == selffl.algorithms.SGD()


# ----------------------------------------------------------------------------------------------------- what is refused


def fails(outputs, labels):
    raise KeyError("no such thing\non two lines")


def late(outputs, labels):
    """Fails for the first client of 12 rows or fewer, which is not the first of all."""
    if len(labels) < 12:
        raise ValueError("too few")
    return 1.0


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"bad": fails}, r"^metric 'bad' fails for client 'site 0' \(KeyError: 'no such thing.*shape \(12, 3\)"),
        ({"bad": late}, r"^metric 'bad' fails for client 'site \d' \(ValueError: too few\); expected one number of"),
        ({"many": lambda outputs, _: outputs.mean(0)}, r"'many' of client 'site 0' is a tensor of shape \(3,\)"),
        ({"none": lambda *_: None}, "metric 'none' of client 'site 0' is None; expected one number"),
        ({"text": lambda *_: "good"}, "metric 'text' of client 'site 0' is 'good'; expected one number"),
        ({"f1": torchmetrics.F1Score("binary")}, "metric 'f1' fails for client 'site 0' .RuntimeError"),
        ({"f1": torchmetrics.AUROC}, r"a metric is the class AUROC; expected a function or an instance, AUROC\(…\)"),
        ({"f1": 3}, r"a metric is 3; expected a function \(outputs, labels\) -> number"),
        ({"accuracy": fails}, "a metric is called 'accuracy', as something else in a run's records is; rename it"),
        ({"global_f1": fails}, "a metric is called 'global_f1', as something else"),
        ({"after_5_f1": fails}, "a metric is called 'after_5_f1', as something else"),
        ({"with_classes_f1": fails}, "a metric is called 'with_classes_f1', as something else"),
        ({"num_train": fails}, "a metric is called 'num_train', as something else"),
        ({"f1 score": fails}, "a metric is called 'f1 score'; expected letters, digits and underscores"),
        ({3: fails}, "a metric is called 3; expected letters"),
        ([fails], "metrics is a list; expected a dictionary, such as {'f1': function}"),
    ],
)  # fmt: skip
def test_metrics_that_cannot_work(metrics, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as error:
        selffl.train(model(), federation(), "local", metrics=metrics, **OPTIONS)
    assert "\n" not in str(error.value)


def test_a_metric_that_fails_at_once_does_so_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError):
        selffl.train(model(), federation(), "local", metrics={"bad": fails}, out=tmp_path / "a", **OPTIONS)
    assert not (tmp_path / "a").exists()


def test_every_column_of_a_run_is_a_name_that_is_taken():
    """A metric of that name would write over it."""
    run = selffl.train(model(), federation().with_clusters([0, 1] * 5), "self-fl", **OPTIONS | {"fine_tune": (1,)})
    columns = {*run.history[-1], *run.clients[0]}
    assert {"predicted_gain", "num_local_steps", "inter_variance"} <= columns
    for name in columns:
        with pytest.raises(ConfigError, match="as something else"):
            own_metrics({name: fails})


def test_warnings_of_a_metric_reach_the_user():
    def chatty(outputs, labels):
        warnings.warn("by the way", UserWarning, stacklevel=1)
        return math.nan

    with pytest.warns(UserWarning, match="by the way"):
        run = selffl.train(model(), federation(), "local", metrics={"chatty": chatty}, **OPTIONS)
    assert run.summary["weighted_chatty"] is None
    assert {row["chatty"] for row in run.clients} == {None}


class Counting:
    """A metric with a state that says in its own way where it is."""

    device = "cpu"

    def reset(self):
        self.rows = 0

    def update(self, outputs, labels):
        self.rows += len(labels)

    def compute(self):
        return self.rows


def test_a_metric_with_a_state_need_not_be_a_module_of_torchs():
    fed = federation()
    run = selffl.train(model(), fed, "fedavg", metrics={"rows": Counting()}, **OPTIONS)
    assert [row["rows"] for row in run.clients] == [n or None for n in fed.test.num_examples.tolist()]


def test_whether_higher_is_better():
    with pytest.raises(ConfigError, match="higher_is_better is 'no'; expected true, false or none"):
        Metric(mean_log_loss, "no")
    assert Metric(mean_log_loss).higher_is_better is True
    assert Metric(torchmetrics.MeanSquaredError()).higher_is_better is False
    assert Metric(torchmetrics.AUROC("binary")).higher_is_better is True
    assert Metric(torchmetrics.MeanMetric()).higher_is_better is True  # which does not say
    assert Metric(torchmetrics.AUROC("binary"), higher_is_better=False).higher_is_better is False
