"""The variance between clients from two halves of their rows: expectations against dense matrices, and simulations."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from selffl.maths.split_half import (
    HalvesOfClients,
    centred_products,
    common_share,
    common_square,
    ratio_error,
    ratio_interval,
    spread_products,
)


def spd(rng, size):
    root = rng.normal(size=(size, size + 2))
    return root @ root.T / size


def drawn_halves(rng, *, inter, precision, shares, curvature, size, number):
    """Deviations [number, 2, P] of exact posterior modes, and gradients of both halves' rows at both models.

    A half of N_h rows with mean curvature H has its optimum at delta + e_h, e_h ~ N(0, (N_h H)^-1).  Variance and
    precision are one number, or one for each parameter.
    """
    total, root = sum(shares), np.linalg.cholesky(np.linalg.inv(curvature))
    shrink = np.linalg.solve(curvature + np.diag(np.broadcast_to(precision, size)) / total, curvature)
    own = np.sqrt(inter) * rng.normal(size=(number, size))
    optima = np.stack([own + rng.normal(size=(number, size)) @ root.T / np.sqrt(n) for n in shares], axis=1)
    deviations = optima @ shrink.T
    # [number, whose rows, whose model, P]
    gradients = (deviations[:, None] - optima[:, :, None]) @ curvature
    return torch.from_numpy(deviations), torch.from_numpy(gradients), shrink


def slope_changes(found, gradients):
    """By single parameters [..., 2, 3, P]: how much steeper on rows of each half at the first's model.

    Of gradients [..., 2, 2, P], first on whose rows, then at whose model, along d_1, d_2 and (d_1 - d_2)/2.
    """
    first, second = found.deviations.unbind(-2)
    change = gradients[..., 0, :] - gradients[..., 1, :]
    return torch.stack([change * along.unsqueeze(-2) for along in (first, second, (first - second) / 2)], dim=-2)


@pytest.mark.parametrize("precision", [0.5, 20.0, 1000.0])
@pytest.mark.parametrize("shares", [(30.0, 30.0), (21.0, 20.0), (2.0, 1.0)])
def test_both_traces_are_those_of_the_dense_matrices(precision, shares):
    """E d_1·d_2 = σ_0² tr S², the disagreement tr S², and what is undecided tr S(1 − S)."""
    rng = np.random.default_rng(3)
    curvature, inter = spd(rng, 4), 0.2
    deviations, gradients, shrink = drawn_halves(
        rng, inter=inter, precision=precision, shares=shares, curvature=curvature, size=4, number=50_000
    )
    found = HalvesOfClients(deviations, torch.tensor(shares, dtype=torch.float64).expand(len(deviations), 2))
    traces = np.trace(shrink @ shrink), np.trace(shrink @ (np.eye(4) - shrink))
    agreement = found.mean.square().sum(-1) - found.half_difference.square().sum(-1)
    torch.testing.assert_close(agreement, deviations.prod(-2).sum(-1), rtol=1e-9, atol=1e-12)
    numbers = [
        (inter * traces[0], agreement),
        (traces[0], found.disagreement(slope_changes(found, gradients)).sum(-1)),
        (traces[0], found.squared_disagreement(slope_changes(found, gradients)).sum(-1)),
        (traces[1], found.undecided(precision * found.half_difference.square().sum(-1))),
    ]
    for expected, values in numbers:
        error = values.std().item() / len(values) ** 0.5
        assert values.mean().item() == pytest.approx(expected, abs=4 * error)
        assert error < 0.04 * expected  # so that this can fail


def test_where_curvatures_of_halves_differ_the_squared_form_stays_above_zero():
    """Clients differ by far more than their rows' noise, and a half learns fastest what its own rows curve most."""
    rng, number, size, shares = np.random.default_rng(8), 20_000, 3, (10.0, 10.0)
    rows = rng.standard_normal((number, 2, 10, size))
    curvature = np.swapaxes(rows, -1, -2) @ rows / 10.0
    delta = 3.0 * rng.standard_normal((number, 1, size, 1))
    optima = delta + np.linalg.solve(
        curvature, np.swapaxes(rows, -1, -2) @ rng.standard_normal((number, 2, 10, 1)) / 10
    )
    deviations = np.linalg.solve(curvature + 0.5 * np.eye(size), curvature @ optima)[..., 0]
    gradients = np.stack([
        np.stack([(curvature[:, a] @ (deviations[:, b, :, None] - optima[:, a]))[..., 0] for b in (0, 1)], axis=1)
        for a in (0, 1)
    ], axis=1)  # fmt: skip
    found = HalvesOfClients(torch.from_numpy(deviations), torch.tensor(shares, dtype=torch.float64).expand(number, 2))
    assert found.disagreement(slope_changes(found, torch.from_numpy(gradients))).sum(-1).mean() < -1.0
    assert 1.0 < found.squared_disagreement(slope_changes(found, torch.from_numpy(gradients))).sum(-1).mean() < 20.0


