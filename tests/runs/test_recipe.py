"""A run is described once: what `train`, files, studies, the command line and Flower take are the recipe's fields."""

import inspect
import json
import shutil
import subprocess
import sys
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest
import torch

import selffl
from selffl.algorithms.records import tensors_of
from selffl.cli import names
from selffl.errors import CheckpointError, ConfigError
from selffl.runs.folder import read_config
from selffl.runs.recipe import FLOWER_SETTINGS, SETTINGS, STUDY_SETTINGS, Recipe, check_settings
from selffl.studies.own import KEYS
from selffl.studies.problems import DIGITS, Problem
from selffl.training.flat import FlatModel

# Keywords of `train` that are no settings: what a run is made of, where it is written and who watches it.
PARTS = ("model", "federation", "algorithm", "model_options", "loss", "start", "metrics")
WATCHERS = ("out", "keep_rows", "on_round", "tracker")


def recipe(**changed):
    return Recipe(**{"algorithm": "fedavg", "options": {"num_local_steps": 7}} | changed)


def sentences(thing, heading):
    """Name and text of each entry below a heading of a docstring."""
    found, name = {}, None
    lines = inspect.cleandoc(thing.__doc__).split(f"{heading}:\n")[1].splitlines()
    for line in lines:
        if line and not line.startswith(" "):
            break
        if line.startswith("    ") and not line.startswith("     "):
            name, _, text = line.strip().partition(": ")
            found[name] = [text]
        elif line:
            found[name].append(line.strip())
    return {name: " ".join(parts) for name, parts in found.items()}


# ----------------------------------------------------------------------------------------------- who takes the fields


def test_settings_are_the_keywords_of_train_with_the_same_defaults_and_types():
    keywords = inspect.signature(selffl.train).parameters
    assert set(keywords) == {*SETTINGS, *PARTS, *WATCHERS}
    for field in fields(Recipe):
        if field.name in SETTINGS:
            assert keywords[field.name].default == field.default
            assert keywords[field.name].annotation == field.type


def test_every_setting_has_a_sentence_in_train_and_every_fact_one_in_the_recipe():
    known, arguments = sentences(Recipe, "Attributes"), sentences(selffl.train, "Args")
    assert list(known) == [field.name for field in fields(Recipe) if field.name not in SETTINGS]
    assert [name for name in arguments if name in SETTINGS] == list(SETTINGS)
    assert all(text.endswith(".") for text in (known | arguments).values())


def test_a_study_has_the_settings_that_a_recipe_says():
    assert set(STUDY_SETTINGS) <= set(KEYS)
    assert set(STUDY_SETTINGS) <= {field.name for field in fields(Problem)}
    defaults = {field.name: field.default for field in fields(Recipe)}
    assert {name: getattr(Problem("a", "b", "c", "d"), name) for name in STUDY_SETTINGS} == {
        name: defaults[name] for name in STUDY_SETTINGS
    }
    assert DIGITS.settings == {
        "rounds": 60, "participation": 0.25, "learning_rate": 0.03, "batch_size": 10, "optimiser": "sgd",
        "batch_norm": None, "weight_decay": 0.0, "max_gradient_norm": None, "learning_rate_schedule": "constant",
        "keep_optimiser": False, "augmentation": "none", "robust": "none",
        "clip": None, "max_weight": None, "noise_multiplier": 0.0,
        "row_clip": None, "row_noise_multiplier": 0.0,
    }  # fmt: skip


def test_completion_offers_them_without_loading_torch():
    class Context:
        params = {"algorithm": "ditto"}  # noqa: RUF012 (nobody changes it)

    offered = names.setting(Context, "")
    assert {f"{name}=" for name in STUDY_SETTINGS} <= set(offered)
    words = "import sys, selffl.runs.recipe, selffl.cli.names; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], check=False).returncode == 0


