"""Kill a Flower server and its clients at their first, second, third … file operation, and compare what they leave.

`both`: server and clients are one process, which is killed anywhere.  The server is started again, and everything has
to be what an undisturbed run leaves, clients' memories included.  `client`: each message has a process of its own, as
in Flower, which is killed anywhere; the server goes on.  Everything has to be what a run leaves in which that message
was lost on its way to the client, or the answer on its way back.

    python tests/engines/flower/flower_kill_points.py            every point, `make flower-kill-points`
    python tests/engines/flower/flower_kill_points.py client     those of one kind
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from wire import Small

import kill_points
from kill_points import Killer, content, nothing
from programs import fork

KINDS = ("query", "train", "evaluate")  # of messages
SETTINGS = {"rounds": 3, "participation": 0.5, "evaluate_every": 2, "method": "ditto"}


def federation(root: Path) -> Small:
    """Four clients whose method has memories."""
    return Small(root, SETTINGS["method"])


def serve(root: Path, fault: Any = None) -> None:
    """Server and clients of three rounds; where they were begun, they go on."""
    small = federation(root)
    options = {name: value for name, value in SETTINGS.items() if name != "method"}
    small.serve(small.grid(None if fault is None else dict.fromkeys(KINDS, fault)), **options)


kill_points.SCENARIOS["both"] = (nothing, serve)
kill_points.UNMEASURED.add("run")  # a name that each run draws anew; a client goes on with no other


class Processes:
    """Answers messages each in a process of its own, one of which is killed at an operation of all of theirs."""

    def __init__(self, root: Path, number: int) -> None:
        self.root, self.number = root, number
        self.count, self.place, self.killed = 0, -1, -1

    def __call__(self, message: Message, answer: Any) -> list[Message]:
        """The reply, if the client lives to send it."""
        self.place += 1
        reading, writing = os.pipe()

        def work() -> None:
            killer = Killer(self.root / "clients", self.number - self.count)
            killer.arm()
            reply = answer(message)
            sent = message_to_proto(reply).SerializeToString(), reply.metadata.message_id
            with os.fdopen(writing, "wb") as file:
                pickle.dump((killer.count, sent), file)

        child = fork(work)
        os.close(writing)
        with os.fdopen(reading, "rb") as file:
            told = file.read()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            assert code == -signal.SIGKILL, f"a client ended with {code}"
            self.count, self.killed = self.number, self.place
            return []
        done, (reply, identity) = pickle.loads(told)
        self.count += done
        arrived = message_from_proto(ProtoMessage.FromString(reply))
        arrived.metadata.__dict__["_message_id"] = identity
        return [arrived]


class Loss:
    """Loses one message on its way to the client, or the answer on its way back."""

    def __init__(self, place: int, is_answer: bool) -> None:
        self.left, self.is_answer = place, is_answer

    def __call__(self, message: Message, answer: Any) -> list[Message]:
        """The reply, if it arrives."""
        self.left -= 1
        if self.left != -1:
            return [answer(message)]
        if self.is_answer:
            answer(message)
        return []


def left_by(fault: Any) -> dict[str, Any]:
    """What a run with a fault leaves in its folder, which has the same name each time."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "run"
        root.mkdir()
        serve(root, fault(root))
        return {name: _unnamed(each, place) for name, each in content(root).items()}


def _unnamed(found: Any, place: str) -> Any:
    """Without the name of the folder."""
    return pickle.loads(pickle.dumps(found).replace(place.encode(), b"-" * len(place)))


def clients_killed(step: int = 1) -> Iterator[tuple[int, bool]]:
    """Of each operation of clients, or every so-manieth, its number, and whether the run went on as it should."""
    expected: dict[int, list[dict[str, Any]]] = {}
    number = step
    while True:
        made: list[Processes] = []

        def fault(root: Path, number: int = number, made: list[Processes] = made) -> Processes:
            made.append(Processes(root, number))
            return made[0]

        found, place = left_by(fault), made[0].killed
        if place < 0:
            return
        if place not in expected:
            expected[place] = [left_by(lambda _, place=place, each=each: Loss(place, each)) for each in (False, True)]
        yield number, found in expected[place]
        number += step


def main(names: list[str]) -> int:
    """Every point; how many went wrong."""
    wrong = kill_points.main(["both"]) if "both" in names or not names else 0
    if "client" in names or not names:
        began, verdicts = time.perf_counter(), list(clients_killed())
        bad = [number for number, is_good in verdicts if not is_good]
        print(f"client: {len(verdicts)} points, {len(bad)} went wrong {bad}, {time.perf_counter() - began:.0f} s")
        wrong += len(bad)
    return wrong


if __name__ == "__main__":
    logging.getLogger("flwr").setLevel(logging.ERROR)
    sys.exit(1 if main(sys.argv[1:]) else 0)
