"""What tests of several folders share."""

import os
import sys

import pytest
from rich.console import Console

from selffl import cli


@pytest.fixture(autouse=True)
def one_core(monkeypatch):
    """Comparisons train in the process of the test unless it asks for more: another spends four seconds on imports."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)


@pytest.fixture
def command_line(monkeypatch, capfd, tmp_path):
    """A function that runs the command line here, in an empty folder: its exit code, output and messages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.console, "out", Console(width=200))
    monkeypatch.setattr(cli.console, "err", Console(width=200, stderr=True))

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["selffl", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        printed = capfd.readouterr()
        return stopped.value.code, printed.out, printed.err

    return call
