"""Who gains and who loses, as a report tells it: from runs that measured it themselves, or beside a run of `local`."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest, spearmanr

import selffl
from selffl.data import load
from selffl.reports import client_gains, data, page, paper_figures, sentences
from selffl.reports.collect import collect
from selffl.runs.folder import read_config

pytestmark = pytest.mark.slow

SETTINGS = {"rounds": 4, "participation": 0.5}
SEEDS = (1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Methods that measured it themselves, and the same beside training alone."""
    place = tmp_path_factory.mktemp("gains")
    for seed in SEEDS:
        rows = load("digits", seed=seed, test_fraction=0.4)
        for name in ("self-fl-auto", "fedavg"):
            selffl.train("softmax", rows, name, seed=seed, gain=True, out=place / "own" / f"{name}-{seed}", **SETTINGS)
            selffl.train("softmax", rows, name, seed=seed, out=place / "beside" / f"{name}-{seed}", **SETTINGS)
        selffl.train("softmax", rows, "local", seed=seed, out=place / "beside" / f"local-{seed}", **SETTINGS)
    return place


@pytest.fixture(scope="module", params=["own", "beside"])
def group(request, folder):
    (found,) = collect([folder / request.param]).groups
    return found


@pytest.fixture(scope="module")
def own(folder):
    (found,) = collect([folder / "own"]).groups
    return found


def counted(table):
    """Clients that have ten rows or more to test on."""
    return table[table["num_test"] >= 10]


def table_of(folder, name, seed):
    """Clients of a method beside those of training alone, by pandas."""
    ours, theirs = (
        pd.read_csv(folder / "beside" / f"{method}-{seed}" / "clients.csv").set_index("client")
        for method in (name, "local")
    )
    gain = 100 * (ours["accuracy"] - theirs["accuracy"])
    found = ours.assign(gain=gain.round(8))  # 0.9 - 0.8 and 0.7 - 0.6 are as large
    return found[found["num_test"] > 0]


def test_a_gain_is_over_training_alone_whoever_measured_it(folder, group):
    for seed in SEEDS:
        table = data.clients_of_seed(group, seed)
        for number, method in enumerate(group.methods[:2]):
            found, base = client_gains.gains(group, table, number)
            assert base == "training alone"
            expected = table_of(folder, method.label, seed)["gain"]
            by_client = {client: gain for client, gain in zip(table["clients"], found, strict=True) if gain is not None}
            assert by_client == {str(client): pytest.approx(gain, abs=2e-3) for client, gain in expected.items()}


def test_methods_are_told_by_how_many_lose(folder, group):
    found = {row.method: row for row in client_gains.by_joining(group)}
    assert list(found) == ["self-fl-auto", "fedavg"]  # training alone is compared with nothing
    for name, row in found.items():
        tables = [counted(table_of(folder, name, seed)) for seed in SEEDS]
        assert all(0 < len(table) < 40 for table in tables)
        shares = [100 * (table["gain"] < 0).mean() for table in tables]
        assert (row.losing.mean, row.losing.error) == pytest.approx((np.mean(shares), np.std(shares, ddof=1) / 2**0.5))
        assert row.gain.mean == pytest.approx(np.mean([table["gain"].mean() for table in tables]))
        if name == "fedavg":
            assert row.correlation is None
            continue
        known = [table.dropna(subset=["predicted_gain"]) for table in tables]
        ranks = [spearmanr(each["predicted_gain"], each["gain"]).statistic for each in known]
        assert row.correlation.mean == pytest.approx(np.mean(ranks))


def test_beyond_chance_is_by_the_pairs_of_the_runs_own_rows(own):
    for row in client_gains.by_joining(own):
        shares = []
        for run in next(method for method in own.methods if method.label == row.method).runs:
            rows = counted(pd.read_csv(run.folder / "clients.csv").dropna(subset=["realised_gain"]))
            down = rows[rows["realised_gain"] < 0]
            clear = [binomtest(int(r.num_won), int(r.num_won + r.num_lost)).pvalue < 0.05 for r in down.itertuples()]
            shares.append(100 * sum(clear) / len(rows))
        assert row.beyond.mean == pytest.approx(np.mean(shares))
    assert client_gains.by_joining(own)[1].beyond.mean > 0  # fedavg's one model is clearly worse for some


def test_who_loses_most_is_named_with_a_reason(own):
    for number, method in enumerate(own.methods):
        for run in method.runs:
            expected = [row for row in selffl.load(run.folder).gains() if (row["realised_gain"] or 0) < 0]
            expected.sort(key=lambda row: row["is_within_chance"])
            found = client_gains.losing(own, run.config.seed, number)
            assert found["lose"] == len(expected)
            assert [(one["client"], one["why"]) for one in found["most"]] == [
                (str(row["client"]), row["why"]) for row in expected[:10]
            ]
            gains = [one["gain"] for one in found["most"]]
            assert gains == pytest.approx([100 * row["realised_gain"] for row in expected[:10]], rel=1e-4)


