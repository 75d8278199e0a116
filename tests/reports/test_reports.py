"""Tables, records, pages, figures, and who gains: what is shown is what was found."""

import csv
import dataclasses
import html as html_text
import json
import math
import re
import subprocess
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest

import selffl
from selffl.algorithms import ALGORITHMS
from selffl.data.estimates import EstimateTable
from selffl.errors import ConfigError, DataError
from selffl.reports import figures, forest, page, results, tables
from selffl.reports.collect import Collection
from selffl.reports.record import RECORD, environment, load_studies, save_study
from selffl.reports.shrinkage import Shrinkage, verdict
from selffl.runs.environment import _commit
from selffl.state.files import write_csv
from selffl.studies.result import RULE, Chart, Claim, Figure, Series, Study, StudyResult

# --------------------------------------------------------------------------------------------------------------- tables


def test_a_markdown_table():
    rows = [{"method": "self-fl", "error": "0.1 ± 0.01"}, {"method": "local", "error": "–"}]
    assert tables.markdown(rows) == (
        "| method | error |\n"  #
        "|---|---|\n"
        "| self-fl | 0.1 ± 0.01 |\n"
        "| local | – |\n"
    )


def test_bars_inside_a_cell_do_not_end_it():
    text = tables.markdown([{"quantity": "|θ − θ₀|", "n": "1"}])
    assert text.splitlines()[2] == r"| \|θ − θ₀\| | 1 |"


def test_bars_inside_a_column_name_do_not_end_it():
    assert tables.markdown([{"|θ|": "1"}]).splitlines()[0] == r"| \|θ\| |"


def test_cells_follow_the_columns_of_the_first_row():
    text = tables.markdown([{"a": "1", "b": "2"}, {"b": "4", "a": "3"}])
    assert text.splitlines()[2:] == ["| 1 | 2 |", "| 3 | 4 |"]


def test_a_csv_has_every_column_in_the_order_of_first_sight(tmp_path):
    rows = [{"a": 1, "b": 'two, "quoted"'}, {"a": 0.1 + 0.2, "c": "é\nline", "b": ""}]
    write_csv(tmp_path / "t.csv", rows)
    with (tmp_path / "t.csv").open(newline="", encoding="utf-8") as file:
        found = list(csv.reader(file))
    assert found == [["a", "b", "c"], ["1", 'two, "quoted"', ""], [repr(0.1 + 0.2), "", "é\nline"]]


# -------------------------------------------------------------------------------------------------------------- records

NASTY = 'less < more & "quoted" <b>bold</b> | θ₀'


def made_up(identity="made-up", paper="appendix E.1; figure 3", **changes):
    """A study and what it found, with text that needs escaping wherever text can be."""
    study = Study(identity, "Title " + NASTY, paper, "σ₀² = 1, " + NASTY, lambda *_: None)
    series = [
        Series("self-fl", [1, 2, 3], [0.3, 0.2, 0.1], [0.01, 0.02, 0.03]),
        Series("limit, paper posterior", [1, 2, 3], [0.05] * 3, is_reference=True),
    ]
    charts = [Chart("Left", "x", "y", series), Chart("Right", "x", "y", series[:1], log_y=True)]
    claims = [
        Claim("It works " + NASTY, "holds", "seen <here> & there"),
        Claim("It always works.", "does not hold", "1 of 2"),
        Claim("It is fast.", "inconclusive", "0.1 ± 0.2"),
        Claim("It is cheap.", "holds in part", "at C = 1"),
    ]
    result = StudyResult(
        rows=[{"method": "self-fl", "error": 0.25}, {"method": NASTY, "error": math.pi}],
        table=[{"method": "self-fl", "local ℓ1": "0.2500 ± 0.01"}, {"method": NASTY, "local ℓ1": "3.1416 ± 0.02"}],
        figures=[Figure("errors", "Caption " + NASTY, charts), Figure("more", "Another", charts[:1])],
        claims=claims,
        config={"seeds": [0, 1], "text": NASTY},
    )
    return study, dataclasses.replace(result, **changes)


def saved(folder, identity="made-up", *, is_quick=False, **changes):
    study, result = made_up(identity, **changes)
    command = f"selffl paper run {identity}"
    return save_study(study, result, folder / identity, command=command, is_quick=is_quick, seconds=1.26)


def test_a_record_makes_the_round_trip(tmp_path):
    record = saved(tmp_path, figures=made_up()[1].figures[1:])
    ((folder, loaded),) = load_studies(tmp_path)
    assert folder == tmp_path / "made-up"
    assert loaded == record
    study, result = made_up()
    assert (loaded.id, loaded.title, loaded.paper, loaded.setting) == (
        study.id,
        study.title,
        study.paper,
        study.setting,
    )
    assert loaded.claims == [dataclasses.asdict(claim) for claim in result.claims]
    assert loaded.table == result.table
    assert loaded.config == result.config
    assert loaded.figures == [{"name": "more", "caption": "Another"}]
    assert (loaded.seconds, loaded.is_quick, loaded.version) == (1.3, False, 1)
    assert load_studies(tmp_path / "made-up") == [(folder, loaded)]  # the folder itself does as well


