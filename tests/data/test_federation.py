"""Federations from arrays: every row with its own client and label, once, in training or in test."""

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selffl import Federation
from selffl.data.federation import Rows
from selffl.errors import ConfigError, DataError


def table(sizes, seed=0):
    """Rows whose features name the row, in shuffled order: x[i] = (i, 2i), y[i] = 10i + 3, and a client column."""
    client = np.repeat(np.arange(len(sizes)), sizes)
    np.random.default_rng(seed).shuffle(client)
    number = np.arange(len(client))
    return np.stack([number, 2 * number], axis=1).astype(np.float32), 10 * number + 3, client


def rows_of(rows, position):
    """Row numbers of one client, read off the features, once labels are seen to belong to them."""
    low, high = rows.offset[position : position + 2].tolist()
    features, labels = rows.features[low:high], rows.labels[low:high]
    numbers = features[:, 0].to(torch.int64)
    assert torch.equal(features[:, 1], 2 * features[:, 0])
    assert torch.equal(labels, 10 * numbers + 3)
    return numbers.tolist()


def assert_every_row_is_once(fed, client):
    """Each client has exactly its own rows, in training or in test, and the offsets cover both."""
    column = np.asarray(client)
    assert len(fed.clients) == len(set(column.tolist())) == fed.num_clients
    for position, name in enumerate(fed.clients):
        held = rows_of(fed.train, position) + rows_of(fed.test, position)
        assert sorted(held) == np.flatnonzero(column == name).tolist()
    for rows in (fed.train, fed.test):
        assert rows.offset[0] == 0
        assert rows.offset[-1] == len(rows.features) == len(rows.labels)
        assert len(rows.offset) == fed.num_clients + 1
        assert rows.num_examples.tolist() == [len(rows_of(rows, position)) for position in range(fed.num_clients)]


# --------------------------------------------------------------------------------------------------------------- split


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 25), min_size=1, max_size=12),
    test_fraction=st.floats(0, 1, exclude_max=True),
    seed=st.integers(0, 2**32),
)
def test_every_row_of_every_client_ends_up_exactly_once_with_its_label(sizes, test_fraction, seed):
    x, y, client = table(sizes, seed % 7)
    fed = Federation.from_arrays(x, y, client, test_fraction, seed)
    assert_every_row_is_once(fed, client)
    for size, train, test in zip(sizes, fed.train.num_examples.tolist(), fed.test.num_examples.tolist(), strict=True):
        assert train >= 1
        assert abs(test - test_fraction * size) <= 0.5 or (test == size - 1 and test_fraction * size > test)


@pytest.mark.parametrize(
    ("test_fraction", "size", "expected"),
    [
        (0.0, 10, 0),
        (0.1, 10, 1),
        (0.1, 14, 1),
        (0.1, 16, 2),
        (0.25, 8, 2),
        (0.3, 9, 3),
        (0.5, 4, 2),
        (0.9, 10, 9),
        (0.99, 10, 9),  # 9.9 is 10, but one row is for training
        (0.999, 2, 1),
        (0.4, 1, 0),
        (0.999, 1, 0),  # a single row is for training
    ],
)
def test_the_test_share_is_taken_of_each_client(test_fraction, size, expected):
    x, y, client = table([size, 40, size])
    fed = Federation.from_arrays(x, y, client, test_fraction)
    assert fed.test.num_examples[[0, 2]].tolist() == [expected, expected]
    assert fed.train.num_examples[[0, 2]].tolist() == [size - expected, size - expected]


def test_a_tenth_is_the_default_share():
    fed = Federation.from_arrays(*table([30, 50]))
    assert fed.test.num_examples.tolist() == [3, 5]


def test_rows_of_one_client_come_in_runs():
    x, y, client = table([5, 7, 3])
    fed = Federation.from_arrays(x, y, client, 0.3)
    assert_every_row_is_once(fed, client)
    assert fed.train.offset.tolist() == [0, 3, 8, 10]  # 0.3 · 5 is 1.5: 2 (to even)
    assert fed.test.offset.tolist() == [0, 2, 4, 5]
    assert fed.num_clients == 3


def test_no_test_rows_at_all_is_a_federation():
    fed = Federation.from_arrays(*table([3, 4]), test_fraction=0)
    assert fed.test.features.shape == (0, 2)
    assert fed.test.labels.shape == (0,)
    assert fed.test.offset.tolist() == [0, 0, 0]


# ---------------------------------------------------------------------------------------------------------------- seed


def tensors(fed):
    return [getattr(rows, name) for rows in (fed.train, fed.test) for name in ("features", "labels", "offset")]


