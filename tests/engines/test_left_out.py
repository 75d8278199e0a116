"""What the engines make of clients that send what nobody can have, and of numbers that would outweigh everybody's."""

from dataclasses import replace

import pytest
import torch

import selffl
from selffl.algorithms import FedAvg, SelfFL, SelfFLAuto
from selffl.data.digits import digits
from selffl.engines.claims import capped_factors
from selffl.errors import DivergedError

LIARS = (2, 5)


def lying(method, change, liars=LIARS):
    """The method with clients that alter what they send: ``change(upload)`` of each of ``liars``."""

    class Lying(type(method)):
        def client_round(self, broadcast, memory, task):
            upload, memory = super().client_round(broadcast, memory, task)
            lie = change(upload)
            is_liar = torch.isin(task.clients, torch.tensor(liars))
            for name, tensor in vars(lie).items():
                honest = getattr(upload, name)
                chosen = is_liar.reshape(-1, *[1] * (honest.ndim - 1))
                upload = replace(upload, **{name: torch.where(chosen, tensor, honest)})
            return upload, memory

    return Lying(**vars(method))


def setting(name, value):
    return lambda upload: replace(upload, **{name: torch.full_like(getattr(upload, name), value)})


@pytest.fixture(scope="module")
def rows():
    return digits(num_clients=8)


def trained(rows, method, **changed):
    return selffl.train("softmax", rows, method, **{"rounds": 3, "participation": 1.0, "seed": 1, **changed})


@pytest.mark.parametrize(
    ("method", "change", "reason"),
    [
        (FedAvg(5), setting("weight", 1e5), "weight is 100000; expected 1 to"),
        (FedAvg(5), setting("change", torch.nan), "change holds NaN or infinity; expected finite numbers."),
        (FedAvg(5), setting("change", 1e30), "change measures 2.54951e+31; expected at most"),
        (SelfFL(initial_steps=5), setting("intra_variance", 1e20), "intra_variance is 1e+20; expected 0 to"),
        (SelfFL(initial_steps=5), setting("intra_variance", -1.0), "intra_variance is -1; expected 0"),
        (SelfFLAuto(5), setting("num_examples", 1e5), "num_examples is 100000; expected 1 to"),
        (SelfFLAuto(5), setting("weight", 1e5), "weight is 100000; expected"),
        (SelfFLAuto(5), setting("deviation_squares", 3e32), "deviation_squares is 3e+32; expected"),
        (SelfFLAuto(5), setting("factor_curvature", -1.0), "the diagonal of factor_curvature is -1; expected 0"),
        (SelfFLAuto(5), setting("class_weights", 1e3), "the sum of class_weights is 10000; expected 0 to"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_impossible_answer_is_left_out_by_name_and_the_round_goes_on(method, change, reason, rows, caplog):
    run = trained(rows, lying(method, change))
    for liar in LIARS:
        assert f"round 1: client {rows.clients[liar]} is left out: {reason}" in caplog.text
    assert [row["clients"] for row in run.history] == [6] * len(run.history)


def test_who_is_left_out_is_as_if_it_had_not_been_there(rows):
    """The global model is the average of the others, at one and at many clients a time."""
    method = lying(FedAvg(5), setting("change", torch.inf))
    models = [trained(rows, method, rounds=1, chunk_size=size)._state.server.params for size in (1, 3, None)]
    assert torch.equal(models[0], models[1])
    torch.testing.assert_close(models[0], models[2])
    uploads = []

    class Heard(FedAvg):
        def client_round(self, broadcast, memory, task):
            upload, memory = super().client_round(broadcast, memory, task)
            uploads.append((broadcast.params[0], upload))
            return upload, memory

    trained(rows, Heard(5), rounds=1, chunk_size=8)
    start, upload = uploads[0]
    rest = [client for client in range(8) if client not in LIARS]
    change = upload.change[rest].double().sum(0) / upload.weight[rest].double().sum()
    torch.testing.assert_close(models[2], (start + change).float())


def test_too_many_impossible_answers_are_divergence(rows):
    method = lying(FedAvg(5), setting("change", torch.nan), liars=range(5))
    expected = (
        r"^5 of 8 clients of fedavg sent what cannot be used in round 1 \(client 0: change .*Lower the learning rate"
    )
    with pytest.raises(DivergedError, match=expected):
        trained(rows, method)


@pytest.mark.parametrize("name", ["disagreements", "difference_squares", "undecided", "temperature", "factor_slope"])
def test_numbers_that_would_outweigh_everybodys_are_held_back(name, rows, caplog):
    """One client of eight says 1e30: c and n_0 stay within what many times another client's number would give."""
    caplog.set_level("INFO")
    honest = trained(rows, SelfFLAuto(5))._state.server
    run = trained(rows, lying(SelfFLAuto(5), setting(name, 1e30), liars=[2]))
    assert f"client {rows.clients[2]} is held back: its {name} is cut to 1000 times the upper quartile" in caplog.text
    found = run._state.server
    assert found.params.isfinite().all()
    assert (found.inter_variance / honest.inter_variance).log2().abs() <= 2 * 3  # a factor of two a round
    assert found.unit / honest.unit < 1e3


def test_what_is_held_back_is_as_long_as_the_quartile_allows():
    numbers = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [0.0, 0.0], [4.0, 0.0], [300.0, 400.0]])
    # Of five lengths that are not 0 (1, 2, 3, 4, 500) the fourth is the upper quartile.
    found = capped_factors([numbers, numbers[:, 0]], [10.0, 100.0], 0)
    assert found.tolist() == [[1.0, 1.0, 1.0, 1.0, 1.0, 40.0 / 500.0], [1.0] * 6]
    assert capped_factors([numbers[[0, 1, 5]]], [10.0], 0).tolist() == [[1.0] * 3]  # nobody is an outlier of three


@pytest.mark.parametrize("value", [1e8, 1e20])
def test_a_variance_beyond_its_models_does_not_rule_the_others(value, rows):
    """Fault: unknown variances are assumed to be the mean of the known, and one client knew first."""
    honest = trained(rows, SelfFL(), rounds=8)
    found = trained(rows, lying(SelfFL(), setting("intra_variance", value), liars=[2]), rounds=8)
    assert found.history[-1]["weighted_accuracy"] > honest.history[-1]["weighted_accuracy"] - 0.03
