"""Rules with a part below the server, in trees of more levels."""

import math
import os
from pathlib import Path

import pytest
import torch
from helpers import (
    SPEC,
    failures_of,
    last_model,
    lines_of,
    run_small,
    small_settings,
    tiny_data,
    tiny_net,
)
from test_tiers import FREE, close, run_tree
from torch.nn.functional import cross_entropy

from client_app.data import client_data
from hfedatm.base.building import build_method, build_model, build_rule
from hfedatm.base.memory import NodeMemory
from hfedatm.contracts import Situation
from hfedatm_core import ChannelGraph, Update
from hfedatm_core.data import Domain, DomainData
from server_app.rules.fedrc_weights import FedRCWeights, bhattacharyya

FULL = {"batch_size": 1000, "momentum": 0.0, "schedule": "constant", "lr": 0.2, "local_epochs": 2}
"""One batch is all examples of a client, so that a direct computation needs no random order."""


# --- MTGC


def mean(states, weights):
    total = sum(weights)
    return {
        n: sum(w * s[n] for w, s in zip(weights, states, strict=True)) / total for n in states[0]
    }


def plus(one, other, factor=1.0):
    return {n: one[n] + factor * other[n] for n in one} if other else one


class Direct:
    """MTGC of any depth by plain recursion; everything in float64, all clients take part."""

    def __init__(self, tree, rounds, settings):
        self.tree, self.rounds, self.settings = tree, rounds, settings
        self.parts = [client_data(settings, c, {}).train for c in range(settings.num_clients)]
        self.steps, self.lr = settings.local_epochs, settings.lr

    def clients(self, level, node):
        below = math.prod(self.tree[level:])
        return range(node * below, (node + 1) * below)

    def size(self, level, node):
        return sum(len(self.parts[c]) for c in self.clients(level, node))

    def run(self, level, node, start, above, kept):
        """Train a node; return its model and the distance that one of its clients went.

        ``above`` is the sum of the corrections on the way to the node, its own included, and
        ``kept`` are the corrections of its children, which only the server keeps.
        """
        if level == len(self.tree):
            return self.train(node, start, above), self.steps * self.lr
        children = [node * self.tree[level] + i for i in range(self.tree[level])]
        weights = [self.size(level + 1, child) for child in children]
        x, gone = start, 0.0
        for _ in range(self.rounds[level]):
            done = [
                self.run(level + 1, c, x, plus(above, kept.get(c)) if above else kept.get(c), {})
                for c in children
            ]
            x = mean([state for state, _ in done], weights)
            distance = sum(w * d for w, (_, d) in zip(weights, done, strict=True)) / sum(weights)
            for child, (state, _) in zip(children, done, strict=True):
                step = {n: (state[n] - x[n]) / distance for n in x}
                kept[child] = plus(step, kept.get(child))
            gone += distance
        return x, gone

    def train(self, client, start, correction):
        model = tiny_net(SPEC).double()
        model.load_state_dict(start)
        part = self.parts[client]
        for _ in range(self.steps):
            loss = cross_entropy(model(part.inputs.double()), part.targets)
            names, tensors = zip(*model.named_parameters(), strict=True)
            gradients = torch.autograd.grad(loss, tensors)
            with torch.no_grad():
                for name, p, g in zip(names, tensors, gradients, strict=True):
                    p -= self.lr * (g + (correction[name] if correction else 0.0))
        return {n: v.detach().clone() for n, v in model.state_dict().items()}


@pytest.mark.parametrize(
    ("tree", "station_rounds"),
    [("2x2", "2"), ("2x2x2", "2x2"), ("2x1x2x2", "1x2x2"), ("2x2x1x2", "2x3x1")],
)
def test_mtgc_of_any_depth_is_what_plain_recursion_gives(tmp_path, tree, station_rounds):
    given = {**FREE, **FULL, "lambda": 0.3, "rounds": 3, "station_rounds": station_rounds}
    folder = run_tree(tmp_path, "run", tree, server_rule="mtgc", **given)
    assert failures_of(folder) == []
    sizes = tuple(map(int, tree.split("x")))
    settings = small_settings(
        stations=math.prod(sizes[:-1]),
        clients_per_station=sizes[-1],
        **FULL,
        **{"lambda": 0.3},
    )
    spec = client_data(settings, 0, {}).spec
    start = build_model(settings, spec, build_method(settings, spec)).state_dict()
    direct = Direct(sizes, (3, *map(int, station_rounds.split("x"))), settings)
    expected, _ = direct.run(0, 0, {n: v.double() for n, v in start.items()}, None, {})
    found = last_model(folder)
    for name, value in expected.items():
        assert torch.allclose(found[name].double(), value, rtol=2e-4, atol=2e-5), name
    plain = last_model(run_tree(tmp_path, "avg", tree, server_rule="avg", **given))
    far = max(float((plain[n] - found[n]).abs().max()) for n in plain)
    assert far > 1e-3, "corrections change nothing here, so this test could not fail"