def test_the_same_seed_keeps_the_split():
    arrays = table([20, 30, 5])
    for first, second in zip(
        tensors(Federation.from_arrays(*arrays, 0.3, seed=4)),
        tensors(Federation.from_arrays(*arrays, 0.3, seed=4)),
        strict=True,
    ):
        assert torch.equal(first, second)


def test_the_default_seed_is_zero():
    arrays = table([20, 30])
    assert torch.equal(
        Federation.from_arrays(*arrays, 0.3).test.labels, Federation.from_arrays(*arrays, 0.3, seed=0).test.labels
    )


def test_every_seed_splits_another_way():
    x, y, client = table([20, 30])
    splits = set()
    for seed in range(20):
        fed = Federation.from_arrays(x, y, client, 0.5, seed)
        assert fed.test.num_examples.tolist() == [10, 15]  # the sizes are no matter of chance
        splits.add((frozenset(rows_of(fed.test, 0)), frozenset(rows_of(fed.test, 1))))
    assert len(splits) == 20


def test_every_row_can_be_held_out():
    x, y, client = table([10, 10])
    held = np.zeros(20)
    for seed in range(300):
        fed = Federation.from_arrays(x, y, client, 0.3, seed)
        held[rows_of(fed.test, 0) + rows_of(fed.test, 1)] += 1
    assert (abs(held / 300 - 0.3) < 5 * (0.3 * 0.7 / 300) ** 0.5).all()


def test_the_split_leaves_numpys_own_random_numbers_alone():
    np.random.seed(3)  # noqa: NPY002
    state = torch.get_rng_state()
    expected = np.random.random()  # noqa: NPY002
    np.random.seed(3)  # noqa: NPY002
    Federation.from_arrays(*table([5, 5]), 0.5)
    assert np.random.random() == expected  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), state)


# ------------------------------------------------------------------------------------------------------- what comes in


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (["b", "a", "b", "c", "a", "b"], ["a", "b", "c"]),
        ([12, -3, 12, 5, -3, 12], [-3, 5, 12]),
        ([1.5, 0.25, 1.5, 7.0, 0.25, 1.5], [0.25, 1.5, 7.0]),
        ([True, False, True, True, False, True], [False, True]),
        (np.array(["b", "a", "b", "c", "a", "b"], dtype=object), ["a", "b", "c"]),
        (torch.tensor([9, 4, 9, 6, 4, 9]), [4, 6, 9]),
        (["ward 10", "ward 9", "ward 10", "äußere", "ward 9", "ward 10"], ["ward 10", "ward 9", "äußere"]),
    ],
    ids=["strings", "integers", "floats", "truth values", "objects", "a tensor", "words"],
)
def test_ids_of_many_kinds(column, expected):
    x, y, _ = table([6])
    fed = Federation.from_arrays(x, y, column, test_fraction=0.5)
    assert fed.clients == expected
    assert [type(name) for name in fed.clients] == [type(name) for name in expected]  # plain Python, not NumPy's
    assert_every_row_is_once(fed, column)


def test_lists_arrays_and_tensors_mean_the_same():
    x, y, client = table([6, 9])
    one = tensors(Federation.from_arrays(x, y, client, 0.3))
    two = tensors(Federation.from_arrays(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(client), 0.3))
    three = tensors(Federation.from_arrays(x.tolist(), y.tolist(), client.tolist(), 0.3))
    for first, second, third in zip(one, two, three, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, third.to(first.dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint8])
def test_features_keep_their_type_and_shape(dtype):
    x = np.arange(6 * 1 * 4 * 5).reshape(6, 1, 4, 5).astype(dtype)
    fed = Federation.from_arrays(x, np.arange(6), [0, 1] * 3, test_fraction=1 / 3)
    assert fed.train.features.shape == (4, 1, 4, 5)
    assert fed.test.features.shape == (2, 1, 4, 5)
    assert fed.train.features.numpy().dtype == dtype
    for rows in (fed.train, fed.test):
        np.testing.assert_array_equal(rows.features.numpy(), x[rows.labels.numpy()])


def test_what_was_given_is_left_alone_and_not_shared():
    x, y, client = table([5, 5])
    kept = x.copy()
    fed = Federation.from_arrays(x, y, client, 0.4)
    fed.train.features.zero_()
    np.testing.assert_array_equal(x, kept)
    x[:] = -1
    assert (fed.test.features >= 0).all()


