"""Flower with short waits, for tests alone: Python imports this before anything else if it is on PYTHONPATH.

A node is taken for dead after 20 seconds instead of 60 (it says itself how often it will be heard of; the server takes
10 seconds or more), and what polls every 3 seconds does so every second.

Flower starts a process for every message of a round, and each would spend three seconds on imports.  Here a SuperExec
has a process that has imported everything and done nothing else, and copies of it, by fork, run the apps.  While the
file that ``HASTENED_PAUSE`` names is there, no client trains: however busy the machine is, a node can be killed
between a message and what it does with it.
"""

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import traceback

COMMANDS = {
    "flwr-clientapp": ("flwr.supernode.cli", "flwr_clientapp"),
    "flwr-serverapp": ("flwr.superlink.cli", "flwr_serverapp"),
}

QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}

_sleep = time.sleep


def _briefly(seconds: float) -> None:
    _sleep(1.0 if seconds == 3 else seconds)


def _pause_training() -> None:
    """Let no message to train reach the client's app while the file is there."""
    from flwr.clientapp import ClientApp

    answer = ClientApp.__call__

    def answer_later(app, message, context):
        while message.metadata.message_type.startswith("train") and os.path.exists(
            os.environ.get("HASTENED_PAUSE", "")
        ):
            _sleep(0.1)
        return answer(app, message, context)

    ClientApp.__call__ = answer_later


def _run(words: list[str]) -> None:
    """Be the command, to its end."""
    status = 1
    try:
        _pause_training()
        sys.argv = sys.orig_argv = words
        module, name = COMMANDS[words[0]]
        status = getattr(importlib.import_module(module), name)() or 0
    except SystemExit as stopped:
        status = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _copy_oneself(orders: int) -> None:
    """Until the SuperExec has gone, run every command that it sends, a line each, in a copy of this process."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a copy has ended
    for line in os.fdopen(orders):
        words, is_quiet = json.loads(line)
        importlib.import_module(COMMANDS[words[0]][0])
        importlib.import_module("selffl.flower")
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if is_quiet:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, 1)
                os.dup2(nowhere, 2)
            _run(words)
    os._exit(0)


def _prepare() -> None:
    """Start the process to copy, and have Flower send its commands there."""
    orders, told = os.pipe()
    if os.fork() == 0:
        os.close(told)
        _copy_oneself(orders)
    os.close(orders)
    start = subprocess.Popen

    class Popen(start):
        def __new__(cls, args, *rest, **options):
            if isinstance(args, list) and args[0] in COMMANDS and not rest and options in ({}, QUIET):
                os.write(told, (json.dumps([args, bool(options)]) + "\n").encode())
                return None
            return super().__new__(cls)

    subprocess.Popen = Popen


if importlib.util.find_spec("flwr") is not None:
    time.sleep = _briefly
    if any(word.endswith("flower-supernode") for word in sys.orig_argv):
        for name in ("flwr.supercore.heartbeat", "flwr.supernode.fleet_http_connection"):
            module = importlib.import_module(name)
            module.HEARTBEAT_DEFAULT_INTERVAL, module.HEARTBEAT_CALL_TIMEOUT = 10, 5
    if any(word.endswith("flower-superexec") for word in sys.orig_argv):
        _prepare()
