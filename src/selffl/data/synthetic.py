"""FedProx's Synthetic(α, β): made-up rows whose models differ between clients by α, and whose features by β.

Li et al., Federated Optimization in Heterogeneous Networks (MLSys 2020), section 5.1, as in the authors' script.
"""

from __future__ import annotations

import numpy as np

from selffl.data.dataset import DataSet, named
from selffl.data.federation import Federation
from selffl.data.split import Split
from selffl.errors import ConfigError

NUM_FEATURES, NUM_CLASSES = 60, 10


@named("synthetic", Split())
def synthetic(
    split: Split, alpha: float = 1.0, beta: float = 1.0, num_clients: int = 30, is_iid: bool = False
) -> Federation:
    """Rows x in ℝ⁶⁰ with y = argmax softmax(W_k x + b_k), ten classes.

    Client k has u_k ~ N(0, α²) and B_k ~ N(0, β²); W_k and b_k have entries N(u_k, 1); the mean v_k of its features has
    entries N(B_k, 1); its features are x ~ N(v_k, Σ) with Σ diagonal, Σ_jj = j^(−1.2); it has int(s) + 50 rows with
    s ~ lognormal(4, 2).  α and β are standard deviations, as in the authors' script (the paper's text leaves it open).
    u_k moves the scores of all classes by as much, so that α is without effect on labels: clients' rules differ by the
    unit entries of W_k and b_k whatever it is.

    With ``is_iid`` all clients have one W and b with entries N(0, 1) and v_k = 0; α and β are then unused.
    """
    for name, value in (("alpha", alpha), ("beta", beta)):
        if not (np.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} is {value}; expected a number, 0 or more.")
    if num_clients < 1:
        raise ConfigError(f"num_clients is {num_clients}; expected 1 or more.")
    rng = np.random.default_rng(split.seed)
    sizes = rng.lognormal(4.0, 2.0, num_clients).astype(np.int64) + 50
    deviation = np.arange(1, NUM_FEATURES + 1) ** -0.6  # of variance j^-1.2
    model = rng.standard_normal((NUM_FEATURES + 1, NUM_CLASSES))
    centre = np.zeros(NUM_FEATURES)
    x, y = [], []
    for size in sizes:
        if not is_iid:
            model = rng.normal(alpha * rng.standard_normal(), 1.0, (NUM_FEATURES + 1, NUM_CLASSES))
            centre = rng.normal(beta * rng.standard_normal(), 1.0, NUM_FEATURES)
        rows = centre + deviation * rng.standard_normal((size, NUM_FEATURES))
        x.append(rows.astype(np.float32))
        y.append((rows @ model[:-1] + model[-1]).argmax(1))  # softmax keeps the largest where it is
    return Federation.from_arrays(
        np.concatenate(x), np.concatenate(y), np.repeat(np.arange(num_clients), sizes), **split.options
    )


DATA_SET = DataSet.described("synthetic", synthetic)
