"""How many statements hold: counts of verdicts, and the sentences that say them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from selffl.studies.result import MET, Whose, whose

ENDINGS = {  # of one statement, of several
    "holds": ("holds", "hold"),
    "holds in part": ("holds in part", "hold in part"),
    "inconclusive": ("is inconclusive", "are inconclusive"),
    "does not hold": ("does not hold", "do not hold"),
}
ENDINGS_OF_TARGETS = {
    verdict: (f"is {MET.get(verdict, verdict)}", f"are {MET.get(verdict, verdict)}") for verdict in ENDINGS
}
COUNTED: dict[Whose, str] = {
    "paper": "Statements of the paper",
    "own": "Statements of our own",
    "target": "Targets for our own method",
}


def count_verdicts(claims: Iterable[tuple[str, str, str]]) -> dict[Whose, Counter[str]]:
    """How often each verdict comes among statements of the paper, our own, and targets.

    A claim is where its study is in the paper, its text and its verdict.
    """
    counts: dict[Whose, Counter[str]] = {kind: Counter() for kind in COUNTED}
    for paper, text, verdict in claims:
        counts[whose(paper, text)][verdict] += 1
    return counts


def tally(counts: Mapping[Whose, Counter[str]]) -> str:
    """What came of statements of the paper, of our own, and of targets, each in a sentence."""
    return " ".join(f"{title}: {tally_of(kind, counts[kind])}." for kind, title in COUNTED.items() if counts[kind])


def tally_of(kind: Whose, count: Counter[str]) -> str:
    """How many there are, and how many of them hold or are met: of 78, 27 hold, 51 do not hold."""
    endings = ENDINGS_OF_TARGETS if kind == "target" else ENDINGS
    parts = [f"{count[verdict]} {text[count[verdict] > 1]}" for verdict, text in endings.items() if count[verdict]]
    return f"of {count.total()}, {', '.join(parts)}"
