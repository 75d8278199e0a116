"""Models, predictions and new clients in the units and classes of the user's own table."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import polars
import pyarrow
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import selffl
from selffl import ConfigError, DataError
from selffl.training.answers import LabelScale, PreparedModel

WITHOUT_SELFFL = """
import json, sys
import torch
from safetensors import safe_open
from safetensors.torch import load_file
path, rows = sys.argv[1:]
assert "selffl" not in sys.modules
with safe_open(path, "pt") as file:
    about = file.metadata()
known, scale = json.loads(about["preparation"]), json.loads(about["label_scale"])
state = load_file(path)
model = torch.nn.Linear(state["weight"].shape[1], state["weight"].shape[0])
model.load_state_dict(state)
x = torch.tensor(json.loads(rows), dtype=torch.float64)
x = (x - torch.tensor(known["mean"], dtype=torch.float64)) / torch.tensor(known["scale"], dtype=torch.float64)
out = model(x.float()).double()
print(json.dumps((out * scale["scale"] + scale["mean"]).tolist()))
"""


def frame(num_rows=480, seed=0):
    rng = np.random.default_rng(seed)
    site = rng.integers(0, 8, num_rows)
    age, dose = rng.normal(50, 10, num_rows), rng.normal(size=num_rows)
    day = pandas.Timestamp("2024-01-01") + pandas.to_timedelta(rng.integers(0, 700, num_rows), unit="D")
    sex = rng.choice(["f", "m"], num_rows)
    signal = (age - 50) / 10 + dose * (1 + 0.1 * site) + (sex == "f")
    return pandas.DataFrame(
        {
            "site": [f"s{number}" for number in site],
            "age": age,
            "dose": dose,
            "day": day.strftime("%Y-%m-%d"),
            "sex": sex,
            "grade": np.where(signal + 0.3 * rng.normal(size=num_rows) > 0.4, 4, 2),
            "score": 12.75 + 3.0 * signal + 0.5 * rng.normal(size=num_rows),
        }
    )


def raw_inputs(rows):
    """The columns of a row as numbers, by hand."""
    seconds = (pandas.to_datetime(rows["day"]) - pandas.Timestamp("1970-01-01")) / pandas.Timedelta(seconds=1)
    columns = [rows["age"], rows["dose"], seconds, rows["sex"] == "f", rows["sex"] == "m"]
    return np.column_stack([np.asarray(column, dtype=np.float64) for column in columns])


def trained(label, folder, **options):
    rows = frame()
    left_out = {"grade", "score"} - {label}
    fed = selffl.Federation.from_frame(rows.drop(columns=list(left_out)), "site", label, test_fraction=0.25)
    outputs = 1 if label == "score" else 2
    model = nn.Linear(fed.train.features.shape[1], outputs)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    options = {"rounds": 20, "participation": 1.0, "learning_rate": 0.05, "out": folder, **options}
    return rows, selffl.train(model, fed, **options)


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    return trained("score", tmp_path_factory.mktemp("values") / "run")


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    return trained("grade", tmp_path_factory.mktemp("classes") / "run", rounds=10)


def test_values_are_answered_in_the_units_of_the_table(values):
    """On 14df91e the model of a study answered −0.17 where the mean was 12.75."""
    rows, run = values
    answers = run.predict(rows)
    assert answers["prediction"].mean() == pytest.approx(rows["score"].mean(), abs=0.2)
    error = float(np.sqrt(((answers["prediction"] - rows["score"]) ** 2).mean()))
    assert error < 0.5 * rows["score"].std()
    assert run.summary["weighted_error"] < 0.5 * rows["score"].std()  # not in units of the spread
    model = run.personal_model("s1")
    own = rows[rows["site"] == "s1"]
    by_hand = model(torch.tensor(raw_inputs(own))).detach().numpy()[:, 0]
    np.testing.assert_allclose(by_hand, answers["prediction"][own.index], rtol=1e-5)


def test_errors_and_the_users_own_metrics_are_in_the_units_of_the_table():
    rows = frame()
    fed = selffl.Federation.from_frame(rows.drop(columns="grade"), "site", "score", test_fraction=0.25)
    absolute = selffl.Metric(lambda outputs, labels: (outputs.reshape(-1) - labels).abs().mean(), False)
    run = selffl.train(nn.Linear(5, 1), fed, "fedavg", rounds=4, participation=1.0, metrics={"absolute": absolute})
    model = run.global_model()
    spread = fed.preparation
    raw = fed.test.features.double() * torch.tensor(spread.scale) + torch.tensor(spread.mean)
    gap = (model(raw).detach().reshape(-1) - fed.test.labels).numpy()
    assert run.summary["global_error"] == pytest.approx(float(np.sqrt(np.square(gap).mean())), rel=1e-5)
    assert run.summary["global_absolute"] == pytest.approx(
        np.average(
            [np.abs(part).mean() for part in np.split(gap, fed.test.offset[1:-1])], weights=fed.test.num_examples
        ),
        rel=1e-5,
    )


def test_classes_are_answered_in_the_users_coding(classes):
    rows, run = classes
    answers = run.predict(rows)
    assert set(answers["prediction"]) == {2, 4}
    assert (answers["prediction"] == rows["grade"]).mean() > 0.85
    np.testing.assert_allclose(answers["probability_2"] + answers["probability_4"], 1.0)
    assert ((answers["probability_4"] > 0.5) == (answers["prediction"] == 4)).all()


def test_every_way_to_ask_gives_the_same_answers(classes, tmp_path):
    rows, run = classes
    answers = run.predict(rows)
    rows.to_csv(tmp_path / "rows.csv", index=False)
    rows.to_parquet(tmp_path / "rows.parquet")
    run.export(tmp_path / "all.safetensors")
    others = {
        "csv": run.predict(tmp_path / "rows.csv"),
        "parquet": run.predict(str(tmp_path / "rows.parquet")),
        "polars": run.predict(polars.from_pandas(rows)),
        "pyarrow": run.predict(pyarrow.Table.from_pandas(rows)),
        "export": selffl.PersonalModels(tmp_path / "all.safetensors").predict(rows, module=nn.Linear(5, 2)),
    }
    assert isinstance(others["polars"], polars.DataFrame)
    assert isinstance(others["pyarrow"], pyarrow.Table)
    for name, found in others.items():
        for column in ("prediction", "probability_4", "model"):
            values = found[column].to_pylist() if hasattr(found[column], "to_pylist") else list(found[column])
            assert values == list(answers[column]), (name, column)
    arrays = run.predict(raw_inputs(rows), client=rows["site"].tolist())
    np.testing.assert_allclose(arrays["probability_4"].to_numpy(), answers["probability_4"], rtol=1e-6)


def test_a_saved_run_answers_as_it_did(classes, tmp_path):
    rows, run = classes
    run.save(tmp_path / "again")
    found = selffl.load(tmp_path / "again").predict(rows)
    assert found.equals(run.predict(rows))
    stored = json.loads((tmp_path / "again" / "preparation.json").read_text())
    assert stored["label"]["classes"] == [2, 4]


def test_clients_that_were_not_there_are_answered_by_the_global_model(classes):
    rows, run = classes
    strange = rows.assign(site="nowhere")
    answers = run.predict(strange)
    assert set(answers["model"]) == {"global"}
    nobody = run.predict(rows.drop(columns="site"))
    np.testing.assert_allclose(nobody["probability_4"], answers["probability_4"])
    logits = run.global_model()(torch.tensor(raw_inputs(rows))).detach()
    np.testing.assert_allclose(logits.double().softmax(-1)[:, 1], answers["probability_4"], atol=1e-6)


def test_a_new_client_learns_its_own_class(classes):
    """On 14df91e labels were taken for numbers of outputs: of classes 1 and 2, rows of 1 taught it 2."""
    rows, run = classes
    for taught in (2, 4):
        few = rows.head(20).assign(grade=taught, site="new")
        for given in (few, (raw_inputs(few), [taught] * 20)):
            model = run.welcome(given)
            outputs = model(torch.tensor(raw_inputs(few))).detach().mean(0)
            shared = run.global_model()(torch.tensor(raw_inputs(few))).detach().mean(0)
            column = [2, 4].index(taught)
            assert (outputs - shared)[column] > (outputs - shared)[1 - column]


def test_a_new_client_of_values_is_near_the_others(values):
    """On 14df91e one row gave an error of 12.2: raw labels met a standardised prior."""
    rows, run = values
    model = run.welcome(rows.head(1))
    answers = model(torch.tensor(raw_inputs(rows))).detach().numpy()[:, 0]
    assert np.sqrt(np.square(answers - rows["score"]).mean()) < 0.6 * rows["score"].std()


@pytest.mark.slow
def test_an_exported_model_opens_without_selffl_and_answers_alike(values, tmp_path):
    rows, run = values
    run.export(tmp_path / "one.safetensors", ["s3"], full=True)
    own = rows[rows["site"] == "s3"].head(4)
    command = [
        sys.executable,
        "-c",
        WITHOUT_SELFFL,
        str(tmp_path / "one.safetensors"),
        json.dumps(raw_inputs(own).tolist()),
    ]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout)
    np.testing.assert_allclose(np.array(found)[:, 0], run.predict(own)["prediction"], rtol=1e-6)
    with safe_open(tmp_path / "one.safetensors", "pt") as file:
        about = file.metadata()
    assert json.loads(about["inputs"]) == ["age", "dose", "day", "sex=f", "sex=m"]
    assert set(load_file(tmp_path / "one.safetensors")) == {"weight", "bias"}
    with pytest.raises(ConfigError, match=r"ends in \.safetensors"):
        run.export(tmp_path / "one.pt", ["s3"], full=True)


@pytest.mark.parametrize("log_rate", [-1.0, 1.0, 8.0])
def test_counts_are_answered_as_expected_counts(log_rate):
    """However large they are: unscaled, the steps of this seed run away at a log rate of 8."""
    rng = np.random.default_rng(0)
    x, site = rng.normal(size=600), rng.integers(0, 6, 600)
    rows = pandas.DataFrame({"site": site, "x": x, "visits": rng.poisson(np.exp(log_rate + 0.5 * x))})
    fed = selffl.Federation.from_frame(rows, "site", "visits", task="counts", test_fraction=0.25)
    torch.manual_seed(3)
    run = selffl.train(nn.Linear(1, 1), fed, "fedavg", rounds=15, participation=1.0, learning_rate=0.05)
    assert run.config.loss == "count_loss"
    answers = run.predict(rows)["prediction"]
    assert run.personal_model(0)(torch.tensor([[x[0]]])).item() == pytest.approx(
        run.predict(rows.head(1).assign(site=0))["prediction"].item()
    )
    assert answers.min() > 0
    assert answers.mean() == pytest.approx(rows["visits"].mean(), rel=0.15)
    assert run.summary["weighted_error"] < rows["visits"].std()


def test_large_labels_keep_their_digits():
    """A label near 10^9 that varies by 1: in float32 it would be constant."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=300)
    rows = pandas.DataFrame({"site": np.arange(300) % 5, "x": x, "y": 1e9 + x})
    fed = selffl.Federation.from_frame(rows, "site", "y", test_fraction=0.2)
    run = selffl.train(nn.Linear(1, 1), fed, "fedavg", rounds=8, participation=1.0, learning_rate=0.05)
    assert run.summary["weighted_error"] < 0.2
    assert np.abs(run.predict(rows)["prediction"] - rows["y"]).max() < 0.5
    tiny = rows.assign(y=1e-9 * x)
    fed = selffl.Federation.from_frame(tiny, "site", "y", test_fraction=0.2)
    run = selffl.train(nn.Linear(1, 1), fed, "fedavg", rounds=8, participation=1.0, learning_rate=0.05)
    assert run.summary["weighted_error"] < 0.2e-9  # on 14df91e: 5.7 times the error of the mean


