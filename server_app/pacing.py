"""A Grid of stations that hands over the first replies and lets the other stations go on.

With a virtual clock, a station's work takes the seconds that the settings give it. The work itself
is done when the clock reaches its end, so the order of replies depends on nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from flwr.app import Error, Message
from flwr.serverapp import Grid

from hfedatm.base.streaming import NO_REPLY, NodeGrid, StreamingGrid
from server_app.flights import Flights

POLL = 0.05
"""Seconds between two looks for replies."""


class PacedGrid(NodeGrid):
    """Show the stations that are idle, and wait for the first replies to a training.

    Parameters
    ----------
    stations
        The Grid of all stations.
    flights
        The stations at work.
    buffer
        Number of replies that end the wait; a reply that reports a failure does not count.
    durations
        Virtual seconds of each station's work; empty takes the real time.
    """

    def __init__(
        self, stations: Grid, flights: Flights, buffer: int, durations: Sequence[float] = ()
    ) -> None:
        self._stations, self._flights, self._buffer = stations, flights, buffer
        self._durations = durations
        self._sent: dict[int, tuple[Message, str, float]] = {}

    def get_node_ids(self) -> list[int]:
        """Return the ids of the idle stations."""
        return sorted(set(self._stations.get_node_ids()) - self._flights.at_work.keys())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages to stations."""
        return self._stations.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return replies that have arrived."""
        return self._stations.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages; return all replies, or the first ones if the messages ask for training."""
        if not self._flights.waiting:
            return self._stations.send_and_receive(messages, timeout=timeout)
        self._flights.waiting = False
        return self._first(list(messages), timeout)

    def _first(self, messages: list[Message], timeout: float | None) -> Iterator[Message]:
        flights, answered = self._flights, 0
        ids = [""] * len(messages) if self._durations else self._stations.push_messages(messages)
        for message, message_id in zip(messages, ids, strict=True):
            station = message.metadata.dst_node_id
            flights.depart(station, self._seconds(station))
            self._sent[station] = (message, message_id, time.monotonic())
        if messages and (said := getattr(self._stations, "on_sent", None)):
            said(messages)
        while flights.at_work and answered < self._buffer:
            reply = self._next_virtual(timeout) if self._durations else self._next(timeout)
            if reply is None:  # too late to count
                continue
            if said := getattr(self._stations, "on_reply", None):
                said(self._sent[reply.metadata.src_node_id][0])
            del self._sent[reply.metadata.src_node_id]
            answered += not reply.has_error() and "failure" not in reply.content
            yield reply
            del reply
        if not answered and (wait := getattr(self._stations, "await_return", None)):
            wait([message.metadata.dst_node_id for message in messages])

    def _seconds(self, station: int) -> float:
        known = 0 <= station < len(self._durations)
        return self._durations[station] if known else 0.0

    def _next_virtual(self, timeout: float | None) -> Message | None:
        """Do the work that ends first."""
        at_work = self._flights.at_work
        station = min(at_work, key=lambda number: (at_work[number].due, number))
        if not self._flights.land(station):  # the work would be in vain
            self._sent.pop(station, None)
            return None
        message = self._sent[station][0]
        message_id = next(iter(self._stations.push_messages([message])), "")
        assert isinstance(self._stations, StreamingGrid)
        reply = self._stations.wait_for(message_id, time.monotonic(), timeout)
        return reply or _none(message, timeout)

    def _next(self, timeout: float | None) -> Message | None:
        """Wait for any station."""
        while True:
            for station, (message, message_id, sent_at) in list(self._sent.items()):
                found = self._stations.pull_messages([message_id]) if message_id else []
                reply = next(iter(found), None)
                waited = time.monotonic() - sent_at
                if reply is None and message_id and not (timeout and waited >= timeout):
                    continue
                if self._flights.land(station):
                    return reply or _none(message, timeout if message_id else None)
                del self._sent[station]
                return None
            time.sleep(POLL)


def _none(message: Message, timeout: float | None) -> Message:
    why = f"no reply within {timeout:g} s" if timeout else "could not be reached"
    return Message(Error(NO_REPLY, why), reply_to=message)
