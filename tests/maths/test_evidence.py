"""How many parameters rows decide: against dense matrices, and what must hold whatever the rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selffl.maths.evidence import effective_parameters, num_determined

SIZES = st.integers(1, 9)
SEEDS = st.integers(0, 10_000)
PRECISIONS = st.floats(-6, 6).map(lambda power: 10.0**power)
quickly = settings(deadline=None, max_examples=60)


def draw(seed, num_rows, num_params, *clients, dtype=torch.float64):
    """Rows of any size, some of them nearly alike."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(*clients, num_rows, num_params)) * 10.0 ** rng.uniform(-2, 2, (*clients, num_rows, 1))
    return torch.tensor(rows, dtype=dtype)


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def dense(rows, precision):
    """tr H (H + c)^-1 by a dense solve."""
    matrix = rows.numpy().T @ rows.numpy()
    return np.trace(np.linalg.solve(matrix + precision * np.eye(len(matrix)), matrix))


def estimated(rows, num_examples, precision):
    return effective_parameters(rows, number(float(len(rows))), number(float(num_examples)), number(precision)).item()


@quickly
@given(seed=SEEDS, num_rows=SIZES, num_params=SIZES, power=st.floats(-2, 6))
def test_equals_the_dense_trace(seed, num_rows, num_params, power):
    rows, precision = draw(seed, num_rows, num_params), 10.0**power
    # A dense solve at a small precision is the less exact of the two.
    assert num_determined(rows, number(precision)).item() == pytest.approx(dense(rows, precision), rel=1e-7, abs=1e-9)


@quickly
@given(seed=SEEDS, num_rows=SIZES, num_params=SIZES, precision=PRECISIONS)
def test_rows_decide_no_more_than_there_are_rows_or_parameters(seed, num_rows, num_params, precision):
    rows = draw(seed, num_rows, num_params)
    most = min(num_rows, num_params)
    assert 0.0 < num_determined(rows, number(precision)).item() <= most * (1 + 1e-12)
    for num_examples in (num_rows, 3 * num_rows, 1000):
        assert 0.0 < estimated(rows, num_examples, precision) <= min(num_examples, num_params) * (1 + 1e-9)


@quickly
@given(seed=SEEDS, num_rows=SIZES, num_params=SIZES, precision=PRECISIONS, factor=st.floats(1.01, 100.0))
def test_the_stronger_the_prior_the_less_is_decided(seed, num_rows, num_params, precision, factor):
    rows = draw(seed, num_rows, num_params)
    weak, strong = (num_determined(rows, number(c)).item() for c in (precision, factor * precision))
    assert strong <= weak
    # γ falls no faster than 1/c.
    assert strong >= weak / factor * (1 - 1e-9)


@quickly
@given(seed=SEEDS, num_rows=SIZES, num_params=SIZES, precision=PRECISIONS)
def test_the_order_of_rows_and_of_parameters_is_irrelevant(seed, num_rows, num_params, precision):
    rows = draw(seed, num_rows, num_params)
    rng = np.random.default_rng(seed)
    mixed = rows[rng.permutation(num_rows)][:, rng.permutation(num_params)]
    expected = num_determined(rows, number(precision)).item()
    assert num_determined(mixed, number(precision)).item() == pytest.approx(expected, rel=1e-6, abs=1e-12)
    assert estimated(mixed, num_rows, precision) == pytest.approx(expected, rel=1e-6, abs=1e-12)
    turned = rows @ torch.linalg.qr(draw(seed + 1, num_params, num_params)).Q
    assert num_determined(turned, number(precision)).item() == pytest.approx(expected, rel=1e-6, abs=1e-12)


@quickly
@given(seed=SEEDS, num_rows=SIZES, num_params=SIZES, precision=PRECISIONS)
def test_all_rows_seen_need_no_extrapolation(seed, num_rows, num_params, precision):
    rows = draw(seed, num_rows, num_params)
    assert estimated(rows, num_rows, precision) == pytest.approx(
        num_determined(rows, number(precision)).item(), rel=1e-12
    )


@quickly
@given(seed=SEEDS, num_rows=SIZES, num_params=SIZES, precision=PRECISIONS, times=st.integers(2, 4))
def test_a_row_that_is_met_twice_counts_once(seed, num_rows, num_params, precision, times):
    """A minibatch larger than the client: n rows looked at, of N < n."""
    rows = draw(seed, num_rows, num_params)
    expected = num_determined(rows, number(precision)).item()
    assert estimated(rows.repeat(times, 1), num_rows, precision) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("precision", [0.1, 1.0, 40.0])