def test_corrections_cancel_among_the_children_of_every_parent(tmp_path):
    given = {**FREE, "lambda": 0.3, "batch_size": 16, "rounds": 3, "station_rounds": "2x1"}
    run_tree(tmp_path, "run", "2x2x2", server_rule="mtgc", **given)
    (state,) = Path(os.environ["HFEDATM_STATE"]).iterdir()
    settings = small_settings(stations=4, clients_per_station=2, **{"lambda": 0.3})
    sizes = [len(client_data(settings, c, {}).train) for c in range(8)]

    def kept(node):
        return NodeMemory(state.name, node).load(before=(4, 0))

    families = [
        ([f"inner-1-{e}-rule" for e in (0, 1)], 4),
        ([f"station-{e}-rule" for e in (0, 1)], 2),
        ([f"station-{e}-rule" for e in (2, 3)], 2),
    ]
    for nodes, below in families:
        first = 4 if "station-2" in nodes[0] else 0
        weights = [sum(sizes[first + i * below : first + (i + 1) * below]) for i in range(2)]
        memories = [kept(node) for node in nodes]
        names = [n for n in memories[0] if n.startswith("y.")]
        assert len(names) == 6
        for name in names:
            terms = [w * m[name].double() for w, m in zip(weights, memories, strict=True)]
            scale = sum(float(t.abs().max()) for t in terms)
            assert scale > 1e-4
            assert float(sum(terms).abs().max()) < 2e-4 * scale, (nodes, name)


def test_a_level_of_only_children_changes_nothing(tmp_path):
    given = {**FREE, "rounds": 3, "server_rule": "mtgc", "station_rounds": 2}
    flat = run_small(tmp_path, "flat", **given)
    assert close(flat, run_tree(tmp_path, "deep", "2x1x2", **given), 1e-5)


def test_a_resumed_tree_keeps_its_corrections(tmp_path):
    import hfedatm.runtime.local as local

    steady = {"station_rounds": "2x1", "schedule": "constant", "server_rule": "mtgc"}
    whole = run_tree(tmp_path, "whole", "2x2x1", rounds=3, **steady)
    part = run_tree(tmp_path, "part", "2x2x1", rounds=2, **steady)
    local.run_locally({"resume": str(part), "rounds": 3})
    assert close(whole, part, 0.0)


# --- the others


@pytest.mark.parametrize(
    "given",
    [
        {"server_rule": "fedhisyn", "rule_params": "spread=100"},
        {"server_rule": "sfedhp"},
        {"server_rule": "fedrc-clusters"},
        {"server_rule": "avg", "client_method": "elcfs"},
    ],
    ids=lambda given: given.get("client_method", given["server_rule"]),
)
def test_means_by_examples_are_those_of_the_flat_run(tmp_path, given):
    more = {**FREE, "rounds": 2, "station_rounds": 1, "local_epochs": 2, **given}
    flat = run_small(tmp_path, "flat", stations=4, clients_per_station=2, **more)
    deep = run_tree(tmp_path, "deep", "2x2x2", **more)
    assert failures_of(flat) == failures_of(deep) == []
    assert close(flat, deep, 2e-5)
    plain = run_tree(
        tmp_path,
        "plain",
        "2x2x2",
        **{**more, "server_rule": "avg"} | {"client_method": "fedavg", "rule_params": ""},
    )
    assert last_model(plain).keys() != last_model(deep).keys() or not close(plain, deep, 1e-4)


def test_personal_models_are_reported_through_all_levels(tmp_path):
    found = lines_of(run_tree(tmp_path, "run", "2x2x2", rounds=1, server_rule="sfedhp", **FREE))
    assert 0 <= found[0]["metrics"]["personal-accuracy"] <= 1


def test_fedrc_weighs_every_child_by_its_closeness_to_its_own_parent():
    """A station of two stations, merged by hand: softmax of minus the distance at each level."""
    given = [(0.0, 1.0, 300, 0.0), (2.0, 1.0, 100, 1.0), (5.0, 2.0, 50, 4.0)]  # mean, std, n, w
    situation = Situation(small_settings(server_rule="fedrc-weights"), ChannelGraph(), {}, 1)

    def update(name, mean, std, count, weight):
        metrics = {"input-mean": mean, "input-square": std**2 + mean**2}
        return Update({"w": torch.tensor([weight])}, {}, count, name=name, metrics=metrics)

    updates = [update(str(i), *one) for i, one in enumerate(given)]
    region = FedRCWeights().combine(iter(updates[:2]), situation).update
    pooled = 0.5, (300 * 1.0 + 100 * 5.0) / 400
    near = [math.exp(-bhattacharyya((m, s**2 + m**2), pooled)) for m, s, *_ in given[:2]]
    assert float(region.state["w"]) == pytest.approx(near[1] / sum(near), abs=1e-6)
    assert (region.num_examples, region.num_clients) == (400, 2)


def unlike(data_dir: str | None = None) -> DomainData:
    """Return tiny data whose domain b is brighter, so that weights by closeness are uneven."""
    data = tiny_data()
    bright = Domain("b", data.domains["b"].inputs * 4, data.domains["b"].targets)
    return DomainData(data.spec, {**data.domains, "b": bright})


def test_fedrc_runs_in_a_tree(tmp_path):
    given = {**FREE, "rounds": 2, "station_rounds": 1, "server_rule": "fedrc-weights"}
    given |= {"dataset": "test_systems_in_trees:unlike", "station_assignment": "mixed"}
    folder = run_tree(tmp_path, "run", "2x2x1", **given)
    assert failures_of(folder) == []
    assert not close(
        folder, run_tree(tmp_path, "avg", "2x2x1", **given | {"server_rule": "avg"}), 1e-3
    )
    only = run_tree(tmp_path, "only", "2x1x2", **given)
    flat = run_small(tmp_path, "flat", **given)
    assert close(flat, only, 1e-5), "an only child has the weight 1"


def test_every_system_is_defined_at_any_depth():
    for rule in ("mtgc", "fedhisyn", "sfedhp", "fedrc-weights", "fedrc-clusters"):
        assert build_rule(small_settings(server_rule=rule)).any_depth
