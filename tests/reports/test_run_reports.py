"""`selffl report` on single runs: what their folders say, drawn; and one clear line where there is nothing to draw."""

import re
import sys

import pytest
from rich.console import Console
from selffl.reports.runs import _series, is_run, load_runs

import selffl
from selffl import cli
from selffl.data import load
from selffl.errors import DataError
from selffl.reports.page import html
from selffl.runs.folder import read_records


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two runs beside each other."""
    place = tmp_path_factory.mktemp("runs")
    for name in ("self-fl", "ditto"):
        selffl.train(
            "softmax", load("digits"), name, rounds=6, participation=0.3, evaluate_every=2, out=place / name, seed=1
        )
    return place


def test_every_run_has_its_section_with_the_numbers_of_its_records(folder):
    runs = load_runs(folder)
    assert [record.id for _, record in runs] == ["ditto", "self-fl"]
    page = html(runs, "Runs")
    for name in ("ditto", "self-fl"):
        summary = read_records(folder / name).summary
        assert f"accuracy {100 * summary['weighted_accuracy']:.1f} % with personal models" in page
        assert f"{100 * summary['global_accuracy']:.1f} % with the global one" in page
    assert page.count("<svg") == 3  # scores of both, and what uncertainty decided in one
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"|<!--.*?-->|<metadata>.*?</metadata>', "", page, flags=re.S)


def test_the_table_begins_with_those_who_gain_least(folder):
    _, record = load_runs(folder / "self-fl")[0]
    rows = {row["client"]: row for row in read_records(folder / "self-fl").clients}
    gains = [rows[line["client"]]["accuracy"] - rows[line["client"]]["global_accuracy"] for line in record.table]
    assert len(record.table) == 40
    assert gains == sorted(gains)


def test_a_score_of_nothing_is_drawn_too():
    rows = [{"round": 1, "worst10_accuracy": 0.0}, {"round": 2, "worst10_accuracy": None}]
    found = _series("worst", rows, "worst10_accuracy", 100.0)
    assert (list(found.x), list(found.y)) == ([1], [0.0])


def test_other_metrics_than_accuracy_are_drawn(tmp_path):
    import torch
    from torch import nn

    torch.manual_seed(0)
    x, client = torch.randn(120, 4), torch.arange(120) % 6
    federation = selffl.Federation.from_arrays(x, x @ torch.randn(4), client, test_fraction=0.3)
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    run = selffl.train(model, federation, "self-fl", rounds=3, loss=nn.functional.mse_loss, out=tmp_path / "values")
    _, record = load_runs(tmp_path / "values")[0]
    assert f"error {run.summary['weighted_error']:.4g} with personal models" in record.verdict
    gains = [float(line["error, global model"]) - float(line["error, own model"]) for line in record.table]
    assert gains == sorted(gains)  # of an error less is more


@pytest.fixture
def run(monkeypatch, capsys):
    monkeypatch.setattr(cli.console, "out", Console(width=200))

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["selffl", *words])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code, capsys.readouterr()

    return call


def test_the_command_takes_a_run_and_a_folder_of_runs(run, folder, tmp_path):
    for place in (folder, folder / "ditto"):
        code, printed = run("report", str(place), "--out", str(tmp_path / "page.html"))
        assert code == 0, printed.err
        assert "ditto on digits" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_what_is_no_run_is_refused_in_one_line(run, tmp_path):
    (tmp_path / "empty").mkdir()
    assert not is_run(tmp_path / "empty")
    for place, reason in (("empty", "holds no record.json"), ("nowhere", "is not a folder")):
        code, printed = run("report", str(tmp_path / place), "--out", str(tmp_path / "page.html"))
        assert code == 2
        assert reason in printed.err
        assert len(printed.err.splitlines()) == 1
    with pytest.raises(DataError, match="holds neither a study nor a run"):
        load_runs(tmp_path / "empty")


def test_a_run_without_a_round_has_nothing_to_show_yet(folder, tmp_path):
    for name in ("config.json", "history.csv"):
        text = (folder / "ditto" / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text if name == "config.json" else text.splitlines()[0] + "\n", encoding="utf-8")
    with pytest.raises(DataError, match="has no rounds yet"):
        load_runs(tmp_path)
