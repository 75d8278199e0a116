"""`selffl welcome`: the model it writes, and what it refuses."""

import json
from functools import partial

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import selffl
from selffl.training.answers import trained_module

ROWS = "site,age,dose,ill\n" + "".join(
    f"{site},{row % 5},{(row * row + number) % 7},{'yes' if (row + number) % 3 else 'no'}\n"
    for number, site in enumerate("abcd")
    for row in range(12)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run over four sites, whose labels have names."""
    place = tmp_path_factory.mktemp("runs")
    (place / "rows.csv").write_text(ROWS, encoding="utf-8")
    fed = selffl.Federation.from_csv(place / "rows.csv", client="site", label="ill", test_fraction=0.2)
    selffl.train("softmax", fed, "self-fl-auto", rounds=4, participation=0.5, out=place / "run")
    return place / "run"


@pytest.fixture
def run(command_line, tmp_path):
    """A function that runs the command here, in a folder with two rows of a new client."""
    tables = {
        "new.csv": "age,dose,ill\n1,2,yes\n3,0.5,no\n",
        "mixed.csv": "ill,name,dose,age\nyes,x,2,1\nno,y,0.5,3\n",
        "nobody.csv": "age,dose,ill\n",
        "other.csv": "age,dose,ill\n1,2,perhaps\n",
        "hole.csv": "age,dose,ill\n1,,yes\n",
        "wide.csv": "age,dose,height,ill\n1,2,3,yes\n3,0.5,7,no\n",
        "narrow.csv": "age,ill\n1,yes\n",
    }
    for name, text in tables.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return partial(command_line, "welcome")


def same(file, module):
    opened = nn.Linear(2, 2)
    opened.load_state_dict(load_file(file))
    return all(map(torch.equal, opened.state_dict().values(), trained_module(module).state_dict().values()))


def test_the_model_is_that_of_the_library(run, folder, tmp_path):
    before = {file: file.read_bytes() for file in folder.iterdir()}
    expected = selffl.load(folder).welcome(([[1.0, 2.0], [3.0, 0.5]], ["yes", "no"]))
    code, out, err = run(folder, "new.csv", "--label", "ill", "--out", "new.safetensors")
    assert (code, err) == (0, "")
    file = tmp_path / "new.safetensors"
    assert out == f"A model from 2 rows of new.csv: {file} ({file.stat().st_size / 1024:,.0f} KiB)\n"
    assert same(file, expected)
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    assert (about["algorithm"], about["client"], about["rows"], about["round"]) == ("self-fl-auto", "new", "2", "4")
    assert json.loads(about["preparation"])["label"]["classes"] == ["no", "yes"]
    for name in ("mixed.csv", "wide.csv"):  # columns go by their names
        code, _, _ = run(folder, name, "--out", "other.safetensors")
        assert code == 0
        assert same(tmp_path / "other.safetensors", expected)
    code, out, _ = run(folder, "new.csv", "--json")
    assert json.loads(out) == {
        "file": "newcomer.safetensors", "bytes": (tmp_path / "newcomer.safetensors").stat().st_size, "rows": 2
    }  # fmt: skip
    assert same(tmp_path / "newcomer.safetensors", expected)
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


def test_without_rows_it_is_the_global_model(run, folder, tmp_path):
    code, out, _ = run(folder, "nobody.csv", "--label", "ill")
    assert (code, out.startswith("A model from 0 rows of nobody.csv")) == (0, True)
    assert same(tmp_path / "newcomer.safetensors", selffl.load(folder).global_model())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nowhere.csv"], "nowhere.csv does not exist or is not a file; expected a table."),
        (["new.txt"], "new.txt is none of .csv, .parquet"),
        (["other.csv", "--label", "ill"], "other.csv, line 2: ill is 'perhaps'; expected one of the classes no, yes."),
        (["hole.csv", "--label", "ill"], "hole.csv, line 2: dose is missing"),
        (["narrow.csv"], "narrow.csv has no column 'dose'"),
        (["new.csv", "--features", "age,dose"], "expected neither --features nor another --label"),
        (["new.csv", "--label", "dose"], "expected neither --features nor another --label"),
        (["new.csv", "--label", "ill", "-o", "x.bin"], "x.bin; expected a name that ends in .safetensors or .pt."),
        (["new.csv", "-o", "nowhere/x.safetensors"], "the folder nowhere does not exist"),
        (["new.csv", "-o", "x.pt"], "x.pt could not say how rows are prepared"),
    ],
)
def test_mistakes_are_told_in_a_line_and_nothing_is_written(words, reason, run, folder, tmp_path):
    before = set(tmp_path.iterdir())
    code, out, err = run(folder, *words)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("selffl: ")
    assert reason in err
    assert set(tmp_path.iterdir()) == before


def test_a_folder_without_a_run_and_a_file_that_is_there_are_refused(run, folder, tmp_path):
    code, _, err = run(tmp_path, "new.csv", "--label", "ill")
    assert (code, len(err.splitlines())) == (2, 1)
    (tmp_path / "newcomer.safetensors").write_text("mine", encoding="utf-8")
    code, _, err = run(folder, "new.csv", "--label", "ill")
    assert (code, "newcomer.safetensors is already there" in err) == (2, True)
    assert (tmp_path / "newcomer.safetensors").read_text(encoding="utf-8") == "mine"
