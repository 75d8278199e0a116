"""What tests of studies share."""

import multiprocessing

import pytest


@pytest.fixture
def forked_workers(monkeypatch):
    """Processes that runs are shared out to begin as copies of this one: others would import everything first."""
    forking = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: forking)
