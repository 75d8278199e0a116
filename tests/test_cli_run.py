"""`selffl run` and `selffl compare`: what they leave and what they say."""

import csv
import json
import os
import re
import signal
import time

import numpy as np
import pytest

import selffl
from programs import become_selffl, fork

RUN = ("run", "digits", "--rounds", "4")


@pytest.fixture
def run(command_line):
    """A function that runs the command line here, in an empty folder."""
    return command_line


def test_a_run_is_trained_recorded_and_can_be_loaded(run, tmp_path):
    code, out, err = run(*RUN, "--algorithm", "ditto", "--seed", "2", "--set", "penalty=0.1", "--set", "batch_size=5")
    assert (code, err) == (0, "")
    assert out.startswith("ditto on digits, seed 2: 4 rounds, 40 clients\n  accuracy ")
    found = selffl.load(tmp_path / "runs" / "digits-ditto-2")
    assert found.config.options["penalty"] == 0.1
    assert (found.config.batch_size, found.config.participation, found.config.seed) == (5, 0.25, 2)
    lines = dict(re.split(r"  +", line.strip()) for line in out.splitlines()[1:-1])
    assert lines["accuracy"] == f"{100 * found.summary['weighted_accuracy']:.1f} %"
    assert lines["majority class"] == f"{100 * found.summary['majority_accuracy']:.1f} %"
    assert lines["gradients"] == f"{found.summary['gradient_evaluations']:,}"
    ends = {line.index(" %") for line in out.splitlines()[1:-1] if line.endswith(" %")}
    assert len(ends) == 1  # aligned


@pytest.mark.parametrize(("rounds", "is_loose"), [(1, True), (5, False)])
def test_a_run_ends_with_how_sure_the_variance_between_clients_is(rounds, is_loose, run, tmp_path):
    """And with how much less the prior of closing visits is sure of, where that is worth a sentence."""
    code, out, err = run("run", "digits", "--rounds", str(rounds), "--out", "one")
    assert (code, err) == (0, "")
    summary = json.loads((tmp_path / "one" / "summary.json").read_text(encoding="utf-8"))
    inter, low, high = (f"{summary[f'inter_variance{end}']:.3g}" for end in ("", "_low", "_high"))
    said = f"Variance between clients: σ₀² = {inter}, between {low} and {high} with 95 % confidence."
    times = f"{1.0 / summary['closing_multiple']:.2g}"
    loosely = (
        f"Personal models were held {times} times as loosely as that says: the global model is not where clients would "
        "have it."
    )
    assert out.splitlines()[-2 - is_loose : -1] == [said, loosely][: 1 + is_loose]


def test_a_variance_by_hand_is_not_said_to_be_learned(run):
    code, out, _ = run("run", "digits", "--rounds", "3", "--out", "two", "--set", "prior_precision=5")
    assert code == 0
    assert "confidence" not in out


@pytest.fixture
def rare(tmp_path):
    """A table of two thousand rows with 1.5 % positives, and features that say nothing."""
    rng = np.random.default_rng(0)
    x, sites, labels = rng.normal(size=(2000, 3)), rng.integers(0, 8, 2000), rng.random(2000) < 0.015
    rows = [f"s{site},{a:.3f},{b:.3f},{c:.3f},{int(y)}" for site, (a, b, c), y in zip(sites, x, labels, strict=True)]
    (tmp_path / "rare.csv").write_text("\n".join(["site,a,b,c,label", *rows]) + "\n", encoding="utf-8")
    return ("init", "rare", "--csv", "rare.csv", "--client", "site")


