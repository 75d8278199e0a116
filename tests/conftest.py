"""What tests of several folders share."""

import functools
import gc
import importlib.util
import os
import re
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import typer
from _pytest.doctest import DoctestModule
from rich.console import Console

from selffl import algorithm, cli
from selffl.algorithms import auto_closing
from selffl.algorithms.self_fl_auto import SelfFLAuto

FEW_STEPS = 5
CONTRIBUTING = Path(__file__).parent.parent / "CONTRIBUTING.md"


def pytest_collection_modifyitems(config, items):
    """Leave out what has just been run, and do not trace slow tests.

    `make coverage` has run the quick tests of the files in SELFFL_COVERED.  Slow tests would take half as long again:
    quick ones cover what they run.
    """
    covered = {config.rootpath / name for name in os.environ.get("SELFFL_COVERED", "").split()}
    done = [item for item in items if item.path in covered and not item.get_closest_marker("slow")]
    if done:
        config.hook.pytest_deselected(items=done)
        left_out = set(done)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker("no_cover")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Tests have no doctests: to look for some takes as long as to collect the tests themselves."""
    found = yield
    return [each for each in found if not isinstance(each, DoctestModule)]


def pytest_collection_finish():
    """What was imported stays: the garbage collector need not look at it again, which takes a thirtieth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def worked_file(tmp_path, monkeypatch):
    """A function that imports the Python file below a heading of CONTRIBUTING.md under a name."""

    def load(heading, name):
        text = CONTRIBUTING.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        path = tmp_path / f"{name}.py"
        path.write_text(re.search(r"^```python\n(.*?)^```$", text, re.M | re.S)[1], encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def short():
    """A function that makes a method by its name, with a few steps: Algorithm 2 takes 2,000 where it may."""
    few = {
        "num_local_steps": 5,
        "initial_steps": 5,
        "max_local_steps": 10,
        "max_convergence_steps": 20,
        "first_passes": 2,
        "fine_tune_epochs": 1,
    }

    def make(name):
        known = {field.name for field in fields(algorithm(name))}
        return algorithm(name, **{option: number for option, number in few.items() if option in known})

    return make


@pytest.fixture(autouse=True)
def one_core(monkeypatch):
    """Comparisons train in the process of the test unless it asks for more: another spends four seconds on imports."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)


@pytest.fixture(scope="session")
def few_closing_steps():
    """What has clients train for a few steps, not for four visits, and cut their rows once, when training is over."""

    @contextmanager
    def patched():
        closing_steps = SelfFLAuto.closing_steps

        def few(method, task, num_rounds):
            return closing_steps(method, task, num_rounds).clamp(max=FEW_STEPS)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SelfFLAuto, "closing_steps", few)
            patch.setattr(auto_closing, "NUM_SPLITS", 1)
            yield

    return patched


WHOLE_CLOSING = SelfFLAuto.closing_steps, auto_closing.NUM_SPLITS


@pytest.fixture
def whole_closing(monkeypatch):
    """Closing rounds and visits as long as they are, for one test of a file where they are short for others."""
    monkeypatch.setattr(SelfFLAuto, "closing_steps", WHOLE_CLOSING[0])
    monkeypatch.setattr(auto_closing, "NUM_SPLITS", WHOLE_CLOSING[1])


@pytest.fixture(scope="module", autouse=True)
def short_closing(few_closing_steps):
    """Once training is over clients train for a few steps: it would be most of a short run.

    Where it is looked at how long they train, a fixture of the same name leaves it as it is.  Over Flower clients may
    be processes of their own, which know nothing of this.
    """
    with nullcontext() if importlib.util.find_spec("flwr") else few_closing_steps():
        yield


@pytest.fixture
def no_small_models(monkeypatch):
    """Linear models of few coefficients close as all others do, by halves of rows."""
    monkeypatch.setattr("selffl.algorithms.posterior_mode.MOST_COEFFICIENTS", 0)


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk():
    """Files are open where they would be waited for, and no more: it matters to who loses power, which no test does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(scope="session", autouse=True)
def seeds_of_the_processor_alone():
    """`torch.manual_seed` notes who called, for devices that may come: 0.7 ms.  Numbers on a CPU are the same."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_tree_of_commands():
    """The commands are put together once: each call of the command line would take a twentieth of a second for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture
def command_line(monkeypatch, capfd, tmp_path):
    """A function that runs the command line here, in an empty folder: its exit code, output and messages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.console, "out", Console(width=200))
    monkeypatch.setattr(cli.console, "err", Console(width=200, stderr=True))

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["selffl", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        printed = capfd.readouterr()
        return stopped.value.code, printed.out, printed.err

    return call
