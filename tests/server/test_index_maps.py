"""Permuted stations: what nodes keep per channel follows when the merge moves channels.

One station starts from a copy of the model whose channels are permuted. The copy computes the same
function, so the run must end with the same model as the run without the permutation.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import (
    SPEC,
    assert_same_model,
    failures_of,
    last_model,
    lines_of,
    run_small,
    small_settings,
)
from torch import Tensor, nn

import client_app.methods
import hfedatm.runtime.local as local
import server_app.rules
import server_app.run
from client_app.client import LocalWork
from client_app.methods.fedsr import GaussianHead
from hfedatm.base.building import build_method, build_model, build_rule
from hfedatm.base.errors import UserError
from hfedatm.base.index_maps import RECORD
from hfedatm.base.records import record_to_state, state_to_record
from hfedatm.contracts import Method, Rule, Situation, State, StationRule, Wrapper, snapshot
from hfedatm_core import ChannelGraph, Merged, Update, merge
from hfedatm_core.channels.index_maps import IndexMap
from hfedatm_core.fot.options import AlignmentOptions
from server_app import asking
from server_app.rules.fedrc_clusters import FedRCClusters
from server_app.rules.mtgc import MTGC
from server_app.rules.sfedhp import SFedHP
from station_app import station as station_job


@dataclass
class AlignedMTGC(MTGC):
    """MTGC whose mean is a mean of aligned stations."""

    def merge(self, updates: Iterable[Update], situation: Situation) -> Merged:
        kept = list(updates)
        super().merge(iter(kept), situation)
        alignment = AlignmentOptions(solver="exact", scope="all")
        return merge(kept, situation.graph, regmean=False, alignment=alignment)


@dataclass
class AlignedSFedHP(SFedHP):
    """sFedHP whose step goes to the mean of aligned stations."""

    def merge(self, updates: Iterable[Update], situation: Situation) -> Merged:
        kept = list(updates)
        alignment = AlignmentOptions(solver="exact", scope="all")
        aligned = merge(kept, situation.graph, regmean=False, alignment=alignment)
        mean = Update(aligned.state, {}, sum(u.num_examples for u in kept))
        return replace(aligned, state=super().merge([mean], situation).state)


@dataclass
class AlignedClusters(FedRCClusters):
    """FedRC's cluster models as a mean of aligned stations."""

    def merge(self, updates: Iterable[Update], situation: Situation) -> Merged:
        alignment = AlignmentOptions(solver="exact", scope="all")
        return merge(updates, situation.graph, regmean=False, alignment=alignment)


@dataclass
class Personal(Method):
    """Every client keeps a model of its own and is pulled towards it."""

    def begin(self, model: nn.Module, shared: State, memory: State) -> None:
        own = {n.removeprefix("own."): value for n, value in memory.items()}
        self._model, self._own = model, own or snapshot(model)

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        pull = sum((p - self._own[n]).square().sum() for n, p in model.named_parameters())
        return super().loss(model, inputs, targets) + 0.5 * pull

    def remember(self) -> State:
        return {f"own.{name}": value for name, value in snapshot(self._model).items()}


def kept_momentum(model, batches, received, settings, context):
    """A training function with momentum that it keeps from round to round."""
    velocity = {n: context.memory.get(f"v.{n}", torch.zeros_like(p)) for n, p in received.items()}
    for inputs, targets in batches:
        model.zero_grad()
        context.task.loss(model(inputs), targets).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                velocity[name] = 0.9 * velocity[name] + p.grad
                p -= 0.02 * velocity[name]
    context.memory.update({f"v.{name}": v for name, v in velocity.items()})
    return {"loss": 1.0}


