"""Runs as a report: what is found in folders, the tables, the sentences, the page; and one line where nothing is."""

import csv
import dataclasses
import json
import math
import re
import shutil
import statistics
import sys

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats
from statsmodels.stats.multitest import multipletests
from torch import nn

import selffl
from selffl import cli
from selffl.algorithms import Adam
from selffl.data import load
from selffl.errors import DataError, DivergedError
from selffl.reports import client_gains, data, over_rounds, page, scores, sentences, side_by_side
from selffl.reports.collect import Collection, Group, Method, collect, is_run, read_run
from selffl.reports.record import RECORD, load_studies
from selffl.runs.folder import read_config
from selffl.runs.gain import rank_correlation
from selffl.studies.comparison import Comparison, study_of
from selffl.studies.problems import PROBLEMS
from selffl.studies.result import Estimate, Job

METHODS = ("self-fl", "ditto", "fedavg", "local")
SEEDS = (1, 2, 3)


def rows_of(path):
    """A table as plain text: read without any of the code under test."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four methods with three seeds, beside each other."""
    place = tmp_path_factory.mktemp("runs")
    for name in METHODS:
        for seed in SEEDS:
            selffl.train(
                "softmax", load("digits", seed=seed), name, rounds=6, participation=0.3, evaluate_every=2,
                out=place / f"{name}-{seed}", seed=seed,
            )  # fmt: skip
    return place


@pytest.fixture(scope="module")
def group(folder):
    (found,) = collect([folder]).groups
    return found


@pytest.fixture(scope="module")
def tables(group):
    return data.tables(group)


# ------------------------------------------------------------------------------------------------------- collecting


def test_runs_on_the_same_data_are_one_group_with_self_fl_first(group):
    assert [method.label for method in group.methods] == ["self-fl", "ditto", "fedavg", "local"]
    assert [[run.config.seed for run in method.runs] for method in group.methods] == [list(SEEDS)] * 4
    assert group.seeds == list(SEEDS)


def test_runs_given_one_by_one_are_the_same_group(folder):
    (found,) = collect([folder / "local-1", folder / "self-fl-1", folder / "self-fl-1"]).groups
    assert [(method.label, len(method.runs)) for method in found.methods] == [("self-fl", 1), ("local", 1)]


def test_runs_of_one_method_are_told_apart_by_what_differs(folder, tmp_path):
    for penalty in (0.1, 2.0):
        selffl.train(
            "softmax", load("digits", seed=1), selffl.algorithm("ditto", penalty=penalty), rounds=1, seed=1,
            out=tmp_path / f"with-{penalty}",
        )  # fmt: skip
    shutil.copytree(tmp_path / "with-0.1", tmp_path / "again")
    (found,) = collect([tmp_path]).groups
    assert sorted(method.label for method in found.methods) == [
        "ditto, penalty = 0.1, again",
        "ditto, penalty = 0.1, with-0.1",
        "ditto, penalty = 2.0",
    ]


