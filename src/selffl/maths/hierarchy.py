"""Clients in units in which nothing over- or underflows, and the centre that is fitted to them at a given sigma_0^2.

z_m ~ N(a + b (x_m - x), sigma_0^2 + sigma_m^2): one mean for all clients, or a line in one covariate of theirs.  The
problem moves with a shift and scales with the unit of the estimates, so that it is solved for estimates that span about
one and carried back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from selffl.errors import DataError
from selffl.maths.inputs import finite_tensor, variance_tensor

Floats = npt.NDArray[np.float64]

SMALLEST_VARIANCE = 1e-28  # in squared units: the estimates themselves hold no more digits than its root
LARGEST_VARIANCE = 1e60  # in squared units: a client of this variance weighs nothing
LARGEST_HALF = float(np.finfo(np.float64).max) / 2
COVARIATE_DECIMALS = 14  # of a covariate that spans about one: floats hold no more
WIDEST_RANGE = 1e140  # of estimates, whose square times anything is still a float


@dataclass(frozen=True)
class Centre:
    """What the clients lie around, at one value of sigma_0^2: a mean, or a line in a covariate.

    The mean is that at the weighted mean of the covariate, where it is uncorrelated with the slope; without a covariate
    the slope is 0.
    """

    inter_variance: float  # sigma_0^2
    mean: float
    mean_variance: float  # 1 / sum 1/u
    slope: float
    slope_variance: float  # 0 without a covariate
    covariate_mean: float

    def at(self, covariate: Any) -> Any:
        """The fitted centre at a value of the covariate."""
        return self.mean + self.slope * (covariate - self.covariate_mean)

    def variance_at(self, covariate: Any) -> Any:
        """The variance of the fitted centre at a value of the covariate."""
        return self.mean_variance + self.slope_variance * (covariate - self.covariate_mean) ** 2


@dataclass(frozen=True)
class CentreFit(Centre):
    """Weighted least squares of the estimates on the centre, with what is left of every client."""

    total_variance: Floats  # u_m = sigma_0^2 + sigma_m^2
    residual: Floats  # z_m less its fitted value

    @cached_property
    def misfit(self) -> float:
        """Q(sigma_0^2), the sum of squared residuals over their variances."""
        return float((self.residual**2 / self.total_variance).sum())

    @property
    def centre(self) -> Centre:
        """The centre alone, without an array per client."""
        return Centre(
            self.inter_variance, self.mean, self.mean_variance, self.slope, self.slope_variance, self.covariate_mean
        )


@dataclass(frozen=True)
class Hierarchy:
    """Clients' estimates, variances and covariate, shifted and scaled."""

    local_estimate: Floats  # z_m, as given
    intra_variance: Floats  # sigma_m^2, as given
    estimate: Floats  # (z_m - centre) / unit
    variance: Floats  # sigma_m^2 / unit^2, at least SMALLEST_VARIANCE
    covariate: Floats  # (x_m - covariate_centre) / covariate_unit; zeros without one
    has_covariate: bool
    centre: float
    unit: float
    covariate_centre: float
    covariate_unit: float

    @property
    def is_certain(self) -> npt.NDArray[np.bool_]:
        """Which clients have variance 0."""
        return np.asarray(self.intra_variance == 0)

    @property
    def num_clients(self) -> int:
        """M."""
        return len(self.estimate)

    @property
    def num_coefficients(self) -> int:
        """How many numbers describe the centre: 1, or 2 with a covariate."""
        return 2 if self.has_covariate else 1

    @property
    def degrees_of_freedom(self) -> int:
        """M less the number of coefficients."""
        return self.num_clients - self.num_coefficients

    def fit(self, inter_variance: float) -> CentreFit:
        """The centre at this sigma_0^2, by weights relative to the surest client's."""
        total = inter_variance + self.variance
        scale = total.min()
        weight = scale / total
        weight_sum = weight.sum()
        mean = float(weight @ self.estimate / weight_sum)
        residual = self.estimate - mean
        slope = slope_variance = covariate_mean = 0.0
        if self.has_covariate:
            covariate_mean = float(weight @ self.covariate / weight_sum)
            offset = self.covariate - covariate_mean
            squares = float(weight @ offset**2)
            slope = float(weight @ (offset * residual)) / squares
            residual = residual - slope * offset
            slope_variance = float(scale) / squares
        return CentreFit(
            inter_variance, mean, float(scale / weight_sum), slope, slope_variance, covariate_mean, total, residual
        )

    def without(self, client: int) -> Hierarchy:
        """All clients but one, in the same units."""
        kept = np.arange(self.num_clients) != client
        return replace(
            self,
            local_estimate=self.local_estimate[kept],
            intra_variance=self.intra_variance[kept],
            estimate=self.estimate[kept],
            variance=self.variance[kept],
            covariate=self.covariate[kept],
        )

    def carry_back(self, value: Any) -> Any:
        """A mean, or a quantile of one, in the users' units."""
        return self.centre + self.unit * value

    def carry_variance_back(self, variance: Any) -> Any:
        """A variance in the users' units."""
        return variance * self.unit * self.unit

    def scale_variance(self, variance: float) -> float:
        """A variance of the users' in these units."""
        return min(variance / self.unit / self.unit, LARGEST_VARIANCE)


