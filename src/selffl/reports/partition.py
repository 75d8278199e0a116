"""Who has how much of what: a picture of a federation's clients and classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, LogNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from selffl.data.federation import Federation
from selffl.reports.figures import INK, style
from selffl.reports.scores import evenly_chosen
from selffl.reports.shrinkage import check_ending

Counts = npt.NDArray[np.int64]

CLIENTS_PER_STRIP = 250  # side by side: more, and a column is too thin to see
MAX_CLIENTS = 1000  # in one picture
MAX_NAMED_CLIENTS = 40  # beyond which ids do not fit
MAX_NUMBERED_CLIENTS = 24  # beyond which numbers do not fit into cells

# From the palette's light blue through its blue into the dark; what no client has is left to the ground.
COLOURS = LinearSegmentedColormap.from_list("rows", ["#b5d9f0", "#56b4e9", "#0072b2", "#08304f"])
EMPTY_COLOUR = "#8a8f981a"  # with its alpha: on a light page and on a dark one
BAR_COLOUR = "#a9afb8"


def partition_plot(
    counts: npt.ArrayLike, title: str, clients: Sequence[Any] = (), classes: Sequence[str] = ()
) -> Canvas:
    """Rows of each client and class as colours, with the sizes of clients above and of classes beside them.

    Clients are sorted by size and, beyond 250, continued in a further strip.  More than 1000 are shown by an even
    selection, and the picture says so.

    Args:
        counts: rows ``[clients, classes]``, as `Federation.class_counts` has them.
        title: of the picture.
        clients: their ids, shown where they fit; without them, their numbers.
        classes: their names; without them, their numbers.
    """
    every = np.asarray(counts).astype(np.int64)
    order = np.argsort(-every.sum(1), kind="stable")
    if len(order) > MAX_CLIENTS:
        order = order[evenly_chosen(len(order), MAX_CLIENTS)]
        title += f" ({len(order):,} of {len(every):,} clients, evenly chosen by size)"
    shown = every[order]
    num_strips = math.ceil(len(shown) / CLIENTS_PER_STRIP)
    strips = np.array_split(np.arange(len(shown)), num_strips)
    ids = [str(clients[i] if len(clients) else i) for i in order]
    names = list(classes) if len(classes) else [str(label) for label in range(every.shape[1])]
    heat_height = min(max(0.22 * every.shape[1], 1.1), 4.5) * (1.0 if num_strips == 1 else 0.62)
    size_height = 0.85 if num_strips == 1 else 0.5
    with style():
        canvas = Canvas(
            figsize=(9.2, 1.25 + num_strips * (heat_height + size_height + 0.42)),
            layout=ConstrainedLayoutEngine(h_pad=0.03, w_pad=0.05, hspace=0.0, wspace=0.0),
        )
        axes = canvas.subplots(
            2 * num_strips,
            2,
            squeeze=False,
            gridspec_kw={"height_ratios": [size_height, heat_height] * num_strips, "width_ratios": [9, 1]},
        )
        low = int(shown.min(where=shown > 0, initial=shown.max()))
        norm = LogNorm(low, max(int(shown.max()), 2 * low))
        most_of_a_class = max(int(shown[strip].sum(0).max(initial=0)) for strip in strips)
        for number, strip in enumerate(strips):
            above, corner = axes[2 * number]
            heat, beside = axes[2 * number + 1]
            corner.set_axis_off()
            _draw_sizes(above, shown[strip].sum(1), shown.sum(1))
            _draw_heat(heat, shown[strip], norm, names)
            _draw_classes(beside, shown[strip].sum(0), most_of_a_class, is_last=number == num_strips - 1)
            _name_clients(heat, [ids[i] for i in strip], int(strip[0]), len(shown))
        is_named = len(shown) <= MAX_NAMED_CLIENTS
        axes[-1, 0].set_xlabel("client, largest first" if is_named else "clients by size, largest first")
        bar = canvas.colorbar(
            axes[-1, 0].collections[-1],
            ax=axes,
            orientation="horizontal",
            location="bottom",
            aspect=60,
            shrink=0.5,
            pad=0.02,
        )
        bar.outline.set_visible(False)
        # Both ends, and the powers of ten that are not too near to them.
        high = max(int(shown.max()), 2 * low)
        ticks = [low, *(10**power for power in range(12) if 1.9 * low <= 10**power <= high / 1.9), high]
        bar.set_ticks(ticks, labels=[_plain(tick) for tick in ticks], minor=False)
        bar.ax.xaxis.set_minor_locator(NullLocator())
        bar.ax.tick_params(length=0, labelsize=8)
        bar.set_label("rows of one class with one client", size=8.5)
        canvas.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return canvas


def _plain(value: float, _: int | None = None) -> str:
    return f"{value:,.0f}"


def _draw_sizes(axis: Axes, sizes: Counts, every: Counts) -> None:
    """Rows of each client, on one logarithmic scale for all strips."""
    width = 0.86 if len(sizes) <= MAX_NAMED_CLIENTS else 1.0
    axis.bar(np.arange(len(sizes)), sizes, width=width, color=BAR_COLOUR, linewidth=0)
    low, high = max(int(every.min()), 1), int(every.max())
    if high > 8 * low:
        axis.set_yscale("log")
        axis.set_ylim(low / 1.8, 1.5 * high)
        axis.yaxis.set_major_locator(LogLocator(10, numticks=4))
        axis.yaxis.set_minor_locator(NullLocator())
    else:
        axis.set_ylim(0, 1.1 * high)
    axis.yaxis.set_major_formatter(FuncFormatter(_plain))
    axis.set_xlim(-0.5, len(sizes) - 0.5)
    axis.set_xticks([])
    axis.spines[["left", "bottom"]].set_visible(False)
    axis.tick_params(length=0, labelsize=8)
    axis.set_ylabel("rows", fontsize=8.5)


def _draw_heat(axis: Axes, counts: Counts, norm: LogNorm, names: Sequence[str]) -> None:
    """Cells of clients (across) and classes (down)."""
    num_clients, num_classes = counts.shape
    across = _edges(num_clients, 0.08 if num_clients <= 2 * MAX_NAMED_CLIENTS else 0.0)
    down = _edges(num_classes, 0.06)
    cells = np.full((len(down) - 1, len(across) - 1), np.nan)
    inside = np.s_[:: 2 if len(down) > num_classes + 1 else 1, :: 2 if len(across) > num_clients + 1 else 1]
    cells[inside] = counts.T  # gaps stay empty, so that whatever the ground is shows through
    layers: list[tuple[Any, dict[str, Any]]] = [
        (cells == 0, {"cmap": ListedColormap([EMPTY_COLOUR])}),
        (cells > 0, {"cmap": COLOURS, "norm": norm}),
    ]
    for which, options in layers:
        values = np.where(which, cells, np.nan)
        # As pixels, also in an SVG: thousands of small shapes make a slow page.
        axis.pcolormesh(across, down, values, rasterized=True, **options)
    if num_clients <= MAX_NUMBERED_CLIENTS and num_classes <= MAX_NUMBERED_CLIENTS:
        for client, label in np.argwhere(counts):
            count = int(counts[client, label])
            dark = norm(count) > 0.45
            axis.text(
                client, label, _plain(count), ha="center", va="center", fontsize=6.8, color="white" if dark else INK
            )
    axis.grid(visible=False)
    axis.set_ylim(num_classes - 0.5, -0.5)
    axis.set_xlim(-0.5, num_clients - 0.5)
    step = math.ceil(num_classes / 12)
    axis.set_yticks(range(0, num_classes, step), names[::step], parse_math=False)
    axis.tick_params(length=0, labelsize=8)
    axis.spines[["left", "bottom"]].set_visible(False)
    axis.set_ylabel("class", fontsize=8.5)


def _edges(count: int, gap: float) -> npt.NDArray[np.float64]:
    """Borders of cells around 0, 1, …; with a gap, of cells and gaps by turns."""
    if gap == 0:
        return np.arange(count + 1, dtype=np.float64) - 0.5
    middle = np.arange(count, dtype=np.float64)
    return np.stack([middle - 0.5 + gap / 2, middle + 0.5 - gap / 2], axis=1).reshape(-1)


def _draw_classes(axis: Axes, sizes: Counts, most: int, *, is_last: bool) -> None:
    """Rows of each class within the strip."""
    axis.barh(np.arange(len(sizes)), sizes, height=0.86, color=BAR_COLOUR, linewidth=0)
    axis.set_ylim(len(sizes) - 0.5, -0.5)
    axis.set_xlim(0, 1.05 * max(most, 1))
    axis.grid(visible=False)
    axis.set_yticks([])
    axis.set_xticks([0, most] if is_last else [], ["0", _plain(most)] if is_last else [])
    axis.tick_params(length=0, labelsize=8)
    axis.spines[["left", "bottom"]].set_visible(False)


def _name_clients(axis: Axes, ids: Sequence[str], first: int, total: int) -> None:
    """Ids where they fit, else positions in the order."""
    if total <= MAX_NAMED_CLIENTS:
        turned = max(map(len, ids)) > (4 if len(ids) <= MAX_NUMBERED_CLIENTS else 2)
        axis.set_xticks(range(len(ids)), ids, rotation=90 if turned else 0, fontsize=7.5, parse_math=False)
        return
    step = next(step for step in (5, 10, 20, 25, 50, 100) if len(ids) / step <= 11 or step == 100)
    places = [0, *range(step - 1 - first % step, len(ids), step)]
    if len(places) > 1 and places[1] < step / 3:
        del places[1]
    axis.set_xticks(places, [_plain(first + index + 1) for index in places], fontsize=8)


def draw_partition(fed: Federation, path: Path, title: str, classes: Sequence[str] = ()) -> None:
    """The picture of a federation, in the format of the file's ending."""
    check_ending(path)
    canvas = partition_plot(fed.class_counts().cpu().numpy(), title, fed.clients, classes)
    with style():
        canvas.savefig(path)
