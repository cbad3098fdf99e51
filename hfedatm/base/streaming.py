"""A Grid that hands over replies one at a time, in the order the messages were sent.

Flower's own ``send_and_receive`` collects all replies in a list. Here it is a generator: a strategy
that folds each reply into a running sum never holds more than one, and because the order is fixed
the sum is the same to the last bit, whichever node answers first.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

NO_REPLY = 1_001
"""Error code of a reply made here for a node that did not answer."""


class NodeGrid(Grid):
    """Base of our Grids; its nodes are the logical ids of a tier's children."""

    def set_run(self, run: Any) -> None:
        """Set the run; kept only to satisfy the interface."""
        self._run = run

    @property
    def run(self) -> Any:
        """Run information."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message (Flower's older way, still part of the interface)."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)


class StreamingGrid(NodeGrid):
    """A Grid that waits for every reply, in the order of the messages.

    To report progress, ``on_sent`` is called with the messages that were sent, and ``on_reply``
    with each message that was answered.
    """

    on_sent: Callable[[Sequence[Message]], None] | None = None
    on_reply: Callable[[Message], None] | None = None

    @abstractmethod
    def wait_for(self, message_id: str, sent_at: float, timeout: float | None) -> Message | None:
        """Return the reply to one message, or None when it did not come in time."""

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send all messages, then yield the replies in the order of the messages.

        For a node that does not answer in time, this yields an error reply that says so: no node is
        lost silently.
        """
        sent = list(messages)
        ids = list(self.push_messages(sent))
        sent_at = time.monotonic()
        if self.on_sent:
            self.on_sent(sent)
        for message, message_id in zip(sent, ids, strict=True):
            # Not bound to a name here: only the consumer may keep the reply alive.
            yield self._reply(message, message_id, sent_at, timeout)

    def _reply(
        self, message: Message, message_id: str, sent_at: float, timeout: float | None
    ) -> Message:
        reply = self.wait_for(message_id, sent_at, timeout)
        if self.on_reply:
            self.on_reply(message)
        if reply is None:
            return Message(Error(NO_REPLY, _why_none(message_id, timeout)), reply_to=message)
        return reply


def _why_none(message_id: str, timeout: float | None) -> str:
    return f"no reply within {timeout:g} s" if message_id and timeout else "could not be reached"
