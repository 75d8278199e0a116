"""What the documentation says is true: its code runs, its names exist, its addresses and numbers can be found."""

import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
from rich.console import Console

import selffl
from selffl import cli
from selffl.studies import STUDIES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<why><!-- not run: [^\n]+ -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S)
PROGRAMS = {"selffl", "make", "pip", "python", "python3", "flwr"}


def name_of(page):
    return page.relative_to(ROOT).as_posix().removeprefix("docs/").removesuffix(".md")


def blocks_of(page):
    """The blocks of a page that are run, in their order: language and code."""
    found = FENCE.finditer(page.read_text(encoding="utf-8"))
    return [
        (block["language"], block["code"])
        for block in found
        if block["language"] in ("python", "sh") and not block["why"]
    ]


def commands_of(code):
    """The commands of a shell block, as words; comments are left out."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


LONG = ("index", "howto/report", "howto/scale", "howto/studies")  # that train several methods
RUN = [
    pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] if name_of(page) in LONG else [])
    for page in PAGES
    if blocks_of(page)
]


@pytest.fixture
def selffl_command(monkeypatch):
    """A function that runs the command line here."""
    monkeypatch.setattr(cli.console, "out", Console(width=120))
    monkeypatch.setattr(cli.console, "err", Console(width=120, stderr=True))
    handler = signal.getsignal(signal.SIGTERM)

    def call(words):
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert stopped.value.code == 0, shlex.join(words)

    yield call
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run_as_they_stand_in_one_folder(page, tmp_path, monkeypatch, selffl_command):
    monkeypatch.chdir(tmp_path)
    for number, (language, code) in enumerate(blocks_of(page)):
        if "selffl.flower" in code:
            pytest.importorskip("flwr", reason="flwr is not installed: pip install 'selffl[flower]'")
        if language == "python":  # each with names of its own: a reader may copy any of them
            exec(compile(code, f"{name_of(page)}, block {number}", "exec"), {"__name__": "documentation"})
        else:
            for words in commands_of(code):
                selffl_command(words)


@pytest.mark.parametrize("page", [pytest.param(page, id=name_of(page)) for page in PAGES if page.name != "README.md"])
def test_commands_are_marked_as_such_and_left_out_only_for_a_reason(page):
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- not run") == len([block for block in FENCE.finditer(text) if block["why"]])
    for block in FENCE.finditer(text):
        if block["language"] == "":
            assert not {line.split()[0] for line in block["code"].splitlines() if line.strip()} & PROGRAMS, block[
                "code"
            ]
        elif block["language"] == "sh" and not block["why"]:
            assert {words[0] for words in commands_of(block["code"])} == {"selffl"}, block["code"]


def test_few_blocks_are_left_out():
    left_out = [block for page in PAGES for block in FENCE.finditer(page.read_text(encoding="utf-8")) if block["why"]]
    assert len(left_out) <= 8


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
    missing = [name for name in selffl.__all__ if not re.search(rf"\bselffl\.{name}\b", page)]
    assert not missing


def test_every_method_has_its_class_on_the_api_page():
    from selffl.algorithms import ALGORITHMS

    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    kinds = {type(make()).__name__ for make in ALGORITHMS.values()}
    assert not [name for name in kinds if not re.search(rf"^::: selffl\.algorithms\.{name}$", page, re.M)]


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
    assert [f"D{number}" for number in range(1, 18)] == re.findall(r"^\| (D\d+) \|", page, re.M)


def test_the_numbers_of_self_fl_auto_are_those_of_the_code():
    from selffl.algorithms import self_fl_auto

    page = (ROOT / "docs" / "methods" / "self-fl.md").read_text(encoding="utf-8")
    stated = {name: float(value) for name, value in re.findall(r"^\| `([A-Z_]+)` \| ([\d.]+) \|", page, re.M)}
    assert stated == {name: getattr(self_fl_auto, name) for name in stated}
    assert len(stated) == 7


def test_readme_lists_every_method_and_study():
    from selffl.algorithms import ALGORITHMS
    from selffl.studies import STUDIES

    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in [*ALGORITHMS, *STUDIES] if f"`{name}`" not in page] == []


def test_the_figures_quoted_are_those_of_the_results():
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "howto" / "choose.md").read_text(encoding="utf-8")
    sections = {
        name: "".join(re.findall(rf"^## (?:{title}).*?(?=^## |\Z)", results, re.M | re.S))
        for name, title in (
            ("MNIST", "MNIST over a thousand clients|Nothing tuned, rivals tuned: MNIST"),
            ("letters", "Letters over two hundred clients|Nothing tuned, rivals tuned: OCR letters"),
            ("CIFAR-10", "CIFAR-10 over twenty clients|Nothing tuned, rivals tuned: CIFAR-10"),
        )
    }
    seen = 0
    for table in re.findall(r"^\|.*?\n\n", page, re.M | re.S):
        header, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()]
        for cells in lines:
            method = re.sub(r", (λ = 1|one model|no federation|nothing chosen)$", "", cells[0].replace("`", ""))
            method = method.replace(" on validation rows", "").replace(", steps chosen likewise", "")
            method = method.replace("smoothing=1", "no smoothing")
            for title, cell in zip(header, cells, strict=True):
                if "±" in cell:
                    section = next(text for name, text in sections.items() if name in title)
                    row = next(line for line in section.splitlines() if line.startswith(f"| {method} |"))
                    assert cell in row, (title, method, cell)
                    seen += 1
    assert seen > 30


def test_the_results_are_read_as_the_studies_say():
    """A page that is brought up to date keeps the words of sections whose records are elsewhere."""
    sections = dict(re.findall(r"^## [^\n]+\n\n`([^`]+)`: (.*?)(?=^## |\Z)", text_of("results.md"), re.M | re.S))
    assert sections.keys() == STUDIES.keys()
    for name, study in STUDIES.items():
        found = re.findall(r"^\*\*Reading\.\*\* (.*)$", sections[name], re.M)
        assert found == ([study.reading] if study.reading else []), name


def test_the_first_page_counts_statements_as_the_results_do():
    found = re.search(r"Of (\d+) statements put to the test: .*?(\d+) do not hold", text_of("results.md"))
    assert f"of {found[1]} statements put to the test, {found[2]} do not hold" in text_of("index.md")


def text_of(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")
