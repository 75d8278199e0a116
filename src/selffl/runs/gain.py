"""What clients gain by joining: a method's personal models against training alone, on the same held-out rows.

Pure tables: `selffl.runs.session` trains the clients alone, this says what came of it, and for whom.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from selffl.errors import pluralise
from selffl.runs.evaluation import Evaluation, or_none
from selffl.runs.folder import Row
from selffl.training.metrics import HIGHER_IS_BETTER

LEVEL = 0.05  # of the test
SMALL_GAIN = 1.25  # predicted gain below which the others are worth less than a quarter of a client's own rows
LARGE_GAIN = 2.0  # and from which they are worth as much as these


def gain_columns(
    joined: Evaluation, alone: Evaluation, lost: Tensor, counts: Mapping[str, Tensor] | None = None
) -> dict[str, list[Any]]:
    """Columns of the table of clients, one cell a client: what it has alone, and what it gains.

    Args:
        joined: the method's personal models.
        alone: those of clients that trained by themselves.
        lost: whose training alone diverged, ``[M]``; their cells are empty.
        counts: rows won and lost by joining, ``[M]``, where they are known and the rows are not.
    """
    metric = joined.metrics[0]
    by_metric = {name: alone.of_clients(name, "personal").masked_fill(lost, torch.nan) for name in joined.metrics}
    mine, other = joined.of_clients(metric, "personal"), by_metric[metric]
    gain = mine - other if HIGHER_IS_BETTER[metric] else other - mine
    found: dict[str, list[Any]] = {
        **{f"alone_{name}": [or_none(value) for value in values.tolist()] for name, values in by_metric.items()},
        "realised_gain": [or_none(value) for value in gain.tolist()],
    }
    if metric == "accuracy":
        for name, numbers in (_won_and_lost(joined, alone) if counts is None else counts).items():
            found[name] = [None if is_lost else n for n, is_lost in zip(numbers.tolist(), lost.tolist(), strict=True)]
    return found


def _won_and_lost(joined: Evaluation, alone: Evaluation) -> dict[str, Tensor]:
    """How many of each client's rows one of its two models has right and the other wrong."""
    ours, theirs = (each.of_rows("accuracy", "personal").bool() for each in (joined, alone))
    sizes = joined.num_rows.tolist()
    return {
        name: torch.tensor([int(own.sum()) for own in rows.split(sizes)])  # type: ignore[no-untyped-call]
        for name, rows in (("num_won", ours & ~theirs), ("num_lost", theirs & ~ours))
    }


def gain_scores(clients: Sequence[Row]) -> Row:
    """The share of clients that loses, and the mean gain, where it is realised; empty where there is none."""
    gains = [row["realised_gain"] for row in clients if row.get("realised_gain") is not None]
    return {
        "share_losing": sum(gain < 0 for gain in gains) / len(gains) if gains else None,
        "mean_realised_gain": sum(gains) / len(gains) if gains else None,
    }


@cache  # the same few counts come again and again
def is_within_chance(num_won: int, num_lost: int) -> bool:
    """Whether as uneven a split happens in 5 % of cases or more, were each row won or lost by the toss of a coin.

    The exact sign test, two-sided, of the rows that one of two models gets right and the other wrong (McNemar's).
    """
    from scipy.stats import binomtest

    return num_won == num_lost or bool(binomtest(num_won, num_won + num_lost).pvalue >= LEVEL)


def rank_correlation(one: Sequence[float | None], other: Sequence[float | None]) -> tuple[float, float, int] | None:
    """Spearman's, its p-value, and of how many pairs; none where either does not vary.

    Numbers that differ by rounding alone, as 0.9 - 0.8 and 0.7 - 0.6 do, have the same rank.
    """
    both = zip(one, other, strict=True)
    pairs = [(float(f"{a:.9g}"), float(f"{b:.9g}")) for a, b in both if a is not None and b is not None]
    if len(pairs) < 3 or len({a for a, _ in pairs}) < 2 or len({b for _, b in pairs}) < 2:
        return None
    from scipy.stats import spearmanr  # here: it takes a second

    test = spearmanr([a for a, _ in pairs], [b for _, b in pairs])
    return float(test.statistic), float(test.pvalue), len(pairs)


def gain_rows(clients: Sequence[Row], metric: str, *, has_global: bool = True) -> list[Row]:
    """Who gains and who loses, worst first: one row for each client that has held-out rows, with a reason.

    Args:
        clients: rows of a run's table of clients with ``realised_gain``.
        metric: that the gain is of.
        has_global: whether the method's global model is meant for anybody.
    """
    tested = [row for row in clients if row["num_test"]]
    typical = _Typical.of(tested, metric, has_global)
    found = [_gain_row(row, metric, typical) for row in tested]
    return sorted(
        found,
        key=lambda row: (1, 0.0, 0) if row["realised_gain"] is None else (0, row["realised_gain"], -row["num_test"]),
    )


def losers(rows: Sequence[Row]) -> list[Row]:
    """Rows of clients that lose, the worst first, but who loses within chance after all others.

    Clients with two or three test rows lose or gain half of everything: they would fill every short list.
    """
    down = [row for row in rows if row["realised_gain"] is not None and row["realised_gain"] < 0]
    return sorted(down, key=lambda row: row["is_within_chance"] is True)


