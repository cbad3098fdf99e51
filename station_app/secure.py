"""Secure aggregation, the station's side: turn the clients' messages into one mean reply.

The station passes keys and encrypted shares on, adds up masked vectors as they arrive, and learns
nothing but their sum. Clients may drop out or lie at any stage; the clients that remain can remove
the masks if they are at least the share ``secure-threshold`` of those asked. The layout of a
client's vector follows from what the station expects, not from what the client says.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from hfedatm.base.handover.recordfile import content_bytes
from hfedatm.base.masked_reply import IN_THE_CLEAR, ReplyLayout, mean_reply, read_groups
from hfedatm.base.privacy_settings import secure_threshold
from hfedatm.base.records import BadReply, Task, record_to_arrays
from hfedatm.base.streaming import NO_REPLY
from hfedatm.base.trust.cohort import step_of, verify_members
from hfedatm.base.wire import Expected, open_reply, reason_of
from hfedatm.base.wire.expected import ALLOWANCE, lowered
from hfedatm.base.wire.numbers import read_metrics
from hfedatm_core.secagg import Aggregator, SecureAggregationError
from hfedatm_core.secagg.messages import dump

Take = Callable[[int, RecordDict], None]

_PER_CLIENT = 512
"""Bytes that a stage's message may take per client, in addition to the masked vector."""


def gather_securely(
    grid: Grid, messages: Iterable[Message], expected: Expected
) -> Iterator[Message]:
    """Send messages; yield one reply for all survivors, and an error for every other client."""
    asked = {message.metadata.dst_node_id: message for message in messages}
    total = _SecureSum(grid, asked, expected)
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

    def __init__(self, grid: Grid, asked: Mapping[int, Message], expected: Expected) -> None:
        self._grid, self._asked, self._expected = grid, asked, expected
        self.present = sorted(asked)
        """Clients that have answered every stage so far."""
        self.lost: dict[int, str] = {}
        self._session = secrets.token_bytes(16)
        self._keys: dict[int, object] = {}
        self._layouts: dict[int, ReplyLayout] = {}
        self._metrics: dict[int, dict[str, float]] = {}
        self._bytes = 0

    def run(self) -> RecordDict:
        """Return the mean reply of the clients that stayed."""
        for message in self._asked.values():
            start = {
                "session": self._session,
                "asked": len(self._asked),
                "metrics": list(self._expected.needed),
            }
            message.content["secure"] = ConfigRecord(start)  # type: ignore[arg-type]
        self._stage([self._asked[client] for client in self.present], self._take_keys)
        layout = self._agreed_layout()
        threshold = secure_threshold(self._expected.settings, len(self._asked))
        task = Task.from_record(next(iter(self._asked.values())).content["task"])
        total = Aggregator(
            self._session,
            layout.size,
            step=step_of(task),
            threshold=threshold,
            verify=verify_members(),
        )
        self._each(total.advertised)
        directory = total.directory()
        self._ask("share", lambda _: directory, _message_to(total.shared))
        self._ask("check", total.inbox, _message_to(total.checked))
        chosen = total.participants()
        self._leave_out(total.refused)
        self._ask("mask", lambda _: dump(participants=chosen), self._add_to(total))
        # A client that drops out from here on has already sent its vector: it stays in the sum.
        survivors = total.survivors()
        lost = dict(self.lost)
        self._ask("sign", lambda _: dump(survivors=survivors), _message_to(total.signed))
        signatures = total.signatures()
        self._ask("reveal", lambda _: signatures, _message_to(total.revealed))
        self.present, self.lost = survivors, lost
        return self._mean(layout, total.result())

    def _take_keys(self, client: int, content: RecordDict) -> None:
        groups, digest = read_groups(content.get("layout"))
        e = self._expected
        layout = ReplyLayout.expected(e.needed, e.record, e.arrays, e.layers, groups)
        if layout.digest != digest:
            raise BadReply("the parts of its reply differ from those of the model that was sent")
        clear = read_metrics(content)
        self._keys[client] = content["keys"]["message"]
        self._metrics[client] = {name: clear[name] for name in IN_THE_CLEAR if name in clear}
        self._layouts[client] = layout

    def _agreed_layout(self) -> ReplyLayout:
        """Return the most common layout; layouts differ only in which layers share a Gram."""
        counts = Counter(self._layouts[client] for client in self.present)
        if not counts:
            raise SecureAggregationError("no client has sent anything that can be added up")
        agreed, _ = counts.most_common(1)[0]
        self._leave_out(
            {
                client: "its layers share Grams in another way than those of most clients"
                for client in self.present
                if self._layouts[client] != agreed
            }
        )
        return agreed

    def _each(self, take: Callable[[int, object], None]) -> None:
        """Hand over the clients' keys; a client whose keys are refused is excluded."""
        for client in self.present:
            try:
                take(client, self._keys[client])
            except Exception as error:  # any error is this client's failure
                self.lost[client] = f"secure aggregation: {reason_of(error)}"
        self.present = [client for client in self.present if client not in self.lost]

    def _leave_out(self, reasons: Mapping[int, str]) -> None:
        self.lost |= {client: f"secure aggregation: {why}" for client, why in reasons.items()}
        self.present = [client for client in self.present if client not in self.lost]

    def _add_to(self, total: Aggregator) -> Take:
        def take(client: int, content: RecordDict) -> None:
            vector = record_to_arrays(content["masked"])["vector"]  # type: ignore[arg-type]
            total.masked(client, vector)
            self._bytes += content_bytes(content)

        return take

    def _mean(self, layout: ReplyLayout, total: np.ndarray) -> RecordDict:
        clients = len(self.present)
        reply = mean_reply(layout, total, clients)
        metrics: MetricRecord = reply["metrics"]  # type: ignore[assignment]
        metrics["bytes-up"] = self._bytes
        metrics["gram-bytes-up"] = self._bytes * layout.gram_size // layout.size
        known = [self._metrics[client] for client in self.present]
        for name in IN_THE_CLEAR:
            if values := [m[name] for m in known if name in m]:
                metrics[name] = max(values) if name == "epsilon" else sum(values)
        return reply

    def _ask(self, kind: str, message: Callable[[int], bytes], take: Take) -> None:
        messages = [
            Message(
                RecordDict(
                    {
                        "task": self._asked[client].content["task"],
                        "secure": ConfigRecord({"message": message(client)}),
                    }
                ),
                client,
                f"train.{kind}",
                group_id=self._session.hex(),
            )
            for client in self.present
        ]
        self._stage(messages, take)

    def _stage(self, messages: list[Message], take: Take) -> None:
        """Send the messages of a stage; a client that misbehaves is excluded from later stages."""
        settings = self._expected.settings
        vectors = max((layout.size for layout in self._layouts.values()), default=0)
        most = lowered(ALLOWANCE + 8 * vectors + _PER_CLIENT * len(self._asked), settings)
        for reply in self._grid.send_and_receive(messages, timeout=settings.client_timeout):
            client = reply.metadata.src_node_id
            try:
                take(client, open_reply(reply, most))
            except BadReply as error:
                self.lost[client] = reason_of(error)
            except Exception as error:  # any error is this client's failure
                self.lost[client] = f"secure aggregation: {reason_of(error)}"
            del reply  # one reply in memory at a time
        self.present = [client for client in self.present if client not in self.lost]


def _message_to(receive: Callable[[int, object], None]) -> Take:
    def take(client: int, content: RecordDict) -> None:
        receive(client, content["secure"]["message"])

    return take
