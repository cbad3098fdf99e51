"""Messages of an inner station to its stations, and their checked replies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from hfedatm.base.admission import Admission
from hfedatm.base.building import build_rule
from hfedatm.base.errors import UserError
from hfedatm.base.index_maps import RECORD
from hfedatm.base.kept_model import Sending
from hfedatm.base.records import (
    Task,
)
from hfedatm.base.round_record import Failure
from hfedatm.base.tiers import (
    children,
    clients_below,
    levels,
    patience,
)
from hfedatm.base.wire import (
    Expected,
    NodeUpdate,
    Scores,
    checked,
)
from hfedatm.base.wire.numbers import STATION_BYTES
from station_app.result import below, grouped

V = TypeVar("V", NodeUpdate, Scores)


class TooFewStations(UserError):
    """Fewer stations than the quorum gave a usable reply."""


@dataclass
class InnerHearing:
    """What all jobs of an inner station need: messages, checked replies, notes on them."""

    grid: Grid
    content: RecordDict
    task: Task
    failures: list[Failure] = field(default_factory=list)
    cuts: list[Failure] = field(default_factory=list)
    sums: Counter[str] = field(default_factory=Counter)
    """Bytes, seconds and counted stations, over all replies."""
    epsilon: float = 0.0
    seen: dict[str, dict[str, float]] = field(default_factory=dict)
    """Station that answered in this step -> its numbers, and how many answered below."""

    def __post_init__(self) -> None:
        """Build the rule."""
        self.settings, self.level = self.task.settings, self.task.level
        self.rule = build_rule(self.settings)
        self._name = f"inner-{self.level}-{self.task.station}"
        self._asked, self._nodes = 0, set[int]()

    def _messages(
        self,
        kind: str,
        model: Sending,
        task: Task,
        records: Mapping[str, Any] | None = None,
        own: Callable[[int], Mapping[str, Any]] = lambda _: {},
    ) -> list[Message]:
        """Pass the task on to the next level, with the records that came with it."""
        stations = sorted(self.grid.get_node_ids())
        self._asked = len(stations)
        given = {**self.content, **(records or {})}
        for mine in ("model", "changes", RECORD):
            given.pop(mine, None)
        below = task.but(level=self.level + 1)

        def content(station: int) -> RecordDict:
            task = below.but(station=station).to_record()
            return RecordDict({**given, **model.to(station), **own(station), "task": task})

        return [Message(content(one), one, kind) for one in stations]

    def _ask(self, messages: list[Message]) -> Iterable[Message]:
        return self.grid.send_and_receive(messages, timeout=patience(self.settings, self.level))

    def _expected(self, **parts: Any) -> Expected:
        """Return the parts that a station's reply must have."""
        lower = self.level + 1
        together, height = clients_below(self.settings, lower), levels(self.settings) - self.level
        return Expected(self.settings, "station", together=together, height=height, **parts)

    def _usable(self, replies: Iterable[Message], read: Callable[[Message], V]) -> Iterator[V]:
        """Yield the replies that pass the checks; raise `TooFewStations` below the quorum."""
        failed: list[Failure] = []
        answered = 0
        for value in checked(replies, read, "station", failed.append):
            answered += 1
            self.failures += [below(value.name, failure) for failure in value.failures]
            yield value
            del value
        self.failures += failed
        asked = max(self._asked, children(self.settings, self.level))
        needed = max(1, math.ceil(self.settings.station_quorum * asked))
        if answered < needed:
            absent = asked - self._asked
            reasons = grouped(failed) if self._asked else ["it has no stations"]
            reasons += [f"{absent} have not connected"] if absent and self._asked else []
            raise TooFewStations(
                f"{answered} of {asked} stations answered, {needed} are needed: "
                f"{'; '.join(reasons)}"
            )

    def _note(self, update: NodeUpdate) -> None:
        self.seen[update.name] = {"weight": 0.0}
        for name in ("bytes-up", "gram-bytes-up", "gram-seconds"):
            self.sums[name] += update.metrics.get(name, 0)  # type: ignore[assignment]
        self.sums[STATION_BYTES] += update.bytes + int(update.metrics.get(STATION_BYTES, 0))
        self.epsilon = max(self.epsilon, update.metrics.get("epsilon", 0.0))
        self.cuts += [below(update.name, cut) for cut in update.cuts]

    def _close(self, admission: Admission) -> None:
        left_out = admission.left_out()
        for one in left_out:
            self.seen.pop(one.node, None)
        self.failures += left_out
        self.cuts += admission.cut_back()
        admission.close()
