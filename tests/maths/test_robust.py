"""Robust means against NumPy and SciPy, and what one vector of many can do to them."""

import numpy as np
import pytest
import torch
from scipy.stats import trim_mean

from selffl.maths import robust


def vectors(number=12, size=5, seed=0):
    return torch.randn(number, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("number", [1, 2, 7, 12])
def test_the_median_is_numpys(number):
    given = vectors(number)
    np.testing.assert_array_equal(robust.median(given, 0)[0], np.median(given, axis=0))
    np.testing.assert_array_equal(robust.take_median(given), np.tile(np.median(given, axis=0), (number, 1)))


@pytest.mark.parametrize("number", [1, 3, 4, 9, 12])
def test_the_trimmed_mean_is_scipys(number):
    given = vectors(number)
    found = robust.trim(given, torch.ones(number, dtype=torch.float64)).mean(0)
    np.testing.assert_allclose(found, trim_mean(given.numpy(), robust.TRIMMED_SHARE, axis=0), rtol=1e-12)


def test_what_is_trimmed_is_the_mean_of_the_rest_by_weight():
    given, weights = vectors(8), torch.arange(1.0, 9.0, dtype=torch.float64)
    found = robust.trim(given, weights)
    for place in range(given.shape[1]):
        kept = np.argsort(given[:, place].numpy())[2:-2]
        expected = np.average(given[kept, place], weights=weights[kept])
        assert np.average(found[:, place], weights=weights) == pytest.approx(expected, rel=1e-12)


def test_nothing_is_longer_than_the_median_length_and_short_ones_stay():
    given = vectors(9)
    found, length = robust.clip_lengths(given), given.norm(dim=1)
    middle = length.median()
    torch.testing.assert_close(found.norm(dim=1), length.clamp(max=middle))
    assert torch.equal(found[length <= middle], given[length <= middle])
    torch.testing.assert_close(found / found.norm(dim=1, keepdim=True), given / length.unsqueeze(1))


def test_vectors_of_no_length_stay_so():
    nothing = torch.zeros(5, 3)
    for found in (robust.clip_lengths(nothing), robust.draw_to_centre(nothing, torch.ones(5))):
        assert torch.equal(found, nothing)


def test_what_is_plausible_stays_and_what_is_far_off_counts_for_ever_less():
    given = vectors(9, 40)
    assert torch.equal(robust.draw_to_centre(given, torch.ones(9, dtype=torch.float64)), given)
    shares = []
    for distance in (1e2, 1e4, 1e6):
        lied = given.clone()
        lied[0] = distance
        found = robust.draw_to_centre(lied, torch.ones(9, dtype=torch.float64))
        assert torch.equal(found[1:], lied[1:])
        shares.append((found[0] - torch.from_numpy(np.median(lied, axis=0))).norm().item())
    assert shares[0] > 50 * shares[1] > 2500 * shares[2]


def test_who_is_uncertain_may_be_further_off():
    given = vectors(9, 40)
    given[0] *= 4
    certain, uncertain = torch.ones(9, dtype=torch.float64), torch.ones(9, dtype=torch.float64)
    uncertain[0] = 16.0
    assert not torch.equal(robust.draw_to_centre(given, certain)[0], given[0])
    assert torch.equal(robust.draw_to_centre(given, uncertain), given)


def test_nobody_weighs_many_times_as_much_as_the_middle():
    assert robust.cap_weights(torch.tensor([1.0, 2.0, 3.0, 6.5, 1e9])).tolist() == [1.0, 2.0, 3.0, 6.5, 9.0]


def by_the_book(given, variances):
    """Implausible vectors drawn to the median, one client after the other."""
    centre = np.median(given, axis=0)
    ratios = [np.sum((each - centre) ** 2) / variance for each, variance in zip(given, variances, strict=True)]
    most = robust.PLAUSIBLE * np.median(ratios)
    return [
        centre + most / ratio * (each - centre) if ratio > most else each
        for each, ratio in zip(given, ratios, strict=True)
    ]


def test_the_implausible_are_drawn_as_far_as_they_are_implausible():
    given, variances = vectors(9, 6) + 3.0, torch.linspace(0.5, 2.0, 9, dtype=torch.float64)
    given[2], given[5] = -40.0, torch.arange(6.0, dtype=torch.float64) * 90.0
    expected = by_the_book(given.numpy(), variances.numpy())
    assert not np.array_equal(expected[2], given[2])
    np.testing.assert_allclose(robust.draw_to_centre(given, variances), np.stack(expected), rtol=1e-12)


def test_federations_side_by_side_are_each_as_alone():
    """As many federations as clients, or as numbers, or other ones: no axis is taken for another."""
    for shape in ((2, 9, 5), (5, 5, 5), (9, 9, 4), (3, 2, 8, 5)):
        given = vectors(int(np.prod(shape[:-1])), shape[-1], seed=1).reshape(shape) ** 3  # some far off
        weights = given.abs().sum(-1) + 0.1
        for each in (
            lambda part, _: robust.clip_lengths(part),
            lambda part, _: robust.take_median(part),
            robust.trim,
            robust.draw_to_centre,
            lambda _, weight: robust.cap_weights(weight),
        ):
            found = each(given, weights)
            for place in np.ndindex(shape[:-2]):
                torch.testing.assert_close(found[place], each(given[place], weights[place]), rtol=1e-12, atol=0)
