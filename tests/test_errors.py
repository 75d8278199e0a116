from __future__ import annotations

import pickle

import pytest

import selffl
from selffl import errors
from selffl.errors import ConfigError, SelfFLError, one_line, unknown_name

# Every error the module defines, so that a new one has to keep the rules too.
KINDS = sorted(
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and value.__module__ == errors.__name__ and value is not SelfFLError
)


def test_the_three_mistakes_a_user_can_make_are_there():
    assert {"ConfigError", "DataError", "DivergedError"} <= set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_every_error_is_one_of_the_family_and_public(name):
    kind = getattr(errors, name)
    assert issubclass(kind, SelfFLError)
    assert kind is getattr(selffl, name)
    assert name in selffl.__all__
    assert f"── {name} " in errors.__doc__
    with pytest.raises(SelfFLError, match="what was found"):
        raise kind("what was found")


def test_the_family_is_catchable_apart_from_faults_of_ours():
    assert selffl.SelfFLError is SelfFLError
    assert SelfFLError.__bases__ == (Exception,)  # not a ValueError: those stay our own faults, exit code 1


def test_kinds_are_siblings():
    kinds = [getattr(errors, name) for name in KINDS]
    assert not any(issubclass(a, b) for a in kinds for b in kinds if a is not b)


def test_unknown_name_quotes_what_was_found_and_suggests_the_nearest():
    error = unknown_name("algorithm", "fedavgg", ["self-fl", "fedavg", "ditto"])
    assert isinstance(error, ConfigError)
    assert str(error) == (
        "unknown algorithm 'fedavgg'; did you mean 'fedavg'? Expected one of: ditto, fedavg, self-fl."
    )


def test_unknown_name_suggests_nothing_when_nothing_is_near():
    message = str(unknown_name("study", "zzzz", ["mnist", "cifar10"]))
    assert message == "unknown study 'zzzz'; expected one of: cifar10, mnist."


def test_unknown_name_takes_any_iterable_once():
    assert "expected one of: a, b." in str(unknown_name("thing", "x", (name for name in ("b", "a"))))
    assert "did you mean 'beta'" in str(unknown_name("thing", "bet", {"beta": 1, "alpha": 2}.keys()))


def test_messages_are_one_line():
    assert "\n" not in str(unknown_name("thing", "x", [f"name-{index}" for index in range(50)]))


def test_what_other_code_says_is_one_line_of_bounded_length_and_never_empty():
    assert one_line(ValueError("two\n  lines")) == "two lines"
    assert len(one_line(ValueError("x" * 1000))) == 200
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"


@pytest.mark.parametrize("name", KINDS)
def test_what_is_quoted_neither_ends_the_line_nor_reaches_the_terminal(name):
    """File names, cells and keys of somebody else's files are quoted as they are."""
    found = str(getattr(errors, name)("column 'a\nb\x1dc\x1b[2J\u2028\u202e\ud800é\u00a0'; expected x."))
    assert found == "column 'a\\nb\\x1dc\\x1b[2J\\u2028\\u202e\\ud800é\u00a0'; expected x."
    assert len(found.splitlines()) == 1
    long = str(getattr(errors, name)("begin " + 10**6 * "x" + " end."))
    assert len(long) < 2100
    assert long.startswith("begin x")
    assert long.endswith("x end.")


def test_an_error_that_is_sent_between_processes_stays_what_it_is():
    error = ConfigError("a\nb")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "a\\nb"
