"""A view of a Flower Grid that shows only chosen children, under their logical ids."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeVar

import httpx
from flwr.app import Error, Message
from flwr.serverapp import Grid

from hfedatm.base.streaming import StreamingGrid
from hfedatm.base.wire import reason_of
from hfedatm.runtime.patience import SilentLink, patiently

V = TypeVar("V")

UNREADABLE = 1_002
"""Error code of the reply that replaces one that Flower cannot turn into a message."""
LINK_ERRORS = (httpx.HTTPError, httpx.StreamError, OSError, SilentLink)
"""Errors of a pull that come from the SuperLink rather than from a node's reply."""
CUT_OFF = 5
"""Flower's code for a node that its SuperLink does not hear any more."""
LOST = {
    3: "its message was lost: its SuperLink has not kept it, or the time for the answer was over",
    4: "its reply came too late and was deleted by its SuperLink",
    CUT_OFF: "it is cut off: its SuperLink has had no sign of life from its node for a minute, or "
    "the node has signed off",
    8: "the process that did its work was killed, or stood still for a minute",
}
"""Our words for the errors of a SuperLink or a SuperNode, by Flower's code."""


class MappedGrid(StreamingGrid):
    """Show chosen nodes of ``grid`` under logical ids.

    Parameters
    ----------
    grid
        The Grid of the run.
    node_of
        Logical id -> node id. Several logical ids may live on one node: a simulation with fewer
        nodes than clients then works through them in turn.
    poll
        Seconds between the first polls for a reply.
    patience
        Seconds for which the SuperLink may be silent; 0 passes its first error on.
    """

    def __init__(
        self,
        grid: Grid,
        node_of: Mapping[int, int],
        poll: float = 0.05,
        patience: float = 0.0,
    ) -> None:
        self._grid, self._patience = grid, patience
        self._node_of = dict(node_of)
        self._poll = poll
        self._waiting: dict[str, Message] = {}

    def get_node_ids(self) -> list[int]:
        """Return the logical ids in order."""
        return sorted(self._node_of)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send each message to the node its logical id lives on."""
        ids = []
        for message in messages:
            # One at a time: a link that refuses a message omits its id from the answer.
            sent = [self._outgoing(message)]
            pushed = self._ask_link(partial(self._grid.push_messages, sent))
            ids.append(next(iter(pushed), ""))
            self._waiting[ids[-1]] = message
        return ids

    def _ask_link(self, ask: Callable[[], V]) -> V:
        """Return what the SuperLink answers; every request goes through here."""
        return patiently(ask, self._patience) if self._patience else ask()

    def _outgoing(self, message: Message) -> Message:
        meta = message.metadata
        if meta.dst_node_id not in self._node_of:
            raise ValueError(f"node {meta.dst_node_id} is not one of this tier's children")
        return Message(
            message.content,
            self._node_of[meta.dst_node_id],
            meta.message_type,
            ttl=meta.ttl,
            group_id=meta.group_id,
        )

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that have arrived, under the logical ids of the asked nodes."""
        return [reply for message_id in message_ids if (reply := self._pull(message_id))]

    def _pull(self, message_id: str) -> Message | None:
        """Return the reply to one message if it has arrived; an unreadable reply becomes an error.

        The sender is taken from the message that was sent, never from the reply or from Flower's
        "node unavailable" error.
        """
        try:
            pull = partial(self._grid.pull_messages, [message_id])
            found = next(iter(self._ask_link(pull)), None)
            if found is None:
                return None
            answer = _explained(found.error) if found.has_error() else found.content
        except LINK_ERRORS:  # the node's reply is still unknown
            raise
        except Exception as error:  # Flower cannot inflate the reply; errors of many classes
            answer = Error(UNREADABLE, f"its reply cannot be read: {reason_of(error)}")
        return Message(answer, reply_to=self._waiting.pop(message_id))

    def wait_for(self, message_id: str, sent_at: float, timeout: float | None) -> Message | None:
        """Poll for the reply until the time is up, less often the longer it takes."""
        while message_id:
            if replies := self.pull_messages([message_id]):
                return replies[0]
            waited = time.monotonic() - sent_at
            if timeout is not None and waited >= timeout:
                self._waiting.pop(message_id)
                break
            # Every poll costs the SuperLink milliseconds that its nodes could use.
            time.sleep(max(self._poll, min(0.05 * waited, 2.0)))
        return None


def _explained(error: Error) -> Error:
    """Return an error of a SuperLink in our words, any other error as it is."""
    return Error(error.code, LOST.get(error.code, error.reason))
