"""A SuperLink and its nodes, as a Grid shows them."""

from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.serverapp import Grid

from hfedatm.base.handover.parcel import by_parcel
from hfedatm.base.versions import own_version


def text(value):
    return RecordDict({"text": ConfigRecord({"value": value})})


def said(message):
    return message.content.config_records["text"]["value"]


def to(*nodes, kind="train"):
    return [Message(text(f"for {node}"), node, kind) for node in nodes]


class FakeLink(Grid):
    """A Grid: ``refuse`` are not accepted, ``silent`` never answer, node -5 gives error 5."""

    def __init__(self, nodes, silent=(), refuse=(), tier="client"):
        self.nodes, self.silent, self.refuse = list(nodes), set(silent), set(refuse)
        self.tier, self.inbox, self.received = tier, {}, []

    def set_run(self, run):
        pass

    @property
    def run(self):
        return None

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def get_node_ids(self):
        return self.nodes

    def push_messages(self, messages):
        ids = []
        for message in messages:
            node = message.metadata.dst_node_id
            if node not in self.refuse:
                message.metadata.__dict__["_message_id"] = f"m{len(self.received)}"
                self.received.append((node, message))
                self.inbox[message.metadata.message_id] = message
                ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids):
        replies = []
        for message_id in message_ids:
            message = self.inbox.get(message_id)
            if message and message.metadata.dst_node_id not in self.silent:
                del self.inbox[message_id]
                replies.append(self.answer(message))
        return replies

    def answer(self, message):
        node = message.metadata.dst_node_id
        if message.metadata.message_type == "query":
            index, siblings = self.nodes.index(node), len(self.nodes)
            said = {"tier": self.tier, "index": index, "siblings": siblings}
            place = ConfigRecord(said | {"version": own_version()})
            return Message(RecordDict({"node": place}), reply_to=message)
        if node < 0:
            return Message(Error(-node, "node unavailable"), reply_to=message)
        return by_parcel(message, None, self.work)

    def work(self, message, context):
        node = message.metadata.dst_node_id
        return Message(text(f"{node} got {said(message)}"), reply_to=message)

    def send_and_receive(self, messages, *, timeout=None):
        raise NotImplementedError
