"""What is fuzzed among the tiers: replies of clients to a station, of stations to the server.

Three nodes; the second is hostile in one kind of reply. Whoever is dropped must be named in one
printable line, and everything else must be, bit for bit, what it is without that node.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from fuzz_mutations import spoil
from helpers import SPEC, small_settings
from torch import nn

from client_app.app import app as client_app
from hfedatm.base.building import build_method, build_model, build_rule, load_data
from hfedatm.base.class_profiles import ProfileShapes, profiles_to_record
from hfedatm.base.records import (
    Task,
    grams_to_record,
    layers_to_record,
    record_to_failures,
    record_to_state,
    state_to_record,
)
from hfedatm.base.settings import Settings
from hfedatm.base.streaming import StreamingGrid
from hfedatm.runtime.roster import Roster
from hfedatm_core import ChannelGraph, FactorGram, Gram
from hfedatm_core.data import DataSpec
from hfedatm_core.metrics.f1 import F1
from hfedatm_core.profiles import Profiles
from server_app.strategy import HFedATMStrategy
from station_app.station import run_station

HOSTILE, NODES = 1, (0, 1, 2)
LAYERS = {"0": 3, "2": 6}  # the second is wider than gram-max-dim: a factor
SETTINGS: dict[str, Any] = {
    "station_rounds": 1, "rounds": 1, "gram_max_dim": 4, "gram_rank": 3, "stations": 3,
    "clients_per_station": 3, "max_examples": 1000,
}  # fmt: skip
UNBOUNDED: dict[str, Any] = {"bound_factor": 0, "claim_factor": 0, "least_agreement": 0}
"""With bounds an odd update that is sound changes by how much the honest ones are bounded."""
RING: dict[str, Any] = {"rule_params": "spread=100", "seed": 4}
"""Settings with which the hostile client and another pass models around a ring."""


class Target(Protocol):
    """Something that takes what others made."""

    name: str

    def make(self, rng: Random) -> Any:
        """Return a spoilt input."""

    def check(self, given: Any) -> str:
        """Put it in; return what became of it, and raise if that is not as it should be."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))


def norm_net(spec: DataSpec) -> nn.Module:
    norm = nn.BatchNorm1d(4)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), norm, nn.Linear(4, spec.num_classes))


def weights(node: int, build: Callable[[], nn.Module] = network) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(node)
    return {
        name: value + 0.1 * torch.randn(value.shape, generator=generator)
        for name, value in build().state_dict().items()
    }


def grams(node: int) -> dict[str, Gram]:
    generator = torch.Generator().manual_seed(100 + node)
    x, u = torch.randn(9, 3, generator=generator), torch.randn(2, 6, generator=generator)
    found = {"0": Gram.from_dense(x.T @ x / 9, rows=9), "2": FactorGram(u, rows=9, rank=3)}
    return {name: gram.shrink(small_settings().alpha) for name, gram in found.items()}


@dataclass(frozen=True)
class Net:
    """What nodes train: a network, the layers with a Gram and their inputs, a node's Grams."""

    build: Callable[[], nn.Module]
    layers: dict[str, int]
    grams: Callable[[int], dict[str, Gram]]


PLAIN = Net(network, LAYERS, grams)


def profiles(node: int) -> Profiles:
    generator = torch.Generator().manual_seed(200 + node)
    counts = torch.tensor([4.0, 0.0, 5.0])
    means = {"group": torch.randn(6, 3, 4, generator=generator)}
    return Profiles(means, counts).of_classes_with(2)


