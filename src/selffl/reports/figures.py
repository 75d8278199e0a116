"""Figures drawn from the studies' data, in one style, for the page and for papers."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, ScalarFormatter

from selffl.algorithms import ALGORITHMS
from selffl.studies.result import Chart, Figure, Series

STYLE = matplotlib.rc_params_from_file(Path(__file__).with_name("figures.mplstyle"), use_default_template=False)
INK: str = STYLE["text.color"]
# Okabe and Ito's palette, which colour-blind readers can tell apart.  A method keeps its colour in every figure, that
# of its position in the registry, counted round and round.
METHOD_COLOURS = (
    *("#8a6fb3", "#d55e00", "#0072b2", "#cc79a7", "#3d3d3d", "#56b4e9", "#e69f00", "#009e73"),
    *("#8c5a2b", "#7f7f7f"),
)
LIMIT_COLOURS = {  # of lines that methods tend to: the colour of the method, or ink
    "limit, paper posterior": "#d55e00",
    "limit, exact posterior": "#0072b2",
    "limit, posterior mean": INK,
}
# On a page, darker or lighter where a colour would be faint on its ground: (light, dark).
PAGE_COLOURS = {
    "#d55e00": ("#d05a00", "#ff8f45"),
    "#0072b2": ("#0069a8", "#4fa3ea"),
    "#009e73": ("#008a64", "#34cf9f"),
    "#cc79a7": ("#b9578f", "#eaa3cb"),
    "#e69f00": ("#b97d00", "#f3bd45"),
    "#56b4e9": ("#2b93cb", "#9ad9ff"),
    "#8a6fb3": ("#8063ad", "#b9a1e3"),
    "#7f7f7f": ("#757575", "#a3a3a3"),
    "#8c5a2b": ("#8c5a2b", "#cf9a66"),
    "#3d3d3d": ("#3d3d3d", "#e4e2dc"),
}
OTHER_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6fb3", "#7f7f7f"),
    *("#8c5a2b", "#3d3d3d"),
)
MARKERS = "osD^vPX*<p"
Width = Literal["single", "double"]  # columns of a paper
INCHES = {"single": 3.35, "double": 7.0}
IN_PAPER: Any = {"font.size": 8.0, "axes.titlesize": 8.5, "lines.linewidth": 1.3, "lines.markersize": 3.4}
IN_PAPER_DPI = 300
BACKGROUND = "background"  # id of the white ground in SVG files


@contextmanager
def style() -> Iterator[None]:
    """The style, for the length of a drawing."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # A letter that the font lacks is drawn as a box; the reader sees that without two lines on standard error.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        # A font list that matplotlib cached for another environment is mended by matplotlib itself, with a line of log.
        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
        yield


def draw(figure: Figure, width: Width | None = None) -> Canvas:
    """The charts over one legend: side by side, but in a single column of a paper one below the other."""
    count = len(figure.charts)
    with style():
        if width is None:
            canvas = Canvas(figsize=({1: 6.2, 2: 9.2}.get(count, 3.9 * count), 4.3), layout="constrained")
        else:
            matplotlib.rcParams.update(IN_PAPER)  # within the style, which puts everything back
            rows = count if width == "single" else 1
            canvas = Canvas(figsize=(INCHES[width], 2.3 * rows + 0.55), layout="constrained")
        shape = (count, 1) if width == "single" else (1, count)
        axes = list(canvas.subplots(*shape, squeeze=False).flat)
        colours = _named_colours([series.name for chart in figure.charts for series in chart.series])
        for axis, chart in zip(axes, figure.charts, strict=True):
            _draw_chart(axis, chart, colours)
        handles = {
            text: handle for axis in axes for handle, text in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        longest = max(map(len, handles))
        most = 5 if width != "single" else 3 if longest <= 14 else 2
        columns = 2 if longest > 30 else min(len(handles), most)
        size = 8.5 if width is None else IN_PAPER["font.size"] - 0.5
        canvas.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, fontsize=size)
    return canvas


def page_palette(labels: Sequence[str]) -> list[tuple[str, str]]:
    """Colours of the methods on a light page and on a dark one."""
    return [PAGE_COLOURS.get(colour, (colour, colour)) for colour in _named_colours(labels).values()]


def _named_colours(labels: Sequence[str]) -> dict[str, str]:
    """A colour for each name: a method's own, unless a method before it in the registry has it; else one left over."""
    names = list(dict.fromkeys(labels))
    own: dict[str, str] = {}
    for name, colour in zip(ALGORITHMS, cycle(METHOD_COLOURS), strict=False):
        if name in names and colour not in own.values():
            own[name] = colour
    own |= {name: colour for name, colour in LIMIT_COLOURS.items() if name in names}
    free = [colour for colour in OTHER_COLOURS if colour not in own.values()] or list(OTHER_COLOURS)
    spare = cycle(free)
    return {name: own.get(name) or next(spare) for name in names}


