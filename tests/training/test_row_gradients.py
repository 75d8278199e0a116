"""Row-level privacy in local training: clipped rows, noise and draws against plain PyTorch, one row at a time."""

import numpy as np
import pytest
import torch
from torch import nn

from selffl.algorithms import algorithm
from selffl.algorithms.training_options import TrainingOptions
from selffl.data.federation import Federation, Rows
from selffl.engines.cohort import CohortEngine
from selffl.errors import ConfigError
from selffl.randomness import normal, uniform
from selffl.training.flat import FlatModel
from selffl.training.model import ModelSource, ModelTask

SIZES = (3, 7, 12, 5)
BATCH, RATE, CLIP, NOISE, SEED = 5, 0.2, 0.7, 0.3, 4
PRIVATE = TrainingOptions(row_clip=CLIP, row_noise_multiplier=NOISE)
CROSS_ENTROPY = nn.functional.cross_entropy


def rows(kind="rows", seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = {"rows": (6,), "images": (1, 6, 6), "series": (4, 3)}[kind]
    x = 3.0 * torch.randn(sum(SIZES), *shape, generator=generator)
    y = torch.randint(4, (sum(SIZES),), generator=generator)
    part = Rows(x, y, torch.tensor([0, *np.cumsum(SIZES)]))
    return Federation(range(len(SIZES)), part, part)


class LastStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


MODULES = {
    "softmax": (lambda: nn.Linear(6, 4), "rows"),
    "network": (lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 4)), "rows"),
    "cnn": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)), "images"),
    "lstm": (LastStep, "series"),
}


def source_of(name, options=PRIVATE, **more):
    torch.manual_seed(1)
    make, kind = MODULES[name]
    return ModelSource(rows(kind), FlatModel(make()), CROSS_ENTROPY, RATE, BATCH, SEED, options=options, **more)


def drawn(m, draw, number):
    """The rows of a minibatch: those with the smallest lots."""
    lots = uniform(SEED, "drawn rows", number, m, draw, torch.arange(SIZES[m])).numpy()
    return np.argsort(lots)[: min(BATCH, SIZES[m])]


def step_by_step(module, x, y, m, num_steps, number):
    """DP-SGD of one client in plain PyTorch: each row by itself."""
    params = list(module.parameters())
    for draw in range(num_steps):
        chosen = drawn(m, draw, number)
        total = torch.zeros(sum(p.numel() for p in params))
        for row in chosen:
            module.zero_grad()
            CROSS_ENTROPY(module(x[row : row + 1]), y[row : row + 1]).backward()
            nn.utils.clip_grad_norm_(params, CLIP)
            total += nn.utils.parameters_to_vector([p.grad for p in params])
        noise = normal(SEED, "row noise", number, m, draw, torch.arange(len(total)))
        total += 2 * CLIP * NOISE * noise
        with torch.no_grad():
            nn.utils.vector_to_parameters(
                nn.utils.parameters_to_vector(params) - RATE * total / len(chosen), module.parameters()
            )
    return nn.utils.parameters_to_vector(params).detach()


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("gradients", ["auto", "loop"])
def test_a_cohort_is_plain_dp_sgd_with_the_same_noise(name, gradients):
    source = source_of(name, gradients=gradients)
    engine = CohortEngine(algorithm("fedavg", num_local_steps=3), source, seed=SEED)
    state = engine.advance(engine.start(source.model.params), 2)
    offset, shared = source.federation.train.offset.tolist(), source.model.params
    module = MODULES[name][0]()
    for number in (1, 2):
        change = 0.0
        for m, size in enumerate(SIZES):
            own = slice(offset[m], offset[m + 1])
            nn.utils.vector_to_parameters(shared, module.parameters())
            x, y = source.federation.train.features[own], source.federation.train.labels[own]
            change = change + size * (step_by_step(module, x, y, m, 3, number) - shared)
        shared = shared + change / sum(SIZES)
    torch.testing.assert_close(state.server.params, shared, rtol=1e-5, atol=1e-5)
    plain = CohortEngine(engine.algorithm, source_of(name, TrainingOptions()), seed=SEED)
    assert (plain.advance(plain.start(source.model.params), 2).server.params - shared).norm() > 0.1


def task_of(options=PRIVATE, **more):
    source = source_of("softmax")
    clients = torch.arange(len(SIZES))
    return ModelTask(
        source.model, CROSS_ENTROPY, source.federation.train, clients, RATE, BATCH, SEED, 1, options=options, **more
    )


