"""The ClientApp called directly: three tiers without Ray, SuperLink or network."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from hfedatm.runtime.streaming import StreamingGrid

_worker = ThreadPoolExecutor(1, thread_name_prefix="client")
"""All clients of the process train here, one after the other: torch's random state is global."""


class InProcessGrid(StreamingGrid):
    """Clients of one station, each run when its reply is asked for.

    Running on demand keeps one reply in memory at a time. A client that exceeds its time is left
    behind (Python cannot stop it) and the next one starts on a fresh worker.
    """

    def __init__(self, app: ClientApp, clients: Iterable[int]) -> None:
        self._app = app
        self._clients = sorted(clients)
        self._ids = itertools.count()
        self._waiting: dict[str, Message] = {}

    def get_node_ids(self) -> list[int]:
        """Return the ids of the clients."""
        return self._clients

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Keep the messages until their replies are asked for."""
        ids = []
        for message in messages:
            ids.append(str(next(self._ids)))
            self._waiting[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Run the clients these messages are for."""
        return [self._run(self._waiting.pop(message_id)) for message_id in message_ids]

    def wait_for(self, message_id: str, sent_at: float, timeout: float | None) -> Message | None:
        """Run one client; its time counts from its own start, since clients run in turn."""
        global _worker
        try:
            return _worker.submit(self._run, self._waiting.pop(message_id)).result(timeout)
        except Late:
            _worker = ThreadPoolExecutor(1, thread_name_prefix="client")
            return None

    def _run(self, message: Message) -> Message:
        context = Context(
            run_id=0,
            node_id=message.metadata.dst_node_id,
            node_config={},
            state=RecordDict(),
            run_config={},
        )
        try:
            return self._app(message, context)
        except Exception as error:
            return Message(Error(0, f"{type(error).__name__}: {error}"), reply_to=message)
