"""Files that are whole or not there, and tables that survive a cut."""

import json

import pytest

from selffl.state.files import append_csv, read_csv, replacing, write_csv, write_json

ROWS = [{"client": "007", "round": 1, "score": 0.1 + 0.2, "note": 'two, "three"\nfour'}, {"client": "b", "round": 2}]
COLUMNS = ["client", "round", "score", "note"]


def test_a_table_is_read_as_it_was_written(tmp_path):
    write_csv(tmp_path / "t.csv", ROWS)
    found = read_csv(tmp_path / "t.csv", as_text=("client",))
    assert found == [ROWS[0], {"client": "b", "round": 2, "score": None, "note": None}]
    assert isinstance(found[0]["round"], int)


def test_without_as_text_an_id_of_digits_is_a_number(tmp_path):
    write_csv(tmp_path / "t.csv", ROWS)
    assert read_csv(tmp_path / "t.csv")[0]["client"] == 7


def test_rows_are_added_at_the_end(tmp_path):
    path = tmp_path / "t.csv"
    write_csv(path, [], COLUMNS)
    append_csv(path, ROWS[:1], COLUMNS)
    append_csv(path, ROWS[1:], COLUMNS)
    assert [row["round"] for row in read_csv(path)] == [1, 2]


def test_a_row_with_an_unknown_column_is_a_mistake(tmp_path):
    with pytest.raises(ValueError, match="fieldnames"):
        write_csv(tmp_path / "t.csv", [{"a": 1, "b": 2}], ["a"])
    assert not list(tmp_path.iterdir())


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "t.csv"
    write_csv(path, [{"round": n, "value": n / 7} for n in range(1, 5)])
    content = path.read_bytes()
    lengths = set()
    for cut in range(content.index(b"\n") + 1, len(content)):
        path.write_bytes(content[:cut])
        found = read_csv(path)
        assert all(row == {"round": n, "value": n / 7} for n, row in enumerate(found, start=1))
        lengths.add(len(found))
    assert lengths == {0, 1, 2, 3}


def test_json_is_replaced_whole(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"θ": 1})
    with pytest.raises(TypeError):
        write_json(path, {"bad": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"θ": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_an_interruption_leaves_the_old_file(tmp_path):
    path = tmp_path / "a"
    path.write_text("old", encoding="utf-8")

    def write_and_stop():
        with replacing(path) as partial:
            partial.write_text("new", encoding="utf-8")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_stop()
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]
