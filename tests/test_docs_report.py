"""The technical report has the numbers of the results pages, and can be built."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytest.importorskip("typst")
pytest.importorskip("mkdocs")


@pytest.fixture(scope="module")
def make_report():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import make_report

        yield make_report
    finally:
        sys.path.remove(str(ROOT / "docs"))


def test_the_numbers_are_those_of_the_readme_and_the_results(make_report):
    found = make_report.numbers()
    readme = re.search(r"^\| data \(clients\).*?\n\n", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in readme.strip().splitlines()[2:]]
    for row, (data, own, best, difference) in zip(found["data"], rows, strict=True):
        assert row["data (clients)"] == data
        assert row["self-fl-auto"].split(" ± ")[0] == own
        assert row["best baseline"].split(" ± ")[0] == best.split(",")[0]
        assert row["difference"] == difference.split(",")[0]
    assert [len(study["rows"]) for study in found["cells"]] == [20, 20, 20, 12]
    worst = [row["− baseline"].split(" ± ")[0] for study in found["cells"] for row in study["rows"]]
    assert min(float(gap.replace("−", "-")) for gap in worst) == -float(found["furthest"])
    page = (ROOT / "docs" / "results" / "multilevel.md").read_text(encoding="utf-8")
    for row in found["grouped"]:
        assert re.search(rf"^\| {row['data']} \| selffl estimator \| {row['selffl']} \|", page, re.M)
    assert found["gradients_of_sentiment"] == "3.25"


def test_tables_of_methods_and_notes_are_those_of_their_pages(make_report):
    found = make_report.numbers()
    page = (ROOT / "docs" / "results" / "auto-digits.md").read_text(encoding="utf-8")
    for part, number in (("accuracy", 2), ("worst", 4), ("losing", 6), ("gradients", 7)):
        for row in found["methods"][part]:
            (line,) = re.findall(rf"^\| {re.escape(row['method'])} \|.*$", page, re.M)
            assert row["digits"] == line.split("|")[number].strip().removesuffix(" %")
    notes = (ROOT / "docs" / "research" / "two-halves.md").read_text(encoding="utf-8").replace("**", "")
    for row in found["estimators"]:
        assert row[""] in ("linear", "logistic")
        assert " | ".join(list(row.values())[1:]) in notes
    published = (ROOT / "docs" / "results" / "published-cifar10-fedkddc.md").read_text(encoding="utf-8")
    for row in found["published"]["large"]:
        both = row["Dirichlet 0.1"].split(" → ")
        assert (
            f"| Dirichlet 0.1 | {row['method']} | {' | '.join(both if len(both) > 1 else ['–', *both])} |" in published
        )


def test_attacks_adapters_and_closing_rounds_are_those_of_their_pages(make_report):
    found = make_report.numbers()
    page = (ROOT / "docs" / "results" / "attacks.md").read_text(encoding="utf-8")
    (row,) = (row for row in found["attacks"] if row["attack"] == "colluding")
    for method, defence in make_report.DEFENCES.items():
        for each, lost in zip(("none", defence), row[f"{method}: none → {defence}"].split(" → "), strict=True):
            assert re.search(rf"^\| {method} \| colluding \| 20% \| {each} \| [^|]+ \| {lost} \|", page, re.M)
    page = (ROOT / "docs" / "results" / "adapters-speech.md").read_text(encoding="utf-8")
    for row in found["adapters"]:
        assert f"| {row['method']} | {row['speech']} | {row['speech, worst']} |" in page
    notes = (ROOT / "docs" / "research" / "closing-rounds.md").read_text(encoding="utf-8")
    for row in [*found["closing_mnist"], *found["closing_cifar"]]:
        assert f"| {' | '.join(row.values())} |" in notes
    assert found["behind_tuned"] == "4.3"


def test_statements_of_the_paper_add_up_and_every_study_has_its_command(make_report):
    found = make_report.numbers()
    counts = [sum(int(row[name]) for row in found["statements"] if row[name] != "–") for name in ("holds", "not")]
    assert re.search(rf"\b{counts[0]} hold\b.*\b{counts[1]} do not hold", found["paper"])
    commands = {row["selffl paper run …"].split()[0] for row in found["commands"]}
    assert {row["study"] for row in found["statements"]} | {"attacks", "auto-mnist"} <= commands
    assert {row["on"] for row in found["commands"]} == {row[""] for row in found["machines"]}


def test_every_number_that_the_report_asks_for_is_there_and_used(make_report):
    source = make_report.SOURCE.read_text(encoding="utf-8")
    assert set(re.findall(r"numbers\.(\w+)", source)) - {"json"} == make_report.numbers().keys()


def test_the_report_can_be_built(make_report):
    made = make_report.report()
    assert made.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", made)) == 8