def _draw_chart(axis: Axes, chart: Chart, colours: dict[str, str]) -> None:
    markers = {name: MARKERS[index % len(MARKERS)] for index, name in enumerate(colours)}  # one each in all charts
    for index, series in enumerate(chart.series):
        shift = chart.dodge * (index - len(chart.series) / 2)
        if chart.kind == "bars":
            width = 0.9 / len(chart.series)
            places = [position + width * (index + 0.5) - 0.45 for position in range(len(series.x))]
            axis.bar(places, series.y, width, yerr=series.error, color=colours[series.name], label=series.name)
            axis.set_xticks(range(len(series.x)), [f"{value:g}" for value in series.x])
            continue
        if chart.kind == "points" and series.error is None and not series.is_reference:
            marker, colour = markers[series.name], colours[series.name]
            axis.scatter(series.x, series.y, s=22, marker=marker, color=colour, alpha=0.75, label=series.name)
            continue
        line = "none" if chart.kind == "points" else "solid"  # places along x that follow nothing are not joined
        _draw_series(axis, series, colours[series.name], markers[series.name], shift, line)
    axis.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    if chart.log_x:
        axis.set_xscale("log")
        _mark_round_numbers(axis.xaxis, [value for series in chart.series for value in series.x])
    elif chart.kind == "lines" and all(float(value).is_integer() for series in chart.series for value in series.x):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no round 2.5
    if chart.log_y:
        axis.set_yscale("log")
        _mark_round_numbers(axis.yaxis, [value for series in chart.series for value in series.y])
    if chart.x_ticks is not None:
        axis.set_xticks(list(chart.x_ticks), [f"{tick:g}" for tick in chart.x_ticks])
        axis.xaxis.set_minor_locator(NullLocator())


def _mark_round_numbers(axis: Axis, shown: Sequence[float]) -> None:
    """Less than a decade and a half has too few powers of ten to read: mark round numbers instead."""
    values = [value for value in shown if value > 0 and math.isfinite(value)]
    if values and max(values) / min(values) < 30:
        axis.set_major_locator(FixedLocator(_round_numbers(min(values), max(values))))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_locator(NullLocator())


def _round_numbers(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [
        step * 10.0**power for power in powers for step in (1, 2, 5) if low / 1.3 <= step * 10.0**power <= high * 1.3
    ]


def _draw_series(axis: Axes, series: Series, colour: str, marker: str, shift: float, line: str) -> None:
    if series.is_reference:
        axis.plot(series.x, series.y, color=colour, linestyle=(0, (5, 2)), linewidth=1.3, label=series.name)
        return
    x = [value + shift for value in series.x]
    own_marker = marker if series.error is not None else None
    axis.plot(x, series.y, color=colour, marker=own_marker, linestyle=line, label=series.name)
    if series.error is not None:
        axis.errorbar(x, series.y, yerr=series.error, fmt="none", ecolor=colour, elinewidth=1, capsize=2)


def save(canvas: Canvas, stem: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write a figure in each format, side by side; the same figure is the same file, whenever it is saved.

    It is laid out once, by the sizes of letters in the first format.
    """
    undated: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    paths = [stem.with_name(f"{stem.name}.{ending}") for ending in formats]
    canvas.patch.set_gid(BACKGROUND)
    with style():
        if canvas.get_figwidth() in INCHES.values():
            matplotlib.rcParams["savefig.dpi"] = IN_PAPER_DPI
        for path, ending in zip(paths, formats, strict=True):
            canvas.savefig(path, facecolor="white", metadata=undated.get(ending))
            canvas.set_layout_engine("none")
    return paths


def plain(figure: Figure) -> dict[str, Any]:
    """What a figure shows, as JSON takes it; `of_plain` makes it a figure again."""
    content = asdict(figure)
    for chart in content["charts"]:
        chart["x_ticks"] = None if chart["x_ticks"] is None else [float(tick) for tick in chart["x_ticks"]]
        for series in chart["series"]:
            for name in ("x", "y", "error"):
                series[name] = None if series[name] is None else [float(value) for value in series[name]]
    return content


def of_plain(content: Mapping[str, Any]) -> Figure:
    """The figure that `plain` wrote down."""
    charts = [Chart(**chart | {"series": [Series(**one) for one in chart["series"]]}) for chart in content["charts"]]
    return Figure(content["name"], content["caption"], charts)
