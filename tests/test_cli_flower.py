"""`selffl flower`: what lies on a client's disk, what is taken out of it, and how a run goes on."""

import json
import os
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import selffl
from selffl import cli
from selffl.algorithms import algorithm
from selffl.data import load
from selffl.engines.flower.memory import ClientMemory, Start
from selffl.runs.folder import RunFolder
from selffl.runs.recipe import Recipe
from selffl.state.checkpoint import load_tensors, save_tensors
from selffl.training.flat import FlatModel

needs_flower = pytest.mark.skipif(
    find_spec("flwr") is None, reason="flwr is not installed: pip install 'selffl[flower]'"
)
FLWR = "selffl.cli.flower._flwr"


@pytest.fixture
def run(command_line):
    """A function that runs the command here, in an empty folder."""
    return partial(command_line, "flower")


def mistake(found, *parts):
    code, out, err = found
    assert code == 2, (out, err)
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("selffl: ")
    for part in parts:
        assert part in err


def module(number=0):
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def remember(folder, client, experiment="first", last=4, model=None):
    """What a client leaves after ``last`` rounds, and after an evaluation of round ``model``."""
    memory = ClientMemory(folder, experiment, client, algorithm("self-fl").newcomer(torch.zeros(1, 23)), "run")
    if last:
        memory.keep(last, Start(memory.newcomer, 0), memory.newcomer)
    if model:
        flat = FlatModel(module(model))
        memory.path.parent.mkdir(parents=True, exist_ok=True)
        about = {"experiment": experiment, "client": client, "round": model}
        save_tensors(memory.model_path, flat.parts(flat.params), about)
    return memory


@pytest.fixture
def memory(tmp_path):
    """A node's folder: one client of two experiments, one without a model yet, one that was never drawn."""
    folder = tmp_path / "memory"
    remember(folder, "anna", last=4, model=3)
    remember(folder, "anna", "second", last=9, model=8)
    remember(folder, "berta", last=2)
    remember(folder, "[red]carl[/]", "../third", last=None, model=5)
    return folder


# ---------------------------------------------------------------------------------------------------------------- list


def test_a_folder_is_listed(run, memory):
    code, out, err = run("list", memory)
    assert (code, err) == (0, "")
    head, *rows = [line.split() for line in out.splitlines()]
    assert " ".join(head) == "experiment client last round model of round size"
    assert sorted(row[:4] for row in rows) == [
        ["../third", "[red]carl[/]", "–", "5"],
        ["first", "anna", "4", "3"],
        ["first", "berta", "2", "–"],
        ["second", "anna", "9", "8"],
    ]
    assert {row[-1] for row in rows} == {"KiB"}


def test_a_folder_is_listed_as_json(run, memory):
    code, out, err = run("list", memory, "--json")
    assert (code, err) == (0, "")
    found = {(row["experiment"], row["client"]): row for row in json.loads(out)}
    assert len(found) == 4
    own = ClientMemory(memory, "first", "anna", None)
    assert found["first", "anna"] == {
        "experiment": "first", "client": "anna", "round": 4, "model_of_round": 3, "problem": None,
        "bytes": own.path.stat().st_size + own.model_path.stat().st_size,
    }  # fmt: skip
    assert found["../third", "[red]carl[/]"]["round"] is None
    assert found["first", "berta"]["model_of_round"] is None


def test_an_empty_folder_is_an_empty_list(run, tmp_path):
    (tmp_path / "memory").mkdir()
    assert run("list", "memory", "--json") == (0, "[]\n", "")
    assert run("list", "memory")[0] == 0


def test_a_damaged_file_is_named(run, memory):
    own = ClientMemory(memory, "first", "berta", None)
    own.path.write_bytes(own.path.read_bytes()[:-1])
    code, out, _ = run("list", memory, "--json")
    row = next(row for row in json.loads(out) if row["client"] == "berta")
    assert code == 0
    assert (row["experiment"], row["round"]) == ("first", None)
    assert f"{own.path} is damaged" in row["problem"]
    code, out, _ = run("list", memory)
    assert code == 0
    assert "damaged" in out
    assert "anna" in out


@pytest.mark.parametrize("command", [["list"], ["export", "--client", "anna", "--out", "a.pt"]])
def test_a_folder_that_is_not_there_is_refused(command, run, tmp_path):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    for place in ("nowhere", "file"):
        mistake(run(command[0], place, *command[1:]), f"{place} is not a folder; expected a node's memory-dir.")


# -------------------------------------------------------------------------------------------------------------- export


