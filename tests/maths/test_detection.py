"""False accepts at matched false rejects, against counting row by row."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import det_curve

from selffl.maths.detection import false_accepts, relative_false_accepts, trade_off


def counted(scores, labels, rejected, weight):
    """One score after the other is given up, the lowest first, the last perhaps in part."""
    rows = list(zip(scores, labels, weight, strict=True))
    positives = [
        (level, sum(w for s, y, w in rows if y and s == level)) for level in sorted({s for s, y, _ in rows if y})
    ]
    levels = [s for s, _ in positives] + [np.inf, np.inf]

    def accepted(level):
        return sum(w for s, y, w in rows if not y and s >= level)

    lost = 0
    for place, (_, w) in enumerate(positives):
        if lost + w > rejected:
            part = (rejected - lost) / w
            return (1 - part) * accepted(levels[place]) + part * accepted(levels[place + 1])
        lost += w
    return 0


rows = st.lists(
    st.tuples(st.integers(-4, 4), st.integers(-4, 4), st.booleans(), st.integers(0, 3)), min_size=2, max_size=40
).filter(lambda found: {y for _, _, y, _ in found} == {True, False})


def test_between_two_thresholds_false_accepts_lie_between_theirs():
    scores = torch.tensor([1.0, 2.0, 1.5, 0.5], dtype=torch.float64)
    labels = torch.tensor([1, 1, 0, 0])
    weight = torch.tensor([4.0, 1.0, 10.0, 10.0], dtype=torch.float64)
    # Nothing rejected: at or above 1.0; the first positive rejected, four times: at or above 2.0.
    found = [float(false_accepts(scores, labels, torch.tensor(float(k)), weight)) for k in range(6)]
    assert found == pytest.approx([10.0, 7.5, 5.0, 2.5, 0.0, 0.0])


@given(rows, st.integers(0, 20))
@settings(deadline=None)
def test_false_accepts_are_what_counting_gives(found, rejected):
    scores, _, labels, weight = (list(column) for column in zip(*found, strict=True))
    given = torch.tensor(scores, dtype=torch.float64), torch.tensor(labels).long(), torch.tensor(float(rejected))
    assert float(false_accepts(*given)) == pytest.approx(counted(scores, labels, rejected, [1] * len(scores)))
    weights = torch.tensor([weight, [1] * len(weight)], dtype=torch.float64)
    both = false_accepts(given[0], given[1], given[2].expand(2), weights)
    expected = [counted(scores, labels, rejected, w) for w in (weight, [1] * len(weight))]
    assert both.tolist() == pytest.approx(expected)


@given(rows, st.integers(-4, 4))
@settings(deadline=None)
def test_relative_false_accepts_by_hand(found, threshold):
    scores, reference, labels, _ = (list(column) for column in zip(*found, strict=True))
    ones = [1] * len(scores)
    rejected = sum(y and r < threshold for r, y in zip(reference, labels, strict=True))
    expected = (counted(scores, labels, rejected, ones) + 0.5) / (counted(reference, labels, rejected, ones) + 0.5)
    tensors = [torch.tensor(column, dtype=torch.float64) for column in (scores, reference, labels)]
    assert float(relative_false_accepts(*tensors, threshold)) == pytest.approx(expected)
    assert float(relative_false_accepts(tensors[1], tensors[1], tensors[2], threshold)) == 1.0


def test_a_monotone_change_of_scores_changes_nothing():
    rng = torch.Generator().manual_seed(0)
    scores, reference = torch.randn(2, 200, generator=rng, dtype=torch.float64)
    labels = (torch.rand(200, generator=rng) < 0.3).long()
    found = relative_false_accepts(scores, reference, labels, 0.2)
    assert torch.equal(relative_false_accepts(scores.exp() * 3 + 7, reference, labels, 0.2), found)


def test_the_trade_off_runs_through_scikit_learns_det_curve():
    rng = np.random.default_rng(1)
    labels = rng.random(300) < 0.4
    scores = rng.normal(size=300) + labels
    accepts, rejects, _ = det_curve(labels, scores)
    rates = torch.tensor([0.05, 0.1, 0.25, 0.5], dtype=torch.float64)
    found = trade_off(torch.tensor(scores), torch.tensor(labels).long(), rates)
    # det_curve leaves out points that are no better in either respect; the lowest accepts at that many rejects remain.
    expected = [accepts[rejects <= rate + 1e-9].min() for rate in rates.tolist()]
    assert found.tolist() == pytest.approx(expected)
