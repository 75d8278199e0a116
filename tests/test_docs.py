"""What the documentation says is true: its code runs, its names exist, its addresses can be found."""

import re
from pathlib import Path

import pytest

import selffl

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_code_blocks_run_as_they_stand(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "flower" in block:
        pytest.importorskip("flwr", reason="flwr is not installed: pip install 'selffl[flower]'")
    exec(compile(block, "documentation", "exec"), {"__name__": "documentation"})


def test_the_worked_example_prints_what_the_page_says(capsys):
    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    code, said = re.search(r"^```python\n(.*?)^```\n.*?^```\n(.*?)^```", page, re.M | re.S).groups()
    exec(compile(code, "documentation", "exec"), {"__name__": "documentation"})
    found, expected = (
        [re.split(r"[:,]? ", line) for line in text.splitlines()] for text in (capsys.readouterr().out, said)
    )
    assert [[word for word in line if not word[0].isdigit()] for line in found] == [
        [word for word in line if not word[0].isdigit()] for line in expected
    ]
    numbers = [[float(word) for line in lines for word in line if word[0].isdigit()] for lines in (found, expected)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.01)  # the last digits are a library's


def test_every_public_name_has_a_place_on_the_api_page():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    missing = [name for name in selffl.__all__ if f"selffl.{name}" not in page]
    assert not missing


def test_every_address_of_an_equation_can_be_found():
    page = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8")
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"\b(test_\w+)(?!\.py|\w)", page):
        if not list((ROOT / "tests").rglob(f"{name}.py")):
            assert f"def {name}" in tests, name
    for path, names in re.findall(r"`((?:maths|algorithms|studies|training|data)/\w+\.py): ([\w., ]+)`", page):
        for folder in (ROOT / "src" / "selffl", ROOT / "tests"):
            if (folder / path).exists():
                source = (folder / path).read_text(encoding="utf-8")
                break
        else:
            pytest.fail(f"{path} is not there")
        for name in re.split(r"[., ]+", names):
            assert re.search(rf"\b(def|class) {name}", source), (path, name)


def test_every_numbered_equation_has_a_row():
    page = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8")
    cells = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("|"))
    covered = {int(n) for n in re.findall(r"\((\d+)\)", cells)}
    for low, high in re.findall(r"\((\d+)\)–\((\d+)\)", cells):
        covered |= set(range(int(low), int(high) + 1))
    assert covered >= set(range(1, 58))


def test_every_decision_is_listed():
    page = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8")
    assert [f"D{number}" for number in range(1, 17)] == re.findall(r"^\| (D\d+) \|", page, re.M)


def test_readme_lists_every_method_and_study():
    from selffl.algorithms import ALGORITHMS
    from selffl.studies import STUDIES

    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in [*ALGORITHMS, *STUDIES] if f"`{name}`" not in page] == []
