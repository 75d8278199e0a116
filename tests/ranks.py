"""Several ranks on this machine: processes forked from the test's own, which meet on the loopback device."""

import os
import socket

from programs import fork

MOST_SECONDS = 30  # that a rank waits for another, so that no test waits for ever
SIGNALLED = 128  # added to a signal's number, as a shell does


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start_ranks(size, function, *arguments, **environment):
    """Begin ``function(rank, *arguments)`` on so many ranks: their process ids."""
    port = free_port()

    def work(rank):
        given = {
            "SELFFL_RANK_TIMEOUT": MOST_SECONDS,
            "RANK": rank,
            "WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        os.environ.update({name: str(value) for name, value in (given | environment).items()})
        function(rank, *arguments)

    return [fork(work, rank) for rank in range(size)]


def wait_for(processes):
    """The exit code of each; a signal's number counts from 128."""
    found = []
    for process in processes:
        _, status = os.waitpid(process, 0)
        code = os.waitstatus_to_exitcode(status)
        found.append(code if code >= 0 else SIGNALLED - code)
    return found


def on_ranks(size, function, *arguments, **environment):
    """Call ``function(rank, *arguments)`` on so many ranks, to the end: their exit codes."""
    return wait_for(start_ranks(size, function, *arguments, **environment))
