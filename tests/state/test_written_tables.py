"""Tables and JSON files byte by byte, what spreadsheets make of their cells, and the types of Parquet's columns."""

import pyarrow as pa
import pytest
from pyarrow import parquet

from selffl.state.files import append_csv, as_cell, atomic_write, from_cell, locked, read_csv, write_csv, write_json
from selffl.state.files import write_parquet as write


def test_files_are_utf_8_with_plain_line_ends_whatever_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("locale.getpreferredencoding", lambda *_: "ascii")
    monkeypatch.setattr("locale.getencoding", lambda: "ascii")
    write_json(tmp_path / "a.json", {"θ": [1, "ü"]})
    assert (tmp_path / "a.json").read_bytes() == '{\n "θ": [\n  1,\n  "ü"\n ]\n}'.encode()
    path = tmp_path / "a.csv"
    write_csv(path, [{"θ": "a\r\nb", "n": 1}], ["θ", "n", "=m"])
    append_csv(path, [{"θ": "ü"}], ["θ", "n", "=m"])
    assert path.read_bytes() == 'θ,n,\'=m\n"a\r\nb",1,\nü,,\n'.encode()
    expected = [{"θ": "a\r\nb", "n": 1, "=m": None}, {"θ": "ü", "n": None, "=m": None}]
    assert read_csv(path) == expected


def test_rows_are_on_the_disk_once_they_are_added(tmp_path, monkeypatch):
    path, seen = tmp_path / "a.csv", []
    write_csv(path, [], ["n"])
    monkeypatch.setattr("selffl.state.files.os.fsync", lambda _: seen.append(path.read_text(encoding="utf-8")))
    append_csv(path, [{"n": 1}], ["n"])
    assert seen == ["n\n1\n"]


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=1+1", "'=1+1"), ("+a", "'+a"), ("-a", "'-a"), ("-1-1", "'-1-1"), ("@a", "'@a"), ("\ta", "'\ta"),
        ("'=a", "''=a"), ("-1", "-1"), ("-1.5", "-1.5"), ("a=b", "a=b"), ("'a", "'a"), ("", ""), ("''", "''"),
    ],
)  # fmt: skip
def test_no_cell_is_a_formula_and_all_are_read_as_they_were(text, cell):
    assert (as_cell(text), from_cell(cell)) == (cell, text)


def test_what_is_no_text_is_no_formula():
    assert [as_cell(value) for value in (-1, 2.5, None, True)] == [-1, 2.5, None, True]


@pytest.mark.parametrize("line", ["1", "1,2,3"])
def test_a_row_of_other_columns_is_named(line, tmp_path):
    (tmp_path / "a.csv").write_text(f"a,b\n1,2\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"row 2 of a\.csv has other columns than the first line"):
        read_csv(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("cells", "kind", "found"),
    [
        ([1, None], pa.int64(), [1, None]),
        ([1, 2.5], pa.float64(), [1.0, 2.5]),
        ([0.5], pa.float64(), [0.5]),
        ([True, None], pa.bool_(), [True, None]),
        (["a", None], pa.string(), ["a", None]),
        (["a", True], pa.string(), ["a", "True"]),
        ([1, "a", None], pa.string(), ["1", "a", None]),
        ([1, True], pa.string(), ["1", "True"]),
        ([None, None], pa.float64(), [None, None]),
        ([2**63, None], pa.string(), [str(2**63), None]),
        ([(1, 2)], pa.string(), ["(1, 2)"]),
    ],
)
def test_a_column_has_the_type_of_its_cells_or_is_text(cells, kind, found, tmp_path):
    write(tmp_path / "a.parquet", [{"x": cell} if cell is not None else {"y": 1} for cell in cells])
    column = parquet.read_table(tmp_path / "a.parquet").column("x") if any(c is not None for c in cells) else None
    if column is None:
        write(tmp_path / "a.parquet", [{"x": cell} for cell in cells])
        column = parquet.read_table(tmp_path / "a.parquet").column("x")
    assert (column.type, column.to_pylist()) == (kind, found)


def test_a_folder_is_made_for_a_lock_and_may_be_there(tmp_path):
    for _ in range(2):
        with locked(tmp_path / "a" / "b"):
            assert (tmp_path / "a" / "b").is_dir()


def test_what_fails_before_anything_is_written_says_so_itself(tmp_path):
    with pytest.raises(KeyError, match="first"), atomic_write(tmp_path / "a"):
        raise KeyError("first")