def test_other_losses_see_labels_as_they_are():
    preparation = frame_preparation()
    assert not LabelScale.of(preparation, nn.functional.mse_loss).is_identity
    assert not LabelScale.of(preparation, nn.L1Loss()).is_identity
    assert LabelScale.of(preparation, nn.functional.huber_loss).is_identity
    assert LabelScale.of(preparation, lambda outputs, labels: outputs.mean()).is_identity
    assert LabelScale.of(None, nn.functional.mse_loss).is_identity


def frame_preparation():
    return selffl.Federation.from_frame(frame().drop(columns="grade"), "site", "score").preparation


def test_a_run_may_start_from_a_model_in_the_users_units(values):
    rows, run = values
    fed = run.federation
    model = run.personal_model("s1")
    assert isinstance(model, PreparedModel)
    again = selffl.train(nn.Linear(5, 1), fed, "fedavg", rounds=1, participation=1.0, start=model)
    assert again.summary["weighted_error"] < 0.6 * rows["score"].std()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda rows: rows.drop(columns="age"), {}, "has no column 'age'"),
        (lambda rows: rows.assign(age="old"), {}, "column 'age' holds words; expected numbers"),
        (lambda rows: rows.assign(age=np.where(rows.index == 3, np.nan, rows["age"])), {}, "row 3: age is missing"),
        (lambda rows: rows, {"client": "ward"}, "has no column 'ward'"),
        (lambda rows: np.zeros((4, 3)), {}, r"shape \(4, 3\); expected rows of shape \(5,\)"),
        (lambda rows: np.full((4, 5), np.inf), {}, "NaN or infinity"),
        (lambda rows: np.zeros((4, 5)), {"client": ["s1"]}, "4 rows and 1 clients"),
    ],
)
def test_rows_that_cannot_be_answered_are_refused_in_one_line(classes, change, options, message):
    rows, run = classes
    with pytest.raises(DataError, match=message) as raised:
        run.predict(change(rows), **options)
    assert "\n" not in str(raised.value)


