"""Build the technical report as a PDF, its numbers and figures from the results pages: ``make report``."""

from __future__ import annotations

import json
import re
import shutil
import string
import sys
import tempfile
from pathlib import Path
from typing import Any

import benchmarks
import hooks

from selffl import __version__
from selffl.reports.results import count_statements

DOCS = Path(__file__).parent
SOURCE = DOCS / "report" / "report.typ"
FIGURES = ("benchmarks.svg", "limits-shrinkage.svg")
ADAPTERS = {"adapters-images": "images", "adapters-text": "text", "adapters-speech": "speech"}
PUBLISHED = ("published-mnist-pfedbayes", "published-cifar10-fedkddc")
PARTS = {"accuracy": "accuracy", "worst 10 %": "worst", "worse than alone": "losing", "gradients": "gradients"}
NEWCOMERS, NOISE, ABLATION, ATTACKS = "newcomers", "sums-noise", "femnist-ablation", "attacks"
DEFENCES = {"fedavg": "clip", "ditto": "clip", "self-fl": "clip", "self-fl-auto": "hierarchy"}
GROUPED, MIXED_MODEL = "multilevel", "mixed model, slopes (lme4)"
POINTS = {  # columns of a study of regimes, and what they are called here
    "self-fl-auto": "accuracy",
    "above the oracle": "− oracle",
    "above own global model": "− global",
    "above best baseline": "− baseline",
}


def data_rows() -> list[dict[str, str]]:
    """One for each data set: our method, the best baseline, the difference and the verdict."""
    rows = []
    for study, data in benchmarks.DATA.items():
        table = {row["method"]: row for row in benchmarks.sections()[study].table}
        label, gap, said = benchmarks.headline(study)
        rows.append(
            {
                "data (clients)": data,
                "self-fl-auto": table[benchmarks.OUR_METHOD]["accuracy"],
                "best baseline": table[label]["accuracy"],
                "which": f"{label}, {table[label]['chosen']}".removesuffix(", –"),
                "difference": str(gap),
                "verdict": said,
            }
        )
    return rows


def method_tables() -> dict[str, list[dict[str, str]]]:
    """Every method on every data set, a table for each thing that was measured."""
    tables = {data: benchmarks.sections()[study].table for study, data in benchmarks.DATA.items()}
    methods = list(dict.fromkeys(row["method"] for rows in tables.values() for row in rows))
    found = {data: {row["method"]: row for row in rows} for data, rows in tables.items()}
    return {
        part: [
            {"method": method}
            | {
                data.split(" (")[0]: rows.get(method, {}).get(column, "–").removesuffix(" %")
                for data, rows in found.items()
            }
            for method in methods
        ]
        for column, part in PARTS.items()
    }


