"""Training passes: BatchNorm's statistics against torch's own, masks that have keys, buffers that are constants."""

import copy

import pytest
import torch
from sample_modules import random, seeded
from torch import nn

import selffl
from selffl.data.federation import Rows
from selffl.errors import ConfigError, DataError
from selffl.training.blocks import gradient_of, outputs_of
from selffl.training.evaluation import check_rows
from selffl.training.flat import FlatModel
from selffl.training.model import ModelTask
from selffl.training.passes import DROPOUTS, TrainingPass

LOSS = nn.functional.cross_entropy
EXACT = {"rtol": 1e-12, "atol": 1e-12}
WAYS = ["loop", "vmap", "unfold"]


class Twice(nn.Module):
    """The same BatchNorm for two views of a row, and one that is never asked."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.idle = nn.BatchNorm1d(3)

    def forward(self, rows):
        return self.last(self.norm(torch.tanh(self.norm(self.first(rows)))))


NORMED = {
    "one dimension": (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), (4,)),
    "a sequence": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3, momentum=0.7), nn.Flatten(), nn.Linear(9, 2)),
        (2, 4),
    ),
    "two dimensions": (
        lambda: nn.Sequential(
            nn.BatchNorm2d(2, eps=0.1), nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)
        ),
        (2, 3, 3),
    ),
    "three dimensions": (
        lambda: nn.Sequential(nn.BatchNorm3d(2, affine=False), nn.Flatten(), nn.Linear(16, 2)),
        (2, 2, 2, 2),
    ),
    "no momentum at all": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=0.0), nn.Linear(3, 2)),
        (4,),
    ),
    "twice": (Twice, (4,)),
    "by batches": (lambda: nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)), (4,)),
}


def cohort(name, num_clients=3, num_rows=5):
    make, shape = NORMED[name]
    module = seeded(make, dtype=torch.float64)
    model = FlatModel(module)
    params = model.params + random(num_clients, len(model.params), seed=1).abs()
    labels = torch.randint(2, (num_clients, num_rows), generator=torch.Generator().manual_seed(3))
    return module, model, params, random(num_clients, num_rows, *shape, seed=2), labels


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NORMED)
def test_a_pass_leaves_the_gradients_and_statistics_of_torch_in_training_mode(name, way):
    module, model, params, features, labels = cohort(name)
    before = copy.deepcopy(module.state_dict())
    found = gradient_of(model, LOSS, way)(params, features, labels)
    for client in range(3):
        plain = model.load(params[client]).train()
        LOSS(plain(features[client]), labels[client]).backward()
        slopes = [(torch.zeros_like(part) if part.grad is None else part.grad).flatten() for part in plain.parameters()]
        left = [plain.state_dict()[name].flatten() for name in model._statistics]
        torch.testing.assert_close(found[client], torch.cat(slopes + left), **EXACT)
    for entry, old in zip(module.state_dict().values(), before.values(), strict=True):
        assert torch.equal(entry, old)  # nothing is written into the module, counts included


@pytest.mark.parametrize("name", NORMED)
def test_a_model_answers_as_its_module_does_in_eval_mode(name):
    module, model, params, features, _ = cohort(name)
    found = model(params[1], features[1])
    assert module.training
    torch.testing.assert_close(found, model.load(params[1])(features[1]), **EXACT)
    assert torch.equal(model.flatten(model.load(params[1]).state_dict()), params[1])


def test_counted_gradients_write_statistics_into_the_model_they_are_given():
    _, model, params, features, labels = cohort("one dimension")
    rows = Rows(features.flatten(0, 1), labels.flatten(), torch.tensor([0, 5, 10, 15]))
    task, slots = ModelTask(model, LOSS, rows, torch.arange(3), 0.1, 5, 0, 1), torch.arange(3)
    given, batch = params.clone(), task.batch(0, slots)
    found = task.gradient(given, batch, slots)
    raw = task.batch_gradient(params, batch)
    assert torch.equal(found[:, -6:], torch.zeros(3, 6, dtype=torch.float64))
    assert torch.equal(found[:, :-6], raw[:, :-6])
    assert torch.equal(given[:, :-6], params[:, :-6])
    assert torch.equal(given[:, -6:], raw[:, -6:])
    assert not torch.isclose(given[:, -6:], params[:, -6:]).any()
    assert task.parameters(given).shape == (3, len(model.params) - 6)


def test_layers_have_their_statistics_where_their_module_stands():
    model = FlatModel(
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False), nn.BatchNorm1d(3), nn.Linear(3, 2))
    )
    assert [tuple(layer) for layer in model.layers] == [
        ("0", 0, 15), ("1", 29, 35), ("2", 15, 21), ("2", 35, 41), ("3", 21, 29),
    ]  # fmt: skip
    assert sum(model.group_sizes) == model.num_parameters == 29
    assert model.kept_layers == ()
    kept = FlatModel(model.module, "kept").kept_layers
    assert [tuple(layer) for layer in kept] == [("1", 29, 35), ("2", 15, 21), ("2", 35, 41)]
    assert model.class_bias == (27, 29, 21)  # the bias of the last layer, and where its weights begin


class OwnNorm(nn.BatchNorm1d):
    """BatchNorm of somebody's own."""

    def forward(self, rows):
        return 2.0 * super().forward(rows)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (OwnNorm(4), r"^Sequential has OwnNorm \(0\), a BatchNorm of its own kind; expected one of torch's"),
        (nn.BatchNorm1d(4, momentum=None), r"^Sequential has BatchNorm1d \(0\) with momentum=None, .*such as 0\.1"),
    ],
)
def test_batch_norm_that_cannot_be_told_apart_by_client_is_refused_unless_it_is_still(part, message):
    module = nn.Sequential(part, nn.Linear(4, 2))
    with pytest.raises(ConfigError, match=message):
        FlatModel(module)
    assert FlatModel(module.eval()).num_statistics == 0


