"""What a run writes down beside its scores, against numbers that plain NumPy and pandas make of the same run."""

import csv
import json
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch

import selffl
from selffl.algorithms import FedAvg, SelfFLAuto
from selffl.algorithms.averaging import ModelUpload
from selffl.data import load
from selffl.errors import ConfigError
from selffl.reports.collect import collect
from selffl.reports.page import render

SETTINGS = {"rounds": 6, "participation": 0.5, "learning_rate": 0.03, "evaluate_every": 2}


@pytest.fixture(scope="module")
def fed():
    return load("digits", num_clients=12, seed=0)


@pytest.fixture(scope="module")
def folder(fed, tmp_path_factory):
    place = tmp_path_factory.mktemp("runs") / "exact"
    selffl.train("softmax", fed, "self-fl-exact", out=place, **SETTINGS)
    return place


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_weights_are_those_of_the_aggregation(folder):
    history, rows = pd.read_csv(folder / "history.csv"), pd.read_csv(folder / "participation.csv")
    known = {}
    for number in history["round"]:
        cohort = rows[rows["round"] == number]
        known |= dict(zip(cohort["client"], cohort["intra_variance"], strict=True))
        heard = [value for value in known.values() if not np.isnan(value)]
        own = [known[c] if not np.isnan(known[c]) else np.mean(heard) if heard else 0.0 for c in cohort["client"]]
        precision = 1 / (history.loc[history["round"] == number, "inter_variance"].item() + np.array(own))
        assert cohort["weight"].to_numpy() == pytest.approx(precision / precision.sum(), rel=1e-4)
    assert rows["weight"].std() > 0  # the last rounds know who is unsure


def test_without_uncertainty_clients_weigh_their_rows(fed):
    method = selffl.algorithm("self-fl", uncertainty_weights=False)
    run = selffl.train("softmax", fed, method, **SETTINGS)
    size = dict(zip(fed.clients, fed.train.num_examples.tolist(), strict=True))
    for number in range(1, 7):
        cohort = [row for row in run.participation if row["round"] == number]
        whole = sum(size[row["client"]] for row in cohort)
        assert [row["weight"] for row in cohort] == pytest.approx([size[row["client"]] / whole for row in cohort])


@dataclass(frozen=True)
class DriftUpload(ModelUpload):
    """A change, its weight, and two things that are known of a client."""

    drift: torch.Tensor  # [..., C]
    is_large: torch.Tensor  # [..., C], true or false


@dataclass(frozen=True)
class Drifting(FedAvg):
    """FedAvg whose clients say more than they need to."""

    name: ClassVar[str] = "drifting"
    recorded: ClassVar[tuple[str, ...]] = ("drift", "is_large")

    def client_round(self, broadcast, memory, task):
        found, memory = super().client_round(broadcast, memory, task)
        rows = task.num_examples.expand(task.shape)
        return DriftUpload(found.change, found.weight, rows / 8, rows > 100), memory


def test_whatever_a_method_has_recorded_is_written_by_client(fed, tmp_path):
    place, size = tmp_path / "run", dict(zip(map(str, fed.clients), fed.train.num_examples.tolist(), strict=True))
    run = selffl.train("softmax", fed, Drifting(), out=place, **SETTINGS)
    rows = table(place / "participation.csv")
    assert len(rows) == 6 * 6
    assert [float(row["drift"]) for row in rows] == [size[row["client"]] / 8 for row in rows]
    assert [int(row["is_large"]) for row in rows] == [size[row["client"]] > 100 for row in rows]
    assert {row["weight"] for row in rows} == {""}  # which the method does not say
    assert run.config.recorded == ("drift", "is_large")
    assert selffl.load(place, trusted=True).participation == run.participation
    assert pd.read_parquet(place / "participation.parquet")["drift"].tolist() == [float(row["drift"]) for row in rows]
    assert "drifting" in render(collect([place]))  # which has no curve for what it does not know


def test_a_run_from_before_its_method_was_recorded_goes_on(fed, tmp_path):
    place = tmp_path / "run"
    selffl.train("softmax", fed, Drifting(), out=place, **SETTINGS)
    content = json.loads((place / "config.json").read_text())
    del content["config"]["recorded"]
    (place / "config.json").write_text(json.dumps(content))
    pd.read_csv(place / "participation.csv").drop(columns=["drift", "is_large"]).to_csv(
        place / "participation.csv", index=False
    )
    selffl.resume(place, rounds=8, trusted=True)
    assert [row["drift"] != "" for row in table(place / "participation.csv")] == [False] * 36 + [True] * 12


