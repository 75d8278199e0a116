"""The first grid of each method: there for every name, and made of values that its options take."""

from dataclasses import fields, replace

import pytest

from selffl.algorithms import ALGORITHMS, algorithm
from selffl.algorithms.grids import FINE_TUNE
from selffl.runs.recipe import SETTINGS

GRIDS = {name: make().grid for name, make in ALGORITHMS.items()}


def test_every_method_says_what_is_worth_tuning():
    assert None not in GRIDS.values()
    assert [name for name, grid in GRIDS.items() if not grid] == ["self-fl-auto"]


@pytest.mark.parametrize("name", [name for name, grid in GRIDS.items() if grid])
def test_a_grid_has_values_that_its_method_takes_and_the_default_lies_among_them(name):
    method = algorithm(name)
    for option, values in GRIDS[name].items():
        assert list(values) == sorted(set(values))
        if option == FINE_TUNE:
            assert option in SETTINGS
            assert values[0] == 0
            continue
        assert option in {field.name for field in fields(method)}
        for value in values:
            replace(method, **{option: value})
        assert values[0] <= getattr(method, option) <= values[-1]
