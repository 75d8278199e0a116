"""Who gains from the others: the analysis of a table of estimates, client by client."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from selffl.data.estimates import EstimateTable
from selffl.errors import ConfigError
from selffl.maths.heterogeneity import InterVarianceMethod
from selffl.maths.meta_analysis import LeaveOneOut, MetaAnalysis, meta_analysis
from selffl.maths.posterior import Form, posterior
from selffl.reports import figures, forest

Floats = npt.NDArray[np.float64]

MIN_GAIN = 1.05  # below which a client alone is as good
MAX_CLIENTS_LEFT_OUT = 500  # clients; each is one more analysis
BLOCK_ROWS = 10_000
SOURCES = {
    "reml": "REML",
    "ml": "maximum likelihood",
    "pm": "Paule–Mandel",
    "dl": "DerSimonian–Laird",
    "given": "given",
}
ROW_FIELDS = ("client", "estimate", "variance", "shrunk", "low", "high", "gain", "verdict")


def check_ending(path: Path) -> None:
    """Refuse a picture of a kind that is not drawn."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"{path} cannot be drawn; give a file ending in .png, .svg or .pdf.")


def verdict(gain: float, variance: float = 1.0, width: float = 0.0) -> str:
    """Say in plain words what a client with this gain and this variance of its own has from the others.

    ``width`` is that of its interval: where one client is certain and σ₀² is estimated as 0, the others' gain has no
    bound, and yet it is not known that σ₀² is 0.

    Examples:
        >>> verdict(3.14), verdict(1.01), verdict(1.0, variance=0.0)
        ('gains 3.1×', 'alone is as good', 'exact from itself')
    """
    if variance == 0:
        return "exact from itself"
    if math.isinf(gain):
        return "exact from others" if width == 0 else "exact if σ₀² is 0"
    return "alone is as good" if gain < MIN_GAIN else f"gains {gain:.1f}×" if gain < 1000 else f"gains {gain:.0e}×"


