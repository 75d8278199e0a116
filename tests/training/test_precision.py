"""Training passes in bfloat16: a plain loop under torch's autocast, one client at a time."""

import copy

import pytest
import torch
from test_augmentation import LOSS, SIZES, images
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import selffl
from selffl.errors import ConfigError
from selffl.training.blocks import gradient_of
from selffl.training.flat import FlatModel
from selffl.training.model import ModelSource

CLIENTS, BATCH = 3, 6


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Linear(8, 3)

    def forward(self, rows):
        return self.head(self.layer(rows).mean(1))


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, rows):
        return self.head(self.layer(rows)[0][:, -1])


MODULES = {
    "linear": (lambda: nn.Linear(8, 3), (8,)),
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), (8,)),
    "cnn": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)),
        (1, 8, 8),
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)),
        (8,),
    ),
    "lstm": (Remembering, (5, 8)),
    "attention": (Attending, (5, 8)),
}
NOT_AT_ONCE = ("attention",)  # LayerNorm


def made(name):
    torch.manual_seed(4)
    module, shape = MODULES[name][0](), MODULES[name][1]
    model = FlatModel(module, precision="bfloat16")
    params = model.params + 0.1 * torch.randn(CLIENTS, len(model.params)).abs()
    return module, model, params, torch.randn(CLIENTS, BATCH, *shape), torch.randint(3, (CLIENTS, BATCH))


def by_torch(module, params, features, labels):
    """A client's gradient and the statistics that a pass leaves."""
    own = copy.deepcopy(module)
    number = sum(part.numel() for part in own.parameters())
    vector_to_parameters(params[:number], own.parameters())
    for part in own.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.running_mean.copy_(params[number : number + 4])
            part.running_var.copy_(params[number + 4 :])
    with torch.autocast("cpu", torch.bfloat16):
        outputs = own(features)
    LOSS(outputs.float(), labels).backward()
    left = [part for name, part in own.named_buffers() if "running" in name]
    return torch.cat([parameters_to_vector([part.grad for part in own.parameters()]), *left])


@pytest.mark.parametrize("name", MODULES)
def test_gradients_one_by_one_are_those_of_autocast(name):
    module, model, params, features, labels = made(name)
    found = gradient_of(model, LOSS, "loop")(params, features, labels)
    assert found.dtype == torch.float32
    for row in range(CLIENTS):
        expected = by_torch(module, params[row], features[row], labels[row])
        within = 2e-2 if name == "batch norm" else 1e-5  # it normalises in float32, where torch takes what comes
        assert (found[row] - expected).norm() < within * expected.norm()


@pytest.mark.parametrize("way", ["vmap", "unfold"])
@pytest.mark.parametrize("name", [name for name in MODULES if name not in NOT_AT_ONCE])
def test_gradients_at_once_are_near_them_and_not_those_of_full_precision(name, way):
    module, model, params, features, labels = made(name)
    found = gradient_of(model, LOSS, way)(params, features, labels)
    full = gradient_of(FlatModel(module), LOSS, way)(params, features, labels)
    assert found.dtype == torch.float32
    assert 1e-4 < (found - full).norm() / full.norm() < 0.06


def test_layers_that_cannot_be_mixed_at_once_are_refused_in_a_line():
    _, model, params, features, labels = made("attention")
    with pytest.raises(ConfigError, match=r"^Attending cannot be computed for many clients at once .*gradients='loop'"):
        gradient_of(model, LOSS, "vmap")(params, features, labels)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(105, 3))


def train(**given):
    settings = {"rounds": 3, "participation": 1.0, "learning_rate": 0.1, "batch_size": BATCH, "gradients": "loop"}
    method = selffl.algorithm("fedavg", num_local_steps=4)
    return selffl.train(network(), images(dtype=torch.float32), method, loss=LOSS, **settings | given)


def vector(run):
    return parameters_to_vector(run.global_model().parameters())


def test_a_run_equals_a_plain_loop_under_autocast():
    """Parameters and steps in float32; the evaluation, too."""
    run, fed = train(precision="bfloat16"), images(dtype=torch.float32)
    source = ModelSource(fed, FlatModel(network()), LOSS, 0.1, BATCH)
    shared = network()
    for number in (1, 2, 3):
        states = []
        for m in range(len(SIZES)):
            own, task = copy.deepcopy(shared), source.task(torch.tensor([m]), number)
            steps = torch.optim.SGD(own.parameters(), lr=0.1)
            for draw in range(4):
                x, y = (part[0] for part in task.batch(draw, torch.tensor([0])))
                steps.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    outputs = own(x)
                LOSS(outputs.float(), y).backward()
                steps.step()
            states.append(own.state_dict())
        shared.load_state_dict(
            {
                key: sum(size / sum(SIZES) * state[key].double() for size, state in zip(SIZES, states, strict=True))
                for key in states[0]
            }
        )
    # A number between two of bfloat16's may fall on the other side for the last bit of a float32.
    assert (vector(run) - parameters_to_vector(shared.parameters())).norm() < 2e-4 * vector(run).norm()
    assert (vector(run) - vector(train())).norm() > 1e-3 * vector(run).norm()
    assert all(part.dtype == torch.float32 for part in run.global_model().parameters())
    with torch.no_grad():
        losses = nn.functional.cross_entropy(run.global_model()(fed.test.features), fed.test.labels, reduction="none")
    torch.testing.assert_close(run.evaluate().log_losses["global"].float(), losses, rtol=1e-5, atol=1e-6)


def test_a_run_that_is_made_longer_stays_in_it(tmp_path):
    train(rounds=2, precision="bfloat16", out=tmp_path / "run")
    run = selffl.resume(tmp_path / "run", rounds=3, model=network(), federation=images(dtype=torch.float32), loss=LOSS)
    assert run.config.precision == "bfloat16"
    assert torch.equal(vector(run), vector(train(precision="bfloat16")))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_parameters_stay_in_float32(dtype):
    with pytest.raises(ConfigError, match=f"precision is 'bfloat16', and dtype '{dtype}'; expected dtype 'float32'"):
        train(precision="bfloat16", dtype=dtype)


@pytest.mark.parametrize(
    ("name", "gradients"), [("fedrod", "vmap"), ("feddbe", "loop"), ("self-fl-auto", "vmap"), ("ditto", "loop")]
)
def test_methods_that_look_into_the_model_have_it_too(name, gradients):
    torch.manual_seed(2)
    module = nn.Sequential(nn.Flatten(), nn.Linear(126, 8), nn.Tanh(), nn.Linear(8, 3))
    settings = {"rounds": 2, "participation": 1.0, "loss": LOSS, "gradients": gradients}
    fed = images(dtype=torch.float32)
    mixed, full = (selffl.train(module, fed, name, precision=each, **settings) for each in ("bfloat16", "full"))
    assert 1e-5 < (vector(mixed) - vector(full)).norm() / vector(full).norm() < 0.05


def test_differences_of_gradients_are_not_taken_in_bfloat16():
    rows = torch.randn(24, 2, 7, 9, generator=torch.Generator().manual_seed(0)).numpy()
    fed = selffl.Federation.from_arrays(rows, torch.arange(24).numpy() % 3, torch.arange(24).numpy() // 8, 0.25)
    with pytest.raises(
        ConfigError, match=r"^precision is 'bfloat16', and perfedavg cannot have it: .* Expected 'full'"
    ):
        selffl.train(network(), fed, "perfedavg", rounds=1, precision="bfloat16")
