"""The tables of docs/benchmarks.md, made from the results pages when the site is built, and its picture.

The README shows the picture too: ``python docs/benchmarks.py`` draws it anew.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from selffl.reports.results import Section, read_results
from selffl.reports.tables import markdown

RESULTS = Path(__file__).parent / "results.md"
DATA = {  # what each study is about, and how many clients it has
    "auto-mnist": "MNIST (1000)",
    "auto-femnist": "letters (200), for FEMNIST",
    "auto-cifar10": "CIFAR-10 (20)",
    "auto-sent140": "sentiment (785), for Sent140",
    "auto-digits": "digits (40)",
    "auto-wakeword": "wake words (5), made-up devices",
}
REGIMES = {
    "regimes-digits": "digits",
    "regimes-letters": "letters",
    "regimes-mnist": "MNIST",
    "regimes-cifar10": "CIFAR-10",
}
PICTURE = "figures/benchmarks.svg"
PEERS = RESULTS.parent / "figures" / "peers.json"  # what `selffl bench --peers --json` has printed
PEERS_PICTURE = "figures/peers.svg"
LIBRARIES = {
    "products": "bare products of a round's steps",
    "selffl": "selffl",
    "fedjax": "FedJAX",
    "pfl": "pfl-research, one process",
    "loop": "plain PyTorch loop",
    "fluke": "fluke",
    "flower": "Flower, simulation",
}
OUR_METHOD = "self-fl-auto"
BLUE = "#0072b2"


@dataclass(frozen=True)
class Gap:
    """By how many points our method is above the best baseline."""

    mean: float
    error: float  # standard error over seeds

    @classmethod
    def read(cls, text: str) -> Gap:
        """From ``+1.85 ± 0.12``."""
        mean, error = text.replace("−", "-").split(" ± ")
        return cls(float(mean), float(error))

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ± {self.error:.2f}".replace("-", "−")


@cache
def sections() -> dict[str, Section]:
    """What the results pages say, by study."""
    return read_results(RESULTS)


def link(study: str, text: str) -> str:
    """A link to the results of a study."""
    return f"[{text}](results/{study}.md)"


def headline(study: str) -> tuple[str, Gap, str]:
    """The baseline that is most accurate on test rows, how far our method is above it, and what the page says of it."""
    section = sections()[study]
    for statement in section.statements:
        if found := re.match(r"([+−-][\d.]+ ± [\d.]+) points against (.+?), the best \(paired", statement.evidence):
            said = {"Met": "ahead", "Not met": "not ahead"}.get(statement.verdict, statement.verdict.lower())
            return found[2], Gap.read(found[1]), said if section.is_tested else "not tested"
    raise ValueError(f"{study} has no line on the best of the other methods")


def headline_sentence() -> str:
    """On which data sets our method is ahead of the best baseline, by the verdicts of the results pages."""
    groups: dict[str, list[str]] = {"ahead": [], "inconclusive": [], "not ahead": [], "not tested": []}
    for study, data in DATA.items():
        groups[headline(study)[2]].append(data.split(" (")[0])
    words = {"not tested": "not yet decided by the present test"}
    parts = [f"{words.get(said, said)} on {_listed(names)}" for said, names in groups.items() if names]
    return "; ".join(parts) + "."


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def data_table() -> str:
    """One line for each data set: our method, the best baseline, the difference, the command."""
    rows = []
    for study, data in DATA.items():
        section = sections()[study]
        table = {row["method"]: row for row in section.table}
        label, gap, said = headline(study)
        name = link(study, data) + ("" if section.is_tested else " †")
        rows.append(
            {
                "data (clients)": name,
                f"`{OUR_METHOD}`": table[OUR_METHOD]["accuracy"],
                "best baseline": table[label]["accuracy"],
                "which": label,
                "tuned": table[label]["chosen"],
                "difference": str(gap),
                "verdict": said,
                "command": f"`{section.command}`",
            }
        )
    return markdown(rows)


def regimes_table() -> str:
    """One line for each data set: in how many cells our method is level with every baseline, and the extremes."""
    rows = []
    for study in (name for name in REGIMES if name in sections()):
        section, gaps = sections()[study], regime_gaps(study)
        rows.append(
            {
                "data": link(study, REGIMES[study]),
                "cells": str(len(gaps)),
                "level with every baseline within one s.e., or ahead": str(num_level(gaps)),
                "furthest behind": str(min(gaps, key=lambda gap: gap.mean)),
                "furthest ahead": str(max(gaps, key=lambda gap: gap.mean)),
                "command": f"`{section.command}`",
            }
        )
    return markdown(rows)


def num_level(gaps: Sequence[Gap]) -> int:
    """In how many cells our method is less than one standard error behind; rounded figures that tie count as behind."""
    return sum(gap.mean > -gap.error or gap.mean >= 0.0 for gap in gaps)


def regime_gaps(study: str) -> list[Gap]:
    """Of each cell."""
    return [Gap.read(row["above best baseline"]) for row in sections()[study].table]


def published_tables() -> str:
    """The tables that others published, as studies have them; which of those studies have not been run."""
    from selffl.studies import STUDIES

    names = [name for name in STUDIES if name.startswith("published-")]
    parts = []
    for name in (name for name in names if name in sections()):
        section = sections()[name]
        parts += [f"### {link(name, section.title)}", f"Made by `{section.command}`.", markdown(section.table)]
    if missing := [f"`{name}`" for name in names if name not in sections()]:
        parts.append(f"Not run in full yet: {', '.join(missing)}.")
    return "\n\n".join(parts)


def machines_table() -> str:
    """The command, the seconds and the machine of every study on the page."""
    shown = [*DATA, *REGIMES, *(name for name in sections() if name.startswith("published-"))]
    found = {name: sections()[name] for name in shown if name in sections()}
    return markdown(
        [
            {"study": f"`{name}`", "seconds": str(section.seconds), "versions and machine": section.environment}
            for name, section in found.items()
        ]
    )


@cache
def peers() -> dict[str, Any]:
    """The record of rounds of several libraries that took turns."""
    found: dict[str, Any] = json.loads(PEERS.read_text(encoding="utf-8"))
    return found


def times_ours(name: str) -> list[float]:
    """How many times as long as ours a library's round takes, turn by turn."""
    found = peers()["libraries"]
    return [each / ours for each, ours in zip(found[name]["seconds"], found["selffl"]["seconds"], strict=True)]


