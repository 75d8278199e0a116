"""The command line: what it prints, what it writes, and how it says that something is wrong."""

import csv
import io
import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

import selffl
from programs import become_selffl, fork
from selffl import cli
from selffl.reports import runner
from selffl.reports.record import save_study
from selffl.studies import DEMO, STUDIES, comparison
from selffl.studies.images import DEMO_COMPARISON
from selffl.studies.problems import DIGITS
from selffl.studies.result import Chart, Claim, Figure, Series, StudyResult

GOOD = 'client,estimate,variance\nnorth,1.0,0.25\nsouth,2.5,1.0\n"east, old",4.0,0.04\nwest,2.0,0.5\n'
ESTIMATE, VARIANCE = [1.0, 2.5, 4.0, 2.0], [0.25, 1.0, 0.04, 0.5]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder to be in, with one good table and an empty folder, and a terminal wide enough for any table."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.console, "out", Console(width=200))
    monkeypatch.setattr(cli.console, "err", Console(width=200, stderr=True))
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    (tmp_path / "good.csv").write_text(GOOD, encoding="utf-8")
    (tmp_path / "empty").mkdir()
    return tmp_path


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that runs `selffl WORDS...` in this process: its exit code, output and error output."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["selffl", *words])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        printed = capsys.readouterr()
        return SimpleNamespace(code=stopped.value.code, out=printed.out, err=printed.err)

    return call


def succeed(found):
    assert found.code == 0, found.err
    return found


# ----------------------------------------------------------------------------------------------------- help and version

