"""Checks of what a node sends, number by number at its ends."""

import math

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'selffl[flower]'")

from flwr.app import MetricRecord, RecordDict

from selffl.engines.flower.answers import MAX_LOSS, Bounds
from selffl.engines.flower.messages import METRICS, fingerprint, options_of
from selffl.engines.flower.records import check_dtype, is_finite, models_of
from selffl.errors import ConfigError, DataError
from selffl.training.flat import FlatModel

BOUNDS = Bounds(None, 10, ("f1",))
SCORES = {
    "num_train": 10, "num_test": 4, "personal.accuracy": 4.0, "global.accuracy": 0.0, "personal.f1": -2.0,
    "global.f1": math.nan,
}  # fmt: skip
ALONE = {"num_test": 4, "num_won": 3, "num_lost": 1, "alone.accuracy": 4.0, "alone.f1": 7.0}


def content(numbers):
    return RecordDict({METRICS: MetricRecord(numbers)})


def test_scores_are_read():
    found = BOUNDS.scores(content(SCORES))
    assert (found.num_train, found.num_test, found.metrics) == (10, 4, ("accuracy", "f1"))
    assert found.totals["personal.accuracy"] == 4.0
    assert found.totals.keys() == SCORES.keys() - {"num_train", "num_test"}


def test_what_was_found_alone_is_read():
    found = BOUNDS.alone(content(ALONE))
    assert (found.num_test, found.num_won, found.num_lost, found.metrics) == (4, 3, 1, ("accuracy", "f1"))
    assert found.totals == {"alone.accuracy": 4.0, "alone.f1": 7.0}
    assert math.isnan(BOUNDS.alone(content(ALONE | {"alone.accuracy": math.nan})).totals["alone.accuracy"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_won": 4}, "4 rows are won and 1 lost; expected as many as rows"),
        ({"num_won": -1}, "num_won is -1; expected a whole number from 0 to 10"),
        ({"num_lost": 1.0}, "num_lost is 1.0; expected a whole number"),
        ({"num_test": 11}, "num_test is 11"),
        ({"alone.accuracy": 4.5}, "alone.accuracy is 4.5; expected a number that accuracy can be"),
        ({"alone.accuracy": math.inf}, "alone.accuracy is inf"),
        ({"alone.accuracy": 4}, "alone.accuracy is 4"),
        ({"alone.odd": 1.0}, "the metrics are"),
        ({"personal.f1": 1.0}, "the metrics are"),
    ],
)
def test_what_cannot_be_found_alone_is_refused(change, reason):
    with pytest.raises(DataError, match=reason):
        BOUNDS.alone(content(ALONE | change))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_train": 11}, "num_train is 11; expected a whole number from 0 to 10"),
        ({"num_test": 3}, "personal.accuracy is 4.0; expected a number that accuracy can be"),
        ({"personal.accuracy": math.nan}, "personal.accuracy is nan"),
        ({"global.accuracy": -0.5}, "global.accuracy is -0.5"),
        ({"personal.f1": 2 * MAX_LOSS}, "personal.f1 is 2"),
        ({"personal.loss": 1.0}, r"expected some of .*, with f1, personal and global\."),
        ({"personal.loss": -2 * MAX_LOSS, "global.loss": 1.0}, "personal.loss is -2"),
        ({"personal.loss": math.nan, "global.loss": 1.0}, "personal.loss is nan"),
        ({"personal.auc": 1.5, "global.auc": 0.5}, "personal.auc is 1.5"),
        ({"personal.auc": -0.5, "global.auc": 0.5}, "personal.auc is -0.5"),
        ({"num_test": 0}, "personal.accuracy is 4.0"),
        ({"personal.f1": None, "global.f1": None}, "the metrics are"),
        ({"personal.accuracy": None, "global.accuracy": None}, "the metrics are"),
    ],
)
def test_scores_that_cannot_be_are_refused(change, reason):
    numbers = {name: value for name, value in (SCORES | change).items() if value is not None}
    with pytest.raises(DataError, match=reason):
        BOUNDS.scores(content(numbers))


@pytest.mark.parametrize(
    "change",
    [
        {"personal.loss": -1.0, "global.loss": MAX_LOSS},
        {"personal.auc": math.nan, "global.auc": 1.0},
        {"num_test": 0, "personal.accuracy": 0.0, "personal.auc": 0.5, "global.auc": math.nan},
        {"personal.f1": -MAX_LOSS, "num_train": 0},
    ],
)
def test_scores_at_their_ends_are_taken(change):
    assert BOUNDS.scores(content(SCORES | change)).totals


def test_only_real_numbers_that_numpy_has_travel():
    for dtype in (torch.float16, torch.float32, torch.float64):
        check_dtype(dtype)
    for dtype in (torch.bfloat16, torch.int64, torch.bool):
        with pytest.raises(ConfigError, match=r"expected torch.float32, torch.float64 or torch.float16"):
            check_dtype(dtype)


def test_sums_that_overflow_are_of_finite_numbers_all_the_same():
    assert is_finite(torch.tensor([3e38, 3e38, -1.0]))
    assert is_finite(torch.zeros(3))
    for bad in (math.nan, math.inf, -math.inf):
        assert not is_finite(torch.tensor([1.0, bad, 3e38]))
    assert not is_finite(torch.tensor([math.inf, -math.inf]))
    assert models_of(torch.zeros(1, 4), 4)
    assert not models_of(torch.zeros(2, 4), 4)


def test_a_fingerprint_tells_what_has_to_be_the_same():
    def module(*, frozen=(), value=0.0, constant=1.0, trained=0.0):
        made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        nn.init.constant_(made[0].weight, value)
        nn.init.constant_(made[1].weight, trained)
        made.register_buffer("constant", torch.full((3,), constant))
        for place in frozen:
            made[0].weight.requires_grad_(place != 0)
        return fingerprint(FlatModel(made))

    same = module(frozen=(0,))
    assert same == module(frozen=(0,), trained=5.0)
    others = [module(), module(frozen=(0,), value=1.0), module(frozen=(0,), constant=2.0)]
    assert len({same, *others}) == 4


def test_options_are_the_same_text_whatever_their_order():
    from dataclasses import make_dataclass

    one = make_dataclass("One", [("b", object, 1), ("a", object, print)])()
    other = make_dataclass("Other", [("a", object, print), ("b", object, 1)])()
    assert options_of(one) == options_of(other) == '{"a": "<built-in function print>", "b": 1}'
    objects = [make_dataclass("Kept", [("a", object, None)])(object()) for _ in range(2)]
    assert options_of(objects[0]) == options_of(objects[1]) == '{"a": "<object object>"}'
