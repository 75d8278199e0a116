"""The global model with each client's class frequencies: against a plain loop, and where there are none."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import selffl
from selffl.data import load as load_data
from selffl.errors import ConfigError
from selffl.reports import page, sentences
from selffl.reports.collect import collect
from selffl.runs.folder import read_config, read_records

FAST = {"rounds": 6, "participation": 0.5, "evaluate_every": 3}
CLASSES = "global_with_classes_"


@pytest.fixture(scope="module")
def fed():
    return load_data("digits", num_clients=12, test_fraction=0.3, seed=1)


def few_classes(rows=30, classes=3, seed=0, label=lambda y: y):
    """Six clients with two of the classes each, one much more often than the other."""
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(6), rows)
    y = (client + (rng.random(len(client)) < 0.2)) % classes
    x = rng.normal(size=(len(client), 3)) + np.eye(classes, 3)[y]
    return selffl.Federation.from_arrays(x.astype(np.float32), label(y), client, 0.3)


def linear(outputs=3, bias=True):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(3, outputs, bias=bias)


def rows_of(rows, number):
    low, high = rows.offset[number : number + 2].tolist()
    return rows.features[low:high], rows.labels[low:high]


def by_hand(fed, num_classes):
    """log(own frequency / everybody's) of each client and class, one number at a time."""
    held = [[int(label) for label in rows_of(fed.train, number)[1]] for number in range(fed.num_clients)]
    everybody = [label for own in held for label in own]
    pi = [everybody.count(label) / len(everybody) for label in range(num_classes)]
    rates = [np.mean([a == b for a, b in itertools.combinations(own, 2)]) for own in held if len(own) > 1]
    chance = sum(p * p for p in pi)
    rho = min(max((np.mean(rates) - chance) / (1 - chance), 0.0), 0.99)
    alpha = (1 - rho) / rho
    return [
        [math.log((own.count(label) + alpha * p) / (len(own) + alpha) / p) if p else 0.0 for label, p in enumerate(pi)]
        for own in held
    ]


def right_by_hand(run, fed, shifts):
    """Right answers of each client, with the shifts added to the scores of the global model."""
    found = []
    for number, shift in enumerate(shifts):
        x, y = rows_of(fed.test, number)
        with torch.no_grad():
            scores = run.global_model()(x).double().numpy() + np.array(shift)
        found.append((int((scores.argmax(1) == y.numpy()).sum()), len(y)))
    return found


# ---------------------------------------------------------------------------------------------------------- by a loop


@pytest.mark.parametrize("method", ["fedavg", "ditto", "self-fl-auto"])
def test_the_scores_are_those_of_log_frequencies_added_by_hand(method, fed):
    run = selffl.train("softmax", fed, method, class_frequencies=True, **FAST)
    counted = right_by_hand(run, fed, by_hand(fed, 10))
    accuracies = [right / rows for right, rows in counted]
    largest = int(fed.train.num_examples.argmax())  # 12 clients: a tenth is one
    found = {part: run.summary[f"{CLASSES}{part}_accuracy"] for part in ("weighted", "top10", "worst10")}
    assert found["weighted"] == sum(right for right, _ in counted) / sum(rows for _, rows in counted)
    assert (found["top10"], found["worst10"]) == (accuracies[largest], min(accuracies))
    assert [row[f"{CLASSES}accuracy"] for row in run.clients] == accuracies
    assert found["weighted"] > run.summary["global_accuracy"] + 0.02  # and that is worth something


def test_fine_tuning_starts_from_there(fed):
    run = selffl.train(
        "softmax", fed, "fedavg", class_frequencies=True, fine_tune=(2, 5), batch_size=1000, learning_rate=0.5, **FAST
    )
    shifts, right, log_loss = by_hand(fed, 10), 0, 0.0
    for number in range(fed.num_clients):
        model = run.global_model()
        with torch.no_grad():
            model.bias += torch.tensor(shifts[number])
        task = run._session.source.task(torch.tensor([number]), 7)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
        for draw in range(5):
            x, y = (part[0] for part in task.batch(draw, torch.tensor([0])))
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()
        x, y = rows_of(fed.test, number)
        with torch.no_grad():
            right += int((model(x).argmax(1) == y).sum())
            log_loss += float(nn.functional.cross_entropy(model(x), y, reduction="sum"))
    total = len(fed.test.labels)
    assert run.summary[f"{CLASSES}after_5_weighted_accuracy"] == pytest.approx(right / total, abs=1.5 / total)
    assert run.summary[f"{CLASSES}after_5_weighted_log_loss"] == pytest.approx(log_loss / total, rel=1e-4)
    # Neither the shifted model nor the fine-tuned one alone.
    others = [f"{CLASSES}weighted_log_loss", f"{CLASSES}after_2_weighted_log_loss", "global_after_5_weighted_log_loss"]
    assert all(abs(run.summary[name] - log_loss / total) > 1e-3 for name in others)


def test_one_score_for_two_classes_is_shifted_by_the_log_odds():
    fed = few_classes(classes=2)
    run = selffl.train(linear(1), fed, "fedavg", class_frequencies=True, **FAST)
    expected = []
    for number, (of_zero, of_one) in enumerate(by_hand(fed, 2)):
        with torch.no_grad():
            expected += (run.global_model()(rows_of(fed.test, number)[0]).reshape(-1) + of_one - of_zero).tolist()
    assert run.evaluate(class_frequencies=True).numbers["global+classes"].tolist() == pytest.approx(expected, abs=1e-5)
    assert f"{CLASSES}weighted_auc" in run.summary


def test_a_class_that_nobody_has_is_left_alone():
    """Four scores and three classes: no number is lost, and nothing is added to the fourth."""
    fed, shifts = few_classes(), by_hand(few_classes(), 4)
    run = selffl.train(linear(4), fed, "fedavg", class_frequencies=True, fine_tune=(2,), **FAST)
    assert [shift[3] for shift in shifts] == [0.0] * 6
    counted = right_by_hand(run, fed, shifts)
    assert [row[f"{CLASSES}accuracy"] for row in run.clients] == [right / rows for right, rows in counted]
    found = run.evaluate(class_frequencies=True)
    losses = []
    for number, shift in enumerate(shifts):
        x, y = rows_of(fed.test, number)
        with torch.no_grad():
            scores = run.global_model()(x).double() + torch.tensor(shift, dtype=torch.float64)
        losses += nn.functional.cross_entropy(scores, y, reduction="none").tolist()
    assert found.log_losses["global+classes"].tolist() == pytest.approx(losses, rel=1e-4, abs=1e-5)
    assert run.summary[f"{CLASSES}after_2_weighted_log_loss"] is not None


def test_nothing_is_added_where_there_is_one_class_or_one_row_each():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 3)).astype(np.float32)
    one_class = selffl.Federation.from_arrays(x, np.zeros(24, dtype=np.int64), np.arange(24) % 4, 0.5)
    one_row = selffl.Federation.from_arrays(x, np.arange(24) % 3, np.arange(24) % 12, 0.5)
    assert one_row.train.num_examples.tolist() == [1] * 12
    for fed in (one_class, one_row):
        found = selffl.train(linear(), fed, "fedavg", **FAST).evaluate(class_frequencies=True)
        torch.testing.assert_close(found.log_losses["global+classes"], found.log_losses["global"])


