"""Work on several clients at a time, each by one thread: what is small is not worth sharing out by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


def do_in_threads(work: Callable[[int, int], None], number: int) -> None:
    """Call ``work(thread, place)`` for each place below ``number``, by as many threads as torch may use.

    Threads are numbered from 0, have no others of torch's within the work, and take the next place once they are done
    with one.
    """
    allowed = torch.get_num_threads()
    places, failures = iter(range(number)), list[BaseException]()

    def take_places(thread: int) -> None:
        torch.set_num_threads(1)
        try:
            for place in places:
                work(thread, place)
        except BaseException as failure:  # which the caller is told
            failures.append(failure)

    threads = [threading.Thread(target=take_places, args=(each,)) for each in range(1, min(allowed, number))]
    for each in threads:
        each.start()
    try:
        take_places(0)
        for each in threads:
            each.join()
    finally:
        torch.set_num_threads(allowed)  # also what threads that start later are given
    if failures:
        raise failures[0]
