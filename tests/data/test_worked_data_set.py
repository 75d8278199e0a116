"""The data set of CONTRIBUTING.md loads by its name, makes itself again, and trains."""

import re
import tomllib
from pathlib import Path

import pytest

import selffl
from selffl.data import DATA_SETS, load
from selffl.data.dataset import DESCRIPTIONS

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture
def data_set(worked_file, monkeypatch):
    said = re.search(r"^```toml\n(\[wine\]\n.*?)^```$", CONTRIBUTING.read_text(encoding="utf-8"), re.M | re.S)[1]
    monkeypatch.setitem(DESCRIPTIONS, "wine", tomllib.loads(said)["wine"])
    entry = worked_file("Adding a data set", "wine").DATA_SET
    monkeypatch.setitem(DATA_SETS, entry.name, entry)
    return entry


def test_it_loads_by_its_name_and_makes_itself_again(data_set):
    fed = load("wine", seed=2, validation_fraction=0.1)
    assert (fed.num_clients, fed.num_classes, int(fed.num_examples.sum())) == (data_set.clients, 3, 178)
    assert load(**fed.source).fingerprint() == fed.fingerprint() != load("wine").fingerprint()


def test_its_run_is_reopened_by_its_name(data_set, tmp_path):
    run = selffl.train("softmax", load("wine"), "fedavg", rounds=20, participation=1.0, out=tmp_path / "run")
    assert run.summary["data"] == "wine"
    assert run.summary["weighted_accuracy"] > 0.8
    assert selffl.load(tmp_path / "run").personal_model(0).weight.shape == (3, 13)


def test_the_command_line_knows_it(data_set, command_line):
    code, out, _ = command_line("data", "list")
    assert code == 0
    assert "wine" in out
