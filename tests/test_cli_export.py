"""`selffl export`: what it writes, lists and refuses."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import selffl
from selffl.adapters import lora
from selffl.state.files import read_csv


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run over four wards, whose ids are text, with a method that knows variances."""
    rng = np.random.default_rng(0)
    client = np.repeat(["ward 01", "ward 02", "[red]ward[/]", "7"], 15)
    fed = selffl.Federation.from_arrays(rng.normal(size=(60, 3)), rng.integers(0, 2, 60), client, 0.2)
    path = tmp_path_factory.mktemp("runs") / "wards"
    selffl.train("softmax", fed, "self-fl-exact", rounds=4, participation=0.5, out=path)
    return path


@pytest.fixture
def run(command_line):
    """A function that runs the command here, in an empty folder."""
    return partial(command_line, "export")


def same(state, module):
    expected = module.state_dict()
    assert state.keys() == expected.keys()
    return all(torch.equal(state[name], expected[name]) for name in expected)


def test_one_model_is_a_plain_state_dict(run, folder, tmp_path):
    code, out, err = run(folder, "--client", "[red]ward[/]", "-o", "one.safetensors")
    assert (code, err) == (0, "")
    size = (tmp_path / "one.safetensors").stat().st_size / 1024
    assert out == f"The model of client [red]ward[/]: {tmp_path / 'one.safetensors'} ({size:,.0f} KiB)\n"
    module = nn.Linear(3, 2)
    module.load_state_dict(load_file(tmp_path / "one.safetensors"))
    assert same(module.state_dict(), selffl.load(folder).personal_model("[red]ward[/]"))
    code, _, _ = run(folder, "--client", "7", "-o", "seven.pt")
    assert code == 0
    assert same(torch.load(tmp_path / "seven.pt", weights_only=True), selffl.load(folder).personal_model("7"))


def test_all_models_lie_in_one_file_from_which_one_is_taken(run, folder, tmp_path):
    code, out, err = run(folder, "--all")
    assert code == 0
    assert out.startswith(f"Models of 4 clients: {tmp_path / 'personal.safetensors'} (")
    assert "selffl export personal.safetensors --client 7 --out one.safetensors" in err
    models = selffl.PersonalModels(tmp_path / "personal.safetensors")
    trained = selffl.load(folder)
    for client in models.clients:
        assert same(models.state_dict(client), trained.personal_model(client))
    code, out, _ = run("personal.safetensors", "--client", "ward 02", "-o", "two.safetensors")
    assert code == 0
    assert same(load_file(tmp_path / "two.safetensors"), trained.personal_model("ward 02"))


def test_some_models_shorter_and_what_was_written_as_json(run, folder, tmp_path):
    words = ("--client", "ward 02", "--client", "7", "--client", "ward 02", "--precision", "float16", "--json")
    code, out, err = run(folder, *words, "-o", "some.safetensors")
    assert (code, err) == (0, "")
    path = tmp_path / "some.safetensors"
    assert json.loads(out) == {
        "file": "some.safetensors", "bytes": path.stat().st_size, "clients": ["ward 02", "7"], "plain": False
    }  # fmt: skip
    models = selffl.PersonalModels(path)
    assert models.clients == ["ward 02", "7"]
    assert models.info["precision"] == "float16"
    assert models.info["max_error"] > 0


def test_clients_are_listed(run, folder, tmp_path):
    code, out, err = run(folder, "--list", "--json")
    assert (code, err) == (0, "")
    listed = json.loads(out)
    recorded = read_csv(folder / "clients.csv", as_text=("client",))
    assert [row["client"] for row in listed] == [row["client"] for row in recorded]
    assert [row["intra_variance"] for row in listed] == [row["intra_variance"] for row in recorded]
    code, out, _ = run(folder, "--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["client", "7", "[red]ward[/]", "ward", "ward"]
    run(folder, "--all", "-o", "all.safetensors")
    code, out, _ = run("all.safetensors", "--list", "--json")
    assert code == 0
    took_part = {row["client"]: row["rounds"] > 0 for row in recorded}
    assert {row["client"]: row["bytes"] > 0 for row in json.loads(out)} == took_part
    assert list(tmp_path.glob("*.safetensors")) == [tmp_path / "all.safetensors"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "whose models? Expected --client ID, once or several times, or --all; --list names them."),
        (["--all", "--client", "7"], "whose models? Expected --client ID"),
        (["--client", "ward 2", "-o", "x.pt"], "unknown client 'ward 2'; did you mean 'ward 02'?"),
        (["--client", "7", "-o", "x.bin"], "x.bin; expected a name that ends in .safetensors or .pt."),
        (["--client", "7", "-o", "nowhere/x.pt"], "the folder nowhere does not exist"),
        (["--all", "-o", "."], "is a folder; expected the name of a file to write"),
        (["--client", "7", "--precision", "float16"], "--precision is float16, and one model is written as it is"),
        (["--all", "--precision", "float8"], "float8"),
    ],
)
def test_mistakes_are_told_in_a_line_and_nothing_is_written(words, reason, run, folder, tmp_path):
    code, out, err = run(folder, *words)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("selffl: ")
    assert reason in err
    assert list(tmp_path.iterdir()) == []


