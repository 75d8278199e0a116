"""Random numbers addressed by what they are for, not by when they were asked for.

A number depends on (seed, stream, keys), for example (7, "cohort", round 3, client 41), and on nothing else.
So the order of clients, the size of a block, the number of processes and a resume in the middle change nothing,
and every draw of a whole cohort is one vector operation.

NumPy's and PyTorch's generators are sequences; one per client and round would be a Python loop.  The mixing
function here is SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014, "Fast splittable pseudorandom number
generators"), applied once per key.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.cuda.jiterator import _create_jit_fn

Drawn = TypeVar("Drawn")
Bits = TypeVar("Bits", Tensor, NDArray[np.int64])


def _to_signed(value: int) -> int:
    """A 64-bit pattern as the signed integer torch stores."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _to_signed(0x9E3779B97F4A7C15)
_MULTIPLY_1 = _to_signed(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = _to_signed(0x94D049BB133111EB)
_ALL_BITS = (1 << 64) - 1
_BLOCK = 1 << 15  # numbers that are made at once where few of many are wanted
_KEPT_BLOCKS = 64  # of mixed keys, 16 MB


def _shift(bits: Bits, by: int) -> Bits:
    """Logical right shift; that of signed numbers is arithmetic."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _mix(bits: Bits) -> Bits:
    """SplitMix64's finaliser: every input bit reaches every output bit."""
    bits = (bits ^ _shift(bits, 30)) * _MULTIPLY_1
    bits = (bits ^ _shift(bits, 27)) * _MULTIPLY_2
    return bits ^ _shift(bits, 31)


def _mix_number(bits: int) -> int:
    """Mix the bits of one number: Python takes a microsecond, torch for a tensor of one seventy."""
    bits &= _ALL_BITS
    bits = (bits ^ bits >> 30) * _MULTIPLY_1 & _ALL_BITS
    bits = (bits ^ bits >> 27) * _MULTIPLY_2 & _ALL_BITS
    return _to_signed(bits ^ bits >> 31)


# One more key, mixed into the bits of those before it, as one kernel on a GPU: in torch's operations it is twenty-six.
_FOLD = """
template <typename T> T fold(T before, T key) {
  const unsigned long long golden = 0x9E3779B97F4A7C15ULL;
  unsigned long long bits = (unsigned long long)key + golden;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9ULL;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBULL;
  bits = ((bits ^ (bits >> 31)) ^ (unsigned long long)before) + golden;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9ULL;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBULL;
  return (T)(bits ^ (bits >> 31));
}
"""


@cache
def _fold_on_gpu() -> Callable[[Tensor, Tensor], Tensor]:
    """The kernel, compiled when it is first called."""
    found: Callable[[Tensor, Tensor], Tensor] = _create_jit_fn(_FOLD)
    return found


def _is_wrapped(*values: int | Tensor) -> bool:
    """Whether any of them is what vmap makes of a tensor, whose numbers nobody can read."""
    return any(isinstance(value, Tensor) and is_functorch_wrapped_tensor(value) for value in values)


def random_bits(seed: int | Tensor, stream: str, *keys: int | Tensor) -> Tensor:
    """64 random bits for each combination of the broadcast keys, as int64.

    On a CPU by NumPy, whose operations on few numbers take a third of the time of torch's.
    """
    words = [torch.as_tensor(key, dtype=torch.int64) for key in (seed, zlib.crc32(stream.encode()), *keys)]
    device = next((word.device for word in words if word.device.type != "cpu"), words[0].device)
    state: Any = 0  # a number, an array or a tensor
    for key in _plain_keys(words, device):
        if isinstance(key, Tensor) and device.type == "cuda" and not _is_wrapped(key, state):
            before = torch.full((), state, device=device) if isinstance(state, int) else state
            state = _fold_on_gpu()(before, key)
            continue
        mixed = _mix_number(key + _GOLDEN) if isinstance(key, int) else _mix(key + _GOLDEN)
        total = (state ^ mixed) + _GOLDEN
        state = _mix_number(total) if isinstance(total, int) else _mix(total)
    return torch.as_tensor(state, device=device)


def _plain_keys(words: list[Tensor], device: torch.device) -> list[Any]:
    """Numbers as integers, and the others as arrays on a CPU, as tensors on a GPU and within torch's vmap."""
    on_cpu = device.type == "cpu" and not _is_wrapped(*words)
    return [
        int(word) if word.ndim == 0 and word.device.type == "cpu" and not _is_wrapped(word)
        else word.numpy() if on_cpu else word.to(device)
        for word in words
    ]  # fmt: skip


def uniform(seed: int | Tensor, stream: str, *keys: int | Tensor) -> Tensor:
    """Uniform numbers in the open interval (0, 1), float64, one per combination of the broadcast keys.

    Examples:
        >>> from selffl.randomness import uniform
        >>> whole = uniform(7, "cohort", 3, torch.arange(5))
        >>> bool(whole[4] == uniform(7, "cohort", 3, 4))
        True
    """
    # 52 bits and a half step fill the mantissa exactly: 0 and 1 stay out, logarithms and quantiles stay finite.
    return (_shift(random_bits(seed, stream, *keys), 12).to(torch.float64) + 0.5) * 2.0**-52


def smallest_uniforms(size: int, number: int, seed: int, stream: str, *keys: int) -> Tensor:
    """Which ``size`` of ``uniform(seed, stream, *keys, torch.arange(number))`` are the smallest, ascending.

    The numbers are made a block at a time, which stays in the cache, and only those that can be among the smallest are
    kept: of a million nine times as fast as all of them at once.

    Examples:
        >>> from selffl.randomness import smallest_uniforms, uniform
        >>> lots = uniform(7, "cohort", 3, torch.arange(5))
        >>> smallest_uniforms(2, 5, 7, "cohort", 3).tolist() == sorted(lots.argsort()[:2].tolist())
        True
    """
    before = 0
    for word in (seed, zlib.crc32(stream.encode()), *keys):
        before = _mix_number((before ^ _mix_number(word + _GOLDEN)) + _GOLDEN)
    # Ten standard deviations beyond the expected: in case that were too few, all of them.
    wanted = math.ceil(size + 10.0 * math.sqrt(size) + 10.0)
    for limit in (min(_ALL_BITS * wanted // number, _ALL_BITS), _ALL_BITS):
        found = [_below(limit, before, start, min(start + _BLOCK, number)) for start in range(0, number, _BLOCK)]
        places, lots = (np.concatenate(parts) for parts in zip(*found, strict=True))
        if len(places) >= size:
            break
    return torch.from_numpy(np.sort(places[np.argpartition(lots, size - 1)[:size]]))


def _below(limit: int, before: int, start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Which last keys from ``start`` to ``stop - 1`` give bits of at most ``limit``, and the bits of a uniform number.

    ``before`` is what the keys before the last have come to.
    """
    bits = _mix_array(_mixed_keys(start, stop) ^ np.uint64(before & _ALL_BITS))
    places = np.flatnonzero(bits <= np.uint64(limit))
    return places + start, bits[places] >> np.uint64(12)


@lru_cache(maxsize=_KEPT_BLOCKS)
def _mixed_keys(start: int, stop: int) -> NDArray[np.uint64]:
    """The keys from ``start`` to ``stop - 1``, mixed: the same for every seed and round."""
    return _mix_array(np.arange(start, stop, dtype=np.uint64))


def _mix_array(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`_mix` of ``bits`` and the golden ratio, in their place."""
    spare = np.empty_like(bits)
    bits += np.uint64(_GOLDEN & _ALL_BITS)
    for by, factor in ((30, _MULTIPLY_1), (27, _MULTIPLY_2)):
        np.right_shift(bits, np.uint64(by), out=spare)
        bits ^= spare
        bits *= np.uint64(factor & _ALL_BITS)
    np.right_shift(bits, np.uint64(31), out=spare)
    bits ^= spare
    return bits


def normal(seed: int | Tensor, stream: str, *keys: int | Tensor) -> Tensor:
    """Standard normal numbers, float64, one per combination of the broadcast keys."""
    quantiles: Tensor = torch.special.ndtri(uniform(seed, stream, *keys))
    return quantiles


def secret_normal(shape: torch.Size) -> Tensor:
    """Standard normal numbers from the operating system's generator, float64, which nobody can repeat."""
    words = np.frombuffer(os.urandom(8 * shape.numel()), dtype=np.uint64) >> np.uint64(12)
    draws = (torch.from_numpy(words.astype(np.float64)) + 0.5) * 2.0**-52
    quantiles: Tensor = torch.special.ndtri(draws).reshape(shape)
    return quantiles


def integers(high: int | Tensor, seed: int | Tensor, stream: str, *keys: int | Tensor) -> Tensor:
    """Integers from 0 to high − 1, one per combination of the broadcast keys; high may differ between them."""
    draw = uniform(seed, stream, *keys)
    limit = torch.as_tensor(high, device=draw.device)
    return torch.minimum((draw * limit).to(torch.int64), limit - 1)


def draw_network(make: Callable[[], Drawn], seed: int = 0) -> Drawn:
    """What ``make`` makes, its first weights drawn by torch from a seed, on the CPU whatever the default is."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return make()