KEEPERS = {
    "fedsr": {"client_method": "fedsr", "client_params": "cmi=5"},
    "fediir, station": {"client_method": "fediir", "client_params": "gamma=5,level=station"},
    "fediir, global": {"client_method": "fediir", "client_params": "gamma=5"},
    "mtgc": {"server_rule": "test_index_maps:AlignedMTGC", "station_rounds": 2},
    "sfedhp": {"server_rule": "test_index_maps:AlignedSFedHP", "rule_params": "rate=0.5"},
    "fedrc-clusters": {"server_rule": "test_index_maps:AlignedClusters"},
    "elcfs": {"client_method": "elcfs"},
    "personal models": {"client_method": "test_index_maps:Personal"},
    "kept momentum": {"train_fn": "test_index_maps:kept_momentum"},
    "momentum of the server": {
        "server_rule": "hfedatm-no-regmean",
        "rule_params": "momentum=0.5",
        "rounds": 3,
    },
}
NOT_BY_CHANNEL = {
    "FedGA": "a weight of each station",
    "RingStation": "the seconds that each client needs",
    "Summarised": "the moments of the inputs",
}
"""What keeps state that has no channels."""
RULES = {
    "by weights": {"server_rule": "hfedatm-no-regmean", "ot_scope": "all", "ot_solver": "exact"},
    # By default, the model that is sent out depends on whether anything moved.
    "by Grams": {"server_rule": "hfedatm", "broadcast": "merged"},
}
COMMON = {
    "station_start": "own",
    "bound_factor": 0,
    "least_agreement": 0,
    "station_rounds": 1,
    "dataset_params": "examples=160",
}


def permutation_of(settings) -> tuple[ChannelGraph, dict[str, Tensor]]:
    model = build_model(settings, SPEC, build_method(settings, SPEC))
    graph = ChannelGraph.trace(model, (torch.zeros(2, *SPEC.input_shape),))
    generator = torch.Generator().manual_seed(7)
    return graph, {g.name: torch.randperm(g.size, generator=generator) for g in graph.groups}


@pytest.fixture(autouse=True)
def no_noise(monkeypatch):
    """FedSR draws noise unit by unit, which no permutation follows: draw none."""
    monkeypatch.setattr(GaussianHead, "_draw", lambda self: self.mu + 0.3 * self.sigma)


@pytest.fixture
def permuted_run(tmp_path, monkeypatch):
    """Run with every station starting from the same model, in another order at one station."""

    def run(name: str, permute: bool, **given) -> Path:
        settings = small_settings(**COMMON | given)
        graph, orders = permutation_of(settings)
        model = build_model(settings, SPEC, build_method(settings, SPEC)).state_dict()
        other = graph.permute(model, orders)

        def start(_settings, _spec, _method, station: int):
            return state_to_record(other if permute and station == 1 else model)

        monkeypatch.setattr(server_app.run, "_own_start", start)
        monkeypatch.setenv("HFEDATM_STATE", str(tmp_path / f"state-{name}"))
        return run_small(tmp_path, name, **COMMON | given)

    return run


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], atol: float = 2e-5) -> None:
    far = {n: float((one[n] - other[n]).abs().max()) for n in one}
    assert max(far.values()) < atol, far


@pytest.mark.parametrize(
    ("keeper", "rule"),
    [
        (k, r)
        for k in KEEPERS
        for r in RULES
        if r == "by weights" or "server_rule" not in KEEPERS[k]  # a rule of its own, by weights
    ],
)
def test_a_run_with_permuted_stations_equals_the_run_without(permuted_run, keeper, rule):
    given = RULES[rule] | KEEPERS[keeper]
    plain = permuted_run("plain", False, **given)
    permuted = permuted_run("permuted", True, **given)
    assert not any(line["moved"] for line in lines_of(plain))
    assert lines_of(permuted)[0]["moved"] > 0
    assert_close(last_model(plain), last_model(permuted))


@pytest.mark.parametrize(
    "keeper", [k for k in KEEPERS if k not in ("elcfs", "fedrc-clusters", "momentum of the server")]
)
def test_without_maps_such_a_run_ends_elsewhere(permuted_run, keeper, monkeypatch):
    """So the test above can fail. The other keepers have nothing on nodes that has channels."""
    given = RULES["by weights"] | KEEPERS[keeper]
    plain = permuted_run("plain", False, **given)
    monkeypatch.setattr(IndexMap, "moved", lambda self, kept, model, follows: dict(kept))
    permuted = permuted_run("permuted", True, **given)
    with pytest.raises(AssertionError):
        assert_close(last_model(plain), last_model(permuted), atol=2e-4)


def keepers_in(method: Method, rule: Rule) -> set[str]:
    """Return the classes that define what a run's nodes keep from round to round."""
    parts = [method, rule.on_client(build_method(small_settings())), rule]
    parts += [rule.at_station(), rule.at_inner_station()]
    bases = (Method, Wrapper, Rule, StationRule, object)
    found = set()
    for part in parts:
        of = type(part).__mro__
        definer = next(c for c in of if c in bases or "remember" in vars(c))
        found |= {definer.__name__} - {c.__name__ for c in bases}
        if isinstance(part, Method) and part.sharing != "none":  # kept by the tier that averages
            found.add(type(part).__name__)
    return found