def test_other_data_or_another_metric_is_another_group(folder, tmp_path):
    torch.manual_seed(0)
    x, client = torch.randn(60, 4), torch.arange(60) % 6
    rows = selffl.Federation.from_arrays(x, x @ torch.randn(4), client, test_fraction=0.3)
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    selffl.train(model, rows, "self-fl", rounds=1, loss=nn.functional.mse_loss, out=tmp_path / "values")
    shutil.copytree(folder / "ditto-1", tmp_path / "ditto")
    assert sorted(found.metric for found in collect([tmp_path]).groups) == ["accuracy", "error"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison as `selffl compare` leaves it."""
    from dataclasses import replace

    from selffl.reports.record import save_study

    place = tmp_path_factory.mktemp("compared")
    problem = replace(PROBLEMS["digits"](), rounds=3)
    comparison = Comparison(problem, {"local": "Joining is better."}, ("ditto", "local"), is_tuned=False, num_seeds=2)
    study = study_of(comparison, "compare-digits")
    save_study(
        study, study.run(Job(folder=place / "runs")), place, command="selffl compare …", is_quick=False, seconds=1
    )
    return place


@pytest.mark.slow
def test_a_comparison_names_its_runs_and_others_in_its_folder_are_not_shown(compared, tmp_path):
    place = tmp_path / "moved"
    shutil.copytree(compared, place)
    ((_, record),) = load_studies(place)
    assert [(run["method"], run["seed"]) for run in record.runs] == [
        ("ditto", 0),
        ("ditto", 1),
        ("local", 0),
        ("local", 1),
    ]
    old = place / "runs" / record.runs[0]["folder"]
    stale = place / "runs" / "ditto-0-000000000000"
    shutil.copytree(old, stale)  # of an earlier call with other options
    found = collect([place])
    assert [(m.label, len(m.runs)) for m in found.groups[0].methods] == [("ditto", 2), ("local", 2)]
    assert stale not in [run.folder for run in found.groups[0].runs]
    assert found.groups[0].record == record
    assert len(found.groups) == 1
    assert found.studies == []
    # A run begun since the record was written is not the study's: a new comparison is on its way.
    import os

    later = (place / RECORD).stat().st_mtime + 10
    os.utime(stale / "config.json", (later, later))
    assert [len(group.runs) for group in collect([place]).groups] == [4, 1]


@pytest.mark.slow
def test_a_comparison_whose_runs_are_gone_is_shown_by_its_record(compared, tmp_path):
    shutil.copy(compared / RECORD, tmp_path / RECORD)
    found = collect([tmp_path])
    assert found.groups == []
    assert [record.id for _, record in found.studies] == ["compare-digits"]


# ------------------------------------------------------------------------------------------------------- over seeds


def final(folder, method, name):
    return [json.loads((folder / f"{method}-{seed}" / "summary.json").read_text())[name] for seed in SEEDS]


@pytest.mark.parametrize("part", ["weighted", "worst10", "top10", "global"])
def test_the_table_has_means_and_standard_errors_over_seeds(folder, group, part):
    for line in scores.lines(group):
        if (line.method, part) == ("local", "global"):
            assert part not in line.scores  # the model that local training starts from is nobody's result
            continue
        values = [100 * value for value in final(folder, line.method, f"{part}_accuracy")]
        assert line.scores[part].mean == pytest.approx(statistics.mean(values), abs=1e-9)
        assert line.scores[part].error == pytest.approx(statistics.stdev(values) / math.sqrt(3), abs=1e-9)


def test_differences_are_paired_and_tested_by_the_corrected_resampled_t_test(folder, group):
    first = np.array(final(folder, "self-fl", "weighted_accuracy"))
    rows = [row for seed in SEEDS for row in rows_of(folder / f"self-fl-{seed}" / "clients.csv")]
    ratio = sum(int(row["num_test"]) for row in rows) / sum(int(row["num_train"]) for row in rows)
    found, alone = scores.lines(group), []
    assert found[0].verdict == "first"
    assert found[0].p_value is None
    for line in found[1:]:
        gaps = np.array(final(folder, line.method, "weighted_accuracy")) - first
        assert line.difference.mean == pytest.approx(100 * gaps.mean())
        # Nadeau and Bengio (2003), written out.
        statistic = gaps.mean() / math.sqrt((1 / len(gaps) + ratio) * gaps.var(ddof=1))
        alone.append(2 * stats.t.sf(abs(statistic), len(gaps) - 1))
    expected = multipletests(alone, method="holm")[1]
    for line, p in zip(found[1:], expected, strict=True):
        assert line.p_value == pytest.approx(p)
        significant = "better" if line.difference.mean > 0 else "worse"
        assert line.verdict == (significant if p < 0.05 else "inconclusive")


@pytest.mark.parametrize(
    ("gap", "is_higher_better", "verdict"),
    [
        (Estimate(3.0, 0.1, 5, 1 / 9), True, "better"),
        (Estimate(3.0, 0.1, 5, 1 / 9), False, "worse"),
        (Estimate(-3.0, 0.1, 5, 1 / 9), False, "better"),
        (Estimate(3.0, 2.0, 5, 1 / 9), True, "inconclusive"),
        (Estimate(3.0, math.nan, 1, 1 / 9), True, "above"),
        (Estimate(-3.0, math.nan, 1, 1 / 9), True, "below"),
        (Estimate(0.0, math.nan, 1, 1 / 9), True, "equal"),
        (None, True, "unknown"),
    ],
)
def test_verdicts(gap, is_higher_better, verdict):
    (p,) = scores.p_values([gap])
    assert scores.verdict(gap, p, is_higher_better) == verdict


def with_scores(run, value, clients=({"client": "a", "num_train": 90, "num_test": 10},)):
    records = dataclasses.replace(
        run.records, summary=run.records.summary | {"weighted_accuracy": value}, clients=list(clients)
    )
    return dataclasses.replace(run, records=records)


def made_up(group, gaps, **more):
    """The group with five seeds of two methods that differ by these accuracies."""
    one = group.methods[0].runs[0]
    runs = [
        tuple(
            with_scores(
                dataclasses.replace(one, config=dataclasses.replace(one.config, seed=seed, fingerprint=str(seed))),
                value,
                **more,
            )
            for seed, value in enumerate(values)
        )
        for values in ([0.9] * len(gaps), [0.9 - gap for gap in gaps])
    ]
    return Group((Method("ours", runs[0]), Method("theirs", runs[1])))


GAPS = (0.011, 0.001, 0.014, 0.003, 0.008)  # of which the plain paired t test makes p = 0.038


def test_a_lead_that_only_the_plain_t_test_sees_is_inconclusive(group):
    """Seeds split the same rows anew: the page called this one clearly better."""
    assert stats.ttest_1samp(GAPS, 0.0).pvalue == pytest.approx(0.038, abs=0.001)
    found = made_up(group, GAPS)
    assert scores.lines(found)[1].p_value == pytest.approx(0.070, abs=0.001)
    text = page.render(Collection([found], []))
    assert "inconclusive against theirs" in text
    assert "better than theirs" not in text
    assert "corrected resampled t test (Nadeau and Bengio 2003), 5\u00a0% level" in text


def test_runs_that_have_not_recorded_their_rows_are_told_so(group):
    found = made_up(group, GAPS, clients=[{"client": "a", "num_train": None, "num_test": None}])
    assert scores.lines(found)[1].p_value == pytest.approx(0.070, abs=0.001)
    assert "a tenth of them taken to be test rows" in sentences.name_test(found)
    assert "a tenth of them" not in sentences.name_test(made_up(group, GAPS))


def test_seeds_of_one_split_are_told_so(group):
    found = made_up(group, GAPS)
    same = [
        Method(
            m.label,
            tuple(dataclasses.replace(run, config=dataclasses.replace(run.config, fingerprint="a")) for run in m.runs),
        )
        for m in found.methods
    ]
    assert "share one split" in sentences.name_test(Group(tuple(same)))
    assert "share one split" not in sentences.name_test(found)


def test_by_round_has_the_evaluated_rounds_of_the_records(folder, group):
    for method, curve in zip(group.methods, scores.by_round(group, "weighted"), strict=True):
        runs = [rows_of(folder / f"{method.label}-{seed}" / "history.csv") for seed in SEEDS]
        assert curve["x"] == [2, 4, 6]
        for number, mean, error in zip(curve["x"], curve["y"], curve["error"], strict=True):
            values = [100 * float(rows[number - 1]["weighted_accuracy"]) for rows in runs]
            assert mean == pytest.approx(statistics.mean(values), rel=1e-4)
            assert error == pytest.approx(statistics.stdev(values) / math.sqrt(3), rel=1e-4, abs=1e-9)
    assert scores.by_round(group, "global")[3] is None


# ---------------------------------------------------------------------------------------------------------- clients


def test_clients_have_the_numbers_of_their_files(folder, group, tables):
    assert [table["seed"] for table in tables["seeds"]] == list(SEEDS)
    for table in tables["seeds"]:
        assert table["train"] == sorted(table["train"], reverse=True)
        for number, method in enumerate(METHODS[:1] + METHODS[1:]):
            rows = {row["client"]: row for row in rows_of(folder / f"{method}-{table['seed']}" / "clients.csv")}
            assert set(table["clients"]) == set(rows)
            own = table["methods"][number]
            for place, client in enumerate(table["clients"]):
                assert own["personal"][place] == pytest.approx(100 * float(rows[client]["accuracy"]), rel=1e-4)
                assert table["train"][place] == int(rows[client]["num_train"])
                if method != "local":
                    assert own["global"][place] == pytest.approx(100 * float(rows[client]["global_accuracy"]), rel=1e-4)
                if method == "self-fl":
                    for name, column in (("predicted", "predicted_gain"), ("variance", "intra_variance")):
                        cell = rows[client][column]
                        assert own[name][place] == (pytest.approx(float(cell), rel=1e-4) if cell else None)
            assert ("variance" in own) == (method == "self-fl")


def test_weights_are_those_of_the_clients_last_round(folder, tables):
    table = tables["seeds"][0]
    last = {row["client"]: row["weight"] for row in rows_of(folder / "self-fl-1" / "participation.csv")}
    for client, weight in zip(table["clients"], table["methods"][0]["weight"], strict=True):
        assert weight == (pytest.approx(float(last[client]), rel=1e-3) if client in last else None)


def test_a_gain_is_over_training_alone_on_the_same_seed(folder, group, tables):
    joined = {row["client"]: float(row["accuracy"]) for row in rows_of(folder / "ditto-2" / "clients.csv")}
    alone = {row["client"]: float(row["accuracy"]) for row in rows_of(folder / "local-2" / "clients.csv")}
    found, base = client_gains.gains(group, tables["seeds"][1], 1)
    assert base == "training alone"
    for client, gain in zip(tables["seeds"][1]["clients"], found, strict=True):
        assert gain == pytest.approx(100 * (joined[client] - alone[client]), abs=2e-3)


def test_without_training_alone_a_gain_is_over_the_global_model(folder):
    (found,) = collect([folder / "ditto-1"]).groups
    table = data.clients_of_seed(found, 1)
    gains, base = client_gains.gains(found, table, 0)
    assert base == "the global model"
    rows = {row["client"]: row for row in rows_of(folder / "ditto-1" / "clients.csv")}
    for client, gain in zip(table["clients"], gains, strict=True):
        expected = 100 * (float(rows[client]["accuracy"]) - float(rows[client]["global_accuracy"]))
        assert gain == pytest.approx(expected, abs=2e-3)


def test_of_an_error_less_is_a_gain(tmp_path):
    torch.manual_seed(0)
    x, client = torch.randn(120, 4), torch.arange(120) % 6
    rows = selffl.Federation.from_arrays(x, x @ torch.randn(4), client, test_fraction=0.3)
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    run = selffl.train(model, rows, "self-fl", rounds=3, loss=nn.functional.mse_loss, out=tmp_path / "values")
    (found,) = collect([tmp_path / "values"]).groups
    table = data.clients_of_seed(found, 0)
    gains, _ = client_gains.gains(found, table, 0)
    expected = {str(row["client"]): row["global_error"] - row["error"] for row in run.clients}
    assert gains == [pytest.approx(expected[client], rel=1e-3, abs=1e-4) for client in table["clients"]]
    assert table["classes"] is None
    text = page.render(collect([tmp_path / "values"]))
    assert f"reaches error {run.summary['weighted_error']:.4g} on" in text
    assert " %" not in sentences.headline(found)


def test_the_partition_holds_every_training_row(folder, tables):
    table = tables["seeds"][0]
    classes = table["classes"]
    found = {
        (table["clients"][client], classes["names"][label]): rows
        for client, label, rows in zip(classes["client"], classes["class"], classes["rows"], strict=True)
    }
    expected = {
        (row["client"], row["class"]): int(row["num_train"])
        for row in rows_of(folder / "self-fl-1" / "partition.csv")
        if int(row["num_train"])
    }
    assert found == expected
    assert sum(found.values()) == sum(table["train"])


def test_rank_correlation_against_ranks_by_hand():
    one, other = [1.0, 2.0, None, 4.0, 8.0], [3.0, 1.0, 7.0, 2.0, 9.0]
    rho, p, count = rank_correlation(one, other)
    # Ranks 1 2 3 4 against 3 1 2 4: 1 − 6 Σd² / (n (n² − 1)) = 1 − 6 · 6 / 60.
    assert (rho, count) == (pytest.approx(0.4), 4)
    assert 0 < p < 1
    assert rank_correlation([1.0, 2.0, 3.0], [5.0, 5.0, 5.0]) is None
    assert rank_correlation([1.0, 2.0], [5.0, 6.0]) is None


@pytest.mark.parametrize("numbers", [10, 40])
def test_rank_correlation_is_that_of_scipy_ties_and_all(numbers):
    draws = np.random.default_rng(numbers).integers(0, numbers // 2, (2, numbers)).astype(float)
    for one, other in (draws, (draws[0], draws[0]), (draws[0], -draws[0])):
        expected = stats.spearmanr(one, other)
        assert rank_correlation(one.tolist(), other.tolist()) == (expected.statistic, expected.pvalue, numbers)


# ----------------------------------------------------------------------------------------------------------- inside


def test_variances_steps_and_weights_by_round(folder, group):
    found = over_rounds.inside(group, 0)
    runs = [rows_of(folder / f"self-fl-{seed}" / "history.csv") for seed in SEEDS]
    taken = [row for seed in SEEDS for row in rows_of(folder / f"self-fl-{seed}" / "participation.csv")]
    assert found["rounds"] == [1, 2, 3, 4, 5, 6]
    for place, number in enumerate(found["rounds"]):
        inter = [float(rows[number - 1]["inter_variance"]) for rows in runs]
        assert found["inter"][place] == pytest.approx(statistics.mean(inter), rel=1e-4)
        for name, column in (("steps", "num_local_steps"), ("weight", "weight")):
            values = [float(row[column]) for row in taken if row["round"] == str(number)]
            assert found[name]["middle"][place] == pytest.approx(statistics.median(values), rel=1e-3)
            assert found[name]["low"][place] == pytest.approx(np.percentile(values, 10), rel=1e-3)
            assert found[name]["high"][place] == pytest.approx(np.percentile(values, 90), rel=1e-3)
    wanted = [float(row["wanted_steps"]) for row in taken if row["wanted_steps"]]
    assert sum(found["counts"]) == len(wanted)
    assert found["counts"][0] == sum(value < 2 for value in wanted)
    assert found["counts"][-1] == sum(value >= 640 for value in wanted)
    assert over_rounds.inside(group, 1) is None  # DITTO knows no variances


def test_a_path_is_a_clients_rounds(folder, tables):
    path = tables["paths"][0]
    assert (path["seed"], path["method"], path["every"]) == (1, 0, 1)
    ids = tables["seeds"][0]["clients"]
    found = sorted((path["round"][i], ids[path["client"][i]], path["steps"][i]) for i in range(len(path["round"])))
    rows = rows_of(folder / "self-fl-1" / "participation.csv")
    assert found == sorted((int(row["round"]), row["client"], int(row["num_local_steps"])) for row in rows)


def test_what_does_not_fit_is_left_out_evenly_and_said(group, monkeypatch):
    monkeypatch.setattr(data, "MAX_CLIENTS", 10)
    monkeypatch.setattr(data, "MAX_ROWS", 80)
    monkeypatch.setattr(over_rounds, "MAX_POINTS", 10)
    monkeypatch.setattr(over_rounds, "MAX_ROUNDS", 3)
    tables = data.tables(group)
    assert [table["seed"] for table in tables["seeds"]] == [1, 2]
    table = tables["seeds"][0]
    assert (len(table["clients"]), table["total"]) == (10, 40)
    everyone = data.clients_of_seed(group, 1)["train"]
    assert table["train"][0] == max(run["num_train"] for run in group.methods[0].runs[0].records.clients)
    assert everyone == table["train"]
    assert len(tables["paths"][0]["round"]) <= 20
    assert tables["inside"][0]["rounds"] == [1, 4, 6] or len(tables["inside"][0]["rounds"]) == 3
    assert "10 are shown, evenly chosen by size." in sentences.takeaways(group, tables)["clients"]
    assert "This page holds those of 2 seeds (1, 2) of 3." in page._seeds(tables)
    every = tables["paths"][0]["every"]
    assert every > 1
    said = sentences.takeaways(group, tables)["inside"]
    assert f"the curves have 3 of 6 rounds; of each client one in {every} of the rounds it took part in" in said
    absent = {(seed, 0) for seed in (1, 2)} - {(path["seed"], path["method"]) for path in tables["paths"]}
    assert ("rounds of single clients are left out for self-fl, seed 2" in said) == bool(absent)


@pytest.mark.parametrize("seeds", [(1,), (1, 2)])
def test_how_sure_the_variance_between_clients_is_stands_beside_it(folder, tmp_path, seeds):
    ends = {1: (0.04, 0.09), 2: (0.0, 0.15)}
    for seed in seeds:
        path = shutil.copytree(folder / f"self-fl-{seed}", tmp_path / f"run-{seed}") / "summary.json"
        summary = json.loads(path.read_text(encoding="utf-8"))
        summary |= dict(zip(("inter_variance_low", "inter_variance_high"), ends[seed], strict=True))
        path.write_text(json.dumps(summary), encoding="utf-8")
    (found,) = collect([tmp_path]).groups
    said = sentences.takeaways(found, data.tables(found))["inside"]
    expected = {
        1: "between clients (between 0.04 and 0.09 with 95 % confidence) and ",
        2: "between clients (between 0.02 and 0.12 with 95 % confidence on average over seeds) and ",
    }
    assert expected[len(seeds)] in said


def test_a_variance_by_closing_rounds_stands_before_that_of_training(folder, tmp_path):
    path = shutil.copytree(folder / "self-fl-1", tmp_path / "run") / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8"))
    closed = {"inter_variance": 0.05, "inter_variance_low": 0.0, "inter_variance_high": 0.4, "closing_multiple": 0.9}
    path.write_text(json.dumps(summary | closed), encoding="utf-8")
    (found,) = collect([tmp_path]).groups
    said = sentences.takeaways(found, data.tables(found))["inside"]
    assert "has a variance of 0.05 between clients (between 0 and 0.4 with 95 % confidence); the last round of" in said


def test_a_method_that_gives_no_interval_says_nothing_of_one(group, tables):
    assert tables["inside"][0]["interval"] is None
    assert "confidence" not in sentences.takeaways(group, tables)["inside"]


def test_a_page_that_holds_everything_says_nothing_of_room(group, tables):
    assert "To keep the page small" not in sentences.takeaways(group, tables)["inside"]


def test_who_wants_infinitely_many_steps_is_in_the_last_bin(folder, tmp_path):
    shutil.copytree(folder / "self-fl-1", tmp_path / "run")
    path = tmp_path / "run" / "participation.csv"
    rows = rows_of(path)
    for row in rows:
        row["wanted_steps"] = "inf"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (found,) = collect([tmp_path / "run"]).groups
    assert over_rounds.inside(found, 0)["counts"] == [0] * (len(over_rounds.STEP_BINS) - 1) + [len(rows)]
    expected = f"100 % of the {len(rows)} client-rounds it has chosen steps for want ℓ_max = 40 or more"
    assert expected in sentences.takeaways(found, data.tables(found))["inside"]
    page.render(collect([tmp_path / "run"]))


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.123456789, 0.12346), (123456.7, 123460), (0.0, 0), (2.0, 2), (math.nan, None), (None, None)],
)
def test_rounding(value, expected):
    found = scores.round_digits(value)
    assert found == expected
    assert not (isinstance(found, float) and found.is_integer())  # 2, not 2.0: a page holds many of them


# ------------------------------------------------------------------------------------------------------------ words


def test_the_headline_says_what_the_tests_say(group):
    text = sentences.headline(group)
    score = scores.lines(group)[0].scores["weighted"].mean
    assert text.startswith(f"self-fl reaches {score:.1f} % accuracy on digits: ")
    assert sentences.name_test(group) == (
        "Paired over 3 seeds; corrected resampled t test (Nadeau and Bengio 2003), Holm over 3 comparisons, 5 % level."
    )
    assert text.count(".") == text.count(f"{score:.1f}") + 1  # one sentence
    said = {"worse": "better than", "better": "worse than", "inconclusive": "inconclusive against"}
    for line in scores.lines(group)[1:]:
        part = next(part for part in text.split(": ", 1)[1].split(";") if line.method in part)
        assert said[line.verdict] in part


def test_one_seed_is_not_tested(folder):
    (found,) = collect([folder / "self-fl-1", folder / "fedavg-1"]).groups
    text = sentences.headline(found)
    first, second = (line.scores["weighted"].mean for line in scores.lines(found))
    relation = "above" if first > second else "below" if first < second else "level with"
    assert text.endswith(f": {relation} fedavg (one seed: nothing is tested).")
    assert sentences.name_test(found) == ""


def test_a_single_run_is_told_by_itself(folder):
    (found,) = collect([folder / "ditto-2"]).groups
    summary = json.loads((folder / "ditto-2" / "summary.json").read_text())
    assert sentences.headline(found) == (
        f"ditto reaches {100 * summary['weighted_accuracy']:.1f} % accuracy on digits with a model for every client, "
        f"{100 * summary['global_accuracy']:.1f} % with the one they share, "
        f"{100 * summary['worst10_accuracy']:.1f} % for the worst tenth of clients."
    )
    assert found.title == "ditto on digits"


def test_who_gains_is_counted(group, tables):
    gains, _ = client_gains.gains(group, tables["seeds"][0], 0)
    found = [gain for gain, rows in zip(gains, tables["seeds"][0]["test"], strict=True) if rows >= 10]
    up, down, of = sum(value > 0 for value in found), sum(value < 0 for value in found), len(found)
    assert 0 < of < 40
    text = sentences.takeaways(group, tables)["gains"]
    assert (
        f"{up} of {of} clients are better off than with training alone, {down} worse off, {of - up - down} the same"
        in text
    )
    assert f"{40 - of} clients with fewer than 10 test rows are grey and not counted." in text


@pytest.mark.parametrize(
    ("verdict", "p", "start"),
    [
        ("worse", 0.01, "Joining pays: with self-fl, clients reach "),
        ("better", 0.01, "Joining does not pay: with self-fl, clients reach "),
        ("inconclusive", 0.5, "Whether joining pays is open: with self-fl, clients reach "),
    ],
)
def test_the_verdict_says_whether_joining_pays(folder, group, monkeypatch, verdict, p, start):
    lines = scores.lines(group)
    chosen = [
        dataclasses.replace(line, verdict=verdict, p_value=p) if line.method == "local" else line for line in lines
    ]
    monkeypatch.setattr(scores, "lines", lambda _: chosen)
    of = {
        name: statistics.mean(
            100 * json.loads((folder / f"{name}-{seed}" / "summary.json").read_text())["weighted_accuracy"]
            for seed in SEEDS
        )
        for name in METHODS
    }
    text = sentences.verdict(group).replace("\N{NO-BREAK SPACE}", " ")
    assert text == (
        f"{start}{of['self-fl']:.1f} % accuracy on their own test rows, against {of['local']:.1f} % alone and "
        f"{of['fedavg']:.1f} % with one shared model."
    )


def test_one_seed_or_nobody_alone_has_another_verdict_or_none(folder):
    (one,) = collect([folder / "self-fl-1", folder / "local-1"]).groups
    assert re.match(
        r"Joining (looks better|looks worse|changes nothing) \(one seed, not tested\): ", sentences.verdict(one)
    )
    (other,) = collect([folder / "self-fl-1", folder / "ditto-1"]).groups
    assert sentences.verdict(other) == ""


def test_curves_know_what_was_spent_and_each_seed(folder, tables):
    for name, curve in zip(METHODS, tables["rounds"]["weighted"], strict=True):
        runs = [rows_of(folder / f"{name}-{seed}" / "history.csv") for seed in SEEDS]
        for place, number in enumerate(curve["x"]):
            for key, column in (("gradients", "gradient_evaluations"), ("seconds", "seconds")):
                expected = statistics.mean(float(rows[number - 1][column]) for rows in runs)
                assert curve[key][place] == pytest.approx(expected, rel=1e-4)
            values = [100 * float(rows[number - 1]["weighted_accuracy"]) for rows in runs]
            assert [one[place] for one in curve["single"]] == pytest.approx(values, rel=1e-4)


def test_the_call_trains_the_same_run_again(folder):
    for name in ("self-fl-2", "ditto-1"):
        text = sentences.call(read_config(folder / name))
        scope = {}
        before, called = text.split("selffl.train(")
        exec(f"{before}\nrun = selffl.train({called}", scope)
        expected = [row["weighted_accuracy"] for row in rows_of(folder / name / "history.csv")]
        found = [
            "" if row["weighted_accuracy"] is None else str(row["weighted_accuracy"]) for row in scope["run"].history
        ]
        assert found == expected


def squares(outputs, labels):
    return nn.functional.mse_loss(outputs, labels)


def largest_miss(outputs, labels):
    return (outputs - labels).abs().max()


def sites(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(120, 3)).astype(np.float32)
    return selffl.Federation.from_arrays(x, x.sum(1), [f"s{k % 6}" for k in range(120)], test_fraction=0.3)


def line():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))


@pytest.mark.parametrize(
    "given",
    [
        {"loss": nn.functional.mse_loss, "dtype": torch.float64, "evaluate_train": True},
        {"loss": squares, "metrics": {"largest_miss": largest_miss}, "optimiser": "momentum"},
        {"loss": nn.functional.l1_loss, "optimiser": Adam(beta1=0.8), "chunk_size": 2, "fine_tune": (2,)},
        {"loss": nn.functional.mse_loss, "start": line(), "gradients": "vmap"},
    ],
)  # fmt: skip
def test_the_call_has_whatever_is_not_usual_and_names_what_the_reader_has_to_bring(given, tmp_path):
    run = selffl.train(line(), sites(), "fedavg", rounds=2, participation=0.5, out=tmp_path / "run", **given)
    text = sentences.call(read_config(tmp_path / "run"))
    first, rest = text.split("\n", 1)
    own = ["model", "federation"]
    own += ["loss"] if given["loss"] is squares else []
    own += [name for name in ("metrics", "start") if name in given]
    assert first == f"# Of your own, as in this run: {', '.join(own)}."
    scope = {"model": line(), "federation": sites()} | {name: given[name] for name in own[2:]}
    exec(rest.replace("selffl.train(", "run = selffl.train("), scope)
    kept = [name for name in run.history[0] if name != "seconds"]
    for mine, theirs in zip(scope["run"].history, run.history, strict=True):
        assert {name: mine[name] for name in kept} == {name: theirs[name] for name in kept}
    assert scope["run"].config == dataclasses.replace(run.config, fingerprint="")


# ------------------------------------------------------------------------------------------------------------- page


def test_a_run_that_diverged_in_its_first_round_is_not_left_out(tmp_path):
    settings = {"rounds": 3, "participation": 0.5, "loss": nn.functional.mse_loss}
    selffl.train(line(), sites(), "self-fl", out=tmp_path / "self-fl", **settings)
    with pytest.raises(DivergedError):
        selffl.train(line(), sites(), "fedavg", out=tmp_path / "fedavg", learning_rate=1e3, **settings)
    assert rows_of(tmp_path / "fedavg" / "history.csv") == []
    (found,) = collect([tmp_path]).groups
    assert [method.label for method in found.methods] == ["self-fl", "fedavg"]
    assert sentences.headline(found).endswith("on your own rows; fedavg diverged (NaN or infinity).")
    assert "diverged" in [cell["text"] for cell in page._table(found)[0][1][1:]]
    page.render(collect([tmp_path]))
    (alone,) = collect([tmp_path / "fedavg"]).groups
    assert sentences.headline(alone) == "fedavg diverged (NaN or infinity)."
    page.render(collect([tmp_path / "fedavg"]))


def test_the_headline_counts_the_pairs_and_not_the_seeds_of_the_first(folder, tmp_path):
    for name in ("self-fl-1", "self-fl-2", "self-fl-3", "ditto-1", "ditto-2", "ditto-3"):
        shutil.copytree(folder / name, tmp_path / name)
    path = tmp_path / "ditto-3" / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "diverged"}), encoding="utf-8")
    (found,) = collect([tmp_path]).groups
    assert sentences.name_test(found) == (
        "Paired over 2 seeds; corrected resampled t test (Nadeau and Bengio 2003), 5 % level."
    )


def test_a_diverged_run_is_named_and_does_not_break_the_page(folder, tmp_path):
    for name in ("self-fl-1", "ditto-1"):
        shutil.copytree(folder / name, tmp_path / name)
    path = tmp_path / "ditto-1" / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "diverged"}), encoding="utf-8")
    (found,) = collect([tmp_path]).groups
    assert "diverged" in [cell["text"] for cell in page._table(found)[0][1][1:]]
    assert "<td" in page.render(collect([tmp_path]))
    assert scores.lines(found)[1].num_diverged == 1


NASTY = [
    "</script><script>alert(1)</script>",
    "quote \" and ' and `",
    "Zürich 🏥",
    "<b>b</b>&amp;",
    "$x$",
    "a\\b",
    "__proto__",
]


def renamed(source, target):
    """A run whose clients have ids that would break a careless page."""
    shutil.copytree(source, target)
    for name in ("clients.csv", "participation.csv", "partition.csv"):
        rows = rows_of(target / name)
        ids = {str(number): client for number, client in enumerate(NASTY)}
        for row in rows:
            row["client"] = ids.get(row["client"], row["client"])
        with (target / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def embedded(text):
    (found,) = re.findall(r'<script type="application/json" id="report-data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


def test_an_id_cannot_end_the_script_that_holds_it(folder, tmp_path):
    renamed(folder / "self-fl-1", tmp_path / "run")
    text = page.render(collect([tmp_path / "run"]))
    assert "alert(1)</script>" not in text
    (group,) = embedded(text)["groups"]
    assert set(NASTY) <= set(group["tables"]["seeds"][0]["clients"])


def test_two_comparisons_stand_beside_each_other(folder):
    first = collect([folder / "self-fl-1", folder / "local-1"]).groups
    second = collect([folder / f"{name}-{seed}" for name in ("self-fl", "ditto") for seed in (2, 3)]).groups
    found = Collection(groups=[*first, *second])
    table = side_by_side.beside(found.groups)
    assert len(set(table["columns"])) == 2
    assert [name for name, _ in table["rows"]] == ["self-fl", "local", "ditto"]
    for method, place, seeds in (("self-fl", 0, (1,)), ("self-fl", 1, (2, 3)), ("ditto", 1, (2, 3))):
        values = [
            100 * json.loads((folder / f"{method}-{seed}" / "summary.json").read_text())["weighted_accuracy"]
            for seed in seeds
        ]
        assert dict(table["rows"])[method][place].split()[0] == f"{statistics.mean(values):.1f}"
    assert dict(table["rows"])["ditto"][0] == "–"
    text = page.render(found)
    assert "Comparisons side by side" in text
    assert "Comparisons side by side" not in page.render(collect([folder]))


def test_the_page_says_what_the_records_say(folder, group):
    text = page.render(collect([folder])).replace("\u00a0%", " %")
    assert sentences.headline(group) in text
    for line in scores.lines(group):
        score = line.scores["weighted"]
        assert f"{score.mean:.1f} ± {score.error:.1f}" in text
    (shown,) = embedded(text)["groups"]
    assert shown["tables"] == json.loads(json.dumps(data.tables(group)))
    assert len(text.encode()) < 6_000_000


def test_methods_without_variances_have_no_such_section(folder):
    text = page.render(collect([folder / "ditto-1"]))
    assert 'data-chart="variances"' not in text
    assert 'data-chart="gains"' in text
    assert 'data-chart="variances"' in page.render(collect([folder / "self-fl-1"]))


def test_clusters_are_shown_where_there_are_some(folder, tmp_path):
    assert 'data-chart="clusters"' not in page.render(collect([folder / "self-fl-1"]))
    rows = load("digits", seed=1)
    from dataclasses import replace

    clustered = replace(rows, cluster=torch.arange(rows.num_clients) % 3, source=None)
    selffl.train("softmax", clustered, "self-fl-cluster", rounds=2, participation=0.5, out=tmp_path / "run")
    found = collect([tmp_path / "run"])
    table = data.clients_of_seed(found.groups[0], 0)
    expected = {row["client"]: row["cluster"] for row in rows_of(tmp_path / "run" / "clients.csv")}
    assert [str(cluster) for cluster in table["cluster"]] == [expected[client] for client in table["clients"]]
    assert 'data-chart="clusters"' in page.render(found)


def test_a_run_over_flower_names_its_sites(folder, tmp_path):
    shutil.copytree(folder / "self-fl-1", tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    content = json.loads(path.read_text())
    content["config"] |= {"device": "remote", "data": "remote", "source": None, "model": None, "loss": None}
    path.write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "run" / "partition.csv").unlink()
    text = page.render(collect([tmp_path / "run"]))
    assert "self-fl on rows of the sites" in text
    assert "clients at their own sites" in text
    assert "selffl.flower.server_app" in text


@pytest.mark.slow
def test_a_comparison_shows_its_claims_beside_its_runs(compared):
    text = page.render(collect([compared]))
    assert "Joining is better." in text
    assert 'data-chart="clients"' in text
    assert "selffl compare …" in text


# ------------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def run(monkeypatch, capsys):
    monkeypatch.setattr(cli.console, "out", Console(width=200))

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["selffl", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code, capsys.readouterr()

    return call


def test_the_command_takes_a_run_and_a_folder_of_runs(run, folder, tmp_path):
    for place, title in ((folder, "self-fl and 3 others on digits"), (folder / "ditto-1", "ditto on digits")):
        code, printed = run("report", str(place), "--out", str(tmp_path / "page.html"))
        assert code == 0, printed.err
        assert f"<title>{title}</title>" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_what_is_no_run_is_refused_in_one_line(run, tmp_path):
    (tmp_path / "empty").mkdir()
    assert not is_run(tmp_path / "empty")
    for place, reason in (("empty", "holds no record.json and no run"), ("nowhere", "is not a folder")):
        code, printed = run("report", str(tmp_path / place), "--out", str(tmp_path / "page.html"))
        assert code == 2
        assert reason in printed.err
        assert len(printed.err.splitlines()) == 1


def test_a_run_without_a_round_has_nothing_to_show_yet(folder, tmp_path):
    for name in ("config.json", "history.csv"):
        text = (folder / "ditto-1" / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text if name == "config.json" else text.splitlines()[0] + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"has no rounds yet.*selffl serve"):
        collect([tmp_path])
    assert collect([tmp_path], may_wait=True).waiting == [tmp_path]


def test_a_line_that_is_being_written_is_left_out(folder, tmp_path):
    shutil.copytree(folder / "self-fl-1", tmp_path / "run")
    for name in ("history.csv", "participation.csv"):
        path = tmp_path / "run" / name
        text = path.read_text(encoding="utf-8")
        path.write_text(text[:-3], encoding="utf-8")
    assert len(read_run(tmp_path / "run").records.history) == 5
