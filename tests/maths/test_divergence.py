"""Slopes of the divergence between normal distributions, against torch's own divergence and autograd."""

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from selffl.maths.divergence import rho_of, slope_of_first, slope_of_second


def of_first(mean, rho, other_mean, other_rho):
    """The slope with respect to mean and rho."""
    deviation, other = torch.nn.functional.softplus(rho), torch.nn.functional.softplus(other_rho)
    by_mean, by_deviation = slope_of_first(mean, deviation, other_mean, 1 / other**2)
    return by_mean, by_deviation * torch.sigmoid(rho)


def test_slopes_are_those_of_the_divergence():
    generator = torch.Generator().manual_seed(2)
    values = [torch.randn(4, 7, generator=generator, dtype=torch.float64) * size for size in (2.0, 1.5, 2.0, 1.5)]
    leaves = [each.clone().requires_grad_() for each in values]
    mean, rho, other_mean, other_rho = leaves
    own, other = (Normal(at, torch.nn.functional.softplus(by)) for at, by in ((mean, rho), (other_mean, other_rho)))
    exact = torch.autograd.grad(kl_divergence(own, other).sum(), leaves)
    found = (*of_first(*values), *slope_of_second(*values))
    for mine, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_a_distribution_has_no_slope_towards_itself():
    mean, rho = torch.tensor([0.3, -4.0], dtype=torch.float64), torch.tensor([-9.0, 2.0], dtype=torch.float64)
    for slope in (of_first, slope_of_second):
        torch.testing.assert_close(torch.cat(slope(mean, rho, mean, rho)), torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("deviation", [1e-9, 0.079, 1.0, 800.0])
def test_a_deviation_comes_back(deviation):
    rho = torch.tensor(rho_of(deviation), dtype=torch.float64)
    assert torch.nn.functional.softplus(rho).item() == pytest.approx(deviation, rel=1e-12)
