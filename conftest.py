"""Which files pytest leaves out where an optional package is missing; their tests say so when they are skipped."""

from importlib.util import find_spec

NEED_FLOWER = [
    "src/selffl/engines/flower/*",
    "src/selffl/runs/flower.py",
    "src/selffl/flower.py",
    "tests/engines/flower/wire.py",
]
collect_ignore_glob = [] if find_spec("flwr") else NEED_FLOWER
