"""What a study is and what it leaves behind: numbers, pictures as data, and a verdict on each claim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from scipy.stats import t
from torch import Tensor

Verdict = Literal[
    "holds", "holds in part", "not decided", "does not hold"
]  # not decided: no difference at the 5 % level
Progress = Callable[[int, int, str], None]  # steps done, steps in all, what comes next


@dataclass(frozen=True)
class Series:
    """One line of a chart; ``error`` is a standard error, drawn as a band or bars."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None
    is_reference: bool = False  # a limit or an envelope rather than a measurement


@dataclass(frozen=True)
class Chart:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    x_ticks: Sequence[float] | None = None
    kind: Literal["lines", "bars", "points"] = "lines"
    dodge: float = 0.0  # shift of each line along x, so that those that coincide can all be seen


@dataclass(frozen=True)
class Figure:
    """Charts side by side, with one legend."""

    name: str
    caption: str
    charts: Sequence[Chart]


@dataclass(frozen=True)
class Claim:
    """Something the paper says, and what was seen."""

    text: str
    verdict: Verdict
    evidence: str


@dataclass(frozen=True)
class StudyResult:
    """Everything a study found."""

    rows: Sequence[dict[str, Any]]  # the long table: one row per measurement, written as CSV
    table: Sequence[dict[str, str]]  # the short one, as it is shown
    figures: Sequence[Figure]
    claims: Sequence[Claim]
    config: dict[str, Any] = field(default_factory=dict)
    title: str | None = None  # where it depends on the data found: a stand-in is named in every title
    setting: str | None = None
    runs: Sequence[dict[str, Any]] = ()  # method, seed and folder of each run shown, for a report that looks inside


def _silent(done: int, total: int, now: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Job:
    """How a study is to be run.

    Attributes:
        quick: Fewer repeats: a first look.
        progress: Told how far it is.
        folder: Where training runs leave their records; those that lie there already are not run again.
        device: Where models train.
        num_processes: Training runs side by side.
        num_seeds: Repeats of studies that train, if not their own number.
    """

    quick: bool = False
    progress: Progress = _silent
    folder: Path | None = None
    device: str = "cpu"
    num_processes: int = 1
    num_seeds: int | None = None


@dataclass(frozen=True)
class Study:
    """One figure, table or statement of the paper, as something that runs."""

    id: str
    title: str
    paper: str  # where in the paper
    setting: str  # one sentence
    run: Callable[[Job], StudyResult]
    reading: str = ""  # why it came out as it did, in words; the numbers are in the record


@dataclass(frozen=True)
class Estimate:
    """A mean over repeats with its standard error."""

    mean: float
    error: float
    count: int = 2  # repeats

    @classmethod
    def of(cls, repeats: Tensor) -> Estimate:
        """Of one number per repeat."""
        values = repeats.to(torch.float64)
        error = float(values.std(correction=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")
        return cls(float(values.mean()), error, len(values))

    def __str__(self) -> str:
        """Four decimals of the mean and of its standard error; powers of ten where these would show nothing."""
        if abs(self.mean) >= 1000 or abs(self.mean) < 0.002:
            return f"{self.mean:.2e} ± {self.error:.1e}"
        return f"{self.mean:.4f} ± {self.error:.4f}"

    def shifted(self, by: float) -> Estimate:
        """Of the same numbers plus a constant."""
        return Estimate(self.mean + by, self.error, self.count)

    def scaled(self, by: float) -> Estimate:
        """Of the same numbers in another unit."""
        return Estimate(self.mean * by, self.error * abs(by), self.count)

    @property
    def is_clear(self) -> bool:
        """Whether it differs from zero at the 5 % level, by Student's t; a single repeat shows nothing."""
        return self.count > 1 and abs(self.mean) > float(t.ppf(0.975, self.count - 1)) * self.error
