"""Preparations: scikit-learn's numbers, profiles that add up, tables in every way of writing, and what is refused."""

import json

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pandas._libs.parsers import STR_NA_VALUES
from pyarrow import parquet
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from selffl import ConfigError, DataError, Federation
from selffl.data.preparation import Preparation
from selffl.data.profile import Moments, Profile
from selffl.data.readers import table_of_frame
from selffl.data.tables import MISSING_TEXTS


def read(text, folder, encoding="utf-8", **options):
    """The federation of a CSV file with this text."""
    path = folder / "rows.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode(encoding))
    return Federation.from_csv(path, **{"test_fraction": 0} | options)


def in_own_units(fed, part="train"):
    made = fed.preparation
    return fed.parts[part].features.double().numpy() * np.array(made.scale) + np.array(made.mean)


def assert_column(fed, expected):
    """The first input in the table's own units, up to the rounding of float32; rows of a client are in no order."""
    np.testing.assert_allclose(sorted(in_own_units(fed)[:, 0]), expected, atol=1e-6 * fed.preparation.scale[0])


def frame(rows=40, seed=0):
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "client": rng.choice(["a", "b"], rows),
            "dose": rng.normal(50, 9, rows),
            "town": rng.choice(["x", "y", "z"], rows),
            "label": rng.choice(["no", "yes"], rows),
        }
    )


# ---------------------------------------------------------------------------------------------------------- numbers


def test_inputs_are_those_of_scikit_learn_fitted_on_the_training_rows():
    rows = frame(200)
    rows.loc[::7, "dose"] = np.nan
    rows.loc[3::9, "town"] = None
    rows["number"] = np.arange(200.0)
    fed = Federation.from_frame(rows, missing="impute", test_fraction=0.3)
    assert fed.preparation.inputs == [
        "dose", "dose is missing", "town=x", "town=y", "town=z", "town is missing", "number"
    ]  # fmt: skip
    chosen = {part: np.rint(in_own_units(fed, part)[:, -1]).astype(int) for part in fed.parts}
    assert sorted(np.concatenate(list(chosen.values())).tolist()) == list(range(200))
    train = rows.iloc[chosen["train"]]
    scaler = StandardScaler().fit(train[["dose", "number"]])
    imputer = SimpleImputer(add_indicator=True).fit(scaler.transform(train[["dose", "number"]]))
    words = OneHotEncoder(sparse_output=False, handle_unknown="ignore").fit(train[["town"]].dropna())
    for part, numbers in chosen.items():
        own = rows.iloc[numbers]
        dose, number, is_missing = imputer.transform(scaler.transform(own[["dose", "number"]])).T
        expected = np.column_stack(
            [dose, is_missing, words.transform(own[["town"]]), own["town"].isna().to_numpy(), number]
        )
        np.testing.assert_allclose(fed.parts[part].features, expected, atol=2e-6)


def test_seconds_since_1970_keep_the_precision_of_float32_after_scaling():
    seconds = 1.7e9 + np.random.default_rng(0).uniform(-30, 30, 500)
    fed = Federation.from_frame(pd.DataFrame({"client": 0, "t": seconds, "label": [0, 1] * 250}), test_fraction=0)
    exact = (seconds - seconds.mean()) / seconds.std()
    np.testing.assert_allclose(np.sort(fed.train.features[:, 0]), np.sort(exact), atol=5e-7)
    by_arrays = Federation.from_arrays(seconds[:, None], [0, 1] * 250, [0] * 500, 0, standardise=True)
    np.testing.assert_allclose(np.sort(by_arrays.train.features[:, 0]), np.sort(exact), atol=5e-7)


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e12, 1e149])
def test_labels_and_features_of_any_size_stay_in_their_units(size):
    values = np.random.default_rng(0).normal(3, 1, 50) * size
    rows = pd.DataFrame({"client": 0, "u": values, "label": values})
    fed = Federation.from_frame(rows, test_fraction=0)
    np.testing.assert_array_equal(np.sort(fed.train.labels), np.sort(values))
    label = fed.preparation.label
    np.testing.assert_allclose([label.mean, label.scale], [values.mean(), values.std()], rtol=1e-12)
    np.testing.assert_allclose(fed.train.features.double().std(correction=0), 1, atol=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, -7.0, 1e12, 1e150])
