"""Which classes rows got and how sure models were, against a loop over personal models and rows."""

import collections

import pytest
import torch
from torch import nn

import selffl
from selffl.data import load
from selffl.data.federation import Federation
from selffl.runs.class_answers import ClassAnswers, count_answers

SHORT = {"rounds": 2, "participation": 1.0, "learning_rate": 0.1, "evaluate_every": 1}


def counted_by_hand(run, probabilities):
    """Rows by client, class, answer and tenth of confidence, one row at a time."""
    test, found = run.federation.test, collections.Counter()
    names = run.federation.classes or range(20)
    for place, client in enumerate(run.federation.clients):
        model = run.personal_model(client)
        for row in range(int(test.offset[place]), int(test.offset[place + 1])):
            with torch.no_grad():
                chances = probabilities(model(test.features[row : row + 1])[0])
            answer = int(chances.argmax())
            tenth = min(int(10 * float(chances[answer])), 9)
            found[client, names[int(test.labels[row])], names[answer], tenth] += 1
    return found


def counted(rows):
    found = collections.Counter()
    for row in rows:
        found[row["client"], row["class"], row["answer"], min(int(10 * row["confidence"]), 9)] += row["num_test"]
    return found


def two_classes(num_outputs):
    draw = torch.Generator().manual_seed(1)
    features = torch.randn(60, 4, generator=draw)
    labels = (features[:, 0] + 0.5 * torch.randn(60, generator=draw) > 0).long()
    labels = labels if num_outputs == 2 else labels.float().unsqueeze(1)
    fed = Federation.from_arrays(features.numpy(), labels.numpy(), torch.arange(60).numpy() % 3)
    torch.manual_seed(0)
    loss = nn.functional.cross_entropy if num_outputs == 2 else nn.functional.binary_cross_entropy_with_logits
    return selffl.train(nn.Linear(4, num_outputs), fed, "ditto", loss=loss, **SHORT)


def test_classes():
    run = selffl.train("softmax", load("digits", num_clients=4, seed=0), "ditto", **SHORT)
    assert counted(run.answers) == counted_by_hand(run, lambda scores: scores.softmax(-1))
    assert {type(row["class"]) for row in run.answers} == {int}


@pytest.mark.parametrize("num_outputs", [1, 2])
def test_two_classes(num_outputs):
    run = two_classes(num_outputs)

    def probabilities(scores):
        return scores.softmax(-1) if num_outputs == 2 else torch.cat([(-scores).sigmoid(), scores.sigmoid()])

    assert counted(run.answers) == counted_by_hand(run, probabilities)


def test_confidence_is_the_mean_of_a_cell():
    found = ClassAnswers(torch.tensor([1, 1, 0]), torch.tensor([0.91, 0.97, 0.62], dtype=torch.float64))
    rows = count_answers(found, torch.tensor([1, 1, 1]), torch.tensor([0, 3]), ["a"], ["no", "yes"])
    assert rows == [
        {"client": "a", "class": "yes", "answer": "no", "confidence": 0.62, "num_test": 1},
        {"client": "a", "class": "yes", "answer": "yes", "confidence": 0.94, "num_test": 2},
    ]


def test_values_have_none():
    features = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    clients = torch.arange(30).numpy() % 3
    fed = Federation.from_arrays(features.numpy(), features.sum(1, keepdim=True).numpy(), clients)
    assert selffl.train(nn.Linear(2, 1), fed, "fedavg", **SHORT).answers == []


def test_they_are_those_of_the_end(tmp_path):
    """Kept with the run, read again, and gone while a run that has been extended is on its way."""
    fed = load("digits", num_clients=3, seed=0)
    run = selffl.train("softmax", fed, "fedavg", out=tmp_path / "run", **SHORT)
    expected = counted(run.answers)
    assert sum(expected.values()) == int(fed.test.num_rows)
    again = selffl.load(tmp_path / "run").answers
    assert [{name: float(cell) for name, cell in row.items()} for row in again] == run.answers
    run.save(tmp_path / "copy")
    assert (tmp_path / "copy" / "answers.csv").read_text() == (tmp_path / "run" / "answers.csv").read_text()

    class StopError(Exception):
        pass

    def stop(row):
        if row["round"] == 4:
            raise StopError

    with pytest.raises(StopError):
        selffl.resume(tmp_path / "run", rounds=6, on_round=stop)
    assert not (tmp_path / "run" / "answers.csv").exists()
    longer = selffl.resume(tmp_path / "run")
    assert counted(longer.answers) == counted_by_hand(longer, lambda scores: scores.softmax(-1)) != expected