def exported(path):
    return torch.load(path, weights_only=True) if path.suffix == ".pt" else load_file(path)


@pytest.mark.parametrize("ending", [".safetensors", ".pt"])
def test_a_model_is_taken_out_and_fits_the_module(ending, run, memory, tmp_path):
    target = tmp_path / f"anna{ending}"
    code, out, err = run("export", memory, "--client", "anna", "--experiment", "second", "--out", target)
    assert (code, err) == (0, "")
    assert out == f"Client anna as of round 8 of second: {target}\n"
    other = module(1)
    other.load_state_dict(exported(target))
    assert all(map(torch.equal, other.parameters(), module(8).parameters()))
    if ending == ".safetensors":
        with safe_open(target, framework="pt") as file:
            assert file.metadata() == {"format": "pt", "experiment": "second", "client": "anna", "round": "8"}
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [target.name]


def test_the_experiment_need_not_be_named_if_there_is_one(run, memory, tmp_path):
    code, out, _ = run("export", memory, "--client", "[red]carl[/]", "--out", "carl.pt")
    assert (code, out) == (0, "Client [red]carl[/] as of round 5 of ../third: carl.pt\n")
    assert exported(tmp_path / "carl.pt").keys() == module().state_dict().keys()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--client", "dora"], "remembers nothing of client dora; `selffl flower list` says what is there."),
        (["--client", "anna"], "client anna took part in first, second; expected one. Give --experiment."),
        (["--client", "berta"], "client berta has no personal model of experiment first yet"),
        (["--client", "anna", "--experiment", "fourth"], "client anna has no personal model of experiment fourth yet"),
        (["--client", "anna", "--out", "anna.bin"], "expected a name that ends in .safetensors or .pt."),
        (["--client", "anna", "--out", "anna"], "expected a name that ends in .safetensors or .pt."),
        (["--client", "anna", "--out", "nowhere/anna.pt"], "the folder nowhere does not exist"),
        (["--client", "anna", "--out", "folder.pt"], "folder.pt is a folder"),
        ([], "--client"),
    ],
)
def test_what_cannot_be_taken_out_is_refused(words, reason, run, memory, tmp_path):
    (tmp_path / "folder.pt").mkdir()
    mistake(run("export", memory, "--out", "x.pt", *words), reason)
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_a_damaged_model_is_refused(run, memory, tmp_path):
    path = ClientMemory(memory, "second", "anna", None).model_path
    path.write_bytes(path.read_bytes()[:-1])
    words = ("--client", "anna", "--experiment", "second", "--out", "x.pt")
    mistake(run("export", memory, *words), f"{path} is damaged")
    assert not (tmp_path / "x.pt").exists()


@needs_flower
@pytest.mark.parametrize("ending", [".safetensors", ".pt"])
def test_what_is_taken_out_has_the_bits_of_the_personal_model(ending, run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "engines" / "flower"))
    from wire import Small

    from selffl.flower import personal_model

    small = Small(tmp_path)
    small.serve(rounds=1)
    run("export", small.memory, "--client", "2", "--out", f"2{ending}")
    expected = personal_model(small.module(), small.memory, "first", 2).state_dict()
    found = exported(tmp_path / f"2{ending}")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)
    assert not found["weight"].equal(small.module().weight)


# -------------------------------------------------------------------------------------------------------------- resume

CONFIG = Recipe(
    algorithm="ditto", options={}, rounds=20, participation=0.25, learning_rate=1e-05,
    batch_size=7, seed=5, device="remote", dtype="float32", chunk_size=1, gradients="auto", evaluate_every=10,
    evaluate_on="test", evaluate_train=False, fine_tune=(), checkpoint_every=1, data="remote", source=None,
    fingerprint="", model=None, loss=None, has_own_method=False,
)  # fmt: skip
DECLARED = {
    "out": '"here"', "experiment": '"whatever"', "rounds": 3, "participation": 1.0, "learning-rate": 0.1,
    "batch-size": 10, "seed": 0, "evaluate-every": 1, "quorum": 0.5, "mine": 1,
}  # fmt: skip


@pytest.fixture
def stopped(tmp_path):
    """The folder of a run that was stopped in round 13."""
    path = tmp_path / "a run"
    path.mkdir()
    RunFolder(path).started(CONFIG, selffl.runs.folder.Records())
    about = {"round": 12, "seconds": 1.0, "experiment": "käthe's", "run": "a", "cohort_seed": 5}
    save_tensors(path / "checkpoint.safetensors", {"params": torch.zeros(3)}, about)
    return path


