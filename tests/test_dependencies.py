"""What has to be installed for what: training draws nothing, and a site needs no plotting package."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import selffl

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SITE = (ROOT / "deploy" / "requirements-site.txt").read_text(encoding="utf-8").splitlines()
NEEDED_BY_SITES = {line for line in SITE if not line.startswith("#")}
LEFT_OUT = ("matplotlib", "jinja2", "PIL")
COMMAND_LINE = ("typer", "click", "rich")  # which Flower brings along

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is not to be imported", name=name)

sys.meta_path.insert(0, Blocked())
"""
TRAINING = """
import selffl
from selffl.data import load

fed = load("digits", num_clients=4)
few = selffl.algorithm("self-fl-auto", num_local_steps=2)
run = selffl.train("softmax", fed, few, rounds=2, out=sys.argv[1], gain=True)
run.export(sys.argv[1] + "/models.safetensors")
assert selffl.resume(sys.argv[1], rounds=3).gains()
selffl.PersonalModels(sys.argv[1] + "/models.safetensors").model(0)
selffl.posterior([1.0, 2.0], [0.5, 0.5], 0.1)
"""
FLOWER = """
from selffl.flower import client_app, server_app
from torch import nn

client_app(nn.Linear(2, 2), lambda client: None)
server_app(nn.Linear(2, 2), "fedavg", ["a", "b"])
"""


def run_without(blocked, program, *arguments):
    code = BLOCKED.format(blocked=set(blocked)) + program
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.slow
def test_training_imports_neither_plotting_nor_the_command_line(tmp_path):
    found = run_without(LEFT_OUT + COMMAND_LINE, TRAINING, tmp_path / "run")
    assert found.returncode == 0, found.stderr


def test_what_is_blocked_would_be_noticed():
    found = run_without(LEFT_OUT, "import selffl.reports.figures")
    assert "matplotlib is not to be imported" in found.stderr


def test_a_flower_app_imports_no_plotting():
    pytest.importorskip("flwr", reason="flwr is not installed: pip install 'selffl[flower]'")
    found = run_without(LEFT_OUT, FLOWER)
    assert found.returncode == 0, found.stderr


def test_a_site_s_requirements_are_selffl_s_own_without_what_is_left_out():
    flower = PROJECT["optional-dependencies"]["flower"]
    assert {*PROJECT["dependencies"], *flower} >= NEEDED_BY_SITES > set(flower)
    without = {line.partition(">")[0] for line in {*PROJECT["dependencies"]} - NEEDED_BY_SITES}
    assert without == {"matplotlib", "jinja2", "pillow", "typer", "rich"}


def test_a_command_that_draws_says_what_to_install(command_line, monkeypatch, tmp_path):
    fed = selffl.data.load("digits", num_clients=3)
    selffl.train("softmax", fed, rounds=1, out=tmp_path / "run")
    for name in [name for name in sys.modules if name.startswith("selffl.reports")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    code, _, err = command_line("report", tmp_path / "run")
    assert code == 2
    assert err.strip() == (
        "selffl: this command draws with jinja2, which is not installed. Install it: pip install jinja2."
    )
