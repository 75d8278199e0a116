"""Frames, CSV and Parquet with a column of clients: the rows of pandas' own groupby, and one line for faults."""

import datetime
import decimal
from dataclasses import replace

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch

from selffl import ConfigError, DataError, Federation

SITES = ["north", "south", "äußere"]


def table(seed=0, rows=60):
    """A pandas frame with everything that a user may have in one."""
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "age": rng.integers(20, 90, rows),
            "site": rng.choice(SITES, rows),
            "dose": rng.integers(-40, 40, rows) / 8,
            "smokes": rng.random(rows) < 0.5,
            "outcome": rng.choice(["well", "ill", "dead"], rows),
        }
    )


def in_pandas(frame):
    return frame


def in_pandas_categories(frame):
    return frame.astype({"site": "category", "outcome": "category"})


def in_pandas_nullable(frame):
    return frame.convert_dtypes()


def in_pandas_objects(frame):
    return frame.astype(object)


def in_polars(frame):
    return pl.from_pandas(frame)


def in_polars_categories(frame):
    return pl.from_pandas(frame).with_columns(pl.col("site", "outcome").cast(pl.Categorical))


def in_polars_enum(frame):
    return pl.from_pandas(frame).with_columns(pl.col("outcome").cast(pl.Enum(["well", "ill", "dead"])))


def in_arrow(frame):
    return pa.Table.from_pandas(frame)


def in_arrow_dictionaries(frame):
    made = pa.Table.from_pandas(frame)
    for name in ("site", "outcome"):
        made = made.set_column(made.schema.names.index(name), name, made[name].dictionary_encode())
    return made


def in_arrow_batch(frame):
    return pa.RecordBatch.from_pandas(frame)


KINDS = [
    in_pandas, in_pandas_categories, in_pandas_nullable, in_pandas_objects,
    in_polars, in_polars_categories, in_polars_enum,
    in_arrow, in_arrow_dictionaries, in_arrow_batch,
]  # fmt: skip
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def csv_of(frame, path):
    frame.to_csv(path, index=False)
    return path


def parquet_of(frame, path):
    frame.to_parquet(path, index=False)
    return path


def raw(fed, part):
    """The inputs of a part in the table's own units."""
    made = fed.preparation
    return np.round(part.features.double().numpy() * np.array(made.scale) + np.array(made.mean), 4)


def held(fed):
    """Rows of each client and their labels' names, in the table's units, sorted: {client: [(features..., name)]}."""
    found = {}
    for position, client in enumerate(fed.clients):
        rows = []
        for part in fed.parts.values():
            low, high = part.offset[position : position + 2].tolist()
            names = [fed.classes[number] for number in part.labels[low:high].tolist()]
            rows += [(*x, name) for x, name in zip(raw(fed, part)[low:high].tolist(), names, strict=True)]
        found[client] = sorted(rows)
    return found


def expected(frame, features):
    return {
        site: sorted(
            (*map(float, row), name) for row, name in zip(own[features].to_numpy(), own["outcome"], strict=True)
        )
        for site, own in frame.groupby("site")
    }


# ---------------------------------------------------------------------------------------------------- what comes out


@every_kind
def test_every_frame_gives_each_client_the_rows_of_groupby(kind):
    frame = table()
    fed = Federation.from_frame(kind(frame), client="site", label="outcome", test_fraction=0.25, seed=3)
    assert fed.clients == sorted(SITES)
    assert fed.classes == ["dead", "ill", "well"]  # sorted, whatever the order of the categories
    assert fed.num_classes == 3
    assert fed.train.features.dtype == torch.float32
    assert fed.train.labels.dtype == torch.int64
    assert held(fed) == expected(frame, ["age", "dose", "smokes"])


@every_kind
def test_features_may_be_chosen_and_ordered(kind):
    frame = table()
    fed = Federation.from_frame(kind(frame), "site", "outcome", ["dose", "age"])
    assert held(fed) == expected(frame, ["dose", "age"])