@dataclass(frozen=True)
class Spreading(Drifting):
    """One that would have a whole model in a cell."""

    recorded: ClassVar[tuple[str, ...]] = ("change",)


def test_only_numbers_of_clients_can_be_recorded(fed):
    with pytest.raises(ConfigError, match=r"'change' is to be recorded, and has the shape \(6, 650\) in the uploads"):
        selffl.train("softmax", fed, Spreading(), **SETTINGS)


def test_what_only_the_hierarchy_needs_is_no_column(fed, tmp_path):
    selffl.train("softmax", fed, SelfFLAuto(), out=tmp_path / "run", **SETTINGS)
    (first, *_) = table(tmp_path / "run" / "participation.csv")
    expected = "round client num_local_steps wanted_steps intra_variance effective_params weight"
    assert list(first) == expected.split()
    assert first["intra_variance"] != ""


def test_methods_that_choose_no_steps_leave_no_weights(fed):
    run = selffl.train("softmax", fed, "fedavg", **SETTINGS)
    assert run.participation == []
    assert "predicted_gain" not in run.clients[0]
    clustered = selffl.train(
        "softmax", fed.with_clusters([m % 3 for m in range(12)]), "self-fl-cluster", rounds=4, participation=1.0
    )
    assert {row["weight"] for row in clustered.participation} == {None}
    assert None not in {row["intra_variance"] for row in clustered.clients}
    # Its variances are of clusters, whose members share a parameter: no client's own posterior follows from them.
    assert "predicted_gain" not in clustered.clients[0]
    assert [row["cluster"] for row in clustered.clients] == [m % 3 for m in range(12)]


@pytest.mark.parametrize("form", ["paper", "exact"])
def test_the_predicted_gain_is_that_of_a_dense_gaussian_model(fed, form):
    """Var(theta_m | own data) / Var(theta_m | all data), from the joint covariance of everything, by a plain solve."""
    run = selffl.train("softmax", fed, selffl.algorithm("self-fl", form=form), **SETTINGS)
    intra = np.array([np.nan if row["intra_variance"] is None else row["intra_variance"] for row in run.clients])
    inter = run.history[-1]["inter_variance"]
    gains = [row["predicted_gain"] for row in run.clients]
    assert any(gain is not None and gain > 1.001 for gain in gains)
    assumed = np.where(np.isnan(intra), np.nanmean(intra), intra)
    for m, gain in enumerate(gains):
        if np.isnan(intra[m]):
            assert gain is None
            continue
        others = 1 / np.sum(np.delete(1 / (inter + assumed), m))
        prior = others + (inter if form == "exact" else 0.0)
        joint = np.array([[prior, prior], [prior, prior + assumed[m]]])  # of theta_m and its estimate
        left = joint[0, 0] - joint[0, 1] ** 2 / joint[1, 1]
        assert gain == pytest.approx(assumed[m] / left, rel=1e-4)


@pytest.mark.parametrize(
    ("chosen", "has_interval"),
    [
        ("self-fl-auto", True),
        (SelfFLAuto(prior_precision=5.0), False),
        ("self-fl-exact", False),
        ("fedavg", False),
    ],
    ids=["self-fl-auto", "by hand", "self-fl-exact", "fedavg"],
)
def test_a_run_says_between_what_the_variance_between_clients_lies(fed, tmp_path, chosen, has_interval):
    run = selffl.train("softmax", fed, chosen, out=tmp_path / "run", **SETTINGS)
    kept = selffl.load(tmp_path / "run").summary
    inter, low, high = (kept[f"inter_variance{end}"] for end in ("", "_low", "_high"))
    assert (inter, low, high) == tuple(run.summary[f"inter_variance{end}"] for end in ("", "_low", "_high"))
    assert (inter is None) == (chosen == "fedavg")
    if has_interval:
        assert 0.0 <= low <= inter <= high
        assert low < high
        assert inter == float(run._state.server.closing.inter_variance)
        assert run.history[-1]["inter_variance"] == float(run._state.server.inter_variance) != inter
        rows = table(tmp_path / "run" / "history.csv")
        assert [float(row["inter_variance_high"]) for row in rows] == [
            row["inter_variance_high"] for row in run.history
        ]
    else:
        assert low is high is None