def test_a_server_over_flower_takes_those_that_a_recipe_says():
    pytest.importorskip("flwr", reason="flwr is not installed: pip install 'selffl[flower]'")
    from selffl.engines.flower.settings import Network
    from selffl.runs.flower import KINDS, server_app

    keywords = inspect.signature(server_app).parameters
    settings = {field.name: field for field in fields(Recipe) if field.name in FLOWER_SETTINGS}
    for name, field in {**settings, **{field.name: field for field in fields(Network)}}.items():
        assert keywords[name].default == field.default
        assert keywords[name].annotation == field.type
        assert name in KINDS
    assert KINDS["rounds"] is KINDS["evaluate_every"] is int
    with pytest.raises(ConfigError, match="unknown keyword of server_app 'round'; did you mean 'rounds'"):
        server_app(torch.nn.Linear(2, 2), "fedavg", range(4), round=3)
    assert (KINDS["quorum"], KINDS["gain"], KINDS["optimiser"], KINDS["shortfall"]) == (float, bool, str, str)


# A recipe with one more setting, before anything else has read its fields.
WIDER = """
from __future__ import annotations

from dataclasses import dataclass, field
import torch
from selffl.runs import recipe

@dataclass(frozen=True, kw_only=True)
class Wider(recipe.Recipe):
    patience: int = field(default=3, metadata=recipe.FLOWER)

recipe.Recipe = Wider
recipe._OF_SETTINGS["patience"] = Wider.__dataclass_fields__["patience"]
recipe.SETTINGS += ("patience",)
recipe.FLOWER_SETTINGS += ("patience",)

import inspect
from selffl.runs import flower

assert inspect.signature(flower.server_app).parameters["patience"].default == 3
assert flower.KINDS["patience"] is int
found = []
flower.Server = lambda *parts: found.append(parts[3]) or type("Nobody", (), {"out": None, "run": print})()
app = flower.server_app(torch.nn.Linear(2, 2), "fedavg", range(4), patience=5)
app = flower.server_app(torch.nn.Linear(2, 2), "fedavg", range(4))
given = flower.override({"patience": 3}, {"patience": 7})
assert ([each.patience for each in found], given) == ([5, 3], {"patience": 7})
"""


