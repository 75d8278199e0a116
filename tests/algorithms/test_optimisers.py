"""Local steps with momentum and by Adam: a block of clients equals a plain loop with torch.optim over each of them."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import selffl
from needs import NEEDS_BATCH_NORM
from selffl.algorithms import ALGORITHMS, SGD, Adam, LocalTask, Momentum
from selffl.algorithms.averaging import SharedModel
from selffl.algorithms.optimisers import Optimiser, check_optimiser, optimiser_of
from selffl.algorithms.solver import descend
from selffl.errors import ConfigError
from selffl.training.flat import FlatModel
from selffl.training.model import ModelSource

PARAMS = 5
OTHERS = [Momentum(), Momentum(0.5), Momentum(0.8, nesterov=True), Adam(), Adam(0.8, 0.9, 1e-3)]
every_optimiser = pytest.mark.parametrize("optimiser", [SGD(), *OTHERS], ids=repr)


def of_torch(optimiser, params, rate):
    if isinstance(optimiser, Adam):
        return torch.optim.Adam(params, lr=rate, betas=(optimiser.beta1, optimiser.beta2), eps=optimiser.eps)
    if isinstance(optimiser, Momentum):
        return torch.optim.SGD(params, lr=rate, momentum=optimiser.momentum, nesterov=optimiser.nesterov)
    return torch.optim.SGD(params, lr=rate)


class QuarticTask(LocalTask):
    """A loss that is not quadratic, around a target that changes with the draw."""

    def __init__(self, shape, optimiser, learning_rate=0.05):
        size = torch.Size(shape)
        super().__init__(size, torch.ones(size, dtype=torch.int64), learning_rate)
        self.target = torch.randn(size.numel(), PARAMS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.optimiser = optimiser

    def batch(self, draw, rows):
        return self.target[rows] + 0.3 * torch.sin(draw + rows.unsqueeze(-1) * 0.7)

    def batch_gradient(self, params, batch):
        return (params - batch) ** 3 + 0.1 * (params - batch)


def loop(task, start, row, steps, rate, penalty=0.0, anchor=None, frozen=None, first_draw=0):
    """One client, by torch."""
    model = nn.Parameter(start.clone())
    optimiser = of_torch(task.optimiser, [model], rate)
    for draw in range(first_draw, first_draw + steps):
        target = task.batch(draw, torch.tensor([row]))[0]
        loss = ((model - target) ** 4 / 4 + 0.05 * (model - target) ** 2).sum()
        if anchor is not None:
            loss = loss + penalty / 2 * (model - anchor).square().sum()
        optimiser.zero_grad()
        loss.backward()
        if frozen is not None:
            model.grad[frozen] = 0.0
        optimiser.step()
    return model.detach()


def start_of(shape):
    return torch.randn(*shape, PARAMS, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


@every_optimiser
@pytest.mark.parametrize("extra", ["nothing", "anchor", "frozen"])
@pytest.mark.parametrize(("shape", "steps"), [((5,), 7), ((5,), [3, 9, 1, 0, 4]), ((2, 3), [[3, 1, 8], [5, 2, 8]])])
def test_a_block_equals_torch_client_by_client(optimiser, extra, shape, steps):
    """Clients leave at different times; those that stay keep what they remember."""
    task, start = QuarticTask(shape, optimiser), start_of(shape)
    counts = steps if isinstance(steps, int) else torch.tensor(steps)
    anchor = start_of((*shape, 2))[..., 0, :] if extra == "anchor" else None
    frozen = torch.tensor([True, False, False, True, False]) if extra == "frozen" else None
    found = descend(task, start, counts, penalty=0.7, anchor=anchor, frozen=frozen, first_draw=4)
    for row, count in enumerate(torch.as_tensor(counts).expand(shape).flatten().tolist()):
        own = None if anchor is None else anchor.reshape(-1, PARAMS)[row]
        first = start.reshape(-1, PARAMS)[row]
        expected = loop(task, first, row, count, 0.05, 0.7, own, frozen, first_draw=4)
        torch.testing.assert_close(found.reshape(-1, PARAMS)[row], expected, rtol=1e-10, atol=1e-12)
    if frozen is not None:
        assert torch.equal(found[..., frozen], start[..., frozen])


@every_optimiser
def test_a_learning_rate_for_each_client(optimiser):
    rates = torch.tensor([0.1, 0.02, 0.05], dtype=torch.float64)
    task, start = QuarticTask((3,), optimiser, rates), start_of((3,))
    found = descend(task, start, 6)
    for row in range(3):
        expected = loop(task, start[row], row, 6, float(rates[row]))
        torch.testing.assert_close(found[row], expected, rtol=1e-10, atol=1e-12)


def test_plain_steps_are_the_bits_they_were():
    start = start_of((4,)).float()
    task = QuarticTask((4,), SGD())
    task.target = task.target.float()
    expected, rows = start.clone(), torch.arange(4)
    for draw in range(12):
        expected.sub_(task.batch_gradient(expected, task.batch(draw, rows)), alpha=0.05)
    assert torch.equal(descend(task, start, 12), expected)
    assert type(LocalTask.optimiser) is SGD  # of a task that has not been told


# ----------------------------------------------------------------------------------------------------- in a federation


def federation(seed=0):
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(4), (12, 30, 7, 21))
    x = rng.normal(size=(len(client), 3))
    y = (x @ rng.normal(size=(3, 3)) + rng.normal(size=(4, 3))[client]).argmax(1)
    return selffl.Federation.from_arrays(x, y, client, test_fraction=0.2)


def network():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def trained_by_torch(source, module, client, round_number, steps, optimiser, penalty=0.0, anchor=None):
    """One client's module after its local steps, by torch.optim on the very same minibatches."""
    module, task = copy.deepcopy(module), source.task(torch.tensor([client]), round_number)
    steps_of = of_torch(optimiser, list(module.parameters()), source.learning_rate)
    for draw in range(steps):
        x, y = (part[0] for part in task.batch(draw, torch.tensor([0])))
        loss = nn.functional.cross_entropy(module(x), y)
        if anchor is not None:
            gaps = zip(module.parameters(), anchor.parameters(), strict=True)
            loss = loss + penalty / 2 * sum((own - other.detach()).square().sum() for own, other in gaps)
        steps_of.zero_grad()
        loss.backward()
        steps_of.step()
    return module


