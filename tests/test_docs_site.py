"""What the site takes from the code: every method, every option, every command, notebooks that run;
and what a browser makes of it."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import fields
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from selffl.algorithms import ALGORITHMS
from selffl.errors import DataError
from selffl.reports.results import OPENING
from selffl.runs.recipe import SETTINGS, STUDY_SETTINGS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
BUILD_SECONDS = 300  # that a site may take; it takes half a minute
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
    """The section of each method, by its name; or its page, where it has one of its own."""
    found, pages = {}, {}
    for page in (DOCS / "methods").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        if name := re.match(r"# `([\w-]+)`\n", text):
            pages[name[1]] = text
        for part in re.split(r"^(?=## )", text, flags=re.M):
            if name := re.match(r"## `([\w-]+)`\n", part):
                found[name[1]] = part
    assert pages.keys() <= found.keys()  # the other page says that there is one
    return found | pages


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


def test_every_setting_is_named_with_its_default_and_meaning(hooks):
    assert "{{ settings }}" in (DOCS / "api" / "settings.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in hooks.settings_table().splitlines()[2:]]
    assert [cells[0].strip(" `") for cells in rows] == list(SETTINGS)
    assert [cells[0].strip(" `") for cells in rows if cells[2].strip() == "yes"] == list(STUDY_SETTINGS)
    assert all(len(cells[4].strip()) > 10 for cells in rows)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if not name.endswith("-equal")])
def test_a_method_says_its_equation_its_file_and_its_test(sections, name):
    assert "```math" in sections[name]
    assert "- Personalises: " in sections[name]
    for path in re.findall(r"\(\.\./source/(\S+)\.md\)", sections[name]):
        assert (ROOT / f"{path}.py").is_file(), path
    kind = type(ALGORITHMS[name]())
    assert f"(../source/src/{kind.__module__.replace('.', '/')}.md)" in sections[name]


def test_the_first_use_of_a_word_is_linked_to_the_glossary(hooks):
    text = "# Clients\n\nA `client` of a [client](x.md) is a *client*. All have personal models, and σ₀².\n\n| round |"
    assert hooks.link_terms(text, "howto/x.md") == (
        "# Clients\n\nA `client` of a [client](x.md) is a *[client](../glossary.md#client)*. All have "
        "[personal models](../glossary.md#personal-model), and [σ₀²](../glossary.md#inter-variance).\n\n| round |"
    )


def test_every_word_of_the_glossary_is_used(hooks):
    pages = [page for page in DOCS.rglob("*.md") if page.relative_to(DOCS).as_posix().startswith(hooks.EXPLAINED)]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    used = {hooks.glossary()[1][match.lastindex - 1] for match in hooks.glossary()[0].finditer(text)}
    assert used == set(hooks.glossary()[1])


@pytest.mark.slow
def test_the_costs_are_those_of_the_exam(hooks):
    """Steps by hand: twenty of FedAvg, two models of DITTO, five inner steps of pFedMe, and so on."""
    found = {name: (gradients, down, up, kept) for name, gradients, down, up, kept in hooks.costs(is_whole=False)}
    assert list(found) == list(ALGORITHMS)
    expected = {
        "fedavg": 20,
        "fedprox": 20,
        "ditto": 40,
        "pfedme": 100,
        "perfedavg": 40,
        "apfl": 40,
        "fedrep": 40,
        "fedbabu": 20,
        "feddbe": 20,
        "feddpa": 40,
        "fedala": 20,
        "fedrod": 20,
        "pfedbayes": 100,
        "fedpac": 40,
    }
    assert {name: found[name][0] for name in expected} == expected
    assert found["fedavg"][1:] == ((4, 0), (4, 4), (0, 0))  # float32 there and back, with a number of rows
    assert found["self-fl-augmented"][2][0] == 8  # two models are sent


def test_the_counts_are_those_of_the_readme(hooks):
    """The README lists every method with what it personalises."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    table = page[page.index("## Methods") : page.index("## Where to go next")]
    personal = dict(re.findall(r"^\| (`.*?`) \| (.*?) \|", table, re.M))
    names = {name: what for cell, what in personal.items() for name in re.findall(r"`([\w-]+)`", cell)}
    found = hooks.counts()
    assert found["names"] == len(names)
    assert found["methods"] == len({re.sub("-(equal|exact)$", "", name) for name in names})
    assert found["personalised"] == sum(not what.startswith(("nothing", "everything")) for what in names.values())


