from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from scipy import stats

from selffl.randomness import _mix, integers, normal, random_bits, smallest_uniforms, uniform

COUNT = 20_000
WORD = (1 << 64) - 1
GOLDEN, MULTIPLY_1, MULTIPLY_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(bits):
    """SplitMix64's finaliser on Python's own integers."""
    bits = ((bits ^ (bits >> 30)) * MULTIPLY_1) & WORD
    bits = ((bits ^ (bits >> 27)) * MULTIPLY_2) & WORD
    return bits ^ (bits >> 31)


def unmix(bits):
    """The key that mixes to these bits: each step of :func:`mix` undone."""

    def unshift(value, by):
        found = value
        for _ in range(64 // by + 1):
            found = value ^ (found >> by)
        return found

    bits = (unshift(bits, 31) * pow(MULTIPLY_2, -1, 1 << 64)) & WORD
    bits = (unshift(bits, 27) * pow(MULTIPLY_1, -1, 1 << 64)) & WORD
    return unshift(bits, 30)


def plain_bits(seed, stream, *keys):
    state = 0
    for word in (seed, zlib.crc32(stream.encode()), *keys):
        state = mix(((state ^ mix((word + GOLDEN) & WORD)) + GOLDEN) & WORD)
    return state


def signed(bits):
    return bits - (1 << 64) if bits >> 63 else bits


def test_mix_is_the_published_splitmix64():
    # The first outputs of the reference implementation (Vigna's splitmix64.c) from state 1234567.
    states = [(1234567 + step * GOLDEN) & WORD for step in (1, 2, 3)]
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [mix(state) for state in states] == published
    assert _mix(torch.tensor([signed(state) for state in states])).tolist() == [signed(bits) for bits in published]
    assert [unmix(mix(value)) for value in (0, 1, 41, WORD)] == [0, 1, 41, WORD]


@pytest.mark.parametrize("keys", [(0, "", 0), (7, "cohort", 3, 41), (-1, "noise", -5, 2**62, 0), (2**63 - 1, "x")])
def test_bits_equal_plain_integer_arithmetic(keys):
    assert int(random_bits(*keys)) == signed(plain_bits(*keys))
    assert float(uniform(*keys)) == pytest.approx((plain_bits(*keys) >> 11) / 2**53, abs=2.0**-53)


@pytest.mark.parametrize("draw", [random_bits, uniform, normal])
def test_broadcast_keys_equal_one_by_one(draw):
    rounds, clients = torch.tensor([0, 3, 99]), torch.arange(5) * 7 - 3
    whole = draw(7, "cohort", rounds[:, None], clients)
    assert whole.shape == (3, 5)
    for i, j in np.ndindex(3, 5):
        assert whole[i, j] == draw(7, "cohort", int(rounds[i]), int(clients[j]))
    assert draw(7, "cohort", 3, 4).shape == ()


def test_the_seed_may_be_a_tensor_too():
    seeds = torch.tensor([1, 2, 3])
    whole = uniform(seeds[:, None], "cohort", torch.arange(4))
    for i in range(3):
        torch.testing.assert_close(whole[i], uniform(int(seeds[i]), "cohort", torch.arange(4)), rtol=0, atol=0)


def test_a_block_of_clients_does_not_depend_on_the_blocks():
    order = torch.tensor([4, 0, 2, 3, 1])
    whole = normal(7, "noise", 3, torch.arange(5))
    torch.testing.assert_close(normal(7, "noise", 3, order), whole[order], rtol=0, atol=0)
    torch.testing.assert_close(normal(7, "noise", 3, torch.arange(2, 5)), whole[2:], rtol=0, atol=0)


def test_dtypes_and_whole_number_kinds():
    assert random_bits(1, "a", torch.arange(3)).dtype == torch.int64
    assert uniform(1, "a", torch.arange(3)).dtype == normal(1, "a", torch.arange(3)).dtype == torch.float64
    assert integers(5, 1, "a", torch.arange(3)).dtype == torch.int64
    small = torch.arange(3, dtype=torch.int32)
    torch.testing.assert_close(uniform(1, "a", small), uniform(1, "a", small.long()), rtol=0, atol=0)


def test_global_generators_are_neither_read_nor_moved():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = uniform(7, "cohort", torch.arange(5))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(uniform(7, "cohort", torch.arange(5)), first)


def test_seeds_streams_and_keys_all_differ():
    grid = torch.arange(20)
    seeds, rounds, clients = grid[:, None, None] - 10, grid[:, None], grid
    found = torch.cat(
        [random_bits(seeds, stream, rounds, clients).flatten() for stream in ("cohort", "noise", "a", "")]
    )
    assert len(found) == len(set(found.tolist())) == 4 * 20**3


def test_order_and_number_of_keys_matter():
    calls = [
        (7, "a", 1, 2),
        (7, "a", 2, 1),
        (1, "a", 7, 2),
        (7, "a", 1),
        (7, "a", 1, 2, 0),
        (7, "a", 0, 1, 2),
        (7, "a"),
    ]
    assert len({int(random_bits(*call)) for call in calls}) == len(calls)


def test_every_bit_of_a_key_moves_about_half_the_output():
    base = np.arange(500) * 1_000_003
    start = random_bits(7, "a", torch.tensor(base)).numpy()
    for bit in range(0, 63, 3):
        moved = random_bits(7, "a", torch.tensor(base ^ (1 << bit))).numpy()
        flips = np.unpackbits((start ^ moved).view(np.uint8).reshape(-1, 8), axis=1)
        assert flips.mean() == pytest.approx(0.5, abs=0.02)  # seven standard errors
        assert (abs(flips.mean(0) - 0.5) < 0.12).all()  # each output bit: more than five


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40])
@pytest.mark.parametrize("vary", ["first key", "second key", "seed", "grid"])
def test_uniform_is_uniform(seed, vary):
    index = torch.arange(COUNT)
    found = {
        "first key": lambda: uniform(seed, "a", index, 3),
        "second key": lambda: uniform(seed, "a", 3, index),
        "seed": lambda: uniform(index + seed, "a", 3),
        "grid": lambda: uniform(seed, "a", (index // 100), index % 100),
    }[vary]().numpy()
    assert ((found > 0) & (found < 1)).all()
    assert stats.kstest(found, "uniform").pvalue > 1e-3
    assert abs(found.mean() - 0.5) < 4 * np.sqrt(1 / 12 / COUNT)


def test_low_bits_are_as_good_as_high_ones():
    bits = random_bits(3, "a", torch.arange(COUNT)).numpy()
    planes = np.unpackbits(bits.view(np.uint8).reshape(-1, 8), axis=1)
    assert (abs(planes.mean(0) - 0.5) < 4.5 * 0.5 / np.sqrt(COUNT)).all()


def neighbours():
    index = torch.arange(COUNT)
    return {
        "keys": (uniform(7, "a", index, 3), uniform(7, "a", index + 1, 3)),
        "last keys": (uniform(7, "a", 3, index), uniform(7, "a", 3, index + 1)),
        "seeds": (uniform(7, "a", index), uniform(8, "a", index)),
        "streams": (uniform(7, "a", index), uniform(7, "b", index)),
        "swapped keys": (uniform(7, "a", index, index + 1), uniform(7, "a", index + 1, index)),
        "seed and key": (uniform(7, "a", index), uniform(index, "a", 7)),
        "rounds": (uniform(7, "a", 1, index), uniform(7, "a", 2, index)),
        "powers of two": (uniform(7, "a", index), uniform(7, "a", index + 2**32)),
    }


@pytest.mark.parametrize("name", neighbours())
def test_neighbours_are_not_correlated(name):
    a, b = (value.numpy() for value in neighbours()[name])
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(COUNT)
    table = np.histogram2d(a, b, bins=8, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(table.ravel()).pvalue > 1e-3
    difference = (a - b) % 1.0  # a lag that is constant, or lands on few values, would show here
    assert stats.kstest(difference, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_normal_is_standard_normal(seed):
    found = normal(seed, "noise", torch.arange(COUNT)).numpy()
    assert np.isfinite(found).all()
    assert stats.kstest(found, "norm").pvalue > 1e-3
    assert found.var() == pytest.approx(1.0, abs=4 * np.sqrt(2 / COUNT))
    assert stats.kurtosis(found) == pytest.approx(0.0, abs=4 * np.sqrt(24 / COUNT))


def test_normal_is_the_quantile_of_uniform():
    index = torch.arange(1000)
    np.testing.assert_allclose(normal(1, "a", index), stats.norm.ppf(uniform(1, "a", index)), rtol=1e-9)


@pytest.mark.parametrize("high", [1, 2, 7, 100])
def test_integers_are_in_range_and_even(high):
    found = integers(high, 5, "rows", torch.arange(COUNT)).numpy()
    counts = np.bincount(found, minlength=high)
    assert found.min() == 0
    assert len(counts) == high
    if high > 1:
        assert stats.chisquare(counts).pvalue > 1e-3


def test_integers_take_a_different_high_for_each_client():
    high = torch.tensor([1, 2, 10, 1000, 2**31])
    found = integers(high, 5, "rows", torch.arange(5000)[:, None], torch.arange(5))
    assert found.shape == (5000, 5)
    assert (found >= 0).all()
    assert (found < high).all()
    for j in range(5):
        torch.testing.assert_close(found[:, j], integers(int(high[j]), 5, "rows", torch.arange(5000), j))
        share = (found[:, j].double() + 0.5) / high[j]
        assert float(share.mean()) == pytest.approx(0.5, abs=4 * np.sqrt(1 / 12 / 5000))


def key_for(bits):
    """The one key after seed 7 and stream "a" whose 64 bits are these."""
    before = plain_bits(7, "a")
    return signed((unmix(before ^ ((unmix(bits) - GOLDEN) & WORD)) - GOLDEN) & WORD)


def test_the_smallest_bits_give_numbers_above_zero():
    key = key_for(0)
    assert int(random_bits(7, "a", key)) == 0
    assert float(uniform(7, "a", key)) == 2.0**-53
    assert np.isfinite(float(normal(7, "a", key)))
    assert int(integers(10, 7, "a", key)) == 0


def test_the_largest_bits_give_the_largest_integer():
    key = key_for(WORD)
    assert int(random_bits(7, "a", key)) == -1
    assert int(integers(10, 7, "a", key)) == 9


def test_the_largest_bits_give_numbers_below_one():
    key = key_for(WORD)
    assert float(uniform(7, "a", key)) < 1.0
    assert np.isfinite(float(normal(7, "a", key)))


@pytest.mark.parametrize(("size", "number"), [(1, 2), (3, 7), (99, 100), (10, 40_000), (500, 100_001)])
def test_the_smallest_of_many_are_those_of_all_of_them(size, number):
    for seed, key in ((0, 1), (2**62, 9)):
        lots = uniform(seed, "cohort", key, torch.arange(number))
        expected = lots.topk(size, largest=False).indices.sort().values
        assert torch.equal(smallest_uniforms(size, number, seed, "cohort", key), expected)


def test_where_too_few_are_below_the_limit_all_are_looked_at(monkeypatch):
    monkeypatch.setattr("selffl.randomness.math.ceil", lambda _: 1)
    assert len(smallest_uniforms(50, 100, 0, "cohort", 1)) == 50
