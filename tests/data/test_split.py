"""`Split`: what it refuses, and the one set of keywords that every way into a federation takes."""

import inspect

import numpy as np
import pytest
import torch

from selffl import ConfigError, Federation
from selffl.data import DATA_SETS, load
from selffl.data.split import Split, SplitOptions, split_of, split_of_training_rows

READERS = [name for name in vars(Federation) if name.startswith("from_")]


@pytest.mark.parametrize(
    "wrong", [{"test_fraction": 1.0}, {"validation_fraction": -0.1}, {"seed": -1}, {"test_fraction": "half"}]
)
def test_a_split_is_checked_where_it_is_made(wrong):
    with pytest.raises(ConfigError, match=rf"^{next(iter(wrong))} is .*; expected"):
        Split(**wrong)


def test_the_keywords_are_the_fields():
    split = Split(0.2, 0.3, True, 4)
    assert split.options == vars(split)
    assert split_of(split.options) == split
    assert list(SplitOptions.__annotations__) == list(vars(split))


def test_every_reader_takes_the_same_keywords():
    """`from_arrays` writes them out, all others take them as they are; a large file has no validation rows."""
    written = inspect.signature(Federation.from_arrays).parameters
    for name, value in Split().options.items():
        assert written[name].default == value
    for reader in set(READERS) - {"from_arrays", "from_large_file"}:
        last = list(inspect.signature(getattr(Federation, reader)).parameters.values())[-1]
        assert (last.kind, last.annotation) == (inspect.Parameter.VAR_KEYWORD, "Unpack[SplitOptions]"), reader


def test_a_mistyped_keyword_is_named_with_those_there_are():
    with pytest.raises(ConfigError, match=r"^'sede' is no argument here; expected .*test_fraction.*seed\.$"):
        Federation.from_dataset(torch.utils.data.TensorDataset(torch.zeros(2, 1), torch.zeros(2)), [0, 1], sede=3)


def test_rows_that_are_split_keep_their_test_rows():
    with pytest.raises(ConfigError, match=r"^test_fraction is 0\.2, and rows is split"):
        split_of_training_rows({"test_fraction": 0.2}, "rows")
    assert split_of_training_rows({"seed": 3}, "rows").seed == 3


def test_validation_rows_of_divided_rows_can_be_taken_of_each_class():
    owner, labels = np.repeat([0, 1], 20), torch.tensor([0, 1] * 20)
    chosen = Split(validation_fraction=0.5, stratify=True).is_validation(owner, labels)
    for client in (0, 1):
        for label in (0, 1):
            assert chosen[(owner == client) & (labels.numpy() == label)].sum() == 5


def test_a_data_set_s_shares_are_options_of_its_own():
    fed = load("digits", num_clients=5, test_fraction=0.5, validation_fraction=0.2, seed=3)
    assert fed.source == {
        "name": "digits",
        "num_clients": 5,
        "classes_per_client": 3,
        "test_fraction": 0.5,
        "validation_fraction": 0.2,
        "seed": 3,
    }
    assert load(**fed.source).fingerprint() == fed.fingerprint()
    for data_set in DATA_SETS.values():
        assert "seed" in inspect.signature(data_set.load).parameters
        assert "split" not in inspect.signature(data_set.load).parameters
