"""Stations with LeNet-5 of half, once and twice the width: one federation, four ways to merge it.

Every station has one domain; one more domain is unseen. All ways start from the same seed and train
the same number of steps:

- ``largest``: only the station with the widest network trains.
- ``smallest``: all stations train the narrowest network, merged by HFedATM.
- ``slices``: a narrow network is the leading part of the widest, and every entry is the mean of the
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
from hfedatm_core.resizing.merging import Resized, fits_of, merge_resized
from hfedatm_core.resizing.starting import split_start

WIDTHS = (2.0, 1.0, 0.5)
ROUNDS, EPOCHS, BATCH, LR = 6, 2, 32, 0.03
APART_EPOCHS = 8
IMAGES, TESTS = 600, 400
UNSEEN = {"digits4": "optdigits", "pacs": "sketch"}
State = dict[str, Tensor]
Entry = dict[str, object]
Part = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """Training and test images of the stations' domains, and the unseen domain."""

    spec: DataSpec
    train: list[Part]
    tests: list[Part]
    unseen: Part


def load_task(name: str, seed: int, data_dir: Path) -> Task:
    """Return the domains in an order of the seed: every domain meets every width."""
    if name == "digits4":
        data: DomainData = digits4.load(data_dir, size=28)
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

    return Task(
        data.spec,
        [images(d, TESTS, TESTS + IMAGES) for d in domains],
        [images(d, 0, TESTS) for d in domains],
        images(UNSEEN[name], 0, 2 * TESTS),
    )


def network(task: Task, width: float, seed: int) -> nn.Module:
    """Return a fresh network."""
    torch.manual_seed(seed)
    return build("lenet5", task.spec, width=width)


def train(model: nn.Module, part: Part, epochs: int, seed: int) -> State:
    """Train on one station's images; return the weights."""
    inputs, targets = part
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
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

    widths: tuple[float, ...]
    down: Callable[[int, State], State]
    up: Callable[[int, Update, State], Update]
    gather: Callable[[list[Update], State, bool], State]
    start: Callable[[State, State], State] = lambda wide, narrow: wide


def federate(task: Task, way: Way, seed: int) -> tuple[State, float]:
    """Run all rounds; return the last published model, and its width."""
    width = max(way.widths)
    narrow = network(task, min(way.widths), seed).state_dict()
    current = way.start(network(task, width, seed).state_dict(), narrow)
    published = current
    for number in range(ROUNDS):
        updates = []
        for station, own in enumerate(way.widths):
            model = network(task, own, seed)
            model.load_state_dict(way.down(station, current))
            state = train(model, task.train[station], EPOCHS, 1000 * seed + 10 * number + station)
            measured = grams(model, task.train[station], full=False)
            update = Update(state, measured, len(task.train[station][0]), name=str(station))
            updates.append(way.up(station, update, current))
        published = way.gather(updates, current, True)
        current = way.gather(updates, current, False)
    return published, width


def hfedatm(task: Task, width: float) -> Callable[[list[Update], State, bool], State]:
    """Return the merge of HFedATM: RegMean is published, the aligned mean is sent out."""
    graph = Architecture.of(network(task, width, 0), task.spec.example()).graph

    def gather(updates: list[Update], _: State, published: bool) -> State:
        merged = merge(updates, graph)
        return merged.state if published or merged.moved else merged.average

    return gather


def ways(task: Task) -> dict[str, Way]:
    """Return the ways to compare."""
    archs = [Architecture.of(network(task, w, 0), task.spec.example(), f"x{w:g}") for w in WIDTHS]
    fits = [Fit(archs[0], arch, uneven=True) for arch in archs]

    def lifted(station: int, update: Update, previous: State) -> Update:
        fit = fits[station]
        state = fit.lift(update.state, fit.down(previous), previous)
        return replace(update, state=state, grams=fit.up_grams(update.grams))

    def cut(station: int, state: State) -> State:
        shapes = archs[station].shapes
        return {n: v[tuple(slice(s) for s in shapes[n])].clone() for n, v in state.items()}

    same: tuple[Any, Any] = (lambda _, state: state), (lambda _, update, __: update)
    return {
        "largest": Way(WIDTHS[:1], *same, hfedatm(task, WIDTHS[0])),
        "smallest": Way((WIDTHS[-1],) * 3, *same, hfedatm(task, WIDTHS[-1])),
        "slices": Way(WIDTHS, cut, same[1], lambda updates, old, _: overlapping(updates, old)),
        "transport": Way(
            *(WIDTHS, lambda s, v: fits[s].down(v), lifted, hfedatm(task, WIDTHS[0])),
            start=lambda wide, narrow: split_start(fits[-1], wide, narrow),
        ),
    }