def page_rows(page: str, *columns: str) -> list[dict[str, str]]:
    """The table of a page whose columns begin so; an empty first cell is as the one above it."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    tables = [
        [[re.sub(r"\*\*|`", "", cell.strip()) for cell in line.split("|")[1:-1]] for line in block.strip().splitlines()]
        for block in re.findall(r"(?:^\|.*\|$\n?)+", text, re.M)
    ]
    head, _, *lines = next(table for table in tables if tuple(table[0][: len(columns)]) == columns)
    above, rows = "", []
    for first, *rest in lines:
        above = first or above
        rows.append(dict(zip(head, [above, *rest], strict=True)))
    return rows


def published_tables() -> dict[str, list[dict[str, str]]]:
    """Tables that others published, and the same methods here; of several settings, a column of each."""
    small, large = (benchmarks.sections()[study].table for study in PUBLISHED)
    rows: dict[str, dict[str, str]] = {}
    for row in large:
        both = row["ours"] if row["published"] == "–" else f"{row['published']} → {row['ours']}"
        rows.setdefault(row["method"], {"method": row["method"]})[row["setting"]] = both
    columns = ("method", "published", "ours", "ours − published")
    return {"small": [{name: row[name] for name in columns} for row in small], "large": list(rows.values())}


def regime_rows() -> list[dict[str, str]]:
    """One for each study of regimes."""
    found = []
    for study in (name for name in benchmarks.REGIMES if name in benchmarks.sections()):
        gaps = benchmarks.regime_gaps(study)
        found.append(
            {
                "data": benchmarks.REGIMES[study],
                "cells": str(len(gaps)),
                "level with every baseline, or ahead": str(benchmarks.num_level(gaps)),
                "furthest behind": str(min(gaps, key=lambda gap: gap.mean)),
                "furthest ahead": str(max(gaps, key=lambda gap: gap.mean)),
            }
        )
    return found


def cell_tables() -> list[dict[str, Any]]:
    """Every cell of every study of regimes."""
    return [
        {
            "title": title,
            "rows": [
                {"clients": row["clients"], "model": row["model"], "sizes": row["sizes"], "C": row["C"]}
                | {name: row[column] for column, name in POINTS.items() if column != "self-fl-auto"}
                for row in benchmarks.sections()[study].table
            ],
        }
        for study, title in benchmarks.REGIMES.items()
        if study in benchmarks.sections()
    ]


def adapter_rows() -> list[dict[str, str]]:
    """One for each method: accuracy, that of the worst tenth and traffic, for each of the networks."""
    tables = {
        title: {row["method"]: row for row in benchmarks.sections()[name].table} for name, title in ADAPTERS.items()
    }
    methods = dict.fromkeys(method for table in tables.values() for method in table)
    columns = {"": "accuracy", ", worst": "worst 10 %", ", kB": "kB a round"}
    return [
        {"method": method}
        | {
            title + ending: table.get(method, {}).get(column, "–")
            for title, table in tables.items()
            for ending, column in columns.items()
        }
        for method in methods
    ]


def grouped_rows() -> list[dict[str, str]]:
    """One for each real data set of the study of grouped data."""
    rows = {(row["data"], row["model"]): row["known groups"] for row in benchmarks.sections()[GROUPED].table}
    found = []
    for data in (data for data, model in rows if model == MIXED_MODEL and not data.startswith("simulated")):
        ours, theirs = rows[data, "selffl estimator"], rows[data, MIXED_MODEL]
        own, other = (float(cell.split(" ± ")[0]) for cell in (ours, theirs))
        more = f"{100 * (own / other - 1):+.1f}".replace("-", "−")
        found.append({"data": data, "selffl": ours, MIXED_MODEL: theirs, "% larger": more})
    return found


def attack_rows() -> list[dict[str, str]]:
    """One for each attack: what honest clients' own models lose with each method, undefended and with its defence."""
    table = [row for row in benchmarks.sections()[ATTACKS].table if row["hostile"] == "20%"]
    lost = {(row["method"], row["attack"], row["defence"]): row["personal models, lost"] for row in table}
    attacks = dict.fromkeys(row["attack"] for row in table)
    return [
        {"attack": attack}
        | {
            f"{method}: none → {defence}": " → ".join(lost[method, attack, each] for each in ("none", defence))
            if (method, attack, defence) in lost
            else "–"
            for method, defence in DEFENCES.items()
        }
        for attack in attacks
    ]


def statement_rows() -> list[dict[str, str]]:
    """One for each study of the paper's statements: how many hold, and how many do not."""
    verdicts = {"holds": "holds", "holds in part": "part", "inconclusive": "open", "does not hold": "not"}
    found = []
    for study, page in hooks.results().items():
        counts = count_statements([page])["paper"]
        if counts.total():
            row = {name: str(counts[verdict] or "–") for verdict, name in verdicts.items()}
            found.append({"study": study} | row)
    return found


def machines() -> dict[str, str]:
    """Versions and machines of the studies in this report, each by a letter."""
    found = dict.fromkeys(
        benchmarks.sections()[study].environment for studies in subjects().values() for study in studies
    )
    return dict(zip(found, string.ascii_uppercase, strict=False))


