"""Inputs that fuzzing has found: each is read, or refused in the package's own one line, and so is every seed."""

from pathlib import Path

import pytest
from targets import TARGETS, check

CASES = Path(__file__).parent / "cases"
KEPT = [(path.parent.name, path.name) for path in sorted(CASES.glob("*/*"))]


@pytest.mark.parametrize(("name", "case"), KEPT)
def test_what_was_found_stays_mended(name, case):
    if name not in TARGETS:
        pytest.skip("Flower is not installed")
    check(TARGETS[name], (CASES / name / case).read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_takes_what_fuzzing_begins_with(name):
    """Else it would stop at the first check, and nothing behind that would be tried."""
    taken = [check(TARGETS[name], content) for content in TARGETS[name].seeds()]
    assert any(taken) or name == "tweets"  # of which there have to be 1.6 million
