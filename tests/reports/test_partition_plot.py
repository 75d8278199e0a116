"""The picture of clients and classes: every number is where it belongs, at all sizes."""

import numpy as np
import pytest
from matplotlib.colors import to_rgba

from selffl.data import load
from selffl.errors import ConfigError
from selffl.reports.partition import COLOURS, draw_partition, partition_plot


def random_counts(num_clients, num_classes=10, seed=0):
    rng = np.random.default_rng(seed)
    counts = np.ceil(rng.lognormal(2, 1.5, (num_clients, num_classes))).astype(int)
    counts[rng.random(counts.shape) < 0.5] = 0
    counts[:, 0] += 1  # nobody has nothing
    return counts


def strips_of(canvas):
    """Sizes of clients and drawn counts of each strip, read off the picture: bars, then the coloured cells."""
    found = []
    pairs = [axis for axis in canvas.axes if axis.get_ylabel() in ("rows", "class")]
    for above, heat in zip(pairs[::2], pairs[1::2], strict=True):
        sizes = [bar.get_height() for bar in above.patches]
        cells = np.ma.filled(heat.collections[-1].get_array(), np.nan)
        empty = np.ma.filled(heat.collections[0].get_array(), np.nan)
        together = np.where(np.isnan(cells), empty, cells)
        together = together[~np.isnan(together).all(1)][:, ~np.isnan(together).all(0)]  # without the gaps
        found.append((sizes, together.T))
    return found


@pytest.mark.parametrize(
    ("num_clients", "num_strips"),
    [(1, 1), (20, 1), (250, 1), (251, 2), pytest.param(1000, 4, marks=pytest.mark.slow)],
)
def test_every_count_is_drawn_once_largest_client_first(num_clients, num_strips):
    counts = random_counts(num_clients)
    strips = strips_of(partition_plot(counts, "Rows"))
    assert len(strips) == num_strips
    drawn = np.concatenate([cells for _, cells in strips])
    sizes = np.concatenate([sizes for sizes, _ in strips])
    assert sizes.tolist() == sorted(counts.sum(1).tolist(), reverse=True)
    assert drawn.sum(1).tolist() == sizes.tolist()
    assert sorted(map(tuple, drawn.astype(int).tolist())) == sorted(map(tuple, counts.tolist()))


def test_more_than_a_thousand_are_an_even_selection_and_the_title_says_so():
    counts = random_counts(3000)
    canvas = partition_plot(counts, "Rows")
    assert canvas.get_suptitle() == "Rows (1,000 of 3,000 clients, evenly chosen by size)"
    sizes = np.concatenate([sizes for sizes, _ in strips_of(canvas)])
    ordered = np.sort(counts.sum(1))[::-1]
    assert (sizes[0], sizes[-1]) == (ordered[0], ordered[-1])
    assert np.median(sizes) == pytest.approx(np.median(ordered), rel=0.05)


def test_few_clients_have_their_ids_and_numbers():
    counts = np.array([[5, 0, 70], [400, 30, 0]])
    canvas = partition_plot(counts, "Rows", ["ward $1", "ward 2"], ["a", "b", "c"])
    heat = next(axis for axis in canvas.axes if axis.get_ylabel() == "class")
    assert [label.get_text() for label in heat.get_xticklabels()] == ["ward 2", "ward $1"]
    assert [label.get_text() for label in heat.get_yticklabels()] == ["a", "b", "c"]
    placed = {(*map(int, text.get_position()), text.get_text()) for text in heat.texts}
    assert placed == {(0, 0, "400"), (0, 1, "30"), (1, 0, "5"), (1, 2, "70")}


def test_more_rows_are_darker_on_a_logarithmic_scale():
    canvas = partition_plot(np.array([[1, 10, 100]]), "Rows")
    mesh = next(axis for axis in canvas.axes if axis.get_ylabel() == "class").collections[-1]
    for count, share in ((1, 0.0), (10, 0.5), (100, 1.0)):
        assert mesh.to_rgba(count) == pytest.approx(COLOURS(share))
    light = [sum(to_rgba(COLOURS(share))[:3]) for share in np.linspace(0, 1, 20)]
    assert light == sorted(light, reverse=True)


@pytest.mark.parametrize(
    "counts", [np.ones((30, 1), int), np.full((3, 62), 7), np.eye(10, dtype=int), np.array([[0, 0], [3, 0]])]
)
def test_odd_federations_can_be_drawn(counts, tmp_path):
    partition_plot(counts, "Rows").savefig(tmp_path / "a.png")


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_federation_is_drawn_into_a_file(tmp_path, ending):
    draw_partition(load("digits"), tmp_path / f"a.{ending}", "digits")
    assert (tmp_path / f"a.{ending}").stat().st_size > 5_000


def test_another_ending_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be drawn"):
        draw_partition(load("digits"), tmp_path / "a.jpeg", "digits")
