"""Folders with one file per client: the same rows from all kinds of files, and one line for what is wrong."""

import io

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from selffl import Federation
from selffl.data.folder import _read_npz
from selffl.errors import ConfigError, DataError

NAMES = ("age", "dose", "weight")


def clients(dtype=np.int64):
    """Features with three columns and labels of three clients; values that text keeps."""
    rng = np.random.default_rng(0)
    return {
        name: (rng.integers(-40, 40, (size, 3)).astype(np.float32) / 8, rng.integers(0, 4, size).astype(dtype))
        for name, size in (("ward 10", 7), ("ward 2", 12), ("a.b", 3))
    }


def write_npz(path, x, y, names=NAMES):
    np.savez(path.with_name(path.name + ".npz"), x=x, y=y)


def write_csv(path, x, y, names=NAMES):
    lines = [",".join(["label", *names])] + [",".join(map(str, [b, *a])) for a, b in zip(x, y, strict=True)]
    path.with_name(path.name + ".csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_parquet(path, x, y, names=NAMES):
    columns = {name: x[:, i] for i, name in enumerate(names)} | {"label": y}
    parquet.write_table(pa.table(columns), path.with_name(path.name + ".parquet"))


WRITERS = {".npz": write_npz, ".csv": write_csv, ".parquet": write_parquet}
every_kind = pytest.mark.parametrize("kind", WRITERS)


def in_own_units(fed, part="train"):
    """The features of a folder of tables as its files have them."""
    made = fed.preparation
    return np.round(fed.parts[part].features.double().numpy() * np.array(made.scale) + np.array(made.mean), 5)


@every_kind
@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_every_kind_of_file_gives_the_rows_of_the_arrays(tmp_path, kind, dtype):
    every = clients(dtype)
    for name, (x, y) in every.items():
        WRITERS[kind](tmp_path / name, x, y)
    (tmp_path / ".hidden").write_text("no client")
    task = {} if kind == ".npz" or dtype == np.int64 else {"task": "values"}
    found = Federation.from_folder(str(tmp_path), test_fraction=0.3, seed=2, validation_fraction=0.2, **task)
    ids = [name for name in sorted(every) for _ in every[name][1]]
    x, y = (np.concatenate([every[name][part] for name in sorted(every)]) for part in (0, 1))
    expected = Federation.from_arrays(x, y, ids, 0.3, 2, validation_fraction=0.2)
    assert found.clients == ["a.b", "ward 10", "ward 2"]
    for part in ("train", "test", "validation"):
        for field in ("features", "labels", "offset"):
            mine, others = getattr(getattr(found, part), field), getattr(getattr(expected, part), field)
            if kind != ".npz" and field == "features":
                mine = in_own_units(found, part)
            np.testing.assert_allclose(mine, others, atol=1e-5)


@pytest.mark.parametrize("kind", [".csv", ".parquet"])
def test_columns_go_by_their_names(tmp_path, kind):
    (x, y), (x2, y2) = list(clients().values())[:2]
    WRITERS[kind](tmp_path / "a", x, y)
    WRITERS[kind](tmp_path / "b", x2[:, ::-1], y2, NAMES[::-1])
    found = Federation.from_folder(tmp_path, test_fraction=0)
    assert sorted(in_own_units(found).tolist()) == sorted(np.concatenate([x, x2]).tolist())


@pytest.mark.parametrize("kind", [".csv", ".parquet"])
def test_a_column_that_is_missing_or_extra_is_named(tmp_path, kind):
    x, y = clients()["ward 2"]
    WRITERS[kind](tmp_path / "a", x, y)
    WRITERS[kind](tmp_path / "b", x, y, ("age", "dose", "height"))
    with pytest.raises(DataError, match=rf"b\{kind} lacks the column 'weight', unlike .*a\{kind}; expected the same"):
        Federation.from_folder(tmp_path)
    WRITERS[kind](tmp_path / "b", np.tile(x, 2)[:, :4], y, (*NAMES, "height"))
    with pytest.raises(DataError, match=rf"b\{kind} has the column 'height', unlike .*a\{kind}"):
        Federation.from_folder(tmp_path)


def test_the_label_may_be_called_otherwise(tmp_path):
    (tmp_path / "a.csv").write_text("height,ill\n1.5,0\n2.5,1\n")
    found = Federation.from_folder(tmp_path, test_fraction=0, label="ill")
    assert sorted(zip(in_own_units(found)[:, 0].tolist(), found.train.labels.tolist(), strict=True)) == [
        (1.5, 0),
        (2.5, 1),
    ]
    with pytest.raises(DataError, match=r"a\.csv has no column 'label' among: height, ill\. Name the column"):
        Federation.from_folder(tmp_path)


def test_one_file_of_targets_makes_targets_of_all(tmp_path):
    (tmp_path / "a.csv").write_text("label,u\n1,1\n2,2\n")
    (tmp_path / "b.csv").write_text("label,u\n-1.5,1\n2,2\n")
    found = Federation.from_folder(tmp_path, test_fraction=0)
    assert found.train.labels.dtype == torch.float64
    assert sorted(found.train.labels.tolist()) == [-1.5, 1.0, 2.0, 2.0]


def test_the_kind_does_not_go_by_the_case_of_its_ending(tmp_path):
    (tmp_path / "a.CSV").write_text("label,u\n1,1\n")
    assert Federation.from_folder(tmp_path).clients == ["a"]


# ---------------------------------------------------------------------------------------------------- what is refused


def refused(folder, message):
    with pytest.raises(DataError, match=message) as error:
        Federation.from_folder(folder)
    assert "\n" not in str(error.value)


def test_a_folder_must_hold_files_of_one_kind(tmp_path):
    refused(tmp_path / "none", "none is no folder; expected one with a file")
    refused(tmp_path, r"holds no files; expected one \(\.npz, \.csv, \.parquet\) per client")
    write_csv(tmp_path / "a", *clients()["ward 2"])
    write_npz(tmp_path / "b", *clients()["ward 2"])
    refused(tmp_path, r"holds a\.csv and b\.npz; expected files of one kind")
    (tmp_path / "readme.txt").write_text("hello")
    refused(tmp_path, r"readme\.txt is none of \.npz, \.csv, \.parquet")


@every_kind
def test_an_unreadable_file_is_one_line(tmp_path, kind):
    WRITERS[kind](tmp_path / "a", *clients()["ward 2"])
    (tmp_path / f"b{kind}").write_bytes(b"\xff\xfe\x00 rubbish \x81" * 20)
    refused(tmp_path, rf"b\{kind} (cannot be read|is not text)")


@every_kind
def test_a_client_without_rows_is_refused_by_its_id(tmp_path, kind):
    x, y = clients()["ward 2"]
    WRITERS[kind](tmp_path / "a", x, y)
    WRITERS[kind](tmp_path / "ward 9", x[:0], y[:0])
    refused(tmp_path, r"^client 'ward 9' has no rows in .*; expected at least one")


def test_arrays_of_other_names_or_shapes_are_refused(tmp_path):
    x, y = clients()["ward 2"]
    write_npz(tmp_path / "a", x, y)
    for arrays, message in (
        ({"features": x, "y": y}, r"b\.npz has no array x among: features, y; expected x \(features\) and y"),
        ({}, r"b\.npz has no array x or y among: none"),
        ({"x": x[1:], "y": y}, r"b\.npz: x has 11 rows and y 12; expected as many"),
        ({"x": x[:, :2], "y": y}, r"b\.npz: rows of x have shape \(2,\); expected \(3,\), as in a\.npz"),
        ({"x": x, "y": y.astype(str)}, r"b\.npz: y is of type <U21"),
        ({"x": x * np.nan, "y": y}, r"b\.npz: x holds NaN or infinity, first in row 0"),
        ({"x": np.array([{}, []], dtype=object), "y": y}, r"b\.npz cannot be read"),
    ):
        np.savez(tmp_path / "b.npz", **arrays)
        refused(tmp_path, message)
    buffer = io.BytesIO()
    np.save(buffer, x)
    (tmp_path / "b.npz").write_bytes(buffer.getvalue())
    refused(tmp_path, r"b\.npz cannot be read")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"a\.csv is empty; expected a header with the names of columns"),
        ("label\n1\n", r"a\.csv has no column beside 'label'"),
        ("label,u,u\n1,1,1\n", r"a\.csv: the column 'u' appears twice"),
        ("label,u\n1,1\n1\n", r"a\.csv, line 3: 1 field\(s\); expected 2"),
        ("label,u\n1,one\n1,2\n", r"a\.csv, line 2: u is 'one', among numbers; expected numbers"),
        ("label,u\n1,\n", r"a\.csv, line 2: u is missing; expected a value in each row"),
        ("label,u\n1,2\n1,nan\n", r"a\.csv, line 3: u is missing; expected a value in each row"),
        ("label,u\n1,2\n1,inf\n", r"a\.csv, line 3: u is infinity; expected finite numbers"),
        ('label,u\n1,"1,234"\n', r"a\.csv: u holds '1,234', which .* Pass decimal=\",\" or decimal"),
    ],
)
def test_a_table_that_is_none_is_refused_with_its_line(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    refused(tmp_path, message)


def test_columns_of_a_parquet_file_must_have_values(tmp_path):
    for column, message in (
        ([1.0, None], r"a\.parquet, row 1: u is missing; expected a value in each row"),
        ([1.0, float("inf")], r"a\.parquet, row 1: u is infinity; expected finite numbers"),
        ([[1.0], [2.0]], r"a\.parquet: column 'u' is of type list<.*; expected numbers, dates or words"),
    ):
        parquet.write_table(pa.table({"label": [0, 1], "u": column}), tmp_path / "a.parquet")
        refused(tmp_path, message)


def test_a_fault_names_its_file_and_line_and_says_how_many_others_have(tmp_path):
    (tmp_path / "a.csv").write_text("label,u\n1,1\n0,2\n")
    (tmp_path / "b.csv").write_text('label,u\n\n1,1\n"1",\n0,NA\n')
    (tmp_path / "c.csv").write_text("label,u\n1,\n0,4\n")
    refused(tmp_path, r"b\.csv, lines 4, 5 \(and 1 row of others\): u is missing; expected a value in each row")
    found = Federation.from_folder(tmp_path, missing="drop", test_fraction=0)
    assert found.preparation.num_dropped == 3
    assert dict(zip(found.clients, found.train.num_examples.tolist(), strict=True)) == {"a": 2, "b": 1, "c": 1}
    assert in_own_units(found).ravel().tolist() in ([1.0, 2.0, 1.0, 4.0], [2.0, 1.0, 1.0, 4.0])


def test_files_with_other_decimal_signs_mean_the_same(tmp_path):
    """Joined as text, 1,234 and 1.234 would be one number with thousands."""
    (tmp_path / "a.csv").write_text("label;u\n1;1,234\n0;2,5\n")
    (tmp_path / "b.csv").write_text("label,u\n1,1.234\n0,2.5\n")
    found = Federation.from_folder(tmp_path, test_fraction=0)
    assert sorted(in_own_units(found).ravel().tolist()) == [1.234, 1.234, 2.5, 2.5]


def test_words_of_one_file_and_numbers_of_another_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("label,u\n1,1\n0,2\n")
    (tmp_path / "b.csv").write_text("label,u\n1,one\n0,two\n")
    refused(tmp_path, r"b\.csv: column 'u' holds words, and numbers in .*a\.csv; expected the same in all")


def test_shares_are_checked(tmp_path):
    write_csv(tmp_path / "a", *clients()["ward 2"])
    with pytest.raises(ConfigError, match="test_fraction is 1"):
        Federation.from_folder(tmp_path, test_fraction=1)


def test_an_npz_file_with_any_byte_changed_is_read_or_is_one_line(tmp_path):
    """A kind of compression that nobody knows, a password, a header that is no Python: each fails in its own way."""
    for name, (x, y) in clients().items():
        write_npz(tmp_path / name, x, y)
    path = tmp_path / "a.b.npz"
    whole, said = path.read_bytes(), []
    for place in range(len(whole)):
        for flip in (0x01, 0x20, 0x55):
            damaged = bytearray(whole)
            damaged[place] ^= flip
            path.write_bytes(damaged)
            try:
                _read_npz(path)
            except DataError as error:
                said.append(str(error))
    assert not [text for text in said if "\n" in text]
    assert [text for text in said if "compression method" in text]
    assert [text for text in said if "encrypted" in text]
