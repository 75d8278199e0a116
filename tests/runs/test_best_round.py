"""The best round: which it is, on which rows it was chosen, and that it says so."""

import numpy as np
import pytest
import torch
from torch import nn

import selffl
from selffl.errors import ConfigError
from selffl.runs.best_round import best_round

METHOD = selffl.algorithm("local", num_local_steps=5)


def federation(**options):
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(4), 30)
    x = rng.normal(size=(120, 5)).astype(np.float32)
    return selffl.Federation.from_arrays(x, rng.integers(0, 3, 120), client, 0.3, **options)  # noise: no round is best


def trained(fed=None, **options):
    torch.manual_seed(0)
    settings = {"rounds": 6, "participation": 1.0, "learning_rate": 0.5, "evaluate_every": 2, **options}
    return selffl.train(nn.Linear(5, 3), fed or federation(validation_fraction=0.3), METHOD, **settings)


def accuracy(run, rows):
    """Of all rows, by each client's own model, counted by hand."""
    right = 0
    for place, client in enumerate(run.federation.clients):
        first, last = rows.offset[place : place + 2].tolist()
        right += int(
            (run.personal_model(client)(rows.features[first:last].float()).argmax(-1) == rows.labels[first:last]).sum()
        )
    return right / len(rows.labels)


def test_scores_on_validation_rows_are_those_of_runs_that_end_there():
    fed = federation(validation_fraction=0.3)
    run = trained(fed, evaluate_validation=True)
    scored = [row for row in run.history if row["weighted_accuracy"] is not None]
    assert [row["round"] for row in scored] == [2, 4, 6]
    for row in scored:
        shorter = trained(fed, rounds=row["round"])
        assert row["validation_accuracy"] == pytest.approx(accuracy(shorter, fed.validation))
        assert row["weighted_accuracy"] == pytest.approx(accuracy(shorter, fed.test))
    assert run.summary["validation_accuracy"] == scored[-1]["validation_accuracy"]


def test_the_best_round_by_validation_rows_and_by_test_rows():
    run = trained(evaluate_validation=True, rounds=20)
    scored = [row for row in run.history if row["weighted_accuracy"] is not None]
    by_validation, by_test = run.best_round(), run.best_round("test")
    assert by_validation["chosen_on"] == "validation rows"
    assert by_test["chosen_on"] == "test rows"
    assert by_validation["validation_accuracy"] == max(row["validation_accuracy"] for row in scored)
    assert by_test["weighted_accuracy"] == max(row["weighted_accuracy"] for row in scored)
    assert by_validation["round"] != by_test["round"]
    assert by_validation["weighted_accuracy"] <= by_test["weighted_accuracy"]
    rest = run.history[by_test["round"] - 1]
    assert {key: value for key, value in by_test.items() if key != "chosen_on"} == rest


def test_of_losses_the_least_is_best_and_of_equals_the_first():
    run = trained(rounds=10)
    found = run.best_round("test", "log_loss")
    assert found["weighted_log_loss"] == min(
        row["weighted_log_loss"] for row in run.history if row["weighted_log_loss"]
    )
    rows = [{"round": number, "x": score} for number, score in ((1, None), (2, 0.5), (3, 0.7), (4, 0.7))]
    assert best_round(rows, "x", "test rows", higher_is_better=True) == {"round": 3, "chosen_on": "test rows", "x": 0.7}
    assert best_round(rows, "x", "test rows", higher_is_better=False)["round"] == 2


def test_a_metric_of_ones_own_says_which_way_is_better():
    miss = selffl.Metric(lambda outputs, labels: (outputs.argmax(-1) != labels).float().mean(), higher_is_better=False)
    run = trained(metrics={"miss": miss}, rounds=10)
    assert run.best_round("test", "miss")["round"] == run.best_round("test", "accuracy")["round"]


def test_a_run_evaluated_on_validation_rows_chooses_on_these():
    run = trained(evaluate_on="validation")
    assert run.best_round()["chosen_on"] == "validation rows"
    with pytest.raises(
        ConfigError, match=r"^the run was evaluated on validation rows alone; expected test rows to choo"
    ):
        run.best_round("test")


def test_it_is_the_same_after_loading_and_resuming(tmp_path):
    whole = trained(evaluate_validation=True)
    trained(evaluate_validation=True, rounds=4, out=tmp_path / "run")
    selffl.resume(tmp_path / "run", rounds=6)
    ours = selffl.load(tmp_path / "run").best_round()
    theirs = whole.best_round()
    assert {key: value for key, value in ours.items() if key != "seconds"} == {
        key: value for key, value in theirs.items() if key != "seconds"
    }


@pytest.mark.parametrize(
    ("options", "asked", "message"),
    [
        ({}, (), r"the run was evaluated on test rows alone; expected validation rows .*with evaluate_validation=True"),
        ({}, ("tset",), r"by is 'tset'; expected 'test' or 'validation'\."),
        ({}, ("test", "f1"), r"unknown metric 'f1'; expected one of"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked(options, asked, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        trained(**options).best_round(*asked)


def test_validation_rows_that_are_not_there_are_missed_before_training():
    with pytest.raises(ConfigError, match=r"^the federation has no validation rows; make it with"):
        trained(federation(), evaluate_validation=True)
    with pytest.raises(
        ConfigError, match=r"^evaluate_validation is True, and the last run trains on all training rows;"
    ):
        selffl.tune(nn.Linear(5, 3), federation(), "ditto", evaluate_validation=True)


def of_client(run, rows, place):
    """Accuracy of one client's own model, counted by hand."""
    first, last = rows.offset[place : place + 2].tolist()
    model = run.personal_model(run.federation.clients[place])
    return float((model(rows.features[first:last].float()).argmax(-1) == rows.labels[first:last]).float().mean())


def test_each_client_has_its_own_best_round_by_its_own_validation_rows():
    fed = federation(validation_fraction=0.3)
    run = trained(fed, evaluate_validation=True)
    shorter = {number: trained(fed, rounds=number) for number in (2, 4, 6)}
    chosen = []
    for place, row in enumerate(run.clients):
        found = {number: of_client(other, fed.validation, place) for number, other in shorter.items()}
        best = max(found, key=lambda number: (round(found[number], 6), -number))  # the first of equals
        assert row["best_round"] == best
        assert row["validation_accuracy"] == pytest.approx(found[best])
        assert row["in_best_round_accuracy"] == pytest.approx(of_client(shorter[best], fed.test, place))
        chosen.append(best)
    assert len(set(chosen)) > 1
    assert "best_round" not in trained(fed).clients[0]


def test_best_rounds_are_those_of_a_run_that_was_not_interrupted(tmp_path):
    fed = federation(validation_fraction=0.3)
    whole = trained(fed, evaluate_validation=True, rounds=10)

    def stop(row):
        if row["round"] == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(fed, evaluate_validation=True, rounds=10, out=tmp_path / "run", on_round=stop)
    resumed = selffl.resume(tmp_path / "run")
    names = ("best_round", "validation_accuracy", "in_best_round_accuracy", "in_best_round_log_loss")
    for row, other in zip(resumed.clients, whole.clients, strict=True):
        assert [row[name] for name in names] == [other[name] for name in names]
