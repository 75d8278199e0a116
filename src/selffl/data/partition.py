"""How rows with labels are dealt out to clients, as published and as commonly done; each with a seed.

A partition is one client number per row, −1 for a row that no client gets.  No row is given to two clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from selffl.errors import ConfigError, DataError

Integers = npt.NDArray[np.int64]
Labels = npt.NDArray[np.integer]


def two_digits_by_power_law(labels: Labels, seed: int, num_clients: int = 1000) -> Integers:
    """FedProx's MNIST: client u has digits u mod 10 and u + 1 mod 10, ten images at first, then more by a lognormal.

    Every client takes five unused images of each of its digits.  Then, with P ~ lognormal(0, 2) of shape
    (10, M/10, 2) and each digit's entries scaled to sum to what is left of it, client u takes int(P[digit, u // 10, j])
    more of its j-th digit, or none where that would reach the end of the pool.
    """
    rng = np.random.default_rng(seed)
    pools = class_pools(labels, 10, rng)
    base = 10 * _tenth(num_clients)  # five for each of the 2 M/10 clients that hold a digit
    short = [digit for digit in range(10) if len(pools[digit]) <= base]
    if short:
        raise DataError(f"digit {short[0]} has {len(pools[short[0]])} images; expected more than {base}.")
    wish = rng.lognormal(0.0, 2.0, (10, num_clients // 10, 2))
    left = np.array([len(pool) - base for pool in pools])
    wish *= left[:, None, None] / wish.sum((1, 2), keepdims=True)
    holds = cyclic_classes(num_clients, 2, 10)
    more = wish[holds, np.arange(num_clients)[:, None] // 10, np.arange(2)].astype(np.int64)
    return _some_then_more(len(labels), pools, holds, 5, more)


def three_classes_by_power_law(labels: Labels, seed: int, num_clients: int = 20) -> Integers:
    """pFedMe's CIFAR-10: client u has classes u, u + 1 and u + 2 mod 10, ten images of each, then more by a lognormal.

    After the ten images of each class, with P ~ lognormal(0, 2) of shape (10, M, 3), each class's entries scaled to sum
    to its number of images less M, and r drawn from 300 … 600, client u takes 2·(int(P[class, u // (M/10), j]) + r)
    more of its j-th class, or none where that would reach the end of the pool.  With more than 20 clients the factor 2
    goes (Dinh et al. 2020, the authors' script).
    """
    rng = np.random.default_rng(seed)
    pools = class_pools(labels, 10, rng)
    step = _tenth(num_clients)
    short = [label for label in range(10) if len(pools[label]) <= 30 * step]
    if short:
        raise DataError(f"class {short[0]} has {len(pools[short[0]])} images; expected more than {30 * step}.")
    wish = rng.lognormal(0.0, 2.0, (10, num_clients, 3))
    total = np.array([max(len(pool) - num_clients, 0) for pool in pools])
    wish *= total[:, None, None] / wish.sum((1, 2), keepdims=True)
    holds = cyclic_classes(num_clients, 3, 10)
    more = wish[holds, np.arange(num_clients)[:, None] // step, np.arange(3)].astype(np.int64)
    more = (2 if num_clients <= 20 else 1) * (more + rng.integers(300, 600, more.shape, endpoint=True))
    return _some_then_more(len(labels), pools, holds, 10, more)


def five_of_ten_letters(labels: Labels, seed: int, num_clients: int = 200, classes_per_client: int = 5) -> Integers:
    """FedProx's nist: client u has classes u … u + 4 mod 10 in equal numbers; sizes are lognormal(4, 1) + 5.

    Of each of its classes a client wants max(2, int(size / classes)) rows.  The published script has 3 classes (the
    Self-FL paper says 5), and by a slip lets clients share rows; here slices are disjoint.  Where a class has
    fewer rows than are wanted of it, every client keeps two, and what it wants beyond them is scaled down.
    """
    _check_number("classes_per_client", classes_per_client, 1, 10)
    _check_number("num_clients", num_clients, 1)
    rng = np.random.default_rng(seed)
    size = rng.lognormal(4.0, 1.0, num_clients) + 5
    wanted = np.maximum(2, (size / classes_per_client).astype(np.int64))
    pools = class_pools(labels, 10, rng)
    holds = cyclic_classes(num_clients, classes_per_client, 10)
    counts = np.zeros((num_clients, 10), dtype=np.int64)
    for label, pool in enumerate(pools):
        holders = np.flatnonzero((holds == label).any(1))
        if len(pool) < 2 * len(holders):
            raise DataError(
                f"class {label} has {len(pool)} rows for {len(holders)} clients; expected two each. Take fewer clients."
            )
        enough = wanted[holders].sum() <= len(pool)
        counts[holders, label] = wanted[holders] if enough else shares(len(pool), wanted[holders] - 2, 2)
    return _owners(len(labels), *deal(pools, counts))


def dirichlet(labels: Labels, seed: int, num_clients: int, concentration: float = 0.5, least: int = 2) -> Integers:
    """Each class is divided among all clients in proportions drawn from a symmetric Dirichlet distribution.

    Small concentrations give clients of few classes and very different sizes, large ones clients that are all similar
    (Hsu, Qi and Brown 2019).  Every row is given out.  A client with fewer than ``least`` rows is mended without
    another draw: one row at a time comes from the client that has most, of the class of which that one has most.
    """
    _check_number("num_clients", num_clients, 1)
    _check_number("least", least, 0)
    if not (np.isfinite(concentration) and concentration > 0):
        raise ConfigError(f"concentration is {concentration}; expected a number above 0.")
    if num_clients * least > len(labels):
        raise ConfigError(f"{num_clients} clients with {least} rows want more than the {len(labels)} there are.")
    rng = np.random.default_rng(seed)
    pools = class_pools(labels, int(labels.max(initial=0)) + 1, rng)
    counts = np.empty((num_clients, len(pools)), dtype=np.int64)
    for label, pool in enumerate(pools):
        bounds = np.cumsum(rng.dirichlet(np.full(num_clients, concentration)))
        bounds = np.rint(len(pool) * bounds / bounds[-1]).astype(np.int64)  # the last is 1 but for rounding
        counts[:, label] = np.diff(bounds, prepend=0)
    sizes = counts.sum(1)
    for client in np.flatnonzero(sizes < least):
        while sizes[client] < least:
            donor = int(sizes.argmax())
            label = int(counts[donor].argmax())
            for who, change in ((donor, -1), (client, 1)):
                counts[who, label] += change
                sizes[who] += change
    return _owners(len(labels), *deal(pools, counts))


def classes_per_client(labels: Labels, seed: int, num_clients: int, num_held: int = 2) -> Integers:
    """Client u has classes u, u + 1, … mod C, as many as ``num_held``; each class is shared evenly by who holds it.

    Shares of one class differ by one row at most, so that clients are of near-equal size where classes are and each
    has as many holders.  With fewer than C clients some classes may have no holder and go unused.
    """
    num_classes = int(labels.max(initial=0)) + 1
    _check_number("num_clients", num_clients, 1)
    _check_number("num_held", num_held, 1, num_classes)
    pools = class_pools(labels, num_classes, np.random.default_rng(seed))
    holds = cyclic_classes(num_clients, num_held, num_classes)
    counts = np.zeros((num_clients, num_classes), dtype=np.int64)
    for label, pool in enumerate(pools):
        holders = np.flatnonzero((holds == label).any(1))
        if len(pool) < len(holders):
            raise DataError(
                f"class {label} has {len(pool)} rows for {len(holders)} clients; expected one each. Take fewer clients."
            )
        if len(holders):
            counts[holders, label] = len(pool) // len(holders)
            counts[holders[: len(pool) % len(holders)], label] += 1
    return _owners(len(labels), *deal(pools, counts))


def class_blocks(
    labels: Labels,
    seed: int,
    num_clients: int,
    num_held: int = 2,
    rows_each: int | None = None,
    *,
    is_even: bool = True,
) -> Integers:
    """Client u has classes h·u, h·u + 1, … mod C, as many as ``num_held`` (h): clients of one block hold the same.

    Each class is shared by its holders: ``rows_each`` rows for every one (pFedBayes's MNIST, five digits and 1,000
    rows of each), or all of it, rounded down to equal shares (pFedGraph's CIFAR-10, two classes).  Where shares are
    not even, all holders but the last draw theirs from a tenth of an equal share up to all of it, and the last has
    the rest (PFLlib's, in which clients of a block follow each other).
    """
    num_classes = int(labels.max(initial=0)) + 1
    _check_number("num_held", num_held, 1, num_classes)
    _check_number("num_clients", num_clients, 1)
    if num_clients * num_held % num_classes:
        raise ConfigError(
            f"{num_clients} clients with {num_held} of {num_classes} classes hold some more often than others; "
            "expected a number of clients with which all classes have as many holders."
        )
    rng = np.random.default_rng(seed)
    pools = class_pools(labels, num_classes, rng)
    holds = (num_held * np.arange(num_clients)[:, None] + np.arange(num_held)) % num_classes
    counts = np.zeros((num_clients, num_classes), dtype=np.int64)
    for label, pool in enumerate(pools):
        holders = np.flatnonzero((holds == label).any(1))
        share = len(pool) // len(holders) if rows_each is None else rows_each
        if share < 1 or share * len(holders) > len(pool):
            raise DataError(
                f"class {label} has {len(pool)} rows for {len(holders)} clients; expected {rows_each or 1} for each. "
                "Take fewer clients, or fewer rows."
            )
        counts[holders, label] = share
        if not is_even:
            exact = len(pool) / len(holders)
            counts[holders[:-1], label] = rng.integers(max(int(exact / 10), 1), max(int(exact), 2), len(holders) - 1)
            counts[holders[-1], label] = len(pool) - counts[holders[:-1], label].sum()
    return _owners(len(labels), *deal(pools, counts))


def capped_dirichlet(
    labels: Labels, seed: int, num_clients: int, concentration: float = 0.1, least: int = 10
) -> Integers:
    """Clients by `dirichlet`, but a client that has its N/M rows gets nothing of the classes that follow.

    Of each class, in their order, such clients' proportions count as 0, and bounds are rounded down.  All of it is
    drawn again until every client has ``least`` rows: pFedGraph's and PFLlib's Dirichlet clients (10 rows and 1), after
    Yurochkin et al. (2019).
    """
    _check_number("num_clients", num_clients, 1)
    _check_number("least", least, 0)
    if not (np.isfinite(concentration) and concentration > 0):
        raise ConfigError(f"concentration is {concentration}; expected a number above 0.")
    if 2 * num_clients * least > len(labels):
        raise ConfigError(
            f"{num_clients} clients with {least} rows want more than half of the {len(labels)} there are, which may "
            "never be drawn; expected fewer."
        )
    rng = np.random.default_rng(seed)
    num_classes = int(labels.max(initial=0)) + 1
    while True:
        pools = class_pools(labels, num_classes, rng)
        counts = np.zeros((num_clients, num_classes), dtype=np.int64)
        for label, pool in enumerate(pools):
            wish = rng.dirichlet(np.full(num_clients, concentration))
            wish = np.where(counts.sum(1) < len(labels) / num_clients, wish, 0.0)
            # A sum that is 1 but for rounding is 1: else who is full would get the last row.
            bounds = np.floor(np.cumsum(wish / wish.sum()) * len(pool) + 1e-6).astype(np.int64)
            counts[:, label] = np.diff(np.append(bounds[:-1], len(pool)), prepend=0)
        if counts.sum(1).min() >= least:
            return _owners(len(labels), *deal(pools, counts))


def evenly(labels: Labels, seed: int, num_clients: int) -> Integers:
    """All rows in a random order, cut into parts whose sizes differ by one at most: clients alike."""
    _check_number("num_clients", num_clients, 1, len(labels))
    client = np.empty(len(labels), dtype=np.int64)
    order = np.random.default_rng(seed).permutation(len(labels))
    client[order] = np.repeat(np.arange(num_clients), [len(part) for part in np.array_split(order, num_clients)])
    return client


# ---------------------------------------------------------------------------------------------------- common parts


def class_pools(labels: Labels, num_classes: int, rng: np.random.Generator) -> list[Integers]:
    """The rows of each class in random order."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(f"labels are {labels.dtype} of shape {labels.shape}; expected one class number per row.")
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        raise DataError(f"label {labels[wrong[0]]} in row {wrong[0]}; expected classes 0 to {num_classes - 1}.")
    return [rng.permutation(np.flatnonzero(labels == label)) for label in range(num_classes)]


def cyclic_classes(num_clients: int, num_held: int, num_classes: int) -> Integers:
    """Client u's j-th class is (u + j) mod C, ``[clients, held]``."""
    return (np.arange(num_clients)[:, None] + np.arange(num_held)) % num_classes


def shares(total: int, wish: npt.NDArray[Any], least: int) -> Integers:
    """``least`` for everybody, and the rest in proportion to ``wish``, rounded down."""
    free = total - least * len(wish)
    given: Integers = least + np.floor(free * wish / wish.sum()).astype(np.int64)
    return given


def deal(pools: Sequence[Integers], counts: Integers) -> tuple[Integers, Integers]:
    """Rows given out by ``counts [clients, classes]``, class by class and client by client, and who gets each."""
    rows = [pool[: counts[:, label].sum()] for label, pool in enumerate(pools)]
    owner = [np.repeat(np.arange(len(counts)), counts[:, label]) for label in range(len(pools))]
    return np.concatenate(rows), np.concatenate(owner)


def _owners(num_rows: int, rows: Integers, owner: Integers) -> Integers:
    """One client number per row."""
    client = np.full(num_rows, -1, dtype=np.int64)
    client[rows] = owner
    return client


def _some_then_more(num_rows: int, pools: Sequence[Integers], holds: Integers, some: int, more: Integers) -> Integers:
    """Client by client the next ``some`` of each class it holds; then ``more``, but none if that would end the pool."""
    taken = [0] * len(pools)
    client = np.full(num_rows, -1, dtype=np.int64)
    for wish, is_wish in ((np.full_like(more, some), False), (more, True)):
        for (user, j), count in np.ndenumerate(wish):
            label = int(holds[user, j])
            end = taken[label] + int(count)
            if is_wish and end >= len(pools[label]):
                continue
            client[pools[label][taken[label] : end]] = user
            taken[label] = end
    return client


def _tenth(num_clients: int) -> int:
    if num_clients % 10 or num_clients < 10:
        raise DataError(f"num_clients is {num_clients}; expected a multiple of ten, as there are ten classes.")
    return num_clients // 10


def _check_number(name: str, value: int, low: int, high: int | None = None) -> None:
    if value < low or (high is not None and value > high):
        raise ConfigError(f"{name} is {value}; expected {low} {'or more' if high is None else f'to {high}'}.")