@dataclass(frozen=True)
class Shrinkage:
    """A table of estimates with its analysis."""

    table: EstimateTable
    analysis: MetaAnalysis
    form: Form
    personal_mean: Floats
    personal_interval: Floats  # [clients, 2]
    gain: Floats

    @classmethod
    def of(
        cls,
        table: EstimateTable,
        inter_variance: float | None = None,
        method: InterVarianceMethod = "reml",
        form: Form = "exact",
        level: float = 0.95,
        new_variance: float | None = None,
    ) -> Shrinkage:
        """The shrinkage with sigma_0^2 given, or estimated by ``method``."""
        analysis = meta_analysis(
            table.estimate,
            table.variance,
            method=method,
            covariate=table.covariate,
            inter_variance=inter_variance,
            new_variance=new_variance,
            level=level,
        )
        if form == "exact":
            return cls(table, analysis, form, analysis.personal_mean, analysis.personal_interval, analysis.gain)
        if table.covariate is not None:
            raise ConfigError("the paper's form knows no covariate; use the exact form, or leave the covariate out.")
        paper = posterior(table.estimate, table.variance, analysis.inter_variance, form)
        ends = _interval(paper.personal_mean, paper.personal_variance, level)
        return cls(table, analysis, form, paper.personal_mean, ends, paper.gain)

    @property
    def is_integrated(self) -> bool:
        """Whether the clients' intervals account for what is not known of sigma_0^2."""
        return self.form == "exact" and self.analysis.is_integrated

    @cached_property
    def without_each(self) -> LeaveOneOut | None:
        """The analysis without each client in turn; None for too few clients, or too many to wait for."""
        hierarchy = self.analysis._hierarchy
        is_possible = hierarchy.degrees_of_freedom >= 2 and hierarchy.num_clients <= MAX_CLIENTS_LEFT_OUT
        return self.analysis.leave_one_out() if is_possible else None

    def rows(self, most: int | None = None) -> Iterator[dict[str, Any]]:
        """Client by client, in the order of the file; the first ``most`` of them."""
        last = len(self.table.client) if most is None else min(most, len(self.table.client))
        for first in range(0, last, BLOCK_ROWS):
            yield from self._block(slice(first, min(first + BLOCK_ROWS, last)))

    def _block(self, block: slice) -> Iterator[dict[str, Any]]:
        """Some of the rows, from plain lists: a million looks into arrays would take a minute."""
        low, high = self.personal_interval[block].T.tolist()
        gain, variance = self.gain[block].tolist(), self.table.variance[block].tolist()
        width = np.diff(self.personal_interval[block])[:, 0].tolist()
        columns = (
            self.table.client[block], self.table.estimate[block].tolist(), variance,
            self.personal_mean[block].tolist(), low, high, gain, map(verdict, gain, variance, width),
        )  # fmt: skip
        covariate = None if self.table.covariate is None else self.table.covariate[block].tolist()
        for number, values in enumerate(zip(*columns, strict=True)):
            row: dict[str, Any] = dict(zip(ROW_FIELDS, values, strict=True))
            if covariate is not None:
                row["covariate"] = covariate[number]
            yield row

    def rows_without(self, most: int | None = None) -> list[dict[str, Any]]:
        """What the answer is without each client, those first without which others' answers move most."""
        if (left := self.without_each) is None:
            return []
        order = np.argsort(-np.nan_to_num(left.largest_move, nan=np.inf), kind="stable")[:most]
        names = ("inter_variance", "mean", "largest_move", "surprise")
        return [
            {"client": self.table.client[i]} | {name: float(getattr(left, name)[i]) for name in names} for i in order
        ]

    @property
    def summary(self) -> dict[str, Any]:
        """The whole in a few numbers; what cannot be told is None."""
        analysis, test, slope = self.analysis, self.analysis.heterogeneity, self.analysis.slope
        return {
            "clients": analysis.num_clients,
            "form": self.form,
            "level": analysis.level,
            "inter_variance": analysis.inter_variance,
            "inter_variance_source": SOURCES[analysis.method],
            "inter_variance_q_profile": _pair(analysis.inter_variance_interval),
            "inter_variance_profile_likelihood": _pair(analysis.inter_variance_profile),
            "mean": analysis.mean,
            "mean_standard_error": analysis.mean_standard_error,
            "mean_interval": _pair(analysis.mean_interval),
            "slope": None if slope is None else slope.value,
            "slope_interval": None if slope is None else _pair(slope.interval),
            "slope_p_value": None if slope is None else slope.p_value,
            "q": None if test is None else test.statistic,
            "q_degrees_of_freedom": None if test is None else test.degrees_of_freedom,
            "q_p_value": None if test is None else test.p_value,
            "i_squared": None if test is None else test.i_squared,
            "h_squared": None if test is None else test.h_squared,
            "prediction_interval": _pair(analysis.prediction_interval),
            "new_variance": analysis.new_variance,
            "new_covariate": analysis.new_covariate,
            "gain_probability": analysis.gain_probability,
            "is_integrated": self.is_integrated,
            "median_gain": float(np.median(self.gain)),
            "alone_is_as_good": int((self.gain < MIN_GAIN).sum()),
        }

    def save(self, path: Path) -> None:
        """Write all clients as CSV."""
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*ROW_FIELDS, *([] if self.table.covariate is None else ["covariate"])])
            writer.writerows(row.values() for row in self.rows())

    def plot(self, path: Path) -> None:
        """Draw a forest plot in the format of the file's ending."""
        check_ending(path)
        analysis, left = self.analysis, self.without_each
        canvas = forest.draw(
            forest.Forest(
                clients=self.table.client,
                estimate=self.table.estimate,
                own_interval=_interval(self.table.estimate, self.table.variance, analysis.level),
                personal=self.personal_mean,
                personal_interval=self.personal_interval,
                mean=analysis.mean,
                mean_interval=analysis.mean_interval,
                prediction_interval=analysis.prediction_interval,
                mean_without=None if left is None else left.mean,
                title=f"Each client alone and with the others, {100 * analysis.level:g} % intervals",
                notes=self._notes(),
            )
        )
        with figures.style():
            canvas.savefig(path)

    def _notes(self) -> list[str]:
        """What stands under the forest plot."""
        analysis, summary = self.analysis, self.summary
        spread = f"variance between clients σ₀² = {analysis.inter_variance:.3g} ({summary['inter_variance_source']})"
        if analysis.inter_variance_interval is not None:
            spread += (
                f", Q-profile {analysis.inter_variance_interval.low:.3g} to {analysis.inter_variance_interval.high:.3g}"
            )
        notes = [spread]
        if (test := analysis.heterogeneity) is not None:
            notes.append(
                f"Q = {test.statistic:.1f}, {test.degrees_of_freedom} degrees of freedom, p = {test.p_value:.2g}; "
                f"I² = {100 * test.i_squared:.0f} %"
            )
        if analysis.slope is not None:
            notes.append(f"clients are shrunk towards a line; its slope is {analysis.slope.value:.3g}")
        if analysis.gain_probability is not None:
            notes.append(
                f"probability that the next client gains: {analysis.gain_probability:.2f}, if the variance of its own "
                f"estimate is {analysis.new_variance:.3g}"
            )
        return notes


def _interval(mean: Floats, variance: Floats, level: float) -> Floats:
    """Ends of normal intervals, ``[clients, 2]``."""
    reach = float(ndtri(0.5 + level / 2)) * np.sqrt(variance)
    return np.stack([mean - reach, mean + reach], axis=1)


def _pair(interval: tuple[float, float] | None) -> list[float] | None:
    return None if interval is None else [float(end) for end in interval]
