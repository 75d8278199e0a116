"""BatchNorm, dropout and constant buffers over Flower: the models are those of `selffl.train`, to the bit."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'selffl[flower]'")
sys.path.append(str(Path(__file__).parent.parent / "engines" / "flower"))

from flwr.app import Context, RecordDict
from two_towers import CLIENTS as TOWER_CLIENTS
from two_towers import federation, towers
from wire import RUN, WireGrid

import selffl
from selffl.adapters import lora
from selffl.data import load
from selffl.engines.flower.messages import fingerprint
from selffl.errors import ConfigError
from selffl.flower import client_app, personal_model, server_app
from selffl.runs import folder as files
from selffl.state.checkpoint import load_tensors
from selffl.training.flat import FlatModel

CLIENTS = range(4)
SETTINGS = {"rounds": 3, "participation": 0.75, "learning_rate": 0.05, "batch_size": 5, "seed": 3}


@pytest.fixture(scope="module", autouse=True)
def short_closing(few_closing_steps):
    """Clients are in this process, and train for a few steps once training is over, as elsewhere."""
    with few_closing_steps():
        yield


class Net(nn.Module):
    """A little of everything."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(12, 10)
        self.register_buffer("scale", torch.tensor(0.1))

    def forward(self, rows):
        return self.head(self.body(self.scale * rows))


def network():
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def fed():
    return load("digits", num_clients=4, seed=2)


def over_the_wire(fed, folder, method, of_client, of_server, run_config=None, network=network, grids=None):
    """What both apps leave, whether their setting is their own or the run configuration's."""

    def rows(client):
        return fed.subset([client])

    app = client_app(network(), rows, method, memory_dir=folder / "clients", **of_client)
    grid = WireGrid(app, {100 + m: m for m in CLIENTS}, run_config=run_config)
    (grids if grids is not None else []).append(grid)
    given = {**SETTINGS, "connect_seconds": 0, "round_seconds": 20.0, "experiment": "first", **of_server}
    server_app(network(), method, CLIENTS, out=folder / "run", **given)(
        grid, Context(RUN, 1, {}, RecordDict(), run_config or {})
    )
    shared = load_tensors(folder / "run" / "model.safetensors")[0]
    return shared, [personal_model(network(), folder / "clients", "first", client) for client in CLIENTS]


@pytest.mark.parametrize(
    ("name", "policy", "is_configured"),
    [
        ("fedavg", None, False),
        ("ditto", "averaged", True),
        ("fedbn", None, True),
        ("fedper", "kept", True),
        ("fedper", "kept", False),
        ("ditto", "batch", False),
    ],
)
def test_models_over_flower_are_those_of_train(name, policy, is_configured, fed, tmp_path, short):
    method = short(name)
    run = selffl.train(network(), fed, method, gradients="loop", batch_norm=policy, **SETTINGS)
    own = {} if is_configured else {"batch_norm": policy}
    config = {"batch-norm": policy or ""} if is_configured else None
    shared, personal = over_the_wire(fed, tmp_path, method, own, own, config)
    wanted = run.global_model().state_dict()
    assert ("body.1.running_var" in shared) is (policy != "batch")
    for name, entry in shared.items():
        assert torch.equal(entry, wanted[name]), name
    for client in CLIENTS:
        low, high = fed.test.offset[client : client + 2].tolist()
        x = fed.test.features[low:high]
        assert torch.equal(personal[client](x), run.personal_model(client)(x))
    found = files.read_records(tmp_path / "run").summary
    assert found["weighted_accuracy"] == pytest.approx(run.summary["weighted_accuracy"], abs=1e-12)
    assert files.read_config(tmp_path / "run").batch_norm == policy


def adapted_network():
    return lora(network().eval(), 3)


