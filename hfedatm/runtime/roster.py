"""Roster of nodes: ask nodes for their place in the tree, and follow them as they come and go."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from hfedatm.base.errors import UserError
from hfedatm.base.handover import parcel
from hfedatm.base.trust.introduction import introduced, new_nonce, question
from hfedatm.base.trust.origin import Signer
from hfedatm.base.wire import NodeIdentity, reason_of
from hfedatm.flower_internals import look_sooner_for_parts
from hfedatm.runtime.mapped import CUT_OFF, MappedGrid
from hfedatm.runtime.patience import patiently

log = logging.getLogger("hfedatm")

V = TypeVar("V")

ASK_AGAIN = 5.0
"""Seconds after which a node that could not be used is asked again: it may have been mended."""
LOOK_AGAIN = 0.2
"""Seconds between two looks at who is connected."""


class Roster:
    """The nodes of a Grid; a node is asked when first seen, and a refused one again later."""

    def __init__(self, grid: Grid, poll: float = 0.05) -> None:
        self._grid = grid
        self._poll = poll
        self.patience = 60.0
        """Seconds for which the SuperLink, or every node, may be silent."""
        self._known: dict[int, NodeIdentity] = {}
        self._refused: dict[int, tuple[str, float]] = {}

    def present(self) -> list[NodeIdentity]:
        """Return the nodes that are connected now, in the order of their places."""
        ids = sorted(patiently(self._grid.get_node_ids, self.patience))
        now = time.monotonic()
        waiting = {i for i, (_, when) in self._refused.items() if now - when < ASK_AGAIN}
        self._ask([i for i in ids if i not in self._known and i not in waiting])
        return sorted(
            (self._known[i] for i in ids if i in self._known), key=lambda n: (n.index, n.node_id)
        )

    def wait_for(self, count: int, timeout: float) -> list[NodeIdentity]:
        """Wait until ``count`` nodes are connected, or as many as a simulation reports."""
        self.patience = timeout
        deadline = time.monotonic() + timeout
        while True:
            nodes = self.present()
            if nodes and len(nodes) >= (nodes[0].siblings or count):
                return nodes
            if time.monotonic() > deadline:
                if nodes:
                    return nodes
                raise UserError(self._why_none(timeout))
            time.sleep(LOOK_AGAIN)

    def _why_none(self, timeout: float) -> str:
        if not self._refused:
            return f"no node has connected within {timeout:g} s: is any running?"
        reasons = "; ".join(f"node {i}: {reason}" for i, (reason, _) in self._refused.items())
        return f"no node can be used: {reasons}"

    def _ask(self, ids: Sequence[int]) -> None:
        if not ids:
            return
        nonces = {node_id: new_nonce() for node_id in ids}
        asked = MappedGrid(self._grid, {i: i for i in ids}, self._poll, self.patience)
        messages = [
            Message(question(nonces[node_id]), node_id, MessageType.QUERY) for node_id in ids
        ]
        for reply in asked.send_and_receive(messages, timeout=self.patience):
            node_id = reply.metadata.src_node_id
            try:
                self._known[node_id] = introduced(reply, nonces[node_id])
            except Exception as error:  # errors of any class: a node may answer anything
                reason = reason_of(error)
                if self._refused.get(node_id, ("",))[0] != reason:
                    log.warning("node %d does not say who it is: %s", node_id, reason)
                self._refused[node_id] = (reason, time.monotonic())
            else:
                self._refused.pop(node_id, None)


class LiveGrid(MappedGrid):
    """Children of a deployed tier, by their places; a child that restarts is found again.

    A child that was seen once is asked in every later round: if it is away, it fails by name.

    Parameters
    ----------
    grid
        The Grid of the run.
    roster
        Who is connected; its ``patience`` also limits how long the SuperLink may be silent.
    poll
        Seconds between the first polls for a reply.
    awaits_return
        Whether the replies end, when all children were cut off, only when one of them is back or
        the roster's patience is over. A deployment that is stopped loses its nodes first: the run
        must not take that for a round, nor spend its other rounds on nobody.
    """

    def __init__(
        self, grid: Grid, roster: Roster, poll: float = 0.2, *, awaits_return: bool = False
    ) -> None:
        super().__init__(grid, {}, poll)
        look_sooner_for_parts()
        self._roster = roster
        self._awaits_return = awaits_return
        self._cut_off: set[int] = set()
        self._signer = Signer.load()
        self._names: dict[int, str] = {}

    def begin_job(self) -> None:
        """Start another job: the tier above may repeat a step that was done before."""
        self._signer = Signer.load()

    def get_node_ids(self) -> list[int]:
        """Return the places of all children seen so far."""
        present = self._roster.present()
        connected = {node.node_id for node in present}
        for node in present:
            place = node.index if node.index >= 0 else node.node_id
            holder = self._node_of.setdefault(place, node.node_id)
            # A node may take a place under a new id only if the old id is no longer connected.
            if holder != node.node_id and holder in connected:
                log.warning("node %d claims the place of another: %d", node.node_id, place)
                continue
            self._node_of[place] = node.node_id
            self._names[place] = node.name
        return super().get_node_ids()

    def _ask_link(self, ask: Callable[[], V]) -> V:
        return patiently(ask, self._roster.patience)

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
        """Return the replies that have arrived; an unreadable reply is a failure of its node."""
        replies = super().pull_messages(message_ids)
        for reply in replies:
            lost = reply.has_error() and reply.error.code == CUT_OFF
            (self._cut_off.add if lost else self._cut_off.discard)(reply.metadata.src_node_id)
        return [parcel.opened(reply) for reply in replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Yield the replies in the order of the messages."""
        sent = list(messages)
        yield from super().send_and_receive(sent, timeout=timeout)
        self.await_return(message.metadata.dst_node_id for message in sent)

    def await_return(self, asked: Iterable[int]) -> None:
        """If all children that were asked were cut off, wait until one is back."""
        places = set(asked)
        if not (self._awaits_return and places and places <= self._cut_off):
            return
        log.warning(
            "  everybody who was asked is cut off; waiting for up to %g s until somebody is back",
            self._roster.patience,
        )
        deadline = time.monotonic() + self._roster.patience
        while not self._roster.present() and time.monotonic() < deadline:
            time.sleep(LOOK_AGAIN)


def _step(message: Message) -> str:
    """Return the name of a task's step; a repeated task in the same step has another group id."""
    task = message.content["task"]
    parts = (task["run"], task["round"], task["station_round"], message.metadata.group_id)
    return "/".join(map(str, parts))