def built_in(package: ModuleType) -> Iterator[str]:
    for module in pkgutil.iter_modules(package.__path__):
        yield module.name.replace("_", "-")


def test_every_method_and_rule_that_keeps_state_is_tested_here():
    every: set[str] = set()
    for name in built_in(client_app.methods):
        settings = small_settings(client_method=name)
        every |= keepers_in(build_method(settings), build_rule(settings))
    for name in built_in(server_app.rules):
        settings = small_settings(server_rule=name)
        every |= keepers_in(build_method(settings), build_rule(settings))
    tested: set[str] = set()
    for given in KEEPERS.values():
        settings = small_settings(**RULES["by weights"] | given)
        tested |= keepers_in(build_method(settings), build_rule(settings))
    assert every - tested == NOT_BY_CHANNEL.keys()


@pytest.mark.parametrize("keeper", ["fediir, station", "personal models", "kept momentum"])
def test_in_a_tree_the_parent_of_a_station_sends_its_maps(tmp_path, monkeypatch, keeper):
    """One of four stations below two others gets the model of round 1 in another order."""
    tree = {"tiers": "2x2x2", "stations": 4, "clients_per_station": 2, "rounds": 3}
    given = COMMON | RULES["by weights"] | KEEPERS[keeper] | tree | {"station_start": "shared"}
    graph, orders = permutation_of(small_settings(**given))
    train = station_job._JOBS["train"]

    def run(name: str, permute: bool) -> Path:
        def turned(grid, content, task):
            if permute and (task.station, task.round) == (3, 1):
                model = graph.permute(record_to_state(content["model"]), orders)
                content["model"] = state_to_record(model)
            return train(grid, content, task)

        monkeypatch.setitem(station_job._JOBS, "train", turned)
        monkeypatch.setenv("HFEDATM_STATE", str(tmp_path / f"state-{name}"))
        return run_small(tmp_path, name, **given)

    plain, permuted = run("plain", False), run("permuted", True)
    assert failures_of(plain) == failures_of(permuted) == []
    assert [line["moved"] for line in lines_of(plain)] == [0, 0, 0]
    assert lines_of(permuted)[0]["moved"] > 0
    assert_close(last_model(plain), last_model(permuted))


PERSONAL = RULES["by weights"] | KEEPERS["personal models"]


def test_a_resumed_run_sends_the_maps_again(permuted_run):
    given = PERSONAL | {"schedule": "constant"}
    whole = permuted_run("whole", True, **given)
    stopped = permuted_run("stopped", True, **given, rounds=1)
    local.run_locally({"resume": str(stopped), "rounds": 2})
    assert lines_of(stopped)[0]["moved"] > 0
    assert_same_model(stopped, whole)


@dataclass
class Truant(Personal):
    """Like `Personal`; a client of the permuted station is away in round 2."""

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        if TRUANTS:
            raise UserError("away")
        return super().loss(model, inputs, targets)


TRUANTS: list[int] = []


def test_a_client_that_missed_a_round_gets_the_map_of_the_round_it_saved(permuted_run, monkeypatch):
    def absent(self):
        TRUANTS[:] = [1] if (self.task.client, self.task.round) == (3, 2) else []
        return train(self)

    train = LocalWork.train
    monkeypatch.setattr(LocalWork, "train", absent)
    given = PERSONAL | {"client_method": "test_index_maps:Truant", "client_quorum": 0.5}
    plain, permuted = (permuted_run(str(p), p, **given, rounds=3) for p in (False, True))
    assert [f["reason"] for f in failures_of(permuted)] == ["UserError: away"]
    assert_close(last_model(plain), last_model(permuted))


def test_stations_in_one_order_send_no_map(tmp_path, monkeypatch):
    sent = []
    ask = asking.to_stations
    monkeypatch.setattr(asking, "to_stations", lambda *a: sent.extend(m := ask(*a)) or m)
    run_small(tmp_path, client_method="fedsr")
    assert len(sent) == 8 and not [m for m in sent if RECORD in m.content]
