"""Tables of R packages: read from CSV files made here, written by R where it is there."""

import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from selffl.data import DATA_SETS, load
from selffl.data.fetch import fetch
from selffl.data.multilevel import R_TABLES, RTable
from selffl.errors import DataError

TABLE = RTable("pupils", "made.up", "Pupils", "school", "score", ("test", "sex=F", "test^2"), 4, 2)
TEXT = (
    '"school","score","test","sex","passed"\n"a",1.5,-2,"F","Y"\n"a",2.5,1,"M","N"\n"b",3,0,"F","Y"\n"b",4,3,"M","Y"\n'
)


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "Pupils.csv"
    found.write_text(TEXT, encoding="utf-8")
    return found


def test_columns_are_numbers_indicators_and_squares(path):
    rows = TABLE.read(path)
    assert rows.features.tolist() == [[-2, 1, 4], [1, 0, 1], [0, 1, 0], [3, 0, 9]]
    assert rows.outcome.tolist() == [1.5, 2.5, 3.0, 4.0]
    assert rows.outcome.dtype == np.float64
    assert rows.group.tolist() == ["a", "a", "b", "b"]
    assert not TABLE.is_binary


def test_a_binary_outcome_is_one_for_its_level(path):
    table = replace(TABLE, outcome="passed=Y")
    assert table.is_binary
    outcome = table.read(path).outcome
    assert outcome.tolist() == [1, 0, 1, 1]
    assert outcome.dtype == np.int64


def test_only_the_chosen_rows_are_taken(path):
    rows = TABLE.read(path).at(np.array([3, 0]))
    assert rows.features[:, 0].tolist() == [3, -2]
    assert rows.outcome.tolist() == [4.0, 1.5]
    assert rows.group.tolist() == ["b", "a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT.replace("score", "mark"), "has no column 'score'; expected school, score, test, sex."),
        (TEXT + '"c",1,1,"M","N"\n', "has 5 rows of 3 groups; expected 4 of 2."),
        (TEXT.replace('"b"', '"c"', 1), "has 4 rows of 3 groups; expected 4 of 2."),
        (TEXT.replace("1.5", "NA"), "holds could not convert string to float: 'NA'; expected numbers."),
        (TEXT.replace("-2", "inf"), "holds values in test that are not finite; expected numbers."),
        ("", "has no column 'school'; expected school, score, test, sex."),
    ],
)
def test_what_is_not_the_table_is_refused_in_one_line(path, text, message):
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError) as error:
        TABLE.read(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert "selffl data fetch pupils" in str(error.value)


def test_every_table_is_a_data_set_that_can_be_fetched():
    for name, table in R_TABLES.items():
        assert DATA_SETS[name].write_file == table.export
        assert DATA_SETS[name].clients == table.num_groups
        assert DATA_SETS[name].can_fetch
        assert (DATA_SETS[name].classes == ("no", "yes")) == table.is_binary


# ------------------------------------------------------------------------------------------------------------ fetching


def make_rscript(folder, body, monkeypatch):
    """A program called Rscript, the only one on the path that is found first."""
    folder.mkdir()
    program = folder / "Rscript"
    program.write_text("#!/bin/sh\n" + body, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def use_made_up_table(monkeypatch):
    monkeypatch.setitem(
        DATA_SETS, "exam", replace(DATA_SETS["exam"], write_file=TABLE.export, files=lambda: [TABLE.file])
    )


def test_r_is_asked_for_the_table_once(tmp_path, path, monkeypatch):
    use_made_up_table(monkeypatch)
    make_rscript(tmp_path / "bin", f'echo "$4 $5" >> {tmp_path}/asked\ncp {path} "$6"\n', monkeypatch)
    for _ in range(2):
        [found] = fetch("exam", tmp_path / "data")
        assert found == tmp_path / "data" / "exam" / "Pupils.csv"
        assert found.read_text(encoding="utf-8") == TEXT
    assert (tmp_path / "asked").read_text(encoding="utf-8") == "made.up Pupils\n"
    assert not list(found.parent.glob("*.part"))


def test_a_package_that_r_lacks_is_named(tmp_path, monkeypatch):
    use_made_up_table(monkeypatch)
    make_rscript(tmp_path / "bin", "echo 'there is no package called made.up' >&2\nexit 1\n", monkeypatch)
    with pytest.raises(DataError, match=r"no package called made.up\)\. Install Debian's r-cran-made.up, or in R"):
        fetch("exam", tmp_path / "data")
    assert not list((tmp_path / "data" / "exam").iterdir())


def test_what_r_writes_is_checked_before_it_counts(tmp_path, path, monkeypatch):
    use_made_up_table(monkeypatch)
    path.write_text(TEXT + '"c",1,1,"M","N"\n', encoding="utf-8")
    make_rscript(tmp_path / "bin", f'cp {path} "$6"\n', monkeypatch)
    with pytest.raises(DataError, match="has 5 rows of 3 groups"):
        fetch("exam", tmp_path / "data")
    assert not (tmp_path / "data" / "exam" / "Pupils.csv").exists()


def test_without_r_the_package_to_install_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match=r"^Rscript was not found; .* Install Debian's r-cran-mlmrev, or R and"):
        fetch("exam", tmp_path / "data")


def test_r_itself_gives_the_rows_of_lme4(tmp_path, monkeypatch):
    if shutil.which("Rscript") is None:
        pytest.skip("R is not installed")
    has_lme4 = ["Rscript", "-e", "find.package('lme4')"]
    if subprocess.run(has_lme4, capture_output=True, check=False).returncode:
        pytest.skip("R has no package lme4")
    fetch("sleepstudy", tmp_path)
    monkeypatch.setenv("SELFFL_DATA", str(tmp_path))
    rows = R_TABLES["sleepstudy"].load()
    # Belenky et al. 2003, as printed in lme4's manual: subject 308 on days 0 and 1.
    assert rows.outcome[:2].tolist() == [249.56, 258.7047]
    assert rows.features[:3, 0].tolist() == [0, 1, 2]
    federation = load("sleepstudy", seed=1)
    assert federation.num_clients == 18
    assert federation.test.num_examples.tolist() == [3] * 18
