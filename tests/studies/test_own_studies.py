"""Studies of the user's own: what `selffl init` writes runs as it is, goes on, and is run anew when a file changes."""

import csv
import io
import json
import os
import re
import shlex
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import selffl
from selffl import cli
from selffl.cli.init import init_command
from selffl.cli.studies import best_cells
from selffl.errors import ConfigError
from selffl.studies import arms, comparison
from selffl.studies.arms import Arm, Outcome, run_arms
from selffl.studies.comparison import Comparison, points
from selffl.studies.own import KEYS, OwnProblem, read_study
from selffl.studies.result import Claim, Estimate, Job


@pytest.fixture
def run(command_line):
    """A function that runs the command line here, in an empty folder; its output."""

    def call(*words):
        code, out, err = command_line(*words)
        assert code == 0, err
        return out

    return call


def shorten(folder):
    """Clients of a study that `selffl init` has written take few steps in a round."""
    file = folder / "study.toml"
    text = file.read_text(encoding="utf-8")
    for name, number in (("num_local_steps", 5), ("max_local_steps", 10)):
        text, found = re.subn(rf"^{name} = \d+", f"{name} = {number}", text, flags=re.M)
        assert found == 1
    file.write_text(text, encoding="utf-8")


def write_rows(path, kind, num_rows=120, seed=0):
    """Rows of six sites whose label depends on two numbers and a word; dates and a missing number beside."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(num_rows):
        age, dose, ward = rng.normal(50, 10), rng.normal(3, 1), "ab"[number % 2]
        value = 0.1 * age + dose + 2 * (ward == "b") + rng.normal(scale=0.3)
        label = {
            "words": "high" if value > 9 else "low",
            "numbers": 4 if value > 9 else 2,
            "values": f"{value:.4f}",
            "counts": rng.poisson(np.exp(value / 9)),
        }[kind]
        age = "NA" if number == 7 else f"{age:.3f}"
        seen = f"2026-0{number % 3 + 1}-{number % 28 + 1:02}"
        rows.append(
            {"site": f"00{number % 6}", "age": age, "dose": f"{dose:.3f}", "ward": ward, "seen": seen, "y": label}
        )
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return rows


# ------------------------------------------------------------------------------------------------ what init has written


@pytest.mark.slow
def test_a_new_study_runs_compares_goes_on_and_can_be_loaded(run, tmp_path):
    out = run("init", "my-study")
    assert out.splitlines()[-1] == "Next      selffl run my-study"
    shorten(tmp_path / "my-study")
    out = run("run", "my-study", "--rounds", "3")
    assert out.startswith("self-fl-auto on my-study, seed 0: 3 rounds, 30 clients\n  accuracy ")
    place = "runs/my-study-self-fl-auto-0"
    run("run", "my-study", "--rounds", "5", "--resume")
    run("run", "my-study/study.toml", "--rounds", "5", "--out", "whole")
    ours, theirs = selffl.load(place), selffl.load("whole")
    assert ours.summary["rounds"] == 5
    assert ours.summary["weighted_accuracy"] == theirs.summary["weighted_accuracy"]
    assert isinstance(ours.personal_model("site-07"), torch.nn.Module)
    words = ("compare", "my-study", "--algorithms", "self-fl-exact,ditto", "--seeds", "2", "--rounds", "2")
    found = json.loads(run(*words, "--processes", "1", "--json"))
    assert [line["method"] for line in found["table"]] == ["self-fl-exact", "ditto"]
    assert Path(found["report"]).is_file()


def test_the_study_file_says_what_is_trained(run, tmp_path):
    run("init", "mine")
    file = tmp_path / "mine" / "study.toml"
    problem = read_study(tmp_path / "mine")
    assert (problem.algorithm, problem.num_seeds, problem.rounds, problem.participation) == (
        "self-fl-auto",
        3,
        40,
        0.5,
    )
    assert problem.algorithms == ("self-fl-auto", "self-fl-exact", "ditto", "fedavg", "local")
    assert problem.method("ditto").penalty == 0.1
    assert problem.method("ditto", penalty=2.0).penalty == 2.0
    assert problem.method("self-fl").max_local_steps == 40
    written = {line.split(" = ")[0] for line in file.read_text(encoding="utf-8").splitlines() if " = " in line}
    assert written - {"penalty"} <= set(KEYS)
    file.write_text('data = "digits"\nmodel = "softmax"\nrounds = 2\nalgorithm = "local"\n', encoding="utf-8")
    assert run("run", "mine").startswith("local on mine, seed 0: 2 rounds, 40 clients")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "loss", "metric"),
    [
        ("words", "cross_entropy", "accuracy"),
        ("numbers", "cross_entropy", "accuracy"),
        ("values", "mse_loss", "error"),
        ("counts", "poisson_nll_loss", None),
    ],
)
def test_a_study_of_a_csv_file_reads_it_and_runs(run, tmp_path, kind, loss, metric):
    rows = write_rows(tmp_path / "rows.csv", kind)
    task = kind if kind in ("values", "counts") else "classes"
    words = ("init", "deep/mine", "--csv", "rows.csv", "--client", "site", "--label", "y", "--missing", "impute")
    out = run(*words, *(["--task", "counts"] if kind == "counts" else []))
    assert "120 of 6 clients" in out
    assert f"y, {task}" in out
    assert "age (1)" in out
    problem = read_study(tmp_path / "deep" / "mine")
    assert (problem.loss, problem.model) == (loss, "study.py:linear")
    fed = problem.federation(0)
    assert list(fed.clients) == [f"00{number}" for number in range(6)]  # a name is no number
    assert len(fed.train.labels) + len(fed.test.labels) == 120
    # Age, whether it is missing, dose, either ward, and the date; numbers are scaled by the training rows.
    features = fed.train.features
    assert fed.preparation.inputs[-4:] == ["dose", "ward=a", "ward=b", "seen"]
    torch.testing.assert_close(features[:, [0, -4, -1]].mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(features[:, [-4, -1]].std(0, correction=0), torch.ones(2), atol=1e-5, rtol=0)
    labels = torch.cat([fed.train.labels, fed.test.labels]).double()
    if task == "classes":
        assert fed.classes == (["high", "low"] if kind == "words" else [2, 4])
        share = np.mean([row["y"] in ("low", 4) for row in rows])  # the later of the sorted names
        assert abs(float(labels.mean()) - share) < 1e-6
    else:  # in the user's own units
        assert fed.num_classes is None
        assert abs(float(labels.mean()) - np.mean([float(row["y"]) for row in rows])) < 1e-6
    for name in ("linear", "network"):
        file = tmp_path / "deep" / "mine" / "study.toml"
        file.write_text(file.read_text(encoding="utf-8").replace("study.py:linear", f"study.py:{name}"), "utf-8")
        outputs = read_study(tmp_path / "deep" / "mine").module(fed, 0)(features)
        assert outputs.shape == ((len(features), 2) if task == "classes" else (len(features),))
    shorten(tmp_path / "deep" / "mine")
    out = run("run", "deep/mine", "--rounds", "2")
    assert "6 clients\n" in out
    options = ("-a", "self-fl,local", "--seeds", "2", "--rounds", "2", "--json")
    table = json.loads(run("compare", "deep/mine", *options))
    assert [line["method"] for line in table["table"]] == ["self-fl", "local"]
    if metric is not None:
        assert f"6 clients\n  {metric} " in out
        assert list(table["table"][0])[1] == metric
        assert table["claims"][0]["evidence"].startswith(metric.capitalize())


def test_names_with_quotes_are_names(run, tmp_path):
    names = ['he said "hi"', "it's", '"""', "back\\slash", "Größe", "{{ x }}"]
    with (tmp_path / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*names, "y"])
        writer.writerows([[f"s{k % 3}", k * 2, k % 5, k % 4, k % 7, k % 3, ('a"b', "c\\d")[k % 2]] for k in range(30)])
    run("init", "my study", "--csv", "rows.csv", "--client", names[0], "--label", "y")
    problem = read_study(tmp_path / "my study")
    fed = problem.federation(0)
    assert (fed.num_clients, fed.train.features.shape[1], fed.num_classes) == (3, 5, 2)
    assert problem.title == 'rows.csv by he said "hi"'


