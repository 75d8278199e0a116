"""`selffl predict`: from a run's folder and from an exported file, and what it refuses and says."""

import csv
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import selffl
from selffl import cli

HEAD = "site,age,dose,sex,grade\n"


def rows(num_rows=160):
    rng = np.random.default_rng(0)
    lines = []
    for number in range(num_rows):
        age, dose, sex = rng.normal(50, 10), rng.normal(), "fm"[rng.integers(2)]
        cells = [f"s{number % 4}", f"{age:.1f}", "NA" if number % 9 == 0 else f"{dose:.3f}", sex]
        lines.append(",".join([*cells, "4" if age + 5 * dose > 50 else "2"]) + "\n")
    return HEAD + "".join(lines)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study that `init` has made, trained: its folder is ``run``."""
    place = tmp_path_factory.mktemp("study")
    (place / "rows.csv").write_text(rows(), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for words in (
            ["init", "wards", "--csv", "rows.csv", "--client", "site", "--label", "grade", "--missing", "impute"],
            ["run", "wards", "--rounds", "4", "--out", "run"],
        ):
            patch.setattr("sys.argv", ["selffl", *words])
            with pytest.raises(SystemExit) as stopped:
                cli.main()
            assert stopped.value.code == 0
    return place


@pytest.fixture
def run(command_line):
    return partial(command_line, "predict")


def refused(found):
    code, out, err = found
    assert (code, out) == (2, "")
    assert re.fullmatch(r"selffl: .*\n", err)
    return err


def answers(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_answers_are_in_the_users_classes(run, study):
    code, out, err = run(study / "run", study / "rows.csv", "-o", "answers.csv")
    assert (code, err) == (0, "")
    assert out == f"160 rows answered, 160 by personal models: {Path('answers.csv').absolute()}\n"
    found = answers("answers.csv")
    assert {row["prediction"] for row in found} == {"2", "4"}
    for row in found:
        chances = [float(row[f"probability_{name}"]) for name in (2, 4)]
        assert sum(chances) == pytest.approx(1)
        assert row["prediction"] == str([2, 4][int(np.argmax(chances))])


def test_an_exported_file_answers_as_the_run_does(run, command_line, study):
    """The models of `init` are no models by name, and no user of the command line can pass a module."""
    assert command_line("export", study / "run", "--all", "-o", "all.safetensors")[0] == 0
    assert run(study / "run", study / "rows.csv", "-o", "run.csv")[0] == 0
    code, _, err = run("all.safetensors", study / "rows.csv", "-o", "file.csv")
    assert (code, err) == (0, "")
    assert answers("file.csv") == answers("run.csv")


@pytest.mark.parametrize("command", ["predict", "export"])
def test_a_file_of_one_model_is_called_what_it_is(command_line, study, command):
    assert command_line("export", study / "run", "--client", "s1", "-o", "one.safetensors")[0] == 0
    words = ["one.safetensors", study / "rows.csv"] if command == "predict" else ["one.safetensors", "-c", "s1"]
    err = refused(command_line(command, *words))
    assert "one.safetensors is a plain state_dict, the model of client s1 alone; expected a file of several" in err


def test_a_header_alone_is_refused(run, study, tmp_path):
    (tmp_path / "head.csv").write_text(HEAD, encoding="utf-8")
    assert "head.csv has a header but no rows; expected rows to answer" in refused(run(study / "run", "head.csv"))


def test_the_option_is_named_as_it_is_typed(run, study):
    err = refused(run(study / "run", study / "rows.csv", "--client", "ward"))
    assert err.endswith("Name the column of clients with --client.\n")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("s1,50,0.5,x,2", "sex holds 'x', which no training row did: taken for none of the known."),
        ("s1,NA,0.5,f,2", "age is missing in 1 row, and was in no training row: taken for the mean."),
        ("s1,50,NA,f,2", ""),  # as some of the training rows
    ],
)
def test_a_warning_is_a_line_without_its_place_in_the_code(run, study, tmp_path, row, said):
    (tmp_path / "new.csv").write_text(f"{HEAD}{row}\ns2,51,0.5,m,2\n", encoding="utf-8")
    code, out, err = run(study / "run", "new.csv")
    assert (code, err) == (0, f"selffl: {said}\n" if said else "")
    assert len(out.splitlines()) == 3


@pytest.mark.parametrize(("sign", "age"), [(",", 50.123), (".", 50123.0)])
def test_a_number_that_can_be_read_two_ways_asks_for_an_option_that_there_is(run, study, tmp_path, sign, age):
    (tmp_path / "new.csv").write_text(f'{HEAD}s1,"50,123",1,f,2\n', encoding="utf-8")
    assert "Pass --decimal , or --decimal ., or write numbers" in refused(run(study / "run", "new.csv"))
    assert run(study / "run", "new.csv", "--decimal", sign, "-o", "answers.csv")[0] == 0
    (tmp_path / "plain.csv").write_text(f"{HEAD}s1,{age},1,f,2\n", encoding="utf-8")
    assert run(study / "run", "plain.csv", "-o", "plain-answers.csv")[0] == 0
    assert answers("answers.csv") == answers("plain-answers.csv")


def test_a_table_of_several_clients_is_no_newcomer(command_line, study):
    code, _, err = command_line("welcome", study / "run", study / "rows.csv", "-o", "new.safetensors")
    assert code == 2
    assert (
        "rows.csv holds rows of 4 clients in the column 'site', such as 's0' and 's1'; expected the new client's" in err
    )


@pytest.mark.parametrize("classes", [(2, 4), (1, 2)])
def test_a_newcomer_with_one_class_learns_that_class(command_line, tmp_path, classes):
    """On 14df91e the classes 1 and 2 were taken for outputs: rows of class 1 taught class 2; 2 and 4 were refused."""
    x = np.random.default_rng(0).normal(size=120)
    lines = [f"s{row % 4},{value:.3f},{classes[int(value > 0)]}" for row, value in enumerate(x)]
    (tmp_path / "rows.csv").write_text("\n".join(["site,x,grade", *lines, ""]), encoding="utf-8")
    assert command_line("init", "study", "--csv", "rows.csv", "--client", "site", "--label", "grade")[0] == 0
    assert command_line("run", "study", "--rounds", "4", "--out", "run")[0] == 0
    trained, answers = selffl.load("run"), []
    for taught in classes:
        few = [f"{value:.2f},{taught}" for value in np.linspace(-1, 1, 20)]
        (tmp_path / "new.csv").write_text("\n".join(["x,grade", *few, ""]), encoding="utf-8")
        code, _, err = command_line("welcome", "run", "new.csv", "-o", f"{taught}.safetensors")
        assert (code, err) == (0, "")
        model = trained.welcome(tmp_path / "new.csv")
        answers.append(model(trained.personal_model("s0").mean.float()[None]).softmax(-1)[0])
    assert answers[0][0] > answers[1][0] + 0.02
    assert answers[1][1] > answers[0][1] + 0.02
