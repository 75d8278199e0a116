"""What tests of several folders share."""

import sys

import pytest
from rich.console import Console

from selffl import cli


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
