"""Stations with networks of different width or depth: one federation, four ways to merge it.

Every station has one domain; one more domain is unseen. The stations have LeNet-5 of twice, once
and half the width, or VGG-13 and twice VGG-11, or ResNet-34 and twice ResNet-18. All ways start
from the same seed and train the same number of steps:

- ``largest``: only the station with the largest network trains.
- ``smallest``: all stations train the smallest network, merged by HFedATM.
- ``slices``: a small network is the leading part of the largest, and every entry is the mean of the
  stations that have it (as in HeteroFL, arXiv:2010.01264, without its scaler and static norms).
- ``transport``: this project's way (docs/method.md, stations of different width and depth).

A second table merges networks that were trained apart, once.

    python benchmarks/different_architectures.py --data-dir data --json FILE
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hfedatm_core import Gram, Update, collect_grams, merge, merge_apart
from hfedatm_core.data import DataSpec, DomainData, digits4, pacs
from hfedatm_core.models import build
from hfedatm_core.resizing import Architecture, Fit
from hfedatm_core.resizing.merging import Resized, fits_of, merge_resized, way_back
from hfedatm_core.resizing.starting import calm_start, split_start
from hfedatm_core.tensors import is_finite

Member = tuple[str, dict[str, Any]]
_VGG = {"width": 0.125, "small_input": True, "batch_norm": True, "dropout": 0.0}
_RESNET = {"width": 0.125, "small_input": True}
FAMILIES: dict[str, tuple[Member, ...]] = {  # of the three stations, the largest first
    "lenet5": tuple(("lenet5", {"width": width}) for width in (2.0, 1.0, 0.5)),
    "vgg": (("vgg13", _VGG), ("vgg11", _VGG), ("vgg11", _VGG)),
    "resnet": (("resnet34", _RESNET), ("resnet18", _RESNET), ("resnet18", _RESNET)),
}
SIZES = {"lenet5": (6, 600), "vgg": (4, 400), "resnet": (4, 400)}  # rounds, images of a station
EPOCHS, BATCH = 2, 32
LR = {"digits4": 0.03, "pacs": 0.01}
"""At 0.03 a training on PACS diverged: the largest network of ``transport``, seed 1."""
APART_EPOCHS = 8
TESTS = 400
TABLES = ("federation", "once")
UNSEEN = {"digits4": "optdigits", "pacs": "sketch"}
State = dict[str, Tensor]
Entry = dict[str, object]
Part = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """The stations' networks, training and test images of their domains, and the unseen domain."""

    family: tuple[Member, ...]
    rounds: int
    lr: float
    spec: DataSpec
    train: list[Part]
    tests: list[Part]
    unseen: Part


def load_task(name: str, family: str, seed: int, data_dir: Path) -> Task:
    """Return the domains in an order of the seed: every domain meets every network."""
    if name == "digits4":
        data: DomainData = digits4.load(data_dir, size=28 if family == "lenet5" else 32)
    else:
        data = pacs.load(data_dir, size=32)
    domains = [d for d in data.domains if d != UNSEEN[name]]
    domains = domains[seed % 3 :] + domains[: seed % 3]

    def images(domain: str, first: int, last: int) -> Part:
        found = data.domains[domain]
        order = torch.randperm(len(found.targets), generator=torch.Generator().manual_seed(seed))
        some = order[first:last]
        mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (data.spec.mean, data.spec.std))
        return (found.inputs[some].float() / 255 - mean) / std, found.targets[some]

    rounds, count = SIZES[family]
    return Task(
        FAMILIES[family],
        rounds,
        LR[name],
        data.spec,
        [images(d, TESTS, TESTS + count) for d in domains],
        [images(d, 0, TESTS) for d in domains],
        images(UNSEEN[name], 0, 2 * TESTS),
    )


def network(task: Task, member: Member, seed: int) -> nn.Module:
    """Return a fresh network."""
    torch.manual_seed(seed)
    return build(member[0], task.spec, **member[1])


