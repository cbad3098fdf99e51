"""Secure aggregation, the station's side: from messages to one reply that is all clients' mean.

The station passes keys and encrypted shares on, adds up masked vectors as they arrive, and learns
nothing but their sum. Clients may drop out at any stage; whoever is left, at least
``secure-threshold`` of those asked, is enough to take the masks off.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from hfedatm.base.handover.recordfile import content_bytes
from hfedatm.base.masked_reply import IN_THE_CLEAR, ReplyLayout, mean_reply
from hfedatm.base.privacy_settings import secure_threshold
from hfedatm.base.records import BadReply, record_to_arrays
from hfedatm.base.settings import Settings
from hfedatm.base.streaming import NO_REPLY
from hfedatm.base.wire import open_reply, reason_of
from hfedatm_core.secagg import Aggregator, SecureAggregationError

Take = Callable[[int, RecordDict], None]


def gather_securely(
    grid: Grid, messages: Iterable[Message], settings: Settings
) -> Iterator[Message]:
    """Send messages; yield one reply that stands for all survivors, and an error for each other."""
    asked = {message.metadata.dst_node_id: message for message in messages}
    total = _SecureSum(grid, asked, settings)
    content: RecordDict | None = None
    try:
        content = total.run()
    except (SecureAggregationError, BadReply) as error:
        for client in total.present:
            total.lost[client] = f"secure aggregation: {error}"
    if content is not None:
        yield Message(content, reply_to=asked[min(total.present)])
    for client, reason in total.lost.items():
        yield Message(Error(NO_REPLY, reason), reply_to=asked[client])


class _SecureSum:
    """One sum, stage by stage."""

    def __init__(self, grid: Grid, asked: Mapping[int, Message], settings: Settings) -> None:
        self._grid, self._asked, self._settings = grid, asked, settings
        self.present = sorted(asked)
        """Clients that have answered every stage so far."""
        self.lost: dict[int, str] = {}
        self._session = secrets.token_bytes(16)
        self._keys: dict[int, bytes] = {}
        self._layout: ReplyLayout | None = None
        self._metrics: dict[int, dict[str, float]] = {}
        self._bytes = 0

    def run(self) -> RecordDict:
        """Return the mean reply of the clients that stayed."""
        for message in self._asked.values():
            start = {"session": self._session, "asked": len(self._asked)}
            message.content["secure"] = ConfigRecord(start)  # type: ignore[arg-type]
        self._stage([self._asked[client] for client in self.present], self._take_keys)
        if self._layout is None:
            raise SecureAggregationError("no client has anything to add up")
        threshold = secure_threshold(self._settings, len(self._asked))
        total = Aggregator(self._session, self._layout.size, threshold=threshold)
        for client in self.present:
            total.advertised(client, self._keys[client])
        directory = total.directory()

        self._ask("share", lambda _: {"message": directory}, _message_to(total.shared))
        self._ask("mask", lambda client: {"message": total.inbox(client)}, self._add_to(total))
        # A client that goes now has delivered already: it stays in the sum.
        survivors = total.survivors()
        self._ask("reveal", lambda _: {"survivors": survivors}, _message_to(total.revealed))
        self.present = survivors
        self.lost = {c: reason for c, reason in self.lost.items() if c not in survivors}
        return self._mean(total.result(), len(survivors))

    def _take_keys(self, client: int, content: RecordDict) -> None:
        layout = ReplyLayout.from_record(content["layout"])  # type: ignore[arg-type]
        self._layout = self._layout or layout
        if layout != self._layout:
            raise BadReply("its reply is made of other parts than those of the other clients")
        self._keys[client] = content["keys"]["message"]  # type: ignore[index, assignment]
        clear = content["metrics"]
        self._metrics[client] = {n: float(clear[n]) for n in IN_THE_CLEAR if n in clear}  # type: ignore[operator, index, arg-type]

    def _add_to(self, total: Aggregator) -> Take:
        def take(client: int, content: RecordDict) -> None:
            vector = record_to_arrays(content["masked"])["vector"]  # type: ignore[arg-type]
            total.masked(client, vector)
            self._bytes += content_bytes(content)

        return take

    def _mean(self, total: np.ndarray, survivors: int) -> RecordDict:
        assert self._layout is not None
        reply = mean_reply(self._layout, total, survivors, self._settings.gram_weights)
        per_client = self._bytes // survivors
        metrics: MetricRecord = reply["metrics"]  # type: ignore[assignment]
        metrics["bytes-up"] = self._bytes
        metrics["gram-bytes-up"] = survivors * (
            per_client * self._layout.gram_size // self._layout.size
        )
        known = [self._metrics[client] for client in self.present]
        for name in IN_THE_CLEAR:
            if values := [m[name] for m in known if name in m]:
                metrics[name] = max(values) if name == "epsilon" else sum(values)
        return reply

    def _ask(self, kind: str, content: Callable[[int], dict[str, object]], take: Take) -> None:
        messages = [
            Message(
                RecordDict(
                    {
                        "task": self._asked[client].content["task"],
                        "secure": ConfigRecord(content(client)),  # type: ignore[arg-type]
                    }
                ),
                client,
                f"train.{kind}",
            )
            for client in self.present
        ]
        self._stage(messages, take)

    @property
    def _most_bytes(self) -> int:
        """Bytes of an honest reply: 64 bits for each number of the sum."""
        return 1_000_000 + (8 * self._layout.size if self._layout else 0)

    def _stage(self, messages: list[Message], take: Take) -> None:
        """Send the messages of a stage; who does not answer as it should is out of the later."""
        timeout = self._settings.client_timeout
        for reply in self._grid.send_and_receive(messages, timeout=timeout):
            client = reply.metadata.src_node_id
            try:
                take(client, open_reply(reply, self._most_bytes))
            except BadReply as error:
                self.lost[client] = reason_of(error)
            except Exception as error:
                self.lost[client] = f"secure aggregation: {reason_of(error)}"
        self.present = [client for client in self.present if client not in self.lost]


def _message_to(receive: Callable[[int, bytes], None]) -> Take:
    def take(client: int, content: RecordDict) -> None:
        receive(client, content["secure"]["message"])  # type: ignore[index, arg-type]

    return take