def trained(node: int, *records: str, net: Net = PLAIN) -> RecordDict:
    metrics = {
        "num-examples": 10 + node, "loss": 0.5 + node, "steps": 4, "input-mean": 0.1 * node,
        "input-square": 1.0 + node, "seconds": 0.5, "gram-seconds": 0.1, "num-clients": 2,
        "path": 0.3, "bytes-up": 100, "gram-bytes-up": 50,
    }  # fmt: skip
    found = {
        "model": state_to_record(weights(node, net.build)),
        "grams": grams_to_record(net.grams(node)),
        "profiles": profiles_to_record(profiles(node)),
        "metrics": MetricRecord(metrics),
        "failures": ConfigRecord({"nodes": ["client 9"], "reasons": ["ill"], "total": 1}),
    }
    return RecordDict({name: found[name] for name in ("metrics", *records)})


def shared(node: int) -> dict[str, torch.Tensor]:
    return {"fedrc.moments": torch.tensor([0.1 * node, 1.0 + node], dtype=torch.float64)}


def prepared(node: int) -> RecordDict:
    metrics = MetricRecord({"num-examples": 10 + node, "bytes-up": 30})
    return RecordDict({"shared": state_to_record(shared(node)), "metrics": metrics})


def moments(node: int) -> dict[str, torch.Tensor]:
    mean = torch.tensor([0.1, -0.2, 0.0], dtype=torch.float64) * node
    return {"norm": torch.stack([mean, mean.square() + 1.0])}


def looked(node: int) -> RecordDict:
    metrics = MetricRecord({"num-examples": 10 + node})
    return RecordDict({"statistics": state_to_record(moments(node)), "metrics": metrics})


def evaluated(node: int, station: bool, metrics: str = "") -> RecordDict:
    counts = {"correct": 3.0 + node, "num-examples": 6.0 + node}
    domains = {f"{name}/a": value for name, value in counts.items()}
    loss = {"loss-sum": 2.5} if station else {"loss": 0.5}
    found = RecordDict({"metrics": MetricRecord({**counts, **domains, **loss, "seconds": 0.1})})
    if metrics:
        sums = torch.tensor([2, 1 + node, 3, 3 + node, 2, 4 + node], dtype=torch.float64)
        found["sums"] = state_to_record({metrics: sums})
    return found


class Replay(StreamingGrid):
    """Nodes that answer as ``answer(node, message type)`` says."""

    def __init__(self, answer: Callable[[int, str], RecordDict | Error]) -> None:
        self.answer, self.messages = answer, list[Message]()

    def get_node_ids(self) -> list[int]:
        return list(NODES)

    def push_messages(self, messages: Any) -> list[str]:
        start = len(self.messages)
        self.messages += messages
        return [str(i) for i in range(start, len(self.messages))]

    def pull_messages(self, message_ids: Any) -> Any:
        raise NotImplementedError

    def wait_for(self, message_id: str, sent_at: float, timeout: float | None) -> Message:
        asked = self.messages[int(message_id)]
        node = asked.metadata.dst_node_id
        return Message(self.answer(node, asked.metadata.message_type), reply_to=asked)


class _Tier:
    """Nodes of one tier, of which one lies in its replies of one kind."""

    def __init__(self, name: str, kind: str, honest: Callable[[int, str], RecordDict]) -> None:
        self.name, self._kind, self._honest = name, kind, honest
        self._without = self._outcome(self._run(Error(1001, "away")))[0]
        outcome, failures = self._outcome(self._run(honest(HOSTILE, kind)))
        assert not failures, f"{name}: the honest are refused: {failures}"
        assert outcome != self._without, f"{name}: it makes no difference who takes part"

    def make(self, rng: Random) -> Any:
        return spoil(self._honest(HOSTILE, self._kind), rng)

    def check(self, given: Any) -> str:
        outcome, failures = self._outcome(self._run(given))
        assert all(len(reason) <= 200 and reason.isprintable() for _, reason in failures), failures
        if self._settings.bound_factor:  # who is odd among sound updates is not for us to say
            return "dropped" if failures else "accepted"
        if not failures:
            assert is_sound(given, self._honest(HOSTILE, self._kind)), (
                "what is not sound was counted"
            )
            return "accepted"
        [(node, reason)] = failures
        assert node == self._node, f"{node}: {reason}"
        assert outcome == self._without, "a node that was dropped has left something behind"
        return "dropped"

    def _replies(self, given: RecordDict | Error) -> Replay:
        def answer(node: int, kind: str) -> RecordDict | Error:
            return given if node == HOSTILE and kind == self._kind else self._honest(node, kind)

        return Replay(answer)

    _node = ""
    _settings: Settings

    def _run(self, given: RecordDict | Error) -> Any:
        raise NotImplementedError

    def _outcome(self, found: Any) -> tuple[Any, list[tuple[str, str]]]:
        raise NotImplementedError


