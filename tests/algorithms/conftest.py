"""What tests of methods share."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def short_closing():
    """Clients train as long as the method says once training is over: its tests compare that."""