@pytest.mark.slow
def test_noise_with_few_positives_does_not_shine(run, rare, tmp_path):
    """An accuracy of 98 % that the constant answer has as well was the first number of a run and of its page."""
    assert run(*rare)[0] == 0
    study = tmp_path / "rare" / "study.toml"
    study.write_text(study.read_text("utf-8").replace("num_local_steps = 20 ", "num_local_steps = 5 "), "utf-8")
    few = ("--rounds", "3")
    code, out, err = run("run", "rare", *few, "--out", "one")
    assert code == 0, err
    summary = json.loads((tmp_path / "one" / "summary.json").read_text(encoding="utf-8"))
    assert summary["weighted_accuracy"] > 0.95
    names = [re.split(r"  +", line.strip())[0] for line in out.splitlines()[1:5]]
    assert names[:3] == ["balanced accuracy", "AUC", "accuracy"]
    always = f"always answering it gets {100 * summary['federation_majority_accuracy']:.1f} % accuracy."
    assert always in out
    words = ("compare", "rare", "-a", "self-fl-auto,local", "--seeds", "2", *few, "--processes", "1")
    code, out, err = run(*words, "--out", "both")
    assert code == 0, err
    page = (tmp_path / "both" / "report.html").read_text(encoding="utf-8")
    (pays,) = re.findall(r'<p class="verdict"[^>]*>([^<]*)</p>', page)
    assert re.search(r"joining pays.*: with self-fl-auto, clients reach \d\d\.\d\s% balanced accuracy on ", pays, re.I)
    (said,) = re.findall(r'data-text="headline"[^>]*>([^<]*)</p>', page)
    assert re.match(r"self-fl-auto reaches \d\d\.\d\s% balanced accuracy and AUC 0\.\d\d on ", said)
    for text in (out, page):
        assert "always answering it gets 9" in text
    record = json.loads((tmp_path / "both" / "record.json").read_text(encoding="utf-8"))
    assert list(record["table"][0])[:4] == ["method", "balanced accuracy", "AUC", "accuracy"]
    assert record["claims"][0]["evidence"].startswith("Balanced accuracy ")  # which the verdict is about
    assert "steps at ℓ_max" not in out.replace("\n", " ")  # a column without a number


def test_json_is_the_summary(run, tmp_path):
    code, out, _ = run(*RUN, "--json", "--out", "here")
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "here" / "summary.json").read_text(encoding="utf-8"))


def test_a_run_goes_on_also_where_its_settings_are_given_again(run, tmp_path):
    chosen = ("--algorithm", "ditto", "--set", "penalty=0.5")
    run(*RUN, *chosen, "--out", "here")
    again = (*chosen, "--seed", "0", "--set", "batch_size=10")
    code, out, _ = run("run", "digits", "--rounds", "5", "--out", "here", "--resume", *again)
    assert code == 0
    assert ": 5 rounds, " in out
    assert run("run", "digits", "--rounds", "6", "--out", "here", "--resume")[0] == 0
    run("run", "digits", "--rounds", "6", *chosen, "--out", "whole")
    ours, theirs = selffl.load(tmp_path / "here"), selffl.load(tmp_path / "whole")
    assert ours.config == theirs.config
    assert ours.summary["weighted_accuracy"] == theirs.summary["weighted_accuracy"]


def test_resume_without_a_run_begins_one(run):
    code, _, err = run(*RUN, "--out", "new", "--resume")
    assert (code, err) == (0, "Nothing to go on with in new: a new run begins there.\n")


