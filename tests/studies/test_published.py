"""Published tables: what is run, which round and rows a number is of, and what the bar says of made-up outcomes."""

import sys
from dataclasses import fields, replace

import pytest

from selffl.errors import ConfigError
from selffl.studies.arms import Outcome
from selffl.studies.problems import DIGITS, Problem
from selffl.studies.published import PublishedTable, Shown, Trained, at_least, published_study, report
from selffl.studies.published_problems import SHARE_ACCURACY, MobileNetProblem, SharedTestProblem
from selffl.studies.published_tables import FEDKDDC, FEDLMI, KNNPER, PFEDBAYES
from selffl.studies.result import Job

TABLES = (PFEDBAYES, FEDKDDC, FEDLMI, KNNPER)
SMALL = replace(DIGITS, rounds=3, data_options={"test_fraction": 0.3, "num_clients": 6}, num_local_steps=3)
FEDAVG = Trained(
    "fedavg",
    (
        Shown("FedAvg", ("90.5", "80")),
        Shown("FedAvg-FT", ("91 ± 0.2", "81"), fine_tune=2, differs="two steps"),
        Shown("kNN-Per", ("92", "82"), neighbours=3),
    ),
)
LOCAL = Trained("local", (Shown("local"),), settings={"learning_rate": 0.1}, most_seeds=1)


def small(problem=SMALL, **options):
    problems = {"first": problem, "second": replace(problem, rounds=2)}
    return PublishedTable("made-up", "Made up", "nowhere", problems, (FEDAVG, LOCAL), **options)


@pytest.fixture(scope="module")
def result():
    return published_study(small(num_seeds=2), Job())


def test_every_row_stands_beside_its_published_number_in_every_setting(result):
    found = [(line["setting"], line["method"], line["published"], line["seeds"]) for line in result.table]
    rows = [("FedAvg", "90.5", "80", "2"), ("FedAvg-FT", "91 ± 0.2", "81", "2"), ("kNN-Per", "92", "82", "2")]
    assert found == [
        *(("first", label, first, seeds) for label, first, _, seeds in rows),
        ("first", "local", "–", "1"),
        *(("second", label, second, seeds) for label, _, second, seeds in rows),
        ("second", "local", "–", "1"),
    ]
    for line in result.table:
        if line["published"] != "–":
            ours, gap = (float(line[name].split()[0].replace("−", "-")) for name in ("ours", "ours − published"))
            assert gap == pytest.approx(ours - float(line["published"].split()[0]), abs=0.011)
    assert result.table[1]["known to differ"] == "two steps"
    assert result.table[3]["ours − published"] == "–"


def test_views_of_one_run_are_trained_once_and_seeds_can_be_fewer(result):
    assert [(run["method"], run["seed"]) for run in result.runs] == [
        *(("first: fedavg", 0), ("first: fedavg", 1), ("first: local", 0)),
        *(("second: fedavg", 0), ("second: fedavg", 1), ("second: local", 0)),
    ]


def test_a_number_of_seeds_that_is_asked_for_is_that_of_every_row():
    table = replace(small(), problems={"one": SMALL}, methods=(LOCAL,))
    assert [line["seeds"] for line in published_study(table, Job(num_seeds=2)).table] == ["2"]


def test_scores_are_those_of_the_views_that_rows_show(tmp_path):
    """The same runs by the library itself, one seed."""
    table = small(num_seeds=1)
    found = published_study(table, Job(folder=tmp_path))
    run = SMALL.run("fedavg", {}, 0, fine_tune=(2,), neighbours=3)
    names = ("weighted_accuracy", "global_after_2_weighted_accuracy", "global_with_neighbours_weighted_accuracy")
    assert [line["ours"] for line in found.table[:3]] == [f"{100 * run.summary[name]:.2f}" for name in names]
    faster = replace(SMALL, learning_rate=0.1).run("local", {}, 0)
    assert found.table[3]["ours"] == f"{100 * faster.summary['weighted_accuracy']:.2f}"
    before = {place: place.stat().st_mtime_ns for place in tmp_path.rglob("summary.json")}
    again = published_study(table, Job(folder=tmp_path))
    assert again.table == found.table
    assert {place: place.stat().st_mtime_ns for place in tmp_path.rglob("summary.json")} == before  # read, not run


