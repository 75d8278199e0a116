"""A Flower grid in one process that sends every message over the wire and back: what would not survive it fails.

Messages go through Flower's protocol buffers and through the objects that it stores and pulls, and through the checks
that its server makes.  A fault stands between a client's answer and the server.  `Small` is a federation that takes no
time, for tests of what goes on around the training.
"""

import torch
from flwr.app import Array, Context, Error, Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.server.utils.validator import validate_message
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from selffl.flower import client_app, server_app
from selffl.runs import folder as files

RUN = 7


# Where a single number of Self-FL's upload travels; FedAvg's has the first of them.
SINGLE = {
    "num_examples": ("numbers.float32", 0),
    "intra_variance": ("numbers.float32", 1),
    "wanted_steps": ("numbers.float32", 2),
    "num_local_steps": ("numbers.int64", 0),
}


def set_numbers(arrays, name, value, only_first=False):
    """The tensor of that name in an answer holds ``value``, everywhere or in its first entry."""
    name, place = SINGLE.get(name, (name, None))
    array = arrays[name].numpy().copy()
    if place is not None:
        array[place] = value
    elif only_first:
        array.reshape(-1)[0] = value
    else:
        array[...] = value
    arrays[name] = Array(array)


def over_the_wire(message):
    """The message as the other side sees it."""
    copied = message_from_proto(ProtoMessage.FromString(message_to_proto(message).SerializeToString()))
    contents = {name: part.deflate() for name, part in get_all_nested_objects(copied).items()}
    arrived = inflate_object_from_contents(copied.object_id, contents)
    arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
    return arrived


def sealed(message, is_reply):
    """The message with its id, once Flower's server would take it."""
    message.metadata.__dict__["_message_id"] = message.object_id
    assert not validate_message(message, is_reply)
    return message


class WireGrid(Grid):
    """Nodes that each run ``app``, by node id: ``clients`` gives the id of the client on each, or its configuration.

    ``fault(message, answer)`` is given every message that is sent to train, and a function that has the client answer;
    it returns the replies that arrive.  A dictionary has such a function for each kind of message that is to be met by
    one: ``{"evaluate": fault}``.
    """

    def __init__(self, app, clients, fault=None, run_config=None):
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN, SUPERLINK_NODE_ID
        self.app, self.clients, self.run_config = app, dict(clients), run_config or {}
        self.faults = fault if isinstance(fault, dict) else {} if fault is None else {"train": fault}
        self.sent = []  # every message, and the seconds that its answer is waited for
        self.received = []  # every message as the nodes saw it

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.clients)

    def push_messages(self, messages):
        raise NotImplementedError

    def pull_messages(self, message_ids):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        assert isinstance(messages, list)  # a generator would be empty the second time Flower goes through it
        for message in messages:
            sealed(message, is_reply=False)
            self.sent.append((message, timeout))
        replies = []
        for message in messages:
            fault = self.faults.get(message.metadata.message_type)
            replies += [self.answer(message)] if fault is None else fault(message, self.answer)
        return replies[::-1]  # in no order that anybody may count on

    def answer(self, message):
        node = message.metadata.dst_node_id
        arrived = over_the_wire(message)
        self.received.append(arrived)
        config = self.clients[node]
        config = config if isinstance(config, dict) else {"partition-id": config}
        context = Context(RUN, node, config, RecordDict(), self.run_config)
        try:
            reply = self.app(arrived, context)
        except Exception as error:  # as a node of Flower's does
            reason = f"{type(error)}:<'{error}'>"
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=arrived)
        return over_the_wire(sealed(reply, is_reply=True))


class Small:
    """Four clients with a few rows of three classes, a linear model, and the two apps, which share a folder."""

    clients = range(4)
    nodes = {100 + client: client for client in clients}  # noqa: RUF012 (nobody changes it)

    def __init__(self, folder, method="self-fl"):
        self.folder, self.method = folder, method
        self.memory, self.out = folder / "clients", folder / "run"

    @staticmethod
    def module():
        torch.manual_seed(0)
        return nn.Linear(4, 3)

    @staticmethod
    def rows(client):
        """(x_train, y_train, x_test, y_test)"""
        features = torch.randn(10 + 2 * client, 4, generator=torch.Generator().manual_seed(client))
        labels, num_train = features[:, :3].argmax(1), 6 + client
        return features[:num_train], labels[:num_train], features[num_train:], labels[num_train:]

    def client(self, load_data=None, **changed):
        given = {"algorithm": self.method, "memory_dir": self.memory, **changed}
        return client_app(given.pop("module", self.module()), load_data or self.rows, **given)

    def grid(self, fault=None, **changed):
        return WireGrid(self.client(**changed), self.nodes, fault)

    def serve(self, grid=None, config=None, **changed):
        """The records that a run leaves."""
        given = {
            "rounds": 2, "participation": 1.0, "learning_rate": 0.05, "batch_size": 4, "seed": 3, "evaluate_every": 1,
            "round_seconds": 20.0, "connect_seconds": 0, "experiment": "first", "out": self.out, **changed,
        }  # fmt: skip
        app = server_app(self.module(), self.method, self.clients, **given)
        app(grid or self.grid(), Context(RUN, 1, {}, RecordDict(), config or {}))
        return files.read_records(given["out"])