def test_a_constant_is_0_and_not_noise(value):
    fed = Federation.from_frame(pd.DataFrame({"client": 0, "u": [value] * 33, "v": range(33), "label": [0, 1, 1] * 11}))
    assert fed.preparation.scale[0] == 1.0
    assert fed.train.features[:, 0].abs().max() <= 1e-15 * abs(value)


def test_moments_of_labels_are_those_of_training_rows():
    y = np.arange(40.0) ** 2 + 0.5
    fed = Federation.from_arrays(np.ones((40, 1)), y, [0] * 40, 0.5, standardise=True)
    assert fed.preparation.label.mean == pytest.approx(fed.train.labels.double().mean().item(), rel=1e-12)


# --------------------------------------------------------------------------------------------------- missing values


def text_frames(tmp_path, texts, name="u"):
    """A table whose column is text, by every reader: (read, word for rows, number of the first row)."""
    columns = {"client": ["a"] * len(texts), "label": [0, 1] * (len(texts) // 2), "v": list(range(len(texts)))}
    made = pa.table(columns | {name: texts})
    parquet.write_table(made, tmp_path / "a.parquet")
    lines = ["client,label,v," + name, *(f'a,{row % 2},{row},"{text}"' for row, text in enumerate(texts))]
    (tmp_path / "a.csv").write_text("\n".join(lines), encoding="utf-8")
    return {
        "csv": lambda **options: Federation.from_csv(tmp_path / "a.csv", **options),
        "parquet": lambda **options: Federation.from_csv(tmp_path / "a.parquet", **options),
        "pandas": lambda **options: Federation.from_frame(made.to_pandas(), **options),
        "polars": lambda **options: Federation.from_frame(pl.from_arrow(made), **options),
        "pyarrow": lambda **options: Federation.from_frame(made, **options),
    }


def test_what_pandas_sql_and_spreadsheets_write_for_a_missing_value_is_known():
    assert set(MISSING_TEXTS) >= STR_NA_VALUES | {
        r"\N",
        ".",
        "#DIV/0!",
        "#VALUE!",
        "#REF!",
        "#NAME?",
        "#NUM!",
        "#NULL!",
    }


@pytest.mark.parametrize("token", [*MISSING_TEXTS, "  NA "])
@pytest.mark.parametrize("kind", ["numbers", "words"])
def test_every_reader_knows_every_text_for_a_missing_value(token, kind, tmp_path):
    known = ["1.5", "2.5", "3.5", "5.5"] if kind == "numbers" else ["p", "q", "p", "q"]
    for reader, load in text_frames(tmp_path, [known[0], token, *known[1:], token]).items():
        where = "lines 3, 7" if reader == "csv" else "rows 1, 5"
        with pytest.raises(DataError, match=f"{where}: u is missing; expected a value in each row"):
            load()
        dropped = load(missing="drop", test_fraction=0)
        assert len(dropped.train.labels) == 4
        assert dropped.preparation.num_dropped == 2
        imputed = load(missing="impute", test_fraction=0)
        inputs = dict(zip(imputed.preparation.inputs, in_own_units(imputed).T, strict=True))
        assert inputs["u is missing"].sum() == 2
        if kind == "numbers":
            np.testing.assert_allclose(sorted(inputs["u"]), [1.5, 2.5, 3.25, 3.25, 3.5, 5.5], atol=1e-6)
        else:
            assert inputs["u=p"].sum() == inputs["u=q"].sum() == 2


@pytest.mark.parametrize("name", ["client", "label"])
def test_rows_without_label_or_client_are_dropped_but_never_imputed(name, tmp_path):
    text = "client,label,u\na,0,1\na,1,2\nb,0,3\nb,1,5\n"
    text += "NA,0,9\n" if name == "client" else "b,NA,9\n"
    with pytest.raises(DataError, match=rf'rows\.csv, line 6: {name} is missing; .* Pass missing="drop", or fill'):
        read(text, tmp_path)
    for rule in ("drop", "impute"):
        fed = read(text, tmp_path, missing=rule)
        assert fed.clients == ["a", "b"]
        assert_column(fed, [1.0, 2.0, 3.0, 5.0])
        assert fed.preparation.num_dropped == 1


# ------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("cells", "options", "expected"),
    [
        (["1,5", "2,25", "3"], {}, [1.5, 2.25, 3.0]),
        (["1.234,5", "1.234.567", "-3"], {}, [-3.0, 1234.5, 1234567.0]),
        (["1,234.5", "1,234,567", "+3"], {}, [3.0, 1234.5, 1234567.0]),
        (["1'234.5", "12'345", "3"], {}, [3.0, 1234.5, 12345.0]),
        (["1 234", "12\u202f345", "3"], {}, [3.0, 1234.0, 12345.0]),
        (["1,234", "2,345", "3"], {"decimal": ","}, [1.234, 2.345, 3.0]),
        (["1,234", "2,345", "3"], {"decimal": "."}, [3.0, 1234.0, 2345.0]),
        (["1.234", "2.345", "3"], {"decimal": ","}, [3.0, 1234.0, 2345.0]),
        (["1.234", "2.345", "3"], {}, [1.234, 2.345, 3.0]),
        (["1,5e3", "2", "3"], {}, [2.0, 3.0, 1500.0]),
        (["1e3", "+2", ".5"], {}, [0.5, 2.0, 1000.0]),
    ],
)
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_numbers_mean_what_they_do_where_they_were_written(cells, options, expected, separator, end, tmp_path):
    rows = [["client", "label", "u"], *([f"c{k}", str(k % 2), f'"{cell}"'] for k, cell in enumerate(cells))]
    text = "\ufeff" + end.join(separator.join(row) for row in rows) + end
    fed = read(text, tmp_path, **options)
    assert_column(fed, expected)
    assert fed.clients == ["c0", "c1", "c2"]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ('client,label,u\na,1,"1,234"\na,0,3\n', {}, r"u holds '1,234', .* Pass decimal=\",\" or decimal=\"\.\""),
        ("client;label;u;v\na;1;1,5;1\na;0;2,5;2.5\n", {}, r"line 3: v has a decimal point, and u decimal commas"),
        ("client;label;u\na;1;1,5\na;0;2,5\n", {"decimal": "."}, r"lines 2, 3: u is '1,5', and the decimal sign"),
        ("client;label;u\na;1;1.5\na;0;2.5\n", {"decimal": ","}, r"lines 2, 3: u is '1\.5', (and the decimal|among)"),
        ("client;label;u\na;1;1,5\na;0;2.5\na;0;2.5\n", {}, r"line 2: u is '1,5', among numbers; expected numbers, a"),
        ("client,label,u\na,1,2\n", {"decimal": ";"}, r"decimal is ';'; expected '\.' or ','"),
        ("client,label,u\na,1,2\na,1,2,3\n", {}, r"line 3: 4 field\(s\); expected 3, as in the header"),
        ('client,label,u\na,1,"two\nlines"\n\na,0,p\na,0,\n', {}, r"rows\.csv, line 6: u is missing"),
        ("client,label,u\na,1,2020-12-31\na,1,2020-13-31\n", {}, r"line 3: u is '2020-13-31', not a date .* as 2020"),
        ("client,label,u\na,1,31.12.2020\na,1,1.1.2021\n", {}, r"lines 2, 3: u is '31\.12\.2020', not a date in ISO"),
        (b"client,label,town\na,1,K\xf6ln\na,0,Bonn\n", {}, r"rows\.csv is not text in UTF-8 \(byte 23\)"),
        (b"client,label,K\xf6ln\na,1,2\n", {}, r"rows\.csv is not text in UTF-8 \(byte 14\)"),
    ],
)  # fmt: skip
def test_what_is_in_doubt_is_refused_with_its_line(text, options, message, tmp_path):
    with pytest.raises(DataError, match=message) as error:
        read(text, tmp_path, **options)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_header_may_be_wide_and_hold_other_separators_in_quotes(tmp_path):
    names = [f"a quite long name of column {number}" for number in range(6000)]
    fed = read(",".join(["client", "label", *names]) + "\n" + ",".join(["a", "1", *["0.5"] * 6000]) + "\n", tmp_path)
    assert fed.preparation.inputs == names
    fed = read('client;label;"dose, in mg, a day"\na;1;1,5\nb;0;2,5\n', tmp_path)
    assert fed.preparation.inputs == ["dose, in mg, a day"]