def test_the_round_is_the_one_that_the_table_reports():
    by_test = published_study(small(chosen="test", num_seeds=1), Job())
    run = SMALL.run("fedavg", {}, 0, evaluate_every=1)
    assert by_test.table[0]["ours"] == f"{100 * max(row['weighted_accuracy'] for row in run.history):.2f}"
    assert [line["round"] for line in by_test.table[:4]] == ["test", "last", "last", "test"]
    by_validation = published_study(small(chosen="validation", validation_fraction=0.3, num_seeds=1), Job())
    run = SMALL.run("fedavg", {}, 0, 0.3, evaluate_every=1, evaluate_validation=True)
    scores = [row["in_best_round_accuracy"] for row in run.clients]
    assert by_validation.table[0]["ours"] == f"{100 * sum(scores) / len(scores):.2f}"


def test_clients_that_share_their_test_rows_are_measured_by_their_own_shares():
    own = SharedTestProblem(**{each.name: getattr(SMALL, each.name) for each in fields(Problem)})
    table = small(own, metric=SHARE_ACCURACY, num_seeds=1)
    assert 0 < float(published_study(table, Job()).table[0]["ours"]) <= 100
    run = own.run("fedavg", {}, 0)
    assert {"accuracy", SHARE_ACCURACY} <= run.clients[0].keys()


def outcome(seed, score, status="finished"):
    clients = [{"num_train": 90, "num_test": 10}]
    return Outcome(seed, {"weighted_accuracy": score / 100, "status": status}, [], [], 1, clients=clients)


def made_up(published, scores):
    """The claims of a table of methods with these published numbers and these scores by seed."""
    names = ("fedavg", "fedprox", "ditto", "local", "self-fl-auto")
    methods = tuple(
        Trained(name, (Shown(name, (number,) if number else ()),))
        for name, number in zip(names, published, strict=False)
    )
    table = PublishedTable("made-up", "Made up", "nowhere", {"one": SMALL}, methods)
    groups = [[outcome(seed, score) for seed, score in enumerate(group)] for group in scores]
    return report(table, {"one": dict(zip(names, groups, strict=False))}).claims


NEAR, FAR, WIDE = (80.1, 80.2, 80.3, 80.15), (85.1, 85.2, 85.3, 85.15), (76.0, 84.0, 78.0, 83.0)


@pytest.mark.parametrize(
    ("scores", "verdict"),
    [
        ((NEAR, NEAR, NEAR, NEAR), "holds"),
        ((NEAR, NEAR, NEAR, WIDE), "inconclusive"),
        ((NEAR, NEAR, NEAR, FAR), "does not hold"),
        ((NEAR, NEAR, FAR, WIDE), "does not hold"),
    ],
)
def test_four_fifths_of_the_rows_have_to_be_within_a_point(scores, verdict):
    """Of four rows four have to be."""
    (claim,) = made_up(("80.0", "80.0", "80.0", "80.0"), scores)
    assert claim.verdict == verdict
    assert "within a point of the published number in at least 4 of 4 rows" in claim.text


def test_the_farthest_row_is_named():
    claim = made_up(("80.0", "90.0", None), (NEAR, FAR, NEAR))[0]
    assert "The mean is so in 1;" in claim.evidence
    assert "The farthest is fedprox: −4.81 ± 0.04 points." in claim.evidence


def test_our_method_is_held_against_every_row():
    above = made_up((None, None, None, None, None), (NEAR, NEAR, NEAR, NEAR, FAR))
    assert [claim.verdict for claim in above] == ["holds"]
    assert made_up((None,) * 5, (NEAR, NEAR, FAR, NEAR, NEAR))[0].verdict == "does not hold"


def test_so_many_of_several_verdicts():
    assert at_least(2, ["holds", "holds", "does not hold"]) == "holds"
    assert at_least(2, ["holds", "inconclusive", "does not hold"]) == "inconclusive"
    assert at_least(2, ["holds", "does not hold", "does not hold"]) == "does not hold"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.id)
def test_descriptions_fit_the_methods_that_there_are(table):
    """Every method takes the options, optimiser and weight decay that its row gives it, and has all its numbers."""
    assert len({trained.algorithm for trained in table.methods}) == len(table.methods)
    for trained in table.methods:
        for problem in table.problems.values():
            chosen = replace(problem, **trained.settings)
            method = chosen.method(trained.algorithm, **trained.options)
            assert chosen.optimiser == "sgd" or method.only_sgd is None
            assert not chosen.weight_decay or method.no_weight_decay is None
            is_mobile = isinstance(chosen, MobileNetProblem)
            assert not is_mobile or chosen.batch_norm == "batch" or method.no_statistics is None
        for row in trained.shown:
            assert len(row.published) in (0, len(table.problems))
            assert all(0 < float(number.split()[0]) < 100 for number in row.published)


def test_without_torchvision_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    problem = next(iter(KNNPER.problems.values()))
    with pytest.raises(ConfigError, match=r"pip install 'selffl\[known-modules\]'"):
        problem.module(SMALL.federation(0), 0)
