"""The job of an inner station: a station whose children are stations.

It does what the server does for its stations, except the merge. It passes its parent's task on,
checks and bounds the replies, and answers with one update for all of them, which the server's rule
makes (`Rule.combine`). With ``inner-rounds`` it repeats this, each time from the mean of its
stations. In the last of these rounds it asks for Grams and aligns channels, always to the model
that the server sent, so that what reaches the server is additive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from hfedatm.base.admission import Admission
from hfedatm.base.kept_model import KeptModel, Sending
from hfedatm.base.memory import NodeMemory
from hfedatm.base.metric_sums import HeldSums
from hfedatm.base.own_metrics import OwnMeans
from hfedatm.base.privacy_settings import is_private
from hfedatm.base.records import (
    Task,
    find_record,
    grams_to_record,
    layers_to_record,
    need_record,
    record_to_layers,
    record_to_state,
    state_to_record,
)
from hfedatm.base.tiers import (
    is_inner,
    rounds_at,
    station_rounds_below,
)
from hfedatm.base.wire import (
    Expected,
    NodeUpdate,
    read_scores,
    read_statistics,
    read_update,
)
from hfedatm.base.wire.graph import record_to_graph
from hfedatm.base.wire.numbers import ANSWERED, BY_STATIONS, MOVED, STATION_BYTES
from hfedatm.contracts import Situation
from hfedatm_core import ChannelGraph, Combined, MeanAccumulator, Update
from hfedatm_core.robust.counting import bounded_counts, with_domains
from hfedatm_core.tensors import State
from hfedatm_core.tiers import no_products
from station_app.inner_hearing import InnerHearing
from station_app.inner_maps import InnerMaps
from station_app.inner_rule import RulePart
from station_app.result import StationResult


class InnerStation(InnerHearing):
    """One job of an inner station."""

    # --- training

    def train(self) -> StationResult:
        """Train for as many rounds as this level has, and return the sums of the last."""
        layers = record_to_layers(need_record(self.content, "layers", ConfigRecord))
        arrays = need_record(self.content, "model", ArrayRecord)
        reference = find_record(self.content, "reference", ArrayRecord) or arrays
        sent, graph = record_to_state(reference), self._graph(record_to_state(reference))
        done = self.task.station_round
        memory, at = NodeMemory(self.task.run, f"{self._name}-standing"), (self.task.round, done)
        maps = InnerMaps(self.task.run, self._name, at)
        earlier = memory.load(before=at)
        standing = {node: float(value) for node, value in earlier.items()}
        each = station_rounds_below(self.settings, self.level + 1)
        rounds = rounds_at(self.settings, self.level)
        part = RulePart(self.rule, self.task, self._name, self.content, at)
        for number in range(rounds):
            last = number == rounds - 1
            wanted = layers if last else {}
            records: dict[str, Any] = {"layers": layers_to_record(wanted), "reference": reference}
            if arrays is reference:  # most rounds: the model itself is what channels are aligned to
                del records["reference"]
            task = self.task.but(station_round=done + number * each)
            records |= part.records(task.station_round)
            messages = self._messages("train", Sending(arrays), task, records, maps.to)
            start = record_to_state(arrays)
            admission = self._hold(self._ask(messages), start, wanted, standing)
            # Within a global round stations average as their own clients' models are averaged.
            aligned = graph if last else ChannelGraph()
            situation = Situation(self.settings, aligned, sent, self.task.round, self.level)
            combined = self.rule.combine(self._noted(admission), situation)
            standing = admission.standing
            self._close(admission)
            weights = {n: v for n, v in combined.update.state.items() if n in start}
            arrays = state_to_record(weights)
            part.after(task.station_round, weights, self._means())
        if standing:
            values = {node: torch.tensor(value) for node, value in standing.items()}
            memory.save(at, values)
        maps.keep(combined, graph, sent)
        part.keep()
        return self._trained(combined, layers, part.metrics())

    def _graph(self, model: State) -> ChannelGraph:
        record = find_record(self.content, "graph", ConfigRecord)
        return record_to_graph(record, model) if record else ChannelGraph()

    def _hold(
        self,
        replies: Iterable[Message],
        start: State,
        layers: Mapping[str, int],
        standing: Mapping[str, float],
    ) -> Admission:
        """Check and hold the updates of all stations."""
        products = {}
        if self.rule.passes_products and is_inner(self.settings, self.level + 1):
            products = no_products(start, layers)
        start = {**start, **products}
        reports = ("loss", *self.rule.reports, *self.rule.station_reports)
        expected = self._expected(
            arrays=start, layers=layers, needed=reports, check=self.rule.check_report
        )
        self.seen = {}
        admission = Admission(self.settings, "stations", start, earlier=standing)
        for update in self._usable(replies, lambda reply: read_update(reply, expected)):
            self._note(update)
            admission.add(update.as_update())
            del update
        return admission

    def _noted(self, admission: Admission) -> Iterator[Update]:
        """Yield the admitted updates; their bounded numbers replace those that were reported."""
        for update in admission:
            self.seen[update.name] |= {"weight": update.num_examples}
            self.seen[update.name] |= update.metrics
            yield update
            del update

    def _means(self) -> dict[str, float]:
        """Return the means by examples of what the stations must report."""
        stations = list(self.seen.values())
        weights = sum(one["weight"] for one in stations)
        return {
            name: sum(one[name] * one["weight"] for one in stations) / weights
            for name in ("loss", *self.rule.reports, *self.rule.station_reports)
        }

    def _trained(
        self, combined: Combined, layers: Mapping[str, int], of_rule: Mapping[str, float]
    ) -> StationResult:
        """Return the combined update, with the means and sums of its stations' numbers."""
        update, stations = combined.update, list(self.seen.values())
        own = OwnMeans((*self.rule.reports, *self.rule.station_reports, "weight"))
        for one in stations:
            own.add(one, one["weight"])
        counted = {f"{ANSWERED}{self.level + 1}": float(len(stations))}
        for name in BY_STATIONS:
            if name.startswith(ANSWERED) and any(name in one for one in stations):
                counted[name] = sum(one.get(name, 0.0) for one in stations)
        metrics = {
            **own.result(),
            **self._means(),
            **of_rule,
            **self.sums,
            **counted,
            MOVED: update.moved,
            "num-examples": update.num_examples,
            "num-clients": update.num_clients,
        }
        if is_private(self.settings):
            metrics["epsilon"] = self.epsilon
        state = {n: v.float() if v.dtype == torch.float64 else v for n, v in update.state.items()}
        arrays = {"model": state_to_record(state)}
        if layers:
            arrays["grams"] = grams_to_record(update.grams, self.settings.gram_dtype)
        return StationResult(metrics, arrays, self.failures, self.cuts)

    # --- arrays that a method shares, and BatchNorm statistics

    def prepare(self) -> StationResult:
        """Return the mean of the arrays that a method shares."""
        model = Sending(need_record(self.content, "model", ArrayRecord))
        return self._average("shared", model, read_update)

    def look(self) -> StationResult:
        """Return the mean BatchNorm statistics of the merged model, which this node keeps."""
        kept = KeptModel(self.task, self._name)
        model = kept.sending(self.content)
        result = self._average("statistics", model, read_statistics)
        kept.keep(record_to_state(model.whole), self._nodes)
        return result

    def _average(
        self, record: str, model: Sending, read: Callable[[Message, Expected], NodeUpdate]
    ) -> StationResult:
        """Return the mean by examples of arrays that are no models."""
        template = record_to_state(need_record(self.content, record, ArrayRecord))
        expected = self._expected(arrays=template, record=record)
        replies = self._ask(self._messages(f"train.{self.task.kind}", model, self.task))
        admission = Admission(self.settings, "stations", template, compare=False)
        sent = 0
        for update in self._usable(replies, lambda reply: read(reply, expected)):
            sent += update.bytes_below
            self._nodes.add(update.node)
            self._note(update)
            admission.add(update.as_update())
            del update
        mean, examples = MeanAccumulator(), 0
        for admitted in admission:
            mean.add(admitted.state, admitted.num_examples, admitted.name, checked=True)
            examples += admitted.num_examples
            del admitted
        self._close(admission)
        metrics = {
            "num-examples": examples,
            "bytes-up": sent,
            STATION_BYTES: self.sums[STATION_BYTES],
        }
        arrays_up = {record: state_to_record(mean.result())}
        return StationResult(metrics, arrays_up, self.failures, self.cuts)

    # --- evaluation

    def evaluate(self) -> StationResult:
        """Add up the stations' counts and the sums of their metrics."""
        template = record_to_state(find_record(self.content, "sums", ArrayRecord) or ArrayRecord())
        model = KeptModel(self.task, self._name).sending(self.content)
        expected = self._expected(arrays=template, record="sums")
        replies = self._ask(self._messages(MessageType.EVALUATE, model, self.task))
        said, sums = [], HeldSums()
        for scores in self._usable(replies, lambda reply: read_scores(reply, expected)):
            said.append({**scores.counts, "loss-sum": scores.loss_sum})
            sums.add(scores.sums)
        bounded = bounded_counts(with_domains(said), self.settings.claim_factor)
        total = Counter({"correct": 0.0, "num-examples": 0.0, "loss-sum": 0.0})
        for one in bounded:
            total.update(one)
        found = sums.total(said, bounded)
        return StationResult(
            dict(total), {"sums": state_to_record(found)} if found else {}, self.failures
        )


def run_inner(grid: Grid, content: RecordDict, task: Task) -> StationResult:
    """Do the task of the level above with this station's stations."""
    station = InnerStation(grid, content, task)
    jobs: dict[str, Callable[[], StationResult]] = {
        "train": station.train,
        "prepare": station.prepare,
        "look": station.look,
        "evaluate": station.evaluate,
    }
    return jobs[task.kind]()
