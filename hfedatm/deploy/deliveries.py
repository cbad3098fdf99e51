"""Track the messages that each node was given, and so the replies that it may send.

A SuperLink checks which node makes a request, not the content of the request: a node could push a
message for a peer under any sender, end another node's message, or store data that nobody asked
for. The gateway therefore remembers the messages that each node was given; it passes on one reply
to each of them, the parts of that reply, and nothing else.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError

from hfedatm.flower_internals import (
    CONFIRM,
    PULL,
    PULL_PART,
    PUSH,
    PUSH_PART,
    SUPERLINK_NODE,
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullMessagesRequest,
    PullMessagesResponse,
    PullObjectRequest,
    PushMessagesRequest,
    PushObjectRequest,
)

KEPT_MESSAGES = 64  # messages remembered per node; a node works on one at a time
MOST_PARTS = 100_000
MOST_ALWAYS, MOST_TIMES = 64 * 2**20, 16
"""Most bytes of a reply: a constant, plus a multiple of the bytes received with the message."""


class Refused(Exception):
    """A request that no honest node makes; the message says why."""


@dataclass
class _Node:
    """The bytes a node received with its last message and sent in reply, and the reply's parts."""

    received: int = 0
    sent: int = 0
    parts: set[str] = field(default_factory=set)


class Deliveries:
    """The messages given to nodes, and their replies.

    Parameters
    ----------
    file
        A database in which deliveries outlive the gateway; without it they are kept in memory.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._nodes: dict[int, _Node] = {}
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
        self._given = sqlite3.connect(
            file or ":memory:", isolation_level=None, check_same_thread=False
        )
        self._given.execute(
            "CREATE TABLE IF NOT EXISTS given "
            "(node TEXT, message TEXT, run TEXT, PRIMARY KEY (node, message))"
        )

    def check(self, path: str, body: bytes) -> None:
        """Raise `Refused` unless an honest node may make this request; changes nothing."""
        try:
            if path == PUSH:
                self._check_reply(PushMessagesRequest.FromString(body))
            elif path == PUSH_PART:
                self._check_part(PushObjectRequest.FromString(body))
            elif path == CONFIRM:
                request = ConfirmMessageReceivedRequest.FromString(body)
                if self._run_of(request.node.node_id, request.message_object_id) is None:
                    raise Refused(
                        f"node {request.node.node_id} confirms a message that it was not given"
                    )
        except DecodeError:
            raise Refused("it cannot be read") from None

    def passed(self, path: str, body: bytes, answer: bytes) -> None:
        """Record a request that the SuperLink granted: only then is its sender authenticated."""
        with contextlib.suppress(DecodeError):  # the node itself will report this
            self._note(path, body, answer)

    def _note(self, path: str, body: bytes, answer: bytes) -> None:
        if path == PULL:
            response = PullMessagesResponse.FromString(answer)
            if response.messages_list:
                self._give(PullMessagesRequest.FromString(body).node.node_id, response)
        elif path == PULL_PART:
            node = self._nodes.get(PullObjectRequest.FromString(body).node.node_id)
            if node:
                node.received += len(answer)
        elif path == PUSH:
            request = PushMessagesRequest.FromString(body)
            node = self._nodes.setdefault(request.node.node_id, _Node())
            node.parts, node.sent = set(_parts(request.message_object_trees[0])), 0
        elif path == PUSH_PART:
            pushed = PushObjectRequest.FromString(body)
            node = self._nodes.setdefault(pushed.node.node_id, _Node())
            node.sent += len(pushed.object_content)

    def _give(self, node: int, response: PullMessagesResponse) -> None:
        for message in response.messages_list:
            metadata = message.metadata
            if node not in self._nodes or self._run_of(node, metadata.message_id) is None:
                self._nodes[node] = _Node()  # a message that is repeated changes nothing
            self._given.execute(
                "INSERT OR REPLACE INTO given VALUES (?, ?, ?)",
                [str(node), metadata.message_id, str(metadata.run_id)],
            )
        self._given.execute(
            "DELETE FROM given WHERE node = ? AND rowid NOT IN "
            "(SELECT rowid FROM given WHERE node = ? ORDER BY rowid DESC LIMIT ?)",
            [str(node), str(node), KEPT_MESSAGES],
        )

    def _run_of(self, node: int, message: str) -> str | None:
        """Return the run of a message that a node was given; None if it was not given."""
        found = self._given.execute(
            "SELECT run FROM given WHERE node = ? AND message = ?", [str(node), message]
        ).fetchone()
        return str(found[0]) if found else None

    def _check_reply(self, request: PushMessagesRequest) -> None:
        node = request.node.node_id
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise Refused(f"node {node} does not push exactly one message")
        metadata = request.messages_list[0].metadata
        if metadata.src_node_id != node:
            raise Refused(f"node {node} pushes a message in the name of {metadata.src_node_id}")
        if metadata.dst_node_id != SUPERLINK_NODE:
            raise Refused(f"node {node} pushes a message for node {metadata.dst_node_id}")
        if self._run_of(node, metadata.reply_to_message_id) != str(metadata.run_id):
            raise Refused(f"node {node} replies to a message that it was not given")
        if sum(1 for _ in _parts(request.message_object_trees[0])) > MOST_PARTS:
            raise Refused(f"the reply of node {node} has more than {MOST_PARTS} parts")

    def _check_part(self, request: PushObjectRequest) -> None:
        node = self._nodes.get(request.node.node_id)
        if node is None or not node.parts:
            return  # a restarted gateway does not know the parts; the link does
        if request.object_id not in node.parts:
            raise Refused(
                f"node {request.node.node_id} pushes something that is not part of its reply"
            )
        room = MOST_ALWAYS + MOST_TIMES * node.received
        if node.sent + len(request.object_content) > room:
            raise Refused(f"the reply of node {request.node.node_id} is larger than {room} bytes")


def _parts(tree: ObjectTree) -> Iterator[str]:
    waiting = [tree]
    while waiting:
        part = waiting.pop()
        yield part.object_id
        waiting.extend(part.children)
