"""`selffl init --csv`: which columns it takes, what it asks, what it refuses, and what it writes and prints."""

import io
import json
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from selffl.cli import init_table
from selffl.cli.init_table import table_study
from selffl.errors import ConfigError, DataError
from selffl.studies.own import read_study

NUM_ROWS = 30


def write_csv(path, columns, separator=","):
    """Columns by name; cells as they are to be written."""
    lines = [separator.join(columns), *(separator.join(map(str, row)) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def plain_columns(**further):
    """Three sites, a number and two classes, and further columns."""
    return {
        "site": [f"s{row % 3}" for row in range(NUM_ROWS)],
        "x": [row * row % 11 / 2 for row in range(NUM_ROWS)],
        "y": ["no" if row % 2 else "yes" for row in range(NUM_ROWS)],
        **further,
    }


def study_of(path, columns, **options):
    return table_study(write_csv(path / "rows.csv", columns), path / "mine", "site", "y", **options).about


# ------------------------------------------------------------------------------------------------------------- features


def test_a_missing_cell_does_not_make_words_of_numbers(tmp_path):
    columns = plain_columns(age=["NA" if row == 4 else row % 7 for row in range(NUM_ROWS)])
    assert study_of(tmp_path, columns, missing="impute")["features"] == {"x": "number", "age": "number"}
    found = study_of(tmp_path, columns, missing="drop")
    assert (found["features"]["age"], found["rows"], found["missing"]["dropped"]) == ("number", NUM_ROWS - 1, 1)


def test_decimal_commas_are_numbers(tmp_path, command_line):
    values = [f"{row % 7},{row % 10}" for row in range(NUM_ROWS)]
    path = write_csv(tmp_path / "rows.csv", plain_columns(x=values, z=["1,234"] * 15 + ["2,345"] * 15), ";")
    words = ("init", "mine", "--csv", path, "--client", "site", "--label", "y", "--json", "--decimal")
    code, out, err = command_line(*words, ",")
    assert code == 0, err
    assert json.loads(out)["features"] == {"x": "number", "z": "number"}
    fed = read_study(tmp_path / "mine").federation(0)
    mean = sum(float(value.replace(",", ".")) for value in values) / NUM_ROWS
    assert abs(fed.preparation.mean[0] - mean) < 0.5
    assert 1.2 < fed.preparation.mean[1] < 2.4


def test_a_number_that_can_be_read_two_ways_asks_for_the_option(tmp_path):
    with pytest.raises(DataError, match=r"Pass --decimal , or --decimal \., or write") as raised:
        study_of(
            tmp_path, {name: cells for name, cells in plain_columns(z=['"1,234"'] * NUM_ROWS).items() if name != "x"}
        )
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "cells", "reason"),
    [
        ("count", [row + 100 for row in range(NUM_ROWS)], "numbers the rows"),
        ("count", [f"{NUM_ROWS - row}.0" for row in range(NUM_ROWS)], "numbers the rows"),
        ("", list(range(NUM_ROWS)), "numbers the rows"),
        ("Unnamed: 0", [row * 3 for row in range(NUM_ROWS)], "numbers the rows"),
        ("", [row % 4 for row in range(NUM_ROWS)], "without a name in the header"),
        ("patient_id", [row * 7 for row in range(NUM_ROWS)], "numbers the rows"),
        ("patientId", [f"p{row}" for row in range(NUM_ROWS)], "an id, another in every row"),
        ("note", [f"w{row}" for row in range(NUM_ROWS)], "30 different words, such as 'w0' (at most 20 can serve)"),
        ("ward", ["a"] * NUM_ROWS, "always 'a'"),
        ("dose", ["2.5"] * NUM_ROWS, "always the same"),
        ("dose", ["NA"] * NUM_ROWS, "empty"),
    ],
)  # fmt: skip
def test_a_column_that_cannot_serve_is_left_out_with_a_word(tmp_path, name, cells, reason):
    found = study_of(tmp_path, plain_columns(**{name: cells}))
    assert (found["features"], found["left_out"]) == ({"x": "number"}, {name: reason})


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("no", [row + 0.5 for row in range(NUM_ROWS)]),  # nitric oxide
        ("id", [row % 5 for row in range(NUM_ROWS)]),
        ("paid", [row * 3 for row in range(NUM_ROWS)]),
        ("year", [2000 + row if row else 1990 for row in range(NUM_ROWS)]),
        ("seen", [f"2026-01-{row + 1:02}" for row in range(NUM_ROWS)]),
    ],
)
def test_a_column_that_only_looks_like_an_id_stays(tmp_path, name, cells):
    assert list(study_of(tmp_path, plain_columns(**{name: cells}))["features"]) == ["x", name]


def test_consecutive_numbers_of_a_few_rows_are_no_id(tmp_path):
    columns = {name: cells[:19] for name, cells in plain_columns(hour=list(range(NUM_ROWS))).items()}
    assert list(study_of(tmp_path, columns)["features"]) == ["x", "hour"]


