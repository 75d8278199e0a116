"""No client owns what the server knows: of every method, one client of eight that says what it likes of itself."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from federations import federation, network_federation, run
from test_exam import ON_NETWORKS, QUICK

from selffl.algorithms import ALGORITHMS, DEFAULT_ALGORITHM, algorithm
from selffl.algorithms.records import map_tensors, tensors_of
from selffl.engines.claims import Claims
from selffl.engines.rounds import GatheredUploads

LIAR = 3
CLIENTS = torch.arange(8)
OTHERS = CLIENTS != LIAR
MODELS = {
    "params",
    "latest",
    "personal_params",
    "cluster_params",
    "control",
    "rho",
    "prototypes",
    "own_features",
    "centre",
}
# How far one client's claims move the server's numbers in a round beside honest models: by a factor either way, or by a
# distance.  docs/threat-model.md says the same.  What is not here does not move at all.
FACTORS = {
    "self-fl-auto": {"inter_variance": 4.0, "variance_ratios": 16.0, "prior_rows": 16.0},
    "self-fl-sums": {"inter_variance": 4.0, "intra_variance": 4.0},
    "self-fl-cluster": {"inter_variance": 4.0, "cluster_variance": math.inf, "cluster_examples": 40.0},
    "fedpac": {"class_examples": 8.0},
}
DISTANCES = {"self-fl-auto": {"frequencies": 0.1, "same_class_rate": 0.1, "score_factors": 2.0, "num_reporting": 1.0}}
# What the numbers above are learned from, in a unit that follows it.
MATERIAL = {"agreements", "disagreements", "spread_products", "unit", "factor_curvature", "factor_pull"}


@cache
def _after_four_rounds(name):
    source = (network_federation if name in ON_NETWORKS else federation)(8)
    method = algorithm(name, **QUICK.get(name, {"num_local_steps": 3}))
    state = run(method, source, 4)[1]
    sent = method.broadcast(state.server, CLIENTS)
    upload, _ = method.client_round(sent, state.memory, source.task(CLIENTS, 5))
    return method, source, state.server, upload


def after_four_rounds(name):
    """A method, its federation, its server's state, and what eight honest clients then send."""
    method, source, server, upload = _after_four_rounds(name)
    return method, source, map_tensors(torch.clone, server), map_tensors(torch.clone, upload)


def heard(method, source, server, upload):
    """The server's state after the round, and why clients were left out of it."""
    found = GatheredUploads(method, 0, Claims(method, server, source.population.num_examples, 0))
    found.add(CLIENTS, upload)
    return method.server_round(server, found.clients, found.upload()), found.left_out


def claims_of(method, upload):
    """Fields that are no models."""
    return [name for name in tensors_of(upload) if name not in {*method.averaged, *MODELS}]


def with_lie(upload, field, value):
    tensor = tensors_of(upload)[field].clone()
    tensor[LIAR] = value
    return replace(upload, **{field: tensor})


def lies(method, source, server, upload, field):
    """Everything from nothing to the largest number, either sign, and the very ends of what is allowed."""
    honest = tensors_of(upload)[field][LIAR]
    for sign in (1.0, -1.0):
        for power in (-1, 0.3, 2):
            yield honest * sign * 10.0**power
        for power in (-300, -1, 0.3, 2, 10, 38, 300) if honest.is_floating_point() else ():
            yield torch.full_like(honest, sign * 10.0**power)
    yield torch.zeros_like(honest)
    bound = method.bounds(server, CLIENTS, upload, source.population.num_examples.double()).get(field)
    for end in bound[:2] if bound is not None else ():
        found = torch.as_tensor(end, dtype=torch.float64).expand(tensors_of(upload)[field].shape)[LIAR]
        if found.isfinite().all():
            yield found.to(honest)


def moved(before, after):
    """How far two states are apart, by field: the largest factor and the largest distance of any number."""
    for name, old in tensors_of(before).items():
        new = tensors_of(after)[name]
        is_same = (old == new) | (old.isnan() & new.isnan())
        old, new = old[~is_same].double(), new[~is_same].double()
        if len(old):
            ratio = (new / old).log().abs().max().exp().item()
            yield name, ratio if math.isfinite(ratio) else math.inf, (new - old).abs().max().item()


def check_moved(method, honest, state, longest, lie):
    """The state is as far from that of honest clients as is stated, and no further."""
    for key, ratio, distance in moved(honest, state):
        said = f"{method.name}: {key} by a factor of {ratio:g}, a distance of {distance:g}, for {lie}"
        if key in MODELS:  # a mean of what clients sent, whatever they weigh
            assert distance <= longest, said
        elif key in method.per_client:  # of each client what it said of itself
            if key == "intra_variance":
                assert torch.equal(tensors_of(state)[key][OTHERS], tensors_of(honest)[key][OTHERS]), said
        elif key not in MATERIAL:
            factor = FACTORS.get(method.name, {}).get(key, 1.0)
            assert ratio <= factor or distance <= DISTANCES.get(method.name, {}).get(key, 0.0), said


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == DEFAULT_ALGORITHM else []) for name in ALGORITHMS]
)
def test_what_one_client_claims_moves_the_server_no_further_than_is_stated(name):
    method, source, server, upload = after_four_rounds(name)
    honest, left_out = heard(method, source, server, upload)
    assert left_out == {}
    first = next(iter(tensors_of(upload)))
    without, left_out = heard(method, source, server, with_lie(upload, first, torch.nan))
    assert left_out == {LIAR: f"{first} holds NaN or infinity; expected finite numbers."}
    models = [tensor for key, tensor in tensors_of(upload).items() if key in {*method.averaged, *MODELS}]
    longest = 2 * max(tensor.flatten(1).norm(dim=1).max().item() for tensor in models)
    num_accepted = 0
    for field in claims_of(method, upload):
        for value in lies(method, source, server, upload, field):
            state, left_out = heard(method, source, server, with_lie(upload, field, value))
            if left_out:
                assert list(left_out) == [LIAR]
                for key, tensor in tensors_of(state).items():
                    torch.testing.assert_close(tensor, tensors_of(without)[key], rtol=0, atol=0, equal_nan=True)
                continue
            num_accepted += 1
            assert not any(tensor.isinf().any() for tensor in tensors_of(state).values()), (field, value)
            check_moved(method, honest, state, longest, f"{field} = {value}")
    assert num_accepted
