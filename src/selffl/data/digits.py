"""scikit-learn's digits: 1,797 real 8×8 images inside the wheel, so that everything runs without a download.

Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI (1998).  The split follows the shape of FedProx's
MNIST: a few digits per client, and lognormal sizes.
"""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from selffl.data.dataset import DataSet, named
from selffl.data.federation import Federation
from selffl.data.partition import class_pools, cyclic_classes, deal, shares
from selffl.data.split import Split
from selffl.errors import ConfigError


def images_and_labels() -> tuple[np.ndarray, np.ndarray]:
    """The images ``[1797, 64]`` and what they show.

    From the file inside scikit-learn, if it lies where it has lain for years: importing the whole of it takes longer
    than a round of a federation whose every message is a process of its own.
    """
    package = find_spec("sklearn")
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz" if package and package.origin else None
    if path is None or not path.is_file():
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        return images, labels
    with gzip.open(path, "rt", encoding="ascii") as file:
        table = np.loadtxt(file, delimiter=",")
    return table[:, :-1], table[:, -1].astype(np.int64)


@named("digits", Split(test_fraction=0.3))
def digits(split: Split, num_clients: int = 40, classes_per_client: int = 3) -> Federation:
    """The digits over ``num_clients`` clients, each with a few of the ten classes; sizes are lognormal.

    Pixels are scaled to [-1, 1].  Each client gets at least two images of each of its classes; no image is given out
    twice, and those left when the wanted sizes are met by rounding down go unused.
    """
    images, labels = images_and_labels()
    for name, value in (("classes_per_client", classes_per_client), ("num_clients", num_clients)):
        if not isinstance(value, int):
            raise ConfigError(f"{name} is {value!r}; expected a whole number.")
    if not 1 <= classes_per_client <= 10:
        raise ConfigError(f"classes_per_client is {classes_per_client}; expected 1 to 10.")
    most = int(np.bincount(labels).min() * 10 / (2 * classes_per_client))
    if not 1 <= num_clients <= most:
        raise ConfigError(f"num_clients is {num_clients}; expected 1 to {most} with {classes_per_client} classes each.")
    rng = np.random.default_rng(split.seed)
    wish = rng.lognormal(0.0, 1.2, size=num_clients)
    pools = class_pools(labels, 10, rng)
    holds = cyclic_classes(num_clients, classes_per_client, 10)
    counts = np.zeros((num_clients, 10), dtype=np.int64)
    for digit, pool in enumerate(pools):
        holders = np.flatnonzero((holds == digit).any(1))
        if len(holders):
            counts[holders, digit] = shares(len(pool), wish[holders], 2)
    rows, owner = deal(pools, counts)
    scaled = (images[rows] / 8.0 - 1.0).astype(np.float32)
    return Federation.from_arrays(scaled, labels[rows], owner, **split.options)


DATA_SET = DataSet.described("digits", digits)
