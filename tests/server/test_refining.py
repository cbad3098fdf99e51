"""Refining in a federation: exact sums over the tree, bounded, checked, refused, resumed."""

import math

import pytest
import torch
from flwr.app import Message, MetricRecord, RecordDict
from helpers import (
    SMALL,
    Saboteur,
    ask_client,
    assert_same_model,
    failures_of,
    last_model,
    lines_of,
    log_lines,
    run_small,
    small_settings,
    tiny_data,
)
from torch import nn

import hfedatm.runtime.local as local
from client_app.data import client_data
from hfedatm.base.building import build_rule, trace_channels
from hfedatm.base.errors import UserError
from hfedatm.base.exchange import MOST_GROUPED, AskedLayers
from hfedatm.base.records import BadTask, record_to_state, state_to_record
from hfedatm.base.results import RunFolder
from hfedatm_core import Answers, OwnedNetwork, collect_answers, fit_layers, refine
from server_app.rules.hfedatm import HFedATM


def depthwise(spec):
    """Convolutions, one of them depthwise, BatchNorms and Linear layers."""
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, spec.num_classes)),
    )


LAYERS = ["0", "3", "7", "9"]
APART = {
    "model": "test_refining:depthwise",
    "station_start": "own",
    "station_assignment": "mixed",
    "rounds": 1,
    "station_rounds": 1,
    "gram_min_rows": 1,
    "gram_dtype": "float32",
    "diagnostics": False,
}
REFINE = {**APART, "rule_params": "refine=true"}
UNBOUNDED = {"bound_factor": 0, "claim_factor": 0}


@pytest.fixture
def sabotage(monkeypatch):
    def install(spoil, clients=(1,)):
        saboteur = Saboteur(spoil, set(clients), "train.refine")
        monkeypatch.setattr(local, "client_app", saboteur)
        return saboteur

    return install


@pytest.fixture
def merges(monkeypatch):
    """Return the stations' updates and the merged model, as the rule makes it."""
    seen = []
    merge = HFedATM.merge

    def watch(self, updates, situation):
        updates = list(updates)
        seen.append((updates, merge(self, iter(updates), situation)))
        return seen[-1][1]

    monkeypatch.setattr(HFedATM, "merge", watch)
    return seen


def network():
    return depthwise(tiny_data().spec)


def inputs_of(settings, clients):
    return torch.cat([client_data(settings, c, {}).train.inputs for c in clients])


# --- what it does


def directly(settings, updates, merged, clients=((0, 1), (2, 3))):
    """Refine as a machine that has all data would, every example counting the same."""
    model, graph = network(), trace_channels(settings, None, network(), tiny_data().spec)
    state, own = merged.state, network()
    for layer in LAYERS:
        model.load_state_dict(state)
        answers, sizes = [], []
        for update, some in zip(updates, clients, strict=True):
            own.load_state_dict(graph.permute(update.state, merged.permutations[update.name]))
            x = inputs_of(settings, some)
            answers.append(collect_answers(model, own, graph, [(x, None)], [layer]))
            sizes.append(len(x) / 48)
        weighted = [
            Answers(
                {layer: a.grams[layer] * size},
                {layer: a.residuals[layer] * size},
                {layer: a.moments[layer] * size},
            )
            for a, size in zip(answers, sizes, strict=True)
        ]
        total = sum(sizes) / len(sizes)
        weighted = [
            Answers(*({layer: part[layer] * (1 / total)} for part in (a.grams, a.residuals, a.moments)))
            for a in weighted
        ]
        state = fit_layers(state, graph, weighted)
    return state


def test_the_model_is_that_of_all_data_on_one_machine(tmp_path, merges):
    folder = run_small(tmp_path, "refined", **REFINE, **UNBOUNDED)
    [(updates, merged)] = merges
    found, settings = last_model(folder), small_settings(**REFINE)
    expected = directly(settings, updates, merged)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    assert any(not torch.allclose(found[n], merged.state[n], atol=1e-2) for n in found)
    [line] = lines_of(folder)
    examples = len(inputs_of(settings, range(4)))
    said = {"stations": 2, "examples": examples, "exchanges": 4, "asked": 4}
    assert line["refined"] == said