class ClientReplies(_Tier):
    """Replies of clients to a station."""

    _node = f"client {HOSTILE}"

    def __init__(
        self, name: str, kind: str, task: str = "train", net: Net = PLAIN, **given: Any
    ) -> None:
        self._settings = small_settings(**SETTINGS | UNBOUNDED | given)
        self._task, self._net = task, net

        def honest(node: int, kind: str) -> RecordDict:
            if kind == "evaluate":
                return evaluated(node, station=False, metrics=self._settings.metrics)
            if kind == "train.prepare":
                return prepared(node)
            if kind == "train.look":
                return looked(node)
            if kind == "train.measure":
                return trained(node, "grams", net=net)
            here = build_rule(self._settings).needs_grams and self._settings.gram_model == "client"
            also = ["profiles"] if here and "profiles" in self._settings.rule_params else []
            return trained(node, "model", *(["grams"] if here else []), *also, net=net)

        super().__init__(name, kind, honest)

    def _run(self, given: RecordDict | Error) -> RecordDict:
        content = RecordDict(
            {
                "task": Task(self._task, self._settings, round=1, station=0).to_record(),
                "model": state_to_record(weights(50, self._net.build)),
                "shared": state_to_record(shared(0)),
                "statistics": state_to_record(moments(0)),
                "layers": layers_to_record(
                    self._net.layers if build_rule(self._settings).needs_grams else {}
                ),
            }
        )
        if "profiles" in self._settings.rule_params:
            content["profiles"] = ProfileShapes.of(profiles(0)).to_record()
        if self._settings.metrics:
            content["sums"] = state_to_record({"f1": F1(2).nothing()})
        return run_station(self._replies(given), content)

    def _outcome(self, found: RecordDict) -> tuple[Any, list[tuple[str, str]]]:
        failures = record_to_failures(found["failures"])
        metrics = {n: v for n, v in found["metrics"].items() if n != "seconds"}
        # A larger file of the same numbers is counted by its bytes, and so may a reply be.
        arrays = [
            (k, n, a.data)
            for k, r in found.items()
            if isinstance(r, ArrayRecord)
            for n, a in r.items()
        ]
        return (arrays, metrics), [(f.node, f.reason) for f in failures]


