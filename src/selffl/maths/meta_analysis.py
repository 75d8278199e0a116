"""Random-effects meta-analysis of clients: the spread between them, their mean, the next client, and each one's own.

One value holds everything that follows from a table of estimates and variances.  The equations are in `hierarchy`,
`heterogeneity`, `intervals` and `integration`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from selffl.errors import ConfigError, DataError
from selffl.maths.heterogeneity import (
    InterVarianceMethod,
    check_method,
    fitted_inter_variance,
    log_likelihood,
    restricted_log_likelihood,
)
from selffl.maths.hierarchy import SMALLEST_VARIANCE, CentreFit, Floats, Hierarchy, read_hierarchy
from selffl.maths.inputs import finite_number, probability
from selffl.maths.integration import (
    gain_probability,
    known_spread,
    personal_intervals,
    personal_moments,
    spread_posterior,
)
from selffl.maths.intervals import (
    Coefficient,
    Heterogeneity,
    Interval,
    hartung_knapp,
    prediction_interval,
    profile_likelihood,
    q_profile,
    q_test,
    typical_covariate,
)
from selffl.maths.posterior import posterior

MAX_CLIENTS_LEFT_OUT = 2000  # clients: leaving each out once is one analysis per client, and a table of all by all


@dataclass(frozen=True)
class MetaAnalysis:
    """Everything that a table of estimates and variances says about its clients, in the units of the estimates.

    Arrays have one entry per client.  What too few clients cannot tell is ``None``.

    Attributes:
        num_clients: M.
        method: how σ₀² was estimated, or "given".
        level: of all intervals.
        inter_variance: σ₀², the variance between clients.
        inter_variance_interval: its Q-profile interval; ``None`` where σ₀² was given.
        inter_variance_profile: its profile-likelihood interval, for the methods "reml" and "ml".
        mean: the clients' mean; with a covariate, that at the plain mean of the covariate.
        mean_standard_error: of Hartung and Knapp.
        mean_interval: of Hartung and Knapp, t with M − 1 degrees of freedom (M − 2 with a covariate).
        mean_variance: 1/Σ 1/(σ₀² + σₘ²), the variance of the mean if σ₀² were known.
        slope: change of the mean with one unit of the covariate, with its standard error, Hartung–Knapp interval and
            p-value; ``None`` without a covariate.
        heterogeneity: Cochran's Q, its degrees of freedom and p-value, I² and H².
        prediction_interval: where the parameter of a client that has not come yet will lie (Higgins, Thompson and
            Spiegelhalter; t with M − 2 degrees of freedom, M − 3 with a covariate).
        new_variance: the variance of the estimate that such a client brings.
        gain_probability: the probability that its personal mean is then closer to its truth than its own estimate.
        new_covariate: the covariate at which the next client is predicted.
        personal_mean: each client's parameter given all clients, at σ₀² = ``inter_variance``.
        personal_variance: its variance, at the same σ₀².
        gain: the factor by which a client's variance shrinks.
        personal_interval: ``[M, 2]``, ends of each client's interval.
        is_integrated: whether personal intervals and ``gain_probability`` average over what is not known of σ₀².
    """

    num_clients: int
    method: str
    level: float
    inter_variance: float
    inter_variance_interval: Interval | None
    inter_variance_profile: Interval | None
    mean: float
    mean_standard_error: float | None
    mean_interval: Interval | None
    mean_variance: float
    slope: Coefficient | None
    heterogeneity: Heterogeneity | None
    prediction_interval: Interval | None
    new_variance: float
    gain_probability: float | None
    new_covariate: float | None
    personal_mean: Floats
    personal_variance: Floats
    gain: Floats
    personal_interval: Floats
    is_integrated: bool
    _hierarchy: Hierarchy = field(repr=False, compare=False)

    def leave_one_out(self) -> LeaveOneOut:
        """Repeat the analysis without each client in turn: who decides the answer?

        Examples:
            >>> import selffl
            >>> m = selffl.meta_analysis([1.0, 1.2, 0.9, 6.0], [0.1, 0.1, 0.1, 0.1])
            >>> m.leave_one_out().inter_variance.round(3).tolist()        # all of the spread is the last client's
            [8.09, 8.403, 7.913, 0.0]
        """
        clients, num_clients = self._hierarchy, self.num_clients
        if num_clients > MAX_CLIENTS_LEFT_OUT:
            raise DataError(
                f"{num_clients:,} clients found; expected at most {MAX_CLIENTS_LEFT_OUT:,} to leave each out once."
            )
        if clients.degrees_of_freedom < 2:
            raise DataError(
                f"{num_clients} clients found; expected at least {clients.num_coefficients + 2} to leave one out."
            )
        spread, mean = np.full(num_clients, np.nan), np.full(num_clients, np.nan)
        personal, surprise = np.full((num_clients, num_clients), np.nan), np.full(num_clients, np.nan)
        position = typical_covariate(clients)
        for client in range(num_clients):
            others = clients.without(client)
            if others.has_covariate and np.ptp(others.covariate) == 0:
                continue
            known = clients.scale_variance(self.inter_variance) if self.method == "given" else None
            spread[client] = fitted_inter_variance(others, self.method) if known is None else known  # type: ignore[arg-type]
            fit = others.fit(float(spread[client]))
            mean[client] = fit.at(position)
            personal[client] = np.insert(personal_moments(others, fit)[0], client, fit.at(clients.covariate[client]))
            total = spread[client] + clients.variance[client] + fit.variance_at(clients.covariate[client])
            surprise[client] = (clients.estimate[client] - personal[client, client]) / math.sqrt(total)
        carried = np.asarray(clients.carry_back(personal))
        moves = np.abs(carried - self.personal_mean)
        np.fill_diagonal(moves, 0.0)
        return LeaveOneOut(
            inter_variance=np.asarray(clients.carry_variance_back(spread)),
            mean=np.asarray(clients.carry_back(mean)),
            personal_mean=carried,
            largest_move=moves.max(1),
            surprise=surprise,
        )


@dataclass(frozen=True)
class LeaveOneOut:
    """The analysis without each client in turn; entry m is that without client m.

    Attributes:
        inter_variance: σ₀² without client m, ``[M]``; NaN where the others have one value of the covariate only.
        mean: the mean without client m, ``[M]``; at the same value of the covariate as with it.
        personal_mean: ``[M, M]``: row m holds everybody's personal mean without client m, and at m itself what the
            others say of it.
        largest_move: the largest change of another client's personal mean when client m is left out, ``[M]``.
        surprise: ``[M]``, how far client m's estimate lies from what the others say of it, in standard deviations.
    """

    inter_variance: Floats
    mean: Floats
    personal_mean: Floats
    largest_move: Floats
    surprise: Floats


def meta_analysis(
    local_estimate: npt.ArrayLike,
    intra_variance: npt.ArrayLike,
    *,
    method: InterVarianceMethod = "reml",
    covariate: npt.ArrayLike | None = None,
    inter_variance: float | None = None,
    new_variance: float | None = None,
    new_covariate: float | None = None,
    level: float = 0.95,
) -> MetaAnalysis:
    """Random-effects meta-analysis of clients, with intervals that do not take the estimated spread as known.

    Args:
        local_estimate: what each client's own data say, ``[M]``; list, NumPy array or torch tensor.
        intra_variance: the variance of each of those, a scalar or ``[M]``.
        method: estimator of σ₀²: "reml", "ml", "pm" (Paule–Mandel) or "dl" (DerSimonian–Laird).
        covariate: one number per client; clients are then shrunk towards a line in it.
        inter_variance: σ₀², where it is known; it is then not estimated and not integrated over.
        new_variance: variance of the estimate of a client that has not come yet; by default the median.
        new_covariate: covariate of that client; by default the mean.
        level: of all intervals.

    Examples:
        >>> import selffl
        >>> m = selffl.meta_analysis([1.2, 2.5, 0.4, 1.9], [0.30, 0.10, 1.50, 0.02])
        >>> round(m.inter_variance, 3), [round(end, 2) for end in m.inter_variance_interval]
        (0.194, [0.0, 10.63])
        >>> m.personal_mean.round(2).tolist(), m.personal_interval[0].round(2).tolist()
        ([1.61, 2.29, 1.71, 1.9], [0.38, 2.32])
    """
    check_method(method)
    level = probability("level", level)
    given = None if inter_variance is None else _given_variance("inter_variance", inter_variance)
    clients = read_hierarchy(local_estimate, intra_variance, covariate, given)
    if given == 0.0:
        _check_certain_clients_agree(clients)
    own = _new_variance(new_variance, clients)
    spread = fitted_inter_variance(clients, method) if given is None else clients.scale_variance(given)
    fit = clients.fit(spread)
    is_integrated = given is None and clients.degrees_of_freedom >= 2
    posterior_of_spread = spread_posterior(clients) if is_integrated else known_spread(clients, spread)
    position = _new_place(clients, covariate, new_covariate)
    prediction = prediction_interval(clients, fit, position, level)
    scaled_own = max(clients.scale_variance(own), SMALLEST_VARIANCE)
    has_gain = own > 0 and spread + fit.mean_variance > 0
    personal = _personal(clients, fit, given)
    if is_integrated:
        ends = np.asarray(clients.carry_back(personal_intervals(clients, posterior_of_spread, level)))
        ends[clients.is_certain] = clients.local_estimate[clients.is_certain, None]  # variance 0: it is where it says
    else:
        reach = float(ndtri(0.5 + level / 2.0)) * np.sqrt(personal["personal_variance"])
        ends = np.stack([personal["personal_mean"] - reach, personal["personal_mean"] + reach], axis=1)
    return MetaAnalysis(
        **_spread(clients, spread, given, method, level),
        **_centre(clients, fit, level),
        **personal,
        num_clients=clients.num_clients,
        level=level,
        prediction_interval=None if prediction is None else _carry(clients, prediction),
        new_variance=own,
        new_covariate=clients.covariate_centre + clients.covariate_unit * position if clients.has_covariate else None,
        gain_probability=gain_probability(clients, posterior_of_spread, fit, position, scaled_own)
        if has_gain
        else None,
        personal_interval=ends,
        is_integrated=is_integrated,
        _hierarchy=clients,
    )


def _given_variance(name: str, value: Any) -> float:
    number = finite_number(name, value, expected := "a number, 0 or more")
    if number < 0:
        raise ConfigError(f"{name} is {number}; expected {expected}.")
    return number


def _check_certain_clients_agree(clients: Hierarchy) -> None:
    """Refuse clients of variance 0 that differ where all clients are said to be the same."""
    certain = clients.local_estimate[clients.is_certain]
    if len(certain) > 1 and not clients.has_covariate and np.ptp(certain) > 0:
        raise DataError(
            f"inter_variance is 0, so that all clients are the same, but {len(certain)} clients of variance 0 differ; "
            "expected one or the other. Give an inter_variance above 0."
        )


def _new_variance(new_variance: Any, clients: Hierarchy) -> float:
    """The variance that a new client's estimate is said to have, or the median of the clients'."""
    if new_variance is not None:
        return _given_variance("new_variance", new_variance)
    return float(np.median(clients.intra_variance / 4.0)) * 4.0  # the middle two of an even number are added


def _new_place(clients: Hierarchy, covariate: Any, new_covariate: Any) -> float:
    """The covariate of the next client, in the units of the hierarchy."""
    if new_covariate is None:
        return typical_covariate(clients)
    if covariate is None:
        raise ConfigError("new_covariate is given without a covariate; leave it out, or give the clients' covariate.")
    number = finite_number("new_covariate", new_covariate, "a number")
    return (number - clients.covariate_centre) / clients.covariate_unit


def _carry(clients: Hierarchy, interval: Interval) -> Interval:
    return Interval(*(float(clients.carry_back(end)) for end in interval))


def _spread(
    clients: Hierarchy, spread: float, given: float | None, method: InterVarianceMethod, level: float
) -> dict[str, Any]:
    """sigma_0^2 with its intervals, and the test whether there is any."""
    has_freedom = clients.degrees_of_freedom >= 1
    result: dict[str, Any] = {
        "method": method if given is None else "given",
        "inter_variance": float(clients.carry_variance_back(spread)) if given is None else given,
        "inter_variance_interval": None,
        "inter_variance_profile": None,
        "heterogeneity": q_test(clients, spread) if has_freedom else None,
    }
    if given is None:
        intervals = {"inter_variance_interval": q_profile(clients, level)}
        if method in ("ml", "reml"):
            likelihood = log_likelihood if method == "ml" else restricted_log_likelihood
            intervals["inter_variance_profile"] = profile_likelihood(likelihood, clients, spread, level)
        for name, ends in intervals.items():
            result[name] = Interval(*(float(clients.carry_variance_back(end)) for end in ends))
    return result


def _centre(clients: Hierarchy, fit: CentreFit, level: float) -> dict[str, Any]:
    """The mean and the slope with their Hartung-Knapp intervals."""
    position = typical_covariate(clients)
    mean, variance = float(fit.at(position)), float(fit.variance_at(position))
    result: dict[str, Any] = {
        "mean": float(clients.carry_back(mean)),
        "mean_variance": float(clients.carry_variance_back(variance)),
        "mean_standard_error": None,
        "mean_interval": None,
        "slope": None,
    }
    if clients.degrees_of_freedom >= 1:
        adjusted = hartung_knapp(clients, fit, mean, variance, level)
        result["mean_standard_error"] = adjusted.standard_error * clients.unit
        result["mean_interval"] = _carry(clients, adjusted.interval)
        if clients.has_covariate:
            unit = clients.unit / clients.covariate_unit
            slope = hartung_knapp(clients, fit, fit.slope, fit.slope_variance, level)
            result["slope"] = Coefficient(
                slope.value * unit,
                slope.standard_error * unit,
                Interval(*(end * unit for end in slope.interval)),
                slope.p_value,
            )
    return result


def _personal(clients: Hierarchy, fit: CentreFit, given: float | None) -> dict[str, Any]:
    """Every client's personal mean, its variance and the gain, at the estimated sigma_0^2."""
    if not clients.has_covariate:
        inter = float(clients.carry_variance_back(fit.inter_variance)) if given is None else given
        known = posterior(clients.local_estimate, clients.intra_variance, inter)
        return {name: getattr(known, name) for name in ("personal_mean", "personal_variance", "gain")}
    mean, variance = personal_moments(clients, fit)
    return {
        "personal_mean": clients.carry_back(mean),
        "personal_variance": clients.carry_variance_back(np.where(clients.is_certain, 0.0, variance)),
        "gain": clients.variance / variance,
    }