def test_an_unknown_word_is_said(classes):
    rows, run = classes
    with pytest.warns(UserWarning, match="sex holds 'x', which no training row did"):
        answers = run.predict(rows.assign(sex="x"))
    assert len(answers) == len(rows)


def test_a_run_on_arrays_has_no_names_of_columns():
    x = np.random.default_rng(0).normal(size=(60, 2))
    fed = selffl.Federation.from_arrays(x, (x[:, 0] > 0).astype(int), np.arange(60) % 3)
    run = selffl.train("softmax", fed, "ditto", rounds=2, participation=1.0)
    with pytest.raises(ConfigError, match="no column names"):
        run.predict(pandas.DataFrame(x))
    answers = run.predict(x, client=(np.arange(60) % 3).tolist())
    assert answers.column_names == ["client", "prediction", "probability_0", "probability_1", "model"]


def test_a_new_clients_federation_with_a_preparation_of_its_own_is_refused(classes):
    rows, run = classes
    own = selffl.Federation.from_frame(rows.head(20).drop(columns="score"), "site", "grade")
    alone = own.subset(own.clients[:1])
    with pytest.raises(DataError, match="preparation of its own"):
        run.welcome(alone)
    like = selffl.Federation.from_frame(rows.head(20), "site", "grade", preparation=run.preparation)
    assert isinstance(run.welcome(like.subset(like.clients[:1])), PreparedModel)


