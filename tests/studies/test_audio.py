"""The wake-word studies: bootstrap, tables and verdicts, on made-up scores; and the whole on made-up clips."""

import pytest
import torch

from selffl.maths.detection import relative_false_accepts
from selffl.studies.detection import resampled


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
