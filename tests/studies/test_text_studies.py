"""The text studies on made-up snippets: one warm start for all, FedAvg's local models, the stand-in named."""

import gzip
import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch

import selffl
from selffl.data import sentiment, text
from selffl.errors import ConfigError
from selffl.state.files import locked
from selffl.studies import STUDIES, problems
from selffl.studies import text as module
from selffl.studies.arms import Arm, run_arms
from selffl.studies.problems import SENTIMENT, WarmUp
from selffl.studies.result import Job

WORDS = ["good", "bad", *(f"w{k}" for k in range(30))]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Twelve clients with 10 to 21 snippets each, in which a word tells what is meant."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SELFFL_DATA", str(tmp_path))
    for folder in ("glove100", "sentiment"):
        (tmp_path / folder).mkdir()
    rng = np.random.default_rng(0)
    vectors, words = (tmp_path / "glove100" / name for name in text.COMPACT)
    np.savez(vectors, vectors=rng.normal(size=(len(WORDS), 5)).astype(np.float16))
    words.write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (vectors, words)}
    monkeypatch.setattr(text, "COMPACT", digests)
    rows = ["source,document,snippet,score,text"]
    for client in range(12):
        for row in range(10 + client):
            liked = rng.random() < 0.5
            said = [*rng.choice(WORDS[2:], 3), "good" if liked else "bad"]
            rows.append(f"amazon,{client},{row},{2 if liked else -2},{' '.join(rng.permutation(said))}")
    path = tmp_path / "sentiment" / "snippets.csv.gz"
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    monkeypatch.setattr(sentiment, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    problems._load.cache_clear()
    quick = replace(
        SENTIMENT, rounds=2, participation=0.5, warm_up=WarmUp(rounds=2), model_options={"hidden": 6, "num_layers": 1}
    )
    yield quick
    problems._load.cache_clear()


@pytest.mark.slow
def test_every_method_starts_from_the_model_of_its_seeds_warm_up(small, tmp_path):
    arms = [Arm("fedavg", "fedavg", keep_scores=True), Arm("ditto", "ditto", keep_scores=True)]
    job = Job(folder=tmp_path / "runs")
    outcomes = run_arms(small, [(arm, seed) for seed in (0, 1) for arm in arms], job, 0, 4)
    for seed in (0, 1):
        fed = small.federation(seed)
        method = selffl.algorithm("fedavg", num_local_epochs=2)
        same = {"learning_rate": 0.3, "batch_size": 10, "participation": 0.5, "seed": seed, "rounds": 2}
        warm = selffl.train("lstm", fed, method, model_options=small.model_options, **same)
        scores = warm.evaluate().numbers["global"]
        for arm in arms:
            outcome = outcomes[arm.label][seed]
            assert torch.equal(outcome.scores["start"], scores)
            options = {} if arm.label == "fedavg" else {"penalty": 1.0}
            own = selffl.algorithm(arm.label, num_local_epochs=2, **options)
            run = selffl.train("lstm", fed, own, model_options=small.model_options, start=warm, **same)
            assert torch.equal(outcome.scores["personal"], run.evaluate().numbers["personal"])
            assert not torch.equal(outcome.scores["personal"], scores)
    assert not torch.equal(outcomes["fedavg"][0].scores["start"], outcomes["fedavg"][1].scores["start"])
    # Made once a seed, and found again.
    folders = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert sum(name.startswith("warm-up") for name in folders) == 2

    def times():
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/*")}

    before = times()
    again = run_arms(small, [(arm, seed) for seed in (0, 1) for arm in arms], job, 0, 4)
    assert times() == before
    assert torch.equal(again["ditto"][1].scores["personal"], outcomes["ditto"][1].scores["personal"])


def test_a_second_process_in_the_same_folder_is_refused_before_it_spoils_anything(small, tmp_path):
    with locked(tmp_path / "runs"), pytest.raises(ConfigError, match="another process is writing"):
        run_arms(small, [(Arm("fedavg", "fedavg"), 0)], Job(folder=tmp_path / "runs"), 0, 1)
    assert not list((tmp_path / "runs").glob("*/*"))


def test_problems_that_differ_in_what_a_warm_up_does_not_see_share_it(small, tmp_path):
    job, arm = Job(folder=tmp_path / "runs"), Arm("fedavg", "fedavg")
    for problem in (small, replace(small, rounds=1, title="another")):
        run_arms(problem, [(arm, 0)], job, 0, 1)
    assert len(list((tmp_path / "runs").glob("warm-up-0-*"))) == 1
    run_arms(replace(small, participation=0.25), [(arm, 0)], job, 0, 1)  # seen by one that is not pooled
    assert len(list((tmp_path / "runs").glob("warm-up-0-*"))) == 2


def test_steps_that_are_asked_for_take_the_place_of_the_problems_epochs(small):
    assert small.method("fedavg").num_local_epochs == 2
    assert small.method("fedavg", num_local_steps=50).num_local_epochs is None
    assert small.method("self-fl", max_local_steps=5).num_local_epochs is None
    assert small.method("ditto", num_local_steps=50, num_local_epochs=1).num_local_epochs == 1


@pytest.mark.slow
def test_a_method_that_diverges_does_not_take_the_study_down(small, monkeypatch):
    monkeypatch.setitem(module.ARMS, "pfedme", ("pfedme", {"penalty": 1e6}))
    short = replace(small, rounds=1, warm_up=WarmUp(rounds=1))
    result = module.methods_study(short, Job(num_seeds=2))
    table = {line["method"]: line for line in result.table}
    assert table["pfedme"]["test rows"] == "diverged"
    assert "±" in table["ditto"]["test rows"]


def test_a_run_that_lost_its_scores_is_made_again(small, tmp_path):
    job, arm = Job(folder=tmp_path / "runs"), Arm("fedavg", "fedavg", keep_scores=True)
    whole = run_arms(small, [(arm, 0)], job, 0, 1)["fedavg"][0]
    (lost,) = (tmp_path / "runs").glob("fedavg-0-*/scores.safetensors")
    lost.unlink()
    again = run_arms(small, [(arm, 0)], job, 0, 1)["fedavg"][0]
    assert torch.equal(again.scores["global"], whole.scores["global"])


def test_without_a_folder_nothing_is_left_behind(small, tmp_path):
    before = set(tmp_path.rglob("*"))
    outcome = run_arms(small, [(Arm("local", "local", keep_scores=True), 0)], Job(), 0, 1)["local"][0]
    assert set(outcome.scores) == {"personal", "global", "start"}
    assert set(tmp_path.rglob("*")) == before


def test_a_problem_without_a_warm_start_has_none_to_train(small):
    with pytest.raises(ConfigError, match=r"^sent140 has no warm start"):
        replace(small, warm_up=None).train_warm_up(0)


@pytest.mark.slow
def test_the_second_stage_shows_fedavgs_local_models_and_its_own(small):
    result = module.methods_study(small, Job(num_seeds=2))
    assert list(dict.fromkeys(row["method"] for row in result.rows)) == list(module.ARMS)
    table = {line["method"]: line for line in result.table}
    assert table["local"]["global model"] == "–"
    assert len(result.claims) == 6 + 6 + 2
    assert {claim.verdict for claim in result.claims} <= {"holds", "inconclusive", "does not hold"}
    assert result.title.endswith("(a stand-in for Sent140)")
    training, test = result.figures[0].charts
    assert training.series[0].x == [3, 4]  # counts on from the warm start
    assert [line.name for line in test.series] == list(module.ARMS)
    assert "2 local epochs; from a model trained for 2 rounds of FedAvg" in result.setting


@pytest.mark.slow
def test_the_first_stage_is_fedavg_from_scratch(small):
    result = module.warm_start_study(small, Job(num_seeds=2))
    fed = small.federation(0)
    run = selffl.train(
        "lstm", fed, selffl.algorithm("fedavg", num_local_epochs=2), model_options=small.model_options,
        rounds=2, participation=0.5, learning_rate=0.3, seed=0,
    )  # fmt: skip
    last = next(r for r in result.rows if (r["method"], r["seed"], r["round"]) == ("fedavg", 0, 2))
    assert last["weighted_accuracy"] == run.summary["weighted_accuracy"]
    # Self-FL without its parts is FedAvg: the same global models, other personal ones.
    shared = {
        label: [(row["seed"], row["round"], row["global_accuracy"]) for row in result.rows if row["method"] == label]
        for label in module.FROM_SCRATCH
    }
    assert shared["fedavg"] == shared["fedavg, local models"]
    table = {line["method"]: line for line in result.table}
    assert table["fedavg"]["test rows"] == table["fedavg"]["global model"]
    assert table["fedavg"]["training rows"] != table["fedavg, local models"]["training rows"]
    assert len(result.claims) == 2
    assert "warm" not in result.setting
    assert result.title == "FedAvg from scratch on sentiment (a stand-in for Sent140)"


def test_a_quick_look_is_smaller(small):
    problem, warm_up = module.settle_problem(replace(small, rounds=40, warm_up=WarmUp(rounds=20)), Job(quick=True))
    assert problem.model_options["hidden"] == 32
    assert (problem.rounds, warm_up.rounds) == (2, 1)
    assert problem.warm_up is warm_up


def test_every_title_names_the_stand_in_and_the_original_is_taken_where_it_is_found(monkeypatch):
    for name in ("sent140", "sent140-warmstart"):
        assert "stand-in for Sent140" in STUDIES[name].title
    monkeypatch.setattr(problems, "_is_there", lambda name: name == "sent140")
    assert problems.sent140().data == "sent140"
    monkeypatch.setattr(problems, "_is_there", lambda name: False)
    assert problems.sent140() is SENTIMENT