def subjects() -> dict[str, list[str]]:
    """What the report is about, and the studies of it that have been run."""
    found = {
        "six data sets": benchmarks.DATA, "regimes": benchmarks.REGIMES, "adapters": ADAPTERS, "parts": (ABLATION,),
        "newcomers": (NEWCOMERS,), "noise": (NOISE,), "attacks": (ATTACKS,), "grouped data": (GROUPED,),
        "published": PUBLISHED, "the paper": [row["study"] for row in statement_rows()],
    }  # fmt: skip
    taken: set[str] = set()
    run = {}
    for subject, names in found.items():
        run[subject] = [name for name in names if name in benchmarks.sections() and name not in taken]
        taken |= set(run[subject])
    return run


def command_rows() -> list[dict[str, str]]:
    """What made each study of this report, and what it is for."""
    found = benchmarks.sections()
    return [
        {
            "for": subject,
            "selffl paper run …": found[name].command.removeprefix("selffl paper run "),
            "s": str(found[name].seconds),
            "on": machines()[found[name].environment],
        }
        for subject, names in subjects().items()
        for name in names
    ]


def behind_published() -> str:
    """Where a method of the larger published table is ahead of ours, and by how much."""
    pattern = r"(−[\d.]+) points against (.+?), the best"
    setting = r"\((.+?)\)\.?$"
    behind = [
        f"{found[1]} points against {found[2]} ({place[1]})"
        for line in benchmarks.sections()[PUBLISHED[1]].statements
        if (found := re.match(pattern, line.evidence)) and (place := re.search(setting, line.text))
    ]
    return ", ".join(behind)


def behind_tuned(rows: list[dict[str, str]]) -> str:
    """By how many points FedAvg, tuned on test rows, is ahead at most."""
    number = re.compile(r"[\d.]+")
    points = [[float(number.match(row[name])[0]) for name in ("FedAvg at best", "with")] for row in rows]  # type: ignore[index]
    return f"{max(theirs - ours for theirs, ours in points):.1f}"


def numbers() -> dict[str, Any]:
    """All that the report takes from the results pages."""
    found = benchmarks.sections()
    gaps = [gap.mean for study in benchmarks.REGIMES if study in found for gap in benchmarks.regime_gaps(study)]
    closing = page_rows("research/closing-rounds", "cell", "seed", "c in training")
    sentiment = " ".join(line.evidence for line in found["auto-sent140"].statements)
    return {
        "version": __version__,
        "headline": benchmarks.headline_sentence(),
        "data": data_rows(),
        "regimes": regime_rows(),
        "cells": cell_tables(),
        "adapters": adapter_rows(),
        "grouped": grouped_rows(),
        "published": published_tables(),
        "behind_published": behind_published(),
        "methods": method_tables(),
        "newcomers": found[NEWCOMERS].table,
        "noise": found[NOISE].table,
        "ablation": found[ABLATION].table,
        "attacks": attack_rows(),
        "membership": page_rows("privacy", "method", "model", "z"),
        "row_noise": page_rows("privacy", "method", "model", "ε"),
        "estimators": page_rows("research/two-halves", "", "P", "median rows"),
        "frequencies": page_rows("research/class-frequencies", "", "digits", "letters"),
        "visits": page_rows("research/closing-visits", "", "seed 0", "seed 1"),
        "closing_mnist": page_rows("research/closing-rounds", "cell", "c in training"),
        "closing_cifar": closing,
        "behind_tuned": behind_tuned(closing),
        "furthest": f"{-min(gaps):.2f}",
        "gradients_of_sentiment": re.search(r"([\d.]+) times the gradients", sentiment)[1],  # type: ignore[index]
        "paper": hooks.statements_line("paper"),
        "statements": statement_rows(),
        "machines": [{"": letter, "versions and machine": each} for each, letter in machines().items()],
        "commands": command_rows(),
    }


def report() -> bytes:
    """The report, as a PDF."""
    import typst

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(SOURCE, folder / SOURCE.name)
        for figure in FIGURES:
            shutil.copy(DOCS / "figures" / figure, folder / figure)
        (folder / "numbers.json").write_text(json.dumps(numbers(), ensure_ascii=False), encoding="utf-8")
        made: bytes = typst.compile(folder / SOURCE.name)
        return made


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "report.pdf")
    target.write_bytes(report())
    print(f"Report: {target.resolve()}")