@pytest.mark.parametrize("method", ["self-fl-auto", "feddpa"])
def test_adapters_alone_travel_over_flower(method, fed, tmp_path, short):
    method = short(method)
    run = selffl.train(adapted_network(), fed, method, gradients="loop", **SETTINGS)
    grids = []
    _, personal = over_the_wire(fed, tmp_path, method, {}, {}, network=adapted_network, grids=grids)
    for client in CLIENTS:
        ours, theirs = personal[client].state_dict(), run.personal_model(client).state_dict()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    size = 12 * 3 + 12 * 10 + 10  # B of the first layer, and the head; a frozen weight alone would be 768
    for message, _ in grids[0].sent:
        arrays = [array for record in message.content.array_records.values() for array in record.values()]
        assert all(len(array.data) < 4 * size + 500 for array in arrays)
        assert sum(len(array.data) for array in arrays) < 3 * (4 * size + 500)


def test_a_run_over_flower_goes_on_with_its_statistics(fed, tmp_path):
    own = {"batch_norm": "kept"}
    whole, of_whole = over_the_wire(fed, tmp_path / "a", "fedbn", own, own)
    over_the_wire(fed, tmp_path / "b", "fedbn", own, own | {"rounds": 1})
    again, of_again = over_the_wire(fed, tmp_path / "b", "fedbn", own, own)
    assert all(torch.equal(entry, whole[name]) for name, entry in again.items())
    for ours, theirs in zip(of_again, of_whole, strict=True):
        assert torch.equal(ours.body[1].running_mean, theirs.body[1].running_mean)
        assert not torch.equal(ours.body[1].running_mean, torch.zeros(12))


@pytest.mark.parametrize("brings", ["a federation", "arrays"])
def test_modules_with_several_inputs_are_those_of_train(brings, tmp_path):
    fed = federation()
    settings = SETTINGS | {"participation": 1.0}
    run = selffl.train(towers(), fed, "ditto", gradients="loop", **settings)

    def rows(client):
        own = fed.subset([client])
        x = [{name: entry.numpy() for name, entry in part.features.items()} for part in (own.train, own.test)]
        return own if brings == "a federation" else (x[0], own.train.labels, x[1], own.test.labels)

    app = client_app(towers(), rows, "ditto", memory_dir=tmp_path / "clients")
    grid = WireGrid(app, {100 + number: client for number, client in enumerate(TOWER_CLIENTS)})
    given = settings | {"connect_seconds": 0, "round_seconds": 20.0, "experiment": "first"}
    server_app(towers(), "ditto", TOWER_CLIENTS, out=tmp_path / "run", **given)(
        grid, Context(RUN, 1, {}, RecordDict(), {})
    )
    for name, entry in load_tensors(tmp_path / "run" / "model.safetensors")[0].items():
        assert torch.equal(entry, run.global_model().state_dict()[name]), name
    x = fed.to("cpu", torch.float32).test.features
    for client in TOWER_CLIENTS:
        found = personal_model(towers(), tmp_path / "clients", "first", client)
        assert torch.equal(found(**x)["logits"], run.personal_model(client)(**x)["logits"])
    found = files.read_records(tmp_path / "run").summary
    assert found["weighted_accuracy"] == pytest.approx(run.summary["weighted_accuracy"], abs=1e-12)


def test_what_is_not_sent_has_to_be_the_same_on_both_sides():
    def made(policy="averaged", scale=0.1, still=False):
        module = network()
        module.scale.fill_(scale)
        module.body[1].num_batches_tracked.fill_(7 if still else 0)
        return fingerprint(FlatModel(module, policy))

    assert len({made(), made("kept"), made("batch"), made(scale=0.2)}) == 4
    assert made() == made() == made(still=True)  # counts of minibatches say nothing


def test_a_server_refuses_a_policy_at_once(fed, tmp_path):
    with pytest.raises(ConfigError, match=r"^batch_norm is 'kept', and fedavg keeps no layers"):
        server_app(network(), "fedavg", CLIENTS, batch_norm="kept")
    with pytest.raises(ConfigError, match=r"^the model has BatchNorm with running statistics, and self-fl cannot"):
        server_app(network(), "self-fl", CLIENTS)
    with pytest.raises(ConfigError, match=r"^batch_norm is 'mine'; expected"):
        client_app(network(), fed.subset, "fedavg", batch_norm="mine", memory_dir=tmp_path)
