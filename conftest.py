"""Which files pytest leaves out where an optional package is missing; their tests say so when they are skipped."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("flwr") else ["src/selffl/engines/flower/*", "tests/engines/flower/wire.py"]
