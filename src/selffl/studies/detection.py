"""Detectors beside the model they started from: relative false accepts by device type and state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selffl.data.devices import DEVICES
from selffl.data.wakeword import RowTable
from selffl.data.wakeword_rows import NORMAL
from selffl.maths.detection import relative_false_accepts, trade_off
from selffl.randomness import uniform
from selffl.studies.arms import START, Outcome
from selffl.studies.result import Chart, Estimate, Series

REJECTED_SHARE = 0.1  # of the wake words, in the normal state, that the pre-trained model rejects at its threshold
NUM_SAMPLES = 1000  # of the bootstrap
REJECT_RATES = torch.tensor([0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.3, 0.4], dtype=torch.float64)

Cell = tuple[int, int]  # device type, state


@dataclass(frozen=True)
class Relative:
    """Relative false accepts in one cell: geometric mean over seeds, with a bootstrap interval over clips."""

    by_seed: Tensor  # logarithms, [seeds]
    low: float
    high: float

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return math.exp(float(self.by_seed.mean()))

    def __str__(self) -> str:
        """The mean and its interval as a table shows them."""
        return "diverged" if math.isnan(self.mean) else f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def operating_point(scores: Tensor, table: RowTable) -> float:
    """One threshold for all types: the highest at which at most `REJECTED_SHARE` of the wake words are rejected."""
    positives = scores[torch.from_numpy((table.label == 1) & (table.state == NORMAL))].sort().values
    return float(positives[int(REJECTED_SHARE * len(positives))])


def relative(outcomes: Sequence[Outcome], view: str, tables: Sequence[RowTable]) -> dict[Cell, Relative]:
    """Relative false accepts of a view's models, by cell; ``tables`` say what the test rows of each seed are.

    The interval is for the mean over these seeds, were there other clips: clips are drawn anew, all rows of one
    together, and the same draws serve all seeds, whose test clips overlap, and all methods, whose differences are
    paired.
    """
    found = {}
    first = tables[0]
    cells = {(int(device), int(state)) for device, state in zip(first.device, first.state, strict=True)}
    for cell in sorted(cells):
        points, samples = [], []
        for outcome, table in zip(outcomes, tables, strict=True):
            if view not in outcome.scores:  # it diverged
                points.append(torch.tensor(torch.nan, dtype=torch.float64))
                samples.append(torch.full((NUM_SAMPLES,), torch.nan, dtype=torch.float64))
                continue
            here = torch.from_numpy((table.device == cell[0]) & (table.state == cell[1]))
            labels, weight = torch.from_numpy(table.label)[here], redrawn(torch.from_numpy(table.clip)[here])
            scores, start = (outcome.scores[name][here].double() for name in (view, START))
            threshold = operating_point(outcome.scores[START].double(), table)
            points.append(relative_false_accepts(scores, start, labels, threshold).log())
            samples.append(relative_false_accepts(scores, start, labels, threshold, weight).log())
        means = torch.stack(samples).mean(0)
        low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=means.dtype)).exp().tolist()
        found[cell] = Relative(torch.stack(points), low, high)
    return found


POISSON = tuple(sum(math.exp(-1) / math.factorial(k) for k in range(n + 1)) for n in range(9))  # P(count <= n), mean 1


def redrawn(clips: Tensor) -> Tensor:
    """How often each row counts in bootstrap samples of clips ``[rows]``: ``[NUM_SAMPLES, rows]``.

    Rows of one clip are no independent evidence, so that clips are drawn.  A clip's count is a Poisson variable of mean
    1 that depends on the sample and the clip alone: the same wherever the clip is met.
    """
    lots = uniform(0, "bootstrap", torch.arange(NUM_SAMPLES).unsqueeze(-1), clips)
    return torch.searchsorted(torch.tensor(POISSON, dtype=lots.dtype), lots).double()


def average(found: Mapping[Cell, Relative], state: int) -> Tensor:
    """Mean of the logarithms over the types that have the state, by seed."""
    return torch.stack([value.by_seed for (_, here), value in found.items() if here == state]).mean(0)


def spread(found: Mapping[Cell, Relative]) -> Tensor:
    """Standard deviation of the logarithms over types and states, by seed: how uneven the changes are."""
    return torch.stack([value.by_seed for value in found.values()]).std(0)


def size(found: Mapping[Cell, Relative]) -> Tensor:
    """Mean absolute logarithm over types and states, by seed: how large the changes are."""
    return torch.stack([value.by_seed.abs() for value in found.values()]).mean(0)


def as_ratio(gap: Estimate) -> str:
    """A difference of logarithms as a factor with its standard error."""
    return f"× {math.exp(gap.mean):.2f} (logarithm {gap.mean:+.2f} ± {gap.error:.2f})"


def line(found: Mapping[Cell, Relative], state: int) -> dict[str, str]:
    """A line of a table: one cell per type."""
    return {
        name: str(found[device, state]) if (device, state) in found else "NA" for device, name in enumerate(DEVICES)
    }


def curves(
    lines: Mapping[str, tuple[Sequence[Outcome], str]], tables: Sequence[RowTable], state: int, title: str
) -> Chart:
    """DET curves: false accepts against false rejects, mean over types and seeds; the first model's for reference."""
    first = next(iter(lines.values()))[0]
    drawn = []
    for label, (group, view) in (*lines.items(), ("pre-trained", (first, START))):
        rates = torch.stack(
            [
                trade_off(outcome.scores[view][here].double(), torch.from_numpy(table.label)[here], REJECT_RATES)
                for outcome, table in zip(group, tables, strict=True)
                for device in range(len(DEVICES))
                if view in outcome.scores
                and (here := torch.from_numpy((table.device == device) & (table.state == state))).any()
            ]
        )
        drawn.append(
            Series(
                label,
                (100 * REJECT_RATES).tolist(),
                (100 * rates.mean(0)).tolist(),
                is_reference=label == "pre-trained",
            )
        )
    return Chart(title, "false rejects, %", "false accepts, %", drawn, log_x=True, log_y=True)
