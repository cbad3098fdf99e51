"""The server's rounds over its stations, as a Flower strategy."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid

from hfedatm.base import tracebacks
from hfedatm.base.admission import Admission
from hfedatm.base.building import measures_all
from hfedatm.base.class_profiles import ProfileShapes
from hfedatm.base.privacy_settings import is_private
from hfedatm.base.records import Task, layers_to_record, record_to_state, state_to_record
from hfedatm.base.round_record import Failure, Privacy
from hfedatm.base.tiers import children, is_deep
from hfedatm.base.wire import Expected, NodeUpdate
from hfedatm.contracts import Paced, Situation
from hfedatm_core import MeanAccumulator, Merged, Update
from hfedatm_core.channels.index_maps import IndexMap
from hfedatm_core.staleness import discount, rebased
from hfedatm_core.tensors import State
from hfedatm_core.tiers import no_products
from server_app.checked_merge import NotMerged, checked_merge
from server_app.diagnostics import RoundDiagnostics
from server_app.judging import Judging
from server_app.pacing import PacedGrid
from server_app.round_notes import RoundNotes


class HFedATMStrategy(Judging):
    """Send the global model to the stations and merge their models by a rule."""

    def restore(self, memory: State) -> None:
        """Restore what `ServerMemory.remember` returned; stations at work are asked again."""
        self.memory.restore(memory)
        self.shapes.use(self.memory.plans)
        self._unasked = set(self.memory.flights.at_work)

    def paced(self, stations: Grid) -> Grid:
        """Return the Grid of stations, which need not wait for all of them."""
        if not self.buffer or not isinstance(self.rule, Paced):
            return stations
        return PacedGrid(stations, self.memory.flights, self.buffer, self.rule.durations())

    # --- training

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send the global model to every station, after the method has shared its arrays."""
        self._round = server_round + self.done
        self._started = time.perf_counter()
        self._passes, self._sending, self._merged_stations = 0, None, set()
        self.shared_apart = {}
        self._apart = measures_all(self.settings, self._round)
        self._layers = self._layers_of(self._round)
        self._profiles = self._profiles_of(self._round)
        if self.memory.broadcast:  # the rule publishes one model and sends out another
            arrays = state_to_record(self.memory.broadcast)
        self._reference = record_to_state(arrays)
        self._notes = RoundNotes()
        shown = self.settings.diagnostics and self._round in (1, self.settings.rounds)
        self.round_diagnostics = (
            RoundDiagnostics(self.graph, children(self.settings, 0)) if shown else None
        )
        if self.method.sharing == "global":
            self._share(arrays, grid)
        if not self.buffer:
            return self._messages("train", MessageType.TRAIN, arrays, grid)
        again = self._asked_again()
        messages = self._messages("train", MessageType.TRAIN, arrays, grid)
        flights = self.memory.flights
        if messages:
            sent = messages[0].content
            kept = {name: sent[name] for name in ("model", "shared", "rule") if name in sent}
            flights.starts[self._round] = kept  # type: ignore[assignment]
        flights.waiting = True
        return again + messages

    def _asked_again(self) -> list[Message]:
        """Begin a round in which stations may be at work; a restarted server asks them again."""
        flights, found = self.memory.flights, list[Message]()
        flights.begin_round(self._round)
        for station in sorted(self._unasked):
            number = flights.at_work[station].round
            if number in flights.starts:
                layers = layers_to_record(self._layers_of(number))
                records: dict[str, Any] = {"layers": layers, **flights.starts[number]}
                if profiles := self._profiles_of(number):
                    records["profiles"] = profiles.to_record()
                task = Task("train", self.settings, number, run=self.run)
                model = flights.starts[number]["model"]
                found += self._addressed([station], MessageType.TRAIN, task, records, model)
            elif not self._virtual:
                del flights.at_work[station]
        self._unasked = set()
        return found

    def _profiles_of(self, number: int) -> ProfileShapes | None:
        """Return the class profiles that the stations send in a round."""
        wanted = self.rule.wants_profiles(self.settings, number)
        return self.profile_shapes if wanted else None

    def _layers_of(self, number: int) -> dict[str, int]:
        """Return the layers whose Grams the stations send in a round."""
        if not self.rule.wants_grams(number, self.settings.rounds):
            return {}
        return self.all_layers if measures_all(self.settings, number) else self.layers

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the stations' updates; too few of them leave the model as it is."""
        started = time.perf_counter()
        admission, waited = self._hold(replies)
        rule_before, notes = self.rule.remember(), self._notes
        merged, why = self._merge(iter(admission))
        self.memory.standing = admission.standing
        for failure in admission.left_out():
            notes.fail(failure)
        notes.cuts += admission.cut_back()
        admission.close()
        answered = len(notes.stations)
        if few := self._too_few(answered):
            merged, why = None, few
        elif merged is None:
            notes.fail(Failure(node="server", reason=why))
        now = time.perf_counter()
        means = notes.own_means(self._of_rule, self.settings.claim_factor)
        if self._virtual:
            means["clock"] = self.memory.flights.clock
        self.record = notes.record(
            self._round,
            self._expected_stations,
            merged,
            own=means,
            kept=why,
            privacy=self._spent(),
            train_seconds=now - self._started,
            merge_seconds=now - started - waited,
            settings=self.settings,
        )
        if merged is None:
            self.rule.restore(rule_before)
            return None, None
        self._passes = self.rule.looks_again(self.settings, self._round)
        if self.rule.refines(self.settings, self._round):
            self._merged_stations = set(merged.permutations)
        if self.round_diagnostics:
            self.round_diagnostics.finish(merged)
        late = {f"station {n}": self.memory.flights.late(n) for n in self.memory.flights.landed}
        self.memory.note_moves(self._round, merged, self.graph, late)
        if self._own_starts:
            self.memory.plans = self.shapes.plans(merged)
            self.shapes.use(self.memory.plans)
        if self.shared_apart:
            self._share_aligned(merged)
        broadcast = self.rule.next_start(merged)
        self.memory.broadcast = {} if broadcast is merged.state else broadcast
        return state_to_record(merged.state), None

    def _merge(self, updates: Iterable[Update]) -> tuple[Merged | None, str]:
        """Return the merged model and no reason, or None and the reason."""
        if self.round_diagnostics:
            updates = self.round_diagnostics.watch(updates)
        if self._own_starts:
            updates = self.shapes.matched(updates)
        situation = Situation(self.settings, self.graph, self._reference, self._round)
        try:
            return checked_merge(self.rule, updates, situation), ""
        except NotMerged as error:
            if self._notes.stations:  # if none answered, their failures give the reasons
                tracebacks.keep("server", tracebacks.whole(error.__cause__ or error))
            return None, str(error)

    def _spent(self) -> Privacy | None:
        """Return the largest epsilon that any client has spent so far, if privacy is on."""
        if not is_private(self.settings):
            return None
        self.epsilon = max([self.epsilon, *(s.epsilon for s in self._notes.stations)])
        budget = self.settings.privacy_epsilon or None
        return Privacy(epsilon=self.epsilon, budget=budget, delta=self.settings.privacy_delta)

    def _hold(self, replies: Iterable[Message]) -> tuple[Admission, float]:
        """Check and hold all updates; return them and the seconds spent waiting for them."""

        def read(reply: Message, expected: Expected) -> NodeUpdate:
            late = self.memory.flights.late(reply.metadata.src_node_id)
            if late:
                asked = self._round - late
                layers, profiles = self._layers_of(asked), self._profiles_of(asked)
                expected = replace(expected, layers=layers, profiles=profiles)
            return self._current(self.shapes.read(reply, expected, self._own_starts), late)

        start = self._reference
        if self.rule.passes_products and is_deep(self.settings):
            start = {**start, **no_products(start, self._layers)}
        expected = self._expected(
            arrays=start,
            layers=self._layers,
            shrunk=not self._apart,
            profiles=self._profiles,
            needed=("loss", *self._of_rule),
            check=self.rule.check_report,
        )
        nodes: dict[str, int] = {}
        own = self.start_of if self._own_starts else None

        def start_of(update: Update) -> State:
            assert own is not None
            node = nodes[update.name]
            return self.shapes.lifted(node, record_to_state(own(node)))

        admission = Admission(
            self.settings,
            "stations",
            start,
            earlier=self.memory.standing,
            start_of=start_of if own else None,
        )
        waited, asked_at = 0.0, time.perf_counter()
        for update in self._updates(replies, expected, read):
            waited += time.perf_counter() - asked_at
            self._notes.train(update)
            nodes[update.name] = update.node
            admission.add(update.as_update())
            del update
            asked_at = time.perf_counter()
        for station, late in self.memory.flights.too_late.items():
            why = f"dropped: {late} rounds late, max_staleness is {self.memory.flights.most_late}"
            self._notes.fail(Failure(node=f"station {station}", reason=why))
        return admission, waited + time.perf_counter() - asked_at

    def _current(self, update: NodeUpdate, late: int) -> NodeUpdate:
        """Return an update as a step from the current model, the smaller the later it comes."""
        if not self.buffer or not isinstance(self.rule, Paced):
            return update
        update = replace(update, metrics={**update.metrics, "late": late})
        if not late:
            return update
        factor = discount(late, self.rule.staleness)
        start = self.memory.flights.start_of(update.node)
        return replace(update, state=rebased(update.state, start, self._reference, factor))

    def _share(self, arrays: ArrayRecord, grid: Grid) -> None:
        mean = MeanAccumulator()
        messages = self._messages("prepare", "train.prepare", arrays, grid)
        replies = grid.send_and_receive(messages, timeout=self.settings.station_timeout)
        expected = self._expected(arrays=self.template, record="shared")
        admission = Admission(self.settings, "stations", self.template, compare=False)
        for update in self._updates(replies, expected):
            admission.add(update.as_update())
            del update
        for admitted in admission:
            if self._own_starts:
                self.shared_apart[admitted.name] = admitted
            else:
                mean.add(admitted.state, admitted.num_examples, admitted.name, checked=True)
            del admitted
        admission.close()
        if mean.count:
            self.memory.shared = self.method.blend(self.memory.shared, mean.result())

    def _share_aligned(self, merged: Merged) -> None:
        """Average the shared arrays of stations with starts of their own, now that they match."""
        mean = MeanAccumulator()
        for name, update in self.shared_apart.items():
            if permutations := merged.permutations.get(name):
                found = IndexMap.of(self.graph, permutations, merged.state)
                moved = found.moved(update.state, merged.state, {})
                mean.add(moved, update.num_examples, name, checked=True)
        self.shared_apart = {}
        if mean.count:
            self.memory.shared = self.method.blend({}, mean.result())