def train(model: nn.Module, part: Part, epochs: int, lr: float, seed: int) -> State:
    """Train on one station's images; return the weights."""
    inputs, targets = part
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    draw = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(inputs), generator=draw).split(BATCH):
            loss = functional.cross_entropy(model(inputs[batch]), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def accuracy(model: nn.Module, part: Part) -> float:
    """Return the accuracy in per cent."""
    with torch.no_grad():
        return 100 * float((model.eval()(part[0]).argmax(1) == part[1]).float().mean())


def grams(model: nn.Module, part: Part, full: bool) -> dict[str, Gram]:
    """Return the Grams of a trained network; of Linear layers, or of all."""
    batches = [(images, None) for images in part[0].split(128)]
    found = collect_grams(model.eval(), batches, full=full)
    return found if full else {name: gram.shrink(0.75) for name, gram in found.items()}


@dataclass(frozen=True)
class Way:
    """How a station's model follows from the global one, and how updates come back."""

    members: tuple[Member, ...]
    down: Callable[[int, State], State]
    up: Callable[[int, Update, State], Update]
    gather: Callable[[list[Update], State, bool], State]
    start: Callable[[State, State], State] = lambda wide, narrow: wide


def federate(task: Task, way: Way, seed: int) -> tuple[State, Member]:
    """Run all rounds; return the last published model, and its architecture."""
    largest = way.members[0]
    small = network(task, way.members[-1], seed).state_dict()
    current = way.start(network(task, largest, seed).state_dict(), small)
    published = current
    for number in range(task.rounds):
        updates = []
        for station, own in enumerate(way.members):
            model = network(task, own, seed)
            model.load_state_dict(way.down(station, current))
            draw = 1000 * seed + 10 * number + station
            state = train(model, task.train[station], EPOCHS, task.lr, draw)
            if not all(map(is_finite, state.values())):  # as in a run, it is left out
                print(f"  round {number + 1}: the training of station {station} has diverged")
                continue
            measured = grams(model, task.train[station], full=False)
            update = Update(state, measured, len(task.train[station][0]), name=str(station))
            updates.append(way.up(station, update, current))
        if updates:
            published = way.gather(updates, current, True)
            current = way.gather(updates, current, False)
    return published, largest


def hfedatm(task: Task, member: Member) -> Callable[[list[Update], State, bool], State]:
    """Return the merge of HFedATM: RegMean is published, the aligned mean is sent out."""
    graph = Architecture.of(network(task, member, 0), task.spec.example()).graph

    def gather(updates: list[Update], _: State, published: bool) -> State:
        merged = merge(updates, graph)
        return merged.state if published or merged.moved else merged.average

    return gather


def ways(task: Task) -> dict[str, Way]:
    """Return the ways to compare."""
    members = task.family
    archs = [Architecture.of(network(task, m, 0), task.spec.example(), m[0]) for m in members]
    fits = [Fit(archs[0], arch, uneven=True) for arch in archs]

    def lifted(station: int, update: Update, previous: State) -> Update:
        fit = fits[station]
        state = fit.lift(update.state, fit.down(previous), previous)
        grams, absent = fit.up_grams(update.grams), frozenset(fit.absent)
        return replace(update, state=state, grams=grams, absent=absent)

    def shared(large: State, small: State) -> State:
        narrower = any(ours > theirs for ours, theirs in fits[-1].sizes.values())
        return calm_start(fits[-1], split_start(fits[-1], large, small) if narrower else large)

    def cut(station: int, state: State) -> State:
        own, shapes = fits[station].pairs, archs[station].shapes
        return {
            own[n]: v[tuple(slice(size) for size in shapes[own[n]])].clone()
            for n, v in state.items()
            if n in own
        }

    def renamed(station: int, update: Update, _: State) -> Update:
        return replace(update, state={n: update.state[o] for n, o in fits[station].pairs.items()})

    same: tuple[Any, Any] = (lambda _, state: state), (lambda _, update, __: update)
    return {
        "largest": Way(members[:1], *same, hfedatm(task, members[0])),
        "smallest": Way((members[-1],) * 3, *same, hfedatm(task, members[-1])),
        "slices": Way(members, cut, renamed, lambda updates, old, _: overlapping(updates, old)),
        "transport": Way(
            *(members, lambda s, v: fits[s].down(v), lifted, hfedatm(task, members[0])),
            start=shared,
        ),
    }


def overlapping(updates: list[Update], previous: State) -> State:
    """Return, for every entry, the mean over the networks whose leading part holds it."""
    merged = {}
    for name, old in previous.items():
        total, count = torch.zeros_like(old), torch.zeros_like(old)
        for update in updates:
            if name in update.state:
                value = update.state[name]
                part = tuple(slice(size) for size in value.shape)
                total[part] += value * update.num_examples
                count[part] += update.num_examples
        mean = total / count.clamp(min=1)
        merged[name] = torch.where(count > 0, mean.to(old.dtype), old)
    return merged


def once(task: Task, seed: int) -> Iterator[tuple[str, float, float]]:
    """Merge networks that were trained apart; yield name, accuracy on their domains, unseen."""
    nets = [network(task, member, 100 * seed + n) for n, member in enumerate(task.family)]
    for number, model in enumerate(nets):
        train(model, task.train[number], APART_EPOCHS, task.lr, 1000 * seed + number)

    def scores(model: nn.Module) -> tuple[float, float]:
        return statistics.mean(accuracy(model, t) for t in task.tests), accuracy(model, task.unseen)

    each = [scores(model) for model in nets]
    yield "alone", *(statistics.mean(column) for column in zip(*each, strict=True))
    yield "ensemble", *scores(_Ensemble(nets))
    updates = {
        str(n): Update(model.state_dict(), grams(model, part, True), len(part[0]), name=str(n))
        for n, (model, part) in enumerate(zip(nets, task.train, strict=True))
    }
    archs = {
        n: Architecture.of(m, task.spec.example(), n) for n, m in zip(updates, nets, strict=True)
    }
    fits = fits_of(archs["0"], archs)
    leading = [
        replace(u, state={name: u.state[own] for name, own in fits[n].pairs.items()})
        for n, u in updates.items()
    ]
    large = network(task, task.family[0], seed)
    large.load_state_dict(overlapping(leading, nets[0].state_dict()))
    yield "slices", *scores(large)
    done: Resized = merge_resized(
        updates.__getitem__,
        fits,
        lambda stream: merge_apart(stream, archs["0"].graph, keep_grams=True),
    )
    large.load_state_dict(done.merged.state)
    yield "transport", *scores(large)
    small = network(task, task.family[-1], seed)
    joined = way_back(done.fits["2"], done.merged, "2").down(done.merged.state)
    small.load_state_dict(joined)
    yield "transport, back in the smallest shape", *scores(small)
    small.load_state_dict(done.back("2"))
    yield "transport, back and fitted", *scores(small)


class _Ensemble(nn.Module):
    def __init__(self, nets: list[nn.Module]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the networks' probabilities."""
        return torch.stack([net(x).softmax(1) for net in self.nets]).sum(0)


def measure(table: str, family: str, name: str, seed: int, data_dir: Path) -> list[Entry]:
    """Return one entry per way of one table."""
    task = load_task(name, family, seed, data_dir)
    if table == "once":
        found = once(task, seed)
    else:
        found = ((label, *federated(task, way, seed)) for label, way in ways(task).items())
    entries: list[Entry] = []
    for label, seen, unseen in found:
        print(f"{family:7} {name:8} {table:10} {label:38} seed {seed}  {seen:5.1f}  {unseen:5.1f}")
        entry: Entry = {"family": family, "data": name, "table": table, "way": label, "seed": seed}
        entries.append({**entry, "seen": round(seen, 2), "unseen": round(unseen, 2)})
    return entries


def federated(task: Task, way: Way, seed: int) -> tuple[float, float]:
    """Return the accuracy of a federation on the stations' domains and on the unseen one."""
    state, member = federate(task, way, seed)
    (model := network(task, member, seed)).load_state_dict(state)
    seen = statistics.mean(accuracy(model, test) for test in task.tests)
    return seen, accuracy(model, task.unseen)


def show(entries: list[Entry]) -> None:
    """Print the mean and the standard error over the seeds, as tables in Markdown."""
    for table, family in itertools.product(TABLES, FAMILIES):
        some = [e for e in entries if (e["table"], e["family"]) == (table, family)]
        data = dict.fromkeys(str(e["data"]) for e in some)
        if not some:
            continue
        heads = "".join(f" {d}: stations' domains | {d}: unseen |" for d in data)
        print(f"\n| {family}, {table} |{heads}\n|---|{'---:|' * 2 * len(data)}")
        for way in dict.fromkeys(str(e["way"]) for e in some):
            cells = []
            for name, key in itertools.product(data, ("seen", "unseen")):
                own = [e for e in some if (e["way"], e["data"]) == (way, name)]
                cells.append(_cell([float(str(e[key])) for e in own]))
            print(f"| {way} | {' | '.join(cells)} |")


def _cell(values: list[float]) -> str:
    if len(values) < 2:
        return "".join(f"{value:.1f} (one seed)" for value in values) or "-"
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.1f} ± {error:.1f}"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--data", nargs="+", default=list(UNSEEN), choices=list(UNSEEN))
    parser.add_argument("--table", nargs="+", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--json", type=Path, help="keeps what is measured; only the rest is run")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "layer .* is averaged")
    entries: list[Entry] = []
    if given.json and given.json.is_file():
        entries = [json.loads(line) for line in given.json.read_text().splitlines()]
    known = {tuple(str(e[key]) for key in ("table", "family", "data", "seed")) for e in entries}
    for seed, *wanted in itertools.product(given.seeds, given.table, given.family, given.data):
        if (*wanted, str(seed)) not in known:
            entries += measure(*wanted, seed, given.data_dir)
            if given.json:
                given.json.write_text("".join(json.dumps(e) + "\n" for e in entries))
    show([e for e in entries if e["seed"] in given.seeds])


if __name__ == "__main__":
    main()