COMMANDS = [
    *(
        ("demo",),
        ("run",),
        ("tune",),
        ("compare",),
        ("init",),
        ("bench",),
        ("methods",),
        ("posterior",),
        ("report",),
        ("figures",),
        ("serve",),
    ),
    *(("export",), ("predict",), ("welcome",)),
    *(("paper", "list"), ("paper", "run"), ("paper", "page")),
    *(("data", "list"), ("data", "check"), ("data", "fetch"), ("data", "show")),
    *(("data", "profile"), ("data", "prepare")),
    *(("flower", "resume"), ("flower", "list"), ("flower", "export")),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_every_commands_help_has_an_example_of_that_command(run, command, option):
    text = " ".join(succeed(run(*command, option)).out.split())
    assert f"Example: selffl {' '.join(command)}" in text


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_help_says_in_words_what_is_to_be_given(run, command):
    shown = succeed(run(*command, "--help")).out
    assert not re.search(r"<(int|float|str|path|list|bool)\b|x>=|[{}]", shown)


def test_no_command_is_without_a_test_of_its_help(run):
    shown = "".join(succeed(run(*group, "--help")).out for group in ((), ("paper",), ("data",), ("flower",)))
    listed = re.findall(r"^│ (\w+)\s{2,}\w", shown, re.M)
    assert sorted({*listed} - {"paper", "data", "flower"}) == sorted({command[-1] for command in COMMANDS})
    assert shown.count("Example: selffl ") == 4  # of the groups themselves


def test_help_has_its_commands_in_groups(run):
    shown = succeed(run("--help")).out
    panels = re.split(r"╭─ (\w+) ─", shown)
    found = {
        name: re.findall(r"^│ (\w+)\s{2,}\w", text, re.M) for name, text in zip(panels[1::2], panels[2::2], strict=True)
    }
    assert {name: tuple(found[name]) for name in cli.PANELS} == cli.PANELS
    assert "Commands" not in found


def test_methods_are_listed_with_what_is_personal_and_their_source(run):
    from selffl.algorithms import ALGORITHMS

    listed = json.loads(succeed(run("methods", "--json")).out)
    assert [row["name"] for row in listed] == list(ALGORITHMS)
    pages = " ".join(
        page.read_text(encoding="utf-8") for page in (Path(__file__).parents[1] / "docs").glob("methods/*.md")
    )
    for row in listed:
        method = ALGORITHMS[row["name"]]()
        assert (row["personalises"], row["is_federated"]) == (method.personalises, method.is_federated)
        assert (row["source"] is None) == (row["name"] == "local")  # which nobody in particular has published
        if row["source"] and ("et al." in row["source"] or " and " in row["source"]):  # as the pages have it
            first, last = row["source"].split()[0], row["source"].rsplit(", ", 1)[1]
            assert re.search(rf"Source: {first}[^*]*\*[^*]+\*, (arXiv [\d.]+, )?{last}", pages)
    lines = succeed(run("methods")).out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert [line.split()[0] for line in lines[1:-1]] == list(ALGORITHMS)
    assert [line.split()[0] for line in lines if line.rstrip().endswith("each client alone")] == ["local"]


def test_a_method_that_is_misspelt_has_the_nearest_name(run):
    found = run("run", "digits", "-a", "self-fl-atuo")
    assert "did you mean 'self-fl-auto'?" in found.err


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_example_of_the_help_is_a_command_that_exists(run, command):
    text = " ".join(succeed(run(*command, "--help")).out.split())
    options = re.findall(r"(?<!\S)-{1,2}[a-z]+", re.search(r"Example: (.*?)╭", text).group(1))
    for option in options:
        assert option in text.split("╭", 1)[1]
    assert "bool" not in text  # a flag takes no value


def test_the_version(run):
    assert succeed(run("--version")).out == f"selffl {selffl.__version__}\n"


@pytest.mark.parametrize("words", [(), ("paper",)])
def test_without_a_command_there_is_help(run, words):
    found = succeed(run(*words))
    assert "Usage: " in found.out
    assert "run" in found.out or "posterior" in found.out
    assert "selffl:" not in found.err


def in_a_process(*words, **options):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(words, capture_output=True, text=True, encoding="utf-8", env=environment, **options)


def test_the_module_is_a_program(monkeypatch, capsys):
    """`python -m selffl --version`."""
    monkeypatch.setattr(sys, "argv", ["selffl", "--version"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("selffl", run_name="__main__")
    assert stopped.value.code == 0
    assert capsys.readouterr() == (f"selffl {selffl.__version__}\n", "")


@pytest.mark.slow
def test_a_mistake_is_one_line_and_exit_code_two_to_the_shell_as_well():
    script = Path(sys.executable).parent / "selffl"
    program = [str(script)] if script.exists() else [sys.executable, "-m", "selffl"]
    found = in_a_process(*program, "posterior", "nowhere.csv")
    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr == (
        "selffl: nowhere.csv does not exist; expected a CSV file with the columns client, estimate, variance.\n"
    )


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    def broken(path, covariate):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("selffl.data.estimates.read_estimates", broken)
    monkeypatch.setattr(sys, "argv", ["selffl", "posterior", "good.csv"])
    with pytest.raises(RuntimeError, match="a fault of ours"):  # Python makes it exit code 1
        cli.main()


def test_an_interruption_is_one_line(run, monkeypatch):
    def interrupted(path, covariate):
        raise KeyboardInterrupt

    monkeypatch.setattr("selffl.data.estimates.read_estimates", interrupted)
    found = run("posterior", "good.csv")
    assert (found.code, found.err) == (130, "selffl: stopped. What was finished is kept.\n")


def test_a_reader_that_has_seen_enough_is_no_fault(folder):
    rows = "".join(f"c{number},{number},1\n" for number in range(3000))
    (folder / "many.csv").write_text("client,estimate,variance\n" + rows, encoding="utf-8")
    reading, writing = os.pipe()

    def write():
        os.close(reading)  # a pipe is broken once nobody can read it
        os.dup2(writing, 1)
        os.dup2(os.open(folder / "errors", os.O_WRONLY | os.O_CREAT), 2)
        become_selffl(["posterior", "many.csv", "--rows", "3000"], folder)

    child = fork(write)
    os.close(writing)
    assert os.read(reading, 10)
    os.close(reading)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (folder / "errors").read_text(encoding="utf-8") == ""


def test_a_plot_without_an_ending_is_refused_or_lies_where_it_is_said_to_lie(run, folder):
    found = run("posterior", "good.csv", "--plot", "plot")
    assert found.code == 2 or (folder / "plot").exists()


# ------------------------------------------------------------------------------------------------------------ posterior


def expected_rows(inter_variance, form="exact", level_quantile=1.959963984540054):
    p = selffl.posterior(ESTIMATE, VARIANCE, inter_variance, form)
    reach = level_quantile * np.sqrt(p.personal_variance)
    return p, [
        {"shrunk": mean, "low": mean - r, "high": mean + r, "gain": gain}
        for mean, r, gain in zip(p.personal_mean.tolist(), reach.tolist(), p.gain.tolist(), strict=True)
    ]


@pytest.mark.parametrize(
    ("options", "inter_variance", "form", "quantile"),
    [
        (["--inter-variance", "0.5", "--form", "paper"], 0.5, "paper", 1.959963984540054),
        (["--inter-variance", "0", "--level", "0.9"], 0.0, "exact", 1.6448536269514722),
        (["--form", "paper", "--method", "reml", "--level", "0.5"], "reml", "paper", 0.6744897501960817),
    ],
)
def test_where_the_spread_is_taken_as_known_rows_are_those_of_the_posterior(
    run, options, inter_variance, form, quantile
):
    if not isinstance(inter_variance, float):
        inter_variance = selffl.estimate_inter_variance(ESTIMATE, VARIANCE, inter_variance)
    p, rows = expected_rows(inter_variance, form, quantile)
    found = json.loads(succeed(run("posterior", "good.csv", "--json", *options)).out)
    assert (found["clients"], found["form"], found["is_integrated"]) == (4, form, False)
    assert found["inter_variance"] == pytest.approx(inter_variance, rel=1e-12)
    assert found["mean"] == pytest.approx(p.global_mean, rel=1e-12)
    assert [row["client"] for row in found["rows"]] == ["north", "south", "east, old", "west"]
    for row, expected in zip(found["rows"], rows, strict=True):
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("method", ["reml", "ml", "pm", "dl"])
def test_posterior_prints_the_librarys_numbers_as_json(run, method):
    m = selffl.meta_analysis(ESTIMATE, VARIANCE, method=method, level=0.9, new_variance=0.7)
    words = ("--method", method, "--level", "0.9", "--new-variance", "0.7")
    found = json.loads(succeed(run("posterior", "good.csv", "--json", *words)).out)
    assert found["inter_variance_q_profile"] == list(m.inter_variance_interval)
    assert found["mean_interval"] == list(m.mean_interval)
    assert found["prediction_interval"] == list(m.prediction_interval)
    assert (found["gain_probability"], found["i_squared"]) == (m.gain_probability, m.heterogeneity.i_squared)
    assert [[row["low"], row["high"]] for row in found["rows"]] == m.personal_interval.tolist()
    assert len(found["without_each"]) == 4


def test_posterior_shrinks_towards_a_line_in_a_column(run, folder):
    beds = [120.0, 400.0, 60.0, 900.0]
    lines = [f"c{i},{z},{v},{x}" for i, (z, v, x) in enumerate(zip(ESTIMATE, VARIANCE, beds, strict=True))]
    (folder / "beds.csv").write_text("\n".join(["client,estimate,variance,Beds", *lines]), encoding="utf-8")
    m = selffl.meta_analysis(ESTIMATE, VARIANCE, covariate=beds)
    found = json.loads(succeed(run("posterior", "beds.csv", "--covariate", "beds", "--json")).out)
    assert (found["slope"], found["slope_interval"]) == (m.slope.value, list(m.slope.interval))
    assert [row["shrunk"] for row in found["rows"]] == m.personal_mean.tolist()
    assert "slope" in succeed(run("posterior", "beds.csv", "--covariate", "beds")).out


def test_posterior_prints_the_librarys_numbers_as_a_table(run):
    m = selffl.meta_analysis(ESTIMATE, VARIANCE)
    found = succeed(run("posterior", "good.csv"))
    lines = [line.rstrip() for line in found.out.splitlines()]
    assert lines[0].split() == ["4", "clients", "exact", "form,", "95", "%", "intervals"]
    assert f"σ₀² = {m.inter_variance:.4g} (REML)" in lines[1]
    assert f"{m.inter_variance_interval.low:.4g} to {m.inter_variance_interval.high:.4g} (Q-profile)" in lines[2]
    assert f"{m.mean:.4g}, {m.mean_interval.low:.4g} to {m.mean_interval.high:.4g} (Hartung–Knapp)" in found.out
    assert f"gains with probability {m.gain_probability:.2f}, if its own variance is 0.375" in found.out
    start = next(number for number, line in enumerate(lines) if line.startswith("client "))
    names = ["north", "south", "east, old", "west"]
    for name, line, i in zip(names, lines[start + 1 :], range(4), strict=False):
        cells = re.split(r"\s{2,}", line.strip())
        low, high = m.personal_interval[i]
        assert cells[:4] == [name, f"{ESTIMATE[i]:.2f}", f"{VARIANCE[i] ** 0.5:.2f}", f"{m.personal_mean[i]:.2f}"]
        assert re.split(r"\s+…\s+", cells[4]) == [f"{low:.2f}", f"{high:.2f}"]
    assert "surprise" in found.out
    assert found.err == ""


@pytest.mark.parametrize("scale", [1.0, 1e6, 1e-9, 1e60])
def test_the_tables_fit_eighty_columns_and_break_no_word(run, folder, monkeypatch, scale):
    monkeypatch.setattr(cli.console, "out", Console(width=80))
    name = "University Hospital of the Northern Counties and Islands ward"
    rows = [
        f"{name} {i},{z * scale},{v * scale**2},{i}" for i, (z, v) in enumerate(zip(ESTIMATE, VARIANCE, strict=True))
    ]
    (folder / "long.csv").write_text("\n".join(["client,estimate,variance,x", *rows]), encoding="utf-8")
    text = succeed(run("posterior", "long.csv", "--covariate", "x")).out
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    start = next(number for number, line in enumerate(lines) if line.startswith("client "))
    for i, row in enumerate(lines[start + 1 : start + 5]):
        assert row.rstrip().endswith(("×", "as good"))
        assert re.match(rf"Uni.*….*{i}  ", row)
        assert row.count("…") == 2  # one in the name, one in the interval
    words = "Largest move: of another client's shrunk estimate. Surprise: how far the client's estimate lies from the"
    assert words in " ".join(line.strip() for line in lines)


def test_numbers_of_a_column_have_the_same_decimals(run):
    lines = succeed(run("posterior", "good.csv", "--inter-variance", "0.5")).out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("client "))
    numbers = [re.findall(r"-?\d+\.\d+(?!×)\b", line) for line in lines[start + 1 : start + 5]]
    assert {len(number.split(".")[1]) for row in numbers for number in row[:5]} == {2}


def test_the_smallest_variances_have_an_answer(run, folder):
    (folder / "sure.csv").write_text("client,estimate,variance\na,1,5e-324\nb,2,5e-324\nc,6,5e-324\n", encoding="utf-8")
    found = json.loads(succeed(run("posterior", "sure.csv", "--json")).out)
    assert found["inter_variance"] == pytest.approx(7.0)
    assert "client" in succeed(run("posterior", "sure.csv")).out


def test_a_client_of_variance_zero_is_exact_from_itself(run, folder):
    (folder / "sure.csv").write_text("client,estimate,variance\na,1,0\nb,1.1,1\nc,0.9,1\n", encoding="utf-8")
    found = json.loads(succeed(run("posterior", "sure.csv", "--json")).out)
    assert [row["verdict"] for row in found["rows"]] == ["exact from itself", "exact if σ₀² is 0", "exact if σ₀² is 0"]
    assert [found["rows"][0][name] for name in ("shrunk", "low", "high")] == [1.0, 1.0, 1.0]
    assert found["rows"][1]["low"] < 1.0 < found["rows"][1]["high"]  # for σ₀² is estimated
    found = json.loads(succeed(run("posterior", "sure.csv", "--inter-variance", "0", "--json")).out)
    assert [row["verdict"] for row in found["rows"]] == ["exact from itself", "exact from others", "exact from others"]
    assert {row["low"] for row in found["rows"]} == {row["high"] for row in found["rows"]} == {1.0}


def test_only_the_first_rows_are_shown_and_the_rest_counted(run):
    found = succeed(run("posterior", "good.csv", "--rows", "1"))
    assert "north" in found.out
    assert "south" not in found.out.split("without")[0]
    assert "… and 3 more; --out FILE.csv writes them all." in found.out
    assert len(json.loads(succeed(run("posterior", "good.csv", "--rows", "2", "--json")).out)["rows"]) == 2
    found = succeed(run("posterior", "good.csv", "--rows", "0"))
    assert "client " not in found.out.replace("next client", "")


def test_out_writes_every_client_with_every_digit(run, folder):
    found = succeed(run("posterior", "good.csv", "--inter-variance", "0.5", "--rows", "1", "--out", "all.csv"))
    assert found.err == f"All 4 clients: {folder / 'all.csv'}\n"
    with (folder / "all.csv").open(newline="", encoding="utf-8") as file:
        written = list(csv.DictReader(file))
    assert [row["client"] for row in written] == ["north", "south", "east, old", "west"]
    for row, expected in zip(written, expected_rows(0.5)[1], strict=True):
        assert {name: float(row[name]) for name in expected} == pytest.approx(expected, rel=1e-15)


def test_what_was_written_can_be_read_again(run):
    succeed(run("posterior", "good.csv", "--out", "all.csv"))
    again = succeed(run("posterior", "all.csv", "--json")).out
    assert again == succeed(run("posterior", "good.csv", "--json")).out


def test_plot_draws_a_forest_and_leaves_standard_output_to_the_json(run, folder):
    found = succeed(run("posterior", "good.csv", "--json", "--plot", "forest.svg", "--out", "all.csv"))
    json.loads(found.out)
    assert found.err.splitlines() == [
        f"All 4 clients: {folder / 'all.csv'}",
        f"Forest plot: {folder / 'forest.svg'}",
    ]
    picture = (folder / "forest.svg").read_text(encoding="utf-8")
    assert "east, old" in picture


def test_a_given_inter_variance_is_enough_for_one_client(run, folder):
    (folder / "one.csv").write_text("client,estimate,variance\na,2,1\n", encoding="utf-8")
    found = json.loads(succeed(run("posterior", "one.csv", "--inter-variance", "1", "--json")).out)
    assert found["rows"][0]["shrunk"] == 2.0
    assert found["rows"][0]["gain"] == 1.0


def test_json_is_json_even_where_a_gain_is_infinite(run, folder):
    (folder / "sure.csv").write_text("client,estimate,variance\na,1,0\nb,2,1\n", encoding="utf-8")
    text = succeed(run("posterior", "sure.csv", "--inter-variance", "0", "--json")).out

    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("name", ["[red]ward", "ward [/b]", "[bold]"])
def test_a_name_with_brackets_is_a_name(run, folder, name):
    (folder / "names.csv").write_text(f"client,estimate,variance\n{name},1,1\nb,2,1\n", encoding="utf-8")
    assert name in succeed(run("posterior", "names.csv")).out


def test_a_path_with_brackets_is_shown_as_it_is(run):
    assert "all[red].csv" in succeed(run("posterior", "good.csv", "--out", "all[red].csv")).err


def test_output_that_is_not_utf8_loses_signs_but_not_the_answer(monkeypatch):
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", narrow)
    monkeypatch.setattr(sys, "argv", ["selffl", "posterior", "good.csv"])
    with pytest.raises(SystemExit):
        cli.main()


def test_names_the_font_has_no_letters_for_are_drawn_without_noise(run, folder):
    (folder / "names.csv").write_text("client,estimate,variance\n北京,1,1\nb,2,1\n", encoding="utf-8")
    assert succeed(run("posterior", "names.csv", "--plot", "p.png")).err == f"Forest plot: {folder / 'p.png'}\n"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_million_clients_fit_into_a_gigabyte(folder):
    """By what 60,000 clients take beyond 20,000: memory grows in proportion to the clients."""
    fewer, num_clients = 20_000, 60_000
    rng = np.random.default_rng(0)
    columns = rng.normal(size=num_clients).tolist(), rng.exponential(size=num_clients).tolist()
    lines = [f"c{i},{e:.6f},{v:.6f}\n" for i, (e, v) in enumerate(zip(*columns, strict=True))]
    for name, count in (("half.csv", fewer), ("big.csv", num_clients)):
        (folder / name).write_text("client,estimate,variance\n" + "".join(lines[:count]), encoding="utf-8")
    program = (
        "import contextlib, io, sys; from selffl.cli import main\n"
        "def call(name):\n"
        "    sys.argv = ['selffl', 'posterior', name, '--rows', '3', '--json', '--out', 'all.csv']\n"
        "    try: main()\n"
        "    finally: print(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')), file=sys.stderr)\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): call('half.csv')\n"
        "call('big.csv')\n"
    )
    found = in_a_process(sys.executable, "-c", program, cwd=folder, timeout=1200)
    assert found.returncode == 0, found.stderr
    less, peak = (int(kilobytes) for kilobytes in re.findall(r"VmHWM:\s+(\d+) kB", found.stderr))
    assert peak + (peak - less) * (10**6 - num_clients) / (num_clients - fewer) < 10**6
    summary = json.loads(found.stdout)
    assert summary["clients"] == num_clients
    assert len(summary["rows"]) == 3
    assert summary["inter_variance"] < 1.0  # N(0, 1) estimates with variances of 1 on average
    with (folder / "all.csv").open(encoding="utf-8") as file:
        assert sum(1 for _ in file) == num_clients + 1
        file.seek(0)
        header, first, *_ = (next(file).split(",") for _ in range(2))
    assert header[0] == "client"
    assert first[0] == "c0"
    assert float(first[3]) == summary["rows"][0]["shrunk"]


# ------------------------------------------------------------------------------------------- studies, demo and reports


def in_this_process(ids, folder, *, quick, on_progress, on_record, device="cpu", num_processes=None, num_seeds=None):
    """A runner that runs nothing: every study has found the same."""
    for name in ids:
        study = DEMO if name == "demo" else STUDIES[name]
        on_progress(name, 0, 2, "first")
        on_progress(name, 2, 2, "done")
        result = StudyResult(
            rows=[{"method": "self-fl", "error": 0.5}],
            table=[{"method": "self-fl", "error": "0.5000 ± 0.1"}],
            figures=[Figure("errors", "Errors", [Chart("t", "x", "y", [Series("self-fl", [1, 2], [3, 4])])])],
            claims=[Claim("It works.", "holds", "seen"), Claim("It flies.", "does not hold", "not seen")],
        )
        on_record(save_study(study, result, folder / name, command=f"selffl {name}", is_quick=quick, seconds=2.0))


def test_paper_list_names_every_study(run):
    text = succeed(run("paper", "list")).out
    for study in STUDIES.values():
        assert re.search(rf"^{study.id}\s", text, re.M)
        assert study.title.partition(" (")[0] in text
    assert "OCR letters stand in for FEMNIST" in text


def test_paper_list_as_json(run):
    found = json.loads(succeed(run("paper", "list", "--json")).out)
    fields = ("id", "title", "paper", "setting", "took")
    assert found == [{name: getattr(study, name) for name in fields} for study in STUDIES.values()]


@pytest.mark.slow
def test_paper_run_prints_verdicts_and_writes_one_page(run, folder, monkeypatch):
    monkeypatch.setattr(runner, "run_studies", in_this_process)
    found = succeed(run("paper", "run", "limits", "convergence", "limits", "--quick", "--out", "a/b"))
    assert found.out.count("holds  It works.") == found.out.count("does not hold  It flies.") == 2  # once each
    assert f"Report: {folder / 'a' / 'b' / 'report.html'}" in found.out
    assert found.err == ""
    page = (folder / "a" / "b" / "report.html").read_text(encoding="utf-8")
    assert page.count("<section ") == 2
    for name in ("limits", "convergence"):
        assert (folder / "a" / "b" / name / "record.json").exists()


def test_demo_prints_its_table_and_writes_a_page(run, folder, monkeypatch):
    monkeypatch.setattr(runner, "run_studies", in_this_process)
    found = succeed(run("demo", "--out", "d"))
    assert DEMO.title in " ".join(found.out.split())
    assert re.search(r"^self-fl\s+0\.5000 ± 0\.1\s*$", found.out, re.M)
    assert f"Report: {folder / 'd' / 'report.html'}" in found.out
    assert "It works." in (folder / "d" / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def records(folder):
    in_this_process(
        ["limits", "convergence"], folder / "runs", quick=True, on_progress=lambda *_: None, on_record=lambda _: None
    )


def test_report_makes_one_page_of_several_folders(run, folder, records):
    found = succeed(run("report", "runs/limits", "runs/convergence", "-o", "page.html"))
    assert found.out == f"Report: {folder / 'page.html'}\n"
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert page.count("<section ") == 2
    assert STUDIES["limits"].title in page
    succeed(run("report", "runs"))
    assert (folder / "report.html").read_text(encoding="utf-8") == page


def test_page_writes_a_summary_and_a_page_for_each_study_with_figures_beside_them(run, folder, records):
    (folder / "docs").mkdir()
    said = succeed(run("paper", "page", "runs", "-o", "docs/results.md")).out
    assert said == "Results: docs/results.md, and a page for each study in docs/results\n"
    found = {path: path.read_text(encoding="utf-8") for path in (folder / "docs").rglob("*.md")}
    assert sorted(path.name for path in found) == ["convergence.md", "limits.md", "results.md"]
    for name in ("limits", "convergence"):
        text = found[folder / "docs" / "results" / f"{name}.md"]
        assert f"](../figures/{name}-errors.svg)" in text
        assert (folder / "docs" / "figures" / f"{name}-errors.svg").exists()
        assert "*Does not hold.* not seen" in text
        assert f"](results/{name}.md)" in found[folder / "docs" / "results.md"]
    succeed(run("paper", "page", "runs/limits", "-o", "docs/results.md"))
    assert {path: path.read_text(encoding="utf-8") for path in (folder / "docs").rglob("*.md")} == found


def test_page_does_not_write_over_another_file(run, folder, records):
    (folder / "notes.md").write_text("# Notes\n", encoding="utf-8")
    found = run("paper", "page", "runs", "-o", "notes.md")
    assert found.code == 2
    assert "notes.md" in found.err
    assert (folder / "notes.md").read_text(encoding="utf-8") == "# Notes\n"
    assert not (folder / "figures").exists()


def test_page_says_that_a_picture_is_gone(run, folder, records):
    (folder / "figures").mkdir()
    (folder / "runs" / "convergence" / "errors.svg").unlink()
    found = run("paper", "page", "runs", "-o", "results.md")
    assert found.code == 2
    assert "errors.svg" in found.err
    assert not (folder / "results.md").exists()


@pytest.mark.slow
def test_a_study_runs(run, folder):
    found = succeed(run("paper", "run", "limits", "--quick", "--out", "runs"))
    assert "Remark 2.2" in found.out
    assert found.err == ""
    assert (folder / "runs" / "report.html").exists()
    assert (folder / "runs" / "limits" / "shrinkage.png").exists()


@pytest.mark.slow
def test_the_demo_runs(folder, run, monkeypatch):
    few = replace(DIGITS, num_local_steps=5, max_local_steps=10)
    small = partial(comparison.study, replace(DEMO_COMPARISON, problem=few, quick_share=20))
    monkeypatch.setattr(runner, "DEMO", replace(DEMO, run=small))
    found = succeed(run("demo", "--quick", "--out", "demo"))
    assert "Handwritten digits over forty clients" in found.out
    assert found.err == ""
    assert (folder / "demo" / "report.html").exists()
    with (folder / "demo" / "demo" / "results.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["method"] for row in rows} >= {"self-fl", "fedavg", "ditto", "local"}
    last = [float(row["weighted_accuracy"]) for row in rows if row["round"] == "3"]
    assert len(last) == 16  # two seeds of eight methods
    assert min(last) > 0.2


def test_a_table_on_a_narrow_terminal_has_whole_columns_and_names_the_others(monkeypatch, capsys):
    line = {
        "method": "self-fl-exact",
        "accuracy": "91.0 ± 0.8",
        "worst 10 %": "27.3 ± 0.7",
        "global model": "73.0 ± 4.5",
    }
    record = SimpleNamespace(title="a [/b] title", table=[line])
    for width, number in ((200, 4), (46, 4), (45, 3), (35, 3), (34, 2), (24, 2), (3, 4)):
        monkeypatch.setattr(cli.console, "out", Console(width=width))
        cli.studies.print_table(record)
        text = capsys.readouterr().out
        shown, absent = list(line)[:number], list(line)[number:]
        assert (f"Not shown for want of room: {', '.join(absent)}." in text) == bool(absent)
        if width > 3:
            assert "…" not in text
            assert "a [/b] title" in text
            assert all(line[name] in text for name in shown)


# ---------------------------------------------------------------------------------------------------------------- speed


def test_bench_prints_ratios_of_measurements_that_took_turns(run):
    found = json.loads(succeed(run("bench", "--clients", "3", "--repeats", "2", "--json")).out)
    loop, ours = found["seconds"]["plain PyTorch loop"], found["seconds"]["selffl"]
    ratios = [slow / fast for slow, fast in zip(loop, ours, strict=True)]
    assert len(ratios) == 2
    assert found["times_as_fast"]["selffl"] == {"median": sum(ratios) / 2, "low": min(ratios), "high": max(ratios)}


def test_the_loop_and_the_engine_take_the_same_steps():
    """With one client and batches of all its rows there is no chance left: both end at the same model."""
    from selffl.data import load
    from selffl.studies import speed

    rows = load("digits", num_clients=2).train
    alone = type(rows)(rows.features[:12], rows.labels[:12], rows.offset.new_tensor([0, 12]))
    loop, ours = (make(alone, 10, cohort=1, steps=3, batch=12) for make in (speed.plain_loop, speed.cohort_rounds))
    for one_round in (loop, ours):
        one_round()
        one_round()
    inside = dict(zip(loop.__code__.co_freevars, (cell.cell_contents for cell in loop.__closure__), strict=True))
    state = dict(zip(ours.__code__.co_freevars, (cell.cell_contents for cell in ours.__closure__), strict=True))
    expected = np.concatenate([part.numpy().ravel() for part in inside["shared"]])
    np.testing.assert_allclose(state["state"].server.params.numpy(), expected, atol=1e-6)
    assert np.abs(expected).max() > 1e-3