def test_columns_that_change_their_kind_late_in_a_file_are_read(tmp_path, monkeypatch):
    from selffl.data import readers

    monkeypatch.setattr(readers, "MIN_BLOCK_BYTES", 64)
    lines = [f"a,{row % 2},{row},w{row % 3}" for row in range(60)] + ["a,1,0.5,7", "a,0,1.5,8"]
    fed = read("client,label,u,v\n" + "\n".join(lines), tmp_path)
    assert_column(fed, sorted([*range(60), 0.5, 1.5]))
    assert fed.preparation.columns[1].words == ("7", "8", "w0", "w1", "w2")


@pytest.mark.parametrize(
    ("cells", "seconds"),
    [
        (["1970-01-02", "1970-01-01"], [0.0, 86400.0]),
        (["1970-01-01T00:00:10", "1970-01-01 00:00:01.5"], [1.5, 10.0]),
        (["1970-01-01T01:00:10+01:00", "1970-01-01T00:00:01Z"], [1.0, 10.0]),
        (["00:00:10", "01:00:00"], [10.0, 3600.0]),
    ],
)
def test_dates_are_seconds_in_every_reader(cells, seconds, tmp_path):
    for load in text_frames(tmp_path, cells).values():
        np.testing.assert_allclose(sorted(in_own_units(load(test_fraction=0))[:, -1]), seconds, atol=1e-3)


