"""Memory: streaming does not grow with the stations; wide layers never form a square matrix."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hfedatm_core import (
    AlignmentOptions,
    ChannelGraph,
    FactorGram,
    Gram,
    GramAccumulator,
    Update,
    collect_grams,
    merge,
    pack_grams,
    regmean,
    unpack_grams,
)

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")

PREAMBLE = """
import torch
from hfedatm_core import *
torch.set_num_threads(1)  # waiting threads only slow a busy machine down
def peak():
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
"""


def peaks_of(code: str) -> list[int]:
    """Run ``code`` in a process of its own; return the peaks of resident memory it prints."""
    command = [sys.executable, "-c", PREAMBLE + code]
    # Freed tensors go back to the system at once: what the allocator keeps would be counted, too.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


STREAM = """
from torch import nn
model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 1200),
                      nn.ReLU(), nn.Linear(1200, 1000), nn.Linear(1000, 2))
graph = ChannelGraph.trace(model, (torch.zeros(1, 1, 8, 8),))
def updates(stations):
    for number in range(stations):
        torch.manual_seed(number)
        state = {k: torch.randn(v.shape) for k, v in model.state_dict().items()}
        grams = {}
        for name, width in (("2", 288), ("4", 1200), ("5", 1000)):
            grams[name] = FactorGram(torch.randn(8, width)) if WIDE else Gram.from_dense(
                torch.eye(width) + 0.1)
        yield Update(state, grams)
        del state, grams
for stations in (4, 16):
    layers = merge(updates(stations), graph).report.layers
    assert all(entry.how == "regmean" for name, entry in layers.items() if name != "0")
    print(peak())
"""
STATE_BYTES = 4 * (1200 * 1000 + 288 * 1200 + 1000 * 2)


@linux
@pytest.mark.parametrize("wide", [False, True])
def test_merging_16_stations_takes_no_more_memory_than_4(wide):
    code = f"WIDE = {wide}\n" + STREAM
    few, many = peaks_of(code)
    assert many - few < 2 * STATE_BYTES  # holding the other updates would take twelve and more


APART = """
from torch import nn
model = nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Flatten(),
                      nn.Linear(8 * 36, 1200), nn.ReLU(), nn.Linear(1200, 1000), nn.Linear(1000, 2))
graph = ChannelGraph.trace(model, (torch.zeros(2, 1, 8, 8),))
def updates(stations):
    for number in range(stations):
        torch.manual_seed(number)
        state = {k: torch.rand(v.shape) for k, v in model.state_dict().items()}
        grams = {name: Gram.from_dense(torch.eye(width) + 0.1)
                 for name, width in (("0", 10), ("3", 289), ("5", 1201), ("6", 1001))}
        yield Update(state, grams)
        del state, grams
for stations in (4, 16):
    merged = merge_apart(updates(stations), graph, alignment=AlignmentOptions("exact"))
    assert all(entry.how == "regmean" for entry in merged.report.layers.values())
    del merged
    print(peak())
"""


@linux
def test_merging_16_networks_trained_apart_takes_no_more_memory_than_4():
    few, many = peaks_of(APART)
    assert many - few < 2 * STATE_BYTES  # with their Grams, the other updates have eighteen


TREE = (
    STREAM[: STREAM.index("for stations in")]
    + """
start = {k: v.detach() for k, v in model.state_dict().items()}
def region(children, below):
    inner = (region(2, below - 1) for _ in range(children)) if below else updates(children)
    named = (Update(u.state, u.grams, name=str(i)) for i, u in enumerate(inner))
    return combine(named, start, graph, fot=not below, regmean=True).update
for children, below in ((2, 1), (16, 1)):
    found = region(children, below)
    assert "products/4" in found.state
    del found
    print(peak())