def test_the_partition_is_what_the_clients_hold(fed, folder):
    owners = np.repeat(fed.clients, fed.train.num_examples.numpy())
    expected = pd.DataFrame({"client": owners, "class": fed.train.labels.numpy()}).value_counts().to_dict()
    found = pd.read_csv(folder / "partition.csv")
    assert {(row.client, row._2): row.num_train for row in found.itertuples() if row.num_train} == expected
    assert found["num_test"].sum() == len(fed.test.labels)
    assert (found["num_train"] + found["num_test"]).min() > 0


def test_classes_with_names_are_named_in_the_partition(tmp_path):
    fed = selffl.Federation.from_frame(
        pd.DataFrame({"x": range(8), "y": ["no", "yes"] * 4, "site": list("aabbaabb")}), client="site", label="y"
    )
    selffl.train("softmax", fed, "fedavg", rounds=1, out=tmp_path / "run")
    assert {row["class"] for row in table(tmp_path / "run" / "partition.csv")} == {"no", "yes"}


def test_values_have_no_partition(tmp_path):
    fed = selffl.Federation.from_arrays(np.ones((8, 2)), np.arange(8.0), list("aabbaabb"), test_fraction=0.25)
    selffl.train(one_output(), fed, "fedavg", rounds=1, loss=mean_square, out=tmp_path / "run")
    assert not (tmp_path / "run" / "partition.csv").exists()
    assert (tmp_path / "run" / "history.parquet").exists()


def test_counts_are_no_classes(tmp_path):
    """There may be as many as rows, and a table of clients by counts would fill the memory."""
    x, counts = np.ones((8, 2), dtype=np.float32), 10**9 * np.arange(8)
    fed = selffl.Federation.from_arrays(x, counts, list("aabbaabb"), test_fraction=0.25)
    selffl.train(one_output(), fed, "fedavg", rounds=1, loss=mean_scaled_square, out=tmp_path / "run")
    assert not (tmp_path / "run" / "partition.csv").exists()


def mean_scaled_square(outputs, counts):
    return (outputs - counts / 1e9).square().mean()


def one_output():
    from torch import nn

    return nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))


def mean_square(outputs, labels):
    return (outputs - labels).square().mean()


@pytest.mark.parametrize("name", ["history", "participation", "clients"])
def test_tables_are_there_as_parquet_too(folder, name):
    plain, typed = pd.read_csv(folder / f"{name}.csv"), pd.read_parquet(folder / f"{name}.parquet")
    assert list(plain.columns) == list(typed.columns)
    pd.testing.assert_frame_equal(plain, typed, check_dtype=False)


def test_mixed_ids_are_text_in_parquet(tmp_path):
    from selffl.state.files import write_parquet

    write_parquet(tmp_path / "t.parquet", [{"client": 7, "x": 1, "y": None}, {"client": "b", "x": 2.5}])
    found = pd.read_parquet(tmp_path / "t.parquet")
    assert found["client"].tolist() == ["7", "b"]
    assert found["x"].tolist() == [1.0, 2.5]
    assert found["y"].isna().all()


def test_ids_beyond_what_parquet_counts_to_are_text(tmp_path):
    from selffl.state.files import write_parquet

    write_parquet(tmp_path / "t.parquet", [{"client": 2**63, "x": 2**60 + 1}, {"client": 2**64, "x": 0.5}])
    found = pd.read_parquet(tmp_path / "t.parquet")
    assert found["client"].tolist() == [str(2**63), str(2**64)]
    assert found["x"].tolist() == [str(2**60 + 1), "0.5"]


def test_an_interrupted_run_has_its_csv_files(fed, tmp_path):
    def stop(row):
        if row["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        selffl.train("softmax", fed, "self-fl", out=tmp_path / "run", on_round=stop, **SETTINGS)
    assert not (tmp_path / "run" / "history.parquet").exists()
    assert len(table(tmp_path / "run" / "history.csv")) == 3
    selffl.resume(tmp_path / "run")
    assert len(pd.read_parquet(tmp_path / "run" / "history.parquet")) == 6


@pytest.mark.parametrize(("asked", "expected"), [(None, 1), ("2", 2)])
def test_a_small_model_trains_with_one_thread_unless_the_user_says_how_many(fed, monkeypatch, asked, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        selffl.train("softmax", fed, "fedavg", rounds=1, on_round=lambda row: seen.append(torch.get_num_threads()))
        assert (seen, torch.get_num_threads()) == ([expected], 2)
    finally:
        torch.set_num_threads(before)