def overlapping(updates: list[Update], previous: State) -> State:
    """Return, for every entry, the mean over the networks whose leading part holds it."""
    merged = {}
    for name, old in previous.items():
        total, count = torch.zeros_like(old), torch.zeros_like(old)
        for update in updates:
            value = update.state[name]
            part = tuple(slice(size) for size in value.shape)
            total[part] += value * update.num_examples
            count[part] += update.num_examples
        merged[name] = torch.where(count > 0, total / count.clamp(min=1), old)
    return merged


def once(task: Task, seed: int) -> Iterator[tuple[str, float, float]]:
    """Merge networks that were trained apart; yield name, accuracy on their domains, unseen."""
    nets = [network(task, width, 100 * seed + n) for n, width in enumerate(WIDTHS)]
    for number, model in enumerate(nets):
        train(model, task.train[number], APART_EPOCHS, 1000 * seed + number)

    def scores(model: nn.Module) -> tuple[float, float]:
        return statistics.mean(accuracy(model, t) for t in task.tests), accuracy(model, task.unseen)

    each = [scores(model) for model in nets]
    yield "alone", *(statistics.mean(column) for column in zip(*each, strict=True))
    yield "ensemble", *scores(_Ensemble(nets))
    updates = {
        str(n): Update(model.state_dict(), grams(model, part, True), len(part[0]), name=str(n))
        for n, (model, part) in enumerate(zip(nets, task.train, strict=True))
    }
    large = network(task, WIDTHS[0], seed)
    large.load_state_dict(overlapping(list(updates.values()), nets[0].state_dict()))
    yield "slices", *scores(large)
    archs = {
        n: Architecture.of(m, task.spec.example(), n) for n, m in zip(updates, nets, strict=True)
    }
    fits = fits_of(archs["0"], archs)
    done: Resized = merge_resized(
        updates.__getitem__, fits, lambda stream: merge_apart(stream, archs["0"].graph)
    )
    large.load_state_dict(done.merged.state)
    yield "transport", *scores(large)
    small = network(task, WIDTHS[-1], seed)
    small.load_state_dict(done.back("2"))
    yield "transport, back in the narrowest shape", *scores(small)


class _Ensemble(nn.Module):
    def __init__(self, nets: list[nn.Module]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the networks' probabilities."""
        return torch.stack([net(x).softmax(1) for net in self.nets]).sum(0)


def measure(name: str, seed: int, data_dir: Path) -> list[Entry]:
    """Return one entry per table and way."""
    found: list[Entry] = []
    task = load_task(name, seed, data_dir)
    for label, way in ways(task).items():
        state, width = federate(task, way, seed)
        (model := network(task, width, seed)).load_state_dict(state)
        seen = statistics.mean(accuracy(model, test) for test in task.tests)
        found.append(_entry(name, "federation", label, seed, seen, accuracy(model, task.unseen)))
    return found + [_entry(name, "once", label, seed, *both) for label, *both in once(task, seed)]


def _entry(data: str, table: str, way: str, seed: int, seen: float, unseen: float) -> Entry:
    entry = {"data": data, "table": table, "way": way, "seed": seed}
    print(f"{data:8} {table:10} {way:40} seed {seed}  {seen:5.1f}  {unseen:5.1f}", flush=True)
    return {**entry, "seen": round(seen, 2), "unseen": round(unseen, 2)}


def show(entries: list[Entry]) -> None:
    """Print the mean and the standard error over the seeds, as a table in Markdown."""
    for table in ("federation", "once"):
        print(f"\n| {table} | data | stations' domains | unseen domain |\n|---|---|---:|---:|")
        rows = dict.fromkeys((e["way"], e["data"]) for e in entries if e["table"] == table)
        for way, data in rows:
            some = [e for e in entries if (e["table"], e["way"], e["data"]) == (table, way, data)]
            cells = []
            for key in ("seen", "unseen"):
                values = [float(str(e[key])) for e in some]
                spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
                error = "one seed" if spread is None else f"± {spread:.1f}"
                cells.append(f"{statistics.mean(values):.1f} ({error})")
            print(f"| {way} | {data} | {' | '.join(cells)} |")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", default=list(UNSEEN), choices=list(UNSEEN))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--json", type=Path, help="keeps what is measured; only the rest is run")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "layer .* is averaged")
    entries: list[Entry] = []
    if given.json and given.json.is_file():
        entries = [json.loads(line) for line in given.json.read_text().splitlines()]
    for name, seed in itertools.product(given.data, given.seeds):
        if not any((e["data"], e["seed"]) == (name, seed) for e in entries):
            entries += measure(name, seed, given.data_dir)
            if given.json:
                given.json.write_text("".join(json.dumps(e) + "\n" for e in entries))
    show(entries)


if __name__ == "__main__":
    main()
