"""Figures and tables for papers: files, numbers, widths, and text that LaTeX and Markdown take as it is."""

import csv
import dataclasses
import json
import re
import sys

import pytest

import selffl
from selffl import cli
from selffl.data import load
from selffl.errors import ConfigError, DataError
from selffl.reports import figures, tables
from selffl.reports.collect import collect
from selffl.reports.paper_figures import figures_of, save_paper_figures
from selffl.reports.record import save_study
from selffl.studies.result import Chart, Figure, Series, Study, StudyResult


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    for name in ("self-fl", "local"):
        for seed in (0, 1):
            selffl.train(
                "softmax", load("digits", num_clients=12, seed=seed), name, rounds=4, participation=0.5,
                evaluate_every=2, seed=seed, out=place / f"{name}-{seed}",
            )  # fmt: skip
    return place


@pytest.fixture(scope="module")
def drawn(folder, tmp_path_factory):
    """Every figure, as wide as both columns of a paper, in every format, and the tables."""
    return save_paper_figures([folder], tmp_path_factory.mktemp("drawn"))


MAGIC = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
NAMES = ("rounds", "clients", "gains", "variances", "steps", "partition")


@pytest.mark.slow
def test_every_figure_in_every_format_and_both_tables(drawn):
    expected = {f"{name}.{ending}" for name in NAMES for ending in MAGIC} | {"table.tex", "table.md"}
    assert {path.name for path in drawn} == {path.name for path in drawn[0].parent.iterdir()} == expected
    for path in drawn:
        if path.suffix[1:] in MAGIC:
            assert path.read_bytes().startswith(MAGIC[path.suffix[1:]])


@pytest.mark.slow
def test_drawn_again_it_is_the_same_file_without_dates_or_random_ids(folder, drawn, tmp_path):
    (group,) = collect([folder]).groups
    again = {figure.name: figure for figure in figures_of(group)}["rounds"]
    for path in figures.save(figures.draw(again, "double"), tmp_path / "rounds", tuple(MAGIC)):
        assert path.read_bytes() == (drawn[0].parent / path.name).read_bytes(), path.name


@pytest.mark.slow
def test_figures_hold_the_numbers_of_the_records(folder):
    (group,) = collect([folder]).groups
    found = {figure.name: figure for figure in figures_of(group)}
    with (folder / "local-0" / "clients.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    (chart,) = found["clients"].charts
    series = {one.name: one for one in chart.series}["local"]
    shown = sorted(zip(series.x, series.y, strict=True))
    expected = sorted((int(row["num_train"]), 100 * float(row["accuracy"])) for row in rows)
    assert [x for x, _ in shown] == [x for x, _ in expected]
    assert [y for _, y in shown] == pytest.approx([y for _, y in expected], rel=1e-4)
    assert [one.name for one in found["gains"].charts[0].series] == ["self-fl"]  # nobody gains over himself
    assert len(found["rounds"].charts) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("width", "inches"), [("single", 3.35), ("double", 7.0)])
def test_widths_are_those_of_a_papers_columns(width, inches, drawn, tmp_path):
    place, names = drawn[0].parent, NAMES[:5]
    if width == "single":
        study(tmp_path / "study")
        place, names = tmp_path / "out", ("errors",)
        save_paper_figures([tmp_path / "study"], place, formats=("png", "pdf"), width=width)
    for name in names:
        content = (place / f"{name}.png").read_bytes()
        pixels = int.from_bytes(content[16:20], "big")
        assert pixels == pytest.approx(300 * inches, abs=2)
        (box,) = re.findall(rb"/MediaBox \[ ?0 0 ([\d.]+) ", (place / f"{name}.pdf").read_bytes())
        assert float(box) == pytest.approx(72 * inches, abs=1)


def test_the_style_ends_with_the_drawing():
    import matplotlib

    before = dict(matplotlib.rcParams)
    figure = Figure("f", "", [Chart("t", "x", "y", [Series("a", [1, 2], [3, 4])])])
    figures.draw(figure, "single")
    assert dict(matplotlib.rcParams) == before


def study(folder, **changes):
    charts = [
        Chart("t", "x", "y", [Series("self-fl", range(3), [1.0, 2.5, float("nan")], [0.1, 0.2, 0.3])], x_ticks=(0, 1))
    ]
    result = StudyResult([{"a": 1}], [{"method": "self-fl", "ℓ_max": "40 %"}], [Figure("errors", "Errors", charts)], [])
    made = Study("limits", "Limits & more", "p", "s", lambda _: result)
    save_study(made, dataclasses.replace(result, **changes), folder, command="c", is_quick=False, seconds=1)
    return result


