"""What comes of a cell of `selffl.studies.regimes`: lines of the table, the figure, and verdicts over all cells."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from selffl.runs.evaluation import WITH_CLASSES
from selffl.runs.gain import rank_correlation
from selffl.studies.arms import Outcome, Outcomes, difference, estimate, ratio_of
from selffl.studies.auto import AUTO
from selffl.studies.comparison import TUNED_DITTO, TUNED_FEDAVG, points
from selffl.studies.result import TARGET, Chart, Claim, Estimate, Figure, Series, all_above_zero, sign, with_minus

BELOW_GLOBAL, BELOW_ORACLE, BELOW_BASELINE = 0.2, 0.4, 0.5  # points of accuracy that may be missing
MIN_TEST_ROWS = 10  # of a client whose gain is counted: with fewer it is mostly chance

OWN_GLOBAL = "own global model, class frequencies"
LOCAL, FEDAVG, FEDAVG_CLASSES = "local", "fedavg", "fedavg, class frequencies"
TUNED_CLASSES = "fedavg, class frequencies, fine-tuned"
TUNED_VIEWS = {"global": TUNED_FEDAVG, WITH_CLASSES: TUNED_CLASSES}  # where fine-tuning starts
BASELINES = (FEDAVG, FEDAVG_CLASSES, TUNED_FEDAVG, TUNED_CLASSES, TUNED_DITTO, LOCAL)


@dataclass(frozen=True)
class Cell:
    """What one line of the table is about."""

    kind: str  # one of `selffl.data.regimes.KINDS`
    model: str
    sizes: str
    participation: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.model}, {self.sizes} sizes, C = {self.participation:g}"


def at_precision(precision: float) -> str:
    """What self-fl-auto is called with its precision by hand."""
    return f"{AUTO}, c = {precision:g}"


@dataclass(frozen=True)
class CellResult:
    """What came out in a cell.

    Attributes:
        cell: Which.
        outcomes: By label, in the order of seeds.
        precisions: c of the grid, by label.
        notes: What was chosen, by label.
    """

    cell: Cell
    outcomes: Outcomes
    precisions: dict[str, float]
    notes: dict[str, str]

    def accuracy(self, label: str) -> Estimate:
        """Accuracy in percent, over seeds; NaN where a run diverged."""
        return estimate(self.outcomes[label], "weighted_accuracy")

    def gap(self, label: str) -> Estimate:
        """Points that self-fl-auto is above another, paired over seeds."""
        return difference(self.outcomes[AUTO], self.outcomes[label], "weighted_accuracy")

    def best(self, labels: Iterable[str]) -> str | None:
        """The label with the best mean accuracy of some; none where all diverged."""
        trained = [label for label in labels if not math.isnan(self.accuracy(label).mean)]
        return max(trained, key=lambda label: self.accuracy(label).mean, default=None)

    @property
    def oracle(self) -> str | None:
        """The best precision of the grid, by test rows."""
        return self.best(self.precisions)

    @property
    def baseline(self) -> str | None:
        """The best of the others."""
        return self.best(BASELINES)

    @property
    def baseline_gaps(self) -> dict[str, Estimate]:
        """Against every baseline that did not diverge."""
        return {label: self.gap(label) for label in BASELINES if not math.isnan(self.accuracy(label).mean)}

    @property
    def learned_precision(self) -> float:
        """c = 1/σ₀² of the last round, median over seeds."""
        return statistics.median(precision_of(outcome) for outcome in self.outcomes[AUTO])

    @property
    def rank_correlations(self) -> list[float | None]:
        """Rank correlations of predicted and measured gain, by seed; none where either does not vary."""
        pairs = zip(self.outcomes[AUTO], self.outcomes[LOCAL], strict=True)
        return [predicted_order(ours, alone) for ours, alone in pairs]


def precision_of(outcome: Outcome) -> float:
    """c as a run has learned it in the end; NaN where it has none."""
    variance = outcome.summary.get("inter_variance")
    return math.nan if variance is None else 1.0 / float(variance)


def predicted_order(ours: Outcome, alone: Outcome) -> float | None:
    """Spearman's correlation of the gain predicted for a client and what it gains over local training.

    Over clients with `MIN_TEST_ROWS` test rows or more; none where either does not vary, or a run diverged.
    """
    if not ours.clients or not alone.clients:
        return None
    pairs = [
        (row["predicted_gain"], float(row["accuracy"]) - float(other["accuracy"]))
        for row, other in zip(ours.clients, alone.clients, strict=True)
        if int(row["num_test"]) >= MIN_TEST_ROWS
    ]
    found = rank_correlation([predicted for predicted, _ in pairs], [gain for _, gain in pairs])
    return None if found is None else found[0]


def long_rows(number: int, found: CellResult) -> list[dict[str, Any]]:
    """Every arm with every seed."""
    return [
        {
            "cell": number,
            **asdict(found.cell),
            "method": label,
            "seed": outcome.seed,
            "accuracy": outcome.score("weighted_accuracy"),
            "worst10_accuracy": outcome.score("worst10_accuracy"),
            "precision": precision_of(outcome),
            "is_oracle": label == found.oracle,
            "chosen": found.notes.get(label, ""),
        }
        for label, group in found.outcomes.items()
        for outcome in group
    ]


def table_line(number: int, found: CellResult) -> dict[str, str]:
    """One cell: accuracies, and how far self-fl-auto is above each."""
    cell, oracle, baseline = found.cell, found.oracle, found.baseline

    def shown(label: str | None) -> str:
        return "–" if label is None else points(found.accuracy(label))

    def above(label: str | None) -> str:
        gap = None if label is None else found.gap(label)
        return "–" if gap is None or math.isnan(gap.mean) else with_minus(gap.signed)

    return {
        "cell": str(number),
        "clients": cell.kind,
        "model": cell.model,
        "sizes": cell.sizes,
        "C": f"{cell.participation:g}",
        AUTO: shown(AUTO),
        "c learned": f"{found.learned_precision:.3g}",
        "oracle": shown(oracle),
        "its c": "–" if oracle is None else f"{found.precisions[oracle]:g}",
        "own global model": shown(OWN_GLOBAL),
        "best baseline": shown(baseline),
        "which": "–" if baseline is None else baseline,
        "above the oracle": above(oracle),
        "above own global model": above(OWN_GLOBAL),
        "above best baseline": above(baseline),
    }


def gap_figure(results: Sequence[CellResult]) -> Figure:
    """How far self-fl-auto is above the oracle, its own global model and the best baseline, cell by cell."""
    numbers = list(range(1, len(results) + 1))

    def series(name: str, label_of: Callable[[CellResult], str | None]) -> Series:
        there = [(x, found.gap(label)) for x, found in zip(numbers, results, strict=True) if (label := label_of(found))]
        return Series(name, [x for x, _ in there], [gap.mean for _, gap in there], [gap.error for _, gap in there])

    level = Series("level", [0.5, len(results) + 0.5], [0.0, 0.0], is_reference=True)

    def chart(title: str, *lines: Series) -> Chart:
        label = "points of accuracy"
        return Chart(
            title, "cell, as numbered in the table", label, [level, *lines], x_ticks=numbers, kind="points", dodge=0.2
        )

    # Apart, for a global model is of no use where labels are exchanged: beside it the other gaps would not be seen.
    charts = [
        chart(
            "Self-FL with learned variances above …",
            series("the oracle", lambda found: found.oracle),
            series("best baseline", lambda found: found.baseline),
        ),
        chart("… and above its own global model", series(OWN_GLOBAL, lambda found: OWN_GLOBAL)),
    ]
    num_seeds = len(results[0].outcomes[AUTO])
    caption = (
        f"Accuracy of {AUTO} less that of the oracle (the best precision of a grid, chosen on test rows), of its own "
        f"global model with each client's class frequencies, and of the best baseline; paired over {num_seeds} seeds, "
        "bars ± s.e."
    )
    return Figure("gaps", caption, charts)


# ------------------------------------------------------------------------------------------------------------- verdicts


def claims_of(results: Sequence[CellResult]) -> list[Claim]:
    """What self-fl-auto is measured by, over all cells."""
    own = [{OWN_GLOBAL: found.gap(OWN_GLOBAL)} for found in results]
    oracles = [{} if found.oracle is None else {found.oracle: found.gap(found.oracle)} for found in results]
    baselines = [found.baseline_gaps for found in results]
    return [
        _not_below("its own global model with class frequencies", own, results, BELOW_GLOBAL),
        _not_below("the oracle,", oracles, results, BELOW_ORACLE),
        _not_below("every baseline,", baselines, results, BELOW_BASELINE),
        _orders(results),
    ]


def _low(gap: Estimate) -> float:
    """A difference to rank by: where self-fl-auto diverged nothing is lower."""
    return -math.inf if math.isnan(gap.mean) else gap.mean


def _not_below(
    others: str, by_cell: Sequence[Mapping[str, Estimate]], results: Sequence[CellResult], margin: float
) -> Claim:
    """Whether self-fl-auto is nowhere below others by more than a margin; ``by_cell`` are the differences, by label."""
    text = f"{TARGET}in every cell at least {others} less {margin:g} points."
    gaps = [(place, label, gap) for place, here in enumerate(by_cell) for label, gap in here.items()]
    if not gaps:
        return Claim(text, "inconclusive", "There is nothing to look at: every run of the others diverged.")
    where, label, lowest = min(gaps, key=lambda piece: _low(piece[2]))
    missed = {place for place, _, gap in gaps if not gap.mean >= -margin}
    looked_at = sum(map(bool, by_cell))
    left_out = len(results) - looked_at
    said = f"that of {AUTO}, which diverged" if math.isnan(lowest.mean) else f"{lowest.signed} points"
    return Claim(
        text,
        all_above_zero([gap.shift_by(margin) for _, _, gap in gaps]),
        f"The mean is so in {looked_at - len(missed)} of {looked_at} cells; the lowest is {said}, against "
        f"{label} ({results[where].cell})."
        + (f" Left out, since runs of the other diverged: {left_out}." if left_out else ""),
    )


def _orders(results: Sequence[CellResult]) -> Claim:
    """Whether those gain more of whom that is predicted; the mean over cells, tested over seeds."""
    text = f"{TARGET}the predicted gain orders who gains."
    by_cell = [(found.cell, found.rank_correlations) for found in results]
    known = [(cell, torch.tensor(each, dtype=torch.float64)) for cell, each in by_cell if None not in each]
    if not known:
        return Claim(text, "inconclusive", "In no cell do both predicted and realised gains vary with every seed.")
    ratio = ratio_of(outcome for found in results for outcome in found.outcomes[AUTO])
    mean = Estimate.of(torch.stack([each for _, each in known]).mean(0), test_per_train=ratio)
    cell, lowest = min(known, key=lambda piece: float(piece[1].mean()))
    return Claim(
        text,
        sign(mean),
        f"Spearman's correlation with the gain over local training is {mean.signed}, the mean of {len(known)} of "
        f"{len(results)} cells (in the others either does not vary), over clients with {MIN_TEST_ROWS} test rows or "
        f"more; the lowest is {float(lowest.mean()):+.2f} ({cell}).",
    )
