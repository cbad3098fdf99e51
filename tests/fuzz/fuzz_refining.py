"""What is fuzzed of refining: answers of clients and stations, and what clients are asked."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from fuzz_mutations import spoil
from fuzz_targets import (
    SETTINGS,
    UNBOUNDED,
    ClientReplies,
    StationReplies,
    Target,
    _Tier,
    network,
    norm_net,
    weights,
)
from helpers import SPEC, small_settings

from client_app.app import app as client_app
from hfedatm.base.building import build_rule
from hfedatm.base.exchange import AskedLayers, answers_to_records
from hfedatm.base.kept_model import KeptModel
from hfedatm.base.records import Task, state_to_record
from hfedatm.base.settings import Settings
from hfedatm_core import Answers, ChannelGraph, FactorGram, collect_answers
from hfedatm_core.grams.grouped import GroupedGram
from hfedatm_core.tensors import State
from server_app.strategy import HFedATMStrategy
from station_app.station import run_station

REFINE: dict[str, Any] = {"rule_params": "refine=true", "station_start": "own"}
ASKED = AskedLayers({"0": 4, "2": 7}, {"2": 2})
"""The second layer is measured as if it were a convolution of two groups."""
WIDE = AskedLayers({"2": 7})
"""Wider than gram-max-dim: a factor."""


def answers(node: int) -> Answers:
    """Return what a node that has its own network says about that of node 50."""
    generator = torch.Generator().manual_seed(300 + node)
    merged, own = network(), network()
    merged.load_state_dict(weights(50))
    own.load_state_dict(weights(node))
    x = torch.randn(9, 3, generator=generator)
    graph = ChannelGraph.trace(network(), (torch.zeros(2, 3),))
    return collect_answers(merged, own, graph, [(x, None)], max_dim=4, rank=3)


def answered(node: int, wide: bool = False) -> RecordDict:
    found = answers(node)
    gram = found.grams["2"]
    assert isinstance(gram, FactorGram)
    grams = {"2": gram} if wide else dict(found.grams)
    if not wide:
        grams["2"] = GroupedGram(torch.stack([gram.dense()] * 2), gram.rows)
    metrics = MetricRecord({"num-examples": 10 + node, "bytes-up": 30})
    records = answers_to_records(Answers(grams, found.residuals, found.moments), "float32")
    return RecordDict({**records, "metrics": metrics})


class RefiningClients(ClientReplies):
    """Answers of clients to a station."""

    def __init__(self, name: str, wide: bool = False, **given: Any) -> None:
        self._settings = small_settings(**SETTINGS | UNBOUNDED | REFINE | given)
        self._asked = WIDE if wide else ASKED
        self._given = Task("refine", self._settings, round=1, station=0, station_round=1)
        _Tier.__init__(self, name, "train.refine", lambda node, _: answered(node, wide))

    def _run(self, given: RecordDict | Error) -> RecordDict:
        KeptModel(self._given, "station-0").keep_own(weights(0))
        content = {
            "task": self._given.to_record(),
            "model": state_to_record(weights(50)),
            **self._asked.to_records(),
        }
        return run_station(self._replies(given), RecordDict(content))


class RefiningStations(StationReplies):
    """Answers of stations to the server."""

    def __init__(self, name: str, wide: bool = False, **given: Any) -> None:
        self._settings: Settings = small_settings(**SETTINGS | UNBOUNDED | REFINE | given)
        self._asked = WIDE if wide else ASKED

        def honest(node: int, kind: str) -> RecordDict:
            found = answered(node, wide)
            found["failures"] = ConfigRecord({"nodes": [], "reasons": [], "total": 0})
            return found

        _Tier.__init__(self, name, "train.refine", honest)

    def _run(self, given: RecordDict | Error) -> Any:
        settings, grid = self._settings, self._replies(given)
        graph = ChannelGraph.trace(network(), (torch.zeros(2, 3),))
        rule = build_rule(settings)
        strategy = HFedATMStrategy(settings, rule, None, graph, {}, {}, run="run")  # type: ignore[arg-type]
        strategy.exchanges = [self._asked]
        arrays = state_to_record(weights(50))
        strategy._round = 1
        strategy._sending = None
        strategy._merged_stations = {f"station {node}" for node in range(3)}
        strategy.record = strategy._notes.record(1, 3, None, train_seconds=0, merge_seconds=0)
        strategy._refine(arrays, grid)
        return arrays, strategy


class Exchanges:
    """What a station asks a client: layers, groups, two models, and changes of one of them."""

    name = "client: exchange"

    def __init__(self) -> None:
        given = {"model": "fuzz_targets:norm_net", "gram_min_rows": 1}
        self._settings = small_settings(**SETTINGS | REFINE | given)
        self._model: State = norm_net(SPEC).state_dict()
        records = {
            "model": state_to_record(self._model),
            "own": state_to_record({n: v * 1.1 for n, v in self._model.items()}),
            **AskedLayers({"3": 5}).to_records(),
        }
        self._first = RecordDict(records)
        changes = {"3.weight": self._model["3.weight"] * 1.1}
        second = {"changes": state_to_record(changes), **AskedLayers({"1": 65}).to_records()}
        self._second = RecordDict(second)
        assert self.check(self._first) == self.check(self._second) == "accepted"

    def make(self, rng: Random) -> Any:
        return spoil(self._first if rng.random() < 0.5 else self._second, rng)

    def check(self, given: Any) -> str:
        if isinstance(given, Error):
            return "dropped"
        task = Task("refine", self._settings, round=1, station_round=1, client=0)
        records = RecordDict({**given, "task": task.to_record()})
        context = Context(run_id=0, node_id=1, node_config={}, state=RecordDict(), run_config={})
        reply = client_app(Message(records, 1, "train.refine"), context).content
        if "failure" in reply:
            reason = reply["failure"]["reason"]
            assert isinstance(reason, str) and reason
            return "dropped"
        assert reply["metrics"]["num-examples"] > 0 and "answers" in reply
        return "accepted"


def make_refining_targets() -> list[Target]:
    return [
        RefiningClients("client: refine"),
        RefiningClients("client: refine, wide", wide=True),
        RefiningClients("client: refine, bounded", bound_factor=2, claim_factor=3),
        RefiningStations("station: refine"),
        RefiningStations("station: refine, wide", wide=True),
        Exchanges(),
    ]