def test_the_page_on_tuning_has_every_method_with_its_grid(hooks):
    assert "{{ grids }}" in (DOCS / "howto" / "tune.md").read_text(encoding="utf-8")
    lines = hooks.on_page_markdown("{{ grids }}").splitlines()[2:]
    assert [line.split("`")[1] for line in lines] == list(ALGORITHMS)
    assert "| `ditto` | `penalty` | 0.03, 0.1, 0.3, 1, 3 |" in lines
    assert "| `self-fl-auto` | nothing to tune | |" in lines


def test_the_comparison_with_other_libraries_counts_when_it_is_built(hooks):
    page = (DOCS / "comparison.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| methods \| (.*?) \|", page, re.M)
    assert row == "{{ count names }} names of {{ count methods }} methods"
    assert hooks.on_page_markdown(row) == f"{len(ALGORITHMS)} names of {hooks.counts()['methods']} methods"


def test_statements_are_counted_as_the_results_page_counts_them(hooks):
    page, kinds = (DOCS / "results.md").read_text(encoding="utf-8"), ("paper", "own", "target")
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "results").glob("*.md"))
    titles = ("Statements of the paper", "Statements of our own", "Targets for our own method")
    for title, kind in zip(titles, kinds, strict=True):
        assert f"{title}: {hooks.statements_line(kind)}." in page
    lines = re.findall(r"^- \*\*.+?\*\* \*[^*]+\.\*", pages, re.M)
    assert len(lines) == sum(hooks.statements()[kind].total() for kind in kinds)


def write_results(folder, **studies):
    """The opening page, and one page a study."""
    (folder / "docs" / "results").mkdir(parents=True)
    (folder / "docs" / "results.md").write_text(f"{OPENING}.\n", encoding="utf-8")
    for name, page in studies.items():
        (folder / "docs" / "results" / f"{name}.md").write_text(f"# {name.upper()}\n\n{page}", encoding="utf-8")


def test_statements_of_the_paper_are_told_from_those_of_the_library(hooks, tmp_path, monkeypatch):
    write_results(
        tmp_path,
        a="`a`: figure 1. Words.\n\n- **One.** *Holds.* Why.\n- **Two.** *Does not hold.* Why.\n"
        "- **Not in the paper: three.** *Inconclusive.* Why.\n",
        b="`b`: beyond the paper. Words.\n\n- **Four.** *Holds in part.* Why.\n",
        c="`c`: not in the paper. Words.\n\n- **Five.** *Holds.* Why.\n- **Six.** *Holds.* Why.\n"
        "- **Target: seven.** *Not met.* Why.\n- **Target: eight.** *Met.* Why.\n",
    )
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    assert hooks.statements_line("paper") == "of 2, 1 holds, 1 does not hold"
    assert hooks.statements_line("own") == "of 4, 2 hold, 1 holds in part, 1 is inconclusive"
    assert hooks.statements_line("target") == "of 2, 1 is met, 1 is not met"


def test_a_verdict_that_is_not_known_stops_the_page(hooks, tmp_path, monkeypatch):
    write_results(tmp_path, a="`a`: figure 1. W.\n\n- **One.** *Perhaps.* Why.\n")
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    with pytest.raises(DataError, match="'Perhaps'; expected one of holds"):
        hooks.statements()


