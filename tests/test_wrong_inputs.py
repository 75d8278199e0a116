"""Wrong inputs, through the command line and through Python: one line that helps, the right code, nothing damaged."""

import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import selffl
from selffl import CheckpointError, ConfigError, DataError, cli
from selffl.data import load
from selffl.data.text import Embeddings, encode
from selffl.models import build
from selffl.reports import runner
from selffl.studies import arms
from selffl.studies.own import read_study

ROWS = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
LABELS = (ROWS.sum(1) > 0).astype(int)
CLIENTS = [number % 4 for number in range(40)]

STUDY = """
import numpy as np
import selffl
from torch import nn

def federation(seed):
    x = np.random.default_rng(seed).normal(size=(40, 3)).astype(np.float32)
    return selffl.Federation.from_arrays(x, (x.sum(1) > 0).astype(int), [k % 4 for k in range(40)], 0.25, seed)

def broken(seed):
    return 1 / 0

def nothing(seed):
    pass

def three(seed):
    return selffl.Federation.from_arrays(np.ones((6, 3), dtype=np.float32), [0, 1, 2, 0, 1, 2], list("ababab"))

def untested(seed):
    return selffl.Federation.from_arrays(np.ones((4, 3), dtype=np.float32), [0, 1, 0, 1], list("abcd"))

def model(federation):
    return nn.Linear(3, 2)

def too_wide(federation):
    return nn.Linear(4, 2)

def no_model(federation):
    return "softmax"
"""
GOOD_STUDY = {"data": "study.py:federation", "model": "study.py:model", "rounds": 2, "participation": 1.0}
STUDIES = {  # study files that are wrong, by what is wrong
    "good": {},
    "key": {"learning-rate": 0.1},
    "type": {"rounds": "ten"},
    "zero": {"rounds": 0},
    "share": {"participation": 2},
    "rate": {"learning_rate": -1},
    "method": {"algorithm": "self-fl-exct"},
    "optimiser": {"optimiser": "adm"},
    "file": {"data": "studdy.py:federation"},
    "function": {"data": "study.py:federatoin"},
    "raises": {"data": "study.py:broken"},
    "none": {"data": "study.py:nothing"},
    "untested": {"data": "study.py:untested"},
    "wide": {"model": "study.py:too_wide"},
    "few": {"data": "study.py:three"},
    "text": {"model": "study.py:no_model"},
    "loss": {"loss": "cross_entrop"},
    "place": {"data": "study.py:"},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with files and runs, good and damaged; no test may change it."""
    place = tmp_path_factory.mktemp("world")
    (place / "good.csv").write_text("client,estimate,variance\na,1,1\nb,2,1\n", encoding="utf-8")
    tables = {
        "one.csv": "client,estimate,variance\na,1,1\n",
        "nan.csv": "client,estimate,variance\na,nan,1\nb,2,1\n",
        "words.csv": "client,estimate,variance\na,one,1\nb,2,1\n",
        "columns.csv": "client,estimate\na,1\n",
        "cut.csv": "client,estimate,variance\na,1,1\nb,2",
        "empty.csv": "",
        "rows.csv": "site,x,y\na,1,0\na,2,1\nb,3,0\nb,4,1\n",
        "hole.csv": "site,x,y\na,1,0\nb,,1\na,3,1\nb,4,0\n",
        "lonely.csv": "site,x,y\na,1,0\na,2,1\n",
        "semicolons.csv": "site;x;y\na;1;0\nb,2,1\n",
    }
    for name, text in tables.items():
        (place / name).write_text(text, encoding="utf-8")
    (place / "latin.csv").write_bytes("site,x,y\nZürich,1,0\nb,2,1\n".encode("latin-1"))
    (place / "empty").mkdir()
    for name, wrong in STUDIES.items():
        folder = place / f"study-{name}"
        folder.mkdir()
        (folder / "study.py").write_text(STUDY, encoding="utf-8")
        lines = [f"{key} = {json.dumps(value)}" for key, value in (GOOD_STUDY | wrong).items()]
        (folder / "study.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (place / "study-syntax").mkdir()
    (place / "study-syntax" / "study.toml").write_text("rounds = = 3\n", encoding="utf-8")
    fed = selffl.Federation.from_arrays(ROWS, LABELS, CLIENTS, 0.25)
    selffl.train(nn.Linear(3, 2), fed, "fedavg", rounds=3, participation=1.0, out=place / "run")
    load("digits")
    selffl.train("softmax", load("digits", test_fraction=0.3), "ditto", rounds=1, out=place / "digits")
    for name, file, keep in (
        ("cut-checkpoint", "checkpoint.safetensors", -7),
        ("cut-config", "config.json", 40),
        ("cut-clients", "clients.csv", 0),
        ("cut-module", "module.pt", 30),
        ("cut-rows", "federation.safetensors", 100),
    ):
        shutil.copytree(place / "run", place / name)
        content = (place / name / file).read_bytes()
        (place / name / file).write_bytes(content[:keep] if keep else b"other,columns\n1,2\n")
    shutil.copytree(place / "digits", place / "cut-digits")
    (place / "cut-digits" / "history.csv").write_text("round,clients\n", encoding="utf-8")
    return place


@pytest.fixture(autouse=True)
def in_the_world(world, monkeypatch):
    """Every test is there, and leaves it as it was."""
    monkeypatch.chdir(world)
    monkeypatch.setattr(cli.console, "out", Console(width=200))
    monkeypatch.setattr(cli.console, "err", Console(width=200, stderr=True))
    before = contents(world)
    yield
    assert contents(world) == before


def contents(folder):
    """Every file and folder with what is in it; what Python compiles for itself does not count."""
    return {
        path: path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


def command(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["selffl", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    printed = capsys.readouterr()
    return stopped.value.code, printed.out, printed.err


# ----------------------------------------------------------------------------------------------------- the command line

COMMANDS = {
    # words and options that are none
    "a command": ("rum", "unknown command of `selffl` 'rum'", "did you mean 'run'"),
    "a command of a group": ("data lst", "unknown command of `selffl data` 'lst'", "did you mean 'list'"),
    "an option": ("run digits --algoritm ditto", "'--algoritm'", "did you mean '--algorithm'", "selffl run --help"),
    "an option of all": ("--verion", "'--verion'", "did you mean '--version'"),
    "an option without its value": ("run digits --out", "--out"),
    "no study": ("run", "STUDY"),
    "a word too many": ("run digits mnist", "mnist"),
    "a study": ("run minst", "unknown study to train 'minst'", "did you mean 'mnist'"),
    "a study of the paper": ("paper run limit", "unknown study 'limit'", "did you mean 'limits'"),
    "a method": ("run digits --algorithm self_fl", "unknown algorithm 'self_fl'", "did you mean 'self-fl'"),
    "a method of several": ("compare digits --algorithms self-fl,dito", "'dito'", "did you mean 'ditto'"),
    "a method twice": ("compare digits --algorithms ditto,ditto", "each once"),
    "no method": ("compare digits --algorithms ,", "--algorithms is ','"),
    "a data set": ("data show mnits", "unknown data set 'mnits'", "did you mean 'mnist'"),
    "a data set to check": ("data check digit", "did you mean 'digits'"),
    "a data set to fetch": ("data fetch mnist2", "did you mean 'mnist'"),
    "a data set without a home": ("data fetch synthetic", "synthetic"),
    "a form": ("posterior good.csv --form exat", "--form is 'exat'", "'exact', 'paper'"),
    # numbers
    "no rounds": ("run digits --rounds 0", "rounds is 0", "1 or more"),
    "rounds below none": ("run digits --rounds -1", "rounds is -1", "1 or more"),
    "rounds in words": ("run digits --rounds ten", "--rounds is 'ten'", "integer"),
    "rounds of a comparison": ("compare digits --rounds 0", "--rounds is '0'", "1"),
    "a seed": ("run digits --seed -3", "seed is -3", "0 or more"),
    "a seed in words": ("run digits --seed one", "--seed is 'one'"),
    "no seeds": ("compare digits --seeds 0", "--seeds is '0'", "1"),
    "no processes": ("compare digits --processes 0", "--processes is '0'", "1"),
    "seeds of the paper": ("paper run limits --seeds none", "--seeds is 'none'"),
    # settings
    "a setting without a value": ("run digits --set penalty", "--set is 'penalty'", "KEY=VALUE"),
    "a setting without a key": ("run digits --set =3", "--set is '=3'", "KEY=VALUE"),
    "a key": ("run digits -a self-fl --set max_local_step=3", "unknown key in --set", "did you mean 'max_local_steps'"),
    "a key of another method": ("run digits -a fedavg --set penalty=1", "unknown key in --set for fedavg 'penalty'"),
    "a value": ("run digits -a self-fl --set max_local_steps=many", "max_local_steps is 'many'"),
    "a choice": ("run digits -a self-fl --set form=rough", "form is 'rough'", "'exact'"),
    "nobody takes part": ("run digits --set participation=0", "participation is 0", "above 0"),
    "more than everybody takes part": ("run digits --set participation=2", "participation is 2", "at most 1"),
    "participation is no number": ("run digits --set participation=NaN", "participation is nan", "above 0"),
    "a rate below none": ("run digits --set learning_rate=-1", "learning_rate is -1", "above 0"),
    "a batch of none": ("run digits --set batch_size=0", "batch_size is 0", "1 or more"),
    "a penalty": ("run digits -a ditto --set penalty=-1", "penalty is -1", "0 or more"),
    # devices
    "a device": ("run digits --device warp", "device is 'warp'", "'cpu', 'cuda'"),
    "a device of a comparison": ("compare digits --device gpu", "device is 'gpu'", "'cpu', 'cuda'"),
    "a device of the paper": ("paper run mnist --device cuba", "device is 'cuba'"),
    # methods that do not fit
    "a method of heads": ("run digits -a fedrep --out new", "layer"),
    "a method of clusters": ("run digits -a self-fl-cluster --out new", "names no clusters"),
    # folders and files
    "out is a file": ("run digits --out good.csv", "good.csv is a file", "expected a folder"),
    "out is in a file": ("run digits --out good.csv/run", "good.csv is a file"),
    "out holds a run": ("run digits --out digits", "digits already holds a run", "--resume"),
    "out cannot be written": ("run digits --rounds 1 --out /proc/nowhere/run", "/proc/nowhere"),
    "a comparison into a file": ("compare digits --out good.csv", "good.csv is a file"),
    "a comparison that cannot be written": ("compare digits --rounds 1 --out /proc/nowhere", "/proc/nowhere"),
    "a demonstration into a file": ("demo --out good.csv", "good.csv is a file"),
    "a study of the paper into a file": ("paper run limits --out good.csv/x", "good.csv is a file"),
    "a report on nothing": ("report nowhere", "nowhere is not a folder"),
    "a report on an empty folder": ("report empty", "empty holds no record.json"),
    "a page on a file": ("paper page good.csv", "good.csv"),
    # runs that go on
    "another method": ("run digits --out digits --resume -a fedavg", "algorithm is 'fedavg'", "begun with 'ditto'"),
    "another seed": ("run digits --out digits --resume --seed 5", "seed is 5", "leave it out"),
    "another setting": ("run digits --out digits --resume --set penalty=9", "penalty is 9"),
    "another study": ("run mnist --out digits --resume", "data is 'mnist'", "'digits'"),
    "fewer rounds": ("run study-good --out run --resume --rounds 2", "rounds is 2", "round 3"),
    "a checkpoint cut short": ("run study-good --out cut-checkpoint --resume --rounds 5", "checkpoint", "damaged"),
    "a configuration cut short": ("run study-good --out cut-config --resume", "config.json is not"),
    "a history cut short": ("run digits --out cut-digits --resume --rounds 3", "history.csv lacks rounds"),
    "records of something else": ("run study-good --out cut-clients --resume --rounds 5", "are damaged"),
    # tables of estimates
    "a table that is not there": ("posterior nowhere.csv", "nowhere.csv does not exist"),
    "a table that is a folder": ("posterior empty", "empty is a folder"),
    "an empty table": ("posterior empty.csv", "empty.csv is empty"),
    "a table without a column": ("posterior columns.csv", "no column variance"),
    "a table with words": ("posterior words.csv", "words.csv, line 2: estimate is 'one'"),
    "a table with NaN": ("posterior nan.csv", "nan.csv, line 2: estimate is nan"),
    "a table cut short": ("posterior cut.csv", "cut.csv, line 3: 2 field(s)"),
    "a table of one": ("posterior one.csv", "at least two clients"),
    "a variance below none": ("posterior good.csv --inter-variance -1", "inter_variance is -1.0"),
    "a level": ("posterior good.csv --level 2", "level is 2.0"),
    "a plot of no kind": ("posterior good.csv --plot p.xyz", ".png, .svg or .pdf"),
    "a table into a folder that is not there": ("posterior good.csv --out no/o.csv", "the folder no does not exist"),
    # new studies
    "a folder in use": ("init study-good", "study-good is not empty", "expected a new folder"),
    "a folder that is a file": ("init good.csv", "good.csv is a file"),
    "a name that is taken": ("init mnist", "comes with the package", "another name"),
    "rows that are not there": ("init new --csv nowhere.csv", "nowhere.csv"),
    "rows without a client": ("init new --csv rows.csv --client ste --label y", "did you mean 'site'", "--client"),
    "rows without a label": (
        "init new --csv rows.csv --client site --label z",
        "rows.csv has no column 'z'",
        "--label",
    ),
    "client and label the same": ("init new --csv rows.csv --client y --label y", "expected a column for each"),
    "rows with a hole": ("init new --csv hole.csv --client site --label y", "hole.csv, line 3: x is missing"),
    "rows of one client": ("init new --csv lonely.csv --client site --label y", "at least two clients"),
    "rows with two separators": ("init new --csv semicolons.csv --client site --label y", "semicolons.csv, line 3"),
    "rows of another encoding": ("init new --csv latin.csv --client site --label y", "not text in UTF-8"),
    "an empty file of rows": ("init new --csv empty.csv", "empty.csv is empty"),
    # studies of one's own
    "a study that is not there": ("run nowhere.toml", "nowhere.toml does not exist", "selffl init"),
    "a folder without a study": ("run empty", "empty/study.toml does not exist", "selffl init empty"),
    "a study that is no TOML": ("run study-syntax", "study.toml is no TOML", "line 1"),
    "a key of a study": ("run study-key", "unknown key in", "did you mean 'learning_rate'"),
    "a type in a study": ("run study-type", "rounds is", "'ten'", "whole number"),
    "no rounds in a study": ("compare study-zero", "rounds is", "is 0"),
    "a share in a study": ("run study-share", "participation is", "at most 1"),
    "a rate in a study": ("run study-rate", "learning_rate is", "above 0"),
    "a method in a study": ("run study-method", "did you mean 'self-fl-exact'"),
    "an optimiser in a study": ("run study-optimiser", "did you mean 'adam'"),
    "a tracker": ("run digits --tracker tensorbord --out new", "did you mean 'tensorboard'"),
    "a loss in a study": ("run study-loss", "did you mean 'cross_entropy'"),
    "a Python file of a study": ("run study-file", "studdy.py does not exist"),
    "a function of a study": ("run study-function", "did you mean 'federation'"),
    "no function": ("run study-place", "expected FILE.py:FUNCTION"),
    "a function that raises": ("run study-raises", "study.py:broken failed", "ZeroDivisionError", "line 11"),
    "a function that raises, compared": ("compare study-raises", "ZeroDivisionError", "line 11"),
    "a function that returns nothing": ("run study-none", "study.py:nothing returned nothing", "selffl.Federation"),
    "a model that is none": ("run study-text", "study.py:no_model returned a str", "torch.nn.Module"),
    "nothing to test on": ("compare study-untested --out new", "no client of study-untested has rows to test on"),
    "a model for other rows": ("run study-wide --out new", "cannot take a row of shape (3,)"),
    "a model for fewer classes": ("run study-few --out new", "has the label 2, and Linear has 2 outputs"),
    "an option of a study's method": ("run study-good --set penaltie=1", "unknown key in --set"),
    # exports of what is not there
    "a memory that is not there": ("flower list nowhere", "nowhere"),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_a_wrong_command(monkeypatch, capsys, case):
    words, *parts = COMMANDS[case]
    code, out, err = command(monkeypatch, capsys, *words.split())
    assert code == 2, (out, err)
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith("selffl: ")
    for part in parts:
        assert part in err


# --------------------------------------------------------------------------------------------------------------- Python


def federation(x=ROWS, y=LABELS, client=CLIENTS, test_fraction=0.25, **options):
    return selffl.Federation.from_arrays(x, y, client, test_fraction, **options)


def train(model=None, fed=None, algorithm="fedavg", **options):
    chosen = nn.Linear(3, 2) if model is None else model
    return selffl.train(chosen, federation() if fed is None else fed, algorithm, **{"rounds": 1} | options)


class Words(nn.Module):
    """Sums of vectors, whose gradients are sparse."""

    def __init__(self):
        super().__init__()
        self.vectors, self.out = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.vectors(x).mean(-2))


def with_nan(values):
    changed = np.array(values, dtype=np.float32)
    changed[7] = math.nan
    return changed


VECTORS = Embeddings.of(["a", "b"], np.eye(2))

CALLS = {
    "x with NaN": (lambda: federation(x=with_nan(ROWS)), DataError, "x holds NaN or infinity, first in row 7"),
    "y with NaN": (lambda: federation(y=with_nan(LABELS)), DataError, "y holds NaN"),
    "client with NaN": (lambda: federation(client=with_nan(CLIENTS)), DataError, "client column holds NaN"),
    "x of words": (lambda: federation(x=[["a"]] * 40), DataError, "x is of type"),
    "y of words": (lambda: federation(y=["a"] * 40), DataError, "y is of type"),
    "x is None": (lambda: federation(x=None), DataError, "x is of type"),
    "client is None": (lambda: federation(client=None), DataError, "one id per row"),
    "lengths differ": (lambda: federation(y=LABELS[:-1]), DataError, "x has 40 rows, y 39"),
    "no rows": (lambda: federation(ROWS[:0], LABELS[:0], []), DataError, "no rows"),
    "a class below 0": (lambda: federation(y=LABELS - 1), DataError, "classes from 0 up"),
    "test_fraction 1": (lambda: federation(test_fraction=1.0), ConfigError, "test_fraction is 1.0"),
    "test_fraction in words": (lambda: federation(test_fraction="half"), ConfigError, "test_fraction is 'half'"),
    "seed below 0": (lambda: federation(seed=-1), ConfigError, "seed is -1"),
    "clusters of one client": (lambda: federation().with_clusters([0]), DataError, "each of 4 clients"),
    "no such folder": (lambda: selffl.Federation.from_folder("nowhere"), DataError, "nowhere is no folder"),
    "an empty folder": (lambda: selffl.Federation.from_folder("empty"), DataError, "empty holds no files"),
    "no such federation": (lambda: selffl.Federation.load("nowhere"), DataError, "nowhere is not there"),
    "a data set": (lambda: load("mnits"), ConfigError, "did you mean 'mnist'"),
    "an option of a data set": (lambda: load("digits", num_client=3), ConfigError, "did you mean 'num_clients'"),
    "a number of a data set": (lambda: load("digits", num_clients="ten"), ConfigError, "num_clients is 'ten'"),
    "a model by name": (lambda: build("softmx", 3, 2), ConfigError, "did you mean 'softmax'"),
    "an option of a model": (lambda: build("lstm", 5, 2, hiden=3), ConfigError, "did you mean 'hidden'"),
    "texts are None": (lambda: encode(None, VECTORS), DataError, "texts is None"),
    "a text is None": (lambda: encode(["a", None], VECTORS), DataError, "row 1 of texts is None"),
    "a text alone": (lambda: encode("a b", VECTORS), DataError, "expected a list of texts"),
    "rounds 0": (lambda: train(rounds=0), ConfigError, "rounds is 0; expected a whole number, 1 or more"),
    "rounds -1": (lambda: train(rounds=-1), ConfigError, "rounds is -1"),
    "rounds in words": (lambda: train(rounds="ten"), ConfigError, "rounds is 'ten'"),
    "rounds 2.5": (lambda: train(rounds=2.5), ConfigError, "rounds is 2.5"),
    "participation 0": (lambda: train(participation=0), ConfigError, "participation is 0"),
    "participation 2": (lambda: train(participation=2), ConfigError, "participation is 2"),
    "participation NaN": (lambda: train(participation=math.nan), ConfigError, "participation is nan"),
    "learning_rate -1": (lambda: train(learning_rate=-1), ConfigError, "learning_rate is -1"),
    "learning_rate in words": (lambda: train(learning_rate="fast"), ConfigError, "learning_rate is 'fast'"),
    "batch_size 0": (lambda: train(batch_size=0), ConfigError, "batch_size is 0"),
    "a seed": (lambda: train(seed=-1), ConfigError, "seed is -1"),
    "a method": (lambda: train(algorithm="self_fl"), ConfigError, "did you mean 'self-fl'"),
    "a method that is none": (lambda: train(algorithm=3), ConfigError, "algorithm is 3"),
    "an option": (lambda: selffl.algorithm("ditto", penalti=1), ConfigError, "did you mean 'penalty'"),
    "an option's value": (lambda: selffl.algorithm("ditto", penalty=-1), ConfigError, "penalty is -1"),
    "an option's type": (lambda: selffl.algorithm("pfedme", mixing="a"), ConfigError, "mixing is 'a'"),
    "no clusters": (lambda: train(algorithm="self-fl-cluster"), ConfigError, "names no clusters"),
    "a rate beyond float32": (lambda: train(learning_rate=1e300), ConfigError, "learning_rate is 1e+300"),
    "a rate of many digits": (lambda: train(learning_rate=10**400), ConfigError, "learning_rate is a whole number of"),
    "a rate beyond int64": (lambda: train(learning_rate=10**39), ConfigError, "and at most 3.40282e+38"),
    "a share of many digits": (lambda: train(participation=10**400), ConfigError, "participation is a whole number of"),
    "a batch beyond int64": (lambda: train(batch_size=10**30), ConfigError, "1 or more, and 2.14748e+09 or less"),
    "a seed beyond int64": (lambda: train(seed=10**30), ConfigError, "below 2^63"),
    "gradients by number": (lambda: train(gradients=3), ConfigError, "unknown gradients 3; expected one of: auto"),
    "a lazy module": (lambda: train(model=nn.LazyLinear(2)), ConfigError, "without a shape (weight)"),
    "a module without values": (lambda: train(model=nn.Linear(3, 2, device="meta")), ConfigError, "on the meta device"),
    "a complex module": (lambda: train(model=nn.Linear(3, 2, dtype=torch.complex64)), ConfigError, "complex parameter"),
    "a device": (lambda: train(device="warp"), ConfigError, "device is 'warp'"),
    "no device": (lambda: train(device=None), ConfigError, "device is None"),
    "a model that is none": (lambda: train(model=3), ConfigError, "model is a int"),
    "a model for other rows": (lambda: train(model=nn.Linear(4, 2)), DataError, "cannot take a row of shape (3,)"),
    "a label out of range": (lambda: train(fed=federation(y=LABELS + 3)), DataError, "has the label 3"),
    "batch statistics": (
        lambda: train(model=nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))), ConfigError, "Use GroupNorm",
    ),
    "dropout": (
        lambda: train(model=nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2))), ConfigError, "leaves out 0.5 at random",
    ),
    "sparse gradients": (
        lambda: train(model=Words(), fed=federation(x=(ROWS > 0).astype(int))), ConfigError, "without sparse=True",
    ),
    "nothing to train": (lambda: train(model=nn.Flatten()), ConfigError, "no parameters to train"),
    "rows that are none": (lambda: train(fed=[ROWS, LABELS]), ConfigError, "federation is a list"),
    "a loss that is a class": (lambda: train(loss=nn.CrossEntropyLoss), ConfigError, "CrossEntropyLoss()"),
    "a loss that is a name": (lambda: train(loss="mse"), ConfigError, "loss is 'mse'"),
    "what to evaluate on": (lambda: train(evaluate_on="tset"), ConfigError, "evaluate_on is 'tset'"),
    "no validation rows": (lambda: train(evaluate_on="validation"), ConfigError, "no validation rows"),
    "a way to gradients": (lambda: train(gradients="vmpa"), ConfigError, "did you mean 'vmap'"),
    "fine_tune is a number": (lambda: train(fine_tune=5), ConfigError, "fine_tune is 5"),
    "fine_tune 0": (lambda: train(fine_tune=(0,)), ConfigError, "fine_tune is 0"),
    "a start that does not fit": (lambda: train(start=nn.Linear(4, 4)), ConfigError, "'weight' has shape (4, 4)"),
    "a start that is none": (lambda: train(start=3), ConfigError, "start is a int"),
    "a start that is not there": (lambda: train(start="nowhere"), CheckpointError, "nowhere"),
    "a type of numbers": (lambda: train(dtype=torch.int64), ConfigError, "dtype is torch.int64"),
    "a type by name": (lambda: train(dtype="float7"), ConfigError, "dtype is 'float7'"),
    "on_round is no function": (lambda: train(on_round=3), ConfigError, "on_round is 3"),
    "options of a module": (lambda: train(model_options={"hidden": 3}), ConfigError, "model_options"),
    "out is a file": (lambda: train(out="good.csv"), ConfigError, "good.csv is a file"),
    "out is a number": (lambda: train(out=3), ConfigError, "out is 3"),
    "out holds a run": (lambda: train(out="run"), ConfigError, "run already holds a run"),
    "save onto a run": (lambda: selffl.load("run").save("run"), ConfigError, "already holds a run"),
    "save onto a device": (lambda: train().save("/dev/null"), ConfigError, "/dev/null is a file"),
    "a client": (lambda: selffl.load("run").personal_model(99), ConfigError, "unknown client 99"),
    "a metric": (
        lambda: selffl.load("run").evaluate().of_clients("acuracy", "personal"), ConfigError, "did you mean 'accuracy'",
    ),
    "no run to load": (lambda: selffl.load("nowhere"), CheckpointError, "nowhere holds no config.json"),
    "no run to resume": (lambda: selffl.resume("empty"), CheckpointError, "empty holds no config.json"),
    "a checkpoint cut short": (lambda: selffl.load("cut-checkpoint"), CheckpointError, "damaged"),
    "a configuration cut short": (lambda: selffl.load("cut-config"), CheckpointError, "config.json is not"),
    "records of something else": (lambda: selffl.load("cut-clients"), CheckpointError, "are damaged"),
    "a module cut short": (lambda: selffl.load("cut-module"), CheckpointError, "module.pt cannot be read"),
    "rows cut short": (lambda: selffl.load("cut-rows"), DataError, "federation.safetensors"),
    "resume with other rows": (
        lambda: selffl.resume("run", federation=federation(x=ROWS + 1)), ConfigError, "not the one that the run",
    ),
    "resume with fewer rounds": (lambda: selffl.resume("run", rounds=1), ConfigError, "rounds is 1"),
    "resume with another model": (
        lambda: selffl.resume("run", model=nn.Linear(3, 3)), CheckpointError, "expected torch.float32 (12,)",
    ),
    "a variance below 0": (lambda: selffl.posterior([1, 2], [-1, 1], 1), DataError, "intra_variance is -1"),
    "an estimate that is NaN": (lambda: selffl.posterior([1, math.nan], [1, 1], 1), DataError, "NaN"),
    "variances too few": (lambda: selffl.posterior([1, 2, 3], [1, 1], 1), DataError, "intra_variance has shape (2,)"),
    "estimates of words": (lambda: selffl.posterior(["a", "b"], [1, 1], 1), DataError, "not an array of numbers"),
    "no estimates": (lambda: selffl.posterior([], [], 1), DataError, "at least one client"),
    "a form": (lambda: selffl.posterior([1, 2], [1, 1], 1, form="exat"), ConfigError, "form is 'exat'"),
    "one client to estimate from": (lambda: selffl.estimate_inter_variance([1], [1]), DataError, "two clients"),
    "a way to estimate": (
        lambda: selffl.estimate_inter_variance([1, 2], [1, 1], "rml"), ConfigError, "did you mean 'reml'",
    ),
    "a study's key": (lambda: read_study(Path("study-key")), ConfigError, "did you mean 'learning_rate'"),
    "a study's Python": (lambda: read_study(Path("study-raises")).federation(0), ConfigError, "ZeroDivisionError"),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_a_wrong_call(case):
    call, kind, part = CALLS[case]
    with pytest.raises(kind) as raised:
        call()
    message = str(raised.value)
    assert type(raised.value) is kind
    assert part in message
    assert "\n" not in message


def test_there_are_enough_of_them():
    assert len(COMMANDS) >= 60
    assert len(CALLS) >= 60


# -------------------------------------------------------------------------------------------------------- interruptions


def interrupted(*args, **options):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("words", "place", "again"),
    [
        ("compare digits -a fedavg,local --seeds 1 --rounds 1 --processes 1 --out new", (arms, "run_arm"),
         "selffl compare digits --algorithms fedavg,local --seeds 1 --rounds 1 --out new"),
        ("demo --quick --out new", (runner, "run_studies"), "selffl demo --quick --out new"),
        ("paper run limits --out new", (runner, "run_studies"), "selffl paper run limits --out new"),
    ],
)  # fmt: skip
def test_an_interruption_says_how_to_go_on(world, monkeypatch, capsys, words, place, again):
    monkeypatch.setattr(*place, interrupted)
    code, out, err = command(monkeypatch, capsys, *words.split())
    assert code == 130
    assert out == ""
    assert err.splitlines()[0].endswith(f"To go on: {again}")
    assert err.splitlines()[1:] == ["selffl: stopped. What was finished is kept."]
    shutil.rmtree(world / "new", ignore_errors=True)