def test_every_minibatch_is_drawn_by_itself_without_replacement():
    """Each row of a client is in as many as it has to be, whatever came before: what the accountant counts on."""
    task, slots = task_of(), torch.arange(len(SIZES))
    met = [np.zeros((2000, size), dtype=bool) for size in SIZES]
    offset = task._rows.offset.tolist()
    for draw in range(2000):
        batch = task.batch(draw, slots)
        for m, size in enumerate(SIZES):
            found = batch.rows[0][m][batch.is_there[m]]
            own = task._rows.features[offset[m] : offset[m + 1]]
            places = [int((own == row).all(1).nonzero()) for row in found]
            assert len(set(places)) == len(places) == min(BATCH, size)
            met[m][draw, places] = True
    for size, each in zip(SIZES, met, strict=True):
        share = min(BATCH / size, 1.0)
        error = np.sqrt(share * (1 - share) / len(each))
        assert np.abs(each.mean(0) - share).max() <= 4.5 * error
        both = (each[1:] & each[:-1]).mean(0)  # met twice running: as often as chance has it
        assert np.abs(both - share**2).max() <= 6.0 * error


def test_no_row_moves_a_gradient_by_more_than_the_clip():
    quiet = TrainingOptions(row_clip=CLIP)
    source = source_of("network", quiet)
    task, slots = source.task(torch.arange(len(SIZES)), 1), torch.arange(len(SIZES))
    batch = task.batch(0, slots)
    params = source.model.params.expand(len(SIZES), -1)
    before = task.gradient(params, batch, slots)
    batch.rows[0][:, 0] = 1e4  # the first row of each client is another
    again = source.task(torch.arange(len(SIZES)), 1).gradient(params, batch, slots)
    moved = (again - before).norm(dim=-1) * batch.is_there.sum(-1)
    assert (moved <= 2 * CLIP * (1 + 1e-5)).all()
    assert moved.max() > 0.5 * CLIP


def test_dropout_masks_differ_from_row_to_row():
    torch.manual_seed(1)
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 4))
    federation = rows()
    federation.train.features[:] = 1.0
    federation.train.labels[:] = 0
    options = TrainingOptions(row_clip=1e9)
    source = ModelSource(federation, FlatModel(module), CROSS_ENTROPY, RATE, BATCH, SEED, options=options)
    task, slots = source.task(torch.arange(len(SIZES)), 1), torch.arange(len(SIZES))
    by_input = task.gradient(source.model.params.expand(4, -1), task.batch(0, slots), slots)[:, :24].view(4, 4, 6)
    # With one mask for a minibatch an input would be left out for all of its rows, or for none.
    shares = (by_input[2, 0] / by_input[2, 0].abs().max()).abs()
    assert ((shares > 0.01) & (shares < 0.99)).any()


def test_what_no_noise_hides_is_not_shown():
    task, params = task_of(), source_of("softmax").model.params.expand(len(SIZES), -1)
    slots = torch.arange(len(SIZES))
    looks = {
        "halves": task.halves,
        "class counts": lambda: task.class_counts(4),
        "class scores": lambda: task.class_scores(params, 0),
        "features": lambda: task.class_moments(params),
        "gradients": lambda: task.batch_gradient(params, task.batch(0, slots)),
    }
    for what, look in looks.items():
        with pytest.raises(ConfigError, match=f"row_clip is 0.7, and the method looks at .*{what}.* expected a method"):
            look()
    assert task.at_home().class_counts(4).sum() == sum(SIZES)


def test_a_minibatch_can_be_asked_for_once():
    task, params = task_of(), source_of("softmax").model.params.expand(len(SIZES), -1)
    slots = torch.arange(len(SIZES))
    batch = task.batch(2, slots)
    task.gradient(params, batch, slots)
    with pytest.raises(ConfigError, match="two gradients of one minibatch"):
        task.gradient(params, batch, slots)
    task.at_home().gradient(params, task.at_home().batch(2, slots), slots)
    assert task.num_noisy.tolist() == [1] * len(SIZES)
    assert task.num_gradients.tolist() == [3] * len(SIZES)


def test_secret_noise_and_draws_are_others_each_time():
    slots, params = torch.arange(len(SIZES)), source_of("softmax").model.params.expand(len(SIZES), -1)
    tasks = [task_of(is_secret=True) for _ in range(2)]
    one, two = (task.batch(0, slots).rows[0] for task in tasks)
    assert not one[2].equal(two[2])  # 5 of 12 rows
    batch = task_of().batch(0, slots)
    first, second, seeded, again = (task.gradient(params, batch, slots) for task in (*tasks, task_of(), task_of()))
    assert seeded.equal(again)
    assert (first - second).abs().min() > 0
    deviation = (first - second) / (2 * CLIP * NOISE * 2**0.5) * batch.is_there.sum(-1, keepdim=True)
    assert deviation.std() == pytest.approx(1.0, abs=0.3)


@pytest.mark.parametrize("policy", ["averaged", "batch"])
def test_a_model_that_mixes_rows_is_refused(policy):
    model = FlatModel(nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)), policy)
    with pytest.raises(ConfigError, match=r"row_clip is 0\.7, and Sequential normalises by batches") as raised:
        ModelSource(rows(), model, CROSS_ENTROPY, RATE, BATCH, SEED, options=PRIVATE)
    assert "\n" not in str(raised.value)
