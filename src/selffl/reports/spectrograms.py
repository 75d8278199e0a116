"""What the devices of the wake-word federation hear: a spectrogram for each type and state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure as Canvas
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import NullLocator

from selffl.data.audio import RATE_HZ
from selffl.data.devices import DEVICES
from selffl.data.federation import Federation
from selffl.data.spectrogram import HOP_SAMPLES, RANGE_DB, band_centres
from selffl.data.wakeword import Description, describe, wakeword
from selffl.data.wakeword_rows import STATES
from selffl.reports.figures import INK, style
from selffl.reports.shrinkage import check_ending

COLOURS = "magma"
MARKED_HZ = (100, 300, 1000, 3000)  # Hz


def chosen_rows(about: Description) -> npt.NDArray[np.int64]:
    """A test row with the wake word for each type and state, ``[5, 3]``; −1 where the paper has none.

    In all states of a type it is the same clip, its first; types share none.
    """
    rows = np.full((len(DEVICES), len(STATES)), -1)
    test = about.test
    for device in range(len(DEVICES)):
        positive = (test.device == device) & (test.label == 1)
        clip = test.clip[positive].min()
        for state in range(len(STATES)):
            here = np.flatnonzero(positive & (test.state == state) & (test.clip == clip))
            if len(here):
                rows[device, state] = here[0]
    return rows


def clips_plot(fed: Federation, about: Description, title: str) -> Canvas:
    """Types down, states across; each a spectrogram of 1.5 s with the wake word in it.

    Args:
        fed: the wake-word federation.
        about: what its rows are.
        title: of the picture.
    """
    rows = chosen_rows(about)
    with style():
        canvas = Canvas(figsize=(9.2, 9.6), layout=ConstrainedLayoutEngine(h_pad=0.05, w_pad=0.05))
        axes: Any = canvas.subplots(rows.shape[0], rows.shape[1], sharex=True, sharey=True, squeeze=False)
        pictures = []
        for position, row in np.ndenumerate(rows):
            axis = axes[position[0], position[1]]
            if row < 0:
                _draw_nothing(axis)
            else:
                decibels = (fed.test.array[row, 0].cpu().numpy() - 1) * (RANGE_DB / 2)
                pictures.append(_draw_spectrogram(axis, decibels))
        for state, name in enumerate(STATES):
            axes[0, state].set_title(name, fontsize=10, pad=18)
            axes[-1, state].set_xlabel("time (s)", fontsize=8.5)
        for axis, (name, device_type) in zip(axes[:, 0], DEVICES.items(), strict=True):
            axis.set_ylabel("frequency (kHz)", fontsize=8.5)
            axis.annotate(
                f"{name}: {device_type.title}", (0, 1), (0, 3), "axes fraction", "offset points", fontsize=7.8
            )
        bar = canvas.colorbar(pictures[0], ax=axes, location="bottom", aspect=60, shrink=0.5, pad=0.01)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, labelsize=8)
        bar.set_label("power in a band, dB below full scale", size=8.5)
        canvas.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return canvas


def _draw_spectrogram(axis: Axes, decibels: npt.NDArray[np.floating]) -> QuadMesh:
    """Bands of equal height, as a model sees them, marked with their frequencies."""
    num_bands, num_frames = decibels.shape
    seconds = (np.arange(num_frames + 1) - 0.5) * HOP_SAMPLES / RATE_HZ
    picture = axis.pcolormesh(
        seconds, np.arange(num_bands + 1) - 0.5, decibels, cmap=COLOURS, vmin=-RANGE_DB, vmax=0, rasterized=True
    )
    centres = band_centres().numpy()
    axis.set_yticks(np.interp(MARKED_HZ, centres, np.arange(num_bands)), [f"{mark / 1000:g}" for mark in MARKED_HZ])
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set_xticks([0, 0.5, 1.0, 1.5])
    axis.set_xlim(0, 1.5)
    axis.tick_params(length=2, labelsize=8)
    axis.grid(visible=False)
    axis.spines[["left", "bottom"]].set_visible(False)
    return picture


def _draw_nothing(axis: Axes) -> None:
    axis.text(0.5, 0.5, "NA", transform=axis.transAxes, ha="center", va="center", fontsize=11, color=INK)
    axis.grid(visible=False)
    axis.spines[["left", "bottom"]].set_visible(False)
    axis.tick_params(length=0)


def draw_spectrograms(path: Path | str, seed: int = 0, scale: float = 1 / 32) -> None:
    """The picture of the federation of a seed, in the format of the file's ending."""
    check_ending(Path(path))
    canvas = clips_plot(wakeword(seed, scale=scale), describe(seed, scale=scale), "What five devices hear of “alexa”")
    with style():
        canvas.savefig(path)