# ------------------------------------------------------------------------------------------------------------- buffers


def few_rows(*shape):
    return Rows.single_client(random(4, *shape, dtype=torch.float32), torch.tensor([0, 1, 1, 0]))


class Scaled(nn.Module):
    """Constants of every kind, among them one that no state_dict holds."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.register_buffer("scale", torch.arange(1.0, 5.0))
        self.register_buffer("order", torch.tensor([3, 2, 1, 0]), persistent=False)

    def forward(self, rows):
        return self.head(rows[..., self.order] * self.scale)


@pytest.mark.parametrize("way", WAYS)
def test_constant_buffers_are_taken_as_they_are(way):
    module = seeded(Scaled)
    model, rows = FlatModel(module), few_rows(4)
    check_rows(model, LOSS, rows)
    assert len(model.params) == 10
    features, labels = rows.features.expand(2, -1, -1), rows.labels.expand(2, -1)
    params = model.params + random(2, 10, seed=4, dtype=torch.float32)
    found = gradient_of(model, LOSS, way)(params, features, labels)
    for client in range(2):
        plain = model.load(params[client])
        LOSS(plain(rows.features), rows.labels).backward()
        expected = torch.cat([part.grad.flatten() for part in plain.parameters()])
        torch.testing.assert_close(found[client], expected)
    with pytest.raises(ConfigError, match="'scale' is not trained, and that state_dict has other values"):
        model.flatten(module.state_dict() | {"scale": torch.ones(4)})


class Counting(nn.Linear):
    """A module that counts how often it is trained."""

    def __init__(self):
        super().__init__(4, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, rows):
        if self.training:
            self.count += 1
        return super().forward(rows)


class Settled(nn.Linear):
    """A module that writes what is already there: one whose power iteration has converged, say."""

    def __init__(self):
        super().__init__(4, 2)
        self.register_buffer("direction", torch.ones(2))

    def forward(self, rows):
        if self.training:
            self.direction.copy_(self.direction.clone())
        return super().forward(rows)


@pytest.mark.parametrize(
    ("module", "name", "shape"),
    [
        (Counting(), "count", (4,)),
        (Settled(), "direction", (4,)),
        (
            nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), nn.Linear(8, 2)),
            "0.running_mean",
            (2, 4),
        ),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 2)), "parametrizations.weight.0._u", (4,)),
    ],
)
def test_buffers_that_training_changes_are_refused(module, name, shape):
    message = rf"^\w+ changes its buffer {name} when it trains, which .* expected constants, and torch's BatchNorm"
    with pytest.raises(ConfigError, match=message):
        check_rows(FlatModel(module), LOSS, few_rows(*shape))


# --------------------------------------------------------------------------------------------------------------- masks


def thinned(dropout, **options):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), dropout, nn.Linear(8, 6), nn.Dropout(0.25), nn.Linear(6, 2))
    x = random(90, 6, dtype=torch.float32)
    fed = selffl.Federation.from_arrays(x, (x[:, 0] > 0).long(), [row % 3 for row in range(90)], seed=0)
    method = selffl.algorithm("ditto", num_local_steps=4)
    return selffl.train(module, fed, method, **{"rounds": 3, "participation": 1.0, "learning_rate": 0.1} | options)


@pytest.mark.parametrize("kind", DROPOUTS)
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_masks_leave_out_their_share_and_scale_the_rest(kind, share):
    shape = {nn.Dropout: (40, 50), nn.Dropout1d: (40, 50, 3), nn.Dropout2d: (40, 50, 3, 2)}.get(kind, (40, 50, 2, 2, 2))
    model = FlatModel(nn.Sequential(nn.Linear(shape[-1], shape[-1]), kind(share)))
    with torch.no_grad():
        model.module[0].weight.copy_(torch.eye(shape[-1]))
        model.module[0].bias.zero_()
    rows = random(*shape, dtype=torch.float32).abs() + 0.1
    outputs, left = model.train_at(model.params, rows, torch.tensor([7]))
    assert left is None
    ratio = outputs / rows
    is_kept = ratio.flatten(2).amax(-1) > 0 if rows.ndim > 2 else ratio > 0
    whole = is_kept.reshape(*is_kept.shape, *[1] * (rows.ndim - 2)).expand_as(ratio)
    expected = torch.where(whole, 1.0 / (1.0 - share) if share < 1 else 0.0, 0.0)
    torch.testing.assert_close(ratio, expected)
    assert float(is_kept.float().mean()) == pytest.approx(1 - share, abs=4 * (0.25 / 2000) ** 0.5)
    assert torch.equal(model(model.params, rows), rows)  # answers leave nothing out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d])
def test_gradients_are_those_of_a_module_with_the_same_masks(kind, way, monkeypatch):
    """By a plain loop whose dropout is a product with masks that were written down."""
    parts = [nn.Linear(4, 8), nn.Unflatten(1, (4, 2)), kind(0.4), nn.Flatten(), nn.Linear(8, 2), nn.Dropout(0.5)]
    module = nn.Sequential(*parts)
    model, keys = FlatModel(module), torch.tensor([[5], [6]])
    rows, labels = random(2, 3, 4, dtype=torch.float32), torch.tensor([[0, 1, 1], [1, 0, 0]])
    params = model.params + random(2, len(model.params), seed=3, dtype=torch.float32)
    found = gradient_of(model, LOSS, way)(params, rows, labels, keys)
    written, draw = [], TrainingPass.mask

    def write_down(own, *given):
        mask = draw(own, *given)
        written.append(mask.float())
        return mask

    for client in range(2):
        written.clear()
        with monkeypatch.context() as patch:
            patch.setattr(TrainingPass, "mask", write_down)
            model.train_at(params[client], rows[client], keys[client])
        assert len(written) == 2
        plain = model.load(params[client])
        middle = plain[:2](rows[client]) * written[0] / 0.6
        LOSS(plain[3:5](middle) * written[1] / 0.5, labels[client]).backward()
        torch.testing.assert_close(found[client], torch.cat([part.grad.flatten() for part in plain.parameters()]))


def test_masks_differ_by_client_round_minibatch_and_layer_and_are_the_same_when_asked_again():
    module = seeded(lambda: nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5), nn.Linear(64, 2)))
    model = FlatModel(module)
    rows = Rows(torch.ones(12, 64), torch.zeros(12, dtype=torch.int64), torch.tensor([0, 6, 12]))

    def key(client, round_number, draw, seed=0):
        task = ModelTask(model, LOSS, rows, torch.tensor([0, 1]), 0.1, 2, seed, round_number)
        return int(task.batch(draw, torch.tensor([client]))[2])

    keys = [key(0, 1, 0), key(1, 1, 0), key(0, 2, 0), key(0, 1, 1), key(0, 1, 0, seed=1)]
    assert len(set(keys)) == 5
    assert key(0, 1, 0) == keys[0]
    own = TrainingPass()
    own.begin({}, torch.tensor([keys[0]]))
    first, second = (own.mask(torch.Size([64]), 0.5, torch.device("cpu")) for _ in range(2))
    assert 0.2 < float((first == second).float().mean()) < 0.8
    own.begin({}, torch.tensor([keys[0]]))
    assert torch.equal(own.mask(torch.Size([64]), 0.5, torch.device("cpu")), first)


def test_dropout_trains_to_the_same_numbers_in_any_chunk_way_and_after_a_resume(tmp_path):
    whole = thinned(nn.Dropout(0.5))
    for options in ({"chunk_size": 1}, {"gradients": "loop"}, {"gradients": "unfold"}, {"engine": "serial"}):
        other = thinned(nn.Dropout(0.5), **options)
        torch.testing.assert_close(other._state.server.params, whole._state.server.params, rtol=1e-5, atol=1e-6)
    thinned(nn.Dropout(0.5), rounds=1, out=tmp_path / "run")
    again = selffl.resume(tmp_path / "run", rounds=3)
    assert torch.equal(again._state.server.params, whole._state.server.params)
    assert torch.equal(again._session.personal(again._state, 1), whole._session.personal(whole._state, 1))
    assert not torch.allclose(thinned(nn.Dropout(0.1))._state.server.params, whole._state.server.params, atol=1e-3)


def test_training_leaves_torchs_random_numbers_alone():
    module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))
    fed = selffl.Federation.from_arrays(random(90, 6), torch.arange(90) % 2, torch.arange(90) % 3, seed=0)
    before = torch.random.get_rng_state()
    selffl.train(module, fed, "fedavg", rounds=2)
    assert torch.equal(before, torch.random.get_rng_state())


def test_single_rows_are_refused_where_a_batch_is_needed():
    model = FlatModel(NORMED["by batches"][0]())
    with pytest.raises(DataError, match=r"^one row by itself cannot be normalised by its batch; expected two rows"):
        model(model.params, torch.zeros(1, 4))
    assert model.mixes_rows
    with pytest.raises(ConfigError, match="normalises by batches, so that what it answers has no gradient by row"):
        _ = model.still


@pytest.mark.parametrize("way", ["vmap", "loop"])
@pytest.mark.parametrize("is_still", [False, True])
def test_attention_has_the_gradients_and_answers_of_its_module(is_still, way):
    """torch has kernels for layers in eval() mode that take one set of parameters."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    module = seeded(lambda: nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 2)), dtype=torch.float64)
    model = FlatModel(module.eval() if is_still else module)
    rows, labels = random(2, 5, 3, 8), torch.tensor([[0, 1, 1, 0, 1], [1, 0, 0, 0, 1]])
    params = model.params + 0.1 * random(2, len(model.params), seed=3)
    found = gradient_of(model, LOSS, way)(params, rows, labels)
    with torch.no_grad():
        answers = outputs_of(model, params, rows, way)
    for client in range(2):
        plain = model.load(params[client]).train()
        outputs = plain(rows[client])
        LOSS(outputs, labels[client]).backward()
        torch.testing.assert_close(
            found[client], torch.cat([part.grad.flatten() for part in plain.parameters()]), **EXACT
        )
        torch.testing.assert_close(answers[client], outputs.detach(), **EXACT)
