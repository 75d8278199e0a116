"""Which files pytest leaves out where an optional package is missing (their tests say so), how threads wait, and where
temporary files lie."""

import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

# Before torch is imported.  Threads that wait for each other sleep: tests share two cores, and one with two threads
# would take six times as long while others run.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# In memory where there is room for them and scripts may run from it: tests that write and delete many files otherwise
# wait for the disk half of the time.  All tests together leave less than one gigabyte.  Not where simulations over
# Flower keep their own objects in it.
MEMORY, ROOM = Path("/dev/shm"), 4 * 10**9
if "TMPDIR" not in os.environ and MEMORY.is_dir() and not find_spec("flwr"):
    is_executable = not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
    if is_executable and shutil.disk_usage(MEMORY).free > ROOM:
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)

NEED_FLOWER = [
    "src/selffl/engines/flower/*",
    "src/selffl/runs/flower.py",
    "src/selffl/flower.py",
    "tests/engines/flower/wire.py",
]
collect_ignore_glob = [] if find_spec("flwr") else NEED_FLOWER
