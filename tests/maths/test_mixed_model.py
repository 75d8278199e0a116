"""Restricted maximum likelihood from sums: against statsmodels, an analysis of variance and dense matrices."""

from dataclasses import replace

import numpy as np
import pytest
import statsmodels.api as sm
import torch

from selffl.maths import mixed_model
from selffl.maths.mixed_model import MixedSums, Moments, information_of, information_products_of, learn_covariance

ONE = torch.tensor(1.0, dtype=torch.float64)


def tensor(values):
    return torch.as_tensor(np.asarray(values), dtype=torch.float64)


def nothing(size):
    """No cohort has said anything yet."""
    number = 1 + size * (size + 1) // 2
    return Moments(torch.full((number,), torch.nan).double(), torch.full((number, number), torch.nan).double())


def sums_of(designs, outcomes, centre, covariance):
    """Of squared errors of linear models, by dense solves for each client."""
    parts = []
    for design, outcome in zip(designs, outcomes, strict=True):
        curvature = 2.0 * design.T @ design
        error = outcome - design @ centre
        steepness = np.linalg.solve(np.eye(len(curvature)) + curvature @ covariance, 2.0 * design.T @ error)
        deviation = covariance @ steepness
        value = np.square(error - design @ deviation).sum() + 0.5 * deviation @ steepness
        parts.append((steepness, curvature, 2.0 * value, float(len(outcome))))
    score, curvature, variation, number = (tensor(np.array(each)) for each in zip(*parts, strict=True))
    information = information_of(curvature, tensor(covariance).expand_as(curvature))
    products = information_products_of(information, len(covariance))
    each = score, score.unsqueeze(-1) * score.unsqueeze(-2), information, products, variation, number
    return MixedSums(*(part.sum(0) for part in each))


def learned(designs, outcomes, covariance, num_steps):
    """Centre, covariance, residual variance and the last step, in the outcome's unit."""
    covariance, centre = np.array(covariance), np.zeros(designs[0].shape[1])
    for _ in range(num_steps):
        sums = sums_of(designs, outcomes, centre, covariance)
        found = learn_covariance(sums, tensor(covariance), tensor(0.0 * centre), nothing(len(centre)), ONE, ONE, ONE)
        covariance, centre = found.covariance.numpy(), centre + found.shift.numpy()
    return centre, covariance * found.unit.item(), found.unit.item() / 2.0, found


@pytest.fixture
def no_shrinkage(monkeypatch):
    """Every covariance is what the likelihood says."""
    monkeypatch.setattr(mixed_model, "ALIKE_CLIENTS", 0.0)