@pytest.mark.parametrize("optimiser", OTHERS, ids=repr)
@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_a_run_equals_rounds_by_torch(name, optimiser):
    """Three rounds of everybody, with an optimiser made anew in each."""
    fed, module = federation(), network()
    options = {"rounds": 3, "participation": 1.0, "learning_rate": 0.02, "batch_size": 5, "dtype": torch.float64}
    method = selffl.algorithm(name, num_local_steps=6)
    run = selffl.train(module, fed, method, optimiser=optimiser, **options)
    source = ModelSource(fed, FlatModel(copy.deepcopy(module)), nn.functional.cross_entropy, 0.02, 5)
    weights = fed.train.num_examples.double() / fed.train.num_examples.sum()
    shared, personal = module, [module] * 4
    for number in (1, 2, 3):
        sent = [trained_by_torch(source, shared, client, number, 6, optimiser) for client in range(4)]
        if method.personalises == "model":  # by a pull of strength 1 to the shared one
            personal = [
                trained_by_torch(source, personal[client], client, number, 6, optimiser, 1.0, shared)
                for client in range(4)
            ]
        shared = copy.deepcopy(module)
        with torch.no_grad():
            for part, *others in zip(shared.parameters(), *(own.parameters() for own in sent), strict=True):
                part.copy_(sum(weight * other for weight, other in zip(weights, others, strict=True)))
    expected = [shared] * 4 if method.personalises == "nothing" else personal
    for client, model in zip(fed.clients, expected, strict=True):
        for found, part in zip(run.personal_model(client).parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found, part, rtol=1e-6, atol=1e-9)
    plain = selffl.train(module, fed, method, **options)
    assert not torch.allclose(next(run.global_model().parameters()), next(plain.global_model().parameters()))


