"""The network for wake words."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from selffl.errors import ConfigError
from selffl.models.audio import wakeword_cnn

ROW = (1, 40, 76)


def num_parameters(model):
    return sum(part.numel() for part in model.parameters())


@pytest.mark.slow
def test_it_is_of_the_papers_size():
    """11 convolutions and max-poolings in total, about three million parameters."""
    model = wakeword_cnn(ROW, 2)
    stacked = [layer for layer in model if isinstance(layer, nn.Conv2d | nn.MaxPool2d)]
    assert len(stacked) == 11
    assert num_parameters(model) == 2_937_650
    assert not list(model.buffers())
    with FlopCounterMode(display=False) as counter:
        assert model(torch.zeros(1, *ROW)).shape == (1, 2)
    assert counter.get_total_flops() / 2 == pytest.approx(23.0e6, rel=0.01)  # multiplications a row


@pytest.mark.parametrize("width", [0.02, 0.25, 0.5])
def test_width_scales_the_channels(width):
    model = wakeword_cnn(ROW, 3, width)
    channels = [layer.out_channels for layer in model if isinstance(layer, nn.Conv2d)]
    assert channels == [max(1, round(width * number)) for number in (16, 32, 64, 128, 192, 336, 672)]
    assert model(torch.zeros(4, *ROW)).shape == (4, 3)


@pytest.mark.parametrize("shape", [(1, 16, 48), (2, 64, 101), (1, 17, 63)])
def test_other_rows_will_do(shape):
    assert wakeword_cnn(shape, 2, 0.1)(torch.zeros(2, *shape)).shape == (2, 2)


@pytest.mark.parametrize("shape", [(40, 76), (1, 15, 76), (1, 40, 47), (128,)])
def test_rows_that_are_too_small_are_refused(shape):
    with pytest.raises(ConfigError, match=r"^rows have shape .*; expected spectrograms .* from 16 × 48 up\.$"):
        wakeword_cnn(shape, 2)


@pytest.mark.parametrize("width", [0.0, -1.0, float("inf"), float("nan")])
def test_width_is_checked(width):
    with pytest.raises(ConfigError, match=f"^width is {width}; expected a number above 0"):
        wakeword_cnn(ROW, 2, width)


def test_the_signal_goes_through_all_layers():
    """He's start keeps its size; with PyTorch's own it would fade by orders of magnitude."""
    torch.manual_seed(0)
    model = wakeword_cnn(ROW, 2)
    signal = torch.randn(8, *ROW)
    sizes = []
    for layer in model:
        signal = layer(signal)
        if isinstance(layer, nn.ReLU):
            sizes.append(signal.square().mean().item())
    assert min(sizes) > 0.1
    assert max(sizes) < 10


@pytest.mark.slow
def test_plain_sgd_trains_it():
    """Rising from falling tones, told apart after a few steps: a loss far below that of no opinion, 0.69."""
    torch.manual_seed(1)
    labels = torch.arange(64) % 2
    rows = 0.3 * torch.randn(64, *ROW) - 0.5
    for row, label in zip(rows, labels.tolist(), strict=True):
        shift = int(torch.randint(0, 30, ()))
        for step in range(40):
            row[0, step if label else 39 - step, step + shift] += 1.5
    model = wakeword_cnn(ROW, 2, 0.25)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(40):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(rows), labels)
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.2
