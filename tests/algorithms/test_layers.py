"""Heads and groups of parameters, with any axes before the last, against numpy."""

import numpy as np
import pytest
import torch

from selffl.algorithms.layers import Head, by_group, by_parameter, sizes_of


@pytest.mark.parametrize("axes", [(), (5,), (2, 5)], ids=["a model", "clients", "federations side by side"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_scores_are_those_of_a_linear_layer(axes, has_bias):
    head, rng = Head(4, 3, 2, has_bias), np.random.default_rng(0)
    params, features = rng.normal(size=(*axes, 20)), rng.normal(size=(*axes, 6, 2))
    weight = params[..., 4:10].reshape(*axes, 3, 2)
    expected = np.einsum("...bd,...kd->...bk", features, weight)
    if has_bias:
        expected = expected + params[..., None, 10:13]
    found = head.scores(torch.tensor(params), torch.tensor(features))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)
    assert (head.stop, head.layer.start, head.layer.stop) == ((13, 4, 13) if has_bias else (10, 4, 10))


@pytest.mark.parametrize("axes", [(), (5,), (2, 5)], ids=["a model", "clients", "federations side by side"])
def test_groups_are_parameters_behind_each_other(axes):
    sizes, rng = torch.tensor([2, 1, 4]).expand(*axes, 3), np.random.default_rng(0)
    values = rng.normal(size=(*axes, 7))
    sums = np.stack([values[..., :2].sum(-1), values[..., 2], values[..., 3:].sum(-1)], -1)
    assert sizes_of(sizes) == [2, 1, 4]
    np.testing.assert_allclose(by_group(torch.tensor(values), sizes_of(sizes)).numpy(), sums, rtol=1e-12)
    np.testing.assert_array_equal(by_parameter(torch.tensor(sums), sizes).numpy(), np.repeat(sums, [2, 1, 4], -1))
