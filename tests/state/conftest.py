"""Tests of files wait for the disk, as the library does."""

import os
import posix

import pytest


@pytest.fixture(autouse=True)
def waiting_for_the_disk(monkeypatch):
    """What `tests/conftest.py` leaves out everywhere else."""
    monkeypatch.setattr(os, "fsync", posix.fsync)