def test_the_benchmarks_have_the_numbers_of_the_readme(hooks):
    """Which another test compares with the results page."""
    readme = re.search(r"^\| data \(clients\).*?\n\n", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)[0]
    expected = [[cell.strip() for cell in line.split("|")[1:-1]] for line in readme.strip().splitlines()[2:]]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in hooks.benchmark_table("data").splitlines()]
    rows = [dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]]
    assert len(rows) == len(expected)
    for row, (data, own, best, difference) in zip(rows, expected, strict=True):
        assert re.match(r"\[(.+)\]\(results/auto-\w+\.md\)", row["data (clients)"])[1] == data
        assert (row["`self-fl-auto`"].split(" ± ")[0], row["best baseline"].split(" ± ")[0]) == (
            own,
            best.split(",")[0],
        )
        assert row["difference"] == difference.split(",")[0]
        assert row["command"].startswith("`selffl paper run auto-")


def test_the_picture_of_the_benchmarks_has_a_mark_for_every_difference(hooks):
    from selffl.studies.regimes import REGIMES

    module = hooks.benchmarks()
    gaps = [gap for study in module.REGIMES if study in module.sections() for gap in module.regime_gaps(study)]
    assert module.REGIMES.keys() == {study.id for study in REGIMES}
    drawing = module.picture().decode()
    assert len(re.findall(r'id="LineCollection_\d+"', drawing)) == len(gaps) + len(module.DATA)
    for name in (*module.DATA.values(), *("digits, 20 regimes", "letters, 20 regimes", "MNIST, 20 regimes")):
        assert name.split(",")[0] in drawing
    kept = (ROOT / "docs" / module.PICTURE).read_text(encoding="utf-8")
    assert kept == drawing, "the results have changed since: python docs/benchmarks.py"


def test_the_spreads_of_the_tutorial_are_a_table_of_every_method(hooks):
    header, _, *lines = hooks.spreads_table().splitlines()
    assert re.findall(r"`([\w-]+)`", header) == ["self-fl-auto", "ditto", "fedavg", "local"]
    assert [line.split("|")[1].strip() for line in lines] == ["0.05", "0.05", "0.6", "0.6", "2.0", "2.0"]
    assert all(line.count(" ± ") == 4 for line in lines)


def test_the_losses_to_attacks_are_those_of_the_study(hooks):
    from selffl.reports.results import read_results
    from selffl.studies.attacks import DEFENCES

    page = (DOCS / "howto" / "hostile.md").read_text(encoding="utf-8")
    assert "{{ attacks losses }}" in page
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in hooks.attacks_table("losses").splitlines()]
    titles, _, *rows = lines
    assert titles[1:] == [
        words for method, (robust, *_) in DEFENCES.items() for words in (f"`{method}`", f"with `{robust}`")
    ]
    study = read_results(DOCS / "results.md")["attacks"]
    whole = {tuple(row[key] for key in ("method", "attack", "hostile", "defence")): row for row in study.table}
    seen = 0
    for words, *cells in rows:
        (attack,) = [name for name, said in hooks.ATTACKS.items() if said == words]
        columns = [(method, robust) for method, defences in DEFENCES.items() for robust in ("none", defences[0])]
        for (method, robust), cell in zip(columns, cells, strict=True):
            row = whole.get((method, attack, "0%" if attack == "none" else "20%", robust))
            assert cell == ("–" if row is None else row["personal models, lost"].replace("-", "−")), (
                words,
                method,
                robust,
            )
            seen += row is not None
    assert seen == 2 * (7 + 7 + 8 + 9)  # nobody, and the attacks that a method can be hit by
    for part, method in zip(hooks.attacks_table("worst").split("; "), DEFENCES, strict=True):
        lost = [float(row["personal models, lost"].split(" ± ")[0].replace("−", "-")) for key, row in whole.items()
                if key[0] == method and key[2:] == ("20%", DEFENCES[method][0])]  # fmt: skip
        assert part.startswith(f"`{method}` with `{DEFENCES[method][0]}` {max(lost):.1f}")


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


def test_the_two_pages_on_commands_have_all_of_them(hooks):
    parts = [hooks.on_page_markdown(f"{{{{ commands {which} }}}}") for which in ("alone", "grouped")]
    found = [re.findall(r"^## (selffl .+)$", part, re.M) for part in parts]
    assert sorted(found[0] + found[1]) == sorted(name for name, _ in hooks.commands())
    assert all(len(name.split()) == 2 for name in found[0])


