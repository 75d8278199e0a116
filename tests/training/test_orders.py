"""Rows are met in the order that their lots say, whoever is shuffled beside them."""

import pytest
import torch

from selffl.randomness import uniform
from selffl.training import orders
from selffl.training.orders import places_in_epochs

KEYS = 3, "batch", 7


def one_by_one(owner, size, start, width):
    """One client, epoch and row at a time, by Python's own sort."""
    met = []
    for position in range(start, start + width):
        epoch, place = divmod(position, size)
        lots = [float(uniform(*KEYS, owner, epoch, row)) for row in range(size)]
        met.append(sorted(range(size), key=lots.__getitem__)[place])
    return met


@pytest.mark.parametrize("sizes", [[5, 5, 5], [4, 5, 7, 6], [1, 2, 40, 3, 9, 1]], ids=["same", "alike", "different"])
@pytest.mark.parametrize("start", [0, 12, 84])
def test_rows_are_met_in_the_order_of_their_lots(sizes, start):
    owner = torch.tensor([11, 3, 8, 40, 2, 6])[: len(sizes)]
    found = places_in_epochs(KEYS, owner, torch.tensor(sizes), sizes, start, 12)
    assert found.tolist() == [one_by_one(int(who), size, start, 12) for who, size in zip(owner, sizes, strict=True)]


def test_the_order_does_not_depend_on_what_is_filled_up(monkeypatch):
    sizes = torch.randint(1, 200, (50,), generator=torch.Generator().manual_seed(0))
    given = KEYS, torch.arange(50), sizes, sizes.tolist(), 400, 200
    monkeypatch.setattr(orders, "MOST_FILLED", 10**6)
    together = places_in_epochs(*given)
    monkeypatch.setattr(orders, "MOST_FILLED", 0)
    assert torch.equal(places_in_epochs(*given), together)


def test_equal_lots_fall_as_the_rows_lie(monkeypatch):
    monkeypatch.setattr(
        orders, "uniform", lambda *keys: torch.zeros(torch.broadcast_shapes(*(k.shape for k in keys[3:]))) + 0.5
    )
    found = places_in_epochs(KEYS, torch.arange(2), torch.tensor([3, 4]), [3, 4], 0, 6)
    assert found.tolist() == [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]]
