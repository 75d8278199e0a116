"""Who gains from the others: the posterior of a table of estimates, client by client."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import norm

from selffl.data.estimates import EstimateTable
from selffl.errors import ConfigError, DataError
from selffl.maths.heterogeneity import InterVarianceMethod, estimate_inter_variance
from selffl.maths.posterior import Form, Posterior, posterior
from selffl.reports import figures

ALONE = 1.05  # a gain below this is not worth a federation


def check_ending(path: Path) -> None:
    """Refuse a picture of a kind that is not drawn."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"{path} cannot be drawn; give a file ending in .png, .svg or .pdf.")


def verdict(gain: float) -> str:
    """A gain in plain words.

    Examples:
        >>> verdict(3.14), verdict(1.01)
        ('gains 3.1×', 'alone is as good')
    """
    if math.isinf(gain):
        return "known exactly from others"
    return "alone is as good" if gain < ALONE else f"gains {gain:.1f}×" if gain < 1000 else f"gains {gain:.0e}×"


@dataclass(frozen=True)
class Shrinkage:
    """A table of estimates with its posterior."""

    table: EstimateTable
    inter_variance: float
    source: str  # how sigma_0^2 was come by
    level: float  # of the intervals
    posterior: Posterior

    @classmethod
    def of(
        cls,
        table: EstimateTable,
        inter_variance: float | None,
        method: InterVarianceMethod,
        form: Form,
        level: float = 0.95,
    ) -> Shrinkage:
        """With sigma_0^2 given, or estimated by ``method``."""
        if not 0 < level < 1:
            raise ConfigError(f"level is {level}; expected a probability between 0 and 1, such as 0.95.")
        if inter_variance is not None:
            if not (math.isfinite(inter_variance) and inter_variance >= 0):
                raise ConfigError(f"inter-variance is {inter_variance}; expected a number, 0 or more.")
            source = "given"
            certain = table.estimate[table.variance == 0]
            if inter_variance == 0 and len(certain) > 1 and np.ptp(certain) > 0:
                raise DataError(
                    f"inter-variance is 0, so that all clients are the same, but {len(certain)} clients of variance 0 "
                    "differ; expected one or the other. Give an inter-variance above 0."
                )
        else:
            inter_variance = estimate_inter_variance(table.estimate, table.variance, method)
            source = {"dl": "DerSimonian–Laird", "reml": "REML"}[method]
        found = posterior(table.estimate, table.variance, inter_variance, form)
        return cls(table, inter_variance, source, level, found)

    def half_width(self, variance: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Half the length of an interval at ``level``."""
        return float(norm.ppf(0.5 + self.level / 2)) * np.sqrt(variance)

    def rows(self, most: int | None = None) -> Iterator[dict[str, Any]]:
        """Client by client, in the order of the file; the first ``most`` of them."""
        p, reach = self.posterior, self.half_width(self.posterior.personal_variance)
        for i, client in enumerate(self.table.client[:most]):
            mean, gain = float(p.personal_mean[i]), float(p.gain[i])
            yield {
                "client": client,
                "estimate": float(self.table.estimate[i]),
                "variance": float(self.table.variance[i]),
                "shrunk": mean,
                "low": mean - float(reach[i]),
                "high": mean + float(reach[i]),
                "gain": gain,
                "verdict": verdict(gain),
            }

    @property
    def summary(self) -> dict[str, Any]:
        """The whole in a few numbers."""
        gain = np.asarray(self.posterior.gain)
        mean, reach = float(self.posterior.global_mean), float(self.half_width(self.posterior.global_variance))
        return {
            "clients": len(gain),
            "form": self.posterior.form,
            "inter_variance": self.inter_variance,
            "inter_variance_source": self.source,
            "global_mean": mean,
            "global_low": mean - reach,
            "global_high": mean + reach,
            "median_gain": float(np.median(gain)),
            "alone_is_as_good": int((gain < ALONE).sum()),
        }

    def save(self, path: Path) -> None:
        """All clients as CSV."""
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["client", "estimate", "variance", "shrunk", "low", "high", "gain", "verdict"])
            writer.writerows(row.values() for row in self.rows())

    def plot(self, path: Path) -> None:
        """Forest plot, in the format of the file's ending."""
        check_ending(path)
        p = self.posterior
        canvas = figures.forest_plot(
            self.table.client,
            self.table.estimate,
            self.half_width(self.table.variance),
            np.asarray(p.personal_mean),
            self.half_width(np.asarray(p.personal_variance)),
            float(p.global_mean),
            f"Each client alone and with the others, {100 * self.level:g} % intervals",
        )
        with figures.style():
            canvas.savefig(path)
