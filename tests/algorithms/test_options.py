"""A wrong option is refused when the method is made, with what was found and what was expected."""

import math

import pytest
import torch

from selffl.algorithms import ALGORITHMS, Population, algorithm
from selffl.errors import ConfigError


def test_every_name_makes_a_method_with_the_options_given():
    for name in ALGORITHMS:
        assert name.startswith(algorithm(name).name)
    assert algorithm("ditto", penalty=0.5, num_local_steps=3).penalty == 0.5
    assert algorithm("self-fl-exact").form == "exact"
    assert algorithm("self-fl").form == "paper"
    assert algorithm("fedavg-equal").weighting == algorithm("ditto-equal").weighting == "equal"
    assert algorithm("fedavg").weighting == algorithm("ditto").weighting == "examples"
    assert algorithm("self-fl", smoothing="participation") == algorithm("self-fl")


def test_an_unknown_method_is_named_with_its_nearest_neighbour():
    with pytest.raises(ConfigError, match=r"unknown algorithm 'fedavgg'; did you mean 'fedavg'\? .*self-fl-exact"):
        algorithm("fedavgg")
    with pytest.raises(ConfigError, match=r"unknown algorithm 'zzz'; Expected one of: .*perfedavg, pfedme"):
        algorithm("zzz")


@pytest.mark.parametrize(
    ("name", "option", "near"),
    [
        ("fedavg", "num_local_step", "num_local_steps"),
        ("ditto", "penality", "penalty"),
        ("self-fl", "inital_steps", "initial_steps"),
        ("self-fl-exact", "max_steps", "max_local_steps"),
        ("self-fl-augmented", "tolerence", "tolerance"),
        ("pfedme", "mixin", "mixing"),
        ("perfedavg", "orders", "order"),
    ],
)
def test_an_unknown_option_is_named_with_its_nearest_neighbour(name, option, near):
    with pytest.raises(ConfigError, match=f"unknown option of {name} '{option}'; did you mean '{near}'"):
        algorithm(name, **{option: 1})
    with pytest.raises(ConfigError, match=f"unknown option of {name} 'colour'; .*Expected one of: .*{near}"):
        algorithm(name, colour="red")


# option: (methods that have it, what is expected, wrong values)
WHOLE_FROM_1 = "a whole number, 1 or more"
WRONG_WHOLE = (0, -3, 2.0, "4", None, True, math.nan)
WRONG_NUMBER = ("1", None, True, math.nan, math.inf, -0.5)
WRONG = {
    "num_local_steps": (
        ("fedavg", "fedavg-equal", "fedprox", "local", "ditto", "ditto-equal", "pfedme", "perfedavg"),
        WHOLE_FROM_1,
        WRONG_WHOLE,
    ),
    "weighting": (("fedavg", "ditto"), "'examples' or 'equal'", ("Equal", None, 1)),
    "penalty": (("fedprox", "ditto", "pfedme"), "a number 0 or more", WRONG_NUMBER),
    "num_inner_steps": (("pfedme",), WHOLE_FROM_1, WRONG_WHOLE),
    "mixing": (("pfedme",), "a number above 0", (*WRONG_NUMBER, 0.0)),
    "personal_learning_rate": (("pfedme",), "a number above 0", ("1", True, math.nan, math.inf, -0.5, 0.0)),
    "order": (("perfedavg",), "'first' or 'hessian-free'", ("second", None, 1)),
    "inner_learning_rate": (("perfedavg",), "a number above 0", ("1", True, math.nan, math.inf, -0.5, 0)),
    "adaptation_steps": (("perfedavg",), "a whole number, 0 or more", (-1, 1.0, "1", None, False)),
    "difference": (("perfedavg",), "a number above 0", (*WRONG_NUMBER, 0.0)),
    "form": (("self-fl", "self-fl-exact", "self-fl-augmented"), "'paper' or 'exact'", ("Paper", None, 0)),
    "variances": (("self-fl", "self-fl-augmented"), "'estimated' or 'known'", ("unknown", None, True)),
    "variance_scale": (("self-fl", "self-fl-augmented"), "'sum' or 'mean'", ("total", None, 1)),
    "others": (("self-fl", "self-fl-augmented"), "'cohort' or 'all'", ("everyone", None, 1)),
    "smoothing": (
        ("self-fl", "self-fl-augmented"),
        "a number above 0 and at most 1",
        (*WRONG_NUMBER, 0, 1.5, "participations"),
    ),
    "initial_steps": (("self-fl", "self-fl-augmented"), WHOLE_FROM_1, WRONG_WHOLE),
    "max_local_steps": (("self-fl", "self-fl-augmented"), WHOLE_FROM_1, WRONG_WHOLE),
    "tolerance": (("self-fl-augmented",), "a number above 0", (*WRONG_NUMBER, 0.0)),
    "max_convergence_steps": (("self-fl-augmented",), WHOLE_FROM_1, WRONG_WHOLE),
}


@pytest.mark.parametrize(
    ("name", "option", "value", "expected"),
    [
        (name, option, value, expected)
        for option, (names, expected, values) in WRONG.items()
        for name in names
        for value in values
    ],
)
def test_a_wrong_value_is_refused(name, option, value, expected):
    with pytest.raises(ConfigError) as error:
        algorithm(name, **{option: value})
    assert str(error.value).startswith(f"{option} is {value!r}; expected {expected}")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ditto", {"penalty": 0}),
        ("pfedme", {"penalty": 0.0, "num_inner_steps": 1, "num_local_steps": 1, "mixing": 2}),
        ("perfedavg", {"adaptation_steps": 0, "inner_learning_rate": None}),
        ("self-fl", {"smoothing": 1, "initial_steps": 1, "max_local_steps": 1}),
        ("self-fl-augmented", {"max_convergence_steps": 1, "tolerance": 1, "smoothing": 1e-9}),
    ],
)
def test_values_at_the_edge_are_taken(name, options):
    made = algorithm(name, **options)
    assert {key: getattr(made, key) for key in options} == options


@pytest.mark.parametrize("name", ["self-fl", "self-fl-exact", "self-fl-augmented"])
@pytest.mark.parametrize("stated", ["nothing", "intra_variance", "inter_variance"])
def test_known_variances_must_be_stated(name, stated):
    method = algorithm(name, variances="known")
    given = {
        "nothing": {},
        "intra_variance": {"intra_variance": torch.ones(3)},
        "inter_variance": {"inter_variance": torch.tensor(1.0)},
    }
    with pytest.raises(ConfigError, match=r"variances='known'.* states no variances; expected .*variances='estimated'"):
        method.start(torch.zeros(2), Population(3, **given[stated]))
    both = given["intra_variance"] | given["inter_variance"]
    assert method.start(torch.zeros(2), Population(3, **both)).intra_variance.tolist() == [1.0, 1.0, 1.0]


def test_a_method_cannot_be_altered():
    with pytest.raises(AttributeError):
        algorithm("fedavg").num_local_steps = 3
