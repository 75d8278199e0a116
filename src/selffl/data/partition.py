"""How rows with labels are dealt out to clients, as published; each with a seed.

A partition is one client number per row, −1 for a row that nobody gets.  No row is given to two clients.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from selffl.errors import DataError

Integers = npt.NDArray[np.int64]


def two_digits_by_power_law(labels: npt.NDArray[np.integer], seed: int, num_clients: int = 1000) -> Integers:
    """FedProx's MNIST: client u has digits u mod 10 and u + 1 mod 10, ten images at first, then more by a lognormal.

    Every client takes five unused images of each of its digits.  Then, with P ~ lognormal(0, 2) of shape
    (10, M/10, 2) and each digit's entries scaled to sum to what is left of it, client u takes int(P[digit, u // 10, j])
    more of its j-th digit, or none where that would reach the end of the pool.
    """
    if num_clients % 10:
        raise DataError(f"num_clients is {num_clients}; expected a multiple of ten, as there are ten digits.")
    rng = np.random.default_rng(seed)
    pools = [rng.permutation(np.flatnonzero(labels == digit)) for digit in range(10)]
    base = 10 * (num_clients // 10)  # five for each of the 2 M/10 clients that hold a digit
    short = [digit for digit in range(10) if len(pools[digit]) <= base]
    if short:
        raise DataError(f"digit {short[0]} has {len(pools[short[0]])} images; expected more than {base}.")
    taken = [0] * 10
    client = np.full(len(labels), -1, dtype=np.int64)

    def give(digit: int, to: int, count: int) -> None:
        client[pools[digit][taken[digit] : taken[digit] + count]] = to
        taken[digit] += count

    for user in range(num_clients):
        for j in range(2):
            give((user + j) % 10, user, 5)
    wish = rng.lognormal(0.0, 2.0, (10, num_clients // 10, 2))
    left = np.array([len(pool) - base for pool in pools])
    wish *= left[:, None, None] / wish.sum((1, 2), keepdims=True)
    for user in range(num_clients):
        for j in range(2):
            digit = (user + j) % 10
            count = int(wish[digit, user // 10, j])
            if taken[digit] + count < len(pools[digit]):
                give(digit, user, count)
    return client