def _gain_row(row: Row, metric: str, typical: _Typical) -> Row:
    chance = _chance(row, metric)
    return {
        "client": row["client"],
        "num_train": row["num_train"],
        "num_test": row["num_test"],
        "predicted_gain": row.get("predicted_gain"),
        "alone": row.get(f"alone_{metric}"),
        "personal": row.get(metric),
        "realised_gain": row.get("realised_gain"),
        "is_within_chance": chance,
        "why": _why(row, metric, typical, chance),
    }


def _net(row: Row) -> int:
    """How many more rows are right than alone."""
    return round(float(row["realised_gain"]) * int(row["num_test"]))


def _chance(row: Row, metric: str) -> bool | None:
    """Whether the gain is within chance; none where that is not known."""
    if metric != "accuracy" or row.get("realised_gain") is None:
        return None
    if row.get("num_won") is not None:
        return is_within_chance(row["num_won"], row["num_lost"])
    # Of two runs that were not paired row by row the difference is known: nothing is less likely by chance than that
    # all rows that differ point the same way, so what is within chance even then is so in any case.
    net = _net(row)
    return True if is_within_chance(max(net, 0), max(-net, 0)) else None


@dataclass(frozen=True)
class _Typical:
    """What a client is compared with: the others with held-out rows."""

    rows: float  # the median of training rows
    many: float  # what the largest tenth has at least, if that is twice the median
    few: float  # what the smallest quarter has at most, if that is half the median
    shared: float | None  # median of the shared model's score; none where there is no such model
    badly: float | None  # what it is at best for the worst quarter

    @classmethod
    def of(cls, tested: Sequence[Row], metric: str, has_global: bool) -> _Typical:
        """Quantiles over the clients."""
        sizes = sorted(row["num_train"] for row in tested)
        scores = [row.get(f"global_{metric}") for row in tested if has_global]
        ranked = sorted((s for s in scores if s is not None), reverse=not HIGHER_IS_BETTER[metric])  # worst first
        count, middle = len(sizes), statistics.median(sizes) if sizes else math.nan
        return cls(
            middle,
            max(sizes[count - max(count // 10, 1)], 2 * middle) if sizes else math.nan,
            min(sizes[max(count // 4, 1) - 1], middle / 2) if sizes else math.nan,
            statistics.median(ranked) if ranked else None,
            ranked[len(ranked) // 4 - 1] if len(ranked) >= 4 else None,
        )

    def is_unlike(self, score: float | None, metric: str) -> bool:
        """Whether the shared model does worse for a client than for three quarters of them."""
        if score is None or self.badly is None or self.shared is None:
            return False
        if HIGHER_IS_BETTER[metric]:
            return score <= self.badly and score < self.shared
        return score >= self.badly and score > self.shared


def _why(row: Row, metric: str, typical: _Typical, chance: bool | None) -> str:
    """A reason that the numbers support, in a few words; what is not measured is not claimed."""
    gain, seen = row.get("realised_gain"), _seen(row, metric)
    if row.get("rounds") == 0:
        return "never took part in a round"
    if gain is None:
        has_own = row.get(metric) is not None
        return "alone, its training diverged" if has_own else f"no {metric} of its test rows"
    if gain == 0:
        return f"no difference: {seen}"
    if chance:
        return f"within chance: {seen}"
    of_size = _of_size(row, typical, gain < 0)
    if of_size:
        return of_size
    score, predicted = row.get(f"global_{metric}"), row.get("predicted_gain")
    if gain < 0 and typical.is_unlike(score, metric):
        here, usual = (_shown(value, metric) for value in (score, typical.shared))
        return f"unlike the others: the shared model has {here} here, {usual} at the middle client"
    if gain < 0 and predicted is not None and predicted >= LARGE_GAIN:
        return f"a gain was predicted (variance ÷ {predicted:.3g}) and did not come: {seen}"
    return f"significant: {seen}" if chance is False else f"nothing measured stands out: {seen}"


def _of_size(row: Row, typical: _Typical, is_loss: bool) -> str:
    """Whether a client has little to gain, or much, because of the rows that it has itself; nothing if neither."""
    size, predicted = row["num_train"], row.get("predicted_gain")
    kind, is_one = ("large", size > typical.rows) if is_loss else ("small", size < typical.rows)
    if not is_one:
        return ""
    if predicted is not None and (predicted < SMALL_GAIN if is_loss else predicted >= LARGE_GAIN):
        # Its variance shrinks as if it had so many times its rows.
        worth = f"the others are predicted to be worth {(predicted - 1) * size:,.0f}"
        return f"{kind} client: {pluralise(size, 'row')}, {worth}"
    is_extreme = size >= typical.many if is_loss else size <= typical.few
    return f"{kind} client: {pluralise(size, 'row')}, {typical.rows:,.0f} at the middle client" if is_extreme else ""


def _seen(row: Row, metric: str) -> str:
    """What the difference rests on."""
    of = pluralise(row["num_test"], "test row")
    if row.get("num_won") is not None:
        return f"{row['num_won']} won and {row['num_lost']} lost of {of}"
    if metric != "accuracy" or row.get("realised_gain") is None:
        return of
    net = _net(row)
    return f"{abs(net)} {'fewer' if net < 0 else 'more'} right of {of}"


def _shown(value: float | None, metric: str) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.0f} %" if metric == "accuracy" else f"{value:.3g}"
