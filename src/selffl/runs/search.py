"""A search over a grid of settings that is widened while the best of them lies at an edge.

Along each option the best setting has to have neighbours on both sides, with all other options as they are.  Where one
is missing, the next value is tried: further by the grid's own step, which is a difference where values are evenly
spaced, and else a ratio.  This goes on until nothing is missing, or until as many settings were tried as may be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, Literal

from selffl.algorithms.options import check_integer
from selffl.errors import ConfigError

Setting = dict[str, Any]  # a value for each option that is tuned
Side = Literal["smallest", "largest"]


@dataclass(frozen=True)
class Trial:
    """A setting and how good it was: higher is better, minus infinity for training that diverged."""

    setting: Setting
    score: float


@dataclass(frozen=True)
class Search:
    """What was tried and what was chosen.

    Attributes:
        trials: All settings, in the order in which they were tried.
        num_first: How many of them are the grid as it was given; the others came by widening.
        max_trials: As many as were allowed.
        open_ends: Options whose chosen value is the smallest or the largest that was tried, although there are values
            beyond it: the search ended before it got there.
        closed_ends: The same where the option takes no value beyond it.
    """

    trials: tuple[Trial, ...]
    num_first: int
    max_trials: int
    open_ends: Mapping[str, Side]
    closed_ends: Mapping[str, Side]

    @property
    def chosen(self) -> Trial:
        """The best; among equals the one that was tried first."""
        return max(self.trials, key=lambda trial: trial.score)

    @property
    def ends(self) -> list[str]:
        """A sentence on each value chosen that is the last one tried on its side."""
        setting = self.chosen.setting
        words = ((self.open_ends, "with more beyond it untried"), (self.closed_ends, "and none is beyond it"))
        return [
            f"{describe({name: setting[name]})} is the {side} tried, {rest}."
            for ends, rest in words
            for name, side in ends.items()
        ]


def describe(setting: Setting) -> str:
    """A setting in words: penalty = 0.1, learning_rate = 0.03."""
    return ", ".join(
        f"{name} = {value:g}" if isinstance(value, float) else f"{name} = {value}" for name, value in setting.items()
    )


def search_grid(
    grid: Mapping[str, Sequence[Any]],
    score: Callable[[list[Setting]], Sequence[float]],
    is_allowed: Callable[[Setting], bool],
    max_trials: int,
) -> Search:
    """Try every setting of a grid, then more around the best while it lies at an edge.

    Args:
        grid: Values by option; those of an option with a single value are not widened.
        score: How good each of several settings is; asked for the whole grid first, then for a few at a time.
        is_allowed: Whether a setting beyond the grid can be tried at all.
        max_trials: As many settings as may be tried, those of the grid among them.

    Examples:
        >>> found = search_grid(
        ...     {"penalty": (1.0, 3.0)}, lambda some: [-abs(s["penalty"] - 20) for s in some], lambda s: True, 8
        ... )
        >>> found.chosen.setting, len(found.trials), dict(found.open_ends)
        ({'penalty': 27.0}, 5, {})
    """
    check_integer("max_trials", max_trials, 1)
    check_grid(grid)
    first = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    if len(first) > max_trials:
        raise ConfigError(
            f"the grid has {len(first)} settings, and max_trials is {max_trials}; expected no more than that. Take "
            "values out of the grid, or allow more."
        )
    trials = [Trial(setting, _known(value)) for setting, value in zip(first, score(first), strict=True)]
    is_of_use = any(trial.score > -math.inf for trial in trials)  # else there is nothing to look around
    tuned = [name for name, values in grid.items() if is_of_use and len(values) > 1 and all(map(_is_number, values))]
    while True:
        ends = list(_ends(trials, tuned))
        missing = [(name, side, setting) for name, side, setting in ends if setting is not None and is_allowed(setting)]
        more = [setting for _, _, setting in missing][: max_trials - len(trials)]
        if not more:
            break
        trials += [Trial(setting, _known(value)) for setting, value in zip(more, score(more), strict=True)]
    open_ends = {name: side for name, side, _ in missing}
    closed_ends = {name: side for name, side, _ in ends if name not in open_ends}
    return Search(tuple(trials), len(first), max_trials, open_ends, closed_ends)


def check_grid(grid: Mapping[str, Sequence[Any]]) -> None:
    """Refuse a grid without options, and options without values or with one value twice."""
    if not isinstance(grid, Mapping) or not grid:
        raise ConfigError(f"grid is {grid!r}; expected values by option, such as {{'penalty': (0.1, 1.0)}}.")
    for name, values in grid.items():
        is_list = isinstance(values, Sequence) and not isinstance(values, str)
        if not is_list or not values or any(value in values[:place] for place, value in enumerate(values)):
            raise ConfigError(f"{name} in the grid is {values!r}; expected a list of values, each once.")


def _known(score: float) -> float:
    return -math.inf if math.isnan(score) else score


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _ends(trials: Sequence[Trial], names: Sequence[str]) -> Iterator[tuple[str, Side, Setting | None]]:
    """Where the best setting has no neighbour, and the setting that would be one; none where there is no such value."""
    best = max(trials, key=lambda trial: trial.score).setting
    for name in names:
        values = sorted({trial.setting[name] for trial in trials})
        line = [t.setting[name] for t in trials if {**t.setting, name: None} == {**best, name: None}]
        sides: tuple[tuple[Side, Any], ...] = (("smallest", min(line)), ("largest", max(line)))
        for side, end in sides:
            if best[name] == end:
                beyond = next_value(values, end, side)
                yield name, side, None if beyond is None else {**best, name: beyond}


def next_value(values: Sequence[float], end: float, side: Side) -> float | None:
    """The value beyond ``end``, which is one of ``values``: the next of these, or one step beyond the last.

    Values are sorted.  Three or more that are evenly spaced go on by their difference, others by the ratio of the last
    two on that side, or by their difference where one is not above 0.  Below 0 there is nothing by a ratio: none.
    Whole numbers stay whole; what comes of a ratio is rounded to two digits.
    """
    place = values.index(end) + (1 if side == "largest" else -1)
    if 0 <= place < len(values):
        return values[place]
    low, high = values[-2:] if side == "largest" else values[:2]
    differences = [after - before for before, after in pairwise(values)]
    is_even = len(values) > 2 and all(math.isclose(each, differences[0]) for each in differences)
    if side == "smallest" and end == 0 and not is_even:
        return None
    if is_even or low <= 0:
        beyond, digits = end + (high - low if side == "largest" else low - high), 12
    else:
        beyond, digits = end * (high / low if side == "largest" else low / high), 2
    found = round(beyond) if all(isinstance(value, int) for value in values) else float(f"{beyond:.{digits}g}")
    return found if found != end and math.isfinite(found) else None