def test_an_interrupted_run_says_how_to_go_on(tmp_path):
    """Ctrl-C: one line on how to resume, one that it stopped, and the shell's code for it."""

    def train():
        errors = os.open(tmp_path / "errors", os.O_WRONLY | os.O_CREAT)
        os.dup2(errors, 2)
        become_selffl(["run", "digits", "--rounds", "40000", "--out", "here"], tmp_path)

    child = fork(train)
    history = tmp_path / "here" / "history.csv"
    for _ in range(3000):
        if history.is_file() and history.stat().st_size > 2000:
            break
        time.sleep(0.01)
    os.kill(child, signal.SIGINT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    err = (tmp_path / "errors").read_text(encoding="utf-8")
    assert "selffl run digits --out here --resume" in err
    assert "Traceback" not in err
    assert (tmp_path / "here" / "checkpoint.safetensors").is_file()


def test_a_method_is_tuned_and_the_run_that_follows_is_kept(run, tmp_path):
    code, out, err = run(
        "tune", "digits", "-a", "ditto", "--grid", "penalty=0.1,1", "--rounds", "2", "--set", "batch_size=5", "-v"
    )
    place = tmp_path / "runs" / "digits-ditto-tuned-0"
    tried = json.loads((place / "tuning.json").read_text(encoding="utf-8"))
    assert code == 0
    assert re.match(r"ditto with penalty = \S+: the best accuracy on \d+ validation rows of 40 clients, of \d ", out)
    assert out.rstrip().endswith(f"All settings tried: {place}/tuning.json")
    assert len(err.splitlines()) == len(tried["trials"]) >= 2
    assert err.startswith("  penalty = 0.1: 0.")
    found = selffl.load(place)
    assert found.config.options["penalty"] == tried["chosen"]["penalty"]
    assert (found.config.batch_size, found.config.rounds, found.config.evaluate_on) == (5, 2, "test")


def test_tuning_says_how_good_the_fine_tuned_model_is(run, tmp_path):
    code, out, err = run(
        "tune", "digits", "-a", "fedavg", "--grid", "fine_tune=0,20", "--rounds", "2", "--max-trials", "2"
    )
    assert (code, err) == (0, "")
    tuned = selffl.load(tmp_path / "runs" / "digits-fedavg-tuned-0").summary["personal_after_20_weighted_accuracy"]
    assert f"After 20 steps of fine-tuning: {100 * tuned:.1f} %" in out


def test_tuning_in_json(run):
    code, out, err = run("tune", "digits", "-a", "ditto", "--grid", "penalty=1", "--rounds", "1", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["chosen"], found["num_runs"], found["summary"]["algorithm"]) == ({"penalty": 1}, 1, "ditto")


def test_a_study_of_ones_own_is_tuned_on_validation_rows(run, tmp_path):
    assert run("init", "my-study")[0] == 0
    code, _, err = run("tune", "my-study", "-a", "ditto", "--grid", "penalty=0.1,1", "--rounds", "2", "--out", "one")
    assert (code, err) == (0, "")
    tried = json.loads((tmp_path / "one" / "tuning.json").read_text(encoding="utf-8"))
    assert tried["validation_rows"] > 0


@pytest.mark.slow
def test_compare_prints_a_table_and_writes_a_page(run, tmp_path):
    words = ("compare", "digits", "--algorithms", "self-fl,local", "--seeds", "2", "--rounds", "3", "--processes", "1")
    code, out, _ = run(*words)
    assert code == 0
    lines = [line for line in out.splitlines() if line.startswith(("self-fl", "local"))]
    assert [line.split()[0].rstrip(",") for line in lines[-3:-1]] == ["self-fl", "local"]
    assert re.match(r"self-fl reaches \d+\.\d % accuracy on digits: .*local", lines[-1])  # the verdict ends it
    assert "Paired over 2 seeds; corrected resampled t test (Nadeau and Bengio 2003), 5 % level." in out.splitlines()
    place = tmp_path / "runs" / "compare-digits"
    assert "self-fl" in (place / "report.html").read_text(encoding="utf-8")
    record = json.loads((place / "record.json").read_text(encoding="utf-8"))
    assert record["command"] == "selffl compare digits --algorithms self-fl,local --seeds 2 --rounds 3"
    assert len(list((place / "runs").glob("[!.]*"))) == 4
    stamps = {path: path.stat().st_mtime_ns for path in (place / "runs").glob("*/summary.json")}
    assert run(*words)[0] == 0  # nothing is trained twice
    assert {path: path.stat().st_mtime_ns for path in (place / "runs").glob("*/summary.json")} == stamps


def test_a_comparison_of_one_seed_has_no_standard_errors(run, tmp_path):
    code, out, _ = run(
        "compare", "digits", "-a", "fedavg,local", "--seeds", "1", "--rounds", "2", "--out", "one", "--json"
    )
    (claim,) = json.loads(out)["claims"]
    assert code == 0
    assert re.search(r"Accuracy [+-][\d.]+, .* points \(fedavg − local, one seed\)\.$", claim["evidence"])


def test_a_comparison_can_show_best_rounds_and_says_who_chose_them(run, tmp_path):
    code, _, _ = run("compare", "digits", "-a", "fedavg,local", "--seeds", "2", "--rounds", "4", "--best-round")
    assert code == 0
    record = json.loads((tmp_path / "runs" / "compare-digits" / "record.json").read_text(encoding="utf-8"))
    assert "--best-round" in record["command"]
    for line in record["table"]:
        folders = [entry["folder"] for entry in record["runs"] if entry["method"] == line["method"]]
        best = []
        for folder in folders:
            with (tmp_path / "runs" / "compare-digits" / "runs" / folder / "history.csv").open() as file:
                best.append(max(float(row["weighted_accuracy"] or 0) for row in csv.DictReader(file)))
        assert len(best) == 2
        assert line["best round, chosen on test rows"].startswith(f"{50 * sum(best):.1f} ± ")