@pytest.mark.parametrize("task", ["values", "counts"])
def test_the_guides_way_without_selffl_is_right(task, tmp_path):
    """The guide scaled in float32, in which minutes since 1970 are one number, and left out the scale of counts."""
    guide = (Path(__file__).parents[2] / "docs" / "howto" / "predict.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^(mean, scale = .*?)^print\(output \* (.*?)\)  #", guide, re.M | re.S)
    rng = np.random.default_rng(0)
    seconds = 1.7e9 + rng.uniform(-60, 60, 400)
    many = np.exp(2 + (seconds - 1.7e9) / 60)
    label = rng.poisson(many) if task == "counts" else many
    rows = pandas.DataFrame({"site": np.arange(400) % 4, "t": seconds, "y": label})
    fed = selffl.Federation.from_frame(rows, "site", "y", task=task, test_fraction=0.25)
    run = selffl.train(nn.Linear(1, 1), fed, "ditto", rounds=10, participation=1.0, learning_rate=0.05)
    run.export(tmp_path / "one.safetensors", [1], full=True)
    with safe_open(tmp_path / "one.safetensors", "pt") as file:
        about = file.metadata()
    found = {
        "torch": torch,
        "known": json.loads(about["preparation"]),
        "label": json.loads(about["label_scale"]),
        "model": nn.Linear(1, 1),
        "x": torch.tensor(seconds[:, None]),
    }
    found["model"].load_state_dict(load_file(tmp_path / "one.safetensors"))
    exec(recipe[0] + "answer = output * " + recipe[1], found)
    expected = run.predict(rows.assign(site=1))["prediction"]
    np.testing.assert_allclose(found["answer"].detach().numpy()[:, 0], expected, rtol=1e-6)


def test_a_later_file_has_the_decimal_sign_of_the_first(tmp_path):
    """Where the training rows had decimal commas, 1.234 is a thousand, and 1.5 is refused."""
    rng = np.random.default_rng(0)
    x = np.round(rng.uniform(0, 9, 120), 2)
    lines = [f"{k % 4};{str(1000 * v).replace('.', ',')};{str(round(v, 3)).replace('.', ',')}" for k, v in enumerate(x)]
    (tmp_path / "rows.csv").write_text("\n".join(["site;x;y", *lines]) + "\n", encoding="utf-8")
    fed = selffl.Federation.from_csv(tmp_path / "rows.csv", client="site", label="y", test_fraction=0.2)
    assert fed.preparation.decimal == ","
    torch.manual_seed(0)
    run = selffl.train(nn.Linear(1, 1), fed, "fedavg", rounds=8, participation=1.0, out=tmp_path / "run")
    (tmp_path / "new.csv").write_text("site;x\n0;4.000\n1;8.000\n", encoding="utf-8")
    whole = pandas.DataFrame({"site": [0, 1], "x": [4000, 8000]})
    for known in (run, selffl.load(tmp_path / "run")):
        found = known.predict(tmp_path / "new.csv")["prediction"]
        np.testing.assert_allclose(found, known.predict(whole)["prediction"], rtol=1e-6)
        assert found[1].as_py() == pytest.approx(8.0, rel=0.2)
    (tmp_path / "other.csv").write_text("site;x\n0;4.5\n", encoding="utf-8")
    with pytest.raises(DataError, match="the decimal sign is ','"):
        run.predict(tmp_path / "other.csv")
