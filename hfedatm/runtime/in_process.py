"""Call the ClientApp directly: three tiers without Ray, SuperLink or network."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from threading import Thread

from flwr.app import Context, Error, Message, RecordDict

from hfedatm.base.seeding import torch_turn
from hfedatm.base.streaming import StreamingGrid
from hfedatm.base.tracebacks import is_debugging, raise_if_debugging

Clients = Callable[[Message, Context], Message]
"""What answers a message: a ClientApp, or something in its place."""


class InProcessGrid(StreamingGrid):
    """Clients of one station; each runs when its reply is requested, one at a time.

    Running on demand keeps one reply in memory at a time. A client that exceeds its time limit is
    abandoned: Python cannot stop its thread, but the next client starts and the process can end
    without it.
    """

    def __init__(self, app: Clients, clients: Iterable[int]) -> None:
        self._app = app
        self._clients = sorted(clients)
        self._ids = itertools.count()
        self._waiting: dict[str, Message] = {}

    def get_node_ids(self) -> list[int]:
        """Return the ids of the clients."""
        return self._clients

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Keep the messages until their replies are requested."""
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
        message, answer = self._waiting.pop(message_id), SimpleQueue[Message]()
        with torch_turn:
            if is_debugging():  # raise an error here, not in a separate thread
                return self._run(message)
            Thread(target=lambda: answer.put(self._run(message)), daemon=True).start()
            try:
                return answer.get(timeout=timeout)
            except Empty:
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
        except BaseException as error:  # also catches a client that calls sys.exit
            raise_if_debugging(error)
            return Message(Error(0, f"{type(error).__name__}: {error}"), reply_to=message)