# --------------------------------------------------------------------------------------- the user's files as part of it


def small(tmp_path, text="scale = 1.0", num_classes=2):
    """A study whose Python imports a file beside it and has a class and a loss of its own."""
    folder = tmp_path / "small"
    folder.mkdir(exist_ok=True)
    (folder / "beside_small.py").write_text(f"NUM_CLASSES = {num_classes}\n", encoding="utf-8")
    (folder / "study.toml").write_text(
        'data = "study.py:clients"\nmodel = "study.py:Own"\nloss = "study.py:own_loss"\n'
        "rounds = 2\nparticipation = 1\n",
        encoding="utf-8",
    )
    (folder / "study.py").write_text(
        "import torch\nimport selffl\nfrom beside_small import NUM_CLASSES\n"
        f"{text}\n"
        "def clients(seed):\n"
        "    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(seed)) * scale\n"
        "    return selffl.Federation.from_arrays(x, (x.sum(1) > 0).long(), [k % 4 for k in range(40)], 0.25, seed)\n"
        "class Own(torch.nn.Module):\n"
        "    def __init__(self, federation):\n"
        "        super().__init__()\n"
        "        self.part = torch.nn.Linear(3, NUM_CLASSES)\n"
        "    def forward(self, x):\n"
        "        return self.part(x)\n"
        "def own_loss(outputs, labels):\n"
        "    return torch.nn.functional.cross_entropy(outputs, labels)\n",
        encoding="utf-8",
    )
    os.utime(folder / "study.py", (1_700_000_000, 1_700_000_000))  # as files are that are written in one second
    return read_study(folder)