def test_sources_that_hold_no_models_are_told_in_a_line(run, folder, tmp_path):
    fed = selffl.load(folder).federation
    selffl.train("softmax", fed, rounds=1, out=tmp_path / "bare", checkpoint_every=0)
    run(folder, "--all")
    whole = (tmp_path / "personal.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-5])
    for words, reason in (
        (["bare", "--all", "-o", "x"], "bare holds records but no models"),
        (["nowhere", "--all", "-o", "x"], "nowhere holds no config.json"),
        (["nowhere", "--client", "7", "-o", "x"], "nowhere holds no config.json"),
        (["nowhere", "--list"], "nowhere holds no config.json"),
        (["cut.safetensors", "--list"], "cut.safetensors is damaged"),
        (["cut.safetensors", "--client", "7", "-o", "x.pt"], "cut.safetensors is damaged"),
        (["personal.safetensors", "--all", "-o", "x.pt"], "already holds the models of 4 clients"),
        (["personal.safetensors", "--client", "7", "-o", "personal.safetensors"], "is the file that is read"),
        ([folder, "--all"], "personal.safetensors is already there"),
    ):
        code, out, err = run(*words)
        assert (code, out, len(err.splitlines())) == (2, "", 1), words
        assert reason in err
    assert (tmp_path / "personal.safetensors").read_bytes() == whole
    assert not list(tmp_path.glob("x*"))


# ---------------------------------------------------------------------------------------------------------- adapters


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A run whose models have adapters, and the module without them."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    rng = np.random.default_rng(0)
    fed = selffl.Federation.from_arrays(rng.normal(size=(60, 3)), rng.integers(0, 2, 60), np.arange(60) % 4, 0.2)
    path = tmp_path_factory.mktemp("runs") / "adapted"
    selffl.train(lora(body, 2), fed, "ditto", rounds=2, participation=1.0, out=path)
    return path, body


def test_a_model_with_adapters_is_merged(run, adapted):
    folder, body = adapted
    assert run(folder, "--client", "2", "--as", "merged", "--trust", "-o", "plain.safetensors")[0] == 0
    body.load_state_dict(load_file("plain.safetensors"))
    model = selffl.load(folder, trusted=True).personal_model(2)
    rows = torch.randn(5, 3)
    torch.testing.assert_close(body(rows), model(rows), rtol=1e-5, atol=1e-6)


def test_a_model_with_adapters_is_a_folder_for_peft(run, adapted):
    code, out, _ = run(adapted[0], "--client", "2", "--as", "peft", "--trust", "-o", "adapter")
    assert code == 0
    assert f"The model of client 2: {Path('adapter').absolute()} (" in out
    assert json.loads(Path("adapter/adapter_config.json").read_text())["target_modules"] == ["0"]
    assert "base_model.model.0.lora_B.weight" in load_file("adapter/adapter_model.safetensors")


def test_only_one_model_of_a_run_with_adapters_has_other_forms(run, adapted, folder):
    code, _, err = run(adapted[0], "--all", "--as", "merged", "--trust")
    assert code == 2
    assert "--as is merged, which is for one client's model of a run; expected RUN and one --client." in err
    code, _, err = run(folder, "--client", "7", "--as", "merged")
    assert code == 2
    assert "Linear has no adapters; expected a module that selffl.adapters.lora has made." in err
