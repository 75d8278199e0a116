"""A grid that is widened: what is tried, what is chosen, and when it ends."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selffl.errors import ConfigError
from selffl.runs.search import describe, next_value, search_grid


def anything(setting):
    return True


def scored(function):
    """How good settings are, by a function of their values."""
    return lambda some: [function(**setting) for setting in some]


def values_tried(found, name="penalty"):
    return [trial.setting[name] for trial in found.trials]


def test_the_whole_grid_is_tried_and_the_best_inside_is_chosen():
    found = search_grid({"penalty": (0.1, 1.0, 10.0)}, scored(lambda penalty: -abs(penalty - 2)), anything, 8)
    assert values_tried(found) == [0.1, 1.0, 10.0]
    assert found.chosen.setting == {"penalty": 1.0}
    assert (found.open_ends, found.closed_ends, found.ends) == ({}, {}, [])


@pytest.mark.parametrize(
    ("best", "values", "tried", "chosen"),
    [
        (50, (0.1, 1.0), [10.0, 100.0, 1000.0], 100.0),
        (0.002, (0.1, 1.0), [0.01, 0.001, 0.0001], 0.001),
        (1000, (0, 5, 20, 80, 320), [1280, 5120], 1280),
        (1.6, (0.25, 0.5, 0.75), [1.0, 1.25, 1.5, 1.75], 1.5),  # evenly spaced
    ],
)
def test_a_grid_is_widened_by_its_own_step_until_the_best_lies_inside(best, values, tried, chosen):
    found = search_grid(
        {"penalty": values}, scored(lambda penalty: -abs(math.log((penalty or 1e-9) / best))), anything, 9
    )
    assert values_tried(found)[len(values) :][: len(tried)] == tried
    assert found.chosen.setting == {"penalty": chosen}
    assert found.open_ends == {}


def test_the_limit_ends_it_and_the_end_is_said_to_be_open():
    found = search_grid({"penalty": (1.0, 3.0)}, scored(lambda penalty: penalty), anything, 5)
    assert values_tried(found) == [1.0, 3.0, 9.0, 27.0, 81.0]
    assert (found.num_first, found.max_trials, found.open_ends) == (2, 5, {"penalty": "largest"})
    assert found.ends == ["penalty = 81 is the largest tried, with more beyond it untried."]


def test_where_an_option_takes_no_more_the_end_is_closed():
    found = search_grid({"share": (0.1, 0.3)}, scored(lambda share: share), lambda s: s["share"] <= 1, 8)
    assert values_tried(found, "share") == [0.1, 0.3, 0.9]
    assert (found.open_ends, found.closed_ends) == ({}, {"share": "largest"})
    assert found.ends == ["share = 0.9 is the largest tried, and none is beyond it."]


def test_below_zero_there_is_nothing():
    found = search_grid({"steps": (0, 5, 20)}, scored(lambda steps: -steps), anything, 8)
    assert values_tried(found, "steps") == [0, 5, 20]
    assert found.closed_ends == {"steps": "smallest"}


def test_among_equals_the_first_is_chosen_and_widening_ends():
    found = search_grid({"penalty": (1.0, 3.0)}, scored(lambda penalty: 0.0), anything, 8)
    assert values_tried(found) == [1.0, 3.0, 0.33]
    assert found.chosen.setting == {"penalty": 1.0}


def test_training_that_diverged_is_never_chosen_and_counts_as_tried():
    found = search_grid({"rate": (1.0, 3.0)}, scored(lambda rate: math.nan if rate > 5 else rate), anything, 8)
    assert values_tried(found, "rate") == [1.0, 3.0, 9.0]
    assert found.chosen.setting == {"rate": 3.0}
    assert found.trials[-1].score == -math.inf
    lost = search_grid({"rate": (1.0, 3.0)}, scored(lambda rate: math.nan), anything, 8)
    assert (len(lost.trials), lost.chosen.score, lost.ends) == (2, -math.inf, [])


def test_words_are_tried_and_not_widened_and_one_value_stays():
    grid = {"form": ("paper", "exact"), "flag": (True, False), "steps": (7,)}
    found = search_grid(grid, scored(lambda form, flag, steps: form == "exact"), anything, 8)
    assert len(found.trials) == 4
    assert describe(found.chosen.setting) == "form = exact, flag = True, steps = 7"


def test_with_two_options_neighbours_of_the_best_are_tried_and_not_the_whole_cross():
    def score(a, b):
        return -abs(math.log2(a / 16)) - abs(math.log2(b / 4))

    found = search_grid({"a": (1, 2, 4), "b": (1, 2)}, scored(score), anything, 20)
    assert found.chosen.setting == {"a": 16, "b": 4}
    tried = {(trial.setting["a"], trial.setting["b"]) for trial in found.trials}
    assert len(tried) == len(found.trials)
    assert {(8, 4), (32, 4), (16, 2), (16, 8)} <= tried
    assert (1, 4) not in tried


@settings(deadline=None, max_examples=60)
@given(peak=st.floats(-6, 6), first=st.floats(-2, 0), size=st.integers(2, 5), ratio=st.sampled_from([2.0, 3.0, 10.0]))
def test_of_one_peak_the_best_value_is_found_within_a_step(peak, first, size, ratio):
    """By another way: all powers of the ratio that lie around, looked at one by one."""
    grid = [float(f"{10**first * ratio**k:.2g}") for k in range(size)]
    found = search_grid({"x": grid}, scored(lambda x: -abs(math.log10(x) - peak)), anything, 200)
    assert found.open_ends == {}
    assert abs(math.log10(found.chosen.setting["x"]) - peak) <= 0.51 * math.log10(ratio) + 0.05


@pytest.mark.parametrize(
    ("values", "end", "side", "wanted"),
    [
        ([1, 5, 20], 20, "largest", 80),
        ([1, 5, 20], 1, "smallest", 0),
        ([0, 5], 5, "largest", 10),
        ([1.0, 3.0, 9.0], 3.0, "largest", 9.0),
        ([-1.0, 2.0], -1.0, "smallest", -4.0),
        ([1, 2, 3], 1, "smallest", 0),
        ([0.0, 0.1], 0.0, "smallest", None),
        ([1e300, 1e305], 1e305, "largest", None),
    ],
)
def test_the_value_beyond(values, end, side, wanted):
    assert next_value(values, end, side) == wanted


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({}, r"^grid is \{\}; expected values by option"),
        ([1, 2], r"^grid is \[1, 2\]; expected values by option"),
        ({"penalty": ()}, r"^penalty in the grid is \(\); expected a list of values, each once\."),
        ({"penalty": 1.0}, r"^penalty in the grid is 1\.0; expected a list"),
        ({"penalty": "abc"}, r"^penalty in the grid is 'abc'; expected a list"),
        ({"penalty": (1.0, 1.0)}, r"^penalty in the grid is \(1\.0, 1\.0\); expected a list of values, each once\."),
        (
            {"a": (1, 2, 3), "b": (1, 2, 3)},
            r"^the grid has 9 settings, and max_trials is 8; expected no more than that",
        ),
    ],
)
def test_a_grid_that_cannot_work_is_refused_before_anything_is_tried(grid, message):
    def score(some):
        raise AssertionError("tried")

    with pytest.raises(ConfigError, match=message):
        search_grid(grid, score, anything, 8)
