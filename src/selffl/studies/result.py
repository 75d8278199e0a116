"""What a study is and what it leaves behind: numbers, pictures as data, and a verdict on each claim."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from selffl.maths.significance import LEVEL, holm_p_values, paired_p_value

Verdict = Literal["holds", "holds in part", "inconclusive", "does not hold"]
OLD_VERDICTS = {"not decided": "inconclusive"}  # as records and pages of earlier versions have them
NEGATIVE = re.compile(r"(?<![\w.)\]-])-(?=\.?\d)")  # the hyphen that stands for a minus
Progress = Callable[[int, int, str], None]  # steps done, steps in all, what comes next


@dataclass(frozen=True)
class Series:
    """One line of a chart; ``error`` is a standard error, drawn as a band or bars."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None
    is_reference: bool = False  # a limit or an envelope rather than a measurement

    @classmethod
    def of(cls, name: str, x: Sequence[float], estimates: Sequence[Estimate]) -> Series:
        """A series of means with their standard errors."""
        return cls(name, x, [each.mean for each in estimates], [each.error for each in estimates])


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


def with_minus(text: str) -> str:
    """Text with a minus sign, as wide as a plus, before its negative numbers.

    Examples:
        >>> with_minus("self-fl-2 differs by -0.3 ± 1e-05 [-0.5, -0.1]")
        'self-fl-2 differs by −0.3 ± 1e-05 [−0.5, −0.1]'
    """
    return NEGATIVE.sub("−", text)


def capfirst(text: str) -> str:
    """A text with a capital at the beginning, the rest as it is."""
    return text[:1].upper() + text[1:]


@dataclass(frozen=True)
class Claim:
    """Something that the paper says, or we do (`OWN`, `TARGET`), and what was seen."""

    text: str
    verdict: Verdict
    evidence: str

    def __post_init__(self) -> None:
        for name in ("text", "evidence"):
            object.__setattr__(self, name, with_minus(getattr(self, name)))


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
    decided_by: str = ""  # the test behind the verdicts, in a sentence; nothing where there is none


def _silent(done: int, total: int, now: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Job:
    """How a study is to be run."""

    quick: bool = False  # fewer repeats: a first look
    progress: Progress = _silent  # told how far it is
    folder: Path | None = None  # where training runs leave their records; those that are there are not run again
    device: str = "cpu"  # where models train
    num_processes: int = 1  # training runs side by side
    num_seeds: int | None = None  # repeats of studies that train, if not their own number


@dataclass(frozen=True)
class Study:
    """One figure, table or statement of the paper, as something that runs."""

    id: str
    title: str
    paper: str  # where in the paper
    setting: str  # one sentence
    run: Callable[[Job], StudyResult]

    @classmethod
    def known(cls, name: str, setting: str, run: Callable[[Job], StudyResult]) -> Study:
        """A study whose title and place in the paper are in studies.toml."""
        text = _texts()[name]
        return cls(name, text["title"], text["paper"], setting, run)

    @property
    def reading(self) -> str:
        """Why it came out as it did, in words; nothing where nobody has said."""
        return _texts().get(self.id, {}).get("reading", "")

    @property
    def took(self) -> str:
        """How long its results took, and on what; nothing where it has not been run in full."""
        found: str = read_toml("studies.toml")["took"].get(self.id, "")
        return found


@cache
def read_toml(name: str) -> dict[str, Any]:
    """A file beside this one, with tuples for its lists."""
    found: dict[str, Any] = _fixed(tomllib.loads(files("selffl.studies").joinpath(name).read_text(encoding="utf-8")))
    return found


def _fixed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _fixed(each) for name, each in value.items()}
    return tuple(map(_fixed, value)) if isinstance(value, list) else value


@cache
def _texts() -> dict[str, dict[str, str]]:
    """What studies.toml says of each study, each text in one line."""
    found = read_toml("studies.toml")
    return {
        name: {key: " ".join(text.format(**found["shared"]).split()) for key, text in texts.items()}
        for name, texts in found["study"].items()
    }


# How statements begin that are not the paper's.
OWN, TARGET = "Not in the paper: ", "Target: "
Whose = Literal["paper", "own", "target"]
MET = {"holds": "met", "holds in part": "met in part", "does not hold": "not met"}  # verdicts on targets, in words


def whose(paper: str, text: str) -> Whose:
    """Whose a statement is, by where its study is in the paper and by how it begins."""
    if text.startswith(TARGET):
        return "target"
    return "own" if text.startswith(OWN) or paper.startswith(("not in the paper", "beyond the paper")) else "paper"


def verdict_word(text: str, verdict: str) -> str:
    """A verdict as it is shown: a statement holds, a target is met."""
    return MET.get(verdict, verdict) if text.startswith(TARGET) else verdict


# How statements are decided: the rule, and what the repeats of a study are.
RULE, OVER_SPLITS, OVER_DRAWS, OVER_BOTH, UNSAID = (
    " ".join(read_toml("studies.toml")["decided"][name].split())
    for name in ("rule", "over_splits", "over_draws", "over_both", "unsaid")
)