def test_first_weights_depend_on_the_seed_alone(tmp_path):
    problem = small(tmp_path)
    fed = problem.federation(0)
    torch.manual_seed(5)
    first = problem.module(fed, 1).part.weight
    state = torch.random.get_rng_state()
    assert torch.equal(problem.module(fed, 1).part.weight, first)
    assert not torch.equal(problem.module(fed, 2).part.weight, first)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.slow
def test_runs_in_processes_are_those_of_this_one(tmp_path):
    problem = small(tmp_path)
    work = [(Arm("fedavg", "fedavg"), 0)]
    (here,), (apart,) = (run_arms(problem, work, Job(num_processes=n), 0, 1)["fedavg"] for n in (1, 2))
    assert here.summary["weighted_accuracy"] == apart.summary["weighted_accuracy"]


def test_a_changed_file_is_another_run_and_a_moved_folder_is_not(tmp_path):
    arm = Arm("local", "local")

    def key(problem):
        return arms._key(problem, arm, 0, "cpu")

    first = key(small(tmp_path))
    assert key(small(tmp_path)) == first
    assert key(small(tmp_path, "scale = 1.0  # a word more")) != first
    (tmp_path / "elsewhere").mkdir()
    assert key(small(tmp_path / "elsewhere")) == first
    assert key(small(tmp_path, "scale = 2.0")) != first


