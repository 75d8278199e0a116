"""Processes that need not import everything again: forked from the test's own, which has torch already."""

import os
import signal
import sys
import traceback

import torch

from selffl import cli


def fork(function, *arguments):
    """Call a function in a process of its own: its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)  # those of the other process are not there
        function(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def become_selffl(words, folder=".", environment=None):
    """Be `selffl WORDS...` from here on, with the files 0, 1 and 2 as input, output and messages."""
    code = 1
    try:
        os.chdir(folder)
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        torch.set_num_threads(1)
        sys.stdin, sys.stdout, sys.stderr = (open(number, mode) for number, mode in enumerate("rww"))  # noqa: SIM115
        cli.console.out, cli.console.err = cli.console._Console(), cli.console._Console(stderr=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = ["selffl", *words]
        cli.main()
    except SystemExit as stopped:
        code = stopped.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