def _spread(values: list[float], form: str = ".2g") -> str:
    """Median, and range in brackets."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}–{max(values):{form}})"


def peers_table() -> str:
    """Seconds, ratios, memory and accuracy of each library."""
    found = peers()["libraries"]
    rows = []
    for name, title in LIBRARIES.items():
        if name in found:
            each = found[name]
            versions = ", ".join(f"{package} {number}" for package, number in each["versions"].items())
            right = "" if each["accuracy"] is None else f"{100 * each['accuracy']:.1f} %"
            rows.append(
                {
                    "": title,
                    "ms a round": _spread([1e3 * value for value in each["seconds"]], ".0f"),
                    "times as long as selffl": "1" if name == "selffl" else _spread(times_ours(name)),
                    "peak memory": f"{each['peak_megabytes']:.0f} MB",
                    "accuracy": right,
                    "versions": versions,
                }
            )
    return markdown(rows)


def peers_machine() -> str:
    """Where and how the table was measured, and who is not in it."""
    record = peers()
    sizes, load = record["sizes"], record["load"][0]
    text = (
        f"{record['machine']}, load {load:.0f}; {sizes['clients']} clients of {sizes['rows']} rows, {sizes['cohort']} "
        f"a round, {sizes['steps']} steps of batch {sizes['batch']}; {record['turns']} turns. Everybody's clients took "
        f"as many steps, and no accuracy is more than {100 * record['tolerance']:.0f} points from the loop's."
    )
    left_out = "; ".join(f"{LIBRARIES[name]} ({why.rstrip('.')})" for name, why in record["left_out"].items())
    return f"{text} Left out: {left_out}." if left_out else text


def peers_picture() -> bytes:
    """A bar for each library: how many times as long as ours a round takes."""
    from matplotlib.figure import Figure

    from selffl.reports.figures import INK, save, style

    names = [name for name in LIBRARIES if name in peers()["libraries"]]
    medians = [statistics.median(times_ours(name)) for name in names]
    with style():
        canvas = Figure(figsize=(8.6, 0.4 * len(names) + 0.9), layout="constrained")
        axis = canvas.subplots()
        axis.barh([LIBRARIES[name] for name in names], medians, color=BLUE)
        for place, median in enumerate(medians):
            axis.annotate(f"{median:.2g}", (median, place), (4, 0), textcoords="offset points", va="center", color=INK)
        axis.set_xscale("log")
        axis.invert_yaxis()
        axis.set_xlabel("seconds of a round of FedAvg over those of selffl, median of turns (logarithmic)")
        with tempfile.TemporaryDirectory() as folder:
            return save(canvas, Path(folder) / "peers", ("svg",))[0].read_bytes()


def picture() -> bytes:
    """Our method less the best baseline: a line for each data set, and one for all cells of each regime study."""
    from matplotlib.figure import Figure

    from selffl.reports.figures import INK, save, style

    data = {name.split(",")[0]: [headline(study)[1]] for study, name in DATA.items()}
    found = {REGIMES[study]: regime_gaps(study) for study in REGIMES if study in sections()}
    regimes = {f"{title},\n{len(gaps)} regimes": gaps for title, gaps in found.items()}
    with style():
        canvas = Figure(figsize=(9.8, 2.6), layout="constrained")
        for axis, rows in zip(canvas.subplots(1, 2, sharex=True), (data, regimes), strict=True):
            for place, gaps in enumerate(rows.values()):
                spread = [0.8 * ((index + 0.5) / len(gaps) - 0.5) for index in range(len(gaps))]
                for offset, gap in zip(spread, sorted(gaps, key=lambda each: -each.mean), strict=True):
                    axis.errorbar(gap.mean, place + offset, xerr=gap.error, fmt="o", color=BLUE, ms=3, lw=1)
            axis.axvline(0, color=INK, linewidth=0.9)
            axis.set_yticks(range(len(rows)), list(rows))
            axis.set_ylim(len(rows) - 0.4, -0.6)
            axis.grid(visible=True, axis="x")
        canvas.supxlabel(
            f"accuracy of {OUR_METHOD} minus that of the best tuned baseline, in points; bars: one standard error",
            fontsize="medium",
        )
        with tempfile.TemporaryDirectory() as folder:
            return save(canvas, Path(folder) / "benchmarks", ("svg",))[0].read_bytes()


if __name__ == "__main__":
    (RESULTS.parent / PICTURE).write_bytes(picture())
    (RESULTS.parent / PEERS_PICTURE).write_bytes(peers_picture())
