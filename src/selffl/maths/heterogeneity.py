"""Between-client variance sigma_0^2 from the clients' estimates and variances alone.

The two-level model is random-effects meta-analysis; these are its two usual estimators.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize_scalar

from selffl.errors import ConfigError, DataError, unknown_name

InterVarianceMethod = Literal["dl", "reml"]

Floats = npt.NDArray[np.float64]


def estimate_inter_variance(local_estimate: Any, intra_variance: Any, method: InterVarianceMethod = "reml") -> float:
    """Estimate sigma_0^2 from ``[M]`` estimates and their ``[M]`` variances; never below 0.

    "dl" is DerSimonian and Laird (Controlled Clinical Trials 1986), a moment estimator in closed form; "reml" maximises
    the restricted likelihood and is less biased when clients differ much in size.

    >>> import selffl
    >>> round(selffl.estimate_inter_variance([1.0, 2.0, 6.0], [0.5, 0.5, 0.5], method="dl"), 6)   # 7 - 0.5
    6.5
    """
    if method not in get_args(InterVarianceMethod):
        raise unknown_name("inter-variance method", str(method), get_args(InterVarianceMethod))
    estimate = np.asarray(local_estimate, dtype=np.float64)
    variance = np.broadcast_to(np.asarray(intra_variance, dtype=np.float64), estimate.shape)
    if estimate.ndim != 1 or len(estimate) < 2:
        raise DataError(
            f"local_estimate has shape {estimate.shape}; expected at least two clients, one number each. "
            "The spread between clients cannot be seen in fewer: give inter_variance."
        )
    if not (np.isfinite(estimate).all() and np.isfinite(variance).all() and (variance >= 0).all()):
        raise DataError("estimates and variances must be finite, and variances 0 or more. Check the rows.")
    if method == "dl" and (variance == 0).any():
        raise ConfigError(
            f"{int((variance == 0).sum())} client(s) have variance 0, which DerSimonian-Laird divides by; "
            "expected variances above 0. Use reml, or give inter_variance."
        )
    return dersimonian_laird(estimate, variance) if method == "dl" else reml(estimate, variance)


def dersimonian_laird(estimate: Floats, variance: Floats) -> float:
    """(Q - (M - 1)) / (sum w - sum w^2 / sum w) with w = 1/variance and Q the weighted spread; 0 if negative."""
    weight = variance.min() / variance  # relative, so that tiny variances do not overflow
    mean = np.average(estimate, weights=weight)
    spread = float((weight * (estimate - mean) ** 2).sum())
    surplus = spread - (len(estimate) - 1) * float(variance.min())
    return max(0.0, surplus / float(weight.sum() - (weight**2).sum() / weight.sum()))


def restricted_log_likelihood(inter_variance: float, estimate: Floats, variance: Floats) -> float:
    """Log-likelihood of sigma_0^2 with the shared mean integrated out, up to a constant.

    -1/2 [ sum log u + log sum 1/u + sum (z - mean)^2 / u ], u = sigma_0^2 + variance; Viechtbauer, J. Educ. Behav.
    Stat. 30 (2005), Eq. (6).
    """
    total = inter_variance + variance
    precision = 1.0 / total
    mean = float(precision @ estimate) / float(precision.sum())
    return -0.5 * float(np.log(total).sum() + np.log(precision.sum()) + precision @ (estimate - mean) ** 2)


def reml(estimate: Floats, variance: Floats) -> float:
    """The sigma_0^2 >= 0 with the largest restricted likelihood.

    Searched on the log scale: a grid over every plausible magnitude finds the highest hill (the function can have two),
    Brent's method its top.  The estimate is 0 where the likelihood at 0 is higher still.
    """
    spread = float(np.var(estimate, ddof=1))
    if spread == 0.0:
        return 0.0
    # sigma_0^2 cannot exceed the sample variance of the weighted estimates by much; 1e-9 of it is zero for any purpose.
    high = np.log(4.0 * len(estimate)) + np.log(spread)
    low = np.log(spread) - 9.0 * np.log(10.0)
    grid = np.linspace(low, high, 49)

    def cost(log_variance: float) -> float:
        return -restricted_log_likelihood(float(np.exp(log_variance)), estimate, variance)

    best = int(np.argmin([cost(point) for point in grid]))
    bracket = (float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)]))
    top = minimize_scalar(cost, bounds=bracket, method="bounded", options={"xatol": 1e-12})
    found = float(np.exp(top.x))
    if (variance > 0).all() and restricted_log_likelihood(0.0, estimate, variance) >= -float(top.fun):
        return 0.0
    return found
