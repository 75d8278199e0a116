"""Files that are whole or not there, and tables that survive a cut."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from selffl.errors import ConfigError
from selffl.state.files import (
    STALE_SECONDS,
    append_csv,
    atomic_write,
    exclusive_lock,
    locked,
    read_csv,
    write_csv,
    write_json,
)

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
        with atomic_write(path) as partial:
            partial.write_text("new", encoding="utf-8")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_stop()
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_each_writer_has_a_file_of_its_own(tmp_path):
    """The first to end publishes what it has written, not half of what the other one has."""
    path = tmp_path / "a"
    with atomic_write(path) as ours:
        ours.write_bytes(b"A" * 100)
        with atomic_write(path) as theirs, theirs.open("wb") as file:
            assert {theirs.parent, ours.parent} == {tmp_path}
            file.write(b"B" * 10)
            file.flush()
            third = atomic_write(path)
            third.__enter__().write_bytes(b"C" * 100)
            third.__exit__(None, None, None)
            assert path.read_bytes() == b"C" * 100
            file.write(b"B" * 90)
        assert path.read_bytes() == b"B" * 100
    assert path.read_bytes() == b"A" * 100
    assert list(tmp_path.iterdir()) == [path]


def test_what_killed_writers_left_is_swept_after_a_day(tmp_path):
    now = time.time()
    ages = {
        "a[1].json.0.part": STALE_SECONDS + 60,
        "a[1].json.1.part": STALE_SECONDS - 600,  # somebody may still be writing it
        "a1.json.2.part": STALE_SECONDS + 60,  # of another file
        "a[1].json.old": STALE_SECONDS + 60,
    }
    for name, age in ages.items():
        (tmp_path / name).write_text("left", encoding="utf-8")
        os.utime(tmp_path / name, (now - age, now - age))
    write_json(tmp_path / "a[1].json", 1)
    left = {"a[1].json.1.part", "a1.json.2.part", "a[1].json.old", "a[1].json"}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_a_writer_that_ends_while_another_one_sweeps_is_no_error(tmp_path, monkeypatch):
    """Its temporary file is there when the folder is listed, and gone when its age is asked for."""
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "a.json.gone.part"]))
    write_json(tmp_path / "a.json", 1)
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == 1


def test_a_file_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    path, events = tmp_path / "a", []
    replace = Path.replace

    def replaced(self, target):
        events.append("replaced")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", replaced)
    monkeypatch.setattr(os, "fsync", lambda handle: events.append(os.fstat(handle).st_ino))
    with atomic_write(path) as partial:
        partial.write_text("new", encoding="utf-8")
    assert events == [path.stat().st_ino, "replaced", tmp_path.stat().st_ino]
    events.clear()
    append_csv(path, [{"a": 1}], ["a"])
    assert events == [path.stat().st_ino]


def test_a_second_process_does_not_write_the_same_run(tmp_path):
    with locked(tmp_path / "run"), pytest.raises(ConfigError, match="another process is writing the run in"):
        locked(tmp_path / "run").__enter__()
    with locked(tmp_path / "run"):
        pass


def test_who_comes_second_waits_for_its_turn(tmp_path):
    events = []

    def second():
        with exclusive_lock(tmp_path / "a"):
            events.append("second")

    thread = threading.Thread(target=second)
    with exclusive_lock(tmp_path / "a"):
        thread.start()
        with exclusive_lock(tmp_path / "b"):  # of another file
            events.append("other")
        thread.join(0.2)
        events.append("first")
    thread.join()
    assert events == ["other", "first", "second"]
