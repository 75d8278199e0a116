"""Images that are shifted and mirrored: a plain loop with torch's own padding and slices, one image at a time."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import selffl
from selffl.algorithms.training_options import TrainingOptions
from selffl.data.federation import Federation, Rows
from selffl.errors import ConfigError
from selffl.randomness import integers
from selffl.training.flat import FlatModel
from selffl.training.model import ModelSource

SEED, BATCH, SIZES = 5, 6, (9, 4, 13)
KINDS = ["crop", "flip", "crop flip"]
LOSS = nn.functional.cross_entropy


def images(height=7, width=9, channels=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(sum(SIZES), channels, height, width, generator=generator, dtype=dtype)
    labels = torch.randint(3, (sum(SIZES),), generator=generator)
    rows = Rows(features, labels, torch.tensor([0, *SIZES]).cumsum(0))
    return Federation(clients=range(len(SIZES)), train=rows, test=rows)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(105, 3)).double()


def source_of(kind, gradients="auto", **options):
    plan = TrainingOptions(augmentation=kind)
    return ModelSource(images(**options), FlatModel(network()), LOSS, 0.1, BATCH, SEED, gradients, options=plan)


def changed_by_hand(image, kind, stream, *keys):
    """Padded, sliced and mirrored."""
    if "crop" in kind:
        down, right = (int(integers(9, SEED, f"{stream} crop", *keys, axis)) for axis in (0, 1))
        height, width = image.shape[1:]
        image = nn.functional.pad(image, (4, 4, 4, 4))[:, down : down + height, right : right + width]
    if "flip" in kind and int(integers(2, SEED, f"{stream} flip", *keys)) == 1:
        image = image.flip(2)
    return image


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draw", [0, 7])
def test_a_minibatch_equals_one_made_image_by_image(kind, draw):
    source, slots = source_of(kind), torch.tensor([2, 0])
    found, labels = source.task(torch.tensor([0, 1, 2]), 3).batch(draw, slots)
    plain = replace(source, options=TrainingOptions()).task(torch.tensor([0, 1, 2]), 3)
    before, expected_labels = plain.batch(draw, slots)
    assert torch.equal(labels, expected_labels)
    for row, client in enumerate(slots.tolist()):
        for place in range(BATCH):
            expected = changed_by_hand(before[row, place], kind, "batch", 3, client, draw, place)
            assert torch.equal(found[row, place], expected)
    assert not torch.equal(found, before)


@pytest.mark.parametrize("kind", KINDS)
def test_halves_of_clients_have_numbers_of_their_own(kind):
    source, slots = source_of(kind), torch.arange(6)
    found = source.task(torch.arange(3), 2).halves().batch(1, slots)[0]
    before = replace(source, options=TrainingOptions()).task(torch.arange(3), 2).halves().batch(1, slots)[0]
    for slot in range(6):
        expected = [changed_by_hand(before[slot, p], kind, "half batch", 2, slot, 1, p) for p in range(BATCH)]
        assert torch.equal(found[slot], torch.stack(expected))


def test_scores_of_classes_are_of_images_as_they_are():
    source, clients = source_of("crop flip"), torch.arange(3)
    task, plain = (each.task(clients, 2) for each in (source, replace(source, options=TrainingOptions())))
    params = source.model.params.expand(3, -1)
    found, expected = task.class_scores(params, 1)[0], plain.class_scores(params, 1)[0]
    assert torch.equal(found, expected)
    assert not torch.equal(task.batch(1, clients)[0], plain.batch(1, clients)[0])


def test_every_shift_and_both_sides_come_about_as_often():
    rows = Rows(torch.arange(1.0, 82).view(1, 1, 9, 9), torch.zeros(1, dtype=torch.int64), torch.tensor([0, 1]))
    fed = Federation(clients=[0], train=rows, test=rows)
    plan = TrainingOptions(augmentation="crop flip")
    source = ModelSource(fed, FlatModel(nn.Sequential(nn.Flatten(), nn.Linear(81, 2))), LOSS, 0.1, 20_000, options=plan)
    found = source.task(torch.tensor([0]), 1).batch(0, torch.tensor([0]))[0][0, :, 0]
    middle = found[:, 4, 4]  # a pixel that never is padding
    assert len(middle.unique()) == 81
    counts = torch.bincount(middle.long(), minlength=82)[1:]
    assert ((counts - 20_000 / 81).abs() < 5 * (20_000 / 81) ** 0.5).all()
    beside = found[:, 4, 3]
    is_mirrored = (beside > middle)[beside > 0]
    assert abs(is_mirrored.double().mean() - 0.5) < 0.02
    assert ((found == 0).sum((1, 2)) > 0).double().mean() == pytest.approx(80 / 81, abs=0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_equals_a_plain_loop(kind):
    """FedAvg by deep copies and torch.optim, on images changed one by one."""
    fed, module = images(), network()
    options = {"rounds": 3, "participation": 1.0, "learning_rate": 0.1, "batch_size": BATCH, "seed": SEED}
    method = selffl.algorithm("fedavg", num_local_steps=4)
    run = selffl.train(module, fed, method, loss=LOSS, dtype="float64", augmentation=kind, **options)
    plain = ModelSource(fed, FlatModel(network()), LOSS, 0.1, BATCH, SEED)
    shared = copy.deepcopy(module)
    for number in (1, 2, 3):
        states = []
        for m in range(3):
            own, task = copy.deepcopy(shared), plain.task(torch.tensor([m]), number)
            steps = torch.optim.SGD(own.parameters(), lr=0.1)
            for draw in range(4):
                x, y = (part[0] for part in task.batch(draw, torch.tensor([0])))
                x = [changed_by_hand(x[place], kind, "batch", number, m, draw, place) for place in range(BATCH)]
                steps.zero_grad()
                LOSS(own(torch.stack(x)), y).backward()
                steps.step()
            states.append(own.state_dict())
        shared.load_state_dict(
            {
                key: sum(size / sum(SIZES) * state[key] for size, state in zip(SIZES, states, strict=True))
                for key in states[0]
            }
        )
    for found, expected in zip(run.global_model().parameters(), shared.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    with torch.no_grad():  # evaluated on the images as they are
        right = (shared(fed.test.features).argmax(1) == fed.test.labels).double().mean()
    assert run.summary["weighted_accuracy"] == pytest.approx(float(right), abs=1e-6)


def go(**given):
    settings = {"rounds": 3, "participation": 0.7, "learning_rate": 0.1, "batch_size": BATCH, "dtype": "float64"}
    method = selffl.algorithm("ditto", num_local_steps=5)
    return selffl.train(network(), images(), method, loss=LOSS, augmentation="crop flip", **settings | given)


def personal(run):
    return torch.stack([FlatModel(run.personal_model(m)).params for m in range(3)])


@pytest.fixture(scope="module")
def whole():
    """The models of a run in one go, all clients at once."""
    return personal(go())


@pytest.mark.parametrize("given", [{"chunk_size": 1}, {"engine": "serial"}, {"gradients": "unfold"}])
def test_engines_and_blocks_have_the_same_images(given, whole):
    torch.testing.assert_close(personal(go(**given)), whole, rtol=1e-7, atol=1e-9)


def test_a_run_that_is_made_longer_ends_with_the_same_bits(tmp_path, whole):
    go(rounds=2, out=tmp_path / "run")
    run = selffl.resume(tmp_path / "run", rounds=3, model=network(), federation=images(), loss=LOSS)
    assert torch.equal(personal(run), whole)


@pytest.mark.parametrize("shape", [(64,), (8, 8), (9, 9, 3), (2, 4, 30), (1, 1, 8, 8)])
def test_rows_that_are_no_images_are_refused_in_a_line(shape, tmp_path):
    rows = torch.randn(12, *shape)
    fed = Federation.from_arrays(rows, torch.arange(12) % 2, torch.arange(12) % 3, 0.25)
    module = nn.Sequential(nn.Flatten(), nn.Linear(rows[0].numel(), 2))
    with pytest.raises(
        ConfigError, match=r"^augmentation is 'crop', and rows have shape \(.*\); expected ima"
    ) as caught:
        selffl.train(module, fed, "fedavg", rounds=1, augmentation="crop", out=tmp_path / "run")
    assert str(shape) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