def test_a_study_is_drawn_again_from_what_it_noted(tmp_path):
    result = study(tmp_path / "study")
    noted = json.loads((tmp_path / "study" / "figures.json").read_text())
    (chart,) = figures.of_plain(noted[0]).charts
    assert list(chart.series[0].y[:2]) == [1.0, 2.5]
    assert chart.x_ticks == [0.0, 1.0]
    assert chart.kind == result.figures[0].charts[0].kind
    written = save_paper_figures([tmp_path / "study"], tmp_path / "out", formats=("pdf",), width="single")
    assert sorted(path.name for path in written) == ["errors.pdf", "table.md", "table.tex"]
    assert r"\caption{Limits \& more}" in (tmp_path / "out" / "table.tex").read_text(encoding="utf-8")


def test_a_study_of_an_earlier_version_has_the_files_it_has(tmp_path):
    study(tmp_path / "study")
    (tmp_path / "study" / "figures.json").unlink()
    written = save_paper_figures([tmp_path / "study"], tmp_path / "out", formats=("png", "svg"))
    assert (tmp_path / "out" / "errors.svg").read_bytes() == (tmp_path / "study" / "errors.svg").read_bytes()
    assert len(written) == 4
    with pytest.raises(DataError, match=r"holds neither figures\.json nor errors\.pdf"):
        save_paper_figures([tmp_path / "study"], tmp_path / "out", formats=("pdf",))


@pytest.mark.slow
def test_several_things_have_names_of_their_own(folder, tmp_path):
    study(tmp_path / "study")
    written = save_paper_figures([folder, tmp_path / "study"], tmp_path / "out", formats=("svg",))
    names = {path.name for path in written}
    assert {"runs-1-rounds.svg", "runs-1-table.tex", "limits-errors.svg", "limits-table.md"} <= names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("50 % & more_of #1", r"50 \% \& more\_of \#1"),
        ("a\\b{c}$d$^e~f", r"a\textbackslash{}b\{c\}\$d\$\textasciicircum{}e\textasciitilde{}f"),
        ("0.5 ± 0.1", r"0.5 $\pm$ 0.1"),
        ("−3", "$-$3"),
        ("σ₀² ≥ ℓ_max", r"$\sigma$$_0$$^2$ $\geq$ $\ell$\_max"),
        ("two\nlines", "two lines"),
        ("Zürich", "Zürich"),
    ],
)
def test_latex_takes_text_as_it_is(text, expected):
    assert tables.escape_latex(text) == expected


def test_a_latex_table():
    assert tables.latex([{"method": "self-fl", "a_b": "1 ± 2"}, {"method": "[x]", "a_b": "–"}], "100 %") == (
        "% needs \\usepackage{booktabs}\n"
        "\\begin{table}\n"
        "  \\centering\n"
        "  \\caption{100 \\%}\n"
        "  \\begin{tabular}{lr}\n"
        "    \\toprule\n"
        "    method & a\\_b \\\\\n"
        "    \\midrule\n"
        "    self-fl & 1 $\\pm$ 2 \\\\\n"
        "    {[x]} & -- \\\\\n"
        "    \\bottomrule\n"
        "  \\end{tabular}\n"
        "\\end{table}\n"
    )


@pytest.mark.slow
def test_the_table_has_the_numbers_of_the_summaries(folder, drawn):
    lines = (drawn[0].parent / "table.md").read_text(encoding="utf-8").splitlines()
    values = [
        100 * json.loads((folder / f"local-{s}" / "summary.json").read_text())["weighted_accuracy"] for s in (0, 1)
    ]
    mean, error = sum(values) / 2, abs(values[0] - values[1]) / 2
    assert next(line for line in lines if line.startswith("| local |")).split(" | ")[1] == f"{mean:.1f} ± {error:.1f}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--format", "gif"], "unknown format 'gif'"),
        (["--format", ","], "there is no format"),
        (["--width", "triple"], "unknown width 'triple'; did you mean"),
    ],
)
def test_what_cannot_be_drawn_is_said_in_one_line(folder, tmp_path, monkeypatch, capsys, words, reason):
    monkeypatch.setattr(sys, "argv", ["selffl", "figures", str(folder), "--out", str(tmp_path / "out"), *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_python_is_told_too(folder, tmp_path):
    with pytest.raises(ConfigError, match="unknown format 'jpg'"):
        save_paper_figures([folder], tmp_path, formats=("jpg",))