def test_bins_have_equal_counts_their_means_and_standard_errors():
    rng = np.random.default_rng(0)
    predicted, realised = np.exp(rng.normal(size=33)), rng.normal(size=33)
    found = client_gains.calibration([*predicted, None, 2.0], [*realised, 1.0, None])
    order = np.argsort(predicted)
    assert found["count"] == [5, 6, 5, 6, 5, 6]
    start = 0
    for place, count in enumerate(found["count"]):
        chosen = order[start : start + count]
        start += count
        assert found["x"][place] == pytest.approx(np.exp(np.log(predicted[chosen]).mean()), rel=1e-4)
        assert found["y"][place] == pytest.approx(realised[chosen].mean(), rel=1e-4)
        assert found["error"][place] == pytest.approx(realised[chosen].std(ddof=1) / count**0.5, rel=1e-4)


def test_clients_of_the_same_prediction_are_in_one_bin():
    found = client_gains.calibration([1.0] * 12 + [2.0] * 3 + [3.0] * 5, list(range(20)))
    assert (found["x"][1], found["count"]) == (3, [15, 5])
    assert client_gains.calibration([1.0] * 20, list(range(20)))["count"] == [20]
    assert client_gains.calibration([1.0] * 4, [1.0] * 4) is None


def test_the_page_has_the_table_the_picture_and_the_sentence(folder, group):
    text = page.render(collect([folder / ("beside" if len(group.methods) == 3 else "own")]))
    _, row = re.findall(r'<tr><th scope="row"><span class="swatch" data-method="1".*?</tr>', text)
    assert re.sub(r"<[^>]*>", " ", row).split()[:2] == [
        "fedavg",
        f"{client_gains.by_joining(group)[1].losing.mean:.1f}",
    ]
    tables = data.tables(group)
    expected = table_of(folder, "self-fl-auto", 1).dropna(subset=["predicted_gain"])
    used = counted(expected)
    rho, p = spearmanr(used["predicted_gain"], used["gain"])
    said = sentences.takeaways(group, tables)["predicted"]
    assert f"rank correlation {'−' if rho < 0 else ''}{abs(rho):.2f} over {len(used)} clients in seed 1" in said
    assert said in text
    assert tables["predicts"][0] == (rho > 0 and p < 0.05) == ('data-chart="predicted"' in text)
    assert ("Predicted gains are left out." in said) != tables["predicts"][0]
    charts = json.loads(re.search(r'id="report-data">(.*?)</script>', text, re.S)[1])["groups"][0]["tables"]
    assert sum(charts["seeds"][0]["methods"][0]["bins"]["count"]) == len(expected)


def test_without_training_alone_nothing_is_said_of_what_was_predicted(folder):
    """A prediction is of the gain over training alone: the global model is no stand-in for that."""
    (found,) = collect([folder / "beside" / "self-fl-auto-1"]).groups
    tables = data.tables(found)
    assert client_gains.by_joining(found) == []
    assert "predicted" not in page._charts(tables)
    assert sentences.takeaways(found, tables)["predicted"] == ""
    assert sentences.takeaways(found, tables)["gains"].endswith(
        "Trained with gain=True, a run is compared with training alone."
    )
    text = page.render(collect([folder / "beside" / "self-fl-auto-1"]))
    assert "Who loses, and why" not in text


def test_a_method_that_chooses_no_steps_has_no_picture_of_them(folder):
    (found,) = collect([folder / "beside" / "self-fl-auto-1"]).groups
    charts = page._charts(data.tables(found))
    assert {"variances", "weights"} <= set(charts)
    assert not {"steps", "histogram", "trajectory"} & set(charts)


def test_the_call_asks_for_the_gain_again(folder):
    assert "gain=True" in sentences.call(read_config(folder / "own" / "fedavg-1"))
    assert "gain" not in sentences.call(read_config(folder / "beside" / "fedavg-1"))


def test_all_figures_of_a_method_that_chooses_no_steps(folder, tmp_path):
    paper_figures.save_paper_figures([folder / "own"], tmp_path, formats=("svg",))
    assert {path.name for path in tmp_path.glob("*.svg")} >= {"gains.svg", "variances.svg"}
    assert not (tmp_path / "steps.svg").exists()


def test_the_figure_for_a_paper_has_points_means_and_a_line_at_zero(own):
    (figure,) = [figure for figure in paper_figures.figures_of(own) if figure.name == "gains"]
    chart = figure.charts[-1]
    assert (chart.title, chart.log_x) == ("Predicted against realised", True)
    assert [series.name for series in chart.series] == ["self-fl-auto", "self-fl-auto, means of bins", "no gain"]
    assert chart.series[1].error is not None
    assert chart.series[2].y == [0.0, 0.0]
