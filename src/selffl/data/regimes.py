"""Clients cut from one set of pictures, so that what differs between them is known.

Real federations differ in several ways at once, and nobody knows how much.  Here one thing differs at a time: nothing,
how pictures are taken, how often classes come, how many rows there are, or what a class is called.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from selffl.data import cifar10, digits, letters, mnist
from selffl.data.federation import Federation
from selffl.data.partition import Integers, Labels, class_pools
from selffl.data.split import Split
from selffl.errors import ConfigError, check_known

Floats = npt.NDArray[np.float32]

CONTRAST_SPREAD = 0.4  # standard deviation of the logarithm of a client's contrast, where features are shifted
OFFSET_SPREAD = 0.5  # that of what is added to all its pixels, in standard deviations of a pixel
MAX_NOISE = 1.0  # of the noise on its pixels, in standard deviations of a pixel; from 0 up, evenly
SIZE_SPREAD = 1.0  # standard deviation of the logarithm of lognormal sizes
TINY_SPREAD = 0.5  # that of the sizes of tiny clients
LEAST_ROWS = 4  # that a client is meant to have; where classes run out it gets fewer
EXCHANGED_SHARE = 1 / 3  # of the clients, where labels are exchanged


class Kind(NamedTuple):
    """What differs between clients."""

    title: str
    concentration: float | None = None  # of the Dirichlet distribution of a client's classes; none: as they come
    is_shifted: bool = False  # contrast, offset and noise of their own
    has_few_classes: bool = False
    is_tiny: bool = False
    is_exchanged: bool = False  # some clients call each class by another's name


KINDS = {
    "alike": Kind("clients alike"),
    "shifted": Kind("contrast, offset and noise of their own", is_shifted=True),
    "dirichlet-0.1": Kind("classes by Dirichlet 0.1", 0.1),
    "dirichlet-0.3": Kind("classes by Dirichlet 0.3", 0.3),
    "dirichlet-1": Kind("classes by Dirichlet 1", 1.0),
    "few": Kind("a few classes each", has_few_classes=True),
    "tiny": Kind("a median of eight training rows, classes by Dirichlet 0.3", 0.3, is_tiny=True),
    "exchanged": Kind("a third with labels exchanged in pairs", is_exchanged=True),
}


class Pictures(NamedTuple):
    """A set of pictures, and how many clients it makes."""

    num_clients: int
    mean_rows: int  # of a client, test rows included
    num_tiny: int  # clients, where they are tiny
    num_held: int  # classes of a client, where it has few


PICTURES = {
    "digits": Pictures(40, 40, 150, 2),
    "letters": Pictures(100, 200, 1000, 2),
    "mnist": Pictures(100, 200, 1000, 2),
    "cifar10": Pictures(40, 400, 1000, 3),
}
TEST_SHARE = 0.25
TINY_ROWS = 8 / (1 - TEST_SHARE)  # median rows of tiny clients, test rows included


def regime(
    pictures: str,
    kind: str,
    sizes: str = "even",
    *,
    is_flat: bool = False,
    seed: int = 0,
    validation_fraction: float = 0.0,
) -> Federation:
    """A federation of ``pictures`` whose clients differ as ``kind`` says.

    Args:
        pictures: digits, letters, mnist or cifar10.
        kind: one of `KINDS`.
        sizes: how many rows clients have, ``"even"`` or ``"lognormal"``; tiny clients are lognormal in any case.
        is_flat: whether rows are lists of pixels rather than pictures.
        seed: of who gets which rows, of what differs and of the choice of test rows.
        validation_fraction: share of each client's rows to choose options on.
    """
    for what, name, known in (("pictures", pictures, PICTURES), ("kind", kind, KINDS)):
        check_known(what, name, known)
    if sizes not in ("even", "lognormal"):
        raise ConfigError(f"sizes is {sizes!r}; expected 'even' or 'lognormal'.")
    features, labels = _read(pictures)
    chosen, plan = KINDS[kind], PICTURES[pictures]
    rng = np.random.default_rng([seed, *map(ord, kind)])
    features, labels, client = cut(chosen, plan, sizes, features, labels, rng)
    split = Split(TEST_SHARE, validation_fraction, False, seed)
    rows_of = features.reshape(len(features), -1) if is_flat else features
    return Federation.from_arrays(rows_of, labels, client, **split.options)


def cut(
    kind: Kind, plan: Pictures, sizes: str, features: Floats, labels: Labels, rng: np.random.Generator
) -> tuple[Floats, Labels, Integers]:
    """Pictures as clients have them, what they show there, and whose each is."""
    num_classes = int(labels.max()) + 1
    wanted = _sizes(kind, plan, sizes, rng)
    rows, client = _deal(
        class_pools(labels, num_classes, rng), wanted, _shares(kind, plan, len(wanted), labels, rng), rng
    )
    features, labels = features[rows], labels[rows].astype(np.int64)
    if kind.is_shifted:
        features = _shift_pictures(features, client, len(wanted), rng)
    if kind.is_exchanged:
        is_exchanged = rng.permutation(len(wanted)) < EXCHANGED_SHARE * len(wanted)
        partner = np.minimum(np.arange(num_classes) ^ 1, num_classes - 1)
        labels = np.where(is_exchanged[client], partner[labels], labels)
    return features, labels, client


def _read(pictures: str) -> tuple[Floats, Labels]:
    """Pictures and what they show; letters are the ten most frequent.

    Pixels of digits and CIFAR-10 run from -1 to 1; those of letters and MNIST have mean 0 and standard deviation 1, of
    letters each pixel, of MNIST all together.
    """
    if pictures == "digits":
        images, labels = digits.images_and_labels()
        return (images / 8.0 - 1.0).astype(np.float32), labels
    if pictures == "letters":
        bits, labels = letters.letters_of(letters.FREQUENT)
        return mnist.standardise(bits.astype(np.float32)), labels
    if pictures == "mnist":
        images, labels = mnist.images_and_labels()
        scaled = images.astype(np.float32)
        return ((scaled - scaled.mean()) / scaled.std())[:, None], labels
    images, labels = cifar10.images_and_labels()
    return images.astype(np.float32) / 127.5 - 1.0, labels


def _sizes(kind: Kind, plan: Pictures, sizes: str, rng: np.random.Generator) -> Integers:
    """Rows that each client is meant to have."""
    number = plan.num_tiny if kind.is_tiny else plan.num_clients
    drawn = np.exp(rng.normal(0.0, TINY_SPREAD if kind.is_tiny else SIZE_SPREAD, number))
    if kind.is_tiny:
        drawn *= TINY_ROWS
    elif sizes == "even":
        drawn = np.full(number, float(plan.mean_rows))
    else:
        drawn *= plan.mean_rows * number / drawn.sum()
    return np.maximum(np.rint(drawn), LEAST_ROWS).astype(np.int64)


def _shares(
    kind: Kind, plan: Pictures, number: int, labels: Labels, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """How often each client has each class ``[clients, classes]``."""
    overall = np.bincount(labels) / len(labels)
    if kind.concentration is not None:
        return rng.dirichlet(np.full(len(overall), kind.concentration), number)
    if kind.has_few_classes:
        held = (np.arange(number)[:, None] + np.arange(plan.num_held)) % len(overall)
        found: npt.NDArray[np.float64] = np.eye(len(overall))[held].mean(1)
        return found
    return np.tile(overall, (number, 1))


def _deal(
    pools: list[Integers], wanted: Integers, shares: npt.NDArray[np.float64], rng: np.random.Generator
) -> tuple[Integers, Integers]:
    """Rows and the client of each, none given out twice; clients get fewer of a class that has run out."""
    counts = np.array([rng.multinomial(size, share) for size, share in zip(wanted, shares, strict=True)])
    ends = np.minimum(counts.cumsum(0), [len(pool) for pool in pools])
    starts = np.concatenate([np.zeros_like(ends[:1]), ends[:-1]])
    rows = [
        pool[low:high]
        for each, ending in zip(starts, ends, strict=True)
        for pool, low, high in zip(pools, each, ending, strict=True)
    ]
    return np.concatenate(rows), np.arange(len(wanted)).repeat((ends - starts).sum(1))


def _shift_pictures(features: Floats, client: Integers, number: int, rng: np.random.Generator) -> Floats:
    """Pictures as each client's camera takes them."""
    pixel = float(features.std())
    shape = (-1, *[1] * (features.ndim - 1))
    contrast, offset, noise = (
        drawn.astype(np.float32)[client].reshape(shape)
        for drawn in (
            np.exp(rng.normal(0.0, CONTRAST_SPREAD, number)),
            pixel * rng.normal(0.0, OFFSET_SPREAD, number),
            pixel * rng.uniform(0.0, MAX_NOISE, number),
        )
    )
    return contrast * features + offset + noise * rng.standard_normal(features.shape, dtype=np.float32)
