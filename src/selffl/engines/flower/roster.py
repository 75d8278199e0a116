"""Which client sits on which node: nodes are asked, for their ids are random."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from selffl.engines.flower.messages import ABOUT, PROTOCOL, Introduction, read, shown
from selffl.errors import ConfigError, DataError

POLL_SECONDS = 1.0  # between two looks at who is connected

_log = logging.getLogger(__name__)


class Roster:
    """Which client sits on which node.

    Node ids are random, and a node that comes back may have another: nodes that are new are asked who they are.  One
    that is silent, or that is none of ours, is asked again after one look at the list of nodes, then after two, four
    and so on: it may have been mended, and should not hold up every round.
    """

    def __init__(self, ids: Sequence[str], model: str, seconds: float) -> None:
        self._numbers = {client: number for number, client in enumerate(ids)}
        self._ids, self._fingerprint, self._seconds = ids, model, seconds
        self._claims: dict[int, int] = {}  # node: number of its client
        self._doubled: set[int] = set()  # nodes whose client another node had claimed before
        self._preparation: str | None = None  # of the first client that came: all have to have the same
        self._rows: dict[int, int] = {}  # number of a client: the training rows that it said it has, at first
        self._looks = 0
        self._pauses: dict[int, tuple[int, int]] = {}  # node: the look at which it is asked again, and the pause before

    def locate(self, grid: Grid) -> dict[int, int]:
        """Node of each client that is connected, by the client's number."""
        nodes = list(grid.get_node_ids())
        self._looks += 1
        for known in (self._claims, self._pauses):
            for node in known.keys() - set(nodes):
                del known[node]  # type: ignore[attr-defined]
        due = [node for node in nodes if self._pauses.get(node, (0, 0))[0] <= self._looks]
        self._ask(grid, [node for node in due if node not in self._claims])
        found: dict[int, int] = {}
        for node, number in self._claims.items():  # in the order in which they came
            if number in found:
                if node not in self._doubled:
                    _log.warning(
                        "node %d says that it is client %s, as node %d does; it is left out while that one is there.",
                        node, self._ids[number], found[number],
                    )  # fmt: skip
                self._doubled.add(node)
                continue
            found[number] = node
        return found

    def forget(self, node: int) -> None:
        """Ask that node again who it is."""
        self._claims.pop(node, None)

    def rows(self, most: int) -> list[int]:
        """The most training rows of each client: as many as it said when it first came, and no more than ``most``.

        What counts as rows later is what it is weighed by: nobody has more of them from round to round.
        """
        return [min(self._rows.get(number, most), most) for number in range(len(self._ids))]

    def _ask(self, grid: Grid, nodes: Sequence[int]) -> None:
        if not nodes:
            return
        question = {"protocol": PROTOCOL}
        messages = [
            Message(RecordDict({ABOUT: ConfigRecord(question)}), node, MessageType.QUERY, ttl=self._seconds)  # type: ignore[arg-type]
            for node in nodes
        ]
        replies = {
            reply.metadata.reply_to_message_id: reply
            for reply in grid.send_and_receive(messages, timeout=self._seconds)
        }
        for message in messages:  # in their order: which reply is first is chance
            node, reply = message.metadata.dst_node_id, replies.get(message.metadata.message_id)
            try:
                if reply is None:
                    raise DataError(f"it has not said who it is within {self._seconds:g} seconds")
                if reply.has_error():
                    raise DataError(f"it cannot say who it is: {shown(reply.error.reason)}")
                self._claims[node] = self._claim(read(Introduction, reply.content))
                self._pauses.pop(node, None)
            except (DataError, ConfigError) as error:
                pause = max(2 * self._pauses.get(node, (0, 0))[1], 1)
                self._pauses[node] = self._looks + pause, pause
                _log.warning("node %d is left out: %s", node, error)

    def _claim(self, introduction: Introduction) -> int:
        for name, expected in (("protocol", PROTOCOL), ("fingerprint", self._fingerprint)):
            found = getattr(introduction, name)
            if found != expected:
                raise ConfigError(
                    f"the {name} of client {shown(introduction.client)} is {shown(found)}; expected {expected!r}, as "
                    "the server has it."
                )
        if introduction.client not in self._numbers:
            raise ConfigError(
                f"client {shown(introduction.client)} is not in the list of {len(self._numbers)} clients."
            )
        if self._preparation is None:
            self._preparation = introduction.preparation
        if introduction.preparation != self._preparation:
            raise ConfigError(
                f"client {shown(introduction.client)} prepares its table in another way than the first client that "
                "came; expected one preparation for all. Make it from all sites' profiles (selffl data prepare), and "
                "pass it as preparation= wherever rows are read."
            )
        number = self._numbers[introduction.client]
        self._rows.setdefault(number, introduction.num_examples)
        return number


def wait_for_clients(roster: Roster, grid: Grid, number: int, seconds: float) -> None:
    """Until all are connected, or the time is over; who is missing then is missing from the rounds it is drawn for."""
    end = time.monotonic() + seconds
    while len(found := roster.locate(grid)) < number:
        if time.monotonic() >= end:
            _log.warning("%d of %d clients are connected after %g seconds.", len(found), number, seconds)
            return
        time.sleep(min(POLL_SECONDS, seconds))
