"""Self-FL by sums: the server needs the sums alone, close to Self-FL itself."""

import pytest
import torch
from federations import federation, run

from selffl.algorithms import Population, algorithm
from selffl.algorithms.records import tensors_of
from selffl.algorithms.self_fl_sums import SumsUpload
from selffl.errors import ConfigError


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


def test_the_spread_is_not_the_noise():
    """sigma_0^2 of clients that hardly differ comes out right under noise whose square is five times as large."""
    method = algorithm("self-fl-sums", variance_scale="mean")
    number, size, spread, scale = 400, 5000, 1e-5, 0.04
    noise = scale * torch.randn(size, generator=torch.Generator().manual_seed(0)).double()
    total = torch.tensor(float(number), dtype=torch.float64)
    server = method.start(torch.zeros(size, dtype=torch.float64), Population(number))
    upload = SumsUpload(noise, total, spread * total)
    found = method.noisy_server_round(server, torch.arange(number), upload, {"change": scale}).inter_variance
    assert found.item() == pytest.approx(spread, rel=0.2)
    assert method.server_round(server, torch.arange(number), upload).inter_variance == 0  # cut: it would be negative


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"variances": "known"}, "expected 'estimated'"),
        ({"uncertainty_weights": False}, "numbers of examples are not among"),
    ],
)
def test_what_sums_cannot_do_is_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        algorithm("self-fl-sums", **options)
