"""D15: passes over a client's own rows in place of a number of steps."""

from dataclasses import fields

import pytest
import torch
from federations import federation
from torch import nn

from selffl.algorithms import ALGORITHMS, algorithm
from selffl.algorithms.records import tensors_of
from selffl.data.federation import Federation
from selffl.engines.cohort import CohortEngine
from selffl.training.flat import FlatModel
from selffl.training.model import ModelSource

SIZES = (3, 25, 10, 11, 1, 40)
BATCH = 10
STEPS = ("initial_steps", "num_local_steps")  # in a visit, as methods name them


@pytest.fixture(scope="module")
def source():
    rng = torch.Generator().manual_seed(2)
    client = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    x = torch.randn(sum(SIZES), 4, generator=rng, dtype=torch.float64)
    y = torch.randint(3, (sum(SIZES),), generator=rng)
    fed = Federation.from_arrays(x, y, client, test_fraction=0.0).with_clusters([0, 0, 1, 1, 2, 2])
    torch.manual_seed(0)
    model = FlatModel(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double())
    return ModelSource(fed, model, nn.functional.cross_entropy, 0.1, BATCH, seed=3)


def one_round(method, source, clients):
    server = method.start(source.model.params, source.population)
    task = source.task(clients, 1)
    memory = method.newcomer(server.params.expand(len(clients), -1))
    upload, kept = method.client_round(method.broadcast(server, clients), memory, task)
    return upload, kept, task


def test_an_epoch_is_as_many_steps_as_meet_every_row(source):
    everyone = torch.arange(len(SIZES))
    assert source.task(everyone, 1).steps_per_epoch.tolist() == [1, 3, 1, 2, 1, 4]
    # Without minibatches a step is an epoch.
    assert federation(4).task(torch.arange(4), 1).steps_per_epoch.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_client_of_a_cohort_does_what_it_would_do_alone_with_that_many_steps(source, name):
    """The same draws, the same steps: only the block it is computed in differs."""
    epochs = 2
    options = {field.name for field in fields(algorithm(name))}
    bound = dict.fromkeys(options & {"max_convergence_steps"}, 30)
    upload, kept, task = one_round(algorithm(name, num_local_epochs=epochs, **bound), source, torch.arange(len(SIZES)))
    for client, size in enumerate(SIZES):
        steps = epochs * -(-size // BATCH)
        option = next(field.name for field in fields(algorithm(name)) if field.name in STEPS)
        alone = one_round(algorithm(name, **{option: steps}, **bound), source, torch.tensor([client]))
        assert task.num_gradients[client] == alone[2].num_gradients[0]
        for record, single in ((upload, alone[0]), (kept, alone[1])):
            expected = tensors_of(single)
            for field, found in tensors_of(record).items():
                torch.testing.assert_close(found[client], expected[field][0], rtol=1e-9, atol=1e-12, equal_nan=True)


def test_self_fl_counts_epochs_whatever_it_wants_and_still_says_what_it_wanted(source):
    reports = []
    engine = CohortEngine(algorithm("self-fl", num_local_epochs=3, max_local_steps=1), source)
    engine.advance(engine.start(source.model.params), 4, reports.append)
    for report in reports:
        assert report.upload.num_local_steps.tolist() == [3, 9, 3, 6, 3, 12]
    assert reports[-1].upload.wanted_steps.isfinite().all()
    assert reports[0].upload.wanted_steps.isnan().all()
