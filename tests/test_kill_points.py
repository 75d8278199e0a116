"""The library's kill points, all of them by copies of the folder and a sample by real kills.

`make kill-points` kills for each of longer runs, and at those of the commands, too.
"""

import pytest

import kill_points
from kill_points import SCENARIOS, Experiment

SAMPLE = {"train": 1, "resume": 1, "disk": 2, "run": 2}  # how many points of each; what draws takes too long for these
ALL = {"train": 120, "resume": 80, "disk": 200}  # how many points each has at least


@pytest.fixture(autouse=True)
def short_scenarios(monkeypatch):
    """Points of a third round are those of the second once more."""
    monkeypatch.setattr(kill_points, "IS_SHORT", True)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_whatever_is_killed_goes_on_to_the_same_bits(name, tmp_path):
    experiment = Experiment(name, tmp_path)
    assert experiment.points > 20
    step = experiment.points // SAMPLE[name]
    for number in range(step // 2 + 1, experiment.points + 1, step):
        assert experiment.differences(number) == [], f"killed at operation {number} of {experiment.points}"


@pytest.mark.slow
@pytest.mark.usefixtures("no_small_models")  # half of the time would go to what no file knows of
@pytest.mark.parametrize("name", ALL)
def test_what_any_kill_leaves_goes_on_to_the_same_bits(name, tmp_path):
    experiment = Experiment(name, tmp_path)
    assert experiment.points >= ALL[name]
    found = experiment.all_differences()
    assert {number: names for number, names in found.items() if names} == {}
    assert experiment.points / 2 < experiment.states <= experiment.points


def test_the_scenarios_are_there():
    assert set(SAMPLE) < set(SCENARIOS)
    assert set(ALL) < set(SCENARIOS)
    assert sum(ALL.values()) >= 400


def test_scenarios_are_named_by_words_or_on_the_command_line(monkeypatch, capsys):
    for words, line in ((["no such"], []), (None, ["no such"])):
        monkeypatch.setattr("sys.argv", ["kill_points.py", *line])
        with pytest.raises(SystemExit, match="2"):
            kill_points.main(words)
        assert "no scenario: no such" in capsys.readouterr().err


def test_a_difference_is_noticed(tmp_path, monkeypatch):
    """What goes on by beginning again with another seed does not leave the same."""

    def act(root):
        if (root / "a").is_file():
            (root / "a").write_text("again")
            return
        (root / "a").write_text("once")
        (root / "b").write_text("twice")
        (root / "a").unlink()
        (root / "a").write_text("once")

    monkeypatch.setitem(kill_points.SCENARIOS, "made up", (lambda root: None, act))
    experiment = Experiment("made up", tmp_path)
    assert experiment.points == 7  # three files opened and written, one deleted
    found = {number: experiment.differences(number) for number in range(1, 9)}
    assert found[1] == []  # nothing was there yet
    assert found[2] == ["a", "b"]  # half of a was
    assert found[5] == ["a"]
    assert found.pop(8) == ["it ended with 0 instead of being killed"]
    assert experiment.all_differences() == found
    assert experiment.states == 7  # every one of them leaves something else