@dataclass(frozen=True)
class Estimate:
    """A mean over repeats with its standard error.

    Attributes:
        mean: Over the repeats.
        error: Standard error, as if repeats were independent.
        count: Repeats.
        test_per_train: Of a difference that is tested, what the repeats share.  Repeats that split the same rows anew:
            test rows per training row.  Repeats with data of their own: `FRESH_DRAWS`.  None: it is only shown.
    """

    mean: float
    error: float
    count: int = 2
    test_per_train: float | None = None

    @classmethod
    def of(cls, repeats: Tensor, *, test_per_train: float | None = None) -> Estimate:
        """Estimate of one number per repeat; a difference that is to be tested has to say what the repeats share."""
        values = repeats.to(torch.float64)
        error = float(values.std(correction=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")
        return cls(float(values.mean()), error, len(values), test_per_train)

    def __str__(self) -> str:
        """Four decimals of the mean and of its standard error; powers of ten where these would show nothing."""
        if abs(self.mean) >= 1000 or abs(self.mean) < 0.002:
            return f"{self.mean:.2e} ± {self.error:.1e}"
        return f"{self.mean:.4f} ± {self.error:.4f}"

    @property
    def signed(self) -> str:
        """The estimate as a difference in points: two decimals with their sign, and the standard error."""
        return f"{self.mean:+.2f} ± {self.error:.2f}"

    def shift_by(self, by: float) -> Estimate:
        """Estimate of these numbers plus a constant."""
        return replace(self, mean=self.mean + by)

    def scale_by(self, by: float) -> Estimate:
        """Estimate of these numbers in another unit."""
        return replace(self, mean=self.mean * by, error=self.error * abs(by))

    @property
    def p_value(self) -> float:
        """Two-sided, of a mean of zero; NaN where there is nothing to test, such as a single repeat."""
        if self.test_per_train is None:
            raise ValueError("this estimate is shown, not tested; expected test_per_train, which says what is shared.")
        return paired_p_value(self.mean, self.error, self.count, test_per_train=self.test_per_train)

    @property
    def is_significant(self) -> bool:
        """Whether it differs from zero at the 5 % level, by itself."""
        return self.p_value < LEVEL


def split_ratio(clients: Iterable[Mapping[str, Any]]) -> float:
    """n_test/n_train of a split, from rows of a run's table of clients; NaN where it is not recorded."""
    rows = list(clients)
    num_train, num_test = (sum(int(row.get(name) or 0) for row in rows) for name in ("num_train", "num_test"))
    return num_test / num_train if num_train and num_test else math.nan


def above_zero(gaps: Sequence[Estimate]) -> list[Verdict]:
    """Whether each of several differences is above zero, at the 5 % level after Holm's correction over all of them."""
    p_values = holm_p_values([gap.p_value for gap in gaps])
    return [
        "inconclusive" if not p < LEVEL else "holds" if gap.mean > 0 else "does not hold"
        for gap, p in zip(gaps, p_values, strict=True)
    ]


def claims_above_zero(statements: Mapping[str, tuple[Estimate, str]]) -> list[Claim]:
    """Statements each of which says that a difference is above zero: by text, the difference and the evidence."""
    verdicts = above_zero([gap for gap, _ in statements.values()])
    return [
        Claim(text, verdict, evidence)
        for (text, (_, evidence)), verdict in zip(statements.items(), verdicts, strict=True)
    ]


def all_above_zero(gaps: Sequence[Estimate]) -> Verdict:
    """Whether all of several differences are above zero: not if one is below, inconclusive if one may be."""
    return in_every_case(above_zero(gaps))


def sign(gap: Estimate) -> Verdict:
    """Whether a difference is above zero, by itself."""
    return above_zero([gap])[0]


def within(gap: Estimate, bound: float) -> Verdict:
    """Whether a difference is within a bound: its 95 % interval inside, outside, or across."""
    inside, outside = gap.shift_by(-bound), gap.shift_by(bound)
    if inside.is_significant and inside.mean < 0 and outside.is_significant and outside.mean > 0:
        return "holds"
    if (inside.is_significant and inside.mean > 0) or (outside.is_significant and outside.mean < 0):
        return "does not hold"
    return "inconclusive"


def in_every_case(verdicts: Iterable[Verdict]) -> Verdict:
    """Decide a statement about every one of several cases: it does not hold if it fails in one."""
    found = set(verdicts)
    if "does not hold" in found:
        return "does not hold"
    return "holds" if found == {"holds"} else "inconclusive"


def in_parts(verdicts: Iterable[Verdict]) -> Verdict:
    """Decide a statement that has several parts: it holds in part where some of them hold, and not all."""
    found = set(verdicts)
    if "holds" in found:
        return "holds" if found == {"holds"} else "holds in part"
    if "holds in part" in found:
        return "holds in part"
    return "does not hold" if "does not hold" in found else "inconclusive"