GROUPS = [0, 0, 0, 1, 1]  # of each parameter
VARIANCES = np.array([0.02, 0.5])


@pytest.mark.parametrize("shares", [(10.0, 10.0), (8.0, 5.0)])
def test_sums_over_a_group_of_parameters_have_the_ratio_of_its_variance(shares):
    """Where the prior's precision is one over them.  Both sums are those of the dense matrices, parameter by parameter:
    diag S² Σ and diag S²; what is undecided is tr S(1 − S) still."""
    rng = np.random.default_rng(6)
    inter = VARIANCES[GROUPS]
    deviations, gradients, shrink = drawn_halves(
        rng, inter=inter, precision=1.0 / inter, shares=shares, curvature=spd(rng, 5), size=5, number=200_000
    )
    found = HalvesOfClients(deviations, torch.tensor(shares, dtype=torch.float64).expand(len(deviations), 2))
    agreement = found.mean.square() - found.half_difference.square()
    disagreement = found.disagreement(slope_changes(found, gradients))
    square = np.diag(shrink @ shrink)
    held = (found.half_difference.square() / torch.from_numpy(inter)).sum(-1, keepdim=True)
    undecided = np.trace(shrink @ (np.eye(5) - shrink))
    numbers = [(agreement, square * inter), (disagreement, square), (found.undecided(held.squeeze(-1)), undecided)]
    for values, expected in numbers:
        error = values.std(0).numpy() / len(values) ** 0.5
        assert (np.abs(values.mean(0).numpy() - expected) < 4 * error).all()
    group = torch.tensor(GROUPS)
    sums = [torch.zeros(2, dtype=torch.float64).index_add(0, group, each.sum(0)) for each in (agreement, disagreement)]
    assert (sums[0] / sums[1]).tolist() == pytest.approx(VARIANCES, rel=0.05)
    wrong = torch.tensor([0, 1, 0, 1, 0])
    mixed = [torch.zeros(2, dtype=torch.float64).index_add(0, wrong, each.sum(0)) for each in (agreement, disagreement)]
    assert (mixed[0] / mixed[1] - torch.from_numpy(VARIANCES)).abs().max() > 0.1


@pytest.mark.parametrize("stopped", [1, 5, 100])
def test_the_ratio_is_the_variance_however_far_training_got(stopped):
    """Gradient descent from the prior mean for a few steps is as good as the mode: S is a function of H alone."""
    rng, inter, rows, rate = np.random.default_rng(4), 0.3, 25.0, 0.2
    curvature = spd(rng, 5)
    own = np.sqrt(inter) * rng.normal(size=(60_000, 5))
    root = np.linalg.cholesky(np.linalg.inv(rows * curvature))
    optima = np.stack([own + rng.normal(size=own.shape) @ root.T for _ in range(2)], axis=1)
    models = np.zeros_like(optima)
    for _ in range(stopped):
        models = models - rate * (models - optima) @ curvature
    gradients = torch.from_numpy((models[:, None] - optima[:, :, None]) @ curvature)
    found = HalvesOfClients(torch.from_numpy(models), torch.full((len(own), 2), rows, dtype=torch.float64))
    agreement = torch.from_numpy(models).prod(-2).sum()
    disagreement = found.disagreement(slope_changes(found, gradients)).sum()
    assert (agreement / disagreement).item() == pytest.approx(inter, rel=0.03)


def mode(x: np.ndarray, y: np.ndarray, precision: float) -> np.ndarray:
    return np.linalg.solve(x.T @ x + precision * np.eye(x.shape[1]), x.T @ y)


@pytest.mark.slow
@pytest.mark.parametrize("inter", [0.0, 0.06, 0.3])
def test_groups_with_about_as_many_rows_as_coefficients(inter):
    """Halves of a few rows have curvatures of their own, each its own design: the ratio stays near the truth."""
    rng, num_groups = np.random.default_rng(5), 2000
    agreed = disagreed = 0.0
    for count in rng.integers(2, 12, num_groups):
        x = np.column_stack([np.ones(count), rng.normal(size=count)])
        y = x @ (np.sqrt(inter) * rng.normal(size=2)) + rng.normal(size=count)
        cut = (count + 1) // 2
        parts, precision = [(x[:cut], y[:cut]), (x[cut:], y[cut:])], 1.0 / max(inter, 0.02)
        models = [mode(own, values, precision * len(values) / count) for own, values in parts]
        gradients = [[own.T @ (own @ model - values) / len(values) for model in models] for own, values in parts]
        found = HalvesOfClients(
            torch.from_numpy(np.stack(models)), torch.tensor([cut, count - cut], dtype=torch.float64)
        )
        agreed += float(models[0] @ models[1])
        disagreed += found.disagreement(slope_changes(found, torch.from_numpy(np.array(gradients)))).sum().item()
    assert agreed / disagreed == pytest.approx(inter, rel=0.15, abs=0.006)


