"""Noise on sums: as much as is asked for, the same for the same seed, and of no pattern where nobody may repeat it."""

import pytest
import torch
from scipy import stats

from selffl.algorithms import algorithm
from selffl.algorithms.self_fl_sums import SumsUpload
from selffl.engines.noise import add_noise, secure_noise, seeded_noise

BOUNDS = {"clip": 3.0, "max_weight": 2.0}


def sums(*shape, num_params=20_000):
    return SumsUpload(torch.zeros(*shape, num_params), torch.zeros(shape), torch.zeros(shape))


@pytest.mark.parametrize("draw", [seeded_noise(5, 2), secure_noise], ids=["seeded", "secure"])
def test_the_numbers_are_standard_normal(draw):
    numbers = draw("change", torch.Size([50_000]))
    assert stats.kstest(numbers.numpy(), "norm").pvalue > 1e-4
    assert numbers.unique().numel() == 50_000


def test_each_sum_gets_its_own_scale():
    method = algorithm("self-fl-sums", **BOUNDS, noise_multiplier=1.5)
    found = add_noise(method, sums(), seeded_noise(0, 1))
    unit = 2 * 1.5 * 2.0  # sensitivity, multiplier, weight
    assert found.change.std().item() == pytest.approx(unit * 3.0, rel=0.03)
    draws = [add_noise(method, sums(num_params=1), seeded_noise(0, number)) for number in range(2000)]
    for name, scale in (("weight", unit * 2**0.5), ("square", unit * 2**0.5 * 9.0)):
        found = torch.stack([getattr(draw, name) for draw in draws])
        assert found.std().item() == pytest.approx(scale, rel=0.06)


def test_seeded_noise_is_the_same_again_and_another_elsewhere():
    shape = torch.Size([100])
    first = seeded_noise(3, 4)("change", shape)
    assert first.equal(seeded_noise(3, 4)("change", shape))
    for other in (seeded_noise(3, 5), seeded_noise(4, 4)):
        assert not first.equal(other("change", shape))
    assert not first.equal(seeded_noise(3, 4)("square", shape))


def test_independent_federations_have_their_own_noise_as_if_alone():
    method = algorithm("self-fl-sums", **BOUNDS, noise_multiplier=1.0)
    together = add_noise(method, sums(2, num_params=30), seeded_noise(torch.tensor([8, 9]), 1))
    for place, seed in enumerate((8, 9)):
        alone = add_noise(method, sums(num_params=30), seeded_noise(seed, 1))
        assert together.change[place].equal(alone.change)


def test_secure_noise_is_never_the_same():
    assert not secure_noise("change", torch.Size([8])).equal(secure_noise("change", torch.Size([8])))


def test_nobody_who_does_not_ask_gets_noise():
    given = sums()
    assert add_noise(algorithm("self-fl-sums", **BOUNDS), given, secure_noise) is given
    assert add_noise(algorithm("self-fl"), given, secure_noise) is given
