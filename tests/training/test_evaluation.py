"""Correct predictions of many clients against a plain count, and rows that a model cannot take."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_modules import CLASSES, MODULES, features_of, random, seeded
from torch import nn

from selffl.budget import BUDGETS, Budget
from selffl.data.federation import Rows
from selffl.errors import ConfigError, DataError
from selffl.models import Standardise
from selffl.training import evaluation
from selffl.training.evaluation import check_rows, numbers_of_rows
from selffl.training.flat import FlatModel
from selffl.training.metrics import CLASSES as MEASURE

WAYS = ("auto", "vmap", "loop", "unfold")
SIZES = (0, 4, 10, 15, 1, 0, 33, 3, 3, 2, 7, 0)


def rows_of(name, sizes=SIZES):
    offset = torch.tensor([0, *sizes]).cumsum(0)
    labels = torch.randint(CLASSES, (sum(sizes),), generator=torch.Generator().manual_seed(4))
    return Rows(features_of(name, sum(sizes)), labels, offset)


def correct_predictions(model, params, rows, gradients="auto"):
    """Right answers of each client."""
    is_right = numbers_of_rows(model, params, rows, MEASURE, gradients)[0]
    return torch.stack([part.sum() for part in is_right.split(rows.num_examples.tolist())]).long()


def counted(model, params, rows):
    """Client by client, row by row."""
    found = []
    for client, (low, high) in enumerate(rows.offset.unfold(0, 2, 1).tolist()):
        module = model.load(params if params.ndim == 1 else params[client])
        guesses = [int(module(rows.features[row : row + 1])[0].argmax()) for row in range(low, high)]
        found.append(sum(guess == int(label) for guess, label in zip(guesses, rows.labels[low:high], strict=True)))
    return found


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name in MODULES for way in WAYS],
)
def test_correct_predictions_equal_a_plain_count(name, way):
    model, rows = FlatModel(seeded(MODULES[name][0], dtype=torch.float64)), rows_of(name)
    params = model.params + random(len(SIZES), len(model.params))
    found = correct_predictions(model, params, rows, way)
    assert (found.dtype, found.shape) == (torch.int64, (len(SIZES),))
    assert found.tolist() == counted(model, params, rows)
    assert 0 < found.sum() < sum(SIZES)
    shared = correct_predictions(model, params[0], rows, way)
    assert (shared.dtype, shared.shape) == (torch.int64, (len(SIZES),))
    assert shared.tolist() == counted(model, params[0], rows)
    assert correct_predictions(model, params[0].expand(len(SIZES), -1), rows, way).tolist() == shared.tolist()


@pytest.mark.parametrize("room", [1, 12, 40, 100, 500, 10_000])
@pytest.mark.parametrize("name", ["linear", "mlp", "cnn"])
def test_how_many_are_evaluated_at_once_does_not_matter(monkeypatch, name, room):
    model, rows = FlatModel(seeded(MODULES[name][0], dtype=torch.float64)), rows_of(name)
    params = model.params + random(len(SIZES), len(model.params))
    expected = [correct_predictions(model, given, rows).tolist() for given in (params, params[0])]
    monkeypatch.setitem(BUDGETS, "cpu", Budget(evaluated_numbers=room))
    assert [correct_predictions(model, given, rows).tolist() for given in (params, params[0])] == expected


@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=40),
    max_clients=st.integers(0, 12),
    max_rows=st.integers(0, 100),
    alone=st.sampled_from([0.0, 7.5, float("inf")]),
)
@settings(deadline=None)
def test_blocks_hold_every_client_with_rows_once_and_bound_padding_and_room(sizes, max_clients, max_rows, alone):
    sizes = sorted(sizes, reverse=True)
    blocks = list(evaluation.blocks_of_clients(sizes, max_clients, max_rows, alone))
    covered = [client for low, high in blocks for client in range(low, high)]
    assert covered == list(range(sum(size > 0 for size in sizes)))
    for low, high in blocks:
        assert 2 * sizes[high - 1] >= sizes[low]
        assert high - low == 1 or (high - low <= max_clients and (high - low) * sizes[low] <= max_rows)
        assert high - low == 1 or sizes[low] < alone


@pytest.mark.parametrize("one_for_all", [True, False])
def test_a_federation_without_rows_has_none_right(one_for_all):
    model = FlatModel(nn.Linear(2, 2))
    rows = Rows(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    params = model.params if one_for_all else model.params.expand(3, -1)
    assert [each.shape for each in numbers_of_rows(model, params, rows, MEASURE)] == [(0,), (0,)]


def test_a_perfect_and_a_wrong_model_are_told_apart():
    features = torch.eye(3).repeat(2, 1)
    rows = Rows(features, torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([0, 4, 6]))
    model = FlatModel(nn.Linear(3, 3))
    perfect = torch.cat([torch.eye(3).flatten(), torch.zeros(3)])
    shifted = torch.cat([torch.eye(3).roll(1, 0).flatten(), torch.zeros(3)])
    assert correct_predictions(model, perfect, rows).tolist() == [4, 2]
    assert correct_predictions(model, torch.stack([perfect, shifted]), rows).tolist() == [4, 0]


def test_a_model_that_knows_nothing_says_the_first_class_every_time():
    rows = Rows(torch.ones(6, 3), torch.tensor([0, 1, 2, 0, 0, 2]), torch.tensor([0, 4, 6]))
    model = FlatModel(nn.Linear(3, 3))
    assert correct_predictions(model, torch.zeros(12), rows).tolist() == [2, 1]
    assert correct_predictions(model, torch.zeros(2, 12), rows).tolist() == [2, 1]


def test_an_unknown_way_is_refused():
    with pytest.raises(ConfigError, match=r"^unknown gradients 'fast'; "):
        correct_predictions(FlatModel(nn.Linear(2, 2)), torch.zeros(6), rows_of("tied"), "fast")


# ----------------------------------------------------------------------------------------------------------- check_rows


def some_loss(outputs, labels):
    """One that takes anything."""
    return outputs.mean()


def rows_with(labels, offset, features=None):
    labels = torch.as_tensor(labels)
    return Rows(torch.zeros(len(labels), 4) if features is None else features, labels, torch.tensor(offset))


@pytest.mark.parametrize("name", MODULES)
def test_rows_that_fit_pass(name):
    check_rows(FlatModel(seeded(MODULES[name][0], dtype=torch.float64)), some_loss, rows_of(name))


@pytest.mark.parametrize(
    ("labels", "offset", "client", "label"),
    [
        ([0, 1, 2, 3], [0, 2, 4], 1, 3),
        ([0, 1, 7, 3], [0, 2, 2, 2, 4], 3, 7),  # clients in between have no rows
        ([5, 1, 2, 3], [0, 0, 4], 1, 5),
        ([0, -1, 2, 1], [0, 1, 4], 1, -1),
    ],
)
def test_a_label_beyond_the_outputs_is_named_with_its_client(labels, offset, client, label):
    expected = rf"^client number {client} has the label {label}, and Linear has 3 outputs; .*0 to 2\."
    with pytest.raises(DataError, match=expected) as caught:
        check_rows(FlatModel(nn.Linear(4, 3)), some_loss, rows_with(labels, offset))
    assert "\n" not in str(caught.value)


def test_targets_are_not_labels():
    check_rows(FlatModel(nn.Linear(4, 3)), some_loss, rows_with([7.0, 8.0], [0, 2]))
    check_rows(FlatModel(nn.Linear(4, 1)), some_loss, rows_with([7, 8], [0, 2]))  # counts, say, for one output


@pytest.mark.parametrize(
    ("module", "features", "message"),
    [
        (nn.Linear(5, 3), torch.zeros(2, 4), r"^Linear cannot take a row of shape \(4,\) and type torch.float32: "),
        (nn.Linear(4, 3), torch.zeros(2, 4).double(), r"type torch.float64: .*parameters of type torch.float32\.$"),
        (nn.Linear(4, 3), torch.zeros(2, 4).long(), "type torch.int64: "),
        (nn.Sequential(nn.Conv2d(1, 2, 3)), torch.zeros(2, 4), r"^Sequential cannot take a row of shape \(4,\)"),
        (nn.Embedding(3, 4), torch.tensor([[9], [0]]), "^rows hold the number 9, and Embedding has embeddings of 3; "),
        (nn.Embedding(3, 4), torch.tensor([[2.0], [0.0]]), "^Embedding cannot take a row of shape"),
    ],
)
def test_rows_that_a_model_cannot_take_are_refused_in_one_line(module, features, message):
    with pytest.raises(DataError, match=message) as caught:
        check_rows(FlatModel(module), some_loss, rows_with([0, 1], [0, 2], features))
    assert "\n" not in str(caught.value)


def test_no_rows_at_all_are_refused():
    with pytest.raises(DataError, match=r"^there are no rows; expected at least one\.$"):
        check_rows(FlatModel(nn.Linear(4, 3)), some_loss, rows_with([], [0, 0]))


def test_a_forward_that_draws_random_numbers_is_refused_in_one_line():
    class Noisy(nn.Linear):
        def forward(self, features):
            return nn.functional.dropout(super().forward(features), 0.5)

    with pytest.raises(
        ConfigError, match=r"^Noisy draws random numbers of its own; expected outputs .*eval\(\) on the module\.$"
    ):
        check_rows(FlatModel(Noisy(4, 3)), some_loss, rows_with([0, 1], [0, 2]))


def test_checking_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    check_rows(FlatModel(seeded(lambda: nn.Linear(4, 3))), some_loss, rows_with([0, 1], [0, 2]))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_classifier_that_begins_with_huge_outputs_is_warned_of():
    rows = Rows.single_client(torch.tensor([[42000.0, 1.0], [17000.0, 0.0]]), torch.tensor([0, 1]))
    with pytest.warns(UserWarning, match=r"outputs of Linear reach .*Standardise"):
        check_rows(FlatModel(seeded(lambda: nn.Linear(2, 2))), nn.functional.cross_entropy, rows)
    scaled = nn.Sequential(Standardise.of(rows.features), seeded(lambda: nn.Linear(2, 2)))
    check_rows(FlatModel(scaled), nn.functional.cross_entropy, rows)
