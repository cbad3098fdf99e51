"""The server's rounds over its stations, as a Flower strategy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from hfedatm.base import tracebacks
from hfedatm.base.admission import Admission
from hfedatm.base.building import measures_all
from hfedatm.base.metric_sums import HeldSums, no_sums
from hfedatm.base.privacy_settings import is_private, why_no_look
from hfedatm.base.records import Task, layers_to_record, record_to_state, state_to_record
from hfedatm.base.round_record import Failure, Privacy, RoundRecord, SecondLook, Source
from hfedatm.base.settings import Settings
from hfedatm.base.wire import (
    Expected,
    NodeUpdate,
    checked,
    read_scores,
    read_statistics,
    read_update,
)
from hfedatm.contracts import Method, Rule, Situation
from hfedatm_core import ChannelGraph, MeanAccumulator, Merged, Update
from hfedatm_core.metrics import Metric
from hfedatm_core.norm_statistics import with_moments
from hfedatm_core.tensors import State
from server_app.asking import to_stations
from server_app.checked_merge import NotMerged, checked_merge
from server_app.diagnostics import RoundDiagnostics
from server_app.memory import ServerMemory
from server_app.round_notes import RoundNotes
from server_app.scores import source_scores
from server_app.second_look import pooled
from server_app.undoing import Accepted, fall, sentence


class HFedATMStrategy(Strategy):
    """Send the global model to the stations and merge their models by a rule.

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
        self.metrics: Mapping[str, Metric] = {}
        """Metrics of the evaluation besides accuracy."""
        self.epsilon = 0.0
        """The largest epsilon that any client has reported as spent."""
        self.norms: State = {}
        """Moments of BatchNorm inputs, in the shape that a second look sends."""
        self._judged, self._looks = ArrayRecord(), False

    def summary(self) -> None:
        """Log nothing: the run prints its own header."""

    # --- training

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send the global model to every station, after the method has shared its arrays."""
        self._round = server_round + self.done
        self._started = time.perf_counter()
        self._looks = False
        wanted = self.rule.wants_grams(self._round, self.settings.rounds)
        self._apart = measures_all(self.settings, self._round)
        self._layers = (self.all_layers if self._apart else self.layers) if wanted else {}
        if self.memory.broadcast:  # the rule publishes one model and sends out another
            arrays = state_to_record(self.memory.broadcast)
        self._reference = record_to_state(arrays)
        self._notes = RoundNotes()
        shown = self.settings.diagnostics and self._round in (1, self.settings.rounds)
        self.round_diagnostics = (
            RoundDiagnostics(self.graph, self.settings.stations) if shown else None
        )
        if self.method.sharing == "global":
            self._share(arrays, grid)
        return self._messages("train", MessageType.TRAIN, arrays, grid)

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
        self.record = notes.record(
            self._round,
            self._expected_stations,
            merged,
            own=notes.own_means(self._of_rule, self.settings.claim_factor),
            kept=why,
            privacy=self._spent(),
            train_seconds=now - self._started,
            merge_seconds=now - started - waited,
        )
        if merged is None:
            self.rule.restore(rule_before)
            return None, None
        self._looks = self.rule.looks_again(self.settings, self._round)
        if self.round_diagnostics:
            self.round_diagnostics.finish(merged)
        broadcast = self.rule.next_start(merged)
        self.memory.broadcast = {} if broadcast is merged.state else broadcast
        return state_to_record(merged.state), None

    def _merge(self, updates: Iterable[Update]) -> tuple[Merged | None, str]:
        """Return the merged model and no reason, or None and the reason."""
        if self.round_diagnostics:
            updates = self.round_diagnostics.watch(updates)
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
        expected = self._expected(
            arrays=self._reference,
            layers=self._layers,
            shrunk=not self._apart,
            needed=("loss", *self._of_rule),
            check=self.rule.check_report,
        )
        nodes: dict[str, int] = {}
        own = self.start_of if self._round == 1 else None
        admission = Admission(
            self.settings,
            "stations",
            self._reference,
            earlier=self.memory.standing,
            start_of=own and (lambda update: record_to_state(own(nodes[update.name]))),
        )
        waited, asked_at = 0.0, time.perf_counter()
        for update in self._updates(replies, expected):
            waited += time.perf_counter() - asked_at
            self._notes.train(update)
            nodes[update.name] = update.node
            admission.add(update.as_update())
            del update
            asked_at = time.perf_counter()
        return admission, waited + time.perf_counter() - asked_at

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
            mean.add(admitted.state, admitted.num_examples, admitted.name, checked=True)
            del admitted
        admission.close()
        if mean.count:
            self.memory.shared = self.method.blend(self.memory.shared, mean.result())

    # --- a second look

    def _look(self, arrays: ArrayRecord, grid: Grid) -> None:
        """Replace the merged model's BatchNorm statistics by those that the clients measure."""
        why = why_no_look(self.settings)
        if not self.norms:
            why = "the model has no BatchNorm with running statistics"
        if why:
            self.record = self.record.but(second_look=SecondLook(reason=why))
            return
        messages = self._messages("look", "train.look", arrays, grid)
        replies = grid.send_and_receive(messages, timeout=self.settings.station_timeout)
        expected = self._expected(arrays=self.norms, record="statistics")
        updates = self._updates(replies, expected, read_statistics)
        found = pooled(updates, self.settings, self.norms, self._notes)
        why = self._too_few(found.stations)
        if not why:  # in place, because Flower continues from this record
            arrays.update(state_to_record(with_moments(record_to_state(arrays), found.moments)))
        look = SecondLook(stations=found.stations, examples=found.examples, reason=why)
        self.record = self._notes.on(self.record).but(second_look=look)

    # --- evaluation

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask the stations how good the merged model is on their clients' validation examples."""
        if self._looks:
            self._look(arrays, grid)
        due = self._round % self.settings.evaluate_every == 0 or self._round == self.settings.rounds
        if not due or not self.settings.validation_fraction:
            self._asked = 0
            return []
        self._judged = arrays
        return self._messages("evaluate", MessageType.EVALUATE, arrays, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Add up the stations' counts."""
        template, notes = no_sums(self.metrics, self.settings), self._notes
        expected = self._expected(arrays=template, record="sums")
        evaluated: dict[str, dict[str, float]] = {}
        answered, sums = 0, HeldSums()
        for scores in checked(replies, lambda r: read_scores(r, expected), "station", notes.fail):
            answered += 1
            for failure in scores.failures:
                notes.fail(failure, scores.name)
            if scores.examples:
                evaluated[scores.name] = {**scores.counts, "loss-sum": scores.loss_sum}
                sums.add(scores.sums)
        before, most = self.memory.accepted, self.settings.max_fall
        factor, found = self.settings.claim_factor, None
        if evaluated:
            found = source_scores(evaluated, factor, sums, self.metrics, self.method.task.measure)
        self.record = self.record.but(failures=list(notes.failures))
        # If most stations cannot evaluate the model, it returns no finite numbers.
        if before and most and answered < self._asked / 2:
            self._take_back(before, None)
        elif before and most and found and fall(before.source, found) > most:
            self._take_back(before, found)
        elif found:
            self.memory.accept(record_to_state(self._judged), found, self._round)
            self.record = self.record.but(source=found)
        if found is None:
            return None
        return MetricRecord({"accuracy": found.accuracy, "loss": found.loss or 0.0})

    def _take_back(self, before: Accepted, found: Source | None) -> None:
        """Continue from the last accepted model, as if this round had not happened."""
        why = sentence(before.source, found)
        self.record = self.record.but(source=before.source, taken_back=why)
        model = self.memory.take_back(before, self._round)
        # Flower continues from this record and offers no other way back.
        self._judged.clear()
        self._judged.update(state_to_record(model))

    # --- both

    def _messages(
        self, kind: Any, message_type: str, arrays: ArrayRecord, grid: Grid
    ) -> list[Message]:
        stations = sorted(grid.get_node_ids())
        self._asked = len(stations)
        shared = self.template if kind == "prepare" else (self.memory.shared or self.template)
        records: dict[str, Any] = {"layers": layers_to_record(self._layers)}
        if shared:
            records["shared"] = state_to_record(shared)
        if kind == "evaluate" and (sums := no_sums(self.metrics, self.settings)):
            records["sums"] = state_to_record(sums)
        if kind == "look":
            records["statistics"] = state_to_record(self.norms)
        if of_rule := self.rule.shared():
            records["rule"] = state_to_record(of_rule)
        own = self.start_of if self._round == 1 and kind in ("prepare", "train") else None
        task = Task(kind, self.settings, self._round, run=self.run)
        return to_stations(stations, message_type, task, records, own or (lambda _: arrays))

    @property
    def _expected_stations(self) -> int:
        return max(self._asked, self.settings.stations)  # absent ones count, too

    def _too_few(self, answered: int) -> str:
        """Return a reason if fewer stations answered than the quorum needs."""
        needed = max(1, math.ceil(self.settings.station_quorum * self._expected_stations))
        few = f"{answered} of {self._expected_stations} stations usable, {needed} needed"
        return few if answered < needed else ""

    def _expected(self, **parts: Any) -> Expected:
        """Return the parts that a station's reply must have."""
        together = self.settings.clients_per_station
        return Expected(self.settings, "station", together=together, **parts)
