"""Optimisers that clients keep: a plain loop whose clients hold their torch.optim objects from round to round."""

import copy
import pickle
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from test_cnn_twins import CROSS_ENTROPY, SIZES, images, network, unload
from test_training_options import COHORTS, book_of, settings

import selffl
from needs import NEEDS_BATCH_NORM
from selffl.algorithms import ALGORITHMS, Adam, FedAvg, Momentum, algorithm
from selffl.algorithms.solver import descend
from selffl.errors import ConfigError
from selffl.training.flat import FlatModel

STEPS = {
    "fedavg": {"num_steps": 4},
    "ditto": {"num_steps": 4},
    "fedrep": {"num_steps": 3, "head_steps": 2},
}
MAKERS = {
    Momentum(0.8): lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.8),
    Momentum(0.8, nesterov=True): lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.8, nesterov=True),
    Adam(beta2=0.9): lambda params: torch.optim.Adam(params, lr=1.0, betas=(0.9, 0.9)),
}
PLAIN_MEAN = {"fedrep": [1] * len(SIZES)}  # of bodies; others weigh clients by their rows
KEPT = {"optimiser": "adam", "keep_optimiser": True, "learning_rate": 0.02}


def method_of(name):
    steps = STEPS[name]
    options = {"head_steps": steps["head_steps"]} if "head_steps" in steps else {}
    return algorithm(name, num_local_steps=steps["num_steps"], **options)


def train(name="ditto", fed=None, **given):
    method = method_of(name) if isinstance(name, str) else name
    return selffl.train(network(), fed or images(), method, loss=CROSS_ENTROPY, **settings(**KEPT | given))


def personal(run):
    return torch.tensor([unload(run.personal_model(m)) for m in range(len(SIZES))], dtype=torch.float64)


# Who keeps what is the method's, and what is kept the optimiser's: each of either, and Adam's count of steps twice.
@pytest.mark.parametrize(
    ("name", "optimiser"), [*zip(STEPS, MAKERS, strict=True), ("ditto", Adam(beta2=0.9))], ids=repr
)
def test_a_run_equals_clients_that_hold_their_optimisers(name, optimiser):
    """Some clients miss rounds: their optimisers wait, Adam's count of steps with them."""
    run = train(name, optimiser=optimiser)
    weights = PLAIN_MEAN.get(name, SIZES)
    book = book_of(MAKERS[optimiser], rate=lambda t: 0.02, keeps=True, head="5.", weights=weights)
    book.run(name, COHORTS, **STEPS[name])
    shared = book.shared.state_dict()
    body = {key: part for key, part in shared.items() if not key.startswith("5.")}
    found = personal(run)
    for m in range(len(SIZES)):
        module = book.own.get(("personal", m), book.shared)
        if method_of(name).personalises == "layers":
            module.load_state_dict(module.state_dict() | body)
        assert found[m].tolist() == pytest.approx(unload(module), rel=1e-6, abs=1e-9)
    anew = train(name, optimiser=optimiser, keep_optimiser=False)
    assert (personal(anew) - found).norm(dim=-1).min() > 1e-3
    assert len({sum(m in cohort for cohort in COHORTS) for m in range(len(SIZES))}) > 1


def test_a_run_can_be_copied():
    run = train(rounds=1)
    for again in (copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
        assert torch.equal(personal(again), personal(run))


def test_clients_with_different_numbers_of_steps_count_their_own():
    """Passes over their rows: a client's count of steps is its own, whatever the block."""
    fed = images()
    whole = train(selffl.algorithm("local", num_local_epochs=1), fed, participation=1.0)
    for m in (0, 3, 5):
        low, high = fed.train.offset[m : m + 2].tolist()
        module = network()
        optimiser = torch.optim.Adam(module.parameters(), lr=0.02)
        for number in range(1, 7):
            task = whole._session.source.task(torch.tensor([m]), number)
            for draw in range(-(-(high - low) // 4)):
                x, y = (part[0] for part in task.batch(draw, torch.tensor([0])))
                optimiser.zero_grad()
                CROSS_ENTROPY(module(x), y).backward()
                optimiser.step()
        assert unload(whole.personal_model(m)) == pytest.approx(unload(module), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("given", [{"chunk_size": 1}, {"chunk_size": 2}, {"engine": "serial"}])
def test_the_block_does_not_matter(given):
    torch.testing.assert_close(personal(train(**given)), personal(train()), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("optimiser", ["momentum", "adam"])
def test_a_run_that_is_stopped_or_made_longer_ends_with_the_same_bits(optimiser, tmp_path):
    def stop(row):
        if row["round"] == 5:
            raise KeyboardInterrupt

    given = {"model": network(), "federation": images(), "loss": CROSS_ENTROPY}
    whole = personal(train(optimiser=optimiser))
    with pytest.raises(KeyboardInterrupt):
        train(optimiser=optimiser, out=tmp_path / "a", on_round=stop, checkpoint_every=3)
    assert torch.equal(personal(selffl.resume(tmp_path / "a", **given)), whole)
    train(optimiser=optimiser, out=tmp_path / "b", rounds=2)
    longer = selffl.resume(tmp_path / "b", rounds=6, **given)
    assert torch.equal(personal(longer), whole)
    assert longer.config.keep_optimiser is True


def test_training_alone_keeps_them_too():
    joined = train("fedavg", gain=True)
    alone = train(selffl.algorithm("local", num_local_steps=4))
    assert [row["alone_accuracy"] for row in joined.clients] == [row["accuracy"] for row in alone.clients]


def test_a_new_client_keeps_its_own_between_its_visits():
    """And it moves nothing of the run's."""
    run = train("ditto", rounds=2)
    before = run._state.memory.states.clone()
    rows = images().train
    found = unload(run.welcome((rows.features[:7], rows.labels[:7])))
    anew = train("ditto", rounds=2, keep_optimiser=False)
    anew._state.server.params.copy_(run._state.server.params)
    other = unload(anew.welcome((rows.features[:7], rows.labels[:7])))
    assert max(abs(a - b) for a, b in zip(found, other, strict=True)) > 1e-4
    assert torch.equal(run._state.memory.states, before)
    assert run._state.memory.states.shape == (len(SIZES), 2, 2, FlatModel(network()).num_parameters)


# ----------------------------------------------------------------------------------------------------- what is refused


@dataclass(frozen=True)
class Twice(FedAvg):
    """A method that trains twice and does not say so."""

    name: ClassVar[str] = "twice"

    def client_round(self, broadcast, memory, task):
        descend(task, broadcast.params, 2)
        return super().client_round(broadcast, memory, task)


def test_a_method_that_trains_more_often_than_it_says_is_told_so():
    with pytest.raises(ConfigError, match=r"^twice trains 2 times in a round, and says num_optimisers = 1; expected"):
        train(Twice())
    assert train(Twice(), keep_optimiser=False).summary["status"] == "finished"


@pytest.mark.parametrize(
    "name", sorted(name for name in set(ALGORITHMS) - NEEDS_BATCH_NORM if algorithm(name).only_sgd is None)
)
def test_every_method_with_optimisers_says_how_many(name, short):
    if algorithm(name).num_optimisers:
        assert train(short(name), rounds=1).summary["status"] == "finished"
        return
    with pytest.raises(ConfigError, match=f"^keep_optimiser is True, and clients of {name} train on an objective"):
        train(short(name), rounds=1)