def test_a_word_that_is_missing_elsewhere_is_a_feature_where_it_is_imputed(tmp_path):
    columns = plain_columns(smokes=["yes" if row % 3 == 0 else "" for row in range(NUM_ROWS)])
    assert study_of(tmp_path, columns, missing="impute")["features"] == {"x": "number", "smokes": "words"}
    assert study_of(tmp_path, columns)["left_out"] == {"smokes": "always 'yes'"}


def test_features_can_be_named_and_excluded(tmp_path, command_line):
    further = {"a,b": [row % 5 for row in range(NUM_ROWS)], "id": list(range(NUM_ROWS))}
    columns = {f'"{name}"': cells for name, cells in plain_columns(**further).items()}
    path = write_csv(tmp_path / "rows.csv", columns)
    words = ("--csv", path, "--client", "site", "--label", "y", "--json")
    _, out, _ = command_line("init", "one", *words, "--features", 'id, "a,b"')
    assert (json.loads(out)["features"], json.loads(out)["left_out"]) == ({"id": "number", "a,b": "number"}, {})
    assert read_study(tmp_path / "one").federation(0).preparation.inputs == ["id", "a,b"]
    _, out, _ = command_line("init", "two", *words, "--exclude", "x")
    assert json.loads(out)["left_out"] == {"x": "as --exclude says", "id": "numbers the rows"}
    code, _, err = command_line("init", "three", *words, "--exclude", "z")
    assert (code, err.count("\n"), Path("three").exists()) == (2, 1, False)
    assert "has no column 'z'" in err
    assert "with --exclude." in err


def test_a_parquet_file_is_read(tmp_path):
    columns = plain_columns(ill=[row % 3 == 0 for row in range(NUM_ROWS)])
    parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    found = table_study(tmp_path / "rows.parquet", tmp_path / "mine", "site", "ill").about
    assert (found["task"], found["classes"], found["features"]) == (
        "classes",
        [False, True],
        {"x": "number", "y": "words"},
    )


# ---------------------------------------------------------------------------------------------------------------- label


@pytest.mark.parametrize(
    ("cells", "task", "classes"),
    [
        (["2", "4"], "classes", [2, 4]),
        (["0.0", "1.0"], "classes", [0, 1]),
        (["true", "false"], "classes", ["false", "true"]),
        (["c", "a", "b"], "classes", ["a", "b", "c"]),
        (["0.5", "1", "2"], "values", None),
    ],
)
def test_a_label_that_leaves_no_doubt(tmp_path, cells, task, classes):
    found = study_of(tmp_path, plain_columns(y=(cells * NUM_ROWS)[:NUM_ROWS]))
    assert (found["task"], found["classes"]) == (task, classes)


