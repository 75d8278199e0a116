"""What clients may send, number by number at its ends, of a made-up method; and what is held back, client by client."""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from selffl.algorithms.safeguards import Bound
from selffl.engines.claims import MIN_CAPPED, QUARTILE, ROUNDED, Claims, capped_factors

NUM_PARAMS = 4


@dataclass(frozen=True)
class Sent:
    params: Tensor  # [..., C, 4]
    weight: Tensor  # [..., C]
    classes: Tensor  # [..., C, 3]
    variance: Tensor  # [..., C], may be unknown
    shares: Tensor  # [..., C, 4], as long as a model and capped: no model


def honest(*shape):
    """Of so many clients."""
    return Sent(
        torch.ones(*shape, NUM_PARAMS), torch.ones(*shape), torch.ones(*shape, 3), torch.ones(*shape),
        torch.ones(*shape, NUM_PARAMS),
    )  # fmt: skip


def claims(bounds=None, axis=0, num_clients=5, shape=(), limits=None):
    def bounds_of(server, clients, upload, rows):
        assert rows.dtype == torch.float64
        return {} if bounds is None else bounds(upload, rows)

    method = SimpleNamespace(bounds=bounds_of, capped={"shares": 2.0}, may_be_unknown={"variance"})
    rows = torch.arange(10, 10 + num_clients).expand(*shape, num_clients)
    return Claims(method, SimpleNamespace(params=torch.zeros(NUM_PARAMS)), rows, axis, limits)


def changed(sent, name, place, value):
    tensor = getattr(sent, name).clone()
    tensor[place] = value
    return replace(sent, **{name: tensor})


LONGEST = math.sqrt(float(np.finfo(np.float32).max) / 5) / 100.0  # of five clients


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("params", -1.0, None), ("params", 0.49 * LONGEST, None),
        ("params", 0.51 * LONGEST, "params measures"), ("params", math.nan, "params holds NaN or infinity"),
        ("params", math.inf, "params holds NaN or infinity"),
        ("weight", 0.0, None), ("weight", -1e-9, "weight is -1e-09; expected 0 or more."),
        ("weight", 2 * LONGEST, None), ("weight", 0.99 * LONGEST**2, None), ("weight", 1.01 * LONGEST**2, "weight m"),
        ("classes", 3 * LONGEST, None), ("classes", -1.0, "classes is -1"), ("classes", math.nan, "classes holds NaN"),
        ("variance", math.nan, None), ("variance", math.inf, None), ("variance", 0.0, None),
        ("variance", -1.0, "variance is -1"), ("variance", -math.inf, "variance is -1"),
        ("shares", 2 * LONGEST, None), ("shares", -1.0, "shares is -1"),
    ],
)  # fmt: skip
def test_a_number_is_possible_up_to_its_end(name, value, reason):
    """A model has a length whose square is finite, everything else is 0 or more; variances may be unknown."""
    asked, clients = claims(), torch.tensor([4, 2, 0])
    sent = changed(honest(3), name, 1, value)
    assert asked.are_possible(clients, sent).tolist() == [True, reason is None, True]
    if reason is not None:
        one = Sent(*(getattr(sent, field)[1:2] for field in Sent.__dataclass_fields__))
        assert asked.fault(clients[1:2], one).startswith(reason)


def test_one_number_of_many_is_enough():
    for name, place in (("classes", (0, 2)), ("shares", (0, 0)), ("params", (0, 3))):
        value = math.inf if name == "params" else -1.0
        assert claims().are_possible(torch.arange(2), changed(honest(2), name, place, value)).tolist() == [False, True]


@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize(
    ("low", "high", "value", "is_good"),
    [
        (2.0, 4.0, 4.0 * ROUNDED, True), (2.0, 4.0, 4.0 * ROUNDED + 1e-9, False),
        (2.0, 4.0, 2.0 / ROUNDED, True), (2.0, 4.0, 2.0 / ROUNDED - 1e-9, False),
        (-4.0, -2.0, -2.0 / ROUNDED, True), (-4.0, -2.0, -2.0 / ROUNDED + 1e-9, False),
        (-4.0, -2.0, -4.0 * ROUNDED, True), (-4.0, -2.0, -4.0 * ROUNDED - 1e-9, False),
        (0.0, 0.5, 0.0, True), (0.0, 0.5, -1e-9, False), (-0.5, 0.0, 1e-9, False), (0.25, 0.5, 0.3, True),
        (0.25, 0.5, 0.51, False), (0.25, 0.5, 0.24, False), (0.0, 1.0, math.nan, True),
    ],
)  # fmt: skip
def test_a_bound_holds_a_little_beyond_its_ends(low, high, value, is_good, is_tensor):
    """Of a number made of fields; NaN is said by others."""

    def bounds(upload, rows):
        made = torch.full((2, 3), 0.5 * (low + high), dtype=torch.float64)
        made[1, 2] = value
        ends = (torch.full((2, 3), end) for end in (low, high)) if is_tensor else (low, high)
        return {"ratio": Bound(*ends, made)}

    asked = claims(bounds)
    assert asked.are_possible(torch.tensor([0, 3]), honest(2)).tolist() == [True, is_good]