@pytest.fixture
def app(tmp_path):
    """A function that writes a Flower app whose run configuration has these keys."""

    def written(declared=DECLARED):
        path = tmp_path / "app"
        path.mkdir(exist_ok=True)
        lines = ["[tool.flwr.app]", 'publisher = "us"', "[tool.flwr.app.config]"]
        lines += [f"{name} = {value}" for name, value in declared.items()]
        (path / "pyproject.toml").write_text("\n".join(lines), encoding="utf-8")
        return path

    return written


@pytest.fixture
def flwr(tmp_path, monkeypatch):
    """A stand-in for Flower's command: a function that gives the words of its last call, none if there was none."""
    script, words = tmp_path / "bin" / "flwr", tmp_path / "words"
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > '{words}'\nexit ${{CODE:-0}}\n", encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setattr(FLWR, lambda: str(script))
    return lambda: words.read_text(encoding="utf-8").splitlines() if words.exists() else None


def settings(words):
    """The run configuration of a command line, by name."""
    places = [place for place, word in enumerate(words) if word == "--run-config"]
    found = dict(words[place + 1].split("=", 1) for place in places)
    assert len(found) == len(places)
    return {name: json.loads(value) for name, value in found.items()}


GIVEN = {
    "experiment": "käthe's", "rounds": 20, "participation": 0.25, "learning-rate": 1e-05, "batch-size": 7, "seed": 5,
    "evaluate-every": 10,
}  # fmt: skip


def test_a_run_goes_on_with_what_it_was_made_with(run, stopped, app, flwr):
    place = app()
    code, out, err = run("resume", stopped, "--app", place)
    assert (code, out) == (0, "")
    assert err == "Experiment käthe's: from round 13 to 20.\n"
    assert flwr()[:2] == ["run", str(place)]
    assert settings(flwr()) == {**GIVEN, "out": str(stopped)}
    assert len(flwr()) == 2 + 2 * 8


def test_a_run_goes_on_elsewhere_and_for_longer(run, stopped, app, flwr):
    words = ("--app", app(), "--connection", "sites", "--rounds", 30, "--stream")
    code, _, err = run("resume", stopped.name, *words)  # from the folder it lies in
    assert code == 0
    assert "from round 13 to 30." in err
    assert flwr()[2:4] == ["sites", "--stream"]
    assert settings(flwr()) == {**GIVEN, "rounds": 30, "out": str(stopped)}


@pytest.mark.parametrize("declared", [["rounds", "out"], ["seed", "experiment"], []])
def test_only_what_the_app_declares_is_set(declared, run, stopped, app, flwr):
    code, _, err = run("resume", stopped, "--app", app({name: DECLARED[name] for name in declared}))
    assert code == 0
    assert settings(flwr()).keys() == set(declared)
    told = f"The app does not let `out` be set; its own has to be {stopped}."
    assert (told in err) == ("out" not in declared)


def test_the_app_is_where_one_stands(run, stopped, app, flwr, monkeypatch):
    monkeypatch.chdir(app())
    assert run("resume", stopped)[0] == 0
    assert flwr()[:2] == ["run", "."]


def test_an_error_of_flowers_is_said(run, stopped, app, flwr, monkeypatch):
    monkeypatch.setenv("CODE", "3")
    code, out, err = run("resume", stopped, "--app", app())
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"selffl: `flwr run` ended with 3; the run in {stopped} is as it was.")


def test_a_run_of_train_is_refused(run, app, flwr, tmp_path):
    federation = load("digits", num_clients=3, seed=2)
    selffl.train(nn.Linear(64, 10), federation, "fedavg", rounds=1, participation=1.0, out=tmp_path / "train")
    mistake(run("resume", "train", "--app", app()), "train is no run over Flower; go on with it by `selffl run")
    assert flwr() is None


def test_a_run_that_is_over_is_refused(run, stopped, app, flwr):
    tensors, about = load_tensors(stopped / "checkpoint.safetensors")
    save_tensors(stopped / "checkpoint.safetensors", tensors, {**about, "round": 20})
    (stopped / "summary.json").write_text('{"status": "finished"}', encoding="utf-8")
    save_tensors(stopped / "model.safetensors", tensors, {"experiment": about["experiment"], "round": 20})
    mistake(run("resume", stopped, "--app", app()), "has done 20 of 20 rounds; give more by --rounds to go on.")
    mistake(run("resume", stopped, "--app", app(), "--rounds", "5"), "has done 20 of 5 rounds")
    assert flwr() is None
    assert run("resume", stopped, "--app", app(), "--rounds", "21")[0] == 0
    assert settings(flwr())["rounds"] == 21


