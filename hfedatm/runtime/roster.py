"""Who is there: ask nodes for their place in the tree, and follow them as they come and go."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from hfedatm.base.errors import UserError
from hfedatm.base.handover import parcel
from hfedatm.base.trust.introduction import introduced, new_nonce, question
from hfedatm.base.trust.origin import Signer
from hfedatm.base.wire import NodeIdentity, reason_of
from hfedatm.runtime.mapped import MappedGrid

log = logging.getLogger("hfedatm")


class Roster:
    """The nodes of a Grid; a node is asked once, when it is first seen."""

    def __init__(self, grid: Grid, poll: float = 0.05) -> None:
        self._grid = grid
        self._poll = poll
        self._known: dict[int, NodeIdentity] = {}

    def present(self) -> list[NodeIdentity]:
        """Return the nodes that are connected now, in the order of their places."""
        ids = sorted(self._grid.get_node_ids())
        self._ask([node_id for node_id in ids if node_id not in self._known])
        return sorted(
            (self._known[i] for i in ids if i in self._known), key=lambda n: (n.index, n.node_id)
        )

    def wait_for(self, count: int, timeout: float) -> list[NodeIdentity]:
        """Wait until ``count`` nodes are there, or as many as a simulation says it has."""
        deadline = time.monotonic() + timeout
        while True:
            nodes = self.present()
            if nodes and len(nodes) >= (nodes[0].siblings or count):
                return nodes
            if time.monotonic() > deadline:
                if nodes:
                    return nodes
                raise UserError(f"no node has connected within {timeout:g} s: is any running?")
            time.sleep(0.2)

    def _ask(self, ids: Sequence[int]) -> None:
        if not ids:
            return
        nonces = {node_id: new_nonce() for node_id in ids}
        asked = MappedGrid(self._grid, {i: i for i in ids}, self._poll)
        messages = [
            Message(question(nonces[node_id]), node_id, MessageType.QUERY) for node_id in ids
        ]
        for reply in asked.send_and_receive(messages, timeout=60):
            node_id = reply.metadata.src_node_id
            try:
                self._known[node_id] = introduced(reply, nonces[node_id])
            except Exception as error:  # of any class: what it says is not to be relied on
                log.warning("node %d does not say who it is: %s", node_id, reason_of(error))


class LiveGrid(MappedGrid):
    """Children of a deployed tier under their places; a child that restarts is found again.

    Who has been there once is asked ever after: a child that is away fails the round by name.
    """

    def __init__(self, grid: Grid, roster: Roster, poll: float = 0.2) -> None:
        super().__init__(grid, {}, poll)
        self._roster = roster
        self._signer = Signer.load()
        self._names: dict[int, str] = {}

    def begin_job(self) -> None:
        """Start another job: the one above may ask again for a step that was done before."""
        self._signer = Signer.load()

    def get_node_ids(self) -> list[int]:
        """Return the places of all children seen so far."""
        present = self._roster.present()
        connected = {node.node_id for node in present}
        for node in present:
            place = node.index if node.index >= 0 else node.node_id
            holder = self._node_of.setdefault(place, node.node_id)
            # A node that came back under a new id replaces its older self, and nobody else.
            if holder != node.node_id and holder in connected:
                log.warning("node %d claims the place of another: %d", node.node_id, place)
                continue
            self._node_of[place] = node.node_id
            self._names[place] = node.name
        return super().get_node_ids()

    def _outgoing(self, message: Message) -> Message:
        sent = super()._outgoing(message)
        content = parcel.wrap(sent.content)
        if self._signer:
            name = self._names[message.metadata.dst_node_id]
            step = _step(message)
            content = self._signer.signed(content, sent.metadata, name, step)
        sent.content = content
        return sent

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that are there; what cannot be read is a failure of that node."""
        return [parcel.opened(reply) for reply in super().pull_messages(message_ids)]


def _step(message: Message) -> str:
    """Name what a task is about; a task that is asked for again in a step has another group."""
    task = message.content["task"]
    parts = (task["run"], task["round"], task["station_round"], message.metadata.group_id)
    return "/".join(map(str, parts))
