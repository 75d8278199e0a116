"""Which classes models answer with, and how sure they are: for a client's confusions and its calibration."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

MOST_ROWS = 100_000  # of which answers are kept
NUM_BINS = 10  # of confidence, from 0 to 1


@dataclass(frozen=True)
class ClassAnswers:
    """The class that each row's model answers with, and the probability that it gives to that class; on the CPU."""

    classes: Tensor  # [rows]
    confidence: Tensor  # [rows]

    @classmethod
    def of_rows(cls, number: int) -> Self:
        """Answers for so many rows, none of which has one yet."""
        return cls(torch.full((number,), -1), torch.full((number,), torch.nan, dtype=torch.float64))

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self | None:
        """Answers of the rows of all parts, in their order; none where there are no parts."""
        if not parts:
            return None
        return cls(torch.cat([each.classes for each in parts]), torch.cat([each.confidence for each in parts]))

    def note(self, start: int, outputs: Tensor) -> None:
        """Take the scores of classes ``[n, K]`` of the rows from ``start`` on."""
        best = outputs.double().softmax(-1).max(-1)
        self.classes[start : start + len(outputs)] = best.indices.cpu()
        self.confidence[start : start + len(outputs)] = best.values.cpu()

    def note_log_odds(self, log_odds: Tensor) -> None:
        """Take the log-odds of the second of two classes, of all rows."""
        self.classes.copy_(log_odds > 0)
        self.confidence.copy_(log_odds.double().abs().sigmoid())


def count_answers(
    found: ClassAnswers, classes: Tensor, offset: Tensor, clients: Sequence[Hashable], names: Sequence[Any] | None
) -> list[dict[str, Any]]:
    """Rows of a table: how many of a client's rows of one class got which answer, with what confidence on average.

    A line for each tenth of confidence that there is.  ``classes [rows]`` are the true ones, ``offset [M + 1]`` says
    whose rows they are, and ``names`` are those of the classes, where they have some.
    """
    owner = torch.arange(len(clients)).repeat_interleave(offset.diff())
    tenth = (found.confidence * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    keys = torch.stack([owner, classes, found.classes, tenth])
    cells, cell, counts = keys.unique(dim=1, return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    means = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, cell, found.confidence) / counts
    table = zip(*cells[:3].tolist(), means.tolist(), counts.tolist(), strict=True)
    named: Sequence[Any] = names or range(int(torch.stack([classes, found.classes]).max()) + 1 if len(classes) else 0)
    return [
        {
            "client": clients[client],
            "class": named[held],
            "answer": named[answered],
            "confidence": round(mean, 4),
            "num_test": number,
        }
        for client, held, answered, mean, number in table
    ]