@pytest.mark.parametrize("write", [csv_of, parquet_of])
def test_files_give_the_rows_of_the_frame(write, tmp_path):
    frame = table().assign(smokes=lambda rows: rows["smokes"].astype(int))
    suffix = ".csv" if write is csv_of else ".parquet"
    path = write(frame, tmp_path / f"all{suffix}")
    options = {"test_fraction": 0.2, "seed": 4, "validation_fraction": 0.2, "stratify": True}
    fed = Federation.from_csv(path, client="site", label="outcome", **options)
    assert held(fed) == expected(frame, ["age", "dose", "smokes"])
    same = Federation.from_frame(frame, client="site", label="outcome", **options)
    assert fed.fingerprint() == same.fingerprint()
    by_arrays = Federation.from_arrays(
        frame[["age", "dose", "smokes"]].to_numpy(np.float32),
        np.unique(frame["outcome"], return_inverse=True)[1],
        frame["site"].to_numpy(),
        **options,
    )
    for part, rows in by_arrays.parts.items():
        np.testing.assert_allclose(raw(fed, fed.parts[part]), rows.features, atol=1e-4)
        for field in ("labels", "offset"):
            assert torch.equal(getattr(fed.parts[part], field), getattr(rows, field))
    chosen = Federation.from_csv(str(path), "site", "outcome", ["dose"])
    assert held(chosen) == expected(frame, ["dose"])


@pytest.mark.parametrize("kind", [in_pandas, in_polars, in_arrow], ids=lambda kind: kind.__name__)
def test_labels_that_are_numbers_have_no_names(kind):
    frame = table()
    classes = Federation.from_frame(kind(frame.assign(outcome=frame["age"] % 3)), "site", "outcome")
    assert (classes.classes, classes.train.labels.dtype, classes.num_classes) == (None, torch.int64, 3)
    targets = Federation.from_frame(kind(frame.assign(outcome=frame["dose"] * 2)), "site", "outcome")
    assert (targets.classes, targets.train.labels.dtype) == (None, torch.float64)
    truth = Federation.from_frame(kind(frame), "site", "smokes", ["age"])
    assert (truth.classes, truth.num_classes) == (None, 2)


@pytest.mark.parametrize(
    ("texts", "ids"),
    [
        (["10", "9", "9", "10"], [9, 10]),
        (["-3", "0", "0", "7"], [-3, 0, 7]),
        (["007", "7", "7", "007"], ["007", "7"]),
        (["1.5", "2", "2", "2"], ["1.5", "2"]),
        (["+1", "2", "2", "2"], ["+1", "2"]),
        (["1 ", " b", "b", "1"], ["1", "b"]),
        # Beyond int64 NumPy would round, and two clients be one.
        (
            ["9223372036854775808", "9223372036854775809", "-1", "-1"],
            ["-1", "9223372036854775808", "9223372036854775809"],
        ),
        (["9" * 5000, "1", "1", "1"], ["1", "9" * 5000]),
    ],
)
def test_ids_in_a_file_are_numbers_where_all_are_written_as_such(texts, ids, tmp_path):
    lines = "\n".join(f"{text},{row},{row % 2}" for row, text in enumerate(texts))
    (tmp_path / "a.csv").write_text(f"client,u,label\n{lines}\n", encoding="utf-8")
    fed = Federation.from_csv(tmp_path / "a.csv")
    assert fed.clients == ids
    assert [type(client) for client in fed.clients] == [type(client) for client in ids]


@pytest.mark.parametrize("kind", [in_pandas, in_polars, in_arrow, "csv"])
def test_a_column_may_say_the_clusters(kind, tmp_path):
    frame = table().assign(smokes=1, region=lambda rows: np.where(rows["site"] == "south", "b", "a"))
    if kind == "csv":
        fed = Federation.from_csv(csv_of(frame, tmp_path / "a.csv"), "site", "outcome", cluster="region")
    else:
        fed = Federation.from_frame(kind(frame), "site", "outcome", cluster="region")
    assert dict(zip(fed.clients, fed.cluster.tolist(), strict=True)) == {"north": 0, "south": 1, "äußere": 0}
    assert fed.train.features.shape[1] == 3


@pytest.mark.parametrize("kind", [in_polars, in_arrow], ids=lambda kind: kind.__name__)
def test_decimals_are_numbers(kind):
    prices = [decimal.Decimal("1.25"), decimal.Decimal("2.50")]
    made = pa.table({"site": ["a", "b"], "price": prices, "y": [0, 1]})
    fed = Federation.from_frame(pl.from_arrow(made) if kind is in_polars else made, "site", "y", test_fraction=0)
    assert raw(fed, fed.train).tolist() == [[1.25], [2.5]]


