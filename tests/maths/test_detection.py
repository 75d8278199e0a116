"""False accepts at matched false rejects, against counting row by row; the bootstrap against its definition."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import det_curve

from selffl.maths.detection import false_accepts, relative_false_accepts, resampled, trade_off


def counted(scores, labels, rejected, weight):
    """Every threshold there is, from above: the first with few enough rejects."""
    for threshold in [np.inf, *sorted({s for s, y in zip(scores, labels, strict=True) if y}, reverse=True)]:
        lost = sum(w for s, y, w in zip(scores, labels, weight, strict=True) if y and s < threshold)
        if lost <= rejected + 1e-9:
            return sum(w for s, y, w in zip(scores, labels, weight, strict=True) if not y and s >= threshold)
    raise AssertionError


rows = st.lists(
    st.tuples(st.integers(-4, 4), st.integers(-4, 4), st.booleans(), st.integers(0, 3)), min_size=2, max_size=40
).filter(lambda found: {y for _, _, y, _ in found} == {True, False})


@given(rows, st.integers(0, 20))
@settings(deadline=None)
def test_false_accepts_are_what_counting_gives(found, rejected):
    scores, _, labels, weight = (list(column) for column in zip(*found, strict=True))
    given = torch.tensor(scores, dtype=torch.float64), torch.tensor(labels).long(), torch.tensor(float(rejected))
    assert float(false_accepts(*given)) == counted(scores, labels, rejected, [1] * len(scores))
    weights = torch.tensor([weight, [1] * len(weight)], dtype=torch.float64)
    both = false_accepts(given[0], given[1], given[2].expand(2), weights)
    expected = [counted(scores, labels, rejected, w) for w in (weight, [1] * len(weight))]
    assert both.tolist() == expected


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


def test_bootstrap_samples_hold_whole_groups_as_many_of_each_kind_as_there_are():
    groups = torch.tensor([7, 7, 3, 9, 9, 9, 4, 4])
    labels = torch.tensor([1, 1, 1, 0, 0, 0, 0, 0])
    weight = resampled(groups, labels, 500, seed=0)
    assert weight.shape == (500, 8)
    for group in groups.unique():
        columns = weight[:, groups == group]
        assert (columns == columns[:, :1]).all()
    assert (weight[:, [0, 2]].sum(1) == 2).all()  # two positive groups drawn
    assert (weight[:, [3, 6]].sum(1) == 2).all()
    assert weight.mean().item() == pytest.approx(1.0, abs=0.1)
    assert torch.equal(weight, resampled(groups, labels, 500, seed=0))
    assert not torch.equal(weight, resampled(groups, labels, 500, seed=1))


def test_the_bootstrap_spread_is_that_of_new_samples():
    """Groups of four equal rows: rows drawn alone would show half the spread."""
    rng = torch.Generator().manual_seed(3)

    def sample():
        base = torch.randn(120, generator=rng, dtype=torch.float64)
        labels = (torch.arange(120) < 40).long()
        scores, reference = (base + labels + 0.5 * torch.randn(120, generator=rng) for _ in range(2))
        return [column.repeat_interleave(4) for column in (scores, reference, labels, torch.arange(120))]

    spread = torch.tensor([float(relative_false_accepts(*sample()[:3], 0.5).log()) for _ in range(300)]).std()
    scores, reference, labels, groups = sample()
    weight = resampled(groups, labels, 400, seed=1)
    found = relative_false_accepts(scores, reference, labels, 0.5, weight).log().std()
    assert found / spread == pytest.approx(1.0, abs=0.45)
