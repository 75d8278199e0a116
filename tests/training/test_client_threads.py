"""Clients that are computed by several threads: the same bits as by one, and the gradients of the plain loop."""

import threading

import pytest
import torch
from torch import nn

from selffl.models import build
from selffl.training.blocks import gradient_of, may_be_shared_out
from selffl.training.flat import FlatModel
from selffl.training.threads import do_in_threads

SHAPE, NUM_CLASSES, NUM_CLIENTS, BATCH_SIZE = (3, 32, 32), 10, 5, 8


@pytest.fixture
def threads():
    """Sets how many threads torch has, until the test is over."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def with_norm():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(8, 8, 3, groups=2),
        nn.Flatten(), nn.Linear(1352, NUM_CLASSES),
    )  # fmt: skip


@pytest.fixture(params=["cnn", "norm and dropout", "frozen"])
def given(request):
    """A model, and parameters, images, labels and keys of several clients."""
    torch.manual_seed(0)
    module = with_norm() if request.param == "norm and dropout" else build("cnn", SHAPE, NUM_CLASSES)
    if request.param == "frozen":
        next(module.parameters()).requires_grad_(False)
    model = FlatModel(module.double())
    params = model.params + 0.1 * torch.randn(NUM_CLIENTS, len(model.params), dtype=torch.float64)
    params[:, model.num_parameters :].abs_()
    images = torch.randn(NUM_CLIENTS, BATCH_SIZE, *SHAPE, dtype=torch.float64)
    keys = [torch.arange(NUM_CLIENTS)[:, None]] if model.leaves_out else []
    return model, (params, images, torch.randint(NUM_CLASSES, (NUM_CLIENTS, BATCH_SIZE)), *keys)


@pytest.fixture
def client_by_client(monkeypatch):
    monkeypatch.setattr("selffl.training.blocks.LOOP_FROM", 1)


@pytest.mark.usefixtures("client_by_client")
def test_threads_give_the_gradients_of_the_loop(given, threads):
    model, rows = given
    assert may_be_shared_out(model, nn.functional.cross_entropy, rows[0])
    expected = gradient_of(model, nn.functional.cross_entropy, "loop")(*rows)
    before = [part.clone() for part in model.module.parameters()]
    threads(3)
    found = gradient_of(model, nn.functional.cross_entropy)(*rows)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert all(torch.equal(*pair) for pair in zip(before, model.module.parameters(), strict=True))


@pytest.mark.usefixtures("client_by_client")
def test_the_bits_do_not_depend_on_how_many_threads_there_are(given, threads):
    model, rows = given
    rows = [each.float() if each.is_floating_point() else each for each in rows]
    model = FlatModel(model.module.float())
    found = []
    for number in (1, 2, 4):
        threads(number)
        found.append(gradient_of(model, nn.functional.cross_entropy)(*rows))
        assert torch.get_num_threads() == number
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_code_of_a_user_is_not_shared_out(given):
    model, (params, *_) = given

    class Counting(nn.Sequential):
        pass

    assert not may_be_shared_out(model, lambda *of: nn.functional.cross_entropy(*of), params)
    hook = model.module[0].register_forward_hook(lambda *_: None)
    assert not may_be_shared_out(model, nn.functional.cross_entropy, params)
    hook.remove()
    assert not may_be_shared_out(FlatModel(Counting(*model.module)), nn.functional.cross_entropy, params)


def test_each_place_is_worked_on_once_by_threads_of_one_thread(threads):
    threads(3)
    met, all_here = [], threading.Barrier(3, timeout=20)

    def work(thread, place):
        if place < 3:
            all_here.wait()  # three at a time
        met.append((place, thread, torch.get_num_threads()))

    do_in_threads(work, 11)
    assert sorted(place for place, _, _ in met) == list(range(11))
    assert {thread for _, thread, _ in met} == {0, 1, 2}
    assert {number for _, _, number in met} == {1}
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("fails", [0, 5])
def test_a_failure_in_a_thread_is_the_callers(threads, fails):
    threads(2)

    def work(_, place):
        if place == fails:
            raise ValueError("no such place")

    with pytest.raises(ValueError, match="no such place"):
        do_in_threads(work, 6)
    assert torch.get_num_threads() == 2