def test_columns_may_have_names_that_are_no_text():
    frame = pd.DataFrame(np.arange(12.0).reshape(4, 3)).astype({2: int})
    fed = Federation.from_frame(frame, client=2, label=1, task="values", test_fraction=0)
    assert fed.clients == [2, 5, 8, 11]
    assert raw(fed, fed.train).tolist() == [[0.0], [3.0], [6.0], [9.0]]


def test_the_frame_is_left_as_it_was():
    frame = table()
    kept = frame.copy(deep=True)
    fed = Federation.from_frame(frame, "site", "outcome")
    fed.train.features.zero_()
    pd.testing.assert_frame_equal(frame, kept)


# --------------------------------------------------------------------------------------------------- names of classes


def test_names_are_saved_and_loaded_and_part_of_the_fingerprint(tmp_path):
    fed = Federation.from_frame(table(), "site", "outcome")
    fed.save(tmp_path / "a")
    again = Federation.load(tmp_path / "a")
    assert again.classes == ["dead", "ill", "well"]
    assert again.fingerprint() == fed.fingerprint()
    renamed = Federation.from_frame(
        table().replace({"outcome": {"dead": "d", "ill": "i", "well": "w"}}), "site", "outcome"
    )
    assert torch.equal(renamed.train.labels, fed.train.labels)
    assert renamed.fingerprint() != fed.fingerprint()
    assert fed.pool().classes == fed.to("cpu", torch.float64).classes == fed.classes


def test_without_names_fingerprints_are_what_they_were():
    """Runs on disk have them; the number is that of before there were names."""
    fed = Federation.from_arrays([[0.0], [1.0], [2.0], [3.0]], [0, 1, 0, 1], list("abab"), test_fraction=0.5)
    assert fed.fingerprint() == "71586085d92b27e96a02df9cee2d0bc4b71591375c4678ee28fb6a76ad639d57"


def test_names_count_as_classes_even_where_nobody_has_a_row_of_them():
    fed = Federation.from_frame(table(), "site", "outcome")
    assert replace(fed, classes=["dead", "ill", "well", "lost"]).num_classes == 4
    assert replace(fed, classes=["dead", "ill", "well", "lost"]).class_counts().shape == (3, 4)


