"""What follows from not knowing sigma_0^2: posteriors of clients that are averaged over it.

The restricted likelihood, times a flat prior on sigma_0 (Gelman, Bayesian Analysis 1 (2006)), weighs a grid of values;
given each, a client's parameter is normal.  Its posterior is a mixture of normals, whose quantiles are found exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri

from selffl.maths.heterogeneity import restricted_log_likelihood, search_grid
from selffl.maths.hierarchy import Centre, CentreFit, Floats, Hierarchy

FAR_BELOW = 23.0  # a log-density this far below its peak is left out: 1e-10 of it
BLOCK_NUMBERS = 500_000  # of a block of clients times nodes
MOST_STEPS = 200  # of Newton's method, each at least a bisection
NODE_DISTANCE = 0.02  # in the logarithm of a new client's error


@dataclass(frozen=True)
class SpreadPosterior:
    """Values of sigma_0^2 and their probabilities, with the centre fitted at each."""

    centres: list[Centre]
    probability: Floats

    def column(self, value: Callable[[Centre], float]) -> Floats:
        """One number of every centre."""
        return np.array([value(centre) for centre in self.centres])


def known_spread(hierarchy: Hierarchy, inter_variance: float) -> SpreadPosterior:
    """The posterior of a sigma_0^2 that is known."""
    return SpreadPosterior([hierarchy.fit(inter_variance).centre], np.ones(1))


def spread_posterior(hierarchy: Hierarchy) -> SpreadPosterior:
    """Posterior of sigma_0^2 from the restricted likelihood and a flat prior on sigma_0.

    By the trapezoidal rule in log sigma_0, where the density is exp(log-likelihood) sigma_0.  It needs at least p + 2
    clients: with fewer the posterior has no finite mass.
    """

    def log_density(log_deviation: float) -> float:
        return restricted_log_likelihood(math.exp(2.0 * log_deviation), hierarchy) + log_deviation

    # Clients that know little leave the density flat up to their own deviations, beyond any maximum.
    grid = search_grid(hierarchy)
    largest = max(float(grid[-1]), math.log(float(hierarchy.variance.max())))
    low, high, peak = _support(log_density, np.arange(grid[0] / 2.0 - 1.0, largest / 2.0 + 1.0, 0.5))
    count = int(np.clip(math.ceil((high - low) / 0.35), 32, 200)) + 1
    nodes = np.linspace(low, high, count)
    height = np.exp([log_density(node) - peak for node in nodes])
    kept = height > 1e-13
    centres = [hierarchy.fit(math.exp(2.0 * node)).centre for node in nodes[kept]]
    return SpreadPosterior(centres, height[kept] / height[kept].sum())


def _support(log_density: Callable[[float], float], points: Floats) -> tuple[float, float, float]:
    """Where a log-density is within `FAR_BELOW` of its peak, and the peak."""
    heights = [log_density(point) for point in points]
    best = int(np.argmax(heights))
    bounds = (float(points[max(best - 1, 0)]), float(points[min(best + 1, len(points) - 1)]))
    from scipy.optimize import brentq, minimize_scalar  # here: as in `selffl.maths.intervals`

    top = minimize_scalar(lambda point: -log_density(point), bounds=bounds, method="bounded", options={"xatol": 1e-9})
    where, peak = max((float(top.x), -float(top.fun)), (float(points[best]), heights[best]), key=lambda pair: pair[1])
    above = [float(point) for point, height in zip(points, heights, strict=True) if height > peak - FAR_BELOW] or [
        where
    ]

    def edge(inner: float, step: float) -> float:
        outer = inner + step
        while log_density(outer) > peak - FAR_BELOW:
            inner, outer = outer, outer + step
        return float(brentq(lambda point: log_density(point) - peak + FAR_BELOW, inner, outer, xtol=1e-6))

    return edge(min(above[0], where), -0.5), edge(max(above[-1], where), 0.5), peak


def personal_moments(hierarchy: Hierarchy, fit: CentreFit) -> tuple[Floats, Floats]:
    """Mean and variance of every client's parameter, at one value of sigma_0^2.

    The best linear unbiased prediction: fitted + k (z - fitted) with k = sigma_0^2 / (sigma_0^2 + sigma_m^2), and
    k sigma_m^2 + (1 - k)^2 var(fitted).  Without a covariate it is the exact form of `selffl.posterior`.
    """
    share = fit.inter_variance / fit.total_variance
    mean = fit.at(hierarchy.covariate) + share * fit.residual
    rest = hierarchy.variance / fit.total_variance
    return mean, share * hierarchy.variance + rest**2 * fit.variance_at(hierarchy.covariate)


def personal_intervals(hierarchy: Hierarchy, spread: SpreadPosterior, level: float) -> Floats:
    """Ends of the central interval of every client's parameter, ``[M, 2]``."""
    tails = ((1.0 - level) / 2.0, (1.0 + level) / 2.0)
    ends = np.empty((hierarchy.num_clients, 2))
    inter, mean, mean_variance, slope, slope_variance, centre = (
        spread.column(value)
        for value in (
            lambda fit: fit.inter_variance,
            lambda fit: fit.mean,
            lambda fit: fit.mean_variance,
            lambda fit: fit.slope,
            lambda fit: fit.slope_variance,
            lambda fit: fit.covariate_mean,
        )
    )
    size = max(1, BLOCK_NUMBERS // len(inter))
    for first in range(0, hierarchy.num_clients, size):
        block = slice(first, first + size)
        variance, offset = hierarchy.variance[block, None], hierarchy.covariate[block, None] - centre
        total = inter + variance
        fitted = mean + slope * offset
        means = fitted + inter / total * (hierarchy.estimate[block, None] - fitted)
        spreads = inter / total * variance + (variance / total) ** 2 * (mean_variance + slope_variance * offset**2)
        for end, tail in enumerate(tails):
            ends[block, end] = mixture_quantile(means, np.sqrt(spreads), spread.probability, tail)
    return ends


def mixture_quantile(mean: Floats, deviation: Floats, probability: Floats, area: float) -> Floats:
    """Quantiles of mixtures of normals, ``[M, nodes]`` each with the same ``probability [nodes]``.

    A mixture's quantile lies between its components'.  Newton's method within that bracket, which halves it wherever a
    step would leave it.
    """
    own = mean + ndtri(area) * deviation
    low, high, quantile = own.min(1), own.max(1), own @ probability
    open_rows = np.arange(len(quantile))
    for _ in range(MOST_STEPS):
        point, width = quantile[open_rows], deviation[open_rows]
        score = (point[:, None] - mean[open_rows]) / width
        surplus = ndtr(score) @ probability - area
        density = (np.exp(-0.5 * score**2) / width) @ probability / math.sqrt(2.0 * math.pi)
        below, above = np.where(surplus < 0, point, low[open_rows]), np.where(surplus > 0, point, high[open_rows])
        low[open_rows], high[open_rows] = below, above
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            step = point - surplus / density
        is_inside = (step > below) & (step < above)
        new = np.where(surplus == 0, point, np.where(is_inside, step, (below + above) / 2.0))
        quantile[open_rows] = new
        # Newton's error is the square of its step: this is exact to rounding.
        open_rows = open_rows[np.abs(new - point) > 1e-9 * width.min(1) + 1e-15 * np.abs(new)]
        if not len(open_rows):
            break
    return np.asarray(quantile)


def gain_probability(hierarchy: Hierarchy, spread: SpreadPosterior, fit: Centre, covariate: float, own: float) -> float:
    """Probability that a new client's personal mean is closer to its truth than its own estimate.

    The new client has an estimate z of variance ``own`` with an error e, and the federation offers it
    k z + (1 - k) mean, k = A / (A + own), A = sigma_0^2 + var(mean), with sigma_0^2 and the mean of ``fit``.  With d
    its truth less that mean, the offer errs by k e - (1 - k) d, which is smaller than |e| where d lies between -e and
    e (1 + k) / (1 - k).  e is normal; d, given sigma_0^2, is normal with the moments that ``spread`` says.
    Where sigma_0^2 is known to be that of ``fit`` the probability is 1/2 + arctan(sqrt(own / A) / 2) / pi.
    """
    prior = fit.inter_variance + float(fit.variance_at(covariate))
    widest = 1.0 + 2.0 * prior / own  # (1 + k) / (1 - k)
    shift = spread.column(lambda other: float(other.at(covariate))) - float(fit.at(covariate))
    deviation = np.sqrt(spread.column(lambda other: other.inter_variance + float(other.variance_at(covariate))))
    # The trapezoidal rule in log |e|, from errors that no other number could tell from zero.
    least = math.log(1e-7 * min(1.0, float(deviation.min()) / math.sqrt(own) / widest))
    log_error = np.arange(least, math.log(9.0), NODE_DISTANCE)
    error = math.sqrt(own) * np.exp(log_error)[:, None]
    density = np.exp(log_error - 0.5 * np.exp(2.0 * log_error)) / math.sqrt(2.0 * math.pi)
    above = ndtr((widest * error - shift) / deviation) - ndtr((-error - shift) / deviation)
    below = ndtr((error - shift) / deviation) - ndtr((-widest * error - shift) / deviation)
    return float(density @ ((above + below) @ spread.probability)) * NODE_DISTANCE
