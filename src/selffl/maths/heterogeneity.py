"""Between-client variance sigma_0^2 from the clients' estimates and variances alone.

The two-level model is random-effects meta-analysis; these are its four usual estimators, around one mean or around a
line in a covariate of the clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from selffl.errors import ConfigError, DataError, check_known
from selffl.maths.hierarchy import Floats, Hierarchy, read_hierarchy

InterVarianceMethod = Literal["dl", "pm", "ml", "reml"]
METHODS: tuple[InterVarianceMethod, ...] = get_args(InterVarianceMethod)

SMALLEST_SEARCHED = 1e-6  # of the smallest variance: zero, for any purpose


def estimate_inter_variance(
    local_estimate: npt.ArrayLike,
    intra_variance: npt.ArrayLike,
    method: InterVarianceMethod = "reml",
    *,
    covariate: npt.ArrayLike | None = None,
) -> float:
    """Estimate sigma_0^2 from ``[M]`` estimates and their ``[M]`` variances; never below 0.

    Args:
        local_estimate: what each client's own data say, ``[M]``.
        intra_variance: the variance of each of those, a scalar or ``[M]``.
        method: "reml" maximises the restricted likelihood, "ml" the likelihood, which is too small with few clients;
            "pm" (Paule and Mandel) and "dl" (DerSimonian and Laird) match moments, the latter in closed form.
        covariate: one number per client, ``[M]``; the spread is then that around a line in it.

    Examples:
        >>> import selffl
        >>> round(selffl.estimate_inter_variance([1.0, 2.0, 6.0], [0.5, 0.5, 0.5], method="dl"), 6)   # 7 - 0.5
        6.5
    """
    check_method(method)
    hierarchy = read_hierarchy(local_estimate, intra_variance, covariate)
    return float(hierarchy.carry_variance_back(fitted_inter_variance(hierarchy, method)))


def check_method(method: Any) -> None:
    """Refuse an estimator that does not exist."""
    check_known("inter-variance method", method, METHODS)


def fitted_inter_variance(hierarchy: Hierarchy, method: InterVarianceMethod) -> float:
    """sigma_0^2 by a method, in the units of the hierarchy; what the method cannot use is refused."""
    check_certain_clients(hierarchy, method)
    estimators: dict[InterVarianceMethod, Callable[[Hierarchy], float]] = {
        "dl": dersimonian_laird,
        "pm": paule_mandel,
        "ml": lambda clients: likeliest(log_likelihood, clients),
        "reml": lambda clients: likeliest(restricted_log_likelihood, clients),
    }
    return estimators[method](hierarchy)


def check_certain_clients(hierarchy: Hierarchy, method: InterVarianceMethod) -> None:
    """Refuse clients of variance 0 where an estimator divides by it, or its likelihood has no maximum."""
    num_certain = int(hierarchy.is_certain.sum())
    if num_certain and method in ("dl", "ml"):
        reason = "DerSimonian-Laird divides by" if method == "dl" else "leaves the likelihood without a maximum"
        raise ConfigError(
            f"{num_certain} client(s) have variance 0, which {reason}; expected variances above 0. "
            "Use reml or pm, or give inter_variance."
        )
    if method == "reml" and num_certain > hierarchy.num_coefficients and _lie_on_the_centre(hierarchy):
        agree = "the same estimate" if not hierarchy.has_covariate else "estimates on one line"
        raise DataError(
            f"{num_certain} clients have variance 0 and {agree}, so that the likelihood has no maximum; "
            f"expected {hierarchy.num_coefficients} at most. Give them a variance above 0, or give inter_variance."
        )


def _lie_on_the_centre(hierarchy: Hierarchy) -> bool:
    """Whether some of the clients of variance 0, more than coefficients, are fitted exactly."""
    estimate, covariate = hierarchy.estimate[hierarchy.is_certain], hierarchy.covariate[hierarchy.is_certain]
    if not hierarchy.has_covariate:
        return bool(np.ptp(estimate) == 0)
    offset = covariate - covariate[0]
    cross = offset * (estimate[offset.argmax()] - estimate[0]) - offset[offset.argmax()] * (estimate - estimate[0])
    return bool(np.abs(cross).max() < 1e-14)


def remaining_weight(hierarchy: Hierarchy, inter_variance: float = 0.0) -> float:
    """tr P = sum w_m (1 - h_m) with w = 1/(sigma_0^2 + sigma_m^2) and the leverages h of the weighted fit.

    1 - h_m is the share of the determinant of X'WX that is left without client m.  For the heaviest clients it is
    computed without them: a difference would vanish beside them.
    """
    total = inter_variance + hierarchy.variance
    weight = total.min() / total
    left = _determinants_without(hierarchy.covariate, weight, hierarchy.has_covariate)
    for client in np.argsort(weight)[-hierarchy.num_coefficients :]:
        rest = np.delete(hierarchy.covariate, client), np.delete(weight, client)
        left[client] = _determinant(*rest, hierarchy.has_covariate)
    whole = _determinant(hierarchy.covariate, weight, hierarchy.has_covariate)
    return float((weight * left).sum() / whole / total.min())


def _determinant(covariate: Floats, weight: Floats, has_covariate: bool) -> float:
    if not has_covariate:
        return float(weight.sum())
    offset = covariate - weight @ covariate / weight.sum()
    return float(weight.sum() * (weight @ offset**2))


def _determinants_without(covariate: Floats, weight: Floats, has_covariate: bool) -> Floats:
    whole = weight.sum()
    if not has_covariate:
        return np.asarray(whole - weight)
    offset = covariate - weight @ covariate / whole
    return np.asarray((whole - weight) * (weight @ offset**2) - whole * weight * offset**2)


def dersimonian_laird(hierarchy: Hierarchy) -> float:
    """(Q - (M - p)) / tr P with weights 1/sigma_m^2; 0 if negative.

    DerSimonian and Laird, Controlled Clinical Trials 7 (1986); with a covariate as Raudenbush (1994).
    """
    surplus = hierarchy.fit(0.0).misfit - hierarchy.degrees_of_freedom
    return max(0.0, surplus / remaining_weight(hierarchy))


def paule_mandel(hierarchy: Hierarchy) -> float:
    """The sigma_0^2 at which Q(sigma_0^2) is its expectation, M - p; 0 where Q(0) is below it.

    Paule and Mandel, Journal of Research of the National Bureau of Standards 87 (1982).
    """
    return root_of_misfit(hierarchy, float(hierarchy.degrees_of_freedom))


def root_of_misfit(hierarchy: Hierarchy, target: float) -> float:
    """The sigma_0^2 at which the falling function Q(sigma_0^2) is ``target``; 0 where it never is that large."""
    from scipy.optimize import brentq

    if hierarchy.fit(0.0).misfit <= target:
        return 0.0

    def surplus(log_variance: float) -> float:
        return hierarchy.fit(math.exp(log_variance)).misfit - target

    low = math.log(SMALLEST_SEARCHED * float(hierarchy.variance.min()))
    if surplus(low) <= 0.0:
        return 0.0
    high = max(low + 1.0, 0.0)
    while surplus(high) > 0.0:
        high += 5.0
    return math.exp(float(brentq(surplus, low, high, xtol=1e-13, rtol=1e-14)))


def restricted_log_likelihood(inter_variance: float, hierarchy: Hierarchy) -> float:
    """Log-likelihood of sigma_0^2 with the centre integrated out, up to a constant.

    -1/2 [ sum log u + log det X'U^-1 X + sum (z - fitted)^2 / u ], u = sigma_0^2 + variance; Viechtbauer, J. Educ.
    Behav. Stat. 30 (2005), Eq. (6).
    """
    fit = hierarchy.fit(inter_variance)
    log_determinant = -math.log(fit.mean_variance)
    if hierarchy.has_covariate:
        log_determinant -= math.log(fit.slope_variance)
    return -0.5 * (float(np.log(fit.total_variance).sum()) + log_determinant + fit.misfit)


def log_likelihood(inter_variance: float, hierarchy: Hierarchy) -> float:
    """Log-likelihood of sigma_0^2 at the centre that fits best, up to a constant.

    -1/2 [ sum log u + sum (z - fitted)^2 / u ]; Viechtbauer (2005), Eq. (4).
    """
    fit = hierarchy.fit(inter_variance)
    return -0.5 * (float(np.log(fit.total_variance).sum()) + fit.misfit)


def search_grid(hierarchy: Hierarchy) -> Floats:
    """Values of log sigma_0^2, one apart, over every magnitude at which a likelihood can change.

    Above: no weighting makes the variance of the estimates larger than M times the plain one.
    """
    spread = max(float(np.var(hierarchy.estimate)) * 2.0, SMALLEST_SEARCHED * float(hierarchy.variance.min()))
    high = math.log(2.0 * hierarchy.num_clients * spread)
    low = math.log(SMALLEST_SEARCHED * min(float(hierarchy.variance.min()), spread))
    return np.linspace(low, high, math.ceil(high - low) + 1)


def likeliest(likelihood: Callable[[float, Hierarchy], float], hierarchy: Hierarchy) -> float:
    """The sigma_0^2 >= 0 with the largest likelihood.

    Searched on the log scale: a grid finds the highest hill (the function can have two), Brent's method its top.  The
    estimate is 0 where the likelihood at 0 is higher still.
    """
    if np.ptp(hierarchy.estimate) == 0.0:
        return 0.0
    grid = search_grid(hierarchy)

    def cost(log_variance: float) -> float:
        return -likelihood(math.exp(log_variance), hierarchy)

    from scipy.optimize import minimize_scalar  # here: a third of a second for every process that Flower starts

    best = int(np.argmin([cost(point) for point in grid]))
    bracket = (float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)]))
    top = minimize_scalar(cost, bounds=bracket, method="bounded", options={"xatol": 1e-12})
    if likelihood(0.0, hierarchy) >= -float(top.fun):
        return 0.0
    return math.exp(float(top.x))