def test_what_all_clients_have_in_common_is_found_from_pairs_of_clients():
    deviations = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.7
    pairs = [deviations[i] @ deviations[j] for i in range(7) for j in range(7) if i != j]
    expected = torch.stack(pairs).mean()

    def found(some: Tensor) -> Tensor:
        number = torch.tensor(float(len(some)), dtype=torch.float64)
        return common_square(some.sum(0).square().sum(), some.square().sum(), number)

    torch.testing.assert_close(found(deviations), expected, rtol=1e-12, atol=0)
    assert found(deviations[:1]) == 0.0
    assert found(deviations[:0]) == 0.0


@pytest.mark.parametrize("common", [0.0, 0.1, 1.0])
def test_so_much_of_the_mean_as_is_common_is_near_the_best_that_can_be_known(common):
    """Mean squared error of three estimates of what all clients deviate by, over many cohorts of nine."""
    generator = np.random.default_rng(0)
    number, size, errors = 9, 40, []
    for _ in range(400):
        truth = common * generator.standard_normal(size)
        deviations = torch.from_numpy(truth + generator.standard_normal((number, size)))
        mean, count = deviations.mean(0), torch.tensor(float(number), dtype=torch.float64)
        found = common_square(deviations.sum(0).square().sum(), deviations.square().sum(), count)
        share = float(common_share(mean.square().sum(), found))
        assert 0.0 <= share <= 1.0
        errors.append([float((part * mean - torch.from_numpy(truth)).square().mean()) for part in (share, 0.0, 1.0)])
    shrunk, none, whole = np.mean(errors, 0)
    assert shrunk < whole
    assert shrunk < none or common < 1.0
    # What the best linear estimate reaches that knows how large the common part is.
    best = common**2 * (1 / number) / (common**2 + 1 / number)
    assert shrunk < best + 0.2 / number


def test_of_nothing_nothing_is_common():
    zero = torch.zeros(2, dtype=torch.float64)
    assert common_share(zero, zero).tolist() == [0.0, 0.0]
    assert common_share(zero + 1.0, zero - 0.5).tolist() == [0.0, 0.0]


def test_an_empty_half_decides_nothing():
    found = HalvesOfClients(torch.ones(1, 2, 3), torch.tensor([[1.0, 0.0]]))
    assert found.undecided(torch.tensor([10.0])) == 0.0


def sums_of_clients(number, seed=8):
    """What halves of clients agree and disagree on: both are larger where a client has more rows."""
    rng = np.random.default_rng(seed)
    size = rng.lognormal(0.0, 0.7, number)
    return 0.06 * size * rng.chisquare(2, number) + 0.03 * rng.normal(size=number), size + 0.4 * rng.normal(size=number)


def error_of(agreement, disagreement):
    a, b = torch.from_numpy(agreement), torch.from_numpy(disagreement)
    number = torch.tensor(float(len(a)), dtype=torch.float64)
    return ratio_error(a.mean(), b.mean(), spread_products(a, b).mean(0), number).item()


def test_the_error_of_the_ratio_is_that_of_a_bootstrap_and_a_jackknife_over_clients():
    agreement, disagreement = sums_of_clients(400)
    drawn = np.random.default_rng(2).integers(0, 400, (4000, 400))
    bootstrap = (agreement[drawn].mean(1) / disagreement[drawn].mean(1)).std()
    without = (agreement.sum() - agreement) / (disagreement.sum() - disagreement)
    jackknife = math.sqrt(399.0 / 400.0 * ((without - without.mean()) ** 2).sum())
    found = error_of(agreement, disagreement)
    assert found == pytest.approx(bootstrap, rel=0.05)
    assert found == pytest.approx(jackknife, rel=0.01)
    # It matters that both go together: as if what halves disagree on were known it is another.
    assert agreement.std() / disagreement.mean() / 20.0 > 1.1 * found