def test_a_study_leaves_its_files(tmp_path):
    saved(tmp_path)
    found = sorted(path.name for path in (tmp_path / "made-up").iterdir())
    pictures = ["errors.png", "errors.svg", "figures.json", "more.png", "more.svg"]
    assert found == [*pictures, "record.json", "results.csv", "table.md"]
    with (tmp_path / "made-up" / "results.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["self-fl", NASTY]
    assert float(rows[1]["error"]) == math.pi
    assert (tmp_path / "made-up" / "table.md").read_text(encoding="utf-8") == tables.markdown(made_up()[1].table)


def test_records_are_found_one_level_down_and_no_further(tmp_path):
    for name in ("b", "a", "c"):
        saved(tmp_path, name, figures=[])
    (tmp_path / "deep" / "deeper").mkdir(parents=True)
    (tmp_path / "a" / RECORD).rename(tmp_path / "deep" / "deeper" / RECORD)
    assert [record.id for _, record in load_studies(tmp_path)] == ["b", "c"]


def test_records_come_in_the_papers_order_and_others_before(tmp_path):
    for name in ("synthetic-homogeneous", "convergence", "demo", "augmented-synthetic", "limits"):
        saved(tmp_path, name, figures=[])
    found = [(folder.name, record.id) for folder, record in load_studies(tmp_path)]
    order = ["demo", "limits", "convergence", "synthetic-homogeneous", "augmented-synthetic"]
    assert found == [(name, name) for name in order]


def test_a_record_is_written_again(tmp_path):
    saved(tmp_path, figures=[])
    saved(tmp_path, figures=[], claims=[Claim("New.", "holds", "")])
    assert [claim["text"] for claim in load_studies(tmp_path)[0][1].claims] == ["New."]


def test_git_is_asked_once_for_the_commit(monkeypatch):
    asked = []

    def answer(words, **options):
        asked.append(words[0])
        return SimpleNamespace(stdout="0abc-dirty\n")

    _commit.cache_clear()
    monkeypatch.setattr(subprocess, "run", answer)
    assert [environment()["commit"] for _ in range(2)] == ["0abc-dirty"] * 2
    assert asked == ["git"]
    monkeypatch.undo()
    _commit.cache_clear()


def test_the_environment_names_versions_and_machine():
    found = environment()
    assert found["selffl"] == selffl.__version__
    assert {"python", "torch", "numpy", "machine"} <= set(found)
    assert all(isinstance(value, str) for value in found.values())


def refusal(folder):
    with pytest.raises(DataError) as caught:
        load_studies(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_truncated_record_is_refused_wherever_it_ends(tmp_path):
    saved(tmp_path, figures=[])
    path = tmp_path / "made-up" / RECORD
    content = path.read_bytes()
    for length in [0, 1, 2, *range(10, len(content), 97), len(content) - 1]:
        path.write_bytes(content[:length])
        message = refusal(tmp_path)
        assert message.startswith(f"{path} is not a complete study record (")
        assert message.endswith("); run the study again.")


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "3",
        "null",
        '"text"',
        "{}",
        '{"version": 1}',
        '{"version": 1, "id": "x", "title": "t"}',
        '{"name": "somebody else\'s", "dependencies": {}}',
        "<html></html>",
        "\ufeff{}",
    ],
)
def test_a_foreign_record_is_refused(tmp_path, content):
    (tmp_path / RECORD).write_text(content, encoding="utf-8")
    assert refusal(tmp_path).startswith(f"{tmp_path / RECORD} is not a complete study record (")


def test_a_record_with_a_field_too_many_is_refused(tmp_path):
    saved(tmp_path, figures=[])
    path = tmp_path / "made-up" / RECORD
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"extra": 1}), encoding="utf-8")
    assert "extra" in refusal(tmp_path)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / RECORD).write_bytes(b"\x89PNG\xff\xfe")
    assert "is not a complete study record" in refusal(tmp_path)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_refused(tmp_path, version):
    saved(tmp_path, figures=[])
    path = tmp_path / "made-up" / RECORD
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"version": version}), encoding="utf-8")
    assert refusal(tmp_path) == f"{path} has version {version}; expected 1. Run the study again."


def test_one_bad_record_among_good_ones_is_not_passed_over(tmp_path):
    saved(tmp_path, "good", figures=[])
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / RECORD).write_text("{", encoding="utf-8")
    assert str(tmp_path / "bad" / RECORD) in refusal(tmp_path)


def test_a_folder_without_records_is_refused(tmp_path):
    (tmp_path / (RECORD + ".part")).write_text("{}", encoding="utf-8")  # an interrupted run
    assert refusal(tmp_path).startswith(f"{tmp_path} holds no record.json; expected what `selffl paper run")


def test_what_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    for name in ("file", "nowhere"):
        assert refusal(tmp_path / name).startswith(f"{tmp_path / name} is not a folder; expected one that `selffl")


# ------------------------------------------------------------------------------------------------------------ HTML page

VOID = {"meta", "br", "hr", "img", "input", "link", "source"}


def parsed(text):
    """Every start tag with its attributes, all text, and proof that tags close in order."""
    tags, words, stack = [], [], []
    parser = HTMLParser(convert_charrefs=True)

    def start(tag, attributes):
        tags.append((tag, dict(attributes)))
        if tag not in VOID:
            stack.append(tag)

    def end(tag):
        assert stack, f"</{tag}> closes nothing"
        assert stack.pop() == tag

    parser.handle_starttag, parser.handle_endtag = start, end
    parser.handle_startendtag = lambda tag, attributes: tags.append((tag, dict(attributes)))
    parser.handle_data = words.append
    parser.feed(text)
    parser.close()
    assert stack == []
    return tags, words