def test_a_folder_may_have_names_of_classes(tmp_path):
    (tmp_path / "a.csv").write_text("label,u\nyes,1\nno,2\n")
    (tmp_path / "b.csv").write_text("label,u\nperhaps,3\nno,4\n")
    fed = Federation.from_folder(tmp_path, test_fraction=0)
    assert fed.classes == ["no", "perhaps", "yes"]
    assert {
        client: sorted(rows) for client, rows in held(fed).items()
    } == {"a": [(1.0, "yes"), (2.0, "no")], "b": [(3.0, "perhaps"), (4.0, "no")]}  # fmt: skip
    (tmp_path / "c.csv").write_text("label,u\n0,3\n1,4\n")
    with pytest.raises(
        DataError, match=r"c\.csv: column 'label' holds numbers, and words in .*a\.csv; expected the same"
    ):
        Federation.from_folder(tmp_path)


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("kind", [in_pandas, in_polars, in_arrow], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"client": "sight"}, r"the frame has no column 'sight' among: age, site, .*; did you mean 'site'\? Name"),
        ({}, {"label": "outcom"}, r"no column 'outcom' among: .* did you mean 'outcome'\? Name the column of labels"),
        ({}, {"features": ["age", "dosis"]}, r"no column 'dosis' among: .* did you mean 'dose'\? Name columns of"),
        ({}, {"features": "age"}, r"features is 'age'; expected a list of columns, such as \['age'\]"),
        ({}, {"features": 3}, r"features is 3; expected a list of columns"),
        ({}, {"features": ["age", "dose", "age"]}, r"'age' is in features twice; expected names that differ"),
        ({}, {"label": None}, r"label is None; expected the name of the column of labels"),
        ({}, {"features": []}, r"the frame has no column beside 'outcome' and 'site'; expected features"),
        ({}, {"features": ["age", "site"]}, r"'site' is in features and the column of clients; .* Take it out"),
        ({}, {"label": "site"}, r"'site' is given as label and client; expected a column for each"),
        ({}, {"exclude": ["dosis"]}, r"no column 'dosis' among: .* did you mean 'dose'\? Name columns of .* exclude="),
        ({}, {"exclude": "age"}, r"exclude is 'age'; expected a list of columns, such as \['age'\]"),
        ({"town": [f"x{row}" for row in range(60)]}, {}, r"column 'town' holds 54 different words, .* at most 20 word"),
        ({"list": [[1]] * 60}, {}, r"the frame: column 'list' is of type .*list.*; expected numbers, dates or words"),
        ({"day": ["31.12.2020"] * 60}, {}, r"the frame, rows 0, 1, .*: day is '31\.12\.2020', not a date .* as 2020"),
        ({"outcome": [datetime.datetime(2024, 1, 1)] * 60}, {}, r"the frame: the label 'outcome' holds dates; expecte"),
        ({"outcome": ["08/15/2020"] * 60}, {}, r"outcome is '08/15/2020', not a date in ISO 8601; expected dates"),
        ({"outcome": [f"w{row}" for row in range(60)]}, {}, r"holds 60 different words in 60 rows, such as 'w0'; expe"),
        ({"outcome": list(range(30)) * 2}, {}, r"30 different whole numbers \(0, 1, 2, 3, 4, …\).* Pass task=\"classe"),
        ({"outcome": range(1000, 1060)}, {}, r"60 different whole numbers .*; expected to be told what they are"),
        ({"outcome": [1.0, 2.0] * 30}, {}, r"holds 2 different whole numbers \(1, 2\); expected to be told what they"),
        ({"outcome": [0.5, 1] * 30}, {"task": "classes"}, r"rows 0, 2, .*: the label 'outcome' is 0\.5; expected whol"),
        ({"outcome": [-1, 1] * 30}, {"task": "counts"}, r"the label 'outcome' is -1; expected counts, whole numbers f"),
        ({}, {"task": "values"}, r"the label 'outcome' holds words, such as '\w+'; expected numbers for task='values'"),
        ({"dose": [1.0] * 59 + [float("inf")]}, {}, r"the frame, row 59: dose is infinity; expected finite numbers, a"),
        ({"outcome": [1.5] * 59 + [float("inf")]}, {}, r"the frame, row 59: outcome is infinity; expected finite"),
        ({"site": ["a", None] + ["b"] * 58}, {}, r"the frame, row 1: site is missing; .* Pass missing=\"drop\", or fi"),
        ({"outcome": ["a", "b", None, None] + ["b"] * 56}, {}, r"the frame, rows 2, 3: outcome is missing; expected a"),
        ({"dose": [1.0, None] + [2.0] * 58}, {}, r"row 1: dose is missing; .* missing=\"drop\" or missing=\"impute\""),
        ({"dose": [None] * 60}, {"missing": "impute"}, r"column 'dose' is missing in every training row; .*Leave it o"),
        ({"dose": [None] * 60}, {"missing": "drop"}, r"no row without a missing value; expected some\. Leave out spar"),
        ({"dose": [1e300] * 60}, {}, r"the frame, rows 0, .* and 52 more: dose is 1e\+300; expected finite numbers, a"),
    ],
)  # fmt: skip
def test_what_a_frame_should_not_have_is_one_line(kind, change, options, message):
    frame = table().assign(**change)
    with pytest.raises(DataError, match=message) as error:
        Federation.from_frame(kind(frame), **{"client": "site", "label": "outcome"} | options)
    assert "\n" not in str(error.value)


@every_kind
def test_a_frame_without_rows_is_refused(kind):
    with pytest.raises(DataError, match=r"the frame has no rows; expected at least one"):
        Federation.from_frame(kind(table().iloc[:0]), "site", "outcome")


def test_nan_of_polars_and_pyarrow_is_a_missing_value_as_in_pandas():
    for made in (in_polars(table()), in_arrow(table())):
        gap = pa.array([float("nan")] + [1.0] * 59)
        frame = (
            made.with_columns(dose=pl.Series(gap))
            if made.__class__ is pl.DataFrame
            else made.set_column(2, "dose", gap)
        )
        with pytest.raises(DataError, match="the frame, row 0: dose is missing"):
            Federation.from_frame(frame, "site", "outcome")