class StationReplies(_Tier):
    """Replies of stations to the server."""

    _node = f"station {HOSTILE}"

    def __init__(self, name: str, kind: str, net: Net = PLAIN, **given: Any) -> None:
        self._settings, self._net = small_settings(**SETTINGS | UNBOUNDED | given), net

        def honest(node: int, kind: str) -> RecordDict:
            if kind == "evaluate":
                return evaluated(node, station=True, metrics=self._settings.metrics)
            if kind == "train.prepare":
                return prepared(node)
            here = build_rule(self._settings).needs_grams
            return trained(node, "model", "failures", *(["grams"] if here else []), net=net)

        super().__init__(name, kind, honest)

    def _run(self, given: RecordDict | Error) -> Any:
        settings, grid = self._settings, self._replies(given)
        graph = ChannelGraph.trace(self._net.build(), (torch.zeros(2, 3),))
        method = build_method(settings)
        if self._kind == "train.prepare":
            method.sharing = "global"  # type: ignore[misc]
        strategy = HFedATMStrategy(
            settings, build_rule(settings), method, graph, self._net.layers, shared(0), run="run"
        )
        strategy.metrics = {"f1": F1(2)} if settings.metrics else {}
        arrays, none = state_to_record(weights(50, self._net.build)), ConfigRecord()
        asked = strategy.configure_train(1, arrays, none, grid)
        merged, _ = strategy.aggregate_train(1, grid.send_and_receive(asked))
        asked = strategy.configure_evaluate(1, merged or arrays, none, grid)
        strategy.aggregate_evaluate(1, grid.send_and_receive(asked))
        return merged, strategy

    def _outcome(self, found: Any) -> tuple[Any, list[tuple[str, str]]]:
        merged, strategy = found
        record = strategy.record.to_dict()
        failures = record.pop("failures")
        mine = [(f["node"], f["reason"]) for f in failures if f["node"] == self._node]
        assert len(failures) <= 1001 and all(f["reason"].isprintable() for f in failures)
        record = {k: v for k, v in record.items() if "seconds" not in k}
        arrays = [(n, a.data) for n, a in (merged or {}).items()]
        kept = {
            n: v.tolist()
            for n, v in strategy.memory.remember(1).items()
            if not n.startswith("start/")
        }
        return (arrays, record, kept), mine


class Changes:
    """Changes of a kept model, as a station sends them to a client that evaluates."""

    name = "client: changes"

    def __init__(self) -> None:
        given = {"model": "fuzz_targets:norm_net", "rule_params": "second_look=always"}
        self._settings = small_settings(**SETTINGS | given | {"gram_min_rows": 1})
        self._model = norm_net(SPEC).state_dict()
        looked = self._ask("train.look", RecordDict({"model": state_to_record(self._model)}))
        assert "statistics" in looked, looked

    def make(self, rng: Random) -> Any:
        sent = {n: t for n, t in self._model.items() if "running" in n}
        return spoil(RecordDict({"changes": state_to_record(sent)}), rng)

    def check(self, given: Any) -> str:
        if isinstance(given, Error):
            return "dropped"
        reply = self._ask("evaluate", given)
        if "failure" in reply:
            reason = reply["failure"]["reason"]
            assert isinstance(reason, str) and reason
            return "dropped"
        assert reply["metrics"]["num-examples"] > 0
        return "accepted"

    def _ask(self, kind: str, content: RecordDict) -> RecordDict:
        task = Task(kind.removeprefix("train."), self._settings, round=1, client=0)  # type: ignore[arg-type]
        records = {**content, "task": task.to_record()}
        context = Context(run_id=0, node_id=1, node_config={}, state=RecordDict(), run_config={})
        return client_app(Message(RecordDict(records), 1, kind), context).content


class Amplitudes:
    """Amplitudes of other clients, as a station sends them to a client that trains with them."""

    name = "client: amplitudes"

    def __init__(self) -> None:
        self._settings = small_settings(
            client_method="elcfs", server_rule="avg", dataset_params="examples=24"
        )
        data = load_data(self._settings).spec
        method = build_method(self._settings, data)
        self._model = build_model(self._settings, data, method).state_dict()
        bank = torch.rand(4, 4, 1, 1, 1, generator=torch.Generator().manual_seed(0))
        self._honest = RecordDict(
            {"shared": state_to_record({"bank": bank, "present": torch.ones(4)})}
        )
        assert self.check(self._honest) == "accepted"

    def make(self, rng: Random) -> Any:
        return spoil(self._honest, rng)

    def check(self, given: Any) -> str:
        if isinstance(given, Error):
            return "dropped"
        task = Task("train", self._settings, round=1, station_round=1, client=0)
        records = {**given, "task": task.to_record(), "model": state_to_record(self._model)}
        context = Context(run_id=0, node_id=1, node_config={}, state=RecordDict(), run_config={})
        reply = client_app(Message(RecordDict(records), 1, "train"), context).content
        if "failure" in reply:
            assert reply["failure"]["reason"]
            return "dropped"
        for name, value in record_to_state(reply["model"]).items():
            assert bool(torch.isfinite(value).all()), name
        return "accepted"


