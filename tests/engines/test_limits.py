"""Client-level privacy: what a client sends is bounded, for every method, and no client moves sums beyond the noise."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import selffl
from selffl.algorithms import ALGORITHMS, algorithm
from selffl.algorithms.averaging import ModelUpload
from selffl.algorithms.records import map_tensors, tensors_of
from selffl.data.digits import digits
from selffl.engines.limits import PrivacyOptions, SumLimits
from selffl.engines.rounds import GatheredUploads
from selffl.errors import ConfigError

BOUNDS = {"clip": 0.05, "max_weight": 2.0}
TRAINED = {"rounds": 2, "participation": 0.5, "seed": 1, "batch_size": 5}
ADDING = [name for name in ALGORITHMS if algorithm(name).uploads_add and algorithm(name).is_federated]
OTHERS = [name for name in ALGORITHMS if name not in ADDING]


@pytest.fixture(scope="module")
def rows():
    return digits(num_clients=8, seed=1)


def network(name="fedavg"):
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(6)] if algorithm(name).batch_norm == "kept" else []
    return nn.Sequential(nn.Linear(64, 6), *norm, nn.ReLU(), nn.Linear(6, 10))


def uploads_of(name, rows, short, **settings):
    """What cohorts of a short run have sent, as the server sums it."""
    found, add = [], GatheredUploads.add

    def watched(self, clients, upload):
        found.append(upload)
        return add(self, clients, upload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GatheredUploads, "add", watched)
        run = selffl.train(network(name), rows, short(name), **TRAINED | settings)
    return found, run


@pytest.fixture(scope="module")
def free(rows, short):
    """A function that gives what a cohort sends in its first round where nothing bounds it, each method's once."""
    return cache(lambda name: uploads_of(name, rows, short, rounds=1)[0][0])


@pytest.mark.parametrize("name", ADDING)
def test_every_field_of_every_client_is_within_its_limit(name, rows, short, free):
    method, options = algorithm(name), PrivacyOptions(**BOUNDS)
    found, run = uploads_of(name, rows, short, **BOUNDS)
    assert len(found) == 2
    for upload in found:
        limits = SumLimits(method, options).limits(upload)
        sent = tensors_of(upload)
        weights = {limit.weight for limit in limits.values()} - {None}
        assert sent.keys() == limits.keys() | weights | set(method.may_be_unknown)  # nothing travels without a limit
        for name, limit in limits.items():
            heavy = 1.0 if limit.weight is None or method.has_equal_weights() else BOUNDS["max_weight"]
            length = sent[name].reshape(len(sent[name]), -1).double().norm(dim=1)
            assert (length <= heavy * limit.most * (1 + 1e-5)).all(), name
            assert limit.is_signed or (sent[name] >= 0).all(), name
        for weight in weights:
            assert (sent[weight] <= BOUNDS["max_weight"]).all()
        for name in method.may_be_unknown:
            assert sent[name].isnan().all()  # recorded by client: withheld
    # And it binds: without bounds clients send more.
    assert free(run.config.algorithm).change.norm() > found[0].change.norm()


def hostile(upload, generator):
    """Two uploads as unlike as can be made up: opposite, of any length, some fields empty, weights from none to all."""

    def made(tensor):
        numbers = torch.randn(2, *tensor.shape[1:], generator=generator, dtype=torch.float64)
        if torch.rand(1, generator=generator) < 0.7:
            numbers[1] = -numbers[0]
        lengths = 10.0 ** (8 * torch.rand(2, *[1] * (tensor.ndim - 1), generator=generator, dtype=torch.float64) - 4)
        is_there = torch.rand(2, *[1] * (tensor.ndim - 1), generator=generator) < 0.8
        return numbers * lengths * is_there

    return map_tensors(made, upload)


@pytest.mark.parametrize("name", ADDING)
def test_replacing_a_client_moves_all_sums_together_by_no_more_than_the_noise_hides(name, free):
    method = algorithm(name)
    limits = SumLimits(method, PrivacyOptions(**BOUNDS, noise_multiplier=1.5))
    upload, generator, largest = free(name), torch.Generator(), 0.0
    generator.manual_seed(0)
    for _ in range(200):
        both = hostile(upload, generator)
        weights = {limit.weight for limit in limits.limits(both).values()} - {None}
        signs = {name for name, limit in limits.limits(both).items() if limit.is_signed}
        ones = {name: torch.ones_like(getattr(both, name)) for name in weights if method.has_equal_weights()}
        rest = {name: each.abs() for name, each in tensors_of(both).items() if name not in signs and name not in ones}
        bounded = limits.bound(replace(both, **ones, **rest))
        moved = 0.0
        for field, scale in limits.scales(map_tensors(lambda t: t.sum(0), bounded)).items():
            part = getattr(bounded, field)
            moved += float(((part[0] - part[1]) / scale).square().sum())
        largest = max(largest, math.sqrt(moved))
    assert 0.2 / 1.5 < largest <= (1 + 1e-9) / 1.5


def test_that_bound_is_reached_with_nothing_to_spare_for_a_weight():
    """Two clients of full weight that pull apart, and one of full weight beside one of none."""
    limits = SumLimits(algorithm("fedavg"), PrivacyOptions(**BOUNDS, noise_multiplier=1.0))
    far = 100 * torch.eye(3, dtype=torch.float64)[:1]
    both = limits.bound(ModelUpload(torch.cat([9 * far, -9 * far]), torch.tensor([9.0, 9.0]).double()))
    scale = limits.scales(map_tensors(lambda t: t.sum(0), both))
    assert ((both.change[0] - both.change[1]) / scale["change"]).norm().item() == pytest.approx(1.0)
    alone = (both.change[0] / scale["change"]).square().sum() + (both.weight[0] / scale["weight"]) ** 2
    assert alone.item() == pytest.approx(1.0)


