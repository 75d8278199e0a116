"""A run that has ended hands out the models after its closing visit, whichever way they are asked for."""

import numpy as np
import pytest
import torch

import selffl
from selffl.data import load as load_data
from selffl.runs.folder import read_records
from selffl.training.flat import FlatModel

SETTINGS = {"participation": 0.4, "evaluate_every": 2, "learning_rate": 0.05, "batch_size": 5}


@pytest.fixture(scope="module")
def fed():
    return load_data("digits", num_clients=8, seed=2, test_fraction=0.3)


def stopped(fed, out, rounds=6, last=4):
    """A run that is interrupted after a round that has been evaluated and saved."""

    def stop(row):
        if row["round"] == last + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        selffl.train("softmax", fed, "self-fl-auto", rounds=rounds, out=out, on_round=stop, **SETTINGS)
    return selffl.load(out)


def params_of(module):
    return FlatModel(module).params


def handed_out(run):
    return torch.stack([params_of(run.personal_model(client)) for client in run.federation.clients])


def by_engine(run, *, is_over):
    one = [torch.tensor([m]) for m in range(run.federation.num_clients)]
    return torch.cat([run._session.engine.personal(run._state, m, is_over=is_over) for m in one])


def accuracies(fed, models):
    """Of each client's model on its own test rows."""
    found = []
    for m, own in enumerate(models):
        low, high = fed.test.offset[m : m + 2].tolist()
        scores = fed.test.features[low:high].flatten(1) @ own[:640].reshape(10, 64).T + own[640:]
        found.append(float((scores.argmax(1) == fed.test.labels[low:high]).double().mean()))
    return found


def test_everybody_who_asks_for_a_model_of_a_run_that_has_ended_has_the_same(fed, tmp_path):
    run = selffl.train("softmax", fed, "self-fl-auto", rounds=3, out=tmp_path / "run", **SETTINGS)
    closed, before = by_engine(run, is_over=True), by_engine(run, is_over=False)
    has_trained = run._state.num_rounds > 0
    assert not has_trained.all()
    assert (closed != before).any(-1).equal(has_trained)
    assert torch.equal(closed[~has_trained], params_of(run.global_model()).expand(int((~has_trained).sum()), -1))
    assert torch.equal(handed_out(run), closed)
    assert torch.equal(handed_out(selffl.load(tmp_path / "run")), closed)
    assert torch.equal(handed_out(selffl.resume(tmp_path / "run")), closed)
    run.export(tmp_path / "models.safetensors")
    opened = selffl.PersonalModels(tmp_path / "models.safetensors")
    assert torch.equal(torch.stack([params_of(opened.model(client)) for client in fed.clients]), closed)
    expected = accuracies(fed, closed)
    assert [row["accuracy"] for row in run.clients] == expected
    assert run.evaluate().of_clients("accuracy", "personal").tolist() == expected
    assert expected != accuracies(fed, before)
    owner = np.repeat(list(fed.clients), fed.test.num_examples.tolist())
    right = np.array(run.predict(fed.test.features, client=owner)["prediction"]) == fed.test.labels.numpy()
    assert [right[owner == client].mean() for client in fed.clients] == pytest.approx(expected)
    m = int(has_trained.nonzero()[0])
    low, high = fed.test.offset[m : m + 2].tolist()
    scores = fed.test.features[low:high].flatten(1) @ closed[m, :640].reshape(10, 64).T + closed[m, 640:]
    chances = run.probabilities(fed.clients[m], moderated=False)
    torch.testing.assert_close(chances, scores.double().softmax(-1), rtol=1e-4, atol=1e-6)


def test_a_run_that_was_interrupted_has_models_without_a_closing_visit_and_when_it_ends_with_it(fed, tmp_path):
    run = stopped(fed, tmp_path / "run")
    assert run._state.round_number == 4
    before = by_engine(run, is_over=False)
    assert torch.equal(handed_out(run), before)
    assert not torch.equal(by_engine(run, is_over=True), before)
    of_round = next(row for row in run.history if row["round"] == 4)
    sizes = fed.test.num_examples.double()
    expected = float((torch.tensor(accuracies(fed, before), dtype=torch.float64) * sizes).sum() / sizes.sum())
    assert of_round["weighted_accuracy"] == pytest.approx(expected)
    ended = selffl.resume(tmp_path / "run")
    whole = selffl.train("softmax", fed, "self-fl-auto", rounds=6, **SETTINGS)
    assert torch.equal(handed_out(ended), by_engine(whole, is_over=True))
    assert torch.equal(handed_out(ended), handed_out(whole))


@pytest.mark.parametrize(("first", "evaluated"), [(4, True), (3, False)])
def test_a_run_that_goes_on_for_longer_has_the_history_of_one_that_was_as_long(first, evaluated, fed, tmp_path):
    """The scores of the round that it had ended with, which a closing visit had made better, are measured anew."""

    def without_time(rows):
        return [{name: cell for name, cell in row.items() if name != "seconds"} for row in rows]

    options = SETTINGS | {"evaluate_train": True}
    short = selffl.train("softmax", fed, "self-fl-auto", rounds=first, out=tmp_path / "run", **options)
    whole = selffl.train("softmax", fed, "self-fl-auto", rounds=6, out=tmp_path / "whole", **options)
    run = selffl.resume(tmp_path / "run", rounds=6)
    assert without_time(run.history) == without_time(whole.history)
    found, expected = read_records(tmp_path / "run"), read_records(tmp_path / "whole")
    assert without_time(found.history) == without_time(expected.history)
    assert torch.equal(handed_out(run), handed_out(whole))
    ended = short.history[-1]["weighted_accuracy"]
    assert (run.history[first - 1]["weighted_accuracy"] is not None) == evaluated
    assert ended != run.history[first - 1]["weighted_accuracy"]
