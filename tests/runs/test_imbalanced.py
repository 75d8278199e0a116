"""Scores that cannot flatter: rows of which nearly all are of one class, and features that say nothing."""

import json
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score, log_loss, roc_auc_score
from torch import nn

import selffl
from selffl.runs.evaluation import leading_metric, majority_sentence

FAST = {"rounds": 4, "participation": 1.0, "learning_rate": 0.1, "evaluate_every": 2}


def federation(share, num_classes=2, num_rows=1200, seed=0, kind=np.int64):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_rows, 4)).astype(np.float32)
    y = np.where(rng.random(num_rows) < share, rng.integers(1, num_classes, num_rows), 0)
    return selffl.Federation.from_arrays(x, y.astype(kind), rng.integers(0, 12, num_rows), 0.3, seed=seed)


def outputs_of(run, view):
    """(outputs, labels) of each client's test rows, by the models that a user has."""
    rows, found = run.federation.test, []
    for number, client in enumerate(run.federation.clients):
        low, high = rows.offset[number : number + 2].tolist()
        model = run.personal_model(client) if view == "personal" else run.global_model()
        with torch.no_grad():
            found.append((model(rows.features[low:high]).double(), rows.labels[low:high].numpy()))
    return found


def chances(outputs, how):
    if how == "logit":
        return torch.stack([1 - outputs.sigmoid(), outputs.sigmoid()], 1).numpy()
    return outputs.softmax(1).numpy()


CASES = {
    "three classes": (federation(0.6, 3), lambda: nn.Linear(4, 3), {}),
    "two classes": (federation(0.2), lambda: nn.Linear(4, 2), {}),
    "logit": (
        federation(0.2, kind=np.float32),
        lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)),
        {"loss": nn.functional.binary_cross_entropy_with_logits},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", ["ditto", "fedavg"])
def test_every_score_is_that_of_scikit_learn_on_the_models_own_outputs(case, method):
    fed, model, loss = CASES[case]
    torch.manual_seed(0)
    run = selffl.train(model(), fed, method, **loss, **FAST)
    classes = range(3 if case == "three classes" else 2)
    for view, prefix, whole in (("personal", "", "weighted"), ("global", "global_", "global")):
        pairs = [(chances(outputs, case), labels.astype(int)) for outputs, labels in outputs_of(run, view)]
        for row, (given, labels) in zip(run.clients, pairs, strict=True):
            answers = given.argmax(1)
            assert row[f"{prefix}log_loss"] == pytest.approx(log_loss(labels, given, labels=classes), rel=1e-4)
            expected = balanced_accuracy_score(labels, answers) if len(set(labels)) > 1 else None
            assert row[f"{prefix}balanced_accuracy"] == (None if expected is None else pytest.approx(expected))
        given, labels = (np.concatenate(each) for each in zip(*pairs, strict=True))
        answers = given.argmax(1)
        assert run.summary[f"{whole}_accuracy"] == pytest.approx(accuracy_score(labels, answers))
        assert run.summary[f"{whole}_balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, answers))
        assert run.summary[f"{whole}_log_loss"] == pytest.approx(log_loss(labels, given, labels=classes), rel=1e-4)
        if len(classes) == 2:
            pooled = "pooled_auc" if view == "personal" else "global_pooled_auc"
            assert run.summary[pooled] == pytest.approx(roc_auc_score(labels, given[:, 1]), abs=1e-6)
            assert run.history[-1][pooled] == run.summary[pooled]


def test_the_constant_answer_is_that_of_the_training_rows():
    fed, model, _ = CASES["three classes"]
    run = selffl.train(model(), fed, "local", **FAST)
    train, test = run.federation.train, run.federation.test
    largest = np.bincount(train.labels.numpy()).argmax()
    own_right = federation_right = 0
    for number, row in enumerate(run.clients):
        labels, tested = (rows.labels[rows.offset[number] : rows.offset[number + 1]].numpy() for rows in (train, test))
        own = (tested == np.bincount(labels).argmax()).sum()
        assert row["majority_accuracy"] == pytest.approx(own / len(tested))
        assert row["federation_majority_accuracy"] == pytest.approx((tested == largest).mean())
        own_right, federation_right = own_right + own, federation_right + (tested == largest).sum()
    assert run.summary["majority_accuracy"] == pytest.approx(own_right / len(test.labels))
    assert run.summary["federation_majority_accuracy"] == pytest.approx(federation_right / len(test.labels))
    assert run.summary["largest_class_share"] == pytest.approx((train.labels.numpy() == largest).mean())


def test_a_client_with_one_class_has_no_balanced_accuracy(tmp_path):
    fed = federation(0.015)
    run = selffl.train(nn.Linear(4, 2), fed, "local", out=tmp_path / "run", **FAST)
    counts = fed.class_counts("test")
    for row, held in zip(run.clients, counts.tolist(), strict=True):
        assert (row["balanced_accuracy"] is None) == (row["auc"] is None) == (0 in held)
    assert any(row["balanced_accuracy"] is None for row in run.clients)
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert written["weighted_balanced_accuracy"] == pytest.approx(0.5, abs=0.1)
    assert written["weighted_accuracy"] > 0.95


def test_what_leads_follows_from_the_largest_class():
    plain = {"weighted_accuracy": 0.9, "weighted_balanced_accuracy": 0.5}
    rare = plain | {"largest_class_share": 0.985, "federation_majority_accuracy": 0.98}
    assert leading_metric([plain | {"largest_class_share": 0.8}]) == "accuracy"
    assert leading_metric([rare]) == "balanced_accuracy"
    assert majority_sentence([rare]) == (
        "One class has 98.5 % of the training rows: always answering it gets 98.0 % accuracy."
    )
    assert majority_sentence([plain]) == ""
    # A run of an earlier version has nothing else to be told by; one that has not been evaluated says nothing.
    assert leading_metric([rare, {"weighted_accuracy": 0.9}]) == "accuracy"
    assert leading_metric([{"weighted_accuracy": None}]) is None
    assert leading_metric([{"weighted_accuracy": None, "weighted_error": 1.0}]) == "error"


def test_a_folder_of_before_there_were_these_scores_is_read_and_goes_on(tmp_path):
    fed = federation(0.015)
    selffl.train(nn.Linear(4, 2), fed, "fedavg", out=tmp_path / "run", **FAST)
    place = tmp_path / "run"
    new = ("balanced_accuracy", "log_loss", "pooled_auc", "majority_accuracy", "largest_class_share")
    for name in ("history.csv", "clients.csv"):
        lines = [line.split(",") for line in (place / name).read_text().splitlines()]
        keep = [i for i, column in enumerate(lines[0]) if not column.endswith(new)]
        (place / name).write_text("\n".join(",".join(line[i] for i in keep) for line in lines) + "\n")
    summary = json.loads((place / "summary.json").read_text())
    (place / "summary.json").write_text(json.dumps({k: v for k, v in summary.items() if not k.endswith(new)}))
    config = json.loads((place / "config.json").read_text())
    config["config"]["metrics"] = ["accuracy", "auc"]
    (place / "config.json").write_text(json.dumps(config))
    old = selffl.load(place)
    assert old.summary["weighted_accuracy"] == summary["weighted_accuracy"]
    assert math.isfinite(old.evaluate().weighted("balanced_accuracy", "personal"))
    further = selffl.resume(place, rounds=6)
    assert further.summary["weighted_balanced_accuracy"] is not None
    assert further.history[0].get("weighted_balanced_accuracy") is None