def test_equal_weights_need_no_noise_and_no_bound():
    limits = SumLimits(algorithm("fedavg-equal"), PrivacyOptions(clip=0.5, noise_multiplier=1.0))
    limits.options.check_method(limits.method)
    assert limits.scales(ModelUpload(torch.zeros(4), torch.tensor(3.0))) == {"change": 1.0}


def test_bounded_fedavg_equals_a_plain_loop(rows):
    """Clip each client's change, cut its weight, average: in numpy, from the changes of clients that train alone."""
    settings = {**TRAINED, "rounds": 1, "participation": 1.0, "dtype": "float64"}
    start = nn.utils.parameters_to_vector(network().parameters()).detach().double().numpy()
    total, weights = 0.0, 0.0
    alone = selffl.train(network(), rows, algorithm("local", num_local_steps=3), **settings)
    for client, count in zip(rows.clients, rows.train.num_examples.tolist(), strict=True):
        own = nn.utils.parameters_to_vector(alone.personal_model(client).parameters()).detach().numpy()
        change, weight = own - start, min(count, 20.0)
        total = total + weight * change * min(1.0, 0.05 / np.linalg.norm(change))
        weights += weight
    found = selffl.train(
        network(), rows, algorithm("fedavg", num_local_steps=3), clip=0.05, max_weight=20.0, **settings
    )
    model = nn.utils.parameters_to_vector(found.global_model().parameters()).detach().numpy()
    np.testing.assert_allclose(model, start + total / weights, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["fedavg", "self-fl-sums", "self-fl-auto"])
def test_it_is_the_same_bits_in_chunks_and_after_a_resume(name, rows, short, tmp_path):
    noisy = {**TRAINED, **BOUNDS, "noise_multiplier": 0.5}
    whole = selffl.train(network(), rows, short(name), **noisy)
    selffl.train(network(), rows, short(name), **{**noisy, "rounds": 1}, chunk_size=2, out=tmp_path / "run")
    resumed = selffl.resume(tmp_path / "run", rounds=2, trusted=True)
    assert resumed.config.noise_multiplier == 0.5
    for name, tensor in tensors_of(whole._state.server).items():
        torch.testing.assert_close(
            tensors_of(resumed._state.server)[name], tensor, equal_nan=True, rtol=1e-5, atol=1e-6
        )
    quiet = selffl.train(network(), rows, short(whole.config.algorithm), **TRAINED, **BOUNDS)
    assert not quiet._state.server.params.equal(whole._state.server.params)


@pytest.mark.parametrize("name", OTHERS)
def test_methods_that_need_single_clients_refuse_it_in_a_line(name, rows, short):
    with pytest.raises(ConfigError, match=r"noise_multiplier is 1, and .* cannot have it: its ") as raised:
        selffl.train(network(), rows, short(name), **TRAINED, **BOUNDS, noise_multiplier=1.0)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("fedavg", {"clip": 1.0}, "clip is 1, and fedavg cannot have it: .* Expected max_weight, too"),
        ("fedavg", BOUNDS | {"robust": "clip"}, "robust is 'clip', which needs single clients"),
        ("fedavg", {"noise_multiplier": 1.0}, "noise_multiplier is 1 without clip"),
        ("fedavg", {"clip": -1.0}, "clip is -1.0; expected a number above 0"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(name, settings, reason, rows):
    with pytest.raises(ConfigError, match=reason) as raised:
        selffl.train(network(), rows, name, **TRAINED, **settings)
    assert "\n" not in str(raised.value)


def test_a_method_that_does_not_say_what_a_field_may_measure_is_refused(rows):
    class Forgetful(type(algorithm("feddbe"))):
        def limits(self, clip, max_weight, upload):
            return {name: limit for name, limit in super().limits(clip, max_weight, upload).items() if name == "change"}

    with pytest.raises(ConfigError, match="does not say what features may measure"):
        selffl.train(network(), rows, Forgetful(num_local_steps=1), **TRAINED, **BOUNDS)


def test_a_client_that_sends_more_is_left_out_by_name(rows, caplog, monkeypatch):
    bound = SumLimits.bound

    def unbounded(self, upload):
        found = bound(self, upload)
        return replace(found, change=torch.cat([10 * found.change[:1], found.change[1:]]))

    monkeypatch.setattr(SumLimits, "bound", unbounded)
    selffl.train(network(), rows, "fedavg", **{**TRAINED, "rounds": 1}, **BOUNDS)
    assert "is left out: the length of change is 1; expected 0 to 0.1." in caplog.text


def test_the_summary_says_what_is_spent(rows, short):
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install 'selffl[privacy]'")
    from selffl.privacy import epsilon

    run = selffl.train(network(), rows, short("fedavg"), **TRAINED, **BOUNDS, noise_multiplier=2.0)
    expected = epsilon(2.0, num_clients=8, participation=0.5, rounds=2, delta=1e-5)
    assert (run.summary["epsilon"], run.summary["delta"]) == (expected, 1e-5)
    assert "epsilon" not in selffl.train(network(), rows, short("fedavg"), **TRAINED).summary


def test_a_run_of_an_earlier_version_has_its_options_among_the_settings():
    from selffl.runs.recipe import Recipe

    made = Recipe(algorithm="self-fl-sums", options={"smoothing": 1.0}).to_json()
    made |= {"options": {"smoothing": 1.0, "clip": 0.7, "max_weight": 1.0, "noise_multiplier": 2.0}}
    for name in BOUNDS:
        del made[name]
    found = Recipe.from_json(made)
    assert (found.clip, found.max_weight, found.noise_multiplier) == (0.7, 1.0, 2.0)
    assert found.options == {"smoothing": 1.0}
