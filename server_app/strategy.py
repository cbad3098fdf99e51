"""The server's rounds over its stations, as a Flower strategy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch.linalg import LinAlgError

from hfedatm.base.admission import Admission
from hfedatm.base.plugins import calling
from hfedatm.base.privacy_settings import is_private
from hfedatm.base.records import (
    Failure,
    Task,
    layers_to_record,
    record_to_state,
    state_to_record,
)
from hfedatm.base.settings import Settings
from hfedatm.base.state import State
from hfedatm.base.text import printable
from hfedatm.base.wire import Expected, NodeUpdate, checked, read_scores, read_update
from hfedatm.contracts import Method, Rule, Situation
from hfedatm_core import ChannelGraph, MeanAccumulator, Merged, Update
from hfedatm_core.tensors import is_finite
from server_app.diagnostics import RoundDiagnostics
from server_app.scores import source_scores
from server_app.undoing import Accepted, fall, sentence

MOST_NOTED = 1000
"""Failures that the record of a round lists."""


class HFedATMStrategy(Strategy):
    """Send the global model to the stations and merge what they return by a rule.

    Parameters
    ----------
    settings
        The run's settings.
    rule
        How station models become one.
    method
        The client method; it may share something before each round.
    graph
        Which axes of the network share a channel space.
    layers
        Linear layers that need a Gram, with their widths.
    template
        Arrays the method shares, if any (zeros of the right shapes).
    done
        Rounds finished before this start; a resumed run counts on from here.
    run
        What nodes file their memory under; no other run has it.
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
        self.template = template
        self.done, self.run = done, run
        self.shared: State = {}
        self.record: dict[str, Any] = {}
        self.round_diagnostics: RoundDiagnostics | None = None
        self.start_of: Callable[[int], ArrayRecord] | None = None
        """Model a station starts round 1 from; None: all start from the global model."""
        self._broadcast: State = {}
        self.epsilon = 0.0
        """The most that any client has reported as spent."""
        self._standing: dict[str, float] = {}
        self._accepted: Accepted | None = None
        self._judged = ArrayRecord()

    def summary(self) -> None:
        """Log nothing: the run prints its own header."""

    def remember(self) -> State:
        """Return everything but the model that a resumed run needs."""
        standing = {name: torch.tensor(value) for name, value in self._standing.items()}
        parts = {**self._memory(), "standing": standing}
        if self._accepted and self._accepted.round != self.record.get("round"):
            parts |= self._accepted.to_memory()  # of an earlier round than the model at hand
        return {f"{part}/{n}": t for part, state in parts.items() for n, t in state.items()}

    def restore(self, memory: State) -> None:
        """Take up what `remember` returned."""
        parts: dict[str, State] = {}
        for key, tensor in memory.items():
            part, _, name = key.partition("/")
            parts.setdefault(part, {})[name] = tensor
        self._put_back(parts)
        self._standing = {name: float(value) for name, value in parts.get("standing", {}).items()}
        self._accepted = Accepted.from_memory(parts)

    def resume(self, model: State, source: Mapping[str, Any] | None) -> None:
        """Go on after a round: its model, and the scores of the last one that was accepted."""
        if source and self._accepted:
            self._accepted = replace(self._accepted, source=source)
        elif source:
            self._accepted = Accepted(model, self._memory(), source, self.done)

    def _memory(self) -> dict[str, State]:
        return {"shared": self.shared, "rule": self.rule.remember(), "start": self._broadcast}

    def _put_back(self, parts: Mapping[str, State]) -> None:
        self.shared, self._broadcast = parts.get("shared", {}), parts.get("start", {})
        self.rule.restore(parts.get("rule", {}))

    # --- training

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Send the global model to every station, after what the method shares beforehand."""
        self._round = server_round + self.done
        self._started = time.perf_counter()
        wanted = self.rule.wants_grams(self._round, self.settings.rounds)
        self._layers = self.layers if wanted else {}
        if self._broadcast:  # the rule publishes one model and sends out another
            arrays = state_to_record(self._broadcast)
        self._reference = record_to_state(arrays)
        self.record = {
            "round": self._round,
            "failures": [],
            "cuts": [],
            "bytes_up": {"clients": 0, "stations": 0},
        }
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
        stations: list[dict[str, Any]] = []
        started, self._waited = time.perf_counter(), 0.0
        admission = self._hold(replies, stations)
        updates: Iterable[Update] = iter(admission)
        if self.round_diagnostics:
            updates = self.round_diagnostics.watch(updates)
        if self.settings.reference == "medoid":
            updates = list(updates)  # choosing the medoid needs all of them twice
        rule_before, why = self.rule.remember(), ""
        with calling("server-rule", self.settings.server_rule):
            try:
                merged = self.rule.merge(
                    updates, Situation(self.settings, self.graph, self._reference, self._round)
                )
                _check_merged(merged, self._reference)
            except (ValueError, ArithmeticError, LinAlgError) as error:
                merged, why = None, printable(f"merge: {error}")
        self._standing = admission.standing
        for failure in admission.left_out():
            self._note(failure)
        self.record["cuts"] += [failure.to_dict() for failure in admission.cut_back()]
        admission.close()
        clients = sum(station["num-clients"] for station in stations)
        examples = sum(station["num-examples"] for station in stations)
        self.record |= {
            "stations": {"asked": self._asked, "answered": len(stations)},
            "clients": {"answered": clients},
            "per_station": stations,
            "train_seconds": time.perf_counter() - self._started,
            "merge_seconds": time.perf_counter() - started - self._waited,
        }
        if examples:
            self.record["loss"] = sum(s["loss"] * s["num-examples"] for s in stations) / examples
        if is_private(self.settings):
            self.epsilon = max([self.epsilon, *(s.get("epsilon", 0.0) for s in stations)])
            self.record["privacy"] = {
                "epsilon": self.epsilon,
                "budget": self.settings.privacy_epsilon or None,
                "delta": self.settings.privacy_delta,
            }
        needed = max(1, math.ceil(self.settings.station_quorum * self._asked))
        if merged is None or len(stations) < needed:
            if len(stations) < needed:
                why = f"{len(stations)} of {self._asked} stations usable, {needed} needed"
            else:
                self.record["failures"].append(Failure("server", why).to_dict())
            self.record["kept"] = why
            self.rule.restore(rule_before)
            return None, None
        self.record["merge"] = merged.report.to_dict()
        self.record["moved"] = merged.moved
        if self.round_diagnostics:
            self.round_diagnostics.finish(merged)
        broadcast = self.rule.next_start(merged)
        self._broadcast = {} if broadcast is merged.state else broadcast
        return state_to_record(merged.state), None

    def _hold(self, replies: Iterable[Message], stations: list[dict[str, Any]]) -> Admission:
        """Check and hold all updates; who fails a check is recorded and left out."""
        expected = self._expected(
            arrays=self._reference,
            layers=self._layers,
            needed=("loss", *self.rule.reports, *self.rule.station_reports),
            check=self.rule.check_report,
        )
        nodes: dict[str, int] = {}
        own = self.start_of if self._round == 1 else None
        admission = Admission(
            self.settings,
            "stations",
            self._reference,
            earlier=self._standing,
            start_of=own and (lambda update: record_to_state(own(nodes[update.name]))),
        )
        asked_at = time.perf_counter()
        for update in checked(replies, lambda r: read_update(r, expected), "station", self._note):
            self._waited += time.perf_counter() - asked_at
            self._note_update(update)
            stations.append(_summary(update))
            nodes[update.name] = update.node
            admission.add(update.as_update())
            del update
            asked_at = time.perf_counter()
        self._waited += time.perf_counter() - asked_at
        return admission

    def _share(self, arrays: ArrayRecord, grid: Grid) -> None:
        mean = MeanAccumulator()
        messages = self._messages("prepare", "train.prepare", arrays, grid)
        replies = grid.send_and_receive(messages, timeout=self.settings.station_timeout)
        expected = self._expected(arrays=self.template, record="shared")
        admission = Admission(self.settings, "stations", self.template, compare=False)
        for update in checked(replies, lambda r: read_update(r, expected), "station", self._note):
            self._note_update(update)
            admission.add(update.as_update())
            del update
        for admitted in admission:
            mean.add(admitted.state, admitted.num_examples, admitted.name, checked=True)
            del admitted
        admission.close()
        if mean.count:
            self.shared = self.method.blend(self.shared, mean.result())

    # --- evaluation

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask the stations how good the merged model is on their clients' validation examples."""
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
        expected = self._expected()
        evaluated: dict[str, dict[str, float]] = {}
        answered = 0
        for scores in checked(replies, lambda r: read_scores(r, expected), "station", self._note):
            answered += 1
            for failure in scores.failures:
                self._note(failure, scores.name)
            if scores.examples:
                evaluated[scores.name] = {**scores.counts, "loss-sum": scores.loss_sum}
        before, most = self._accepted, self.settings.max_fall
        found = source_scores(evaluated, self.settings.claim_factor) if evaluated else None
        # A model that gives no numbers is one that most stations cannot evaluate.
        if before and most and answered < self._asked / 2:
            self._take_back(before, None)
        elif before and most and found and fall(before.source, found) > most:
            self._take_back(before, found)
        elif found:
            model = record_to_state(self._judged)
            self._accepted = Accepted(model, self._memory(), found, self._round)
            self.record["source"] = found
        if found is None:
            return None
        return MetricRecord({"accuracy": found["accuracy"], "loss": found["loss"]})

    def _take_back(self, before: Accepted, found: Mapping[str, Any] | None) -> None:
        """Go on from the last accepted model, as if this round had not been."""
        self.record |= {"source": before.source, "taken_back": sentence(before.source, found)}
        self._put_back(before.memory)
        self._accepted = replace(before, round=self._round)
        # Flower goes on from this record and knows no other way back.
        self._judged.clear()
        self._judged.update(state_to_record(before.model))

    # --- both

    def _messages(
        self, kind: Any, message_type: str, arrays: ArrayRecord, grid: Grid
    ) -> list[Message]:
        stations = sorted(grid.get_node_ids())
        self._asked = len(stations)
        shared = self.template if kind == "prepare" else (self.shared or self.template)
        records: dict[str, Any] = {"layers": layers_to_record(self._layers)}
        if shared:
            records["shared"] = state_to_record(shared)
        if of_rule := self.rule.shared():
            records["rule"] = state_to_record(of_rule)
        own = self.start_of if self._round == 1 and kind != "evaluate" else None
        return [
            Message(
                RecordDict(
                    {
                        **records,
                        "model": own(station) if own else arrays,
                        "task": Task(
                            kind, self.settings, self._round, station=station, run=self.run
                        ).to_record(),
                    }
                ),
                station,
                message_type,
            )
            for station in stations
        ]

    def _expected(self, **parts: Any) -> Expected:
        """Return what a station's reply must be made of."""
        return Expected(
            self.settings, "station", together=self.settings.clients_per_station, **parts
        )

    def _note_update(self, update: NodeUpdate) -> None:
        for failure in update.failures:
            self._note(failure, update.name)
        for cut in update.cuts:
            self.record["cuts"].append({"node": f"{update.name}, {cut.node}", "reason": cut.reason})
        self.record["bytes_up"]["stations"] += update.bytes
        self.record["bytes_up"]["clients"] += update.bytes_below

    def _note(self, failure: Failure, station: str = "") -> None:
        """Put a failure into the round's record, unless it lists as many as anybody reads."""
        noted: list[dict[str, str]] = self.record["failures"]
        if len(noted) > MOST_NOTED:
            return
        if len(noted) == MOST_NOTED:
            failure, station = Failure("others", "more failures are not listed"), ""
        node = f"{station}, {failure.node}" if station else failure.node
        noted.append({"node": node, "reason": failure.reason})


def _summary(update: NodeUpdate) -> dict[str, Any]:
    """Return a station's line of the record; a number cannot take the place of its name."""
    own = {"name": update.name, "bytes_up": update.bytes}
    return {"name": update.name, **{n: v for n, v in update.metrics.items() if n not in own}, **own}


def _check_merged(merged: Any, reference: State) -> None:
    """Raise ``ValueError`` for a merged model that is not finite, ``TypeError`` for none at all."""
    if not isinstance(merged, Merged):
        raise TypeError(f"merge returned {type(merged).__name__}, not a Merged")
    if _shapes(merged.state) != (needed := _shapes(reference)):
        wrong = sorted(set(_shapes(merged.state).items()) ^ set(needed.items()))[0][0]
        raise TypeError(f"merge returned a state that differs from the model in {wrong!r}")
    for name, value in merged.state.items():
        if not is_finite(value):
            raise ValueError(f"{name} of the merged model is not finite")


def _shapes(state: State) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor."""
    return {name: tuple(value.shape) for name, value in state.items()}
