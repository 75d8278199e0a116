"""Which files pytest leaves out where an optional package is missing (their tests say so), and how threads wait."""

import os
from importlib.util import find_spec

# Before torch is imported.  Threads that wait for each other sleep: tests share two cores, and one with two threads
# would take six times as long while others run.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

NEED_FLOWER = [
    "src/selffl/engines/flower/*",
    "src/selffl/runs/flower.py",
    "src/selffl/flower.py",
    "tests/engines/flower/wire.py",
]
collect_ignore_glob = [] if find_spec("flwr") else NEED_FLOWER
