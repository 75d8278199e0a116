"""The method of CONTRIBUTING.md sits the common exam, trains, resumes and exports."""

import itertools

import pytest
import test_exam
import torch

import selffl
from selffl.algorithms import ALGORITHMS
from selffl.data import load

EXAM = {
    name: exam
    for name, exam in vars(test_exam).items()
    if name.startswith("test_") and "variant" in exam.__code__.co_varnames[: exam.__code__.co_argcount]
}


@pytest.fixture
def method(worked_file, monkeypatch):
    kind = worked_file("Adding a method", "interpolation").Interpolation
    monkeypatch.setitem(ALGORITHMS, kind.name, kind)
    monkeypatch.setitem(test_exam.VARIANTS, kind.name, (kind.name, {"num_local_steps": 3}))
    return kind


def other_arguments(exam):
    """Every combination of an exam's arguments besides the method."""
    marks = [mark.args for mark in exam.pytestmark if mark.name == "parametrize" and mark.args[0] != "variant"]
    names = [names for names, _ in marks]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(values for _, values in marks))]


def test_the_exam_is_whole():
    assert len(EXAM) >= 12


@pytest.mark.parametrize("name", EXAM)
def test_it_passes_the_common_exam(name, method):
    for arguments in other_arguments(EXAM[name]):
        EXAM[name](variant=method.name, **arguments)


def test_it_trains_resumes_and_exports(method, tmp_path):
    fed = load("digits", num_clients=6, seed=0)
    options = {"participation": 0.5, "learning_rate": 0.05, "seed": 1}
    whole = selffl.train("softmax", fed, method(num_local_steps=4), rounds=4, **options)
    part = selffl.train("softmax", fed, method(num_local_steps=4), rounds=2, out=tmp_path / "run", **options)
    assert part.summary["algorithm"] == "interpolation"
    resumed = selffl.resume(tmp_path / "run", rounds=4)
    resumed.export(tmp_path / "models.safetensors")
    exported = selffl.PersonalModels(tmp_path / "models.safetensors")
    for client in fed.clients:
        expected = list(whole.personal_model(client).parameters())
        for models in (resumed.personal_model(client), exported.model(client)):
            assert all(map(torch.equal, models.parameters(), expected))


def test_the_share_moves_between_fedavg_and_training_alone(method):
    fed = load("digits", num_clients=4, seed=0)

    def params(chosen):
        run = selffl.train("softmax", fed, chosen, rounds=3, participation=1.0, seed=2)
        return torch.stack([torch.cat([p.flatten() for p in run.personal_model(k).parameters()]) for k in fed.clients])

    assert torch.equal(params(method(share=0.0)), params("fedavg"))
    torch.testing.assert_close(params(method(share=1.0)), params("local"))
    assert not torch.allclose(params(method(share=0.5)), params("fedavg"))
