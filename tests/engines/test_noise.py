"""Noise on sums: as much as is asked for, the same for the same seed, and of no pattern where nobody may repeat it."""

import pytest
import torch
from scipy import stats

from selffl.algorithms import algorithm
from selffl.algorithms.averaging import ModelUpload
from selffl.engines.limits import PrivacyOptions, SumLimits
from selffl.engines.noise import add_noise, secure_noise, seeded_noise
from selffl.engines.rounds import GatheredUploads

SUMS = SumLimits(algorithm("fedavg"), PrivacyOptions(clip=3.0, max_weight=2.0, noise_multiplier=1.5))


def sums(*shape, num_params=20_000):
    return ModelUpload(torch.zeros(*shape, num_params), torch.zeros(shape))


@pytest.mark.parametrize("draw", [seeded_noise(5, 2), secure_noise], ids=["seeded", "secure"])
def test_the_numbers_are_standard_normal(draw):
    numbers = draw("change", torch.Size([50_000]))
    assert stats.kstest(numbers.numpy(), "norm").pvalue > 1e-4
    assert numbers.unique().numel() == 50_000


def test_each_sum_gets_its_own_scale():
    found, scales = add_noise(SUMS, sums(), 100, seeded_noise(0, 1))
    assert scales == {"change": pytest.approx(2 * 1.5 * 3.0 * 2.0), "weight": pytest.approx(1.5 * 2.0 / 0.75**0.5)}
    assert found.change.std().item() == pytest.approx(scales["change"], rel=0.03)
    heavy = ModelUpload(torch.zeros(1), torch.tensor(100.0))
    draws = [add_noise(SUMS, heavy, 100, seeded_noise(0, number))[0].weight for number in range(2000)]
    assert torch.stack(draws).std().item() == pytest.approx(scales["weight"], rel=0.06)


def test_a_noisy_weight_below_zero_does_not_turn_the_step_round():
    found, _ = add_noise(SUMS, ModelUpload(torch.ones(3), torch.tensor(-50.0)), 4, seeded_noise(0, 1))
    assert found.weight.item() == pytest.approx(0.1 * 2.0 * 4)  # a tenth of what four clients can weigh


def test_seeded_noise_is_the_same_again_and_another_elsewhere():
    shape = torch.Size([100])
    first = seeded_noise(3, 4)("change", shape)
    assert first.equal(seeded_noise(3, 4)("change", shape))
    for other in (seeded_noise(3, 5), seeded_noise(4, 4)):
        assert not first.equal(other("change", shape))
    assert not first.equal(seeded_noise(3, 4)("square", shape))


def test_independent_federations_have_their_own_noise_as_if_alone():
    limits = SumLimits(SUMS.method, SUMS.options, axis=1)
    together, _ = add_noise(limits, sums(2, num_params=30), 5, seeded_noise(torch.tensor([8, 9]), 1))
    for place, seed in enumerate((8, 9)):
        alone, _ = add_noise(SUMS, sums(num_params=30), 5, seeded_noise(seed, 1))
        assert together.change[place].equal(alone.change)


def test_secure_noise_is_never_the_same():
    assert not secure_noise("change", torch.Size([8])).equal(secure_noise("change", torch.Size([8])))


def test_sums_of_rows_are_exact_beyond_two_to_the_24():
    gathered = GatheredUploads(algorithm("fedavg"), 0)
    for rows in (2.0**24, 1.0, 1.0):
        gathered.add(torch.tensor([0]), ModelUpload(torch.tensor([[rows]]), torch.tensor([rows])))
    assert gathered.upload().weight.item() == 2**24 + 2  # in float32 it would stay at 2^24
    assert gathered.upload().change.item() == 2**24 + 2


def test_bounds_without_a_multiplier_bring_no_noise():
    given = sums()
    quiet = SumLimits(SUMS.method, PrivacyOptions(clip=3.0, max_weight=2.0))
    assert add_noise(quiet, given, 5, secure_noise) == (given, {})
