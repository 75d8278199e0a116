"""Intervals for the spread between clients, for their mean and for a client that has not come yet.

Everything is in the units of a `Hierarchy`; p is the number of coefficients of the centre, 1 or 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.special import chdtrc, chdtri, stdtr, stdtrit

from selffl.maths.heterogeneity import SMALLEST_SEARCHED, remaining_weight, root_of_misfit
from selffl.maths.hierarchy import CentreFit, Hierarchy


class Interval(NamedTuple):
    """Lower and upper end."""

    low: float
    high: float


class Heterogeneity(NamedTuple):
    """Whether the clients' estimates differ by more than their own variances explain."""

    statistic: float  # Q
    degrees_of_freedom: int  # M - p
    p_value: float
    i_squared: float  # between 0 and 1
    h_squared: float


def q_test(hierarchy: Hierarchy, inter_variance: float) -> Heterogeneity:
    """Cochran's Q with its p-value, and how much of the clients' total variance the spread between them is.

    Q = sum (z - fitted)^2 / sigma_m^2 at sigma_0^2 = 0, chi-squared with M - p degrees of freedom where clients do not
    differ.  I^2 = sigma_0^2 / (sigma_0^2 + s^2) and H^2 = 1 + sigma_0^2 / s^2 with the typical variance
    s^2 = (M - p) / tr P; Higgins and Thompson, Statistics in Medicine 21 (2002).  With DerSimonian and Laird's estimate
    I^2 is (Q - (M - p)) / Q.
    """
    freedom = hierarchy.degrees_of_freedom
    misfit = hierarchy.fit(0.0).misfit
    typical = freedom / remaining_weight(hierarchy)
    return Heterogeneity(
        statistic=misfit,
        degrees_of_freedom=freedom,
        p_value=float(chdtrc(freedom, misfit)),
        i_squared=inter_variance / (inter_variance + typical),
        h_squared=1.0 + inter_variance / typical,
    )


def q_profile(hierarchy: Hierarchy, level: float) -> Interval:
    """Interval for sigma_0^2: all values at which Q(sigma_0^2) is no surprise.

    Viechtbauer, Statistics in Medicine 26 (2007): Q(sigma_0^2) is chi-squared with M - p degrees of freedom, exactly.
    Both ends are 0 where even Q(0) is surprisingly small.
    """
    freedom, tail = hierarchy.degrees_of_freedom, (1.0 - level) / 2.0
    return Interval(*(root_of_misfit(hierarchy, float(chdtri(freedom, area))) for area in (tail, 1.0 - tail)))


def profile_likelihood(
    likelihood: Callable[[float, Hierarchy], float], hierarchy: Hierarchy, estimate: float, level: float
) -> Interval:
    """Interval for sigma_0^2: all values around the likeliest whose log-likelihood is at most chi^2_1 / 2 lower.

    Hardy and Thompson, Statistics in Medicine 15 (1996).
    """
    floor = likelihood(estimate, hierarchy) - float(chdtri(1, 1.0 - level)) / 2.0

    from scipy.optimize import brentq  # here: it takes longer to import than all of scipy that training needs

    def surplus(log_variance: float) -> float:
        return likelihood(math.exp(log_variance), hierarchy) - floor

    least = math.log(SMALLEST_SEARCHED * float(hierarchy.variance.min()))
    start = max(math.log(estimate), least) if estimate > 0 else least
    low = 0.0
    if estimate > 0 and likelihood(0.0, hierarchy) < floor:
        inner, outer = start, start - 0.5
        while surplus(outer) > 0.0 and outer > least:
            inner, outer = outer, outer - 0.5
        low = math.exp(float(brentq(surplus, outer, inner, xtol=1e-12))) if surplus(outer) <= 0.0 else 0.0
    inner, outer = start, start + 0.5
    while surplus(outer) > 0.0:
        inner, outer = outer, outer + 0.5
    return Interval(low, math.exp(float(brentq(surplus, inner, outer, xtol=1e-12))))


class Coefficient(NamedTuple):
    """A mean or a slope with its Hartung-Knapp interval."""

    value: float
    standard_error: float
    interval: Interval
    p_value: float  # that it is 0


def hartung_knapp(hierarchy: Hierarchy, fit: CentreFit, value: float, variance: float, level: float) -> Coefficient:
    """Interval for a coefficient of the centre, whose ``variance`` takes sigma_0^2 as known: t with M - p degrees.

    The variance is multiplied by q = Q(sigma_0^2) / (M - p), which is not kept from falling below 1: Hartung and Knapp,
    Statistics in Medicine 20 (2001), with a covariate Knapp and Hartung, Statistics in Medicine 22 (2003).
    """
    freedom = hierarchy.degrees_of_freedom
    error = math.sqrt(variance * fit.misfit / freedom)
    reach = float(stdtrit(freedom, 0.5 + level / 2.0)) * error
    p_value = 2.0 * float(stdtr(freedom, -abs(value) / error)) if error > 0 else float(value == 0)
    return Coefficient(value, error, Interval(value - reach, value + reach), p_value)


def prediction_interval(hierarchy: Hierarchy, fit: CentreFit, covariate: float, level: float) -> Interval | None:
    """Where the parameter of a client that has not come yet will lie.

    mean +- t sqrt(sigma_0^2 + its variance), t with M - p - 1 degrees of freedom: Higgins, Thompson and Spiegelhalter,
    J. R. Stat. Soc. A 172 (2009).  None where there are no degrees of freedom left.
    """
    freedom = hierarchy.degrees_of_freedom - 1
    if freedom < 1:
        return None
    spread = math.sqrt(fit.inter_variance + float(fit.variance_at(covariate)))
    reach = float(stdtrit(freedom, 0.5 + level / 2.0)) * spread
    centre = float(fit.at(covariate))
    return Interval(centre - reach, centre + reach)


def typical_covariate(hierarchy: Hierarchy) -> float:
    """The plain mean of the clients' covariate, at which a mean is reported; 0 without one."""
    return float(np.mean(hierarchy.covariate))
