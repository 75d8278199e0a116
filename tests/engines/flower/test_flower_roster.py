"""Who sits where: what nodes say of themselves, how often they are asked, and what counts as their rows."""

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'selffl[flower]'")

from flwr.app import RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.task_identity import TaskIdentity

from selffl.engines.flower.messages import ABOUT, PROTOCOL, Introduction, write
from selffl.engines.flower.roster import Roster


class Nodes:
    """A grid of nodes that say who they are; one without an introduction is silent."""

    def __init__(self, **said):
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 7, SUPERLINK_NODE_ID
        self.said = {int(name[1:]): note for name, note in said.items()}
        self.asked = []

    def get_node_ids(self):
        return list(self.said)

    def send_and_receive(self, messages, *, timeout):
        replies = []
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = str(number)
            node = message.metadata.dst_node_id
            self.asked.append(node)
            if self.said[node] is not None:
                about = SimpleNamespace(reply_to_message_id=str(number))
                content = RecordDict({ABOUT: write(self.said[node])})
                replies.append(SimpleNamespace(metadata=about, content=content, has_error=lambda: False))
        return replies[::-1]


def client(name, rows=5, preparation=""):
    return Introduction(PROTOCOL, name, rows, "model", preparation)


def roster():
    return Roster(["a", "b", "c"], "model", 1.0)


def test_the_first_node_of_a_client_counts_and_the_second_is_told_of_once(caplog):
    grid, found = Nodes(n9=client("a"), n4=client("a"), n7=client("c"), n2=client("b")), roster()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert found.locate(grid) == {0: 9, 2: 7, 1: 2}
    assert [record.getMessage() for record in caplog.records] == [
        "node 4 says that it is client a, as node 9 does; it is left out while that one is there."
    ]
    assert grid.asked == [9, 4, 7, 2]  # once each
    del grid.said[9]
    assert found.locate(grid) == {0: 4, 2: 7, 1: 2}


def test_who_is_silent_is_asked_again_after_ever_longer_pauses():
    grid, found = Nodes(n1=None), roster()
    looks = []
    for look in range(1, 17):
        before = len(grid.asked)
        assert found.locate(grid) == {}
        looks += [look] * (len(grid.asked) - before)
    assert looks == [1, 2, 4, 8, 16]
    grid.said[1] = client("b")
    for _ in range(16):
        located = found.locate(grid)
    assert located == {1: 1}


def test_rows_are_those_that_a_client_had_at_first_and_no_more_than_anybody_may_have():
    grid, found = Nodes(n1=client("a", 7), n2=client("c", 90)), roster()
    found.locate(grid)
    assert found.rows(50) == [7, 50, 50]
    grid.said[1] = client("a", 40)
    found.forget(1)
    found.locate(grid)
    assert found.rows(50) == [7, 50, 50]
    assert found.rows(5) == [5, 5, 5]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (client("d"), "client 'd' is not in the list of 3 clients"),
        (Introduction(PROTOCOL + 1, "b", 5, "model"), "the protocol of client 'b' is"),
        (Introduction(PROTOCOL, "b", 5, "other"), "the fingerprint of client 'b' is 'other'; expected 'model'"),
        (client("b", 5, "another"), "client 'b' prepares its table in another way than the first client that came"),
    ],
)
def test_who_does_not_fit_is_left_out_by_name(said, reason, caplog):
    assert roster().locate(Nodes(n1=client("a"), n2=said)) == {0: 1}
    assert reason in caplog.text