def test_rows_in_new_directions_are_extrapolated_in_proportion(precision):
    """Orthogonal rows of one length: each decides as much as the others, and so will those not seen, while there are
    parameters left."""
    rows = 3.0 * torch.eye(30, dtype=torch.float64)[:10]
    each = 9.0 / (9.0 + precision)
    assert estimated(rows, 20, precision) == pytest.approx(20 * each, rel=1e-12)
    assert estimated(rows, 1000, precision) == pytest.approx(min(1000 * each, 30), rel=1e-12)


def test_one_row_is_extrapolated_in_proportion():
    rows = torch.tensor([[3.0, 0.0, 4.0]], dtype=torch.float64)
    assert estimated(rows, 2, 75.0) == pytest.approx(2 * 25 / 100, rel=1e-12)


@quickly
@given(seed=SEEDS, num_params=SIZES, precision=PRECISIONS, more=SIZES)
def test_where_every_direction_has_been_seen_the_information_is_extrapolated(seed, num_params, precision, more):
    """As many rows as parameters: N/n times of each is what N rows hold, if they are like these."""
    rows = draw(seed, num_params + 2, num_params)
    found = estimated(rows, more * len(rows), precision)
    assert found == pytest.approx(num_determined(rows.repeat(more, 1), number(precision)).item(), rel=1e-6)


def test_rows_that_are_all_alike_decide_one_parameter():
    rows = torch.tensor([2.0, 0.0, 1.0], dtype=torch.float64).expand(20, 3)
    assert estimated(rows, 20, 25.0) == pytest.approx(100 / 125, rel=1e-12)
    assert estimated(rows, 4000, 25.0) == pytest.approx(20_000 / 20_025, rel=1e-12)
    # In a model of more parameters than rows, too, once they are sure of it.
    wide = torch.cat([rows, torch.zeros(20, 40)], dim=1).double()
    assert estimated(wide, 4000, 1e-6) == pytest.approx(1.0, rel=1e-6)


def test_the_more_rows_the_more_is_decided():
    rows = draw(3, 8, 40)
    found = [estimated(rows, count, 1.0) for count in (2, 8, 9, 30, 300, 100_000)]
    assert found == sorted(found)
    assert found[-1] == 40.0


def test_rows_without_a_gradient_decide_nothing():
    for shape in ((1, 5), (4, 5), (6, 2)):
        assert estimated(torch.zeros(shape, dtype=torch.float64), 100, 0.5) == 0.0


@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_zeros_behind_the_rows_are_no_rows(num_rows):
    rows = draw(num_rows, num_rows, 12)
    padded = torch.cat([rows, torch.zeros(4, 12, dtype=torch.float64)])
    found = effective_parameters(padded, number(float(num_rows)), number(30.0), number(2.0))
    assert found.item() == pytest.approx(estimated(rows, 30, 2.0), rel=1e-9)


@pytest.mark.parametrize("num_params", [3, 11])
def test_clients_are_computed_apart(num_params):
    rows, precision = draw(1, 4, num_params, 2, 3), torch.rand(2, 3, dtype=torch.float64) + 0.1
    counts = torch.tensor([[4, 5, 6], [40, 400, 2]])
    found = effective_parameters(rows, torch.full_like(counts, 4), counts, precision)
    assert found.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            alone = estimated(rows[i, j], counts[i, j].item(), precision[i, j].item())
            assert found[i, j].item() == pytest.approx(alone, rel=1e-10)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (1, 3)])
def test_a_client_that_has_left_the_finite_numbers_is_alone_in_it(bad, shape):
    rows = draw(0, *shape, 3, dtype=torch.float32)
    counts, precision = torch.full((3,), 10), torch.ones(3)
    before = effective_parameters(rows, torch.full((3,), shape[0]), counts, precision)
    rows[1, 0, 0] = bad  # 1e30 is a number, but its square is none in single precision
    found = effective_parameters(rows, torch.full((3,), shape[0]), counts, precision)
    assert found.isnan().tolist() == [False, True, False]
    assert torch.equal(found[[0, 2]], before[[0, 2]])


def test_the_dtype_is_that_of_the_rows():
    counts = torch.tensor([30, 3])
    double = effective_parameters(draw(5, 6, 9, 2), torch.tensor([6, 6]), counts, torch.ones(2, dtype=torch.float64))
    single = effective_parameters(
        draw(5, 6, 9, 2, dtype=torch.float32), torch.tensor([6, 6]), counts, torch.ones(2, dtype=torch.float32)
    )
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=0)