@pytest.mark.parametrize("optimiser", ["momentum", "adam"])
def test_fine_tuning_does_not_depend_on_where_else_it_is_looked_at(optimiser):
    fed, options = federation(), {"rounds": 1, "dtype": torch.float64, "optimiser": optimiser, "learning_rate": 0.01}
    many = selffl.train(network(), fed, "fedavg", fine_tune=(2, 5, 9), **options).evaluate(fine_tune=(2, 5, 9))
    run = selffl.train(network(), fed, "fedavg", fine_tune=(9,), **options)
    assert torch.equal(many.numbers["personal+9"], run.evaluate(fine_tune=(9,)).numbers["personal+9"])
    source = ModelSource(fed, FlatModel(network()), nn.functional.cross_entropy, 0.01, 10)
    for client in range(4):
        low, high = fed.test.offset[client : client + 2].tolist()
        tuned = trained_by_torch(source, run.global_model(), client, 2, 9, optimiser_of(optimiser))
        with torch.no_grad():
            is_right = tuned(fed.test.features[low:high]).argmax(-1) == fed.test.labels[low:high]
        assert torch.equal(many.numbers["personal+9"][low:high].bool(), is_right)


def test_a_run_goes_on_with_its_optimiser(tmp_path):
    fed = federation()
    options = {"participation": 1.0, "optimiser": Momentum(0.7, nesterov=True)}
    whole = selffl.train(network(), fed, "fedavg", rounds=4, **options)
    selffl.train(network(), fed, "fedavg", rounds=2, out=tmp_path / "a", **options)
    again = selffl.resume(tmp_path / "a", rounds=4)
    assert again.config.optimiser == Momentum(0.7, nesterov=True)
    for found, expected in zip(again.global_model().parameters(), whole.global_model().parameters(), strict=True):
        assert torch.equal(found, expected)


# ----------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("name", "optimiser"), [*((name, "adam") for name in ALGORITHMS), ("self-fl", "momentum")])
def test_methods_take_other_steps_or_say_why_not(name, optimiser, tmp_path, short):
    fed = federation().with_clusters([0, 0, 1, 1])
    options = {"rounds": 1, "optimiser": optimiser, "out": tmp_path / "run"}
    method = short(name)
    if method.only_sgd is None:
        module = nn.Sequential(network(), nn.BatchNorm1d(3)).double() if name in NEEDS_BATCH_NORM else network()
        assert selffl.train(module, fed, method, **options).summary["status"] == "finished"
        return
    refusal = f"^optimiser is '{optimiser}', and {method.name} cannot use it: .*. Expected 'sgd', or a method"
    with pytest.raises(ConfigError, match=refusal):
        selffl.train(network(), fed, method, **options)
    assert not (tmp_path / "run").exists()
    selffl.train(network(), fed, method, rounds=1, optimiser="sgd")


def test_a_method_that_does_not_say_is_taken_to_need_plain_steps():
    class Silent(SharedModel):
        name, personalises = "silent", "nothing"
        newcomer = client_round = server_round = personal = None

    check_optimiser(SGD(), Silent())
    with pytest.raises(ConfigError, match="silent cannot use it: it does not say, by only_sgd = None, th"):
        check_optimiser(Adam(), Silent())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optimiser_of("adm"), r"unknown optimiser 'adm'; did you mean 'adam'\? Expected one of: adam, mo"),
        (lambda: optimiser_of(torch.optim.Adam), r"optimiser is <class .*>; expected 'sgd', 'momentum', 'adam', or"),
        (lambda: optimiser_of(None), "optimiser is None; expected 'sgd'"),
        (lambda: Momentum(1.0), "momentum is 1.0; expected a number from 0 up to, not including, 1"),
        (lambda: Momentum(-0.1), "momentum is -0.1; expected a number 0 or more"),
        (lambda: Momentum(nesterov="yes"), "nesterov is 'yes'; expected True or False"),
        (lambda: Adam(beta2=1), "beta2 is 1; expected a number from 0 up to"),
        (lambda: Adam(eps=0.0), "eps is 0.0; expected a number above 0"),
    ],
)  # fmt: skip
def test_options_that_cannot_work(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_an_optimiser_of_the_users_own_is_refused_since_a_run_could_not_name_it():
    class Mine(Optimiser):
        name = "mine"

        def direction(self, gradient, states, number):
            return gradient

    with pytest.raises(ConfigError, match="expected 'sgd', 'momentum', 'adam', or one with options"):
        optimiser_of(Mine())
