"""What one client may send, and what the server makes of a noisy sum, by plain numbers."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from selffl.algorithms import Population, algorithm
from selffl.algorithms.auto_records import AutoUpload
from selffl.algorithms.auto_safeguards import beyond_noise, limits_of, totals_and_rows, usable_sum
from selffl.algorithms.auto_spread import learn_spread, sum_disagreements
from selffl.algorithms.safeguards import Limit
from selffl.algorithms.self_fl import fill_unknown_variances
from selffl.algorithms.self_fl_sums import SumsUpload

NUM_PARAMS, NUM_GROUPS, NUM_CLASSES = 4, 2, 3
SHAPES = {
    "change": (NUM_PARAMS,),
    "deviation": (NUM_PARAMS,),
    "deviation_squares": (NUM_GROUPS,),
    "difference_squares": (NUM_GROUPS,),
    "disagreements": (NUM_GROUPS,),
    "squared_disagreements": (NUM_GROUPS,),
    "spread_products": (3,),
    "class_weights": (NUM_CLASSES,),
    "factor_slope": (2,),
    "factor_curvature": (2, 2),
}
BY_GROUP = ("deviation_squares", "difference_squares", "disagreements", "squared_disagreements")


def upload(num_clients=3, **given):
    """Positive numbers, each another, of clients ``[C]``; or those that are given."""
    rng = np.random.default_rng(0)
    drawn = {
        each.name: torch.tensor(rng.uniform(0.1, 0.9, (num_clients, *SHAPES.get(each.name, ())))).float()
        for each in fields(AutoUpload)
    }
    return replace(AutoUpload(**drawn), **given)


def test_what_is_beyond_noise_is_as_long_as_what_it_is_made_of():
    vector = torch.tensor([[3.0, 4.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    found = beyond_noise(vector, 0.5)
    # |v|^2 - P noise^2 = 25 - 1: far above two standard errors of the noise, 2 sqrt(2 P) noise^2 = 1.41.
    assert found[0].square().sum() == pytest.approx(24.0)
    assert torch.allclose(found[0] / vector[0, 0], torch.tensor([1.0, 4 / 3, 0.0, 0.0]) * found[0, 0] / 3.0)
    assert found[1].square().sum() == pytest.approx(3.0)  # 4 - 1
    assert beyond_noise(vector, 0.9)[1].tolist() == [0.0] * 4  # 4 - 3.24 is less than 2 sqrt(8) 0.81
    assert torch.equal(beyond_noise(vector, 0.0), vector)
    assert beyond_noise(torch.zeros(1, 4), 0.0).tolist() == [[0.0] * 4]


def test_in_a_noisy_sum_a_square_counts_from_two_standard_errors_on():
    size, noise = 8, 1.0
    edge = size * noise**2 + 2.0 * math.sqrt(2.0 * size) * noise**2
    for square, is_seen in ((edge - 1e-3, False), (edge + 1e-3, True)):
        vector = torch.full((1, size), math.sqrt(square / size), dtype=torch.float64)
        assert bool(beyond_noise(vector, noise).any()) is is_seen


def test_counts_of_a_noisy_sum_are_counts_that_can_be():
    number = 10
    low, high = (
        upload(
            1,
            has_halves=torch.tensor([value]),
            has_pairs=torch.tensor([value]),
            temperature=torch.tensor([value]),
            num_examples=torch.tensor([value]),
            undecided=torch.tensor([value]),
            same_class_rate=torch.tensor([value]),
        )
        for value in (-5.0, 50.0)
    )
    of_low, of_high = (usable_sum(each, number, [3, 1], 0.0) for each in (low, high))
    for name in ("has_halves", "has_pairs", "temperature"):  # a tenth of the cohort at least, and all of it at most
        assert getattr(of_low, name).tolist() == [1.0]
        assert getattr(of_high, name).tolist() == [10.0]
    assert (of_low.num_examples.item(), of_high.num_examples.item()) == (10.0, 50.0)  # a row each
    assert (of_low.undecided.item(), of_high.undecided.item()) == (0.0, 50.0)
    assert (of_low.same_class_rate.item(), of_high.same_class_rate.item()) == (
        0.0,
        10.0,
    )  # no more than there are pairs


def test_groups_of_a_noisy_sum_share_each_total_by_their_sizes():
    given = upload(1)
    found = usable_sum(given, 10, [3, 1], 0.0)
    for name in BY_GROUP:
        total = getattr(given, name).sum().item()
        assert getattr(found, name)[0].tolist() == pytest.approx([0.75 * total, 0.25 * total])
    for name in ("change", "weight", "spread_products", "factor_slope", "factor_curvature"):
        assert torch.equal(getattr(found, name), getattr(given, name)), name


@pytest.mark.parametrize(
    ("classes", "with_classes", "weight", "expected"),
    [
        ([2.0, 6.0, 0.0], 4.0, 5.0, [1.0, 3.0, 0.0]),  # the same shares, of what clients with classes weigh
        ([2.0, -1.0, 2.0], 4.0, 5.0, [2.0, 0.0, 2.0]),  # none below 0
        ([2.0, 2.0, 0.0], 0.1, 5.0, [0.25, 0.25, 0.0]),  # a tenth of the weight, at least
        ([-1.0, -1.0, -1.0], 4.0, 5.0, [0.0, 0.0, 0.0]),  # nothing is known
    ],
)
def test_class_weights_of_a_noisy_sum_are_shares_of_what_clients_with_classes_weigh(
    classes, with_classes, weight, expected
):
    given = upload(
        1,
        class_weights=torch.tensor([classes]),
        weight_with_classes=torch.tensor([with_classes]),
        weight=torch.tensor([weight]),
    )
    found = usable_sum(given, 10, [3, 1], 0.0)
    assert found.class_weights[0].tolist() == pytest.approx(expected)
    assert found.weight_with_classes.item() == pytest.approx(max(with_classes, 0.1 * weight))


def test_a_noisy_deviation_is_as_long_as_what_it_is_made_of():
    given = upload(1, deviation=torch.tensor([[3.0, 4.0, 0.0, 0.0]]))
    assert usable_sum(given, 10, [3, 1], 0.5).deviation.square().sum() == pytest.approx(24.0)


def test_weights_are_rows_and_groups_are_totals():
    """Of v = N/(N + n_0), with N = 6 and n_0 = 2: N (1 + n_0)/(N + n_0) = 2.25 rows; all N while n_0 is unknown."""
    known, unknown = 6 / 8, 6.0
    given = upload(2, weight=torch.tensor([known, unknown]), num_examples=torch.tensor([6.0, 6.0]))
    found = totals_and_rows(given)
    assert found.weight.tolist() == pytest.approx([2.25, 6.0])
    for name in ("change", "class_weights", "weight_with_classes"):
        was, now = getattr(given, name), getattr(found, name)
        assert (now[0] / was[0]).flatten().tolist() == pytest.approx([3.0] * was[0].numel())  # 1 + n_0
        assert torch.equal(now[1], was[1])
    for name in BY_GROUP:
        means = getattr(given, name).mean(-1)
        assert torch.allclose(getattr(found, name), means.unsqueeze(-1).expand(2, NUM_GROUPS))
    assert torch.equal(found.deviation, given.deviation)


def test_a_client_may_measure_no_more_than_its_limits():
    limits = limits_of(clip=2.0, max_weight=30.0, num_groups=4)
    sizes = {name: (limit.most, limit.is_signed) for name, limit in limits.items()}
    assert sizes == {
        "num_examples": (30.0, False),
        "deviation": (2.0, True),
        "deviation_squares": (2.0, False),  # a square of 4, shared out evenly among four groups, is of length 2
        "difference_squares": (2.0, False),
        "disagreements": (0.5, True),
        "squared_disagreements": (0.5, True),
        "spread_products": (1.0, True),
        "undecided": (1.0, False),
        **dict.fromkeys(("has_halves", "has_pairs", "same_class_rate", "temperature"), (1.0, False)),
        **dict.fromkeys(("class_weights", "weight_with_classes"), (1.0, False)),
        **dict.fromkeys(("factor_slope", "factor_curvature"), (5.0, True)),
    }
    assert {name for name, limit in limits.items() if limit.weight == "weight"} == {
        "class_weights",
        "weight_with_classes",
    }


@pytest.mark.parametrize(
    ("numbers", "is_signed", "apart"),
    [(1, True, 2.0), (5, True, 2.0), (1, False, 1.0), (2, False, 2**0.5), (5, False, 2**0.5)],
)
def test_how_far_two_clients_can_be_apart(numbers, is_signed, apart):
    """Two vectors of length 1: opposite ones where signs are free, else axes of their own; of one number 0 and 1."""
    assert Limit(3.0, is_signed=is_signed).difference(numbers) == pytest.approx(apart)


def test_the_square_that_self_fl_sums_sends_is_at_most_that_of_the_clip_and_no_less_than_nothing():
    ones = torch.ones(2)
    limits = algorithm("self-fl-sums").limits(3.0, 5.0, SumsUpload(torch.ones(2, 4), ones, ones))
    assert limits["square"] == Limit(9.0, "weight", is_signed=False)


@pytest.mark.parametrize("axes", [(), (2,)], ids=["a federation", "side by side"])
def test_an_unknown_variance_is_the_mean_of_the_known_ones(axes):
    unknown = math.nan
    found = fill_unknown_variances(torch.tensor([[1.0, unknown, 5.0], [unknown] * 3])[: 2 if axes else 1])
    assert found[0].tolist() == [1.0, 3.0, 5.0]
    assert not axes or found[1].tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("disagreements", "squared", "expected"),
    [
        ([3.0, 1.0], [10.0, 20.0], [3.0, 1.0]),  # 4 in all, more than a tenth of 30
        ([3.0, -1.0], [10.0, 20.0], [1.0, 2.0]),  # 2 in all: a tenth of the squares stands in for both groups
        ([4.0, -1.0], [10.0, 20.0], [4.0, -1.0]),  # 3 in all is no less than 3
    ],
)
def test_what_halves_disagree_on_is_at_least_a_tenth_of_its_squared_form(disagreements, squared, expected):
    found = upload(1, disagreements=torch.tensor([disagreements]), squared_disagreements=torch.tensor([squared]))
    assert sum_disagreements(found)[0].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("unit", "disagreement", "is_learned"),
    [
        (1.0, 0.5, True),
        (1e-37, 2e-38, True),
        (2e-38, 1e-39, False),  # of losses that are next to nothing; the next unit would be no number that floats keep
        (1e-30, 1e-45, True),  # a unit falls by a factor of four at most
    ],
)
def test_rounds_that_are_beyond_numbers_are_left_out(unit, disagreement, is_learned):
    server = algorithm("self-fl-auto").start(torch.zeros(4), Population(10))
    server = replace(server, unit=torch.tensor(unit), agreements=torch.ones(1), disagreements=torch.ones(1))
    one = torch.ones(3)
    given = {
        "deviation": torch.eye(3, 4),
        "deviation_squares": torch.ones(3, 1),
        "difference_squares": torch.zeros(3, 1),
        "disagreements": torch.full((3, 1), disagreement),
        "squared_disagreements": torch.full((3, 1), disagreement),
        "has_halves": one,
        "temperature": one,
    }
    total = AutoUpload(**{each.name: getattr(upload(3, **given), each.name).sum(0) for each in fields(AutoUpload)})
    found = learn_spread(server, total, torch.tensor(0.5), 3, is_fixed=False)
    kept = (found.inter_variance, found.agreements, found.disagreements, found.unit, found.num_reporting)
    assert all(bool(each.isfinite().all()) for each in kept[:4])
    if is_learned:
        assert found.disagreements.item() == pytest.approx(0.5 + 0.5 * disagreement / unit, rel=1e-3)
        assert found.unit.item() == pytest.approx(min(max(disagreement, unit / 4), unit * 4), rel=1e-3)
    else:
        before = (server.inter_variance, server.agreements, server.disagreements, server.unit, server.num_reporting)
        for now, was in zip(kept, before, strict=True):
            assert torch.equal(now, was) or bool(now.isnan() & was.isnan())


def test_what_halves_agree_on_beyond_all_numbers_is_left_out():
    server = algorithm("self-fl-auto").start(torch.zeros(4), Population(10))
    server = replace(server, unit=torch.tensor(1e-30), agreements=torch.ones(1), disagreements=torch.ones(1))
    one = torch.ones(3)
    given = {
        "deviation": 1e6 * torch.eye(3, 4),
        "deviation_squares": torch.full((3, 1), 1e12),
        "difference_squares": torch.zeros(3, 1),
        "disagreements": torch.full((3, 1), 1e-30),
        "squared_disagreements": torch.full((3, 1), 1e-30),
        "has_halves": one,
        "temperature": one,
    }
    total = AutoUpload(**{each.name: getattr(upload(3, **given), each.name).sum(0) for each in fields(AutoUpload)})
    found = learn_spread(server, total, torch.tensor(0.5), 3, is_fixed=False)
    assert (found.agreements.item(), found.disagreements.item(), found.unit.item()) == (1.0, 1.0, pytest.approx(1e-30))
    assert found.inter_variance == server.inter_variance
