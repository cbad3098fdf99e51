"""Stations that run in the server's process, one thread each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from hfedatm.base.answering import reply_with_failure
from hfedatm.base.settings import Settings
from hfedatm.base.streaming import StreamingGrid
from hfedatm.base.tiers import has_lowest, places

MakeGrid = Callable[[range], Grid]
RunStation = Callable[[Grid, RecordDict], RecordDict]


class LocalStationsGrid(StreamingGrid):
    """A Grid whose nodes are stations, each with the Grid of its own children.

    Parameters
    ----------
    run_station
        The station's job.
    grids
        Station id -> the Grid that shows exactly its children.
    concurrency
        Number of stations that work at a time. A finished station keeps its place until its reply
        is taken, so that no more than this many replies wait in memory.
    """

    def __init__(
        self, run_station: RunStation, grids: Mapping[int, Grid], concurrency: int | None = None
    ) -> None:
        self._run_station = run_station
        self.grids = dict(grids)
        self._places = concurrency or len(self.grids)
        self._pool = ThreadPoolExecutor(self._places, thread_name_prefix="station")
        self._ids = itertools.count()
        self._queue: dict[str, Message] = {}
        self._jobs: dict[str, Future[Message]] = {}

    def get_node_ids(self) -> list[int]:
        """Return the ids of the stations."""
        return sorted(self.grids)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Start as many stations as there are places; the others follow in order."""
        ids = []
        for message in messages:
            ids.append(str(next(self._ids)))
            self._queue[ids[-1]] = message
        self._fill_places()
        return ids

    def _fill_places(self) -> None:
        while self._queue and len(self._jobs) < self._places:
            self._start(next(iter(self._queue)))

    def _start(self, message_id: str) -> None:
        self._jobs[message_id] = self._pool.submit(self._work, self._queue.pop(message_id))

    def _work(self, message: Message) -> Message:
        try:
            content = self._run_station(self.grids[message.metadata.dst_node_id], message.content)
            return Message(content, reply_to=message)
        except Exception as error:
            return reply_with_failure(message, error)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies of the stations that are done."""
        done = [key for key in message_ids if key in self._jobs and self._jobs[key].done()]
        return [self._take(key) for key in done]

    def wait_for(self, message_id: str, sent_at: float, timeout: float | None) -> Message | None:
        """Wait for one station; its own clients' time limit bounds its work."""
        return self._take(message_id)

    def _take(self, message_id: str) -> Message:
        if message_id in self._queue:  # untaken replies may hold all places: start now
            self._start(message_id)
        reply = self._jobs.pop(message_id).result()
        self._fill_places()
        return reply


def station_tree(
    run_station: RunStation,
    settings: Settings,
    clients: MakeGrid,
    *,
    concurrency: int | None = None,
    level: int = 0,
    index: int = 0,
) -> LocalStationsGrid:
    """Return the stations below one node, and all stations below those, in this process.

    Parameters
    ----------
    run_station, concurrency
        As in `LocalStationsGrid`; the number of stations at a time is that of every parent.
    settings
        The run's settings, which give the tree.
    clients
        Returns the Grid of the clients with these numbers.
    level, index
        The node; the server unless given.
    """

    def grid_of(station: int) -> Grid:
        if has_lowest(settings, level):
            return clients(places(settings, level + 1, station))
        return station_tree(
            run_station,
            settings,
            clients,
            concurrency=concurrency,
            level=level + 1,
            index=station,
        )

    grids = {station: grid_of(station) for station in places(settings, level, index)}
    return LocalStationsGrid(run_station, grids, concurrency)
