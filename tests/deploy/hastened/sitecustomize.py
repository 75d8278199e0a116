"""Flower with short waits, for tests alone: Python imports this before anything else if it is on PYTHONPATH.

A node is taken for dead after 20 seconds instead of 60 (it says itself how often it will be heard of; the server takes
10 seconds or more), and what polls every 3 seconds does so every second.
"""

import importlib
import importlib.util
import sys
import time

_sleep = time.sleep


def _briefly(seconds: float) -> None:
    _sleep(1.0 if seconds == 3 else seconds)


if importlib.util.find_spec("flwr") is not None:
    time.sleep = _briefly
    if any(word.endswith("flower-supernode") for word in sys.orig_argv):
        for name in ("flwr.supercore.heartbeat", "flwr.supernode.fleet_http_connection"):
            module = importlib.import_module(name)
            module.HEARTBEAT_DEFAULT_INTERVAL, module.HEARTBEAT_CALL_TIMEOUT = 10, 5
