"""scikit-learn's digits: 1,797 real 8×8 images inside the wheel, so that everything runs without a download.

Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI (1998).  The split follows the shape of FedProx's
MNIST: a few digits per client, and lognormal sizes.
"""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

from selffl.data.federation import Federation, check_seed
from selffl.errors import ConfigError


def digits(num_clients: int = 40, classes_per_client: int = 3, test_fraction: float = 0.3, seed: int = 0) -> Federation:
    """The digits over ``num_clients`` clients, each with a few of the ten classes; sizes are lognormal.

    Pixels are scaled to [-1, 1].  Each client gets at least two images of each of its classes; no image is given out
    twice, and those left when the wanted sizes are met by rounding down go unused.
    """
    check_seed(seed)
    images, labels = load_digits(return_X_y=True)
    if not 1 <= classes_per_client <= 10:
        raise ConfigError(f"classes_per_client is {classes_per_client}; expected 1 to 10.")
    most = int(np.bincount(labels).min() * 10 / (2 * classes_per_client))
    if not 1 <= num_clients <= most:
        raise ConfigError(f"num_clients is {num_clients}; expected 1 to {most} with {classes_per_client} classes each.")
    rng = np.random.default_rng(seed)
    holds = [[(client + j) % 10 for j in range(classes_per_client)] for client in range(num_clients)]
    rows, owner = [], []
    wish = rng.lognormal(0.0, 1.2, size=num_clients)
    for digit in range(10):
        pool = rng.permutation(np.flatnonzero(labels == digit))
        holders = [client for client in range(num_clients) if digit in holds[client]]
        if not holders:
            continue
        free = len(pool) - 2 * len(holders)
        share = 2 + np.floor(free * wish[holders] / wish[holders].sum()).astype(int)
        for client, part in zip(holders, np.split(pool, np.cumsum(share))[:-1], strict=True):
            rows.append(part)
            owner.append(np.full(len(part), client))
    chosen = np.concatenate(rows)
    scaled = (images[chosen] / 8.0 - 1.0).astype(np.float32)
    return Federation.from_arrays(scaled, labels[chosen], np.concatenate(owner), test_fraction, seed)
