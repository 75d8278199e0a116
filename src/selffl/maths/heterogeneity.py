"""Between-client variance sigma_0^2 from the clients' estimates and variances alone.

The two-level model is random-effects meta-analysis; these are its two usual estimators.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from selffl.errors import ConfigError, DataError, unknown_name
from selffl.maths.border import finite_tensor, variance_tensor

InterVarianceMethod = Literal["dl", "reml"]

Floats = npt.NDArray[np.float64]


def estimate_inter_variance(local_estimate: Any, intra_variance: Any, method: InterVarianceMethod = "reml") -> float:
    """Estimate sigma_0^2 from ``[M]`` estimates and their ``[M]`` variances; never below 0.

    "dl" is DerSimonian and Laird (Controlled Clinical Trials 1986), a moment estimator in closed form; "reml" maximises
    the restricted likelihood and is less biased when clients differ much in size.

    Examples:
        >>> import selffl
        >>> round(selffl.estimate_inter_variance([1.0, 2.0, 6.0], [0.5, 0.5, 0.5], method="dl"), 6)   # 7 - 0.5
        6.5
    """
    if method not in get_args(InterVarianceMethod):
        raise unknown_name("inter-variance method", str(method), get_args(InterVarianceMethod))
    found = finite_tensor("local_estimate", local_estimate).to(torch.float64)
    if found.ndim != 1 or len(found) < 2:
        raise DataError(
            f"local_estimate has shape {tuple(found.shape)}; expected at least two clients, one number each. "
            "The spread between clients cannot be seen in fewer: give inter_variance (--inter-variance)."
        )
    spread = variance_tensor("intra_variance", intra_variance, like=found)
    if tuple(spread.shape) not in ((), (len(found),)):
        raise DataError(
            f"intra_variance has shape {tuple(spread.shape)}; expected a scalar or one number for each of the "
            f"{len(found)} clients."
        )
    estimate, variance = found.numpy(force=True), spread.expand_as(found).numpy(force=True)
    if method == "dl" and (variance == 0).any():
        raise ConfigError(
            f"{int((variance == 0).sum())} client(s) have variance 0, which DerSimonian-Laird divides by; "
            "expected variances above 0. Use reml, or give inter_variance (--inter-variance)."
        )
    return dersimonian_laird(estimate, variance) if method == "dl" else reml(estimate, variance)


def dersimonian_laird(estimate: Floats, variance: Floats) -> float:
    """(Q - (M - 1)) / (sum w - sum w^2 / sum w) with w = 1/variance and Q the weighted spread; 0 if negative."""
    weight = variance.min() / variance  # relative, so that tiny variances do not overflow
    mean = np.average(estimate, weights=weight)
    surplus = float((weight * (estimate - mean) ** 2).sum()) - (len(estimate) - 1) * float(variance.min())
    # sum w - sum w^2 / sum w as sum w (sum of the others) / sum w: a difference would vanish beside one sure client.
    others = weight.sum() - weight
    others[weight.argmax()] = np.delete(weight, weight.argmax()).sum()
    return max(0.0, surplus / float((weight * others).sum() / weight.sum()))


def restricted_log_likelihood(inter_variance: float, estimate: Floats, variance: Floats) -> float:
    """Log-likelihood of sigma_0^2 with the shared mean integrated out, up to a constant.

    -1/2 [ sum log u + log sum 1/u + sum (z - mean)^2 / u ], u = sigma_0^2 + variance; Viechtbauer, J. Educ. Behav.
    Stat. 30 (2005), Eq. (6).
    """
    total = inter_variance + variance
    surest = int(total.argmin())
    if np.count_nonzero(total == 0) > 1:
        return -math.inf  # several that claim to know theta_0 exactly, and differ; `reml` refuses those that agree
    # Relative to the surest client, whose own variance cancels between the first two terms and may be zero.
    weight = np.divide(total[surest], total, out=np.ones_like(total), where=total > 0)
    mean = float(weight @ estimate) / float(weight.sum())
    others = np.delete(total, surest)
    misfit = np.delete(estimate - mean, surest) ** 2 @ (1.0 / others)
    if total[surest] > 0:
        misfit += (estimate[surest] - mean) ** 2 / total[surest]
    return -0.5 * float(np.log(others).sum() + np.log(weight.sum()) + misfit)


def reml(estimate: Floats, variance: Floats) -> float:
    """The sigma_0^2 >= 0 with the largest restricted likelihood.

    Searched on the log scale: a grid over every magnitude at which it can change finds the highest hill (the function
    can have two), Brent's method its top.  The estimate is 0 where the likelihood at 0 is higher still.
    """
    spread = float(np.var(estimate, ddof=1))
    if spread == 0.0:
        return 0.0
    certain = estimate[variance == 0]
    if len(certain) > 1 and np.ptp(certain) == 0:
        raise DataError(
            f"{len(certain)} clients have variance 0 and the same estimate, so that the likelihood has no maximum; "
            "expected one at most. Give them a variance above 0, or give inter_variance (--inter-variance)."
        )
    # Above: no weighting makes the variance of the estimates larger than M times the plain one.
    # Below: a millionth of the smallest variance is zero for any purpose.
    high = math.log(2.0 * len(estimate) * spread)
    low = math.log(1e-6 * min(float(variance[variance > 0].min(initial=spread)), spread))
    grid = np.linspace(low, high, math.ceil(high - low) + 1)

    def cost(log_variance: float) -> float:
        return -restricted_log_likelihood(math.exp(log_variance), estimate, variance)

    from scipy.optimize import minimize_scalar  # here: a third of a second for every process that Flower starts

    best = int(np.argmin([cost(point) for point in grid]))
    bracket = (float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)]))
    top = minimize_scalar(cost, bounds=bracket, method="bounded", options={"xatol": 1e-12})
    if restricted_log_likelihood(0.0, estimate, variance) >= -float(top.fun):
        return 0.0
    return math.exp(float(top.x))
