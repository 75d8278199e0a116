"""A Flower grid in one process that sends every message over the wire and back: what would not survive it fails.

Messages go through Flower's protocol buffers and through the objects that it stores and pulls, and are held against the
checks that its server makes.  A `Fault` stands between a client's answer and the server.
"""

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.server.utils.validator import validate_message
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

RUN = 7


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
    it returns the replies that arrive.
    """

    def __init__(self, app, clients, fault=None, run_config=None):
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN, SUPERLINK_NODE_ID
        self.app, self.clients, self.fault, self.run_config = app, dict(clients), fault, run_config or {}
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
        replies = []
        for message in messages:
            if self.fault is not None and message.metadata.message_type == "train":
                replies += self.fault(message, self.answer)
            else:
                replies.append(self.answer(message))
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