class Places:
    """Answers to the question who a node is."""

    name = "query"

    def make(self, rng: Random) -> Any:
        honest = client_app(Message(RecordDict(), 1, "query"), Context(0, 1, {}, RecordDict(), {}))
        return spoil(honest.content, rng)

    def check(self, given: Any) -> str:
        known = Roster(_Link(given), poll=0.001).present()
        assert all(n.tier in ("client", "station") and type(n.index) is int for n in known)
        return "accepted" if known else "dropped"


class _Link(Grid):
    def __init__(self, answer: RecordDict | Error) -> None:
        self._answer = answer

    def set_run(self, run: Any) -> None: ...

    run = None  # type: ignore[assignment]

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return [1]

    def push_messages(self, messages: Any) -> list[str]:
        self._asked = list(messages)
        return ["m"]

    def pull_messages(self, message_ids: Any) -> list[Message]:
        return [Message(self._answer, reply_to=self._asked[0])]

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        raise NotImplementedError


def is_sound(given: RecordDict | Error, honest: RecordDict) -> bool:
    """Say, independently of the code under test, whether a reply may be counted."""
    if isinstance(given, Error) or "failure" in given:
        return False
    metrics = given["metrics"]
    if not all(isinstance(v, int | float) and math.isfinite(v) for v in metrics.values()):
        return False
    if metrics["num-examples"] != int(metrics["num-examples"]) or metrics["num-examples"] < 0:
        return False
    for key in ("model", "shared", "statistics", "profiles", "answers"):
        if key in honest and key in given:
            if given[key].keys() != honest[key].keys():
                return False
            for name, array in honest[key].items():
                if given[key][name].stype != array.stype:
                    return False
                sent, like = given[key][name].numpy(), array.numpy()
                if (
                    sent.shape != like.shape
                    or sent.dtype != like.dtype
                    or not np.isfinite(sent).all()
                ):
                    return False
                if name == "counts" and ((sent < 0).any() or sent.sum() > metrics["num-examples"]):
                    return False
                moments = key == "statistics" or name.endswith("/moments")
                if moments and (sent[1] < sent[0] ** 2 * (1 - 1e-6)).any():
                    return False
    return True


def make_targets() -> list[Target]:
    return [
        ClientReplies("client: train, with Grams", "train"),
        ClientReplies(
            "client: train, with profiles",
            "train",
            rule_params="profiles=true",
            station_start="own",
        ),
        ClientReplies("client: train, mtgc", "train", server_rule="mtgc"),
        ClientReplies("client: train, fedrc-weights", "train", server_rule="fedrc-weights"),
        ClientReplies("client: train, fedhisyn", "train", server_rule="fedhisyn", **RING),
        Amplitudes(),
        ClientReplies("client: train, bounded", "train", bound_factor=2, claim_factor=3),
        ClientReplies("client: train, robust", "train", bound_factor=2, robust_clients="median"),
        ClientReplies("client: measure", "train.measure", gram_model="station"),
        ClientReplies("client: prepare", "train.prepare", "prepare"),
        ClientReplies("client: look", "train.look", "look"),
        ClientReplies("client: evaluate", "evaluate", "evaluate"),
        ClientReplies("client: evaluate, f1", "evaluate", "evaluate", metrics="f1"),
        Changes(),
        Places(),
        StationReplies("station: train, hfedatm", "train"),
        StationReplies("station: train, mtgc", "train", server_rule="mtgc"),
        StationReplies("station: train, fedrc-weights", "train", server_rule="fedrc-weights"),
        StationReplies("station: train, bounded", "train", bound_factor=2, claim_factor=3),
        StationReplies("station: prepare", "train.prepare"),
        StationReplies("station: evaluate", "evaluate"),
        StationReplies("station: evaluate, f1", "evaluate", metrics="f1"),
    ]