def grouped(num_groups=40, rows=(2, 15), seed=3):
    """Rows whose intercept and slope vary together."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(*rows, num_groups) if rows[0] < rows[1] else np.full(num_groups, rows[0])
    designs = [np.column_stack([np.ones(size), rng.normal(size=size)]) for size in sizes]
    own = rng.multivariate_normal([2.0, -1.0], [[1.0, 0.5], [0.5, 0.6]], num_groups)
    return designs, [x @ b + 1.3 * rng.normal(size=len(x)) for x, b in zip(designs, own, strict=True)]


@pytest.mark.usefixtures("no_shrinkage")
@pytest.mark.parametrize("start", [1e-3, 0.1, 30.0])
def test_it_arrives_where_statsmodels_does(start):
    """Restricted likelihood of groups of unequal sizes, wherever it begins."""
    designs, outcomes = grouped()
    group, design = np.repeat(np.arange(len(designs)), list(map(len, designs))), np.vstack(designs)
    expected = sm.MixedLM(np.concatenate(outcomes), design, group, exog_re=design).fit(reml=True)
    centre, covariance, residual, _ = learned(designs, outcomes, start * np.eye(2), 12)
    np.testing.assert_allclose(centre, expected.fe_params, rtol=1e-4)
    np.testing.assert_allclose(covariance, expected.cov_re, rtol=1e-3)
    assert residual == pytest.approx(expected.scale, rel=1e-4)


@pytest.mark.usefixtures("no_shrinkage")
@pytest.mark.parametrize("start", [0.01, 1.0, 50.0])
def test_groups_of_one_size_are_an_analysis_of_variance(start):
    """The analysis of variance says what the likelihood does: mean squares between groups and within."""
    rng = np.random.default_rng(1)
    values = rng.normal(size=(30, 1)) + 0.5 * rng.normal(size=(30, 6))
    within = values.var(1, ddof=1).mean()
    between = values.mean(1).var(ddof=1) - within / 6
    designs = [np.ones((6, 1))] * 30
    centre, covariance, residual, _ = learned(designs, list(values), start * np.eye(1), 6)
    assert centre.item() == pytest.approx(values.mean())
    assert covariance.item() == pytest.approx(between, rel=1e-5)
    assert residual == pytest.approx(within, rel=1e-5)


def test_information_is_that_of_the_optimum_and_the_prior_together():
    rng = np.random.default_rng(0)
    curvature, covariance = (side @ side.mT for side in (tensor(rng.normal(size=(5, 4, 6))) for _ in range(2)))
    expected = torch.linalg.inv(covariance + torch.linalg.inv(curvature))
    torch.testing.assert_close(information_of(curvature, covariance), expected, rtol=1e-7, atol=1e-9)
    assert information_of(0.0 * curvature, covariance).abs().max() == 0.0


def test_products_of_information_act_on_every_block():
    """Of three scores with two coefficients each: the sum over pairs of blocks of W X W."""
    rng = np.random.default_rng(0)
    side = tensor(rng.normal(size=(6, 6)))
    information, size = side @ side.mT, 2
    basis = mixed_model.basis_of(size)
    torch.testing.assert_close(torch.einsum("vij,wij->vw", basis, basis), torch.eye(3, dtype=torch.float64))
    varies = tensor([[2.0, 0.7], [0.7, 1.0]])
    whole = information @ torch.block_diag(varies, varies, varies) @ information
    expected = sum(whole[place : place + 2, place : place + 2] for place in (0, 2, 4))
    found = information_products_of(information, size) @ torch.einsum("vij,ij->v", basis, varies)
    torch.testing.assert_close(torch.einsum("v,vij->ij", found, basis), expected)


def exact_sums(covariance, start, num_clients, size=2):
    """Of clients whose rows say exactly what is true of them, in number as in expectation: log-likelihoods."""
    curvature = 1e6 * torch.eye(size, dtype=torch.float64)
    information = information_of(curvature, start)
    products = num_clients * information @ (covariance + torch.linalg.inv(curvature)) @ information
    none = torch.tensor(0.0, dtype=torch.float64)
    return MixedSums(
        torch.zeros(size, dtype=torch.float64), products, num_clients * information,
        num_clients * information_products_of(information, size), none, none,
    )  # fmt: skip


def test_clients_whose_rows_say_all_are_taken_at_their_word():
    true, start = tensor([[1.0, 0.8], [0.8, 1.0]]), torch.eye(2, dtype=torch.float64)
    sums = exact_sums(true, start, num_clients=1e9)
    found = learn_covariance(sums, start, torch.zeros(2).double(), nothing(2), ONE, ONE, ONE)
    torch.testing.assert_close(found.covariance, true, rtol=1e-5, atol=0.0)
    half = learn_covariance(sums, start, torch.zeros(2).double(), nothing(2), ONE, ONE, ONE, part=0.5).covariance
    torch.testing.assert_close(half @ half, true, rtol=1e-5, atol=1e-5)  # on the logarithm, from one


@pytest.mark.parametrize("wanted", [[[1.0, 0.9], [0.9, 0.3]], [[1.0, 0.2], [0.2, -0.1]], [[0.8, 0.1], [0.1, 0.5]]])
def test_where_clients_do_not_vary_a_covariance_is_positive_and_near(wanted):
    """In one direction these clients vary by less than nothing: it is held, and the others are found anew beside it."""
    start, basis = torch.eye(2, dtype=torch.float64), mixed_model.basis_of(2)
    values, axes = torch.linalg.eigh(tensor(wanted))
    clamped = (axes * values.clamp(min=mixed_model.LEAST_CHANGE)) @ axes.mT
    side = tensor(np.random.default_rng(2).normal(size=(3, 3)))
    precision = side @ side.mT + torch.eye(3, dtype=torch.float64)

    def distance(covariance):
        off = torch.einsum("vij,ij->v", basis, covariance - tensor(wanted))
        return (off @ precision @ off).item()

    found = mixed_model._step_towards(start, tensor(wanted), precision, 1.0)
    assert torch.linalg.eigvalsh(found).min() >= mixed_model.LEAST_CHANGE * 0.999
    assert distance(found) <= distance(clamped) * (0.95 if values.min() < 0 else 1.0) + 1e-12
    # Where all directions count alike there is nothing to find anew.
    plain = mixed_model._step_towards(start, tensor(wanted), torch.eye(3, dtype=torch.float64), 1.0)
    torch.testing.assert_close(plain, clamped)


def test_variances_go_towards_their_mean_as_far_as_clients_do_not_tell_them_apart():
    start = torch.eye(2, dtype=torch.float64)
    by_number = []
    for number in (0.1, 4.0, 4e6):
        sums = exact_sums(tensor([[4.0, 0.0], [0.0, 0.25]]), start, number)
        by_number.append(
            learn_covariance(sums, start, torch.zeros(2).double(), nothing(2), ONE, 1e-9 * ONE, ONE).covariance
        )
    ratios = [(found[0, 0] / found[1, 1]).item() for found in by_number]
    assert 1.0 < ratios[0] < ratios[1] < ratios[2]
    assert ratios[2] == pytest.approx(16.0, rel=1e-3)


def test_a_coefficient_of_which_nobody_tells_varies_as_the_others_do():
    sums = exact_sums(3.0 * torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64), 50.0)
    keep = tensor([[1.0, 0.0], [0.0, 0.0]])
    information = keep @ sums.information @ keep
    sums = MixedSums(
        sums.score, keep @ sums.score_products @ keep, information,
        50.0 * information_products_of(information / 50.0, 2), sums.variation, sums.num_errors,
    )  # fmt: skip
    found = learn_covariance(
        sums, torch.eye(2, dtype=torch.float64), torch.zeros(2).double(), nothing(2), ONE, 1e-9 * ONE, ONE
    ).covariance
    torch.testing.assert_close(found.diagonal(), tensor([3.0, 3.0]), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize(("sampled", "off", "moves"), [(1.0, 0.2, 1.0), (0.1, 0.2, 0.0), (0.1, 30.0, 0.99)])
def test_the_centre_stays_where_a_sample_is_off_it_by_chance(sampled, off, moves):
    """Of a sample it moves by what is beyond chance; of all clients, to where they have it."""
    start = torch.eye(2, dtype=torch.float64)
    sums = exact_sums(start, start, 20.0)
    score = sums.information @ tensor([off, 0.0])
    sums = MixedSums(
        score, sums.score_products + score.outer(score) / 20.0, sums.information, sums.information_products,
        *[torch.tensor(1e9, dtype=torch.float64)] * 2,  # squared errors, whose unit is 1
    )  # fmt: skip
    found = learn_covariance(sums, start, torch.zeros(2).double(), nothing(2), ONE, sampled * ONE, ONE)
    assert found.shift[0].item() == pytest.approx(moves * off, rel=0.01, abs=1e-9)
    if sampled == 1.0:  # then what was off is no difference between clients
        torch.testing.assert_close(found.covariance, start * 21.0 / 20.0, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("no_shrinkage")
def test_the_standard_error_is_that_of_repeated_draws():
    found = []
    for seed in range(150):
        rng = np.random.default_rng(seed)
        designs = [np.ones((size, 1)) for size in rng.integers(2, 12, 40)]
        outcomes = [0.7 * rng.normal() + rng.normal(size=len(design)) for design in designs]
        _, covariance, residual, last = learned(designs, outcomes, np.eye(1), 5)
        found.append((covariance.item() / (2.0 * residual), last.error.item()))
    ratios, errors = np.array(found).T
    assert np.sqrt(np.square(errors).mean()) == pytest.approx(ratios.std(), rel=0.2)


def test_where_nothing_can_be_known_nothing_is_said():
    """A client with one row: as many coefficients as errors, and no other client."""
    sums = sums_of([np.array([[1.0, 2.0]])], [np.array([1.0])], np.zeros(2), np.eye(2))
    found = learn_covariance(
        sums, torch.eye(2, dtype=torch.float64), torch.zeros(2).double(), nothing(2), ONE, ONE, ONE
    )
    assert not found.covariance.isinf().any()
    empty = MixedSums(*(0.0 * part for part in vars(sums).values()))
    found = learn_covariance(
        empty, torch.eye(2, dtype=torch.float64), torch.zeros(2).double(), nothing(2), ONE, ONE, ONE
    )
    assert found.covariance.isnan().all() or found.covariance.isfinite().all()


def test_the_shared_model_is_one_client_more_where_classes_are_apart():
    """Twenty clients whose rows say all would have the centre elsewhere: it goes 20/21 of the way, and stays there."""
    start = torch.eye(2, dtype=torch.float64)
    sums = exact_sums(start, start, 20.0)
    centre = torch.zeros(2).double()
    for _ in range(3):
        away = tensor([1.0, 0.0]) - centre
        pulled = replace(sums, score=sums.information @ away)
        centre = centre + learn_covariance(pulled, start, centre, nothing(2), ONE, ONE, ONE).shift
    torch.testing.assert_close(centre, tensor([20.0 / 21.0, 0.0]), rtol=1e-4, atol=1e-6)


def test_a_variance_that_cannot_be_told_from_none_holds_harder():
    covariance, errors = tensor([[4.0, 1.2], [1.2, 1.0]]), tensor([1e-6, 1.0])
    found = mixed_model.shrink_to_none(covariance, errors)
    expected = tensor([[4.0, 1.2 * 0.5**0.5], [1.2 * 0.5**0.5, 0.5]])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(mixed_model.shrink_to_none(covariance, 0.0 * errors), covariance)


@pytest.mark.usefixtures("no_shrinkage")
def test_errors_of_single_variances_are_those_of_exact_observations():
    """Of n clients whose rows say all, a variance v has the standard error v √(2/n)."""
    start = tensor([[2.0, 0.3], [0.3, 0.5]])
    found = learn_covariance(exact_sums(start, start, 50.0), start, tensor([0.0, 0.0]), nothing(2), ONE, ONE, ONE)
    torch.testing.assert_close(found.errors, start.diagonal() * (2.0 / 50.0) ** 0.5, rtol=1e-3, atol=0.0)
