"""The picture of what the devices hear."""

import numpy as np
import pytest
import torch

from selffl.data.federation import Federation, Rows
from selffl.data.wakeword import Description, RowTable
from selffl.errors import ConfigError
from selffl.reports import spectrograms as module


@pytest.fixture
def made_up():
    """Three renderings of two positive clips and a negative one for each type and state there is."""
    lines = [
        (device, state, clip, int(clip % 3 < 2))
        for device in range(5)
        for state in range(3)
        if state < 2 or device in (1, 3, 4)
        for clip in range(3 * device, 3 * device + 3)
        for _ in range(3)
    ]
    lines = np.random.default_rng(0).permutation(lines)
    table = RowTable(*lines.T)
    features = torch.from_numpy(np.random.default_rng(1).uniform(-1, 1, (len(lines), 1, 40, 76)).astype(np.float32))
    rows = Rows(features, torch.from_numpy(table.label.copy()), torch.tensor([0, len(lines)]))
    return Federation(["all"], rows, rows), Description(table, table)


def test_each_cell_shows_the_first_wake_word_of_its_type(made_up):
    _, about = made_up
    rows = module.chosen_rows(about)
    assert (rows < 0).tolist() == [[False, False, device in (0, 2)] for device in range(5)]
    for (device, state), row in np.ndenumerate(rows):
        if row >= 0:
            found = (about.test.device[row], about.test.state[row], about.test.clip[row], about.test.label[row])
            assert found == (device, state, 3 * device, 1)


def test_the_picture_shows_those_rows_in_decibels(made_up):
    fed, about = made_up
    canvas = module.clips_plot(fed, about, "Heard")
    axes = np.array(canvas.axes[:15]).reshape(5, 3)
    rows = module.chosen_rows(about)
    for place, row in np.ndenumerate(rows):
        axis = axes[place]
        if row < 0:
            assert [text.get_text() for text in axis.texts] == ["NA"]
            assert not axis.collections
        else:
            drawn = axis.collections[0].get_array()
            expected = (fed.test.features[row, 0].numpy() - 1) * 40  # −80 dB to 0
            np.testing.assert_allclose(drawn, expected, atol=1e-4)
            assert axis.collections[0].get_clim() == (-80, 0)
    assert [axis.get_title(loc="left") for axis in axes[0]] == ["normal", "playback", "alarm"]
    assert {axis.get_xlabel() for axis in axes[-1]} == {"time (s)"}
    assert {axis.get_ylabel() for axis in axes[:, 0]} == {"frequency (kHz)"}
    assert [label.get_text() for label in axes[0, 0].get_yticklabels()] == ["0.1", "0.3", "1", "3"]
    assert axes[0, 0].texts[0].get_text().startswith("A: ")


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_it_is_written(made_up, tmp_path, monkeypatch, ending):
    fed, about = made_up
    monkeypatch.setattr(module, "wakeword", lambda *_, **__: fed)
    monkeypatch.setattr(module, "describe", lambda *_, **__: about)
    path = tmp_path / f"clips.{ending}"
    module.draw_spectrograms(path)
    assert path.stat().st_size > 10_000
    with pytest.raises(ConfigError, match=r"cannot be drawn"):
        module.draw_spectrograms(tmp_path / "clips.txt")