def test_a_run_stopped_before_its_last_evaluation_goes_on(run, stopped, app, flwr):
    """All rounds are done, and neither the evaluation nor the global model is there."""
    tensors, about = load_tensors(stopped / "checkpoint.safetensors")
    save_tensors(stopped / "checkpoint.safetensors", tensors, {**about, "round": 20})
    (stopped / "summary.json").write_text('{"status": "running"}', encoding="utf-8")
    assert run("resume", stopped, "--app", app())[0] == 0
    assert settings(flwr())["rounds"] == 20


def test_a_method_that_was_chosen_by_name_is_chosen_again(run, stopped, app, flwr):
    """The app says another one today."""
    assert run("resume", stopped, "--app", app({**DECLARED, "algorithm": '"self-fl"'}))[0] == 0
    assert settings(flwr())["algorithm"] == "ditto"


def test_a_method_of_ones_own_has_no_name(run, stopped, app, flwr):
    RunFolder(stopped).started(replace(CONFIG, has_own_method=True), selffl.runs.folder.Records())
    assert run("resume", stopped, "--app", app({**DECLARED, "algorithm": '"self-fl"'}))[0] == 0
    assert "algorithm" not in settings(flwr())


def test_further_settings_come_last(run, stopped, app, flwr):
    code, _, _ = run("resume", stopped, "--app", app(), "--run-config", "quorum=0.9", "-c", 'mine="a b"')
    assert code == 0
    assert flwr()[-4:] == ["--run-config", "quorum=0.9", "--run-config", 'mine="a b"']


def test_folders_that_are_no_runs_are_refused(run, stopped, app, flwr, tmp_path):
    mistake(run("resume", "nowhere", "--app", app()), "nowhere holds no config.json")
    (stopped / "checkpoint.safetensors").unlink()
    mistake(run("resume", stopped, "--app", app()), "checkpoint.safetensors does not exist")
    assert flwr() is None


def test_a_folder_that_is_no_app_is_refused(run, stopped, app, flwr, tmp_path):
    mistake(run("resume", stopped), ". holds no pyproject.toml; expected the folder of a Flower app. Give it by --app.")
    path = app() / "pyproject.toml"
    for text in ("not toml [", "[project]\nname = 'x'\n", "tool = 3\n", "[tool.flwr]\napp = 3\n"):
        path.write_text(text, encoding="utf-8")
        mistake(run("resume", stopped, "--app", path.parent), f"{path} is no Flower app's")
    assert flwr() is None


def test_flowers_command_is_looked_for_beside_this_python_and_then_on_the_path(run, stopped, app, flwr, monkeypatch):
    monkeypatch.undo()
    monkeypatch.chdir(stopped.parent)
    nowhere = stopped.parent / "empty"
    nowhere.mkdir()
    monkeypatch.setattr(sys, "executable", str(nowhere / "python"))
    monkeypatch.setenv("PATH", str(nowhere))
    expected = "the command flwr is not here; expected Flower. Install it: pip install 'selffl[flower]'."
    mistake(run("resume", stopped, "--app", app()), expected)
    found = cli.flower._flwr
    monkeypatch.setenv("PATH", os.pathsep.join([str(nowhere), str(stopped.parent / "bin")]))
    assert found() == str(stopped.parent / "bin" / "flwr")
    beside = nowhere / "flwr"
    beside.write_text("#!/bin/sh\n", encoding="utf-8")
    beside.chmod(0o755)
    monkeypatch.setenv("PATH", str(stopped.parent / "bin"))
    assert found() == str(beside)


@needs_flower
def test_the_command_line_is_one_that_flower_and_the_server_understand(run, app, flwr, tmp_path, monkeypatch):
    """What Flower makes of it takes the run to its end, whatever the app says today."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "engines" / "flower"))
    from flwr.common.config import parse_config_args
    from wire import Small

    small = Small(tmp_path / "it's a federation")
    small.serve(rounds=1, learning_rate=1e-05, experiment="käthe's = #1")
    assert run("resume", small.out, "--app", app(), "--rounds", "2")[0] == 0
    config = parse_config_args([word for before, word in pairwise(flwr()) if before == "--run-config"])
    other = {"rounds": 9, "learning_rate": 0.5, "seed": 77, "experiment": "other", "out": tmp_path / "other"}
    small.serve(config=config, **other)
    assert selffl.runs.folder.read_records(small.out).summary["rounds"] == 2
    assert not (tmp_path / "other").exists()
