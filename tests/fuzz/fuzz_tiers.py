"""What is fuzzed between stations: replies to an inner station, and the graph that it is sent."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, RecordDict
from fuzz_mutations import spoil
from fuzz_targets import (
    HOSTILE,
    LAYERS,
    SETTINGS,
    UNBOUNDED,
    Target,
    _Tier,
    evaluated,
    looked,
    moments,
    network,
    prepared,
    shared,
    trained,
    weights,
)
from helpers import SMALL

from hfedatm.base.building import build_rule
from hfedatm.base.records import (
    BadTask,
    Task,
    layers_to_record,
    record_to_failures,
    state_to_record,
)
from hfedatm.base.resolving import resolve
from hfedatm.base.tiers import is_inner
from hfedatm.base.wire.graph import graph_to_record, record_to_graph
from hfedatm_core import ChannelGraph
from hfedatm_core.tiers import no_products
from station_app.station import run_station


def graph() -> ChannelGraph:
    return ChannelGraph.trace(network(), (torch.zeros(2, 3),))


class InnerReplies(_Tier):
    """Replies of stations to a station of level 1; in a deeper tree they hold products, too."""

    _node = f"station {HOSTILE}"

    def __init__(self, name: str, kind: str, tree: str, task: str = "train", **given: Any) -> None:
        values = SMALL | {k.replace("_", "-"): v for k, v in (SETTINGS | UNBOUNDED | given).items()}
        for key in ("stations", "clients-per-station"):
            del values[key]
        self._settings, self._task = resolve(values | {"tiers": tree}), task

        def honest(node: int, kind: str) -> RecordDict:
            if kind == "evaluate":
                return evaluated(node, station=True)
            if kind in ("train.prepare", "train.look"):
                return prepared(node) if kind == "train.prepare" else looked(node)
            here = build_rule(self._settings).needs_grams
            reply = trained(node, "model", "failures", *(["grams"] if here else []))
            if here and is_inner(self._settings, 2):
                generator = torch.Generator().manual_seed(200 + node)
                products = {
                    name: 0.1 * torch.randn(zeros.shape, generator=generator)
                    for name, zeros in no_products(weights(50), LAYERS).items()
                }
                reply["model"] = state_to_record({**weights(node), **products})
            return reply

        super().__init__(name, kind, honest)

    def _run(self, given: RecordDict | Error) -> RecordDict:
        here = build_rule(self._settings).needs_grams
        content = RecordDict(
            {
                "task": Task(self._task, self._settings, round=1, station=0).to_record(),
                "model": state_to_record(weights(50)),
                "shared": state_to_record(shared(0)),
                "statistics": state_to_record(moments(0)),
                "layers": layers_to_record(LAYERS if here else {}),
                "graph": graph_to_record(graph()),
            }
        )
        return run_station(self._replies(given), content)

    def _outcome(self, found: RecordDict) -> tuple[Any, list[tuple[str, str]]]:
        failures = record_to_failures(found["failures"])
        metrics = {n: v for n, v in found["metrics"].items() if n != "seconds"}
        arrays = [
            (k, n, a.data)
            for k, r in found.items()
            if isinstance(r, ArrayRecord)
            for n, a in r.items()
        ]
        mine = [(f.node, f.reason) for f in failures if f.node == self._node]
        return (arrays, metrics), mine


class Graphs:
    """Channel graphs: every position of a group is in the model, or a refusal in one line."""

    name = "channel graph"

    def __init__(self) -> None:
        record = graph_to_record(graph())
        self._honest = RecordDict({"graph": record, "task": ConfigRecord({"round": 1})})
        assert self.check(self._honest) == "accepted"

    def make(self, rng: Random) -> Any:
        if rng.random() < 0.5:
            return spoil(self._honest, rng)
        text = list(str(self._honest["graph"]["graph"]))
        for _ in range(rng.randint(1, 4)):
            text[rng.randrange(len(text))] = rng.choice('0123456789-[]{},"nulltrue.e')
        return RecordDict({"graph": ConfigRecord({"graph": "".join(text)})})

    def check(self, given: Any) -> str:
        record = None if isinstance(given, Error) else given.get("graph")
        if not isinstance(record, ConfigRecord):
            return "dropped"
        model = weights(0)
        try:
            found = record_to_graph(record, model)
        except BadTask as error:
            assert str(error).isprintable() and len(str(error)) < 400, error
            return "dropped"
        for group in found.groups:
            turned = {group.name: torch.arange(group.size).flip(0)}
            moved = found.permute(model, turned)
            assert all(moved[name].shape == value.shape for name, value in model.items())
        return "accepted"


def make_tier_targets() -> list[Target]:
    return [
        InnerReplies("inner: train", "train", "1x3x3"),
        InnerReplies("inner: train, products", "train", "1x3x1x3"),
        InnerReplies("inner: train, avg", "train", "1x3x3", server_rule="avg"),
        InnerReplies("inner: prepare", "train.prepare", "1x3x3", "prepare"),
        InnerReplies("inner: look", "train.look", "1x3x3", "look"),
        InnerReplies("inner: evaluate", "evaluate", "1x3x3", "evaluate"),
        Graphs(),
    ]
