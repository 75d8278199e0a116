"""What the site takes from the code when it is built: every method, every option, every command, notebooks that run."""

import importlib.util
import re
from dataclasses import fields
from pathlib import Path

import pytest

from selffl.algorithms import ALGORITHMS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))

pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'selffl[docs]'")


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sections():
    """The section of each method, by its name."""
    found = {}
    for page in (DOCS / "methods").glob("*.md"):
        for part in re.split(r"^(?=## )", page.read_text(encoding="utf-8"), flags=re.M):
            if name := re.match(r"## `([\w-]+)`\n", part):
                found[name[1]] = part
    return found


def test_every_method_has_one_section_and_no_section_lacks_its_method(sections):
    assert sorted(sections) == sorted(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_option_is_named_with_its_default_and_meaning(hooks, sections, name):
    assert f"{{{{ options {name} }}}}" in sections[name]
    rows = [line.split("|")[1:-1] for line in hooks.options_table(name).splitlines()[2:]]
    assert [cells[0].strip(" `") for cells in rows] == [field.name for field in fields(ALGORITHMS[name]())]
    assert all(len(cells[2].strip()) > 5 for cells in rows)


def test_the_defaults_are_those_of_the_name(hooks):
    assert '| `weighting` | <code>"equal"</code> |' in hooks.options_table("ditto-equal")
    assert '| `weighting` | <code>"examples"</code> |' in hooks.options_table("ditto")


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if not name.endswith("-equal")])
def test_a_method_says_its_equation_its_file_and_its_test(sections, name):
    assert "```math" in sections[name]
    assert "- Personalises: " in sections[name]
    for path in re.findall(r"\(\.\./source/(\S+)\.md\)", sections[name]):
        assert (ROOT / f"{path}.py").is_file(), path
    kind = type(ALGORITHMS[name]())
    assert f"(../source/src/{kind.__module__.replace('.', '/')}.md)" in sections[name]


def test_the_costs_are_those_of_the_exam(hooks):
    """Steps by hand: twenty of FedAvg, two models of DITTO, five inner steps of pFedMe, and so on."""
    found = {name: (gradients, down, up, kept) for name, gradients, down, up, kept in hooks.costs()}
    assert list(found) == list(ALGORITHMS)
    expected = {"fedavg": 20, "fedprox": 20, "ditto": 40, "pfedme": 100, "perfedavg": 40, "apfl": 40, "fedrep": 40}
    assert {name: found[name][0] for name in expected} == expected
    assert found["fedavg"][1:] == ((4, 0), (4, 4), (0, 0))  # float32 there and back, with a number of rows
    assert found["self-fl-augmented"][2][0] == 8  # two models are sent


def test_every_command_is_on_the_page_with_its_options(hooks):
    page = hooks.command_reference()
    names = [name for name, _ in hooks.commands()]
    assert {"selffl run", "selffl compare", "selffl report", "selffl posterior", "selffl paper run"} <= set(names)
    for name, command in hooks.commands():
        section = re.search(rf"^## {name}\n.*?(?=^## |\Z)", page, re.M | re.S)[0]
        assert f"For example: <code>selffl {name.split()[1]}" in section, name
        for param in command.params:
            for word in param.opts if param.param_type_name == "option" else ():
                assert word in section or param.name == "help", (name, word)


def test_equations_become_mathml(hooks):
    pytest.importorskip("latex2mathml", reason="latex2mathml is not installed: pip install 'selffl[docs]'")
    made = hooks.on_page_markdown("before\n\n```math\n\\frac{a}{b}\n\nc = d\n```\n\nafter")
    assert made.count("<math") == 2
    assert "<mfrac>" in made
    assert "\n\n" not in made[made.index('<div class="formula"') : made.index("after") - 2]


def test_every_equation_can_be_drawn(hooks):
    pytest.importorskip("latex2mathml", reason="latex2mathml is not installed: pip install 'selffl[docs]'")
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        made = hooks.equations(text)
        assert made.count('class="formula"') == text.count("```math\n")
        # What LaTeX does not know stays in the text as it was written.
        assert not re.search(r"<m[ion]>\\", made), page


def test_there_are_two_notebooks_without_outputs():
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install 'selffl[docs]'")
    assert len(NOTEBOOKS) == 2
    for path in NOTEBOOKS:
        for cell in nbformat.read(path, as_version=4).cells:
            assert not cell.get("outputs"), path
            assert not cell.get("execution_count"), path


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_becomes_a_page_with_its_picture(hooks, path, monkeypatch):
    pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'selffl[docs]'")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install 'selffl[docs]'")
    page = hooks.notebook_page(path, path.read_text(encoding="utf-8"))
    assert page.startswith("# ")
    assert page.count('<img class="notebook" alt="') == 1
    assert "```text\n" in page