def test_a_verdict_has_its_word_and_its_colour(hooks):
    assert hooks.colour_verdicts("- **A.** *Not met.* 1\n- **B.** *Holds in part.* *x.*") == (
        '- **A.** <span class="verdict bad">Not met</span> 1\n'
        '- **B.** <span class="verdict open">Holds in part</span> *x.*'
    )


def test_the_page_on_security_is_that_of_the_repository(hooks):
    page = hooks.on_page_markdown("{{ security }}")
    assert page.startswith("# Security\n")
    for name in re.findall(r"\]\(([\w-]+\.md)\)", page):
        assert (DOCS / name).is_file()
    assert "docs/" not in page


def test_the_sentence_of_the_landing_page_names_every_data_set_once(hooks):
    said, module = hooks.benchmark_table("headline"), hooks.benchmarks()
    for study, data in module.DATA.items():
        name, verdict = data.split(" (")[0], module.headline(study)[2].replace("not tested", "not yet decided")
        assert len(re.findall(rf"(^|; ){verdict}[^;]*\b{name}\b", said)) == 1, (name, verdict, said)
        assert said.count(name) == 1


def test_diagrams_have_words_for_those_who_do_not_see_them(hooks):
    for name in ("parts", "round"):
        drawing = hooks.on_page_markdown(f"{{{{ diagram {name} }}}}")
        assert re.search(r'<svg [^>]*role="img" aria-label="[^"]{60,}"', drawing)
        assert "\n" not in drawing  # one element of HTML for Markdown


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


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The whole site, built as `make docs` does, notebooks run; a warning is an error.

    ``SELFFL_SITE`` names one that is being built, so that it is not built twice: a file ``built`` in it says when.
    """
    if being_built := os.environ.get("SELFFL_SITE"):
        ends = time.monotonic() + BUILD_SECONDS
        while not (Path(being_built) / "built").exists():
            assert time.monotonic() < ends, f"{being_built} was not built within {BUILD_SECONDS} seconds"
            time.sleep(0.5)
        return Path(being_built)
    for package in ("mkdocstrings", "latex2mathml", "nbclient", "ipykernel"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'selffl[dev,docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_run_and_become_a_page_with_its_picture(site, path):
    page = (site / "notebooks" / path.stem / "index.html").read_text(encoding="utf-8")
    assert re.search(r'<img[^>]* alt="[^"]{20,}"[^>]* src="data:image/png;base64,', page)
    said = {"who-gains": r"\d+ of 16 clinics are better off", "posterior-by-hand": r"difference of means +\d\S*e-1\d"}
    assert re.search(said[path.stem], page)
    assert (site / "notebooks" / path.name).is_file()  # to take away


@pytest.mark.slow
def test_nothing_is_left_to_fill_in(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert "{{ " not in text or "/source/" in page.as_posix(), page


@pytest.fixture(scope="module")
def browser():
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install 'selffl[dev]'")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    with driver.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(site):
    """Where the site is served, on this machine alone."""
    handler = partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def window(browser, address):
    """A function that gives a page of such colours and width, where one follows another: that halves what each takes.

    And what went wrong on it, or went out to the world.
    """

    @cache
    def call(scheme, width):
        page, wrong = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900}), []
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda sent: None if sent.url.startswith((address, "data:")) else wrong.append(sent.url))
        return page, wrong

    return call


@pytest.fixture
def opened(window, address):
    """A function that opens a page, and what went wrong on it or went out to the world."""

    def call(path, scheme="light", width=1280):
        page, wrong = window(scheme, width)
        page.set_viewport_size({"width": width, "height": 900})
        wrong.clear()
        page.goto(address + path)
        page.wait_for_load_state("networkidle")
        return page, wrong

    return call


LOOKED_AT = (
    *(
        "",
        "tutorial/",
        "idea/",
        "howto/choose/",
        "methods/self-fl/",
        "methods/self-fl-auto/",
        "results/",
        "architecture/",
        "reliability/",
    ),
    *("api/", "api/train/", "api/methods/"),
)
DARK = ("", "idea/", "results/", "architecture/", "api/train/")  # of each kind one
COLOUR_RULES = ["color-contrast", "link-in-text-block"]
PHONE = 390  # pixels


def serious_faults(page, **options):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed: 'selffl[dev]'")
    found = axe.Axe().run(page, options={"resultTypes": ["violations"], **options}).response["violations"]
    return [(fault["id"], fault["nodes"][0]["html"]) for fault in found if fault["impact"] in ("serious", "critical")]


@pytest.mark.slow
@pytest.mark.parametrize("path", LOOKED_AT)
def test_a_page_asks_no_network_has_no_serious_fault_of_access_and_fits_a_phone(opened, path):
    page, wrong = opened(path)
    assert serious_faults(page) == []
    page.set_viewport_size({"width": PHONE, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("path", DARK)
def test_in_the_dark_a_page_asks_no_network_and_its_colours_can_be_told(opened, path):
    """Nothing but colours is another than in the light, where everything is looked at."""
    page, wrong = opened(path, "dark")
    assert page.get_attribute("body", "data-md-color-scheme") == "slate"
    assert serious_faults(page, runOnly={"type": "rule", "values": COLOUR_RULES}) == []
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("path", ["comparison/", "results/multilevel/", "cli/", "howto/hostile/"])
def test_a_wide_page_fits_a_phone(opened, path):
    page, wrong = opened(path, width=PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE
    assert wrong == []


MAX_PAGE_PIXELS = 15_000  # of height, in a window that is 1440 wide
LARGEST = 13  # pages that are looked at: those with most bytes
MANY_COLUMNS = 14  # of a table: such studies are looked at, too


@pytest.mark.slow
def test_no_page_is_too_long_and_no_table_of_a_study_is_cut(opened, address, site):
    pages = [page for page in site.rglob("index.html") if "source" not in page.relative_to(site).parts]
    largest = sorted(pages, key=lambda page: page.stat().st_size)[-LARGEST:]
    studies = [
        page
        for page in (site / "results").glob("*/index.html")
        if page.read_text(encoding="utf-8").count("<th") >= MANY_COLUMNS
    ]
    assert len(studies) >= 3
    browsed, _ = opened("", width=1440)
    for page in [*largest, *studies]:
        path = page.parent.relative_to(site).as_posix()
        browsed.goto(f"{address}{path}/")
        assert browsed.evaluate("document.documentElement.scrollHeight") <= MAX_PAGE_PIXELS, path
        if path.startswith("results"):
            cut = "e => e.scrollWidth > e.clientWidth + 1"
            assert not browsed.evaluate(f"[...document.querySelectorAll('.md-typeset__scrollwrap')].some({cut})"), path


@pytest.mark.slow
def test_the_picture_of_shrinkage_moves_and_says_so(opened):
    page, wrong = opened("idea/")
    slider, dots = page.locator("#shrinkage-spread"), page.locator(".shrinkage-picture .personal")
    assert dots.count() == 20

    def distances():  # of the dots from the shared line, and from their rings
        line = float(page.locator(".shrinkage-picture .shared").get_attribute("x1"))
        at = [float(dot.get_attribute("cx")) for dot in dots.all()]
        rings = [float(ring.get_attribute("cx")) for ring in page.locator(".shrinkage-picture .own").all()]
        gaps = [abs(ring - dot) for ring, dot in zip(rings, at, strict=True)]
        return max(abs(dot - line) for dot in at), max(gaps)

    slider.focus()
    page.keyboard.press("Home")
    from_line, from_ring = distances()
    assert from_line < 5 < from_ring
    page.keyboard.press("End")
    from_line, from_ring = distances()
    assert from_ring < 10 < from_line
    assert slider.get_attribute("aria-valuetext") == "sigma zero squared 100"
    page.wait_for_function("document.querySelector('.shrinkage-summary').textContent.includes('σ₀² = 100 ')")
    exact = from_ring
    page.get_by_label("the paper's form").check()
    assert distances()[1] > 3 * exact  # the others still pull
    page.get_by_role("button", name="Spread as estimated").click()
    assert page.locator("#shrinkage-value").text_content() == "0.96"
    assert wrong == []