def read_hierarchy(
    local_estimate: Any, intra_variance: Any, covariate: Any = None, inter_variance: float | None = None
) -> Hierarchy:
    """Check users' arrays and scale them; where sigma_0^2 is given, as few clients as coefficients will do."""
    given = finite_tensor("local_estimate", local_estimate).to(torch.float64)
    least = (1 if covariate is None else 2) + (inter_variance is None)
    if given.ndim != 1 or len(given) < least:
        raise DataError(
            f"local_estimate has shape {tuple(given.shape)}; expected at least {_NUMBERS[least]}, one number each. "
            "The spread between clients cannot be seen in fewer: give inter_variance."
        )
    spread = variance_tensor("intra_variance", intra_variance, like=given)
    if tuple(spread.shape) not in ((), (len(given),)):
        raise DataError(
            f"intra_variance has shape {tuple(spread.shape)}; expected a scalar or one number for each of the "
            f"{len(given)} clients."
        )
    estimate, variance = given.numpy(force=True), spread.expand_as(given).numpy(force=True)
    half_range = float(estimate.max() / 2 - estimate.min() / 2)
    if half_range > WIDEST_RANGE / 2:
        raise DataError(
            f"local_estimate spans {2 * min(half_range, LARGEST_HALF):.3g}, whose square no float holds; expected a "
            f"range below {WIDEST_RANGE:.0e}. Divide the estimates by a constant, and the variances by its square."
        )
    spans = (2 * half_range, math.sqrt(float(variance.min())), math.sqrt(inter_variance or 0.0))
    unit = _power_of_two(max(spans) or math.sqrt(float(variance[variance > 0].min(initial=1.0))) or 1.0)
    centre = float(estimate[variance.argmin()])  # the surest client's, whose residual then loses no digits
    with np.errstate(over="ignore"):
        scaled = np.clip(variance / unit / unit, SMALLEST_VARIANCE, LARGEST_VARIANCE)
    column, covariate_centre, covariate_unit = _read_covariate(covariate, len(given), int(variance.argmin()))
    return Hierarchy(
        estimate, variance, (estimate - centre) / unit, scaled, column, covariate is not None,
        centre, unit, covariate_centre, covariate_unit,
    )  # fmt: skip


_NUMBERS = {1: "one client", 2: "two clients", 3: "three clients"}


def _power_of_two(value: float) -> float:
    """The power of two near a number: scaling by it rounds nothing."""
    return math.ldexp(1.0, max(min(round(math.log2(value)), 1000), -1000))


def _read_covariate(covariate: Any, num_clients: int, surest: int) -> tuple[Floats, float, float]:
    """The covariate less its value at the surest client, in units of its range."""
    if covariate is None:
        return np.zeros(num_clients), 0.0, 1.0
    given = finite_tensor("covariate", covariate).to(torch.float64)
    if tuple(given.shape) != (num_clients,):
        raise DataError(
            f"covariate has shape {tuple(given.shape)}; expected one number for each of {num_clients} clients."
        )
    column = given.numpy(force=True)
    half_range = float(column.max() / 2 - column.min() / 2)
    if half_range == 0:
        raise DataError(f"covariate is {column[0]:g} for every client; expected at least two different values.")
    if not 1.0 / WIDEST_RANGE <= half_range <= WIDEST_RANGE / 2:
        raise DataError(
            f"covariate spans {2 * min(half_range, LARGEST_HALF):.3g}; expected a range between 1e-140 and 1e140. "
            "Rescale it."
        )
    unit = _power_of_two(2 * half_range)
    return np.round((column - column[surest]) / unit, COVARIATE_DECIMALS), float(column[surest]), unit