"""
)


@linux
def test_a_station_of_16_stations_takes_no_more_memory_than_one_of_2():
    few, many = peaks_of("WIDE = False\n" + TREE)
    assert many - few < 3 * STATE_BYTES  # an update with Grams and products takes four and more


HELD = """
from hfedatm_core.robust import held
from hfedatm_core.robust.bounding import Bounds
from hfedatm_core.robust.rules.trimmed_mean import TrimmedMean
from hfedatm_core.robust.updates import BoundedUpdates
held.MEMORY = 8_000_000
start = {"w": torch.zeros(1000, 1000), "b": torch.zeros(1000)}
def hold(count):
    updates = BoundedUpdates(start, Bounds())
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        state = {n: 1 + torch.randn(v.shape, generator=generator) for n, v in start.items()}
        updates.add(Update(state, {"w": Gram.from_dense(torch.eye(1000))}, name=str(number)))
        del state
    seen = [update.name for update in TrimmedMean().admit(updates)]
    assert seen == [str(number) for number in range(count)], (seen, updates.cuts())
    updates.close()
for count in (4, 24):
    hold(count)
    print(peak())
"""


@linux
def test_holding_24_updates_takes_no_more_memory_than_4():
    few, many = peaks_of(HELD)
    assert many - few < 2 * 6e6  # the twenty others are 120 MB


class _Largest(TorchDispatchMode):
    """Remember the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return out


def test_wide_layers_are_factored_end_to_end_and_exact_while_the_rank_suffices():
    d, out, stations, clients = 1500, 6, 3, 2
    generator = torch.Generator().manual_seed(0)
    weights, dense, updates = [], [], []
    with _Largest() as largest:
        for _ in range(stations):
            model = nn.Sequential(nn.Linear(d, out)).double()
            nn.init.normal_(model[0].weight, generator=generator)
            mean, rows = GramAccumulator(), []
            for _ in range(clients):
                x = torch.randn(8, d, generator=generator, dtype=torch.float64)
                rows.append(x)
                sent = pack_grams(collect_grams(model, [(x[:5], None), (x[5:], None)], 1024, 16))
                mean.add(unpack_grams(sent))
            grams = {name: gram.shrink(0.75) for name, gram in mean.result().items()}
            assert isinstance(grams["0"], FactorGram)
            updates.append(Update(model.state_dict(), grams))
            weights.append(model[0].weight.detach())
            dense.append(torch.cat(rows))
        merged = merge(updates, fot=False)
    assert largest.numel < d * d / 10
    assert merged.report.layers["0"].how == "regmean"
    exact = [FactorGram(x / len(x) ** 0.5).shrink(0.75).dense() for x in dense]
    wanted = regmean(weights, [Gram.from_dense(matrix) for matrix in exact])
    assert float((merged.state["0.weight"] - wanted).abs().max()) < 1e-8


def test_a_wide_conv_layer_behind_a_flatten_permutes_its_factor():
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 4)
    ).double()
    graph = ChannelGraph.trace(model, (torch.zeros(1, 1, 8, 8, dtype=torch.float64),))
    x = torch.randn(20, 1, 8, 8, dtype=torch.float64)
    low = collect_grams(model, [(x, None)], max_dim=8, rank=20)
    full = collect_grams(model, [(x, None)])
    other = {k: v.flip(0) if k.startswith("0") else v + 0.01 for k, v in model.state_dict().items()}
    states = [model.state_dict(), other]
    merged = [
        merge([Update(s, g) for s in states], graph, alignment=AlignmentOptions(solver="exact"))
        for g in (low, full)
    ]
    assert merged[0].report.stations["station-1"]["0"].moved == 6
    torch.testing.assert_close(
        merged[0].state["3.weight"], merged[1].state["3.weight"], rtol=0, atol=1e-8
    )


WIDE = """
d, out, rank, stations = 25088, 4096, 256, 10
def updates():
    for number in range(stations):
        torch.manual_seed(number)
        factor = torch.randn(rank, d) / rank ** 0.5
        gram = FactorGram(factor, factor.square().sum(0) * 1.1, rows=1000).shrink(0.75)
        weight = torch.empty(out, d).normal_(std=0.01)
        yield Update({"classifier.0.weight": weight}, {"classifier.0": gram})
        del factor, gram, weight
merged = merge(updates(), fot=False)
entry = merged.report.layers["classifier.0"]
assert entry.how == "regmean" and entry.reason == "", entry
assert torch.isfinite(merged.state["classifier.0.weight"]).all()
print(peak())
"""


@linux
@pytest.mark.slow
def test_ten_stations_of_the_widest_vgg_layer_merge_within_4_gb():
    assert peaks_of(WIDE)[0] < 4e9