def test_dates_of_frames_are_those_of_text():
    zone = pd.to_datetime(["1970-01-01 01:00:10", "1970-01-02 00:00:00"]).tz_localize("Europe/Berlin")
    rows = pd.DataFrame({"client": 0, "label": [0, 1], "t": zone})
    fed = Federation.from_frame(rows, test_fraction=0)
    assert_column(fed, [10.0, 86400 - 3600])
    assert fed.preparation.columns[0].kind == "date"
    with pytest.raises(
        DataError, match="column 't' holds numbers; expected dates, as in the rows that were trained on"
    ):
        fed.preparation.encode(table_of_frame(rows.assign(t=[1, 2])))


PIECES = [b"a", b"1", b"1,5", b'"', b",", b";", b"\n", b"\r", b"\xe4", b"NA", b"2020-01-01", b"\0", b"1.5", b"inf"]


@settings(max_examples=150, deadline=None)
@given(
    st.binary(max_size=60) | st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join),
    st.integers(0, 60),
)  # fmt: skip
def test_any_bytes_are_a_federation_or_one_line(tmp_path_factory, inserted, place):
    text = b"client,label,u,v\na,0,1.5,p\nb,1,2.5,q\na,1,3,p\n"
    for broken in (inserted, text[:place] + inserted + text[place:], text[:place] + inserted + text[place + 5 :]):
        try:
            read(broken, tmp_path_factory.getbasetemp())
        except DataError as error:
            message = str(error)
            assert "\n" not in message


# ------------------------------------------------------------------------------------------------- labels and classes


@pytest.mark.parametrize(
    ("labels", "options", "classes"),
    [
        ([-1, 1, 1], {}, [-1, 1]),
        ([1, 2, 3], {}, [1, 2, 3]),
        ([0, 1, 2], {}, None),
        ([False, True, True], {}, None),
        ([1.0, 3.0, 1.0], {"task": "classes"}, [1, 3]),
        ([2**53, 2**53 + 1, 2**53], {}, [2**53, 2**53 + 1]),
    ],
)
def test_classes_keep_the_users_coding(labels, options, classes):
    rows = pd.DataFrame({"client": ["a", "b", "c"], "u": [1.0, 2.0, 3.0], "label": labels})
    fed = Federation.from_frame(rows, test_fraction=0, **options)
    assert fed.classes == classes
    names = classes or [0, 1, 2]
    assert [names[number] for number in fed.train.labels.tolist()] == labels