# ---------------------------------------------------------------------------------------------- beside everything else


def test_nothing_else_changes_and_only_the_last_round_has_them():
    fed, options = few_classes(), FAST | {"fine_tune": (2,)}
    plain = selffl.train(linear(), fed, "ditto", **options)
    run = selffl.train(linear(), fed, "ditto", class_frequencies=True, chunk_size=4, **options)
    for row, other in ((plain.summary, run.summary), *zip(plain.clients, run.clients, strict=True)):
        assert {name: pytest.approx(row[name]) for name in row if name != "seconds"} == {
            name: other[name] for name in row if name != "seconds"
        }
        assert {name for name in other.keys() - row.keys() if not name.startswith(CLASSES)} == set()
    assert [row[f"{CLASSES}weighted_accuracy"] is not None for row in run.history] == [False] * 5 + [True]
    again = plain.evaluate(fine_tune=(2,), class_frequencies=True).scores()
    assert again == pytest.approx({name: run.summary[name] for name in again})


def test_folders_and_reports_have_them(tmp_path, fed):
    def stop(row):
        if row["round"] == 4:
            raise KeyboardInterrupt

    options = FAST | {"class_frequencies": True, "fine_tune": (2,)}
    run = selffl.train("softmax", fed, "fedavg", out=tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        selffl.train("softmax", fed, "fedavg", out=tmp_path / "stopped", on_round=stop, **options)
    resumed = selffl.resume(tmp_path / "stopped")
    assert resumed.summary | {"seconds": 0} == run.summary | {"seconds": 0}
    kept = read_records(tmp_path / "whole")
    names = [f"{CLASSES}{middle}{part}_accuracy" for middle in ("", "after_2_") for part in ("weighted", "worst10")]
    assert all(kept.history[-1][name] == run.summary[name] > 0 for name in names)
    columns = [f"{CLASSES}accuracy", f"{CLASSES}after_2_accuracy"]
    assert [[row[name] for name in columns] for row in kept.clients] == [
        [row[name] for name in columns] for row in run.clients
    ]
    assert "class_frequencies=True" in sentences.call(read_config(tmp_path / "whole"))
    page.render(collect([tmp_path / "whole"]))


# ------------------------------------------------------------------------------------------------------------- refused


class Tanh(nn.Linear):
    """A last layer whose bias adds to no score."""

    def forward(self, x):
        return super().forward(x).tanh()


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (linear(bias=False), {}, "Linear ends in no linear layer with a bias; expected labels that are classes"),
        (Tanh(3, 3), {}, "the bias adds to no scores of classes"),
        (linear(), {"loss": nn.CrossEntropyLoss(weight=torch.ones(3))}, "the bias adds to no scores of classes"),
        (linear(1), {"label": lambda y: y + 0.5}, "the bias adds to no scores of classes"),
    ],
)
def test_a_model_or_rows_without_classes_are_refused_in_one_line(module, options, message, tmp_path):
    fed = few_classes(label=options.pop("label", lambda y: y))
    options = FAST | options
    with pytest.raises(ConfigError, match=f"class_frequencies is True, and {message}") as caught:
        selffl.train(module, fed, "fedavg", class_frequencies=True, out=tmp_path / "run", **options)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("Leave class_frequencies out, or change these.")
    assert not (tmp_path / "run").exists()
    run = selffl.train(module, fed, "fedavg", **options)
    assert list(run.evaluate().numbers) == ["personal", "global"]
    with pytest.raises(ConfigError, match=message):
        run.evaluate(class_frequencies=True)