def test_two_studies_may_have_files_of_the_same_name(tmp_path):
    first = small(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    second = small(tmp_path / "elsewhere", num_classes=5)
    assert first.module(first.federation(0), 0).part.out_features == 2
    assert second.module(second.federation(0), 0).part.out_features == 5
    assert first.module(first.federation(0), 0).part.out_features == 2


def test_other_rows_from_the_same_code_are_another_run(tmp_path, run):
    write_rows(tmp_path / "rows.csv", "words", seed=0)
    run("init", "one", "--csv", "rows.csv", "--client", "site", "--label", "y", "--missing", "drop")
    first = arms._key(read_study(tmp_path / "one"), Arm("local", "local"), 0, "cpu")
    write_rows(tmp_path / "rows.csv", "words", seed=1)
    # In another process, that is: within one, rows are read once.
    from selffl.studies import own

    own._federation.cache_clear()
    assert arms._key(read_study(tmp_path / "one"), Arm("local", "local"), 0, "cpu") != first


def test_a_class_of_ones_own_goes_on_and_is_handed_over_to_load(tmp_path, run):
    problem = small(tmp_path)
    run("run", "small", "--algorithm", "fedavg", "--out", "here")
    run("run", "small", "--out", "here", "--rounds", "4", "--resume")
    run("run", "small", "--algorithm", "fedavg", "--out", "whole", "--rounds", "4")
    fed = problem.federation(0)
    loss = problem.own_parts(0)["loss"]
    found = [selffl.load(place, model=problem.module(fed, 0), loss=loss) for place in ("here", "whole")]
    assert found[0].summary["weighted_accuracy"] == found[1].summary["weighted_accuracy"]
    assert found[0].summary["rounds"] == 4


def test_a_run_does_not_go_on_with_other_rows(tmp_path, monkeypatch, run):
    """Not even where the file is as long as before, and of the same second: byte code would be taken for it."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    small(tmp_path)
    run("run", "small", "--algorithm", "fedavg", "--out", "here")
    small(tmp_path, "scale = 2.0")
    monkeypatch.setattr(sys, "argv", ["selffl", "run", "small", "--out", "here", "--rounds", "4", "--resume"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2


def test_a_run_that_goes_on_says_what_was_edited_meanwhile(tmp_path, monkeypatch, run):
    said = io.StringIO()
    monkeypatch.setattr(cli.console, "err", Console(width=200, file=said))
    run("init", "one")
    run("run", "one", "--rounds", "1", "--out", "here")
    run("run", "one", "--rounds", "2", "--out", "here", "--resume")
    assert said.getvalue() == ""
    file = tmp_path / "one" / "study.toml"
    file.write_text(file.read_text().replace("learning_rate = 0.05", "learning_rate = 0.5"), encoding="utf-8")
    code = tmp_path / "one" / "study.py"
    code.write_text(code.read_text().replace("Tanh", "ReLU"), encoding="utf-8")
    later = time.time() + 5
    os.utime(code, (later, later))
    run("run", "one", "--rounds", "3", "--out", "here", "--resume")
    assert said.getvalue().splitlines() == [
        "learning_rate is 0.5 in the study now; the run in here keeps 0.05, with which it began.",
        f"{code} has changed since the run in here began; the run continues with the changed file.",
    ]
    assert json.loads((tmp_path / "here" / "config.json").read_text())["config"]["learning_rate"] == 0.05


def test_the_readme_of_a_study_with_an_awkward_name_can_be_followed(run, tmp_path):
    run("init", 'my "own" study')
    text = (tmp_path / 'my "own" study' / "README.md").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("selffl report"))
    place = 'runs/my "own" study-self-fl-auto-0'
    assert shlex.split(line)[2] == place
    assert f"selffl.load({json.dumps(place)})" in text


def test_a_name_that_the_locale_cannot_take_leaves_nothing_behind(tmp_path):
    with pytest.raises(ConfigError, match=r"not readable in this locale; .* Set LC_ALL=C\.UTF-8"):
        init_command(tmp_path / "z\udcc3\udcbcrich")
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_of_errors_prefers_the_smaller():
    def outcome(seed, error):
        row = {f"{part}_error": error for part in ("weighted", "top10", "worst10", "global")}
        summary = {"weighted_accuracy": None, **row, "status": "finished", "gradient_evaluations": 80}
        rows = [{"num_train": 90, "num_test": 10}]
        return Outcome(seed, summary, [summary | {"round": 4}], [], 4, clients=rows)

    found = {
        "self-fl": [outcome(0, 0.5), outcome(1, 0.52)],
        "local": [outcome(0, 0.9), outcome(1, 0.91)],
    }
    (claim,) = comparison.better(found, "self-fl", {"local": "Better."})
    assert claim.verdict == "holds"
    assert claim.evidence.startswith("Error −0.395 ± 0.005, top tenth −0.395")
    assert comparison.better(found, "local", {"self-fl": "Better."})[0].verdict == "does not hold"
    problem = OwnProblem("mine", "Mine", "study.py:federation", "study.py:model")
    compared = Comparison(problem, {}, ("self-fl", "local"), is_tuned=False, num_seeds=2)
    result = comparison.report(compared, found, {})
    assert result.table[0] == {
        "method": "self-fl",
        "error": "0.51 ± 0.01",
        "top 10 % by size": "0.51 ± 0.01",
        "worst 10 %": "0.51 ± 0.01",
        "global model": "0.51 ± 0.01",
        "gradients": "20",
        "steps at ℓ_max": "–",
    }
    assert result.figures[0].charts[0].y_label == "error of the personal models"
    assert [row["weighted_error"] for row in result.rows] == [0.5, 0.52, 0.9, 0.91]


@pytest.mark.parametrize(
    ("stated", "expected"),
    [("", "squared_error"), ('loss = "squared_error"', "squared_error"), ('loss = "huber_loss"', "huber_loss")],
)
def test_a_study_of_values_may_leave_its_loss_out(tmp_path, stated, expected):
    (tmp_path / "study.toml").write_text(
        f'data = "study.py:federation"\nmodel = "study.py:model"\nrounds = 1\n{stated}\n', encoding="utf-8"
    )
    (tmp_path / "study.py").write_text(
        "import selffl, torch\n"
        "def federation(seed):\n"
        "    x = torch.arange(24.0).reshape(12, 2) / 24\n"
        "    return selffl.Federation.from_arrays(x, x.sum(1), [row % 3 for row in range(12)], 0.25, seed)\n"
        "def model(federation):\n"
        "    return torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(0))\n",
        encoding="utf-8",
    )
    problem = read_study(tmp_path)
    run = problem.run("fedavg", {}, seed=0, out=tmp_path / "run")
    assert (run.config.loss, run.config.metrics) == (expected, ("error",))
    assert selffl.load(tmp_path / "run", **problem.own_parts(0)).summary == run.summary


BY_METHOD = {"fedavg": 37600.0, "self-fl-auto": 9983.2, "local": 15990.0}


def test_large_errors_are_written_as_people_write_them():
    """1.598e+04 ± 1.7e+02, of prices."""
    assert points(Estimate(15983.2, 171.4, 3), "error") == "15,980 ± 170"
    assert points(Estimate(6.4371, 0.1312, 3), "error") == "6.437 ± 0.13"
    table = [{"method": name, "error": points(Estimate(mean, 171.4, 3), "error")} for name, mean in BY_METHOD.items()]
    assert best_cells(table) == {(1, "error")}


def test_a_claim_has_minus_signs_before_its_numbers():
    claim = Claim("a is better.", "holds", "Accuracy -0.31 ± 0.20 [-0.7, 0.1] at 1e-05 (self-fl-2 − fedavg).")
    assert claim.evidence == "Accuracy −0.31 ± 0.20 [−0.7, 0.1] at 1e-05 (self-fl-2 − fedavg)."