def test_of_a_single_client_and_where_halves_do_not_disagree_no_error_is_known():
    assert math.isnan(error_of(np.array([0.1]), np.array([1.0])))
    one = torch.tensor(1.0, dtype=torch.float64)  # the same client, round after round, not always alike
    assert ratio_error(0.1 * one, one, torch.tensor([0.5, 0.1, 1.0], dtype=torch.float64), one).isnan()
    assert math.isnan(error_of(np.array([0.1, 0.2]), np.array([1.0, -1.5])))
    assert error_of(np.array([0.1, 0.2]), np.array([1.0, 2.0])) == pytest.approx(0.0, abs=1e-7)


def test_products_less_what_is_common_are_those_of_clients_less_it():
    a, b = (torch.from_numpy(each) for each in sums_of_clients(30))
    common = torch.tensor(0.7, dtype=torch.float64)
    found = centred_products(spread_products(a + common, b).mean(0), (a + common).mean(), b.mean(), common)
    torch.testing.assert_close(found, spread_products(a, b).mean(0), rtol=1e-12, atol=1e-12)


def test_ends_of_the_interval_by_hand():
    """Above by the logarithm while 0 is outside; below as it comes, 0 at least; no end jumps."""
    ratio = torch.tensor([0.06, 0.06, 0.0, -0.02, -0.02, 0.06], dtype=torch.float64)
    error = torch.tensor([0.01, 0.05, 0.05, 0.05, 0.001, math.nan], dtype=torch.float64)
    low, high = (end.tolist() for end in ratio_interval(ratio, error))
    assert low[:5] == pytest.approx([0.0404, 0.0, 0.0, 0.0, 0.0], abs=1e-5)
    # 0.06 exp(0.0196/0.06); 0.06 + 1.71828 · 0.098, 1.71828 · 0.098, less 0.02; not below 0.
    assert high[:5] == pytest.approx([0.083184, 0.228390, 0.168390, 0.148390, 0.0], abs=1e-5)
    assert math.isnan(low[5])
    assert math.isnan(high[5])
    near = 0.06 / 1.959964 * torch.tensor([1 - 1e-9, 1 + 1e-9], dtype=torch.float64)
    for end in ratio_interval(ratio[:1].expand(2), near):
        assert end[0].item() == pytest.approx(end[1].item(), abs=1e-8)


@pytest.mark.parametrize(("inter", "least"), [(0.0, 0.96), (0.06, 0.92), (0.3, 0.92), (2.0, 0.92)])
def test_the_interval_holds_the_truth_in_about_as_many_federations_as_it_says(inter, least):
    """600 federations of 60 clients with five rows, two parameters, at their posterior modes."""
    rng, shares = np.random.default_rng(12), (3.0, 2.0)
    deviations, gradients, _ = drawn_halves(
        rng, inter=inter, precision=10.0, shares=shares, curvature=spd(rng, 2), size=2, number=600 * 60
    )
    found = HalvesOfClients(deviations, torch.tensor(shares, dtype=torch.float64).expand(len(deviations), 2))
    a = deviations.prod(-2).sum(-1).reshape(600, 60)
    b = found.disagreement(slope_changes(found, gradients)).sum(-1).reshape(600, 60)
    number = torch.full((600,), 60.0, dtype=torch.float64)
    error = ratio_error(a.mean(-1), b.mean(-1), spread_products(a, b).mean(-2), number)
    low, high = ratio_interval(a.mean(-1) / b.mean(-1), error)
    assert least < ((low <= inter) & (inter <= high)).double().mean().item() < (1.01 if inter == 0 else 0.99)


def test_federations_side_by_side_are_each_as_alone():
    """As many federations as clients, and as many clients as there are halves: no axis is taken for another."""
    generator = torch.Generator().manual_seed(5)
    deviations, gradients = (torch.randn(2, 2, 3, *size, generator=generator) for size in ((2, 4), (2, 2, 4)))
    num_terms = torch.randint(1, 9, (2, 2, 3, 2), generator=generator).float()
    both = HalvesOfClients(deviations, num_terms)
    for place in np.ndindex(2, 2, 3):
        alone = HalvesOfClients(deviations[place], num_terms[place])
        changes = slope_changes(both, gradients), slope_changes(alone, gradients[place])
        for found, expected in (
            (both.mean, alone.mean),
            (both.half_difference, alone.half_difference),
            (both.disagreement(changes[0]), alone.disagreement(changes[1])),
            (both.squared_disagreement(changes[0]), alone.squared_disagreement(changes[1])),
            (both.undecided(num_terms[..., 0]), alone.undecided(num_terms[(*place, 0)])),
        ):
            torch.testing.assert_close(found[place], expected)