@pytest.mark.parametrize("cells", [["1", "2", "3"], ["1.0", "2.0", "3.0"], [str(row) for row in range(NUM_ROWS)]])
def test_whole_numbers_are_asked_about(tmp_path, cells, monkeypatch):
    columns = plain_columns(y=(cells * NUM_ROWS)[:NUM_ROWS])
    with pytest.raises(ConfigError, match=r"different whole numbers .* Pass --task classes, --task values or --task c"):
        study_of(tmp_path, columns)
    for task in ("classes", "values", "counts"):
        assert study_of(tmp_path, columns, task=task)["task"] == task
    terminal = io.StringIO("sums\ncounts\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert study_of(tmp_path, columns, can_ask=True)["task"] == "counts"


def test_counts_are_not_offered_below_zero(tmp_path):
    with pytest.raises(ConfigError, match=r"\(-1, 0, 1\).* Pass --task classes or --task values\."):
        study_of(tmp_path, plain_columns(y=[row % 3 - 1 for row in range(NUM_ROWS)]))


def test_many_words_are_classes_only_if_the_user_says_so(tmp_path):
    columns = plain_columns(y=[f"word {row}" for row in range(NUM_ROWS)])
    with pytest.raises(DataError, match=r"30 different words, such as 'word 0'; .* Pass --task classes if they are"):
        study_of(tmp_path, columns)
    assert len(study_of(tmp_path, columns, task="classes")["classes"]) == NUM_ROWS


# ---------------------------------------------------------------------------------------------------------------- model


@pytest.mark.parametrize(("rows_per_client", "num_inputs", "model"), [
    (199, 1, "linear"), (200, 1, "network"), (200, 20, "network"), (200, 21, "linear"), (210, 21, "network"),
])  # fmt: skip
def test_a_network_wants_rows(tmp_path, rows_per_client, num_inputs, model):
    num_rows = 2 * rows_per_client
    columns = {"site": [row % 2 for row in range(num_rows)]}
    columns |= {f"x{k}": [row * (k + 3) % 41 / 2 for row in range(num_rows)] for k in range(num_inputs)}
    columns["y"] = [row % 3 == 0 for row in range(num_rows)]
    assert study_of(tmp_path, columns)["model"] == model


def test_large_counts_and_many_inputs_have_small_steps(tmp_path):
    def rate(**columns):
        path = write_csv(tmp_path / "rows.csv", plain_columns(**columns))
        return table_study(path, tmp_path / "mine", "site", "y", task="counts").values["rate"]

    assert rate(y=[row % 3 for row in range(NUM_ROWS)]) == 0.05
    assert rate(y=[row % 3 + 99 for row in range(NUM_ROWS)]) == 0.005  # 1 / (100 * 2)
    wide = {f"z{k}": [row * (k + 2) % 7 for row in range(NUM_ROWS)] for k in range(3)}
    assert rate(y=[row % 3 + 99 for row in range(NUM_ROWS)], **wide) == 0.002  # 1 / (100 * 5)


# ----------------------------------------------------------------------------------------------------- output, mistakes


def test_the_output_fits_a_terminal_and_breaks_no_word(tmp_path, command_line):
    names = [f"measurement-{number}" for number in range(12)]
    columns = plain_columns(**{name: [row * 5 % 13 for row in range(NUM_ROWS)] for name in names})
    columns["id"] = list(range(NUM_ROWS))
    write_csv(tmp_path / "rows.csv", columns)
    code, out, err = command_line("init", "mine", "--csv", "rows.csv", "--client", "site", "--label", "y")
    assert code == 0, err
    lines = out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert [line[:10].strip() for line in lines if line[0] != " "] == [
        "Rows", "Label", "Features", "Left out", "Model", "Written", "Next"
    ]  # fmt: skip
    assert all(name in out for name in names)
    assert lines[0] == "Rows      30 of 3 clients, from rows.csv"
    assert lines[1] == "Label     y, classes: no, yes"
    text = (tmp_path / "mine" / "study.py").read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 120
    assert read_study(tmp_path / "mine").federation(0).preparation.inputs == ["x", *names]


NUMBERED = "site,x,y\n" + "".join(f"{row},{row * row % 7},{row % 2}\n" for row in range(20))


@pytest.mark.parametrize(
    ("text", "options", "part"),
    [
        ("", "", "is empty"),
        ("site,x,y\n", "", "a header but no rows"),
        (NUMBERED, "", "site is another in every row; expected clients with several rows each. Name the column of c"),
        ("site,x,y\na,1,0\na,2,1\n", "", "one site"),
        ("place,x,y\na,1,0\nb,2,1\n", "", "no column 'site' among: place, x, y. Name the column of clients with --cl"),
        ("site,x,z\na,1,0\nb,2,1\n", "", "Name the column of labels with --label."),
        ("site,x,x,y\na,1,1,0\nb,2,2,1\n", "", "appears twice"),
        ("site,x,y\na,1\nb,2,1\n", "", "line 2: 2 field(s)"),
        ("site,x,y\na,,0\nb,2,1\na,3,1\n", "", "line 2: x is missing; expected a value in each row. Pass --missing"),
        ("site,x,y\na,1,NA\nb,2,1\na,3,0\n", "", "line 2: y is missing; expected a value in each row. Pass --missing"),
        ("site,x,y\na,1,0\n,2,1\nb,3,0\n", "", "line 3: site is missing"),
        ("site,x,y\na,1,1\nb,2,1\n", "", "in every row"),
        ("site,y\na,0\nb,1\n", "", "expected features"),
        ("site,x,y\na,5,0\nb,5,1\n", "", "no column to predict y from ('x': always the same)"),
        ("site,x,y\na,1,0\nb,2,1\n", "--task sums", "--task is 'sums'"),
        ("site,x,y\na,1,0\nb,2,1\n", "--features ,", "--features is ','"),
        ("site,x,y\na,1,0\nb,2,1\n", "--features y", "'y' is in features"),
        ("site,x,y\na,1,u\nb,2,v\n", "--task values", "expected numbers for --task values"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_nothing_is_written(tmp_path, command_line, text, options, part):
    (tmp_path / "rows.csv").write_text(text, encoding="utf-8")
    words = ("init", "mine", "--csv", "rows.csv", "--client", "site", "--label", "y", *options.split())
    code, out, err = command_line(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert part in err
    assert not Path("mine").exists()


@pytest.mark.parametrize("option", ["--features x", "--task counts", "--missing drop", "--decimal ,", "--label z"])
def test_an_option_for_rows_wants_rows(command_line, option):
    code, _, err = command_line("init", "mine", *option.split())
    assert (code, Path("mine").exists()) == (2, False)
    assert f"{option.split()[0]} is given without --csv" in err


def test_a_long_list_of_columns_is_python(tmp_path):
    names = [f'column "{number}"' for number in range(40)]
    text = init_table._list_literal(names)
    assert eval(text) == names
    assert max(map(len, text.splitlines())) <= init_table.CODE_WIDTH
