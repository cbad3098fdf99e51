"""The messages with which the server asks its stations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from hfedatm.base.class_profiles import ProfileShapes
from hfedatm.base.exchange import AskedLayers
from hfedatm.base.index_maps import RECORD, StationMaps
from hfedatm.base.kept_model import Sending
from hfedatm.base.metric_sums import no_sums
from hfedatm.base.records import Task, layers_to_record, state_to_record
from hfedatm.base.round_record import RoundRecord
from hfedatm.base.settings import Settings
from hfedatm.base.tiers import children, clients_below, is_deep, levels
from hfedatm.base.wire import (
    Expected,
    NodeUpdate,
    checked,
    read_update,
)
from hfedatm.base.wire.graph import graph_to_record
from hfedatm.contracts import Method, Paced, Rule
from hfedatm_core import ChannelGraph, Update
from hfedatm_core.metrics import Metric
from hfedatm_core.tensors import State
from server_app.diagnostics import RoundDiagnostics
from server_app.memory import ServerMemory
from server_app.round_notes import RoundNotes
from server_app.shapes import StationShapes


def to_stations(
    stations: Iterable[int],
    message_type: str,
    task: Task,
    records: Mapping[str, Any],
    own: Callable[[int], Mapping[str, Any]],
    settings: Callable[[int], Settings],
) -> list[Message]:
    """Return a message for every station: its task, its ``own`` records and those all get."""
    return [
        Message(
            RecordDict(
                {
                    **records,
                    **own(station),
                    "task": task.but(station=station, settings=settings(station)).to_record(),
                }
            ),
            station,
            message_type,
        )
        for station in stations
    ]


class Asking(Strategy):
    """Messages to the stations and their checked replies, whatever the stations are asked for.

    Parameters
    ----------
    settings
        The run's settings.
    rule
        How station models become one.
    method
        The client method; it may share arrays before each round.
    graph
        Which axes of the network share a channel space.
    layers
        Linear layers that need a Gram, with their widths.
    template
        Arrays the method shares, if any (zeros of the right shapes).
    done
        Rounds finished before this start; a resumed run counts on from here.
    run
        Name under which nodes store their memory; no other run has it.
    """

    def __init__(
        self,
        settings: Settings,
        rule: Rule,
        method: Method,
        graph: ChannelGraph,
        layers: dict[str, int],
        template: State,
        done: int = 0,
        run: str = "run",
    ) -> None:
        self.settings, self.rule, self.method, self.graph = settings, rule, method, graph
        self.layers = layers if rule.needs_grams else {}
        self._layers: Mapping[str, int] = {}  # of the current round
        self.all_layers = self.layers  # layers of a round in which `measures_all` holds
        self.template = template
        self._of_rule = (*rule.reports, *rule.station_reports)
        self.done, self.run = done, run
        self.memory = ServerMemory(rule)
        self.record: RoundRecord
        """The record of the round that was merged last, as far as it is complete."""
        self._round, self._notes = done, RoundNotes()
        self.round_diagnostics: RoundDiagnostics | None = None
        self.start_of: Callable[[int], ArrayRecord] | None = None
        """Model a station starts round 1 from; if None, all start from the global model."""
        self.shared_apart: dict[str, Update] = {}
        """What the method shares, by station, in a round whose stations have their own starts."""
        self.buffer = rule.buffer if isinstance(rule, Paced) else 0
        """Number of stations that a merge waits for; 0 is all of them."""
        self._virtual = bool(self.buffer and isinstance(rule, Paced) and rule.station_seconds)
        self._unasked: set[int] = set()
        self.metrics: Mapping[str, Metric] = {}
        """Metrics of the evaluation besides accuracy."""
        self.shapes = StationShapes(settings)
        """Stations whose model has another shape than the global model."""
        self._apart = False  # whether this round's merge needs the Grams of all layers
        self.epsilon = 0.0
        """The largest epsilon that any client has reported as spent."""
        self.norms: State = {}
        """Moments of BatchNorm inputs, in the shape that a second look sends."""
        self.profile_shapes: ProfileShapes | None = None
        """Class profiles of a round in which the rule wants them."""
        self._profiles: ProfileShapes | None = None  # of the current round
        self._judged, self._passes = ArrayRecord(), 0
        self._sending: Sending | None = None  # of the merged model, until the end of the round
        self.exchanges: list[AskedLayers] = []
        """Layers of every exchange after a merge that the rule refines."""
        self._exchange = AskedLayers({})
        self._merged_stations: set[str] = set()  # whose merged model is refined

    def summary(self) -> None:
        """Log nothing: the run prints its own header."""

    def _messages(
        self, kind: Any, message_type: str, arrays: ArrayRecord, grid: Grid, number: int = 0
    ) -> list[Message]:
        stations = sorted(grid.get_node_ids())
        if kind == "refine":
            stations = self._still_refining(stations, number)
        if kind == "train" and self._own_starts:  # the first is the reference
            stations = self.shapes.reading_order(stations)
        self._asked = len(stations)
        shared = self.template if kind == "prepare" else (self.memory.shared or self.template)
        records: dict[str, Any] = {"layers": layers_to_record(self._layers)}
        if shared:
            records["shared"] = state_to_record(shared)
        if kind == "evaluate" and (sums := no_sums(self.metrics, self.settings)):
            records["sums"] = state_to_record(sums)
        if kind == "train" and self._profiles:
            records["profiles"] = self._profiles.to_record()
        if kind == "refine":
            records |= self._exchange.to_records()
        if kind == "look":
            records["statistics"] = state_to_record(self.norms)
        if of_rule := self.rule.shared():
            records["rule"] = state_to_record(of_rule)
        if kind == "train" and is_deep(self.settings) and getattr(self.rule, "fot", False):
            records["graph"] = graph_to_record(self.graph)
        task = Task(kind, self.settings, self._round, station_round=number, run=self.run)
        return self._addressed(stations, message_type, task, records, arrays)

    def _still_refining(self, stations: list[int], number: int) -> list[int]:
        """Return the stations of the merge or, after the first exchange, those that answered."""
        if number > 1 and self._sending:
            return [station for station in stations if station in self._sending.kept_by]
        return [station for station in stations if f"station {station}" in self._merged_stations]

    def _addressed(
        self,
        stations: Iterable[int],
        message_type: str,
        task: Task,
        records: Mapping[str, Any],
        arrays: ArrayRecord,
    ) -> list[Message]:
        """Return the messages of a task, each with the records that only its station gets."""
        kind = task.kind
        start = self.start_of if task.round == 1 and kind in ("prepare", "train") else None
        model = self._sending or Sending(arrays)

        def own(station: int) -> dict[str, Any]:
            found = {"model": start(station)} if start else model.to(station)
            refined = kind == "refine" and "model" in found
            maps = self.memory.maps.get(f"station {station}", StationMaps())
            # A merged station refines in the order that this very merge has given it.
            maps = maps.before(task.round + refined)
            if maps and (kind == "train" or refined):
                found[RECORD] = maps.to_record()
            # Their mean would mix channels that do not match: each trains with its own.
            if kind == "train" and (alone := self.shared_apart.get(f"station {station}")):
                found["shared"] = state_to_record(alone.state)
            return found

        return to_stations(
            *(stations, message_type, task, records),
            lambda s: self.shapes.records(
                s, own(s), kind, bool(self._layers), self._apart, start is not None
            ),
            lambda s: self.shapes.settings(s, kind),
        )

    @property
    def _own_starts(self) -> bool:
        """Whether the stations of this round start from models of their own."""
        return self.start_of is not None and self._round == 1

    @property
    def _expected_stations(self) -> int:
        # Absent ones count, too, unless the server does not wait for all.
        return self.buffer or max(self._asked, children(self.settings, 0))

    def _too_few(self, answered: int) -> str:
        """Return a reason if fewer stations answered than the quorum needs."""
        needed = max(1, math.ceil(self.settings.station_quorum * self._expected_stations))
        few = f"{answered} of {self._expected_stations} stations usable, {needed} needed"
        return few if answered < needed else ""

    def _expected(self, **parts: Any) -> Expected:
        """Return the parts that a station's reply must have."""
        together, height = clients_below(self.settings, 1), levels(self.settings)
        return Expected(self.settings, "station", together=together, height=height, **parts)

    def _updates(
        self,
        replies: Iterable[Message],
        expected: Expected,
        read: Callable[[Message, Expected], NodeUpdate] = read_update,
    ) -> Iterator[NodeUpdate]:
        """Yield the checked updates; a station that fails a check is noted and left out."""
        notes = self._notes
        for update in checked(replies, lambda r: read(r, expected), "station", notes.fail):
            notes.arrive(update)
            yield update
            del update
