"""Data sets by name."""

import inspect

import pytest

from selffl.data import DATA_SETS, load
from selffl.errors import ConfigError, DataError


def test_every_data_set_is_under_its_name_with_what_there_is_to_know():
    assert list(DATA_SETS) == [
        "digits",
        "mnist",
        "letters",
        "emnist",
        "cifar10",
        "sentiment",
        "sent140",
        "wakeword",
        "synthetic",
        "exam",
        "mathachieve",
        "scotssec",
        "radon",
        "sleepstudy",
        "contraception",
        "immunisation",
    ]
    for name, entry in DATA_SETS.items():
        assert entry.name == name
        assert entry.title
        assert entry.licence
        assert entry.home.startswith("http")
        assert len(entry.classes) in (0, 2, 10)
        options = inspect.signature(entry.load).parameters
        assert {"seed", "validation_fraction"} <= set(options)
        assert ("test_fraction" in options) == (name != "wakeword")  # whose clips are dealt out by a fixed share
        for remote in entry.remotes:
            assert remote.url.startswith("https://")
            assert len(bytes.fromhex(remote.sha256)) == 32
        assert entry.can_fetch == any(file.can_fetch for file in entry.files())


@pytest.mark.parametrize("name", DATA_SETS)
def test_what_is_loaded_says_how_to_load_it_again(name):
    if name in ("mnist", "cifar10"):
        pytest.skip("seconds each; their own tests look at the source")
    try:
        fed = load(name, seed=1, validation_fraction=0.1)
    except DataError as error:
        pytest.skip(str(error))
    if name != "sent140":  # whose users the seed draws
        assert fed.num_clients == DATA_SETS[name].clients
    assert set(fed.source) == {"name", *inspect.signature(DATA_SETS[name].load).parameters}
    assert load(**fed.source).fingerprint() == fed.fingerprint()


def test_unknown_names_and_options_are_refused_with_the_nearest():
    with pytest.raises(
        ConfigError, match=r"^unknown data set 'minst'; did you mean 'mnist'\? Expected one of: cifar10,"
    ):
        load("minst")
    with pytest.raises(ConfigError, match=r"^unknown option of digits 'num_client'; did you mean 'num_clients'\?"):
        load("digits", num_client=3)
