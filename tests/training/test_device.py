"""Nothing is tied to the CPU: tensors are made where the others are, and a GPU draws the same minibatches."""

import ast
from pathlib import Path

import pytest
import torch
from sample_modules import CROSS_ENTROPY, seeded
from torch import nn

import selffl
from selffl.algorithms import algorithm
from selffl.data.digits import digits
from selffl.data.federation import Federation
from selffl.engines.cohort import CohortEngine
from selffl.randomness import random_bits
from selffl.training.evaluation import check_rows, numbers_of_rows
from selffl.training.flat import FlatModel
from selffl.training.model import ModelSource

FILES = [Path(selffl.__file__).parent / "training" / f"{name}.py" for name in ("blocks", "evaluation", "flat", "model")]
MAKERS = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "randperm", "tensor", "zeros"}

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_tensor_that_is_made_is_told_where(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in MAKERS}:
            assert "device" in {keyword.arg for keyword in node.keywords}, f"{path.name}:{node.lineno}"


def moved(fed, device):
    return Federation(fed.clients, fed.train.to(device), fed.test.to(device))


@needs_gpu
@pytest.mark.parametrize("batch_size", [1, 7, 60])
def test_a_gpu_draws_the_same_minibatches(batch_size):
    fed = digits(8, seed=3)
    model, clients = FlatModel(nn.Linear(64, 10)), torch.tensor([5, 0, 3])
    tasks = {
        device: ModelSource(moved(fed, device), model, CROSS_ENTROPY, 0.1, batch_size, seed=1).task(clients, 4)
        for device in ("cpu", "cuda")
    }
    for draw in (0, 3, 17, 40, 60, 80, 130):
        here, there = (task.batch(draw, torch.tensor([2, 0], device=device)) for device, task in tasks.items())
        assert torch.equal(here[0], there[0].cpu())
        assert torch.equal(here[1], there[1].cpu())


@needs_gpu
@pytest.mark.parametrize("gradients", ["auto", "vmap", "loop", "unfold"])
@pytest.mark.parametrize("kind", ["linear", "cnn"])
def test_a_run_on_a_gpu_is_the_run_on_a_cpu(kind, gradients):
    make = {
        "linear": lambda: nn.Linear(64, 10),
        "cnn": lambda: nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
        ),
    }[kind]
    fed, found = digits(8, seed=3), {}
    for device in ("cpu", "cuda"):
        model = FlatModel(seeded(make).to(device))
        here = moved(fed, device)
        measure = check_rows(model, nn.functional.cross_entropy, here.train)
        source = ModelSource(here, model, CROSS_ENTROPY, 0.05, 5, seed=1, gradients=gradients)
        engine = CohortEngine(algorithm("ditto", num_local_steps=6), source, participation=0.5)
        state = engine.advance(engine.start(model.params), 3)
        right = numbers_of_rows(model, engine.personal(state), here.test, measure, gradients)[0]
        assert right.device.type == device
        found[device] = state.server.params.cpu(), right.cpu()
    torch.testing.assert_close(found["cuda"][0], found["cpu"][0], rtol=1e-4, atol=1e-5)
    assert (found["cuda"][1] != found["cpu"][1]).sum() <= 2  # a row on the border may fall either way


@needs_gpu
@pytest.mark.parametrize("keys", [(3, torch.arange(5)[:, None], torch.arange(-3, 9)), (torch.arange(4), 7)])
def test_a_gpu_draws_the_same_bits(keys):
    there = [key.cuda() if isinstance(key, torch.Tensor) else key for key in keys]
    assert torch.equal(random_bits(7, "stream", *there).cpu(), random_bits(7, "stream", *keys))


@needs_gpu
def test_a_gpu_draws_the_same_bits_for_clients_side_by_side():
    keys, place = torch.arange(6), torch.arange(4)
    found = torch.func.vmap(lambda key: random_bits(key, "mask", place.cuda()))(keys.cuda())
    assert torch.equal(found.cpu(), random_bits(keys[:, None], "mask", place))
