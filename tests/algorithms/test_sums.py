"""Self-FL by sums: the server needs the sums alone, close to Self-FL itself, and one client moves them by at most 2."""

import math
from dataclasses import replace

import pytest
import torch
from federations import federation, run, starting_point
from hypothesis import given, settings
from hypothesis import strategies as st

from selffl.algorithms import Population, algorithm
from selffl.algorithms.records import tensors_of
from selffl.algorithms.self_fl_sums import SumsUpload
from selffl.errors import ConfigError

BOUNDS = {"clip": 0.4, "max_weight": 1.5}


def parts(method, num_clients=6, rounds=5, seed=0):
    """A server in the middle of a run, and the next round's cohort with its uploads."""
    source = federation(num_clients, seed=seed)
    _, state, _ = run(method, source, rounds)
    clients = torch.arange(num_clients)
    sent = method.broadcast(state.server, clients)
    upload, _ = method.client_round(sent, state.memory, source.task(clients, rounds + 1))
    return state.server, clients, upload


def test_everybody_is_sent_the_same():
    method = algorithm("self-fl-sums")
    server, clients, _ = parts(method)
    for tensor in tensors_of(method.broadcast(server, clients)).values():
        torch.testing.assert_close(tensor, tensor[:1].expand_as(tensor), rtol=0, atol=0, equal_nan=True)


def test_while_nobody_knows_a_variance_it_is_self_fl():
    """Two rounds of all clients: equal weights, the same spread."""
    source = federation(7)
    ours = run(algorithm("self-fl-sums"), source, 2)[1].server
    plain = run(algorithm("self-fl"), source, 2)[1].server
    torch.testing.assert_close(ours.params, plain.params, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.inter_variance, plain.inter_variance, rtol=1e-10, atol=1e-12)


@given(
    first=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    second=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    angle=st.floats(0, math.pi),
)
def test_replacing_a_client_moves_the_sums_by_at_most_two(first, second, angle):
    """Any two clients at any angle, in the units that the noise is measured in."""
    method = algorithm("self-fl-sums", **BOUNDS, noise_multiplier=1.0)

    def part(weight, length, direction):
        size, heavy = length * method.clip, weight * method.max_weight
        vector = heavy * size * torch.tensor([math.cos(direction), math.sin(direction)], dtype=torch.float64)
        return vector, heavy, heavy * size**2

    moved = 0.0
    for name, ours, theirs in zip(("change", "weight", "square"), part(*first, 0.0), part(*second, angle), strict=True):
        difference = torch.as_tensor(ours - theirs, dtype=torch.float64)
        moved += float((difference / method.noise_scale()[name]).square().sum())
    assert math.sqrt(moved) <= 1.0 + 1e-12  # of the noise, at a multiplier of 1


def test_that_bound_is_reached():
    scale = algorithm("self-fl-sums", **BOUNDS, noise_multiplier=1.0).noise_scale()
    assert 2 * BOUNDS["clip"] * BOUNDS["max_weight"] / scale["change"] == pytest.approx(1.0)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 20), rate=st.floats(1e-4, 5e-3))
def test_what_a_client_sends_is_bounded(seed, rate):
    method = algorithm("self-fl-sums", **BOUNDS)
    source = federation(5, seed=seed, rate=rate)
    _, state, _ = run(method, source, 4)
    clients = torch.arange(5)
    upload, memory = method.client_round(method.broadcast(state.server, clients), state.memory, source.task(clients, 5))
    weight, clip = method.max_weight, method.clip
    assert (upload.weight <= weight).all()
    assert (upload.weight > 0).all()
    assert (upload.change.norm(dim=-1) <= weight * clip * (1 + 1e-12)).all()
    assert (upload.square <= weight * clip**2 * (1 + 1e-12)).all()
    free, kept = replace(method, clip=None).client_round(
        method.broadcast(state.server, clients), state.memory, source.task(clients, 5)
    )
    assert memory.params.equal(kept.params)  # a client's own model is not shortened
    assert free.change.norm() >= upload.change.norm()


def test_the_spread_is_not_the_noise():
    """sigma_0^2 of clients that hardly differ comes out right under noise whose square is five times as large."""
    quiet = algorithm("self-fl-sums", clip=1.0, max_weight=2.0, variance_scale="mean")
    loud = replace(quiet, noise_multiplier=0.01)
    number, size, spread = 400, 5000, 1e-5
    noise = loud.noise_scale()["change"] * torch.randn(size, generator=torch.Generator().manual_seed(0)).double()
    total = torch.tensor(float(number), dtype=torch.float64)
    server = quiet.start(torch.zeros(size, dtype=torch.float64), Population(number))
    upload = SumsUpload(noise, total, spread * total)
    found = loud.server_round(server, torch.arange(number), upload).inter_variance
    assert found.item() == pytest.approx(spread, rel=0.2)
    assert quiet.server_round(server, torch.arange(number), upload).inter_variance == 0  # cut: it would be negative


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"noise_multiplier": 1.0}, "without clip and max_weight"),
        ({"noise_multiplier": 1.0, "clip": 1.0}, "without clip and max_weight"),
        ({"variances": "known"}, "expected 'estimated'"),
        ({"uncertainty_weights": False}, "Use fedavg"),
    ],
)
def test_what_sums_cannot_do_is_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        algorithm("self-fl-sums", **options)


def test_a_noisy_weight_below_zero_does_not_turn_the_step_round():
    method = algorithm("self-fl-sums", clip=1.0, max_weight=1.0, noise_multiplier=1.0, smoothing=1.0)
    source = federation(4)
    server = method.start(starting_point(source), source.population)
    change = torch.ones(4, starting_point(source).numel(), dtype=torch.float64)
    weight = torch.full((4,), -0.5, dtype=torch.float64)
    found = method.server_round(server, torch.arange(4), SumsUpload(change, weight, torch.ones_like(weight)))
    assert (found.params > server.params).all()
