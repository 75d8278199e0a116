"""`selffl data` on made-up and embedded data."""

import gzip
import hashlib
import json
import re
import struct
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from selffl.cli.data import data_app
from selffl.data import DATA_SETS, load, mnist
from selffl.errors import ConfigError, DataError


def run(*words):
    found = CliRunner().invoke(data_app, words)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A place without any data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SELFFL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("selffl.cli.console.out.width", 200)


@pytest.fixture
def small_mnist(tmp_path, monkeypatch):
    digests = {}
    (tmp_path / "data" / "mnist").mkdir(parents=True)
    for name in mnist.FILES:
        array = np.arange(4, dtype=np.uint8)
        content = bytes([0, 0, 8, 1]) + struct.pack(">I", 4) + array.tobytes()
        digests[name] = hashlib.md5(content).hexdigest()
        (tmp_path / "data" / "mnist" / f"{name}.gz").write_bytes(gzip.compress(content))
    monkeypatch.setattr(mnist, "FILES", digests)
    return tmp_path / "data" / "mnist"


def test_the_list_says_what_is_where(small_mnist):
    lines = run("list").output.splitlines()
    by_name = {line.split()[0]: line for line in lines if line.strip()}
    assert set(DATA_SETS) <= set(by_name)
    assert "built in" in by_name["digits"]
    assert by_name["mnist"].rstrip().endswith("data/mnist")
    assert "not found; fetch it" in by_name["cifar10"]
    assert by_name["letters"].rstrip().endswith("not found")
    assert "stand-in for FEMNIST" in " ".join(" ".join(lines).split())


def test_the_list_as_json(small_mnist):
    found = {entry["name"]: entry for entry in json.loads(run("list", "--json").output)}
    assert list(found) == list(DATA_SETS)
    assert found["mnist"]["found"] == "data/mnist"
    assert found["digits"]["found"] == "built in"
    assert found["cifar10"]["found"] is None
    assert found["cifar10"]["can_fetch"] is True
    assert found["letters"]["can_fetch"] is False
    assert found["letters"]["stands_for"].startswith("FEMNIST")


def test_whole_files_are_ok(small_mnist):
    lines = run("check", "mnist").output.splitlines()
    assert len(lines) == 4
    assert all(line.split()[:2] == ["ok", "mnist:"] for line in lines)


def test_a_damaged_file_is_named_and_the_others_are_still_checked(small_mnist):
    path = small_mnist / "train-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-3])
    result = CliRunner().invoke(data_app, ["check"])
    assert isinstance(result.exception, DataError)
    assert str(result.exception).startswith("1 damaged file(s), first data/mnist/train-labels-idx1-ubyte.gz; expected")
    states = [line.split()[:2] for line in result.output.splitlines()]
    assert states.count(["ok", "mnist:"]) == 3
    assert states.count(["damaged", "mnist:"]) == 1
    assert ["ok", "digits:"] in states
    assert ["not", "found"] in states


def test_a_named_data_set_must_be_there():
    with pytest.raises(DataError, match=r"was not found in .* Run `selffl data fetch mnist`"):
        run("check", "mnist")
    with pytest.raises(ConfigError, match="unknown data set 'minst'"):
        run("check", "minst")


def test_fetched_files_are_printed(monkeypatch, tmp_path):
    def fake(name, folder, on_progress):
        on_progress("a", 0, 10)
        on_progress("a", 10, 10)
        return [folder / name / "a"]

    monkeypatch.setattr("selffl.data.fetch.fetch", fake)
    assert run("fetch", "mnist", "--out", "here").output.strip() == "here/mnist/a"


def test_what_cannot_be_fetched_says_so():
    with pytest.raises(DataError, match="digits needs no files"):
        run("fetch", "digits")


def test_a_split_is_shown(tmp_path):
    text = run("show", "digits", "--seed", "1").output
    fed = load("digits", seed=1)
    assert "40" in text
    assert f"{int(fed.num_examples.sum()):,} (" in text
    assert fed.fingerprint()[:16] in text
    found = json.loads(run("show", "digits", "--json").output)
    sizes = load("digits").num_examples.numpy()
    assert found["rows"] == found["train"] + found["test"] == sizes.sum()
    assert found["size"]["mean"] == pytest.approx(sizes.mean())
    assert found["size"]["std"] == pytest.approx(sizes.std())
    assert found["size"]["median"] == pytest.approx(np.median(sizes))
    assert found["classes_per_client"] == [3, 3]
    assert found["features"] == [64]


def test_a_split_is_drawn(tmp_path):
    result = run("show", "digits", "--plot", "a.svg")
    assert "Clients and classes: a.svg" in result.stderr
    assert "digits: 40 clients" in (tmp_path / "a.svg").read_text(encoding="utf-8")