@pytest.fixture(scope="module")
def two_studies(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    saved(folder, "first")
    saved(folder, "second", is_quick=True, claims=[Claim("Second thing.", "holds", "evidence two")])
    return load_studies(folder)


@pytest.fixture(scope="module")
def page_text(two_studies):
    return page.render(Collection([], two_studies), "A page " + NASTY)


def test_the_page_is_well_formed(page_text):
    tags, words = parsed(page_text)
    assert page_text.startswith("<!DOCTYPE html>")
    assert tags[0] == ("html", {"lang": "en"})
    assert ("meta", {"charset": "utf-8"}) in tags
    assert [tag for tag, _ in tags].count("h1") == 1
    assert "A page " + NASTY in words
    assert "b" not in {tag for tag, _ in tags}  # <b> was text and stayed text


def test_the_page_loads_nothing_from_anywhere(page_text):
    tags, _ = parsed(page_text)
    assert all("src" not in attributes for tag, attributes in tags if tag == "script")  # they are written out
    assert not {tag for tag, _ in tags} & {"link", "img", "iframe", "object", "embed", "base", "image"}
    for tag, attributes in tags:
        for name, value in attributes.items():
            if name in ("src", "srcset", "href", "xlink:href", "data", "action", "poster", "background"):
                assert value.startswith("#"), (tag, name, value)
            if name == "style" or "url(" in (value or ""):
                assert re.findall(r"url\(\s*['\"]?(?!#)", value) == [], (tag, name, value)
    assert "@import" not in page_text
    assert re.findall(r"url\(\s*['\"]?(?!#)", page_text) == []


def test_every_id_is_there_once_and_every_reference_finds_one(page_text):
    tags, _ = parsed(page_text)
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids)) > 50
    wanted = [value[1:] for _, a in tags for name, value in a.items() if name.endswith("href")]
    wanted += [a[name] for _, a in tags for name in ("aria-labelledby", "aria-describedby") if name in a]
    wanted += re.findall(r"url\(#([^)]+)\)", page_text)
    assert len(wanted) > 20
    assert set(wanted) <= set(ids)


def test_all_claims_verdicts_and_cells_are_on_the_page(page_text, two_studies):
    _, words = parsed(page_text)
    text = "".join(words)
    for _, record in two_studies:
        for claim in record.claims:
            assert claim["text"] in text
            assert claim["evidence"] in text
            assert f"{claim['verdict'].capitalize()}." in text
        for row in record.table:
            for name, value in row.items():
                assert name in words
                assert value in words
        for figure in record.figures:
            assert figure["caption"] in words
        assert record.title in words
        assert record.setting[1:] in text
        assert record.command in words
        assert json.dumps(record.config, indent=1, ensure_ascii=False) in words


def test_what_needs_escaping_is_escaped(page_text):
    assert "<b>bold</b>" not in page_text
    assert "&lt;b&gt;bold&lt;/b&gt;" in page_text


def test_figures_are_inside_with_a_description_and_the_readers_ink(page_text, two_studies):
    tags, _ = parsed(page_text)
    pictures = [attributes for tag, attributes in tags if tag == "svg"]
    captions = [figure["caption"] for _, record in two_studies for figure in record.figures]
    assert [attributes["aria-label"] for attributes in pictures] == captions
    assert all(attributes["role"] == "img" for attributes in pictures)
    assert figures.INK.lower() not in page_text[page_text.index("<svg") :].lower()
    assert "currentColor" in page_text


def test_a_quick_run_is_marked_and_a_full_one_is_not(page_text):
    second = page_text.index('<section id="second"')
    assert "Quick run" not in page_text[:second]
    assert "Quick run: fewer repeats or rounds than stated." in page_text[second:]


@pytest.mark.parametrize(
    ("verdicts", "text"),
    [
        ([], "No claims were put to the test here."),
        (["holds"] * 2, "Statements of the paper: of 2, 2 hold."),
        (
            ["holds", "does not hold", "holds", "inconclusive", "does not hold"]
            + 3 * ["holds in part", "inconclusive"],
            "Statements of the paper: of 11, 2 hold, 3 hold in part, 4 are inconclusive, 2 do not hold.",
        ),
    ],
)
def test_the_lead_counts_the_verdicts(tmp_path, verdicts, text):
    saved(tmp_path, claims=[Claim("c", verdict, "e") for verdict in verdicts], figures=[])
    studies = load_studies(tmp_path)
    assert page.lead(studies) == text
    assert text in page.render(Collection([], studies), "t")


def write_pages(pages, summary):
    """What `selffl paper page` writes, at the places where it does."""
    results.folder_of(summary).mkdir(exist_ok=True)
    for name, text in pages.studies.items():
        (results.folder_of(summary) / f"{name}.md").write_text(f"{text}\n", encoding="utf-8")
    summary.write_text(pages.summary, encoding="utf-8")
    return summary


def test_records_of_earlier_versions_say_it_in_their_word(tmp_path):
    """They called an inconclusive statement "not decided"."""
    saved(tmp_path, claims=[Claim("c", "inconclusive", "e")], figures=[])
    path = tmp_path / "made-up" / "record.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"inconclusive"', '"not decided"'), encoding="utf-8")
    studies = load_studies(tmp_path)
    assert [claim["verdict"] for claim in studies[0][1].claims] == ["inconclusive"]


