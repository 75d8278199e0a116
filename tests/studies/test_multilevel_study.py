"""The study beside mixed models: its splits, its numbers on a few made-up counties, and its verdicts."""

import json
from dataclasses import replace

import numpy as np
import pytest

from selffl.data.multilevel import GroupedRows
from selffl.reports.record import save_study
from selffl.studies import STUDIES, grouped_runs, multilevel
from selffl.studies.grouped_models import INTERCEPTS, MEANS, OURS, PER_GROUP, POOLED, R_INTERCEPTS, SLOPES
from selffl.studies.grouped_runs import (
    LONGER,
    REAL,
    SIZES,
    Problem,
    Settings,
    Simulation,
    error_of,
    losses,
    measure_once,
    size_of_group,
    split_known_groups,
    split_new_groups,
    standardise,
)
from selffl.studies.multilevel import claims_of, gap_figure, report, table_of
from selffl.studies.result import Job

TINY = Problem("counties", Simulation(0.06, 8), (0,), (0, 5), is_run_longer=True)
GROUP = np.repeat(list("abcdefghij"), [1, 2, 3, 4, 10, 20, 21, 22, 40, 50])


# --------------------------------------------------------------------------------------------------------------- splits


def test_a_share_of_each_known_group_is_tested_and_a_row_of_each_is_trained_on():
    train, test = split_known_groups(GROUP, seed=0)
    assert sorted([*train, *test]) == list(range(len(GROUP)))
    num_train = {name: int((GROUP[train] == name).sum()) for name in "abcdefghij"}
    assert num_train == {"a": 1, "b": 1, "c": 2, "d": 3, "e": 7, "f": 14, "g": 15, "h": 15, "i": 28, "j": 35}
    assert split_known_groups(GROUP, seed=1)[1].tolist() != test.tolist()
    assert split_known_groups(GROUP, seed=0)[1].tolist() == test.tolist()


