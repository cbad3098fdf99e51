"""A node gives back what it was asked for, under its own name, and nothing else."""

import pytest
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Message,
    Metadata,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node

from hfedatm.deploy import deliveries
from hfedatm.deploy.deliveries import CONFIRM, PULL, PULL_PART, PUSH, PUSH_PART, Refused

RUN, STATION, CLIENT, PEER = 2**63 + 5, 1, 2**63 + 11, 2**63 + 12


def give(known, node, message, run=RUN):
    response = PullMessagesResponse(
        messages_list=[Message(metadata=Metadata(message_id=message, run_id=run))]
    )
    request = PullMessagesRequest(node=Node(node_id=node))
    known.passed(PULL, request.SerializeToString(), response.SerializeToString())


def reply(*, node=CLIENT, source=None, to=STATION, answers="task", run=RUN, parts=("a", "b")):
    metadata = Metadata(
        run_id=run,
        src_node_id=node if source is None else source,
        dst_node_id=to,
        reply_to_message_id=answers,
        message_id="reply",
    )
    tree = ObjectTree(object_id="reply", children=[ObjectTree(object_id=p) for p in parts])
    return PushMessagesRequest(
        node=Node(node_id=node),
        messages_list=[Message(metadata=metadata)],
        message_object_trees=[tree],
    ).SerializeToString()


def part(name, node=CLIENT, size=10):
    return PushObjectRequest(
        node=Node(node_id=node), object_id=name, object_content=b"x" * size
    ).SerializeToString()


@pytest.fixture
def known(tmp_path):
    known = deliveries.Deliveries(tmp_path / "state" / "deliveries.db")
    give(known, CLIENT, "task")
    return known


def test_a_reply_to_a_message_that_was_given_passes(known):
    known.check(PUSH, reply())
    known.check(PUSH, reply())  # a node that lost the answer pushes again


def test_the_stations_name_is_not_for_a_client(known):
    """The attack: a message for a peer with the station as its source."""
    with pytest.raises(Refused, match="in the name of 1"):
        known.check(PUSH, reply(source=STATION, to=PEER, answers=""))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"to": PEER}, f"a message for node {PEER}"),
        ({"source": PEER}, f"in the name of {PEER}"),
        ({"answers": ""}, "was not given"),
        ({"answers": "another task"}, "was not given"),
        ({"run": 6}, "was not given"),
        ({"node": PEER}, "was not given"),
    ],
)
def test_anything_but_ones_own_reply_is_refused(known, change, why):
    with pytest.raises(Refused, match=why):
        known.check(PUSH, reply(**change))


def test_several_messages_at_once_are_refused(known):
    twice = PushMessagesRequest.FromString(reply())
    twice.messages_list.append(twice.messages_list[0])
    with pytest.raises(Refused, match="exactly one message"):
        known.check(PUSH, twice.SerializeToString())


def test_what_was_given_outlives_the_gateway(known, tmp_path):
    again = deliveries.Deliveries(tmp_path / "state" / "deliveries.db")
    again.check(PUSH, reply())
    with pytest.raises(Refused):
        again.check(PUSH, reply(node=PEER))


def test_a_node_is_known_by_its_newest_messages(known, monkeypatch):
    for number in range(deliveries.KEPT_MESSAGES):
        give(known, CLIENT, f"task {number}")
    known.check(PUSH, reply(answers="task 0"))
    with pytest.raises(Refused):
        known.check(PUSH, reply())


def test_only_parts_of_the_reply_are_stored(known):
    known.passed(PUSH, reply(), b"")
    known.check(PUSH_PART, part("a"))
    with pytest.raises(Refused, match="not part of its reply"):
        known.check(PUSH_PART, part("c"))


def test_a_reply_has_room_in_proportion_to_the_message(known, monkeypatch):
    monkeypatch.setattr(deliveries, "MOST_ALWAYS", 100)
    known.passed(PUSH, reply(), b"")
    known.check(PUSH_PART, part("a", size=90))
    with pytest.raises(Refused, match="larger than 100 bytes"):
        known.check(PUSH_PART, part("a", size=101))
    pull = PullObjectRequest(node=Node(node_id=CLIENT)).SerializeToString()
    known.passed(PULL_PART, pull, b"x" * 10)
    known.check(PUSH_PART, part("a", size=150))
    known.passed(PUSH_PART, part("a", size=150), b"")
    with pytest.raises(Refused, match="larger than 260 bytes"):
        known.check(PUSH_PART, part("b", size=150))


def test_a_message_that_is_given_again_changes_nothing(known, monkeypatch):
    """An old connection of the node may get it while the node already sends its reply."""
    monkeypatch.setattr(deliveries, "MOST_ALWAYS", 0)
    pull = PullObjectRequest(node=Node(node_id=CLIENT)).SerializeToString()
    known.passed(PULL_PART, pull, b"x" * 10)
    known.passed(PUSH, reply(), b"")
    give(known, CLIENT, "task")
    known.check(PUSH_PART, part("a", size=160))
    with pytest.raises(Refused, match="not part of its reply"):
        known.check(PUSH_PART, part("c"))


def test_what_the_link_did_not_grant_changes_nothing(known):
    """Who makes a request is known only after the link has verified it."""
    known.passed(PUSH, reply(), b"")
    known.check(PUSH, reply(parts=("c",)))
    known.check(PUSH_PART, part("a"))


def test_a_node_cannot_end_anothers_message(known):
    def confirm(node, message):
        return ConfirmMessageReceivedRequest(
            node=Node(node_id=node), message_object_id=message
        ).SerializeToString()

    known.check(CONFIRM, confirm(CLIENT, "task"))
    with pytest.raises(Refused, match="was not given"):
        known.check(CONFIRM, confirm(PEER, "task"))


@pytest.mark.parametrize("path", [PUSH, PUSH_PART, CONFIRM])
def test_what_cannot_be_read_is_refused(known, path):
    with pytest.raises(Refused, match="cannot be read"):
        known.check(path, b"\x0a\xff\xff")


def test_a_deep_tree_of_parts_is_no_trouble(known):
    tree = ObjectTree(object_id="deepest")
    for number in range(50):
        tree = ObjectTree(object_id=str(number), children=[tree])
    request = PushMessagesRequest.FromString(reply())
    request.message_object_trees[0].CopyFrom(tree)
    known.check(PUSH, request.SerializeToString())