def test_classes_have_their_names_in_the_picture(tmp_path, monkeypatch):
    """The stand-in's loader, given digits: only the names matter here."""
    monkeypatch.setitem(DATA_SETS, "letters", replace(DATA_SETS["letters"], load=DATA_SETS["digits"].load))
    run("show", "letters", "--plot", "a.svg")
    drawn = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "a.svg").read_text(encoding="utf-8"))
    assert [text for text in drawn if text.isalpha() and len(text) == 1] == list("acegilnoru")


def test_a_picture_that_cannot_be_drawn_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr("selffl.data.load", lambda *_, **__: pytest.fail("worked"))
    with pytest.raises(ConfigError, match="cannot be drawn"):
        run("show", "digits", "--plot", "a.jpeg")
    with pytest.raises(ConfigError, match="does not exist"):
        run("show", "digits", "--plot", "no/a.png")


@pytest.mark.parametrize("command", ["list", "check", "fetch", "show"])
def test_every_command_has_an_example(command):
    assert f"Example: selffl data {command}" in " ".join(run(command, "--help").output.split())


def test_clips_are_drawn_of_wake_words_alone(tmp_path):
    with pytest.raises(ConfigError, match=r"^--clips is for wakeword; digits has no clips to draw\.$"):
        run("show", "digits", "--clips", str(tmp_path / "clips.png"))
    with pytest.raises(ConfigError, match=r"clips\.txt"):
        run("show", "wakeword", "--clips", str(tmp_path / "clips.txt"))


# ------------------------------------------------------------------------------------------- sites that keep their rows


def test_sites_make_profiles_and_the_server_one_preparation(tmp_path):
    from selffl import Federation, Preparation

    lines = {"north": ["31,p,no", "48,q,yes", "27,p,no"], "south": ["60,q,no", "55,r,yes"]}
    for site, own in lines.items():
        (tmp_path / f"{site}.csv").write_text("\n".join(["age,town,ill", *own]), encoding="utf-8")
        assert "2 features" in run("profile", f"{site}.csv", "--label", "ill", "-o", f"{site}.json").output
    assert "4 inputs from 2 profiles" in run("prepare", "north.json", "south.json", "-o", "p.json").output
    pooled = [f"{site},{line}" for site, own in lines.items() for line in own]
    (tmp_path / "all.csv").write_text("\n".join(["site,age,town,ill", *pooled]), encoding="utf-8")
    expected = Federation.from_csv("all.csv", client="site", label="ill", test_fraction=0).preparation
    found = Preparation.load("p.json")
    assert found.inputs == expected.inputs == ["age", "town=p", "town=q", "town=r"]
    assert found.label == expected.label
    np.testing.assert_allclose([found.mean, found.scale], [expected.mean, expected.scale], rtol=1e-12)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["profile", "a.csv", "--label", "y", "-o", "a.json"], r"a\.csv, line 3: u is missing; .* Pass --missing "),
        (["profile", "a.csv", "--label", "z", "-o", "a.json"], r"a\.csv has no column 'z' among: u, y"),
        (["profile", "a.csv", "--label", "y", "--exclude", "v", "-o", "a.json"], "no column 'v' among: u, y"),
        (["prepare", "a.csv", "-o", "p.json"], r"a\.csv is no profile; expected a file that Profile\.save has written"),
        (["prepare", "none.json", "-o", "p.json"], r"none\.json is no profile"),
    ],
)
def test_what_cannot_be_profiled_or_prepared_is_one_line(words, message, tmp_path):
    (tmp_path / "a.csv").write_text("u,y\n1,0\n,1\n")
    if "--exclude" in words:
        (tmp_path / "a.csv").write_text("u,y\n1,0\n2,1\n")
    with pytest.raises((DataError, ConfigError), match=message) as error:
        run(*words)
    assert "\n" not in str(error.value)


def test_options_in_messages_are_those_of_the_command(tmp_path):
    """The library's own messages say ``missing="drop"``, which nobody can type."""
    (tmp_path / "rows.csv").write_text("site,age,y\na,1,0\na,NA,1\nb,3,1\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"age is missing; .* Pass --missing drop or --missing impute, or fill them"):
        run("profile", "rows.csv", "--label", "y", "--client", "site", "--out", "p.json")
    with pytest.raises(DataError, match=r"Name the column of clients with --client\.$"):
        run("profile", "rows.csv", "--label", "y", "--client", "ward", "--out", "p.json")
    run("profile", "rows.csv", "--label", "y", "--client", "site", "--missing", "impute", "--out", "p.json")
    with pytest.raises(DataError, match=r"lacks 1 values; expected none with --missing refuse\. Pass --missing impute"):
        run("prepare", "p.json", "--out", "preparation.json")
    for wrong in (("--missing", "dorp"), ("--task", "class"), ("--decimal", ";")):
        assert run("profile", "rows.csv", "--label", "y", *wrong, "--out", "p.json").exit_code == 2