def test_new_groups_bring_rows_of_their_own_at_most_half_and_are_tested_on_the_same_rows():
    for seed in range(5):
        brought, test = split_new_groups(GROUP, seed, (0, 1, 5, 10))
        late = set(GROUP[test])
        assert len(late) == 2
        assert set(GROUP[brought[0]]) == set(GROUP) - late
        for count, train in brought.items():
            assert not set(train) & set(test)
            for name in late:
                assert (GROUP[train] == name).sum() == min(count, int(np.isin(GROUP, name).sum()) // 2)
        assert set(brought[1]) <= set(brought[5]) <= set(brought[10])


def test_thirds_of_the_groups_go_by_their_rows():
    found = size_of_group(GROUP)
    assert "".join(found) == "abcdefghij"
    assert list(found.values()) == ["small"] * 4 + ["medium"] * 3 + ["large"] * 3
    assert set(size_of_group(np.array(list("aabbcc"))).values()).isdisjoint(SIZES)


def test_rows_are_standardised_by_what_is_trained_on():
    rows = GroupedRows(np.array([[1.0, 7], [3, 7], [100, 9]]), np.array([10.0, 30.0, 50.0]), np.array(list("aab")))
    found, unit = standardise(rows, np.array([0, 1]))
    assert found.features.tolist() == [[-1, 0], [1, 0], [98, 2]]
    assert found.outcome.tolist() == [-1, 1, 3]
    assert unit == 10
    classes = GroupedRows(rows.features, np.array([0, 1, 1]), rows.group)
    found, unit = standardise(classes, np.array([0, 1]))
    assert found.outcome.tolist() == [0, 1, 1]
    assert unit == 1


def test_errors_are_rmse_in_the_outcomes_unit_or_log_loss():
    rows = GroupedRows(np.zeros((2, 1)), np.array([0.0, 1.0]), np.array(["a", "a"]))
    assert error_of(losses(rows, np.array([3.0, -3.0])), 2.0, False) == pytest.approx(2 * (25 / 2) ** 0.5)
    rows = GroupedRows(np.zeros((2, 1)), np.array([0, 1]), np.array(["a", "a"]))
    assert error_of(losses(rows, np.array([0.2, 0.5])), 1.0, True) == pytest.approx(-np.log(0.8 * 0.5) / 2)
    assert np.isfinite(losses(rows, np.array([1.0, 0.0]))).all()  # sure and wrong


def test_simulated_counties_vary_as_they_say():
    rows = Simulation(0.06, 4000).load(seed=3)
    names, sizes = np.unique(rows.group, return_counts=True)
    assert len(names) == 4000
    assert np.median(sizes) == 5
    assert rows.outcome.var() == pytest.approx(1.0, abs=0.03)
    # The mean product of two rows of one county is the variance of intercepts: slopes and noise have mean 0.
    residual = rows.outcome - rows.features @ [0.4, 0.2]
    owner = np.unique(rows.group, return_inverse=True)[1]
    total, squares = np.bincount(owner, residual), np.bincount(owner, residual**2)
    assert (total**2 - squares).sum() / (sizes * (sizes - 1.0)).sum() == pytest.approx(0.06, abs=0.01)
    assert Simulation(0.06).load(0).outcome.tolist() != Simulation(0.06).load(1).outcome.tolist()


# ---------------------------------------------------------------------------------------------------------- the study


@pytest.mark.slow
def test_the_study_runs_without_any_data(tmp_path, monkeypatch):
    quick = (
        replace(multilevel.QUICK_PROBLEM, source=Simulation(0.06, 8)),
        Settings(rounds=2, longer_rounds=3, with_lme4=False),
    )
    steps = []
    study = STUDIES["multilevel"]
    job = Job(quick=True, folder=tmp_path / "runs", progress=lambda *step: steps.append(step))
    result = study.run(job, quick=quick)
    models = [OURS, INTERCEPTS, SLOPES, POOLED, PER_GROUP, MEANS]
    assert [line["model"] for line in result.table] == models
    assert len(result.rows) == len(models) * 2 * 3  # two seeds; known groups, and new ones with 0 and 5 rows
    assert all(row["error"] > 0 for row in result.rows)
    assert [step[:2] for step in steps] == [(0, 2), (1, 2), (2, 2)]
    assert "Left out: lme4: left out of a quick run" in result.setting
    assert len(result.claims) == 4
    assert "Holm's correction over the comparisons of one statement" in result.decided_by
    record = save_study(study, result, tmp_path / "study", command="c", is_quick=True, seconds=1.0)
    assert (tmp_path / "study" / "gaps.svg").is_file()
    assert json.loads((tmp_path / "study" / "record.json").read_text(encoding="utf-8"))["table"] == record.table
    # What is there is not measured again.
    monkeypatch.setattr(grouped_runs, "measure", lambda *_: pytest.fail("it is there already"))
    assert study.run(job, quick=quick).rows == result.rows


def test_what_is_there_is_read_only_for_the_same_question(tmp_path, monkeypatch):
    monkeypatch.setattr(grouped_runs, "measure", lambda problem, seed, settings: [{"rounds": settings.rounds}])
    assert measure_once(TINY, 0, Settings(1), tmp_path) == [{"rounds": 1}]
    assert measure_once(TINY, 0, Settings(2), tmp_path) == [{"rounds": 2}]
    assert measure_once(replace(TINY, slopes=(1,)), 0, Settings(1), tmp_path) == [{"rounds": 1}]
    assert measure_once(TINY, 1, Settings(1), tmp_path) == [{"rounds": 1}]
    assert len(list(tmp_path.iterdir())) == 4
    assert measure_once(TINY, 0, Settings(3), None) == [{"rounds": 3}]


def test_data_that_are_not_there_are_left_out_with_a_word(tmp_path, monkeypatch):
    monkeypatch.setenv("SELFFL_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    seen = []

    def measure(problem, seed, settings):
        seen.append(settings)
        return made_up(problem.name, {OURS: [1.0], INTERCEPTS: [1.0], SLOPES: [1.0], POOLED: [1.0], PER_GROUP: [1.0]})

    monkeypatch.setattr(grouped_runs, "measure", measure)
    monkeypatch.setattr(multilevel, "claims_of", lambda *_: [])
    result = STUDIES["multilevel"].run(Job(num_seeds=1), whole=(*REAL[:2], TINY), why_no_lme4=lambda: "R was not found")
    assert result.setting.endswith(
        "; seeds: 1. Left out: exam was not found (`selffl data fetch exam`); mathachieve was not found "
        "(`selffl data fetch mathachieve`); lme4: R was not found"
    )
    assert set(result.config["missing"]) == {"exam", "mathachieve"}
    assert [settings.with_lme4 for settings in seen] == [False]


def test_lme4_and_longer_runs_take_part_where_they_are_asked_for(monkeypatch):
    monkeypatch.setattr(grouped_runs, "fit_lme4", lambda train, test, slopes: {R_INTERCEPTS: fit_means(train, test)})
    monkeypatch.setattr(grouped_runs, "fit_estimator", lambda train, test, rounds: fit_means(train, test))
    fit_means = grouped_runs.fit_means
    rows = grouped_runs.measure(TINY, 0, Settings(2, 3, True))
    by_part = {count: [row["model"] for row in rows if row["count"] == count] for count in (None, *TINY.counts)}
    assert by_part[None] == [OURS, LONGER, INTERCEPTS, SLOPES, R_INTERCEPTS, POOLED, PER_GROUP, MEANS]
    assert by_part[0] == by_part[5] == [OURS, R_INTERCEPTS, POOLED, PER_GROUP, MEANS]


# ------------------------------------------------------------------------------------------------------------ verdicts


def made_up(name, errors, count=None, variances="0.05"):
    """Rows of models with these errors, seed by seed; every third has the same."""
    return [
        {
            "data": name,
            "seed": seed,
            "part": "known groups" if count is None else "new groups",
            "count": count,
            "model": model,
            "error": error,
            "small": error,
            "medium": error,
            "large": None,
            "accuracy": None,
            "cpu_seconds": 1.0,
            "variances": variances if model in (OURS, INTERCEPTS, SLOPES) else "",
            "note": "",
        }
        for model, values in errors.items()
        for seed, error in enumerate(values)
    ]


OWN, BETTER, WORSE, ALIKE = [1.0, 1.1, 1.2], [2.0, 2.1, 2.2], [0.5, 0.6, 0.7], [1.3, 0.9, 1.2]


@pytest.mark.parametrize(
    ("intercepts", "slopes", "verdict"),
    [
        (BETTER, BETTER, "holds"),
        ([error + 1e-6 for error in OWN], ALIKE, "inconclusive"),  # sure, and nothing
        (BETTER, ALIKE, "holds in part"),
        (BETTER, WORSE, "holds in part"),
        (ALIKE, ALIKE, "inconclusive"),
        (ALIKE, WORSE, "does not hold"),
        (WORSE, WORSE, "does not hold"),
    ],
)
def test_a_claim_holds_where_the_other_models_have_clearly_larger_errors(intercepts, slopes, verdict):
    errors = {OURS: OWN, INTERCEPTS: intercepts, SLOPES: slopes, POOLED: BETTER, PER_GROUP: BETTER}
    problem = replace(TINY, counts=())
    first, second, _ = claims_of(problem, made_up("counties", errors))
    assert first.verdict == verdict
    assert second.verdict == "holds"
    gap = np.array(intercepts) - OWN
    shown = f"{INTERCEPTS} {gap.mean():+.4f} ± {gap.std(ddof=1) / 3**0.5:.4f}"
    assert shown.replace("-", "−") in first.evidence


def test_new_groups_are_judged_beside_every_mixed_model_that_was_fitted_to_them():
    errors = {OURS: OWN, INTERCEPTS: BETTER, SLOPES: BETTER, POOLED: BETTER, PER_GROUP: BETTER}
    problem = replace(TINY, source=REAL[0].source)
    rows = made_up("counties", errors) + made_up("counties", errors, 0) + made_up("counties", errors, 5)
    assert claims_of(problem, rows)[-1].verdict == "holds"
    with_r = rows + [
        row
        for count, values in ((None, BETTER), (0, WORSE), (5, ALIKE))
        for row in made_up("counties", {R_INTERCEPTS: values}, count)
    ]
    claim = claims_of(problem, with_r)[-1]
    assert claim.verdict == "holds in part"  # it holds beside statsmodels
    assert f"{R_INTERCEPTS}, k = 0 −0.5000 ± 0.0000, {R_INTERCEPTS}, k = 5 +0.0333" in claim.evidence
    without = [row for row in with_r if row["count"] is None or row["model"] not in (INTERCEPTS, SLOPES)]
    claim = claims_of(problem, without)[-1]
    assert claim.verdict == "does not hold"
    assert INTERCEPTS not in claim.evidence


def test_the_learned_variance_is_judged_by_the_true_one():
    errors = {OURS: OWN, INTERCEPTS: OWN, SLOPES: OWN, POOLED: OWN, PER_GROUP: OWN}
    problem = replace(TINY, counts=())
    for learned, verdict in (("0.061", "holds"), ("0.085", "does not hold")):
        claim = claims_of(problem, made_up("counties", errors, variances=learned))[-1]
        assert claim.verdict == verdict
        assert f"Learned {learned}0 ± 0.0000 for 0.06" in claim.evidence


def test_the_table_has_what_there_is_and_dashes_elsewhere():
    errors = {OURS: OWN, INTERCEPTS: BETTER, POOLED: WORSE}
    rows = made_up("counties", errors) + made_up("counties", {OURS: WORSE}, 5)
    next(row for row in rows if row["model"] == INTERCEPTS)["note"] = "did not converge: the pooled regression"
    lines = table_of(TINY, rows)
    assert [line["model"] for line in lines] == [OURS, INTERCEPTS, POOLED]
    assert lines[0]["known groups"] == "1.1000 ± 0.0577"
    assert lines[0]["new, k = 5"] == "0.6000 ± 0.0577"
    assert (
        lines[1]["new, k = 5"] == lines[0]["new, k = 0"] == lines[0]["large groups"] == lines[0]["accuracy, %"] == "–"
    )
    assert [line["CPU seconds"] for line in lines] == ["1.00"] * 3
    assert [line["not converged"] for line in lines] == ["–", "seeds: 1", "–"]
    assert [line["σ₀²"] for line in lines] == ["0.050", "0.050", "–"]


def test_the_figure_shows_errors_in_percent_of_the_mixed_models():
    errors = {OURS: [1.1, 1.1], INTERCEPTS: [1.0, 1.0]}
    figure = gap_figure(
        [TINY], made_up("counties", errors) + made_up("counties", errors, 0) + made_up("counties", errors, 5)
    )
    by_size, by_count = figure.charts
    assert by_size.series[0].y[:2] == pytest.approx([10, 10])
    assert list(by_count.series[0].x) == [0, 5]
    assert by_count.series[0].y == pytest.approx([10, 10])


def test_groups_of_one_size_have_no_line_by_size():
    errors = {OURS: [1.1, 1.1], INTERCEPTS: [1.0, 1.0]}
    rows = made_up("counties", errors) + made_up("alike", errors)
    for row in rows[4:]:
        row |= dict.fromkeys(SIZES)
    problems = [replace(TINY, counts=()), replace(TINY, name="alike", counts=())]
    assert [series.name for series in gap_figure(problems, rows).charts[0].series] == ["counties"]


def test_a_report_holds_every_problem():
    errors = {OURS: OWN, INTERCEPTS: OWN, SLOPES: OWN, POOLED: OWN, PER_GROUP: OWN}
    problems = [replace(TINY, counts=()), replace(TINY, name="more", counts=())]
    result = report(problems, made_up("counties", errors) + made_up("more", errors), {"num_seeds": 3}, "setting")
    assert {line["data"] for line in result.table} == {"counties", "more"}
    assert set(result.config["problems"]) == {"counties", "more"}
    assert len(result.claims) == 6