def test_two_records_of_one_study_have_ids_of_their_own(tmp_path):
    saved(tmp_path / "one", figures=[])
    saved(tmp_path / "two", figures=[])
    text = page.render(Collection([], [*load_studies(tmp_path / "one"), *load_studies(tmp_path / "two")]), "t")
    ids = [attributes["id"] for _, attributes in parsed(text)[0] if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_place_in_the_paper_keeps_its_capitals(page_text):
    assert "Appendix E.1; figure 3." in html_text.unescape(page_text)


def test_a_record_whose_picture_is_gone_is_refused(tmp_path):
    saved(tmp_path, figures=made_up()[1].figures[1:])
    (tmp_path / "made-up" / "more.svg").unlink()
    with pytest.raises(DataError):
        page.render(Collection([], load_studies(tmp_path)), "t")


def test_the_results_pages_hold_every_verdict_table_and_figure(two_studies):
    pages = results.results_pages(two_studies, "pictures")
    assert pages.summary.startswith("# Results\n")
    assert page.lead(two_studies) in pages.summary
    for _, record in two_studies:
        text = pages.studies[record.id]
        assert text.startswith(f"# {record.title}\n")
        assert f"`{record.command}` in 1 s" in text
        assert record.setting[1:] in text
        assert tables.markdown(record.table).rstrip() in text
        for claim in record.claims:
            line = f"- **{claim['text']}** *{claim['verdict'].capitalize()}.* {claim['evidence']}"
            assert line in text.splitlines()
        for figure in record.figures:
            assert f"]({'pictures'}/{record.id}-{figure['name']}.svg)" in text
        assert selffl.__version__ in text
    assert "".join(pages.studies.values()).count("Quick run") == 1


def test_the_summary_shows_the_first_statement_of_each_study_with_its_verdict_and_number(tmp_path):
    claims = {
        "auto-digits": [
            Claim("Target: accuracy above all.", "holds", "Read so if above 1. It is +0.30 ± 0.10 points. And more."),
            Claim("Target: two.", "does not hold", "e"),
        ],
        "mnist": [Claim("self-fl is better.", "inconclusive", "9 of 10 checks. Not: one."), Claim("B.", "holds", "e")],
        "sums": [Claim("Not in the paper: three.", "holds in part", "none, " * 60)],
    }
    papers = {"auto-digits": "not in the paper", "mnist": "figure 1", "sums": "beyond the paper"}
    for name, made in claims.items():
        test = {"decided_by": "By a test."} if name == "mnist" else {}
        saved(tmp_path / name, name, title=f"About {name}", paper=papers[name], claims=made, figures=[], **test)
    studies = [entry for name in claims for entry in load_studies(tmp_path / name)]
    text = results.results_pages(studies, "pictures", tmp_path / "found.md").summary
    lines = [line for line in text.splitlines() if line.startswith(("## ", "| ["))]
    assert lines[:5] == [
        "## Our own method, against tuned baselines",
        "| [About auto-digits](found/auto-digits.md) | Accuracy above all. | *Met.* † | It is +0.30 ± 0.10 points "
        "| of 2, 1 is met, 1 is not met |",
        "## Statements of the paper",
        "| [About mnist](found/mnist.md) | self-fl is better. | *Inconclusive.* | 9 of 10 checks "
        "| of 2, 1 holds, 1 is inconclusive |",
        "## Beyond the paper",
    ]
    number = lines[5].split(" | ")[3]
    assert lines[5].startswith("| [About sums](found/sums.md) | Three. | *Holds in part.* † | none, none, ")
    assert number.endswith("none …")
    assert len(number) <= results.MAX_HEADLINE + 2


def test_a_results_page_is_read_as_it_was_written(two_studies, tmp_path):
    page = write_pages(results.results_pages(two_studies, "pictures"), tmp_path / "results.md")
    found = results.read_results(page)
    assert sorted(found) == sorted(record.id for _, record in two_studies)
    for _, record in two_studies:
        section = found[record.id]
        assert (section.title, section.command) == (record.title, record.command)
        assert section.seconds == round(record.seconds)
        assert "python" in section.environment
        assert section.is_tested is bool(record.decided_by)
        assert section.table == [dict(row) for row in record.table]
        assert [(line.text, line.evidence) for line in section.statements] == [
            (claim["text"], claim["evidence"]) for claim in record.claims
        ]
    one = tmp_path / "results" / f"{two_studies[0][1].id}.md"
    one.write_text(one.read_text(encoding="utf-8").replace("Made by", "Made with"), encoding="utf-8")
    with pytest.raises(DataError, match=r"does not say what made \S+; expected a line that begins with 'Made by'\.$"):
        results.read_results(page)


def test_a_results_page_keeps_what_it_said_of_studies_whose_records_are_elsewhere(two_studies, tmp_path):
    both = results.results_pages(two_studies, "pictures")
    before = write_pages(both, tmp_path / "results.md")
    assert results.results_pages(two_studies[:1], "pictures", before) == both
    folder, record = two_studies[1]
    changed = dataclasses.replace(record, claims=[{"text": "A third.", "verdict": "inconclusive", "evidence": "none"}])
    now = results.results_pages([(folder, changed)], "pictures", before)
    assert page.lead([two_studies[0], (folder, changed)]) in now.summary
    assert now == results.results_pages([two_studies[0], (folder, changed)], "pictures")
    assert "evidence two" not in now.studies[record.id]
    assert len(results.results_pages(two_studies[:1], "pictures", tmp_path / "none.md").studies) == 1


NOT_A_PAGE = {
    "another heading": b"# Something else\n",
    "an empty file": b"",
    "notes under the same heading": b"# Results\n\nNotes by hand.\n",
    "a longer heading": b"# Results of a thesis\n",
    "a section by hand": results.OPENING.encode() + b"\n\n## By hand\n\nwords\n\n`made-up`: more of them\n",
    "bytes": b"\xff\xfe",
}


def test_a_results_page_says_the_rule_once_and_counts_the_papers_statements_ours_and_targets_apart(tmp_path):
    kinds = {"auto-digits": "not in the paper", "mnist": "figure 1", "sums": "beyond the paper"}
    for number, (name, paper) in enumerate(kinds.items()):
        claims = [Claim("One.", "holds", "e"), Claim("Not in the paper: two.", "inconclusive", "e")]
        if name == "auto-digits":
            claims = [Claim("Target: three.", "does not hold", "e"), Claim("Target: four.", "holds", "e")]
        saved(tmp_path / str(number), name, paper=paper, claims=claims, figures=[], decided_by="By a test.")
    studies = [entry for number in range(3) for entry in load_studies(tmp_path / str(number))]
    pages = results.results_pages(studies, "pictures")
    text = pages.summary
    assert (
        "\n\nStatements of the paper: of 1, 1 holds. Statements of our own: of 3, 1 holds, 2 are inconclusive. "
        "Targets for our own method: of 2, 1 is met, 1 is not met.\n\n## "
    ) in text
    assert text.count(f"\n\n{RULE}\n\n") == 1
    assert "- **Target: three.** *Not met.* e\n- **Target: four.** *Met.* e\n" in pages.studies["auto-digits"]
    assert "Not yet so" not in text
    assert 'Target: three. <span class="says fails">Not met.</span>' in page.render(Collection([], studies), "t")


def test_the_summary_counts_verdicts_of_pages_that_do_not_say_which_test_decided(tmp_path):
    saved(tmp_path, "auto-digits", paper="not in the paper", claims=[Claim("Target: one.", "holds", "e")], figures=[])
    pages = results.results_pages(load_studies(tmp_path), "pictures")
    assert pages.summary.count("**Not yet so:** 1 of the verdicts counted above") == 1


@pytest.mark.parametrize("content", NOT_A_PAGE.values(), ids=NOT_A_PAGE)
def test_a_file_that_is_no_results_page_is_not_written_over(two_studies, tmp_path, content):
    (tmp_path / "results.md").write_bytes(content)
    with pytest.raises(DataError, match=r"(does not begin as a results page|names no study); expected"):
        results.results_pages(two_studies, "pictures", tmp_path / "results.md")


def test_a_file_by_hand_among_the_pages_of_studies_is_not_overlooked(two_studies, tmp_path):
    before = write_pages(results.results_pages(two_studies, "pictures"), tmp_path / "results.md")
    (tmp_path / "results" / "notes.md").write_text("# Notes\n\nBy hand.\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"^'Notes' in .*notes\.md names no study; expected"):
        results.results_pages(two_studies, "pictures", before)


def test_a_whole_study_is_not_replaced_by_a_quick_look(two_studies, tmp_path):
    (folder, whole), (_, quick) = two_studies
    both = results.results_pages(two_studies, "pictures")
    before = write_pages(both, tmp_path / "results.md")
    again = dataclasses.replace(whole, is_quick=True)
    with pytest.raises(DataError, match=r"holds a quick run of first, of which .* has a whole one"):
        results.results_pages([(folder, again)], "pictures", before)
    assert results.results_pages([(folder, quick)], "pictures", before) == both


def test_two_records_of_one_study_are_refused(two_studies):
    with pytest.raises(DataError, match="both hold the study first; expected one record"):
        results.results_pages([two_studies[0], two_studies[0]], "pictures")


def test_a_results_page_can_be_read_back_whatever_records_say(two_studies, tmp_path):
    folder, record = two_studies[0]
    claim = {"text": "one\n## two", "verdict": "holds", "evidence": "three\n## four\n\n`five`: six ** *seven.*"}
    record = dataclasses.replace(record, claims=[claim], setting="eight\n## nine")
    before = write_pages(results.results_pages([(folder, record)], "pictures"), tmp_path / "results.md")
    assert page.lead([(folder, record)]) in before.read_text(encoding="utf-8")
    assert len(results.results_pages([two_studies[1]], "pictures", before).studies) == 2


def test_studies_stand_on_the_results_page_as_in_the_paper(two_studies, tmp_path):
    folder, record = two_studies[0]
    later, earlier = ([(folder, dataclasses.replace(record, id=name))] for name in ("convergence", "limits"))
    before = write_pages(results.results_pages(later, "pictures"), tmp_path / "results.md")
    pages = results.results_pages(earlier, "pictures", before)
    assert list(pages.studies) == ["limits", "convergence"]
    assert re.findall(r"\(results/([\w-]+)\.md\)", pages.summary) == ["limits", "convergence"]


# -------------------------------------------------------------------------------------------------------------- figures


def drawn_lines(axis):
    return {line.get_label(): line for line in axis.lines if not line.get_label().startswith("_")}


def test_a_figure_draws_the_numbers_of_its_series():
    figure = made_up()[1].figures[0]
    canvas = figures.draw(figure)
    assert len(canvas.axes) == 2
    for axis, chart in zip(canvas.axes, figure.charts, strict=True):
        lines = drawn_lines(axis)
        assert list(lines) == [series.name for series in chart.series]
        for series in chart.series:
            assert list(lines[series.name].get_xdata()) == list(series.x)
            assert list(lines[series.name].get_ydata()) == list(series.y)
        assert axis.get_title(loc="left") == chart.title
        assert (axis.get_xlabel(), axis.get_ylabel()) == (chart.x_label, chart.y_label)
    left, right = canvas.axes
    assert (left.get_yscale(), right.get_yscale()) == ("linear", "log")
    (bars,) = left.collections
    segments = [segment[:, 1].tolist() for segment in bars.get_segments()]
    assert np.array(segments) == pytest.approx(np.array([[0.29, 0.31], [0.18, 0.22], [0.07, 0.13]]))


def test_the_legend_names_each_series_once():
    (legend,) = figures.draw(made_up()[1].figures[0]).legends
    assert [text.get_text() for text in legend.get_texts()] == ["self-fl", "limit, paper posterior"]


def test_dodging_moves_measurements_but_not_limits():
    series = [Series(name, [1.0, 2.0], [3.0, 4.0], [0.1, 0.1]) for name in ("a", "b")]
    series.append(Series("limit", [1.0, 2.0], [2.0, 2.0], is_reference=True))
    canvas = figures.draw(Figure("f", "", [Chart("", "", "", series, dodge=0.2)]))
    lines = drawn_lines(canvas.axes[0])
    assert list(lines["limit"].get_xdata()) == [1.0, 2.0]
    assert lines["b"].get_xdata()[0] - lines["a"].get_xdata()[0] == pytest.approx(0.2)
    assert list(lines["a"].get_ydata()) == [3.0, 4.0]
    assert lines["limit"].get_linestyle() == "--"
    assert lines["a"].get_linestyle() == "-"


@pytest.mark.parametrize(("kind", "style"), [("points", "None"), ("lines", "-")])
def test_points_with_error_bars_are_not_joined(kind, style):
    series = [Series("a", [1, 2], [1.0, 2.0], [0.1, 0.1]), Series("level", [1, 2], [0.0, 0.0], is_reference=True)]
    axis = figures.draw(Figure("f", "", [Chart("", "", "", series, kind=kind)])).axes[0]
    styles = {line.get_label(): line.get_linestyle() for line in axis.lines}
    assert styles["a"] == style
    assert styles["level"] == "--"
    assert len(axis.containers) == 1  # the bars


def test_a_method_keeps_its_colour_and_others_get_different_ones():
    names = ["mine", "self-fl", "yours", "fedavg"]
    series = [Series(name, [1, 2], [1, 2]) for name in names]
    lines = drawn_lines(figures.draw(Figure("f", "", [Chart("", "", "", series)])).axes[0])
    assert lines["self-fl"].get_color() == "#d55e00"
    place = list(ALGORITHMS).index("fedavg") % len(figures.METHOD_COLOURS)
    assert lines["fedavg"].get_color() == figures.METHOD_COLOURS[place]
    assert lines["mine"].get_color() != lines["yours"].get_color()


def test_ten_series_look_different_and_each_the_same_in_every_chart():
    series = [Series(str(number), [0.0, 1.0], [0.0, 1.0], [0.1, 0.1]) for number in range(10)]
    charts = [Chart("", "", "", series[:9]), Chart("", "", "", [series[9], *series[4:6]])]
    looks = [
        {name: (line.get_color(), line.get_marker()) for name, line in drawn_lines(axis).items()}
        for axis in figures.draw(Figure("f", "", charts)).axes
    ]
    both = looks[0] | looks[1]
    assert len({colour for colour, _ in both.values()}) == len({marker for _, marker in both.values()}) == 10
    assert all(looks[0][name] == looks[1][name] for name in "45")


def test_more_series_than_colours_are_drawn():
    series = [Series(f"s{n}", [1, 2], [n, n]) for n in range(20)]
    assert len(drawn_lines(figures.draw(Figure("f", "", [Chart("", "", "", series)])).axes[0])) == 20


def test_ticks_and_scales_are_as_asked():
    series = [Series("a", [0.1, 0.5, 1.0], [0.02, 0.03, 0.05])]
    chart = Chart("", "", "", series, log_x=True, log_y=True, x_ticks=[0.1, 0.5, 1.0])
    axis = figures.draw(Figure("f", "", [chart])).axes[0]
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    assert [label.get_text() for label in axis.get_xticklabels()] == ["0.1", "0.5", "1"]
    assert axis.get_yticks().tolist() == pytest.approx([0.02, 0.05])  # round numbers, not powers of ten


def test_a_figure_is_saved_twice_as_the_same_files(tmp_path):
    figure = made_up()[1].figures[1]
    first = figures.save(figures.draw(figure), tmp_path / "first")
    second = figures.save(figures.draw(figure), tmp_path / "second")
    assert [path.name for path in first] == ["first.png", "first.svg"]
    assert first[0].read_bytes().startswith(b"\x89PNG")
    for one, two in zip(first, second, strict=True):
        assert one.read_bytes() == two.read_bytes()


def forest_of(num_clients, **options):
    rng = np.random.default_rng(0)
    estimate, personal = rng.normal(size=num_clients), rng.normal(size=num_clients)
    reach, narrow = rng.uniform(0.5, 1, (num_clients, 1)), rng.uniform(0.1, 0.4, (num_clients, 1))
    signs = np.array([-1.0, 1.0])
    shown = forest.Forest(
        clients=[f"ward {number}" for number in range(num_clients)],
        estimate=estimate,
        own_interval=estimate[:, None] + reach * signs,
        personal=personal,
        personal_interval=personal[:, None] + narrow * signs,
        mean=0.25,
        mean_interval=(0.1, 0.5),
        prediction_interval=(-1.0, 2.0),
        mean_without=None,
        title="Wards",
    )
    shown = dataclasses.replace(shown, **options)
    return shown, forest.draw(shown)


def within_the_picture(canvas, box):
    whole = canvas.bbox
    return box.x0 >= whole.x0 - 1 and box.x1 <= whole.x1 + 1 and box.y0 >= whole.y0 - 1 and box.y1 <= whole.y1 + 1


@pytest.mark.parametrize("num_clients", [1, 3, 20, 200])
def test_a_forest_plot_shows_every_client_sorted_by_its_estimate(num_clients):
    shown, canvas = forest_of(num_clients)
    axis, order = canvas.axes[0], np.argsort(shown.estimate)
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels == ["next client", "mean of the clients", *(shown.clients[i] for i in order)]
    points = {line.get_label(): line for line in axis.lines}
    for label, value, bars, interval in (
        ("client alone", shown.estimate, axis.collections[0], shown.own_interval),
        ("client with the others", shown.personal, axis.collections[1], shown.personal_interval),
    ):
        assert points[label].get_xdata().tolist() == value[order].tolist()
        ends = np.array([segment[:, 0] for segment in bars.get_segments()])
        np.testing.assert_allclose(ends, interval[order])
    (diamond,) = [patch for patch in axis.patches if patch.get_label() == "mean of the clients"]
    assert diamond.get_xy()[:, 0].min() == 0.1
    assert diamond.get_xy()[:, 0].max() == 0.5
    assert list(points["next client, prediction"].get_xdata()) == [-1.0, 2.0]


@pytest.mark.parametrize("num_clients", [3, 20])
def test_nothing_of_a_forest_plot_is_cut_off_or_covered(num_clients):
    name = "University Hospital of the Northern Counties and Islands, ward"
    _, canvas = forest_of(
        num_clients,
        clients=[f"{name} {number}" for number in range(num_clients)],
        mean_without=np.linspace(0.2, 0.3, num_clients),
        title="Each client alone and with the others, 95 % intervals, with a title that needs more than one line",
        notes=["a note that is long enough to be wrapped " * 4],
    )
    canvas.draw_without_rendering()
    boxes = [canvas._suptitle.get_window_extent(), canvas.legends[0].get_window_extent()]
    boxes += [axis.get_tightbbox() for axis in canvas.axes]
    assert all(within_the_picture(canvas, box) for box in boxes)
    assert not any(one.overlaps(two) for i, one in enumerate(boxes) for two in boxes[i + 1 :])
    assert canvas.axes[0].get_yticklabels()[-1].get_text().count("…") == 1


@pytest.mark.parametrize(("num_clients", "count"), [(251, "250 of 251"), (2500, "250 of 2,500")])
def test_a_forest_of_many_clients_says_that_it_is_a_selection(num_clients, count):
    shown, canvas = forest_of(num_clients)
    names = [label.get_text() for label in canvas.axes[0].get_yticklabels()][2:]
    assert len(names) == len(set(names)) == 250
    assert f"{count} clients are shown, evenly chosen" in canvas._suptitle.get_text().replace("\n", " ")
    order = np.argsort(shown.estimate)
    assert (names[0], names[-1]) == (shown.clients[order[0]], shown.clients[order[-1]])
    ranks = [int(np.flatnonzero(order == shown.clients.index(name))[0]) for name in names]
    assert max(np.diff(ranks)) - min(np.diff(ranks)) <= 1  # evenly


# ------------------------------------------------------------------------------------------------------------ shrinkage

TABLE = EstimateTable(
    ["a", "b, c", "ü"], np.array([1.0, 2.5, 4.0]), np.array([0.25, 1.0, 0.04])
)  # by no means all alike: the spread between them is larger than their errors


@pytest.mark.parametrize("form", ["paper", "exact"])
def test_intervals_reach_two_standard_deviations_to_either_side(form):
    found = Shrinkage.of(TABLE, 0.5, "reml", form)
    expected = selffl.posterior(TABLE.estimate, TABLE.variance, 0.5, form)
    for index, row in enumerate(found.rows()):
        mean, deviation = expected.personal_mean[index], math.sqrt(expected.personal_variance[index])
        assert row["client"] == TABLE.client[index]
        assert (row["estimate"], row["variance"]) == (TABLE.estimate[index], TABLE.variance[index])
        assert row["shrunk"] == mean
        assert row["low"] == pytest.approx(mean - 1.959963984540054 * deviation, rel=1e-12)
        assert row["high"] == pytest.approx(mean + 1.959963984540054 * deviation, rel=1e-12)
        assert row["gain"] == expected.gain[index]
        assert row["verdict"] == verdict(expected.gain[index])


def test_the_level_widens_the_intervals():
    widths = {}
    for level, quantile in ((0.5, 0.6744897501960817), (0.9, 1.6448536269514722), (0.99, 2.5758293035489004)):
        row = next(Shrinkage.of(TABLE, 0.5, "reml", "exact", level).rows())
        widths[level] = (row["high"] - row["low"]) / (2 * quantile)
    assert widths[0.5] == pytest.approx(widths[0.9], rel=1e-12)
    assert widths[0.5] == pytest.approx(widths[0.99], rel=1e-12)


def test_the_summary_holds_the_whole_in_a_few_numbers():
    found = Shrinkage.of(TABLE, None, "ml", "exact", 0.9, new_variance=2.0)
    m = selffl.meta_analysis(TABLE.estimate, TABLE.variance, method="ml", level=0.9, new_variance=2.0)
    summary = found.summary
    assert summary["inter_variance_q_profile"] == list(m.inter_variance_interval)
    assert summary["inter_variance_profile_likelihood"] == list(m.inter_variance_profile)
    assert (summary["mean"], summary["mean_interval"]) == (m.mean, list(m.mean_interval))
    assert summary["prediction_interval"] == list(m.prediction_interval)
    assert (summary["new_variance"], summary["gain_probability"]) == (2.0, m.gain_probability)
    assert [summary[name] for name in ("q", "q_degrees_of_freedom", "q_p_value", "i_squared", "h_squared")] == list(
        m.heterogeneity
    )
    assert (summary["clients"], summary["form"], summary["inter_variance_source"]) == (3, "exact", "maximum likelihood")
    assert summary["alone_is_as_good"] == sum(gain < 1.05 for gain in m.gain)
    assert [(row["low"], row["high"]) for row in found.rows()] == [tuple(ends) for ends in m.personal_interval.tolist()]
    assert summary["is_integrated"] is True


def test_those_come_first_without_whom_the_others_move_most():
    found = Shrinkage.of(TABLE, None)
    left = found.analysis.leave_one_out()
    rows = found.rows_without()
    assert [row["largest_move"] for row in rows] == sorted(left.largest_move.tolist(), reverse=True)
    assert {row["client"]: row["mean"] for row in rows} == dict(zip(TABLE.client, left.mean.tolist(), strict=True))


def test_a_covariate_of_the_table_is_shrunk_towards():
    table = dataclasses.replace(TABLE, covariate=np.array([1.0, 2.0, 4.0]))
    found = Shrinkage.of(table, 0.5)
    m = selffl.meta_analysis(table.estimate, table.variance, covariate=table.covariate, inter_variance=0.5)
    assert found.summary["slope"] == m.slope.value
    assert [row["covariate"] for row in found.rows()] == [1.0, 2.0, 4.0]
    with pytest.raises(ConfigError, match="the paper's form knows no covariate"):
        Shrinkage.of(table, 0.5, form="paper")


@pytest.mark.parametrize(("method", "source"), [("reml", "REML"), ("dl", "DerSimonian–Laird"), ("pm", "Paule–Mandel")])
def test_without_a_given_variance_it_is_estimated_and_says_how(method, source):
    found = Shrinkage.of(TABLE, None, method, "exact")
    assert found.analysis.inter_variance == selffl.estimate_inter_variance(TABLE.estimate, TABLE.variance, method)
    assert found.summary["inter_variance_source"] == source
    assert found.analysis.inter_variance > 0


@pytest.mark.parametrize(
    ("gain", "text"),
    [
        (1.0, "alone is as good"),
        (1.0499, "alone is as good"),
        (1.05, "gains 1.1×"),
        (3.14, "gains 3.1×"),
        (999.94, "gains 999.9×"),
        (1000.0, "gains 1e+03×"),
        (2.5e9, "gains 2e+09×"),
        (math.inf, "exact from others"),
    ],
)
def test_a_gain_in_words(gain, text):
    assert verdict(gain) == text
    assert verdict(gain, 0.0) == "exact from itself"


@pytest.mark.parametrize(("most", "count"), [(None, 3), (0, 0), (2, 2), (3, 3), (99, 3)])
def test_the_first_rows_come_in_the_order_of_the_file(most, count):
    rows = list(Shrinkage.of(TABLE, 0.5, "reml", "exact").rows(most))
    assert [row["client"] for row in rows] == TABLE.client[:count]


def test_the_saved_table_has_every_client_and_every_digit(tmp_path):
    rng = np.random.default_rng(1)
    many = EstimateTable([f"c {n}, ü" for n in range(300)], rng.normal(size=300), rng.exponential(size=300))
    found = Shrinkage.of(many, None, "dl", "paper")
    found.save(tmp_path / "all.csv")
    with (tmp_path / "all.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 300
    for row, expected in zip(rows, found.rows(), strict=True):
        assert list(row) == list(expected)
        assert (row.pop("client"), row.pop("verdict")) == (expected["client"], expected["verdict"])
        assert {name: float(value) for name, value in row.items()} == {name: expected[name] for name in row}


@pytest.mark.parametrize("level", [0, 1, -0.5, 2, math.nan])
def test_a_level_that_is_no_probability_is_refused(level):
    with pytest.raises(ConfigError, match=rf"^level is {level}; expected a probability between 0 and 1"):
        Shrinkage.of(TABLE, 0.5, "reml", "exact", level)


@pytest.mark.parametrize("inter_variance", [-1.0, -1e-300, math.nan, math.inf])
def test_an_inter_variance_that_is_no_variance_is_refused(inter_variance):
    with pytest.raises(ConfigError, match=rf"^inter_variance is {inter_variance}; expected a number, 0 or more"):
        Shrinkage.of(TABLE, inter_variance, "reml", "exact")


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_forest_plot_in_the_format_of_its_ending(tmp_path, ending, magic):
    path = tmp_path / f"forest.{ending}"
    Shrinkage.of(TABLE, 0.5, "reml", "exact").plot(path)
    assert path.read_bytes().startswith(magic)


def test_an_ending_that_is_no_picture_is_refused(tmp_path):
    path = tmp_path / "forest.xyz"
    with pytest.raises(ConfigError, match=r"forest\.xyz cannot be drawn.*ending in \.png, \.svg or \.pdf"):
        Shrinkage.of(TABLE, 0.5, "reml", "exact").plot(path)
    assert not path.exists()


@pytest.mark.parametrize("name", ["$x_1$", r"$\nope$"])
def test_a_dollar_in_a_clients_name_is_a_dollar(tmp_path, name):
    table = EstimateTable([name, "b"], np.array([1.0, 2.0]), np.array([0.1, 0.1]))
    Shrinkage.of(table, 0.5, "reml", "exact").plot(tmp_path / "forest.svg")
    assert name in html_text.unescape(re.sub(r"<!--.*?-->", "", (tmp_path / "forest.svg").read_text(encoding="utf-8")))
