"""What users do wrong, by Python, by the command line and by files: one line that helps, and nothing damaged."""

import json
import math
import shutil
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import selffl
from mistakes import SETTINGS
from selffl import CheckpointError, ConfigError, DataError, Federation, cli
from selffl.data import load
from selffl.data.estimates import read_estimates
from selffl.data.text import Embeddings, encode
from selffl.estimator import SelfFLRegressor
from selffl.models import build
from selffl.reports import runner
from selffl.runs.recipe import STUDY_SETTINGS
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
    raise ValueError("no rows today")

def nothing(seed):
    pass

def numbers(seed):
    return [1, 2]

def seedless():
    return federation(0)

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
STUDIES = {  # what is wrong in a study file
    "good": {},
    "key": {"learning-rate": 0.1},
    "method": {"algorithm": "self-fl-exct"},
    "methods": {"algorithms": "ditto"},
    "twice": {"algorithms": ["ditto", "ditto"]},
    "table": {"options": 1},
    "rows": {"data": "digit"},
    "file": {"data": "studdy.py:federation"},
    "function": {"data": "study.py:federatoin"},
    "raises": {"data": "study.py:broken"},
    "none": {"data": "study.py:nothing"},
    "list": {"data": "study.py:numbers"},
    "seedless": {"data": "study.py:seedless"},
    "untested": {"data": "study.py:untested"},
    "wide": {"model": "study.py:too_wide"},
    "few": {"data": "study.py:three"},
    "text": {"model": "study.py:no_model"},
    "loss": {"loss": "cross_entrop"},
    "place": {"data": "study.py:"},
}
LINES = {  # what is wrong in a study file's last line
    "syntax": "learning_rate = = 3",
    "options-of": "[options.dito]\npenalty = 1",
    "option": "[options.ditto]\npenalti = 1",
    "no-table": "[options]\nditto = 1",
    "data-options": "[data_options]\nnum_clients = 3",
}
PYTHON = {  # what is wrong in the Python of a study
    "import": ("import selffl", "import selffl, nothing_like_this"),
    "grammar": ("def federation(seed):", "def federation(seed:"),
}
TABLES = {  # of estimates, of rows
    "good.csv": "client,estimate,variance\na,1,1\nb,2,1\n",
    "one.csv": "client,estimate,variance\na,1,1\n",
    "nan.csv": "client,estimate,variance\na,nan,1\nb,2,1\n",
    "infinite.csv": "client,estimate,variance\na,1,inf\n",
    "negative.csv": "client,estimate,variance\na,1,-1\nb,1,x\nc,1,1\nd,,1\n",
    "words.csv": "client,estimate,variance\na,one,1\nb,2,1\n",
    "gap.csv": "client,estimate,variance\na,1,1\nb,2,\n",
    "nameless.csv": "client,estimate,variance\n,1,1\n",
    "again.csv": "client,estimate,variance\na,1,1\na,2,1\n",
    "columns.csv": "client,estimate\na,1\n",
    "twice.csv": "client,client,estimate,variance\na,a,1,1\n",
    "headless.csv": "a,1,1\nb,2,1\n",
    "bare.csv": "client,estimate,variance\n",
    "cut.csv": "client,estimate,variance\na,1,1\nb,2",
    "sure.csv": "client,estimate,variance\na,1.3,0\nb,2.5,0\nc,2,1\n",
    "agreed.csv": "client,estimate,variance\na,0,0\nb,0,0\nc,2,1\n",
    "far.csv": "client,estimate,variance\na,1e300,1\nb,2,1\nc,3,1\n",
    "farther.csv": "client,estimate,variance\na,1.7e308,0\nb,0,0\n",
    "farthest.csv": "client,estimate,variance\na,1e300,5e-324\nb,2,5e-324\n",
    "empty.csv": "",
    "rows.csv": "site,x,y\na,1,0\na,2,1\nb,3,0\nb,4,1\n",
    "hole.csv": "site,x,y\na,1,0\nb,,1\na,3,1\nb,4,0\n",
    "lonely.csv": "site,x,y\na,1,0\na,2,1\n",
    "semicolons.csv": "site;x;y\na;1;0\nb,2,1\n",
    "latin.csv": "site,x,y\nZürich,1,0\nb,2,1\n".encode("latin-1"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with files and runs, good and damaged; no test may change it."""
    place = tmp_path_factory.mktemp("world")
    for name, text in TABLES.items():
        (place / name).write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    (place / "empty").mkdir()
    (place / "damaged").mkdir()
    (place / "damaged" / "record.json").write_text('{"version": 1, "id": ', encoding="utf-8")

    def study(name, wrong=None, line="", old="", new=""):
        folder = place / f"study-{name}"
        folder.mkdir()
        (folder / "study.py").write_text(STUDY.replace(old, new, 1), encoding="utf-8")
        lines = [f"{key} = {json.dumps(value)}" for key, value in (GOOD_STUDY | (wrong or {})).items()]
        (folder / "study.toml").write_text("\n".join([*lines, line]) + "\n", encoding="utf-8")

    for name, wrong in STUDIES.items():
        study(name, wrong)
    for name, line in LINES.items():
        study(name, line=line)
    for name, (old, new) in PYTHON.items():
        study(name, old=old, new=new)
    study("modelless")
    file = place / "study-modelless" / "study.toml"
    file.write_text(file.read_text(encoding="utf-8").replace('model = "study.py:model"\n', ""), encoding="utf-8")
    train(rounds=3, participation=1.0, out=place / "run")
    selffl.train("softmax", load("digits", test_fraction=0.3), "ditto", rounds=1, out=place / "digits")
    for name, file, keep in (
        ("cut-checkpoint", "checkpoint.safetensors", -7),
        ("cut-config", "config.json", 40),
        ("cut-clients", "clients.csv", 0),
        ("cut-module", "module.safetensors", 30),
        ("cut-rows", "federation.safetensors", 100),
    ):
        shutil.copytree(place / "run", place / name)
        content = (place / name / file).read_bytes()
        (place / name / file).write_bytes(content[:keep] if keep else b"other,columns\n1,2\n")
    shutil.copytree(place / "digits", place / "cut-digits")
    (place / "cut-digits" / "history.csv").write_text("round,clients\n", encoding="utf-8")
    (place / "data" / "ocr_letters").mkdir(parents=True)
    (place / "data" / "ocr_letters" / "ocr_letters.npz").write_bytes(b"PK other bytes")
    return place


@pytest.fixture(autouse=True)
def in_the_world(world, monkeypatch):
    """Every test is there, and leaves it as it was."""
    monkeypatch.chdir(world)
    monkeypatch.delenv("SELFFL_DATA", raising=False)
    monkeypatch.setattr(cli.console, "out", Console(width=200))
    monkeypatch.setattr(cli.console, "err", Console(width=200, stderr=True))
    before = contents(world)
    yield
    assert contents(world) == before


def contents(folder):
    """Every file and folder with when and how long it was written; what Python compiles for itself does not count."""
    paths = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    states = [(path, path.stat()) for path in paths]
    return {path: stat.S_ISREG(state.st_mode) and (state.st_mtime_ns, state.st_size) for path, state in states}


@pytest.fixture
def command(monkeypatch, capsys):
    """A function that runs the command line here: its exit code, output and messages."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["selffl", *words])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        printed = capsys.readouterr()
        return stopped.value.code, printed.out, printed.err

    return call


@pytest.fixture
def refused_command(command):
    """A function that runs a command that is a mistake: the one line that it is answered with."""

    def call(*words):
        code, out, err = command(*words)
        assert (code, out) == (2, ""), (out, err)
        assert len(err.splitlines()) == 1, err
        assert err.startswith("selffl: ")
        return err

    return call


def refused_call(call, kind=ConfigError):
    """The one line that a call which is a mistake is answered with."""
    with pytest.raises(kind) as raised:
        call()
    assert type(raised.value) is kind
    assert "\n" not in str(raised.value)
    return str(raised.value)


def federation(x=ROWS, y=LABELS, client=CLIENTS, test_fraction=0.25, **options):
    return Federation.from_arrays(x, y, client, test_fraction, **options)


def train(model=None, fed=None, algorithm="fedavg", **options):
    chosen = nn.Linear(3, 2) if model is None else model
    return selffl.train(chosen, federation() if fed is None else fed, algorithm, **{"rounds": 1} | options)


def tune(grid=None, algorithm="ditto", **options):
    return selffl.tune(nn.Linear(3, 2), federation(), algorithm, grid, **{"rounds": 1} | options)


# ------------------------------------------------------------------------------------------------------------- settings


def by_train(name, value, says, refused_command, folder):
    """As a keyword of `train`, which leaves no folder behind."""
    assert says in refused_call(lambda: train(**{name: value, "out": folder / "new"}))
    assert not (folder / "new").exists()


def by_command(name, value, says, refused_command, folder):
    """As an option of `selffl run`, or one of its `--set`."""
    text = value if isinstance(value, str) else json.dumps(value)
    words = [f"--{name}", text] if name in OPTIONS else ["--set", f"{name}={text}"]
    assert f"selffl: {says}" in refused_command("run", "study-good", "--out", "new", *words)


def by_study_file(name, value, says, refused_command, folder):
    """As a key of a study file, which is named."""
    file, text = folder / "study.toml", "nan" if value != value else json.dumps(value)
    file.write_text(f'data = "digits"\nmodel = "softmax"\n{name} = {text}\n', encoding="utf-8")
    assert f"{file}: {says}" in refused_call(lambda: read_study(file))


def by_estimator(name, value, says, refused_command, folder):
    """As a parameter of an estimator, which says so when it is fitted."""
    assert says in refused_call(lambda: SelfFLRegressor(**{name: value}).fit(ROWS, LABELS))


OPTIONS = {"rounds": int, "seed": int, "device": str}  # settings with an option of their own, and what is read there
WAYS = {  # for each way to give a setting, whether it takes this one
    by_train: lambda name, value: True,
    by_command: lambda name, value: type(value) is OPTIONS[name] if name in OPTIONS else name in STUDY_SETTINGS,
    by_study_file: lambda name, value: name in STUDY_SETTINGS,
    by_estimator: lambda name, value: name in SelfFLRegressor().get_params(),
}


@pytest.mark.parametrize(
    ("way", "name", "value", "says"),
    [
        pytest.param(way, *row, id=f"{way.__name__}-{row[0]}-{str(row[1])[:9]}")
        for way, takes in WAYS.items()
        for row in SETTINGS
        if takes(*row[:2])
    ],
)
def test_a_setting_that_cannot_work_is_refused_alike_however_it_is_given(
    way, name, value, says, refused_command, tmp_path
):
    way(name, value, says, refused_command, tmp_path)


# ------------------------------------------------------------------------------------------------------- all the others


@dataclass(frozen=True)
class Mistake:
    """What is done wrong, on the command line, in Python or by both, and what the answer has to say."""

    says: str | tuple[str, ...]
    command: str | None = None
    call: Callable[[], object] | None = None
    kind: type[selffl.SelfFLError] = ConfigError  # of the error in Python
    also: str = ""  # what the command line says beside it


class Words(nn.Module):
    """Sums of vectors, whose gradients are sparse."""

    def __init__(self):
        super().__init__()
        self.vectors, self.out = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.vectors(x).mean(-2))


class Pair(nn.Linear):
    """A module with two outputs, of which nobody says which is meant."""

    def forward(self, x):
        return super().forward(x), x


def with_nan(values):
    changed = np.array(values, dtype=np.float32)
    changed[7] = math.nan
    return changed


def rows_of(name, client="site", label="y"):
    return Federation.from_csv(name, client=client, label=label)


def study_of(name):
    return read_study(Path(f"study-{name}"))


def analysis_of(name, **options):
    """What `selffl posterior` makes of a table."""
    table = read_estimates(Path(name))
    return selffl.meta_analysis(table.estimate, table.variance, **options)


def init(name, client="site", label="y"):
    return f"init new --csv {name} --client {client} --label {label}"


VECTORS = Embeddings.of(["a", "b"], np.eye(2))

MISTAKES = {
    # words and options that are none
    "a command": Mistake(("unknown command of `selffl` 'rum'", "did you mean 'run'"), "rum"),
    "a command of a group": Mistake(("unknown command of `selffl data` 'lst'", "did you mean 'list'"), "data lst"),
    "an option": Mistake(
        ("'--algoritm'", "did you mean '--algorithm'", "selffl run --help"), "run digits --algoritm ditto",
    ),
    "an option of a command": Mistake(
        "unknown option of `selffl posterior` '--formm'; did you mean '--form'?", "posterior good.csv --formm exact",
    ),
    "an option of all": Mistake(("'--verion'", "did you mean '--version'"), "--verion"),
    "an option without its value": Mistake("--out", "run digits --out"),
    "no study": Mistake("STUDY", "run"),
    "no study of the paper": Mistake("is missing; expected `selffl paper run ", "paper run"),
    "no table": Mistake("is missing; expected `selffl posterior ", "posterior"),
    "no folder": Mistake("is missing; expected `selffl report ", "report"),
    "a word too many": Mistake("mnist", "run digits mnist"),
    "a table too many": Mistake("'good.csv' is left over; expected no more than", "posterior good.csv good.csv"),
    "another library's command": Mistake("'resume'; expected `selffl run STUDY --out FOLDER --resume`", "resume runs"),
    "a table for a folder": Mistake(
        ("FOLDER is wards.csv", "expected a folder to make", "selffl init wards --csv wards.csv"), "init wards.csv",
    ),
    "an option of a run in the way": Mistake("rounds is -3; expected", "run digits --rounds -3 --out digits"),
    "a key of a run in the way": Mistake("unknown key in --set", "run digits --set foo=1 --out digits"),
    # names
    "a study": Mistake(("unknown study to train 'minst'", "did you mean 'mnist'", "by its folder"), "run minst"),
    "an option by another name": Mistake(
        ("unknown option of `selffl run` '--method'", "expected '--algorithm'"), "run digits --method ditto",
    ),
    "a study to compare": Mistake("did you mean 'digits'", "compare digit"),
    "a study of the paper": Mistake(("unknown study 'limit'", "did you mean 'limits'"), "paper run limit"),
    "a second study of the paper": Mistake("unknown study 'cifar11'", "paper run limits cifar11"),
    "a method": Mistake(
        ("unknown algorithm 'self_fl'", "did you mean 'self-fl'"),
        "run digits --algorithm self_fl", lambda: train(algorithm="self_fl"),
    ),
    "a method of an estimator": Mistake(
        ("unknown algorithm 'self_fl'", "did you mean 'self-fl'"),
        call=lambda: SelfFLRegressor(algorithm="self_fl").fit(ROWS, LABELS),
    ),
    "a method that is none": Mistake("algorithm is 3", call=lambda: train(algorithm=3)),
    "a method that is a class": Mistake("expected a name", call=lambda: train(algorithm=selffl.algorithms.FedAvg)),
    "a method of several": Mistake(("'dito'", "did you mean 'ditto'"), "compare digits --algorithms self-fl,dito"),
    "a method twice": Mistake("each once", "compare digits --algorithms ditto,ditto"),
    "a grid's name": Mistake(
        ("unknown name in the grid 'penalti'", "did you mean 'penalty'"),
        "tune digits -a ditto --grid penalti=1,2", lambda: tune({"penalti": (1, 2)}),
    ),
    "a grid's value": Mistake(
        ("penalty is -1", "0 or more"), "tune digits -a ditto --grid penalty=1,-1", lambda: tune({"penalty": (1, -1)}),
    ),
    "a grid's value twice": Mistake(
        ("penalty in the grid is", "each once"),
        "tune digits -a ditto --grid penalty=1,1", lambda: tune({"penalty": (1, 1)}),
    ),
    "a grid without values": Mistake("--grid is 'penalty='", "tune digits -a ditto --grid penalty="),
    "a grid without a name": Mistake("--grid is '1,2'", "tune digits -a ditto --grid 1,2"),
    "a grid's name twice": Mistake("each key once", "tune digits -a ditto --grid penalty=1 --grid penalty=2"),
    "a grid that is too large": Mistake(
        ("the grid has 5 settings", "max_trials is 2"),
        "tune digits -a ditto --max-trials 2", lambda: tune(max_trials=2),
    ),
    "nothing to tune": Mistake(
        ("self-fl-auto has nothing to tune", "Train it as it is"),
        "tune digits", lambda: tune(algorithm="self-fl-auto"),
    ),
    "a share to choose on": Mistake(
        ("validation_fraction is 1.0", "a share from 0"),
        "tune digits -a ditto --validation-fraction 1", lambda: tune(validation_fraction=1.0),
    ),
    "a metric to choose by": Mistake(
        "unknown metric 'acuracy'; did you mean 'accuracy'",
        "tune digits -a ditto --rounds 1 --grid penalty=1 --metric acuracy", lambda: tune(metric="acuracy"),
    ),
    "a run in the way of tuning": Mistake("already holds a run", "tune digits -a ditto --out digits"),
    "no method": Mistake("--algorithms is ','", "compare digits --algorithms ,"),
    "a data set": Mistake(
        ("unknown data set 'mnits'", "did you mean 'mnist'"), "data show mnits", lambda: load("mnits"),
    ),
    "a data set to check": Mistake("did you mean 'digits'", "data check digit"),
    "a data set to fetch": Mistake("did you mean 'mnist'", "data fetch mnist2"),
    "a data set without a home": Mistake("synthetic", "data fetch synthetic"),
    "a data set that is damaged": Mistake(
        ("ocr_letters.npz", "expected"), "run femnist --rounds 1 --out new", lambda: load("letters"), DataError,
    ),
    "a tracker": Mistake(
        "did you mean 'tensorboard'",
        "run study-good --tracker tensorbord --out new", lambda: train(tracker="tensorbord", out="new"),
    ),
    "a form": Mistake(
        ("form is 'exat'", "'exact'", "'paper'"),
        "posterior good.csv --form exat", lambda: selffl.posterior([1, 2], [1, 1], 1, form="exat"),
    ),
    "a way to estimate": Mistake(
        "'rml'", "posterior good.csv --method rml", lambda: selffl.estimate_inter_variance([1, 2], [1, 1], "rml"),
        also="is not one of 'reml', 'ml', 'pm', 'dl'",
    ),
    "a model by name": Mistake("did you mean 'softmax'", call=lambda: build("softmx", 3, 2)),
    "a model to train, by name": Mistake("did you mean 'softmax'", call=lambda: train(model="softmx")),
    # numbers of the command line
    "rounds in words": Mistake(("--rounds is 'ten'", "expected a whole number"), "run digits --rounds ten"),
    "rounds of a comparison": Mistake("--rounds is '0'; expected 1 or more.", "compare digits --rounds 0"),
    "a seed in words": Mistake("--seed is 'one'; expected a whole number.", "run digits --seed one"),
    "no seeds": Mistake(("--seeds is '0'", "1"), "compare digits --seeds 0"),
    "no processes": Mistake(("--processes is '0'", "1"), "compare digits --processes 0"),
    "seeds of the paper": Mistake("--seeds is 'none'", "paper run limits --seeds none"),
    "a device of a comparison": Mistake(("device is 'gpu'", "'cpu', 'cuda'"), "compare digits --device gpu"),
    "a device of the paper": Mistake("device is 'cuba'", "paper run mnist --device cuba"),
    # options of methods, data sets and models
    "a setting without a value": Mistake(("--set is 'penalty'", "KEY=VALUE"), "run digits --set penalty"),
    "a setting without a key": Mistake(("--set is '=3'", "KEY=VALUE"), "run digits --set =3"),
    "an option of a method": Mistake(
        "did you mean 'max_local_steps'",
        "run digits -a self-fl --set max_local_step=3", lambda: selffl.algorithm("self-fl", max_local_step=3),
        also="unknown key in --set",
    ),
    "an option of another method": Mistake(
        ("fedavg", "'penalty'"), "run digits -a fedavg --set penalty=1", lambda: selffl.algorithm("fedavg", penalty=1),
    ),
    "a method for BatchNorm without any": Mistake(
        ("fedbn is to keep BatchNorm", "the model has no BatchNorm", "such as fedavg"),
        "run digits -a fedbn", lambda: train(algorithm="fedbn"),
    ),
    "an option of a study's method": Mistake("unknown key in --set", "run study-good --set penaltie=1"),
    "an option's value": Mistake(
        ("penalty is -1", "0 or more"),
        "run digits -a ditto --set penalty=-1", lambda: selffl.algorithm("ditto", penalty=-1),
    ),
    "an option's type": Mistake(
        "max_local_steps is 'many'",
        "run digits -a self-fl --set max_local_steps=many", lambda: selffl.algorithm("self-fl", max_local_steps="many"),
    ),
    "an option's choice": Mistake(
        ("form is 'rough'", "'exact'"),
        "run digits -a self-fl --set form=rough", lambda: selffl.algorithm("self-fl", form="rough"),
    ),
    "an option of a data set": Mistake("did you mean 'num_clients'", call=lambda: load("digits", num_client=3)),
    "a number of a data set": Mistake("num_clients is 'ten'", call=lambda: load("digits", num_clients="ten")),
    "an option of a model": Mistake("did you mean 'hidden'", call=lambda: build("lstm", 5, 2, hiden=3)),
    "options of a module": Mistake("model_options", call=lambda: train(model_options={"hidden": 3})),
    # methods that do not fit
    "a method of heads": Mistake("layer", "run digits -a fedrep --out new", lambda: train(algorithm="fedrep")),
    "a method of clusters": Mistake(
        "names no clusters", "run digits -a self-fl-cluster --out new", lambda: train(algorithm="self-fl-cluster"),
    ),
    # models and losses
    "a model that is none": Mistake("model is a int", call=lambda: train(model=3)),
    "a model that is a function": Mistake("expected a torch.nn.Module", call=lambda: train(model=lambda x: x)),
    "a model for other rows": Mistake(
        "cannot take a row of shape (3,)",
        "run study-wide --out new", lambda: train(model=nn.Linear(4, 2), out="new"), DataError,
    ),
    "a model for fewer classes": Mistake(
        "has the label 2, and Linear has 2 outputs",
        "run study-few --out new", lambda: train(fed=federation(y=LABELS * 2), out="new"), DataError,
    ),
    "a model with two outputs": Mistake("returns a tuple", call=lambda: train(model=Pair(3, 2), out="new")),
    "a lazy module": Mistake("without a shape (weight)", call=lambda: train(model=nn.LazyLinear(2))),
    "a module without values": Mistake("on the meta device", call=lambda: train(model=nn.Linear(3, 2, device="meta"))),
    "a complex module": Mistake("complex parameter", call=lambda: train(model=nn.Linear(3, 2, dtype=torch.complex64))),
    "batch statistics": Mistake(
        "expected a momentum such as 0.1",
        call=lambda: train(model=nn.Sequential(nn.BatchNorm1d(3, momentum=None), nn.Linear(3, 2))),
    ),
    "dropout": Mistake(
        "leaves out 0.5 at random", call=lambda: train(model=nn.Sequential(nn.AlphaDropout(0.5), nn.Linear(3, 2))),
    ),
    "sparse gradients": Mistake(
        "without sparse=True", call=lambda: train(model=Words(), fed=federation(x=(ROWS > 0).astype(int))),
    ),
    "nothing to train": Mistake("no parameters to train", call=lambda: train(model=nn.Flatten())),
    "a loss that is a class": Mistake("CrossEntropyLoss()", call=lambda: train(loss=nn.CrossEntropyLoss)),
    "a loss that is a name": Mistake("loss is 'mse'; expected a function", call=lambda: train(loss="mse")),
    "a loss for each row": Mistake(
        "expected one number",
        call=lambda: train(loss=lambda o, y: nn.functional.cross_entropy(o, y, reduction="none"), out="new"),
    ),
    "a start that does not fit": Mistake("'weight' has shape (4, 4)", call=lambda: train(start=nn.Linear(4, 4))),
    "a start that is none": Mistake("start is a int", call=lambda: train(start=3)),
    "a start that is not there": Mistake("nowhere", call=lambda: train(start="nowhere"), kind=CheckpointError),
    "on_round is no function": Mistake("on_round is 3", call=lambda: train(on_round=3)),
    # rows in Python
    "x with NaN": Mistake(
        "x holds NaN or infinity, first in row 7", call=lambda: federation(x=with_nan(ROWS)), kind=DataError,
    ),
    "y with NaN": Mistake("y holds NaN", call=lambda: federation(y=with_nan(LABELS)), kind=DataError),
    "client with NaN": Mistake(
        "client column holds NaN", call=lambda: federation(client=with_nan(CLIENTS)), kind=DataError,
    ),
    "x of words": Mistake("x is of type", call=lambda: federation(x=[["a"]] * 40), kind=DataError),
    "y of words": Mistake("y is of type", call=lambda: federation(y=["a"] * 40), kind=DataError),
    "x is None": Mistake("x is of type", call=lambda: federation(x=None), kind=DataError),
    "client is None": Mistake("one id per row", call=lambda: federation(client=None), kind=DataError),
    "lengths differ": Mistake("x has 40 rows, y 39", call=lambda: federation(y=LABELS[:-1]), kind=DataError),
    "no rows": Mistake("no rows", call=lambda: federation(ROWS[:0], LABELS[:0], []), kind=DataError),
    "a class below 0": Mistake("classes from 0 up", call=lambda: federation(y=LABELS - 1), kind=DataError),
    "test_fraction 1": Mistake("test_fraction is 1.0", call=lambda: federation(test_fraction=1.0)),
    "test_fraction in words": Mistake("test_fraction is 'half'", call=lambda: federation(test_fraction="half")),
    "seed below 0": Mistake("seed is -1", call=lambda: federation(seed=-1)),
    "clusters of one client": Mistake(
        "each of 4 clients", call=lambda: federation().with_clusters([0]), kind=DataError,
    ),
    "no such folder": Mistake("nowhere is no folder", call=lambda: Federation.from_folder("nowhere"), kind=DataError),
    "an empty folder": Mistake("empty holds no files", call=lambda: Federation.from_folder("empty"), kind=DataError),
    "no such federation": Mistake("nowhere does not exist", call=lambda: Federation.load("nowhere"), kind=DataError),
    "rows that are none": Mistake("federation is a list", call=lambda: train(fed=[ROWS, LABELS])),
    "texts are None": Mistake("texts is None", call=lambda: encode(None, VECTORS), kind=DataError),
    "a text is None": Mistake("row 1 of texts is None", call=lambda: encode(["a", None], VECTORS), kind=DataError),
    "a text alone": Mistake("expected a list of texts", call=lambda: encode("a b", VECTORS), kind=DataError),
    # tables of rows
    "rows that are not there": Mistake("nowhere.csv", init("nowhere.csv"), lambda: rows_of("nowhere.csv"), DataError),
    "rows without a client": Mistake(
        "did you mean 'site'", init("rows.csv", "ste"), lambda: rows_of("rows.csv", "ste"), DataError, "--client",
    ),
    "rows without a label": Mistake(
        "rows.csv has no column 'z'",
        init("rows.csv", label="z"), lambda: rows_of("rows.csv", label="z"), DataError, "--label",
    ),
    "client and label the same": Mistake(
        "expected a column for each", init("rows.csv", "y"), lambda: rows_of("rows.csv", "y"), DataError,
    ),
    "rows with a hole": Mistake(
        "hole.csv, line 3: x is missing", init("hole.csv"), lambda: rows_of("hole.csv"), DataError,
    ),
    "rows of one client": Mistake("at least two clients", init("lonely.csv")),
    "rows with two separators": Mistake(
        "semicolons.csv, line 3", init("semicolons.csv"), lambda: rows_of("semicolons.csv"), DataError,
    ),
    "rows of another encoding": Mistake(
        "not text in UTF-8", init("latin.csv"), lambda: rows_of("latin.csv"), DataError,
    ),
    "an empty file of rows": Mistake(
        "empty.csv is empty", "init new --csv empty.csv", lambda: rows_of("empty.csv"), DataError,
    ),
    "a folder in use": Mistake(("study-good is not empty", "expected a new folder"), "init study-good"),
    "a folder that is a file": Mistake("FOLDER is good.csv, the name of a table", "init good.csv"),
    "a name that is taken": Mistake(("comes with the package", "another name"), "init mnist"),
    # tables of estimates
    "a table that is not there": Mistake(
        "nowhere.csv does not exist", "posterior nowhere.csv", lambda: analysis_of("nowhere.csv"), DataError,
    ),
    "a table that is a folder": Mistake(
        "empty is a folder", "posterior empty", lambda: analysis_of("empty"), DataError,
    ),
    "an empty table": Mistake(
        "empty.csv is empty", "posterior empty.csv", lambda: analysis_of("empty.csv"), DataError,
    ),
    "a table without rows": Mistake(
        "bare.csv has a header but no rows", "posterior bare.csv", lambda: analysis_of("bare.csv"), DataError,
    ),
    "a table without a header": Mistake(
        ("headless.csv", "Add a header line"), "posterior headless.csv", lambda: analysis_of("headless.csv"), DataError,
    ),
    "a table without a column": Mistake(
        "no column variance among: client, estimate",
        "posterior columns.csv", lambda: analysis_of("columns.csv"), DataError,
    ),
    "a table with a column twice": Mistake(
        "a column appears twice", "posterior twice.csv", lambda: analysis_of("twice.csv"), DataError,
    ),
    "a table with words": Mistake(
        "words.csv, line 2: estimate is 'one'", "posterior words.csv", lambda: analysis_of("words.csv"), DataError,
    ),
    "a table with NaN": Mistake(
        "nan.csv, line 2: estimate is nan", "posterior nan.csv", lambda: analysis_of("nan.csv"), DataError,
    ),
    "a table with infinity": Mistake(
        "infinite.csv, line 2: variance is inf",
        "posterior infinite.csv", lambda: analysis_of("infinite.csv"), DataError,
    ),
    "a table with several mistakes": Mistake(
        ("negative.csv, line 2: variance is -1", "2 more bad row(s): line 3, 5"),
        "posterior negative.csv --out new.csv --plot new.png", lambda: analysis_of("negative.csv"), DataError,
    ),
    "a table with a gap": Mistake(
        "gap.csv, line 3: variance is missing", "posterior gap.csv", lambda: analysis_of("gap.csv"), DataError,
    ),
    "a table without a name": Mistake(
        "nameless.csv, line 2: client is missing",
        "posterior nameless.csv", lambda: analysis_of("nameless.csv"), DataError,
    ),
    "a table with a client twice": Mistake(
        "again.csv, line 3: client 'a' is already on line 2",
        "posterior again.csv", lambda: analysis_of("again.csv"), DataError,
    ),
    "a table cut short": Mistake(
        "cut.csv, line 3: 2 field(s)", "posterior cut.csv", lambda: analysis_of("cut.csv"), DataError,
    ),
    "a table of another encoding": Mistake(
        "latin.csv is not text in UTF-8 (byte 10)", "posterior latin.csv", lambda: analysis_of("latin.csv"), DataError,
    ),
    "a table of one": Mistake(
        "at least two clients", "posterior one.csv", lambda: analysis_of("one.csv"), DataError,
    ),
    "estimates too far apart": Mistake(
        "spans 1e+300, whose square no float holds",
        "posterior far.csv", lambda: analysis_of("far.csv"), DataError,
    ),
    "sure estimates too far apart": Mistake("spans 1.7e+308, whose square no float holds", "posterior farther.csv"),
    "estimates too far apart for one way": Mistake(
        "spans 1e+300, whose square no float holds",
        "posterior farthest.csv --method dl", lambda: analysis_of("farthest.csv", method="dl"), DataError,
    ),
    "a variance of 0 for one way": Mistake(
        "variance 0", "posterior sure.csv --method dl", lambda: analysis_of("sure.csv", method="dl"),
    ),
    "sure clients that differ": Mistake(
        "inter_variance is 0, so that all clients are the same, but 2 clients of variance 0 differ",
        "posterior sure.csv --inter-variance 0", lambda: analysis_of("sure.csv", inter_variance=0.0), DataError,
    ),
    "sure clients that agree": Mistake(
        "2 clients have variance 0 and the same estimate",
        "posterior agreed.csv", lambda: analysis_of("agreed.csv"), DataError,
    ),
    # numbers of a posterior
    "a spread below 0": Mistake(
        "inter_variance is -1.0",
        "posterior good.csv --inter-variance -1", lambda: analysis_of("good.csv", inter_variance=-1.0),
    ),
    "a spread without end": Mistake(
        "inter_variance is inf",
        "posterior good.csv --inter-variance inf", lambda: analysis_of("good.csv", inter_variance=math.inf),
    ),
    "a spread in words": Mistake("--inter-variance", "posterior good.csv --inter-variance big"),
    "a spread and a way to it": Mistake("leave one of them out", "posterior good.csv --method dl --inter-variance 1"),
    "a covariate": Mistake("no column beds for the covariate", "posterior good.csv --covariate beds"),
    "a new client's variance": Mistake(
        "new_variance is -1.0",
        "posterior good.csv --new-variance -1", lambda: analysis_of("good.csv", new_variance=-1.0),
    ),
    **{
        f"a level of {level}": Mistake(
            f"level is {float(level)}; expected a probability", f"posterior good.csv --level {level}",
            lambda level=level: analysis_of("good.csv", level=float(level)),
        )
        for level in ("2", "0", "nan")
    },
    "a level in words": Mistake("--level", "posterior good.csv --level 95%"),
    "rows to show": Mistake("--rows", "posterior good.csv --rows -1"),
    "a variance below 0": Mistake(
        "intra_variance is -1", call=lambda: selffl.posterior([1, 2], [-1, 1], 1), kind=DataError,
    ),
    "an estimate that is NaN": Mistake("NaN", call=lambda: selffl.posterior([1, math.nan], [1, 1], 1), kind=DataError),
    "variances too few": Mistake(
        "intra_variance has shape (2,)", call=lambda: selffl.posterior([1, 2, 3], [1, 1], 1), kind=DataError,
    ),
    "estimates of words": Mistake(
        "not an array of numbers", call=lambda: selffl.posterior(["a", "b"], [1, 1], 1), kind=DataError,
    ),
    "no estimates": Mistake("at least one client", call=lambda: selffl.posterior([], [], 1), kind=DataError),
    # files to write
    "a plot of no kind": Mistake("ending in .png, .svg or .pdf", "posterior good.csv --plot p.xyz --out o.csv"),
    "a plot of no folder": Mistake("the folder no does not exist", "posterior good.csv --plot no/p.png"),
    "a plot that is a folder": Mistake("empty is a folder", "posterior good.csv --plot empty"),
    "a plot in a file": Mistake("good.csv", "posterior good.csv --plot good.csv/p.png"),
    "a plot over what is read": Mistake("good.csv", "posterior good.csv --plot good.csv"),
    "a table of no folder": Mistake("the folder no does not exist", "posterior good.csv --out no/o.csv"),
    "a table to a folder": Mistake("empty is a folder", "posterior good.csv --out empty"),
    "a table in a file": Mistake("good.csv", "posterior good.csv --out good.csv/o.csv"),
    "a table over what is read": Mistake("good.csv", "posterior good.csv --out good.csv"),
    "out is a file": Mistake(
        "good.csv is a file", "run digits --out good.csv", lambda: train(out="good.csv"), also="expected a folder",
    ),
    "out is in a file": Mistake("good.csv is a file", "run digits --out good.csv/run"),
    "out is a number": Mistake("out is 3", call=lambda: train(out=3)),
    "out holds a run": Mistake(
        "already holds a run", "run digits --out digits", lambda: train(out="run"), also="--resume",
    ),
    "out cannot be written": Mistake("/proc/nowhere", "run digits --rounds 1 --out /proc/nowhere/run"),
    "save onto a run": Mistake("already holds a run", call=lambda: selffl.load("run").save("run")),
    "save onto a device": Mistake("/dev/null is a file", call=lambda: train().save("/dev/null")),
    "a comparison into a file": Mistake("good.csv is a file", "compare digits --out good.csv"),
    "a comparison that cannot be written": Mistake("/proc/nowhere", "compare digits --rounds 1 --out /proc/nowhere"),
    "a demonstration into a file": Mistake("good.csv is a file", "demo --out good.csv"),
    "a study of the paper into a file": Mistake("good.csv is a file", "paper run limits --out good.csv"),
    "a study of the paper in a file": Mistake("good.csv is a file", "paper run limits --out good.csv/x"),
    "a report into no folder": Mistake("the folder no does not exist", "report empty -o no/r.html"),
    "a report into a folder": Mistake("empty is a folder", "report empty -o empty"),
    # folders to read
    "a report on nothing": Mistake("nowhere is not a folder", "report nowhere"),
    "a report on a file": Mistake("good.csv is not a folder", "report good.csv"),
    "a report on an empty folder": Mistake("empty holds no record.json", "report empty"),
    "a report on a damaged record": Mistake("is not a complete study record", "report damaged"),
    "a page on a file": Mistake("good.csv", "paper page good.csv"),
    "a page on an empty folder": Mistake("empty holds no record.json", "paper page empty"),
    "a memory that is not there": Mistake("nowhere", "flower list nowhere"),
    "no run to load": Mistake(
        "nowhere holds no config.json", call=lambda: selffl.load("nowhere"), kind=CheckpointError,
    ),
    "no run to resume": Mistake(
        "empty holds no config.json", call=lambda: selffl.resume("empty"), kind=CheckpointError,
    ),
    "a client": Mistake("unknown client 99", call=lambda: selffl.load("run").personal_model(99)),
    "a metric": Mistake(
        "did you mean 'accuracy'", call=lambda: selffl.load("run").evaluate().of_clients("acuracy", "personal"),
    ),
    # runs that go on
    "another method": Mistake(
        ("algorithm is 'fedavg'", "begun with 'ditto'"), "run digits --out digits --resume -a fedavg",
    ),
    "another seed": Mistake(("seed is 5", "leave it out"), "run digits --out digits --resume --seed 5"),
    "another option": Mistake("penalty is 9", "run digits --out digits --resume --set penalty=9"),
    "another setting": Mistake("batch_size is 3", "run digits --out digits --resume --set batch_size=3"),
    "another study": Mistake(
        ("data is 'mnist', and the run in digits", "'digits'"), "run mnist --out digits --resume",
    ),
    "fewer rounds": Mistake(
        ("rounds is 2", "round 3"),
        "run study-good --out run --resume --rounds 2", lambda: selffl.resume("run", rounds=2),
    ),
    "other rows": Mistake(
        "not the one that the run", call=lambda: selffl.resume("run", federation=federation(x=ROWS + 1)),
    ),
    "another model": Mistake(
        "expected torch.float32 (12,)", call=lambda: selffl.resume("run", model=nn.Linear(3, 3)), kind=CheckpointError,
    ),
    "a checkpoint cut short": Mistake(
        ("checkpoint", "damaged"),
        "run study-good --out cut-checkpoint --resume --rounds 5", lambda: selffl.load("cut-checkpoint"),
        CheckpointError,
    ),
    "a configuration cut short": Mistake(
        "config.json is not",
        "run study-good --out cut-config --resume", lambda: selffl.load("cut-config"), CheckpointError,
    ),
    "a history cut short": Mistake(
        "history.csv lacks rounds",
        "run digits --out cut-digits --resume --rounds 3", lambda: selffl.resume("cut-digits", rounds=3),
        CheckpointError,
    ),
    "records of something else": Mistake(
        ("clients.csv is damaged", "there is no column client"),
        "run study-good --out cut-clients --resume --rounds 5", lambda: selffl.load("cut-clients"), CheckpointError,
    ),
    "a module cut short": Mistake(
        ("module.safetensors is damaged", "expected a whole checkpoint"),
        call=lambda: selffl.load("cut-module"), kind=CheckpointError,
    ),
    "rows cut short": Mistake("federation.safetensors", call=lambda: selffl.load("cut-rows"), kind=DataError),
    # studies of one's own
    "a study that is not there": Mistake(
        ("nowhere.toml does not exist", "selffl init"), "run nowhere.toml", lambda: read_study(Path("nowhere.toml")),
    ),
    "a folder without a study": Mistake(
        ("empty/study.toml does not exist", "selffl init empty"), "run empty", lambda: read_study(Path("empty")),
    ),
    "a study that is no TOML": Mistake(
        ("study.toml is no TOML", "line 5"), "run study-syntax", lambda: study_of("syntax"),
    ),
    "a study without a model": Mistake(
        ("has no model", "study.py:model"), "run study-modelless", lambda: study_of("modelless"),
    ),
    "a key of a study": Mistake(
        ("unknown key in", "did you mean 'learning_rate'"), "run study-key", lambda: study_of("key"),
    ),
    "a method in a study": Mistake("did you mean 'self-fl-exact'", "run study-method", lambda: study_of("method")),
    "methods that are no list": Mistake("expected a list of names", "run study-methods", lambda: study_of("methods")),
    "a method twice in a study": Mistake("each once", "run study-twice", lambda: study_of("twice")),
    "options that are no table": Mistake("expected a table", "run study-table", lambda: study_of("table")),
    "options of a method that are no table": Mistake(
        "expected a table", "run study-no-table", lambda: study_of("no-table"),
    ),
    "options of a method that is none": Mistake(
        "did you mean 'ditto'", "run study-options-of", lambda: study_of("options-of"),
    ),
    "an option in a study": Mistake("did you mean 'penalty'", "run study-option", lambda: study_of("option")),
    "options of rows of one's own": Mistake(
        ("data_options", "Leave it out"), "run study-data-options", lambda: study_of("data-options"),
    ),
    "a data set in a study": Mistake(
        ("unknown data", "did you mean 'digits'"), "run study-rows", lambda: study_of("rows"),
    ),
    "a loss in a study": Mistake("did you mean 'cross_entropy'", "run study-loss", lambda: study_of("loss")),
    "a Python file of a study": Mistake("studdy.py does not exist", "run study-file", lambda: study_of("file")),
    "a function of a study": Mistake(
        ("unknown function", "did you mean 'federation'"), "run study-function", lambda: study_of("function"),
    ),
    "no function": Mistake("expected FILE.py:FUNCTION", "run study-place", lambda: study_of("place")),
    "a module that is not there": Mistake(
        ("line 3", "ModuleNotFoundError"), "run study-import", lambda: study_of("import"),
    ),
    "Python that is none": Mistake(("SyntaxError", "line 6"), "run study-grammar", lambda: study_of("grammar")),
    "a function that raises": Mistake(
        ("study.py:broken failed", "ValueError: no rows today", "line 11"),
        "run study-raises", lambda: study_of("raises").federation(0),
    ),
    "a function that raises, compared": Mistake(("ValueError", "line 11"), "compare study-raises"),
    "a function that takes no seed": Mistake(
        ("TypeError", "study.py:seedless failed"), "run study-seedless", lambda: study_of("seedless").federation(0),
    ),
    "a function that returns nothing": Mistake(
        ("study.py:nothing returned nothing", "selffl.Federation"),
        "run study-none", lambda: study_of("none").federation(0),
    ),
    "a function that returns a list": Mistake(
        "returned a list", "run study-list", lambda: study_of("list").federation(0),
    ),
    "a function that returns no model": Mistake(
        ("study.py:no_model returned a str", "torch.nn.Module"),
        "run study-text", lambda: study_of("text").module(federation(), 0),
    ),
    "nothing to test on": Mistake(
        "no client of study-untested has rows to test on", "compare study-untested --out new",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [case for case, mistake in MISTAKES.items() if mistake.command is not None])
def test_a_wrong_command(refused_command, case):
    mistake = MISTAKES[case]
    said = refused_command(*mistake.command.split())
    for part in (*parts_of(mistake), mistake.also):
        assert part in said


@pytest.mark.parametrize("case", [case for case, mistake in MISTAKES.items() if mistake.call is not None])
def test_a_wrong_call(case):
    mistake = MISTAKES[case]
    said = refused_call(mistake.call, mistake.kind)
    for part in parts_of(mistake):
        assert part in said


def parts_of(mistake):
    return (mistake.says,) if isinstance(mistake.says, str) else mistake.says


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
def test_an_interruption_says_how_to_go_on(world, monkeypatch, command, words, place, again):
    monkeypatch.setattr(*place, interrupted)
    code, out, err = command(*words.split())
    assert code == 130
    assert out == ""
    assert err.splitlines()[0].endswith(f"To resume: {again}")
    assert err.splitlines()[1:] == ["selffl: stopped. What was finished is kept."]
    shutil.rmtree(world / "new", ignore_errors=True)
