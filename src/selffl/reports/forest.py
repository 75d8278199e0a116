"""Forest plot of clients: each alone and with the others, their mean, and where the next client will lie."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Polygon

from selffl.reports import figures
from selffl.reports.scores import evenly_chosen

Floats = npt.NDArray[np.float64]

MAX_CLIENTS = 250  # drawn one below the other; more would not fit on a picture that programs open
ROW_INCHES = 0.24
WIDTH_INCHES = 8.0
MAX_NAME_LETTERS = 32  # letters
OWN, SHRUNK, CENTRE, NEXT = "#8a8f98", "#0072b2", "#d55e00", "#009e73"


@dataclass(frozen=True)
class Forest:
    """What a forest plot shows; intervals are ``[clients, 2]`` or a pair."""

    clients: Sequence[str]
    estimate: Floats
    own_interval: Floats
    personal: Floats
    personal_interval: Floats
    mean: float
    mean_interval: tuple[float, float] | None
    prediction_interval: tuple[float, float] | None
    mean_without: Floats | None  # the mean with each client left out
    title: str
    notes: Sequence[str] = ()  # lines under the picture


def draw(forest: Forest) -> Canvas:
    """All clients by their estimate, largest on top; beyond `MAX_CLIENTS` an even selection, and the title says so."""
    order = np.argsort(forest.estimate, kind="stable")
    title = forest.title
    if len(order) > MAX_CLIENTS:
        order = order[evenly_chosen(len(order), MAX_CLIENTS)]
        title += (
            f" — {len(order)} of {len(forest.estimate):,} clients are shown, evenly chosen in the order of their "
            "estimates, because more would not be legible"
        )
    notes = [line for note in forest.notes for line in textwrap.wrap(note, 100)]
    height = 1.7 + ROW_INCHES * (len(order) + 3) + 0.17 * len(notes)
    with figures.style():
        canvas = Canvas(figsize=(WIDTH_INCHES, height), layout="constrained")
        canvas.suptitle("\n".join(textwrap.wrap(title, 78)), x=0.01, ha="left", fontsize=10.5, fontweight="bold")
        ratios = [3.2, 1.0] if forest.mean_without is not None else [1.0]
        axes = canvas.subplots(1, len(ratios), sharey=True, squeeze=False, width_ratios=ratios)[0]
        _draw_clients(axes[0], forest, order)
        _draw_centre(axes[0], forest)
        if forest.mean_without is not None:
            _draw_left_out(axes[1], forest, order)
        handles, labels = axes[0].get_legend_handles_labels()
        canvas.legend(
            handles, labels, loc="outside lower left", ncols=2, fontsize=8.5, borderpad=1.0,
            title="\n".join([*notes, ""]), title_fontsize=8.5, alignment="left",
        )  # fmt: skip
    return canvas


def _draw_clients(axis: Axes, forest: Forest, order: npt.NDArray[np.intp]) -> None:
    """Rows from 0 upwards, one per client, each with two intervals."""
    row = np.arange(len(order))
    axis.grid(axis="x")
    axis.grid(visible=False, axis="y")
    for offset, value, interval, colour, marker, label in (
        (0.15, forest.estimate, forest.own_interval, OWN, "o", "client alone"),
        (-0.15, forest.personal, forest.personal_interval, SHRUNK, "D", "client with the others"),
    ):
        axis.hlines(row + offset, *interval[order].T, color=colour, linewidth=1.3)
        axis.plot(value[order], row + offset, marker, color=colour, markersize=4, linestyle="none", label=label)
    # A dollar sign in a name is a dollar sign, not the start of a formula.
    names = [shorten_name(forest.clients[i], MAX_NAME_LETTERS) for i in order]
    below = [-2.0] if forest.prediction_interval is None else [-2.0, -3.0]
    words = ["mean of the clients", "next client"][: len(below)]
    axis.set_yticks([*reversed(below), *row], [*reversed(words), *names], parse_math=False)
    axis.set_ylim(min(below) - 0.8, len(order) - 0.2)
    axis.axhline(-1.1, color=OWN, linewidth=0.7)
    axis.set_xlabel("estimate")


def _draw_centre(axis: Axes, forest: Forest) -> None:
    """The mean as a diamond as wide as its interval, and the prediction interval under it."""
    low, high = forest.mean_interval or (forest.mean, forest.mean)
    axis.axvline(forest.mean, color=CENTRE, linewidth=1.0, linestyle=(0, (5, 2)))
    corners = [(low, -2.0), (forest.mean, -1.7), (high, -2.0), (forest.mean, -2.3)]
    axis.add_patch(Polygon(corners, closed=True, facecolor=CENTRE, edgecolor=CENTRE, label="mean of the clients"))
    axis.plot([low, high], [-2.0, -2.0], color=CENTRE, linewidth=1.0)
    if forest.prediction_interval is not None:
        axis.plot(forest.prediction_interval, (-3.0, -3.0), color=NEXT, linewidth=3.0, label="next client, prediction")


def _draw_left_out(axis: Axes, forest: Forest, order: npt.NDArray[np.intp]) -> None:
    """The mean of the others, beside each client."""
    assert forest.mean_without is not None
    axis.grid(axis="x")
    axis.grid(visible=False, axis="y")
    axis.axvline(forest.mean, color=CENTRE, linewidth=1.0, linestyle=(0, (5, 2)))
    axis.plot(forest.mean_without[order], np.arange(len(order)), "o", color=CENTRE, markersize=3.5)
    axis.tick_params(axis="y", left=False, labelleft=False)
    axis.locator_params(axis="x", nbins=3)
    axis.set_xlabel("mean without\nthis client")


def shorten_name(name: str, most: int) -> str:
    """Cut the middle out of a long name: names of one kind often differ at their ends.

    Examples:
        >>> shorten_name("University Hospital, ward 12", 16), shorten_name("ward 7", 16)
        ('University…rd 12', 'ward 7')
    """
    if len(name) <= most:
        return name
    tail = (most - 1) // 3
    return f"{name[: most - 1 - tail].rstrip()}…{name[len(name) - tail :].lstrip()}"