def test_num_examples_counts_between_offsets():
    rows = Rows(torch.zeros(9, 2), torch.zeros(9), torch.tensor([0, 4, 4, 9]))
    assert rows.num_examples.tolist() == [4, 0, 5]


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("test_fraction", [1, 1.0, 1.5, -0.01, float("nan"), float("inf")])
def test_a_share_that_leaves_nothing_to_train_on_is_refused(test_fraction):
    with pytest.raises(ConfigError, match=rf"^test_fraction is {test_fraction}; expected a share from 0 up to"):
        Federation.from_arrays(*table([5]), test_fraction=test_fraction)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("change", [-1, 1])
def test_columns_of_different_length_are_refused(which, change):
    arrays = list(table([4, 4]))
    arrays[which] = np.concatenate([arrays[which]] * 2)[: 8 + change]
    counts = [len(array) for array in arrays]
    with pytest.raises(
        DataError, match=f"^x has {counts[0]} rows, y {counts[1]} and client {counts[2]}; expected as many of each"
    ):
        Federation.from_arrays(*arrays)


def test_no_rows_are_refused():
    with pytest.raises(DataError, match=r"^there are no rows; expected at least one"):
        Federation.from_arrays(np.zeros((0, 3)), np.zeros(0), np.zeros(0))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_features_that_are_not_finite_are_refused_with_the_first_row(value, dtype):
    x, y, client = table([4, 4])
    x = x.astype(dtype)
    x[5, 1] = x[6, 0] = value
    with pytest.raises(DataError, match=r"^x holds NaN or infinity, first in row 5; expected finite"):
        Federation.from_arrays(x, y, client)
    with pytest.raises(DataError, match=r"^x holds NaN or infinity, first in row 5; expected finite"):
        Federation.from_arrays(x.reshape(8, 1, 2, 1), y, client)


def test_targets_that_are_not_finite_are_refused_with_the_first_row():
    x, y, client = table([4, 4])
    y = y.astype(float)
    y[3] = np.nan
    with pytest.raises(DataError, match=r"^y holds NaN or infinity, first in row 3; expected finite"):
        Federation.from_arrays(x, y, client)


def test_a_client_column_with_nan_is_refused():
    x, y, client = table([4, 4])
    column = client.astype(float)
    column[2] = np.nan
    with pytest.raises(DataError, match=r"^the client column holds NaN; expected an id in every row"):
        Federation.from_arrays(x, y, column)


@pytest.mark.parametrize("missing", [None, float("nan")])
@pytest.mark.parametrize("others", ["ab", (1, 2)])
def test_a_client_column_of_objects_with_a_missing_id_is_refused(missing, others):
    x, y, _ = table([4])
    with pytest.raises(DataError):
        Federation.from_arrays(x, y, np.array([others[0], missing, missing, others[1]], dtype=object))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (["a", float("nan"), "b", "b"], "the client column holds NaN"),  # of which NumPy makes the text nan
        (["a", 1, "b", "b"], "the client column mixes kinds of ids"),
        (pd.array(["a", pd.NA, "b", "b"], dtype="string"), "the client column holds NaN"),
        (np.array(["a", pd.NA, "b", "b"], dtype=object), "the client column holds NaN"),
        (np.array(["2024-01-01", "NaT"] * 2, dtype="M8[D]"), r"the client column is of type datetime64\[D\]; expected"),
    ],
)
def test_ids_that_numpy_or_pandas_would_blur_are_refused(column, message):
    x, y, _ = table([4])
    with pytest.raises(DataError, match=message):
        Federation.from_arrays(x, y, column)


@pytest.mark.parametrize("seed", [-1, 0.5, None])
def test_a_seed_that_is_no_seed_is_refused(seed):
    x, y, client = table([4])
    with pytest.raises(ConfigError, match="seed is"):
        Federation.from_arrays(x, y, client, seed=seed)


@pytest.mark.parametrize("which", ["x", "y"])
def test_columns_of_text_are_refused(which):
    x, y, client = table([4])
    words = np.array(list("abba"))
    with pytest.raises(DataError):
        Federation.from_arrays(words if which == "x" else x, words if which == "y" else y, client)


@pytest.mark.parametrize("column", [[[0], [0], [1], [1]], 7])
def test_a_client_column_that_is_no_column_is_refused(column):
    x, y, _ = table([4])
    with pytest.raises(DataError):
        Federation.from_arrays(x, y, column)


def test_a_read_only_array_is_taken_without_a_warning():
    """What pandas hands out with copy-on-write."""
    x, y, client = table([4, 4])
    x.flags.writeable = False
    assert_every_row_is_once(Federation.from_arrays(x, y, client), client)


@pytest.mark.parametrize("x", [[[1.0], [1.0, 2.0]], torch.tensor(3.0)], ids=["ragged", "no axes"])
def test_features_that_are_no_table_are_refused(x):
    with pytest.raises(DataError):
        Federation.from_arrays(x, [0, 1], [0, 0])