def test_counts_and_whole_values_are_told_by_task():
    rows = pd.DataFrame({"client": 0, "u": range(60), "label": [k % 30 for k in range(60)]})
    for task in ("values", "counts"):
        fed = Federation.from_frame(rows, task=task)
        assert (fed.preparation.label.task, fed.train.labels.dtype) == (task, torch.float64)
        assert fed.preparation.label.mean == pytest.approx(fed.train.labels.mean().item())
    assert Federation.from_frame(rows, task="classes").num_classes == 30


# ------------------------------------------------------------------------------------------------ new rows, and saving


def test_unknown_words_are_none_of_the_known_ones_and_are_reported():
    made = Federation.from_frame(frame(), test_fraction=0).preparation
    new = table_of_frame(pa.table({"dose": [50.0, 51.0], "town": ["w", "x"]}))
    assert made.encode(new)[:, 1:].tolist() == [[0, 0, 0], [1, 0, 0]]
    assert made.unknown_words(new) == {"town": ["w"]}


def test_a_preparation_survives_json_and_files(tmp_path):
    rows = frame()
    rows.loc[0, "dose"] = np.nan
    fed = Federation.from_frame(rows, missing="impute", validation_fraction=0.2)
    made = fed.preparation
    assert Preparation.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    made.save(tmp_path / "p.json")
    assert Preparation.load(tmp_path / "p.json") == made
    fed.save(tmp_path / "fed")
    again = Federation.load(tmp_path / "fed")
    assert again.preparation == made
    assert again.fingerprint() == fed.fingerprint()
    from dataclasses import replace

    assert replace(fed, preparation=None).fingerprint() != fed.fingerprint()
    assert replace(fed, preparation=replace(made, num_dropped=9)).fingerprint() != fed.fingerprint()


@pytest.mark.parametrize(
    "change",
    [{"mean": [0.0]}, {"scale": [0, 1, 1, 1]}, {"missing": "fill"}, {"label": {}}, {"columns": 3},
     {"x": 1}, {"mean": [float("nan"), 0, 0, 0]}, {"shape": [2]}],
)  # fmt: skip
def test_what_is_no_preparation_is_refused(change, tmp_path):
    found = Federation.from_frame(frame()).preparation.to_dict()
    (tmp_path / "p.json").write_text(json.dumps(found | change))
    with pytest.raises(
        DataError, match=r"p\.json is no preparation; expected a file that Preparation\.save has written"
    ):
        Preparation.load(tmp_path / "p.json")


def test_a_given_preparation_is_used_and_settles_the_options(tmp_path):
    rows = frame(80)
    made = Federation.from_frame(rows, test_fraction=0).preparation
    rows.iloc[:10].to_csv(tmp_path / "a.csv", index=False)
    fed = Federation.from_csv(tmp_path / "a.csv", preparation=made, test_fraction=0)
    assert fed.preparation == made
    assert fed.classes == ["no", "yes"]
    np.testing.assert_allclose(np.sort(in_own_units(fed)[:, 0]), np.sort(rows["dose"][:10]), rtol=1e-6)
    for options in ({"features": ["dose"]}, {"exclude": ["dose"]}, {"task": "values"}, {"missing": "drop"}):
        with pytest.raises(ConfigError, match="is given, and the preparation has its own; expected one of them"):
            Federation.from_csv(tmp_path / "a.csv", preparation=made, **options)
    with pytest.raises(ConfigError, match="label is 'town', and the preparation's is 'label'"):
        Federation.from_csv(tmp_path / "a.csv", label="town", preparation=made)


def test_columns_that_nobody_uses_may_hold_anything_and_frames_stay_as_they_were():
    rows = frame().assign(odd=[[1], "x"] * 20)
    rows.loc[0, "dose"] = np.nan
    kept = rows.copy(deep=True)
    for rule in ("drop", "impute"):
        Federation.from_frame(rows, exclude=["odd"], missing=rule).train.features.zero_()
    pd.testing.assert_frame_equal(rows, kept)