def test_a_new_setting_of_the_recipe_reaches_a_server_over_flower_without_being_named_again():
    pytest.importorskip("flwr", reason="flwr is not installed: pip install 'selffl[flower]'")
    ended = subprocess.run([sys.executable, "-c", WIDER], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


# ------------------------------------------------------------------------------------------------------- JSON, checks


def test_a_recipe_comes_back_from_json():
    made = recipe(
        rounds=30,
        learning_rate=1,
        dtype=torch.float64,
        optimiser=selffl.algorithms.Adam(beta2=0.9),
        fine_tune=[20, 5, 20],
        evaluate_every=0,
        gain=True,
        source={"name": "digits", "seed": 3},
        own_metrics={"f1": True},
        metrics=("accuracy", "f1"),
    )
    text = json.dumps(made.to_json())
    assert Recipe.from_json(json.loads(text)) == made
    assert (made.dtype, made.fine_tune, made.learning_rate) == ("float64", (5, 20), 1.0)


def test_what_is_left_out_follows_from_the_rounds():
    assert (recipe(rounds=200).evaluate_every, recipe(rounds=200).checkpoint_every) == (10, 10)
    assert (recipe(rounds=7).evaluate_every, recipe(rounds=7, evaluate_every=0).checkpoint_every) == (1, 7)
    longer = replace(recipe(rounds=40), rounds=400)
    assert longer.evaluate_every == 2  # as it began
    assert [n for n in range(1, 8) if recipe(rounds=7, evaluate_every=3).is_evaluated(n)] == [3, 6, 7]
    assert [n for n in range(1, 8) if recipe(rounds=7, evaluate_every=0).is_evaluated(n)] == [7]
    assert not any(recipe(rounds=7, checkpoint_every=0).is_checkpointed(n) for n in range(1, 8))


def test_every_setting_has_a_default_that_works_and_facts_have_none_that_is_made_up():
    assert set(check_settings({})) == set(SETTINGS)
    required = [f.name for f in fields(Recipe) if f.default is MISSING and f.default_factory is MISSING]
    assert required == ["algorithm", "options"]


# -------------------------------------------------------------------------------------------------- folders of before

# Written by commit 14df91e: four clients with some digits each, stopped in round 5 of 8, with a checkpoint of round 4.
FOLDERS = Path(__file__).parent / "folders" / "14df91e"
# How far a run that was whole all along may be from it: sums are taken in another order since then, and the folders are
# of another machine.  self-fl-auto is another method since then, with memories of its own: its folders go on by it.
WITHIN = {"self-fl": 1e-6, "ditto": 1e-6, "self-fl-auto": None}


@pytest.fixture
def folder(tmp_path, request):
    target = tmp_path / request.param
    target.mkdir()
    for path in (FOLDERS / request.param).iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def without_time(rows):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def models_of(run):
    return torch.stack([FlatModel(run.personal_model(client)).params for client in run.federation.clients])


@pytest.mark.parametrize("folder", WITHIN, indirect=True)
def test_a_folder_of_before_goes_on(folder, tmp_path):
    asked = read_config(folder)
    assert (asked.algorithm, asked.rounds, asked.engine) == (folder.name, 8, "cohort")
    before = selffl.load(folder)
    assert before._state.round_number == 4
    engine = before._session.engine
    last = engine.conclude(engine.advance(before._state, 4))
    run = selffl.resume(folder)
    ours, theirs = tensors_of(run._state), tensors_of(last)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].nan_to_num(), theirs[name].nan_to_num()) for name in theirs)
    whole = selffl.train("softmax", run.federation, folder.name, out=tmp_path / "whole", **asked.settings())
    assert [row["round"] for row in run.history] == list(range(1, 9))
    if WITHIN[folder.name] is not None:
        torch.testing.assert_close(models_of(run), models_of(whole), rtol=0, atol=WITHIN[folder.name])
        assert run.summary["weighted_accuracy"] == whole.summary["weighted_accuracy"]
        assert run.summary["gradient_evaluations"] == whole.summary["gradient_evaluations"]
    assert [path.name for path in sorted(folder.iterdir())] == [
        path.name for path in sorted((tmp_path / "whole").iterdir())
    ]


@pytest.mark.parametrize("folder", WITHIN, indirect=True)
def test_a_folder_of_before_goes_on_one_client_at_a_time(folder, tmp_path):
    together = selffl.resume(shutil.copytree(folder, tmp_path / "together"))
    path = folder / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["config"]["engine"] = "serial"
    path.write_text(json.dumps(content), encoding="utf-8")
    run = selffl.resume(folder)
    assert (run.config.engine, together.config.engine) == ("serial", "cohort")
    torch.testing.assert_close(models_of(run), models_of(together), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("folder", ["self-fl"], indirect=True)
def test_a_folder_of_before_ends_with_the_same_records(folder):
    run = selffl.resume(folder)
    whole = selffl.train("softmax", run.federation, "self-fl", **run.config.settings())

    def near(row):
        """The row, but for rounding: the folder is of another machine."""
        return {name: pytest.approx(value, rel=1e-5) if type(value) is float else value for name, value in row.items()}

    for ours, theirs in zip(run.clients, whole.clients, strict=True):
        assert ours == near(theirs)
    for ours, theirs in zip(without_time(run.history), without_time(whole.history), strict=True):
        known = theirs | {"bytes_sent": None}  # its first rounds were not counted
        assert ours == near({name: known[name] for name in ours})  # earlier rounds have fewer columns
    expected = whole.summary | {"bytes_sent": None}
    assert without_time([run.summary]) == [near(row) for row in without_time([expected])]


@pytest.mark.parametrize("folder", ["ditto"], indirect=True)
def test_a_folder_of_before_with_a_setting_that_cannot_be_is_one_clear_line(folder):
    path = folder / "config.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"participation": 0.5', '"participation": 5'), "utf-8")
    with pytest.raises(CheckpointError, match="participation is 5") as caught:
        selffl.resume(folder)
    assert "\n" not in str(caught.value)