@pytest.mark.parametrize(("option", "value"), [("task", "clases"), ("missing", "imput")])
def test_options_with_a_typing_error_are_told_the_nearest(option, value):
    with pytest.raises(ConfigError, match=f"unknown {option} '{value}'; did you mean"):
        Federation.from_frame(table(), "site", "outcome", **{option: value})


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        ([1, 2], "frame is a list; expected a DataFrame of pandas or polars, or a Table of pyarrow. Make one of it"),
        ("rows.csv", "frame is a str; expected a DataFrame .* Read it with pandas or polars first"),
        (np.zeros((2, 2)), "frame is a ndarray; expected"),
        (table()["age"], "frame is a Series; expected a DataFrame"),
        (in_polars(table()).lazy(), r"frame is a LazyFrame; expected a DataFrame\. Call collect\(\) first"),
    ],
)
def test_what_is_no_frame_is_refused(frame, message):
    with pytest.raises(DataError, match=message):
        Federation.from_frame(frame, "site", "outcome")


def test_a_frame_with_a_column_twice_is_refused():
    frame = table()[["site", "outcome", "age", "age"]]
    with pytest.raises(DataError, match="the frame: the column 'age' appears twice"):
        Federation.from_frame(frame, "site", "outcome")


@pytest.mark.parametrize("column", ["site", "age"])
def test_numbers_beyond_int64_are_refused_rather_than_rounded(column):
    frame = table()
    frame[column] = np.array([2**70, 2**70 + 1] * 30, dtype=object)
    with pytest.raises(DataError, match=f"column '{column}' holds whole numbers beyond 64 bits; expected smaller, or"):
        Federation.from_frame(frame, "site", "outcome")


def test_labels_of_two_kinds_are_refused():
    frame = table()
    frame["outcome"] = ["a", 1] * 30
    with pytest.raises(DataError, match="column 'outcome' holds values of type int and str; expected n"):
        Federation.from_frame(frame, "site", "outcome")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"a\.csv is empty; expected a header with the names of columns"),
        ("client,label,u\n", r"a\.csv has no rows; expected at least one"),
        ("client,label,u\nx,1\n", r"a\.csv, line 2: 2 field\(s\); expected 3"),
        (
            "client,label,u\nx,1,2\ny,1,two\n",
            r"a\.csv, line 3: u is 'two', among numbers; expected numbers, all written the same way",
        ),
        ("client,label,u\nx,1,1.5\ny,1,two\n", r"a\.csv, line 3: u is 'two', among numbers"),
        ("client,label,u\nx,1,inf\n", r"a\.csv, line 2: u is infinity; expected finite numbers"),
        ("client,label,u\nx,1,2\n ,1,2\n", r"a\.csv, line 3: client is missing; expected a value in each row"),
        ("client,label,u\nx,1,2\n\ny,,2\n", r"a\.csv, line 4: label is missing; expected a value in each row"),
        ("client,label,u\nx,1.5,2\ny,1.O,2\n", r"line 3: label is '1\.O', among numbers; expected numbers"),
        ("client,label,u\nx,1.5,2\ny,nan,2\n", r"line 3: label is missing; expected a value in each"),
        (",client,label,u\n0,x,1,2\n1,y,0,2\n", r"a\.csv, line 1: column 1 has no name, as where pandas .*exclude="),
        ("client,lable,u\nx,1,2\n", r"has no column 'label' among: client, lable, u; did you mean 'lable'\? Name the"),
        ("site,label,u\nx,1,2\n", r"has no column 'client' among: site, label, u\. Name the column of clients with c"),
    ],
)
def test_what_a_file_should_not_have_is_one_line(text, message, tmp_path):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=message) as error:
        Federation.from_csv(tmp_path / "a.csv")
    assert "\n" not in str(error.value)


def test_a_file_that_is_none(tmp_path):
    with pytest.raises(DataError, match=r"none\.csv does not exist or is not a file; expected a table"):
        Federation.from_csv(tmp_path / "none.csv")
    with pytest.raises(DataError, match=r"a\.xlsx is none of \.csv, \.parquet; expected one of these\. Save the table"):
        Federation.from_csv(tmp_path / "a.xlsx")
    (tmp_path / "b.parquet").write_bytes(b"rubbish")
    with pytest.raises(DataError, match=r"b\.parquet cannot be read"):
        Federation.from_csv(tmp_path / "b.parquet")


def test_shares_and_stratification_are_checked_here_too(tmp_path):
    with pytest.raises(ConfigError, match="test_fraction is 1"):
        Federation.from_frame(table(), "site", "outcome", test_fraction=1)
    with pytest.raises(ConfigError, match="stratify wants classes"):
        Federation.from_frame(table(), "site", "dose", ["age"], stratify=True)