def test_a_bound_of_a_field_is_by_client_and_may_be_below_zero():
    """Ends of each client follow its own rows, also where they are asked for in another order."""

    def bounds(upload, rows):
        return {"classes": Bound(-1.0, rows.unsqueeze(-1)), "weight": Bound(2.0, 2.0)}

    sent = replace(honest(3), weight=torch.tensor([2.0, 2.0, 3.0]))
    sent = changed(changed(sent, "classes", (0, 1), 13.5), "classes", (1, 1), 13.5)
    asked, clients = claims(bounds), torch.tensor([4, 2, 0])
    assert asked.are_possible(clients, sent).tolist() == [True, False, False]
    parts = [Sent(*(getattr(sent, field)[n : n + 1] for field in Sent.__dataclass_fields__)) for n in range(3)]
    assert asked.fault(clients[1:2], parts[1]) == "classes is 13.5; expected -1 to 12."
    assert asked.fault(clients[2:], parts[2]) == "weight is 3; expected 2."
    negative = changed(sent, "classes", (0, 0), -1.0)  # what is bounded need not be 0 or more
    assert asked.are_possible(clients, negative).tolist() == [True, False, False]


def test_federations_side_by_side_have_clients_of_their_own():
    def bounds(upload, rows):
        return {"weight": Bound(0.0, rows)}

    sent = changed(honest(2, 3), "weight", (slice(None), 0), 13.0)
    sent = changed(sent, "params", (1, 2, 3), math.nan)
    clients = torch.tensor([[3, 0, 1], [2, 0, 1]])
    found = claims(bounds, axis=1, shape=(2,)).are_possible(clients, sent)
    assert found.tolist() == [[True, True, True], [False, True, False]]


def test_a_model_in_double_precision_may_be_longer():
    asked = replace(claims(), server=SimpleNamespace(params=torch.zeros(NUM_PARAMS, dtype=torch.float64)))
    assert asked.longest == pytest.approx(math.sqrt(float(np.finfo(np.float64).max) / 5) / 100.0)
    half = replace(claims(), server=SimpleNamespace(params=torch.zeros(NUM_PARAMS, dtype=torch.float16)))
    assert half.longest == pytest.approx(LONGEST)
    assert replace(claims(), rows=torch.zeros(0)).longest == pytest.approx(LONGEST * math.sqrt(5))


def held_back(lengths, times):
    """One client after the other: by what its numbers are multiplied."""
    counted = sorted(length for length in lengths if length > 0)
    if len(counted) < MIN_CAPPED:
        return [1.0] * len(lengths)
    most = times * counted[math.ceil(QUARTILE * len(counted)) - 1]
    return [most / length if length > most else 1.0 for length in lengths]


@pytest.mark.parametrize(
    "lengths",
    [
        [1.0, 2.0, 3.0, 90.0], [1.0, 2.0, 90.0], [0.0, 1.0, 2.0, 90.0], [0.0, 0.0, 1.0, 2.0, 3.0, 90.0], [0.0] * 5,
        [1.0, 1.0, 1.0, 2.0], [5.0, 4.0, 3.0, 2.0, 1.0, 50.0, 60.0, 70.0], [1e-100, 1e-100, 1e-100, 1e100],
    ],
)  # fmt: skip
@pytest.mark.parametrize("times", [1.0, 2.0])
def test_nobodys_numbers_are_longer_than_so_many_quartiles(lengths, times):
    length = torch.tensor(lengths, dtype=torch.float64)
    vectors = torch.stack([length * 0.6, length * 0.8], -1)
    found = capped_factors([length, vectors], [times, 3.0], 0)
    assert found.shape == (2, len(lengths))
    np.testing.assert_allclose(found[0], held_back(lengths, times), rtol=1e-12)
    np.testing.assert_allclose(found[1], held_back(lengths, 3.0), rtol=1e-12)


def test_federations_side_by_side_have_quartiles_of_their_own():
    lengths = torch.tensor([[1.0, 2.0, 3.0, 90.0, 0.0], [50.0, 60.0, 70.0, 90.0, 900.0]])
    found = capped_factors([lengths, 2 * lengths.unsqueeze(-1)], [2.0, 1.0], 1)
    for place in range(2):
        for field, times in enumerate((2.0, 1.0)):
            np.testing.assert_allclose(found[field, place], held_back(lengths[place].tolist(), times), rtol=1e-12)
