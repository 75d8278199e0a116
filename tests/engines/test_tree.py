"""Uploads that add may be added anywhere: a tree of aggregators gives the server what a flat sum does."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from selffl.algorithms import ALGORITHMS, algorithm
from selffl.algorithms.records import map_tensors, tensors_of
from selffl.data import load
from selffl.engines.cohort import CohortEngine
from selffl.engines.rounds import GatheredUploads
from selffl.training.flat import FlatModel
from selffl.training.model import ModelSource

STEPS = {"self-fl-auto": {"num_local_steps": 2}, "self-fl-sums": {"initial_steps": 2, "max_local_steps": 2}}
METHODS = ("fedavg", "ditto", "scaffold", "self-fl-auto", "self-fl-sums")
NUM_CLIENTS, DEPTH, BRANCHES = 27, 3, 3


def summed(parts):
    """What a node sends on, of what its children have sent."""
    return map_tensors(lambda *tensors: torch.stack(tensors).sum(0), *parts)


def through_a_tree(leaves):
    """What reaches the root of a tree in which each node has three children."""
    for _ in range(DEPTH - 1):
        assert len(leaves) % BRANCHES == 0
        leaves = [summed(leaves[start : start + BRANCHES]) for start in range(0, len(leaves), BRANCHES)]
    assert len(leaves) == BRANCHES
    return summed(leaves)


@pytest.mark.parametrize("name", METHODS)
def test_a_tree_of_depth_three_gives_the_flat_sum(name):
    method = algorithm(name, **STEPS.get(name, {"num_local_steps": 2}))
    assert method.uploads_add
    fed = load("digits", num_clients=NUM_CLIENTS, seed=2)
    source = ModelSource(fed, FlatModel(nn.Linear(64, 10)), nn.functional.cross_entropy, 0.05, 5, seed=1)
    engine = CohortEngine(method, source)
    state = engine.advance(engine.start(torch.zeros(650)), 2)  # of a server that knows something
    everyone = torch.arange(NUM_CLIENTS)
    sent = method.broadcast(state.server, everyone)
    uploads, _ = method.client_round(sent, state.memory, source.task(everyone, 3))
    flat = GatheredUploads(method, 0)
    flat.add(everyone, uploads)
    total = flat.upload()
    assert not flat.held_back  # whose small numbers are cut is seen by the cohort's quartiles, which the root needs
    leaves = []
    for client in range(NUM_CLIENTS):  # one client a leaf
        leaf = GatheredUploads(method, 0)
        leaf.add(everyone[client : client + 1], map_tensors(lambda tensor, at=client: tensor[at : at + 1], uploads))
        leaves.append(leaf.upload())
    found = through_a_tree(leaves)
    for field, tensor in tensors_of(total).items():
        torch.testing.assert_close(tensors_of(found)[field], tensor, rtol=1e-12, atol=1e-12, msg=field)
    servers = [method.server_round(state.server, everyone, each) for each in (found, total)]
    for field, tensor in tensors_of(servers[1]).items():
        torch.testing.assert_close(
            tensors_of(servers[0])[field], tensor, rtol=1e-6, atol=1e-9, equal_nan=True, msg=field
        )
    assert torch.equal(servers[0].params, servers[1].params)


def test_the_page_names_the_methods_whose_uploads_do_not_add():
    page = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
    single = {name for name in ALGORITHMS if not algorithm(name).uploads_add}
    named = re.search(r"Uploads of (.+?) do not add", page)[1]
    assert set(re.findall(r"`(.+?)`", named)) == single