# ----------------------------------------------------------------------------------------------------------- profiles


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.floats(-1e3, 1e3), st.sampled_from([0.0, 1e6, -1e9]), st.sampled_from("pqr")),
        min_size=2, max_size=40,
    )
)  # fmt: skip
def test_profiles_of_any_parts_add_up_to_that_of_all_rows(rows):
    whole = pd.DataFrame(rows, columns=["part", "u", "shift", "word"])
    whole["u"] += whole["shift"]
    whole["label"] = whole["u"] + 0.25
    features = ["u", "word"]
    parts = [Profile.of_frame(own, "label", features=features, task="values") for _, own in whole.groupby("part")]
    merged = Preparation.fit(*[Profile.from_json(part.to_json()) for part in parts])
    at_once = Preparation.fit(Profile.of_frame(whole, "label", features=features, task="values"))
    assert merged.columns == at_once.columns
    size = np.abs(whole["u"]).max() + 1
    np.testing.assert_allclose(merged.mean, at_once.mean, atol=1e-12 * size)
    if whole["u"].std(ddof=0) > 1e-6 * size:
        np.testing.assert_allclose(merged.scale, at_once.scale, rtol=1e-9)
        np.testing.assert_allclose(merged.scale[0], whole["u"].std(ddof=0), rtol=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-1e100, 1e100), min_size=1, max_size=30), st.integers(0, 30))
def test_moments_merge_to_those_of_all_numbers(values, cut):
    numbers = np.array(values)
    merged = Moments.of(numbers[:cut]).merge(Moments.of(numbers[cut:]))
    size = np.abs(numbers).max()
    assert merged.count == len(numbers)
    np.testing.assert_allclose(merged.mean, numbers.mean(), atol=1e-12 * size)
    np.testing.assert_allclose(merged.squares, np.square(numbers - numbers.mean()).sum(), atol=1e-12 * size**2)


def test_profiles_of_other_columns_kinds_or_tasks_are_refused():
    first = pa.table({"u": [1.0, 2.0], "label": [0, 1]})
    for other, options, message in (
        ({"v": [1.0, 2.0], "label": [0, 1]}, {}, "the column 'u' is in some profiles and not in others"),
        ({"u": ["p", "q"], "label": [0, 1]}, {}, "column 'u' holds numbers in one profile and words in another"),
        ({"u": [1.0, 2.0], "label": ["0a", "1a"]}, {}, "the label 'label' holds words in one profile and numbers"),
        ({"u": [1.0, 2.0], "label": [0.5, 1]}, {}, "profiles have the tasks 'classes' and 'values'; expected one"),
    ):
        with pytest.raises(DataError, match=message):
            Preparation.fit(Profile.of_frame(first, "label"), Profile.of_frame(pa.table(other), "label", **options))
    gap = Profile.of_frame(pa.table({"u": [1.0, None], "label": [0, 1]}), "label", missing="impute")
    with pytest.raises(DataError, match="column 'u' lacks 1 values; expected none with missing='refuse'"):
        Preparation.fit(Profile.of_frame(first, "label"), gap)
    made = Preparation.fit(Profile.of_frame(first, "label"), gap, missing="impute")
    assert (made.inputs, made.mean[0]) == (["u", "u is missing"], pytest.approx(4 / 3))


def test_sites_fit_together_what_all_rows_would_have_given(tmp_path):
    rows = frame(60)
    profiles = []
    for site, own in rows.groupby("client"):
        own.drop(columns="client").to_csv(tmp_path / f"{site}.csv", index=False)
        Profile.of_csv(tmp_path / f"{site}.csv", "label").save(tmp_path / f"{site}.json")
        profiles.append(Profile.load(tmp_path / f"{site}.json"))
    together = Preparation.fit(*profiles)
    at_once = Federation.from_frame(rows, test_fraction=0).preparation
    assert (together.columns, together.label) == (at_once.columns, at_once.label)
    np.testing.assert_allclose([together.mean, together.scale], [at_once.mean, at_once.scale], rtol=1e-12)
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(DataError, match=r"a\.json is no profile; expected a file that Profile\.save has written"):
        Profile.load(tmp_path / "a.json")
