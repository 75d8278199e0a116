"""Files of earlier versions are read and go on; those of later ones are refused in one line.

``folders/COMMIT`` holds what that commit wrote.  859c796: three clients of a table, one of them called ``=north``, with
a module that was pickled; personal models of it, and the folder of a study.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import selffl
from selffl.data.preparation import Preparation
from selffl.errors import SelfFLError
from selffl.reports.collect import collect
from selffl.reports.page import render
from selffl.reports.record import load_studies
from selffl.runs import folder as files

CORPUS = Path(__file__).parent / "folders" / "859c796"


@pytest.fixture
def corpus(tmp_path):
    shutil.copytree(CORPUS, tmp_path / "corpus")
    return tmp_path / "corpus"


def test_a_run_with_a_pickled_module_goes_on(corpus):
    run = selffl.load(corpus / "table", trusted=True)
    assert sorted(row["client"] for row in run.clients) == ["-7", "=north", "south"]
    assert run.summary["status"] == "finished"
    longer = selffl.resume(corpus / "table", rounds=4, trusted=True)
    assert [row["round"] for row in longer.history] == [1, 2, 3, 4]
    assert sorted({row["client"] for row in files.read_records(corpus / "table").participation}) == [
        "-7", "=north", "south",
    ]  # fmt: skip


def test_personal_models_answer_as_they_did(corpus):
    run, people = selffl.load(corpus / "table", trusted=True), selffl.PersonalModels(corpus / "people.safetensors")
    for client in people.clients:
        theirs, ours = people.model(client).state_dict(), run.personal_model(client).state_dict()
        assert all(torch.equal(theirs[name], value) for name, value in ours.items())
    assert sorted(people.clients) == ["-7", "=north", "south"]


def test_a_study_and_a_run_make_a_report(corpus):
    text = render(collect([corpus / "study", corpus / "table"]))
    assert "A made-up study" in text
    assert "=north" in text
    (found,) = load_studies(corpus / "study")
    assert found[1].claims[0]["verdict"] == "holds"


def of_a_later_version(path):
    """Change the version that a file says it has."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            header, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        save_file(tensors, path, header | {"version": "9"})
        return
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["version"] == 1
    path.write_text(json.dumps(content | {"version": 9}), encoding="utf-8")


@pytest.mark.parametrize(
    ("file", "read"),
    [
        ("table/config.json", lambda place: selffl.load(place / "table", trusted=True)),
        ("table/checkpoint.safetensors", lambda place: selffl.load(place / "table", trusted=True)),
        ("table/federation.safetensors", lambda place: selffl.load(place / "table", trusted=True)),
        ("table/preparation.json", lambda place: Preparation.load(place / "table" / "preparation.json")),
        ("people.safetensors", lambda place: selffl.PersonalModels(place / "people.safetensors")),
        ("study/record.json", lambda place: collect([place / "study"])),
    ],
)
def test_a_later_version_is_refused_in_one_line(corpus, file, read):
    read(corpus)
    of_a_later_version(corpus / file)
    with pytest.raises(SelfFLError, match=r"version .?9.*; expected ") as raised:
        read(corpus)
    assert Path(file).name in str(raised.value)
    assert "\n" not in str(raised.value)
