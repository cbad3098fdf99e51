r"""Merge networks that were trained apart, once, and measure the accuracy of the result.

    python benchmarks/merge_quality.py --data-dir ~/data                   # digits, three networks
    python benchmarks/merge_quality.py --data-dir ~/data --networks 5
    python benchmarks/merge_quality.py --data-dir ~/data --tasks pacs-data pacs-domains
    python benchmarks/merge_quality.py --table      # the tables and the picture again, no training

Networks of one architecture and different initial weights are trained on parts of one data set
(``-data``) or on a domain each (``-domains``), then merged once. The figure is the accuracy in
percent on the test images of all of them. Rows marked ``(data)`` need examples at the server, which
a federation's server does not have. Options of our merge were chosen on seeds 0 and 1 of the digits
with three networks; all other sets confirm them. ``benchmarks/results/merge_quality.json`` grows as
sets end, and sets that it already holds are not repeated; ``--complete`` measures rows that they
lack. The tables go to ``docs/results-apart.md``, and the README's picture to ``docs/results``.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import merge_rivals as rivals
import torch
from measure import RESULTS, set_threads, verdict
from merge_networks import ARCHITECTURES, Task, Transformer, accuracy, load_task, trained
from merge_picture import draw
from torch import Tensor, nn

from hfedatm_core import (
    AlignmentOptions,
    ChannelGraph,
    Merged,
    OwnedNetwork,
    Update,
    collect_grams,
    collect_profiles,
    merge_apart,
    refine,
)

GRAM_IMAGES = 500
NO_ALIGNMENT = AlignmentOptions("exact", "all", margin=0.999999)  # no order is that much better
ALONE, ENSEMBLE = "the networks by themselves (mean)", "their ensemble"
OURS = "**fold + Gram matching + RegMean everywhere + repair**"
UNALIGNED = "fold + RegMean everywhere + repair, not aligned"
PROFILED = "the same, matched by class profiles, too"
REFINED = "our merge, then an exchange per layer with the owners (`refine`)"
REPAIRED = "activation matching (data) + REPAIR (data)"
WITH_DATA = (REPAIRED, "weight matching + RegMean + BatchNorm measured again (data)")
PAPER, WEIGHTS = "the paper's (FOT on convolutions + RegMean)", "weight matching (Git Re-Basin)"
ALL_UNITS, SOLVED = "the same, all units", "weight matching + RegMean"
ROWS = (
    *(ALONE, ENSEMBLE, "average", PAPER, ALL_UNITS, WEIGHTS, SOLVED, WITH_DATA[1], REPAIRED),
    *(UNALIGNED, OURS, PROFILED, REFINED),
)


PAGE = Path(__file__).parents[1] / "docs" / "results-apart.md"
PICTURE = PAGE.parent / "results" / "merge-quality.png"
BARS = {
    "average": ("average", "#999999"),
    PAPER: ("the paper's merge", "#56b4e9"),
    WEIGHTS: ("weight matching", "#e69f00"),
    OURS: ("HFedATM, one step", "#0072b2"),
    REFINED: ("HFedATM, refined", "#009e73"),
    ALONE: ("the networks themselves", "#cccccc"),
    ENSEMBLE: ("their ensemble", "#e3e3e3"),
}


def measured(
    models: Sequence[nn.Module], task: Task, known: dict[str, float] | None = None
) -> dict[str, float]:
    """Return the accuracy of every row; rows that are known are not measured again."""
    known = known or {}
    graph = ChannelGraph.trace(models[0], task.parts[0][0][:2])
    updates = [
        Update(
            model.state_dict(),
            collect_grams(model, [(x, None) for x in images[:GRAM_IMAGES].split(100)], full=True),
            name=f"network-{number}",
        )
        for number, (model, (images, _)) in enumerate(zip(models, task.parts, strict=True))
    ]
    shown = torch.cat([images[: 600 // len(models)] for images, _ in task.parts])
    network = copy.deepcopy(models[0])

    def of(state: dict[str, Tensor]) -> float:
        network.load_state_dict(state)
        return accuracy(task, network.eval())

    def profiled(update: Update, model: nn.Module, images: Tensor, labels: Tensor) -> Update:
        batches = zip(images[:GRAM_IMAGES].split(100), labels[:GRAM_IMAGES].split(100), strict=True)
        found = collect_profiles(model, graph, batches, task.spec.num_classes)
        return replace(update, profiles=found)

    @cache
    def by_weights() -> list[dict[str, Tensor]]:
        return rivals.weight_matching(models, graph)

    @cache
    def solved() -> dict[str, Tensor]:
        return rivals.permuted_regmean(updates, graph, by_weights())

    def repaired() -> float:
        by_data = rivals.activation_matching(models, graph, shown)
        return of(rivals.repair(models, graph, by_data, shown))

    def with_profiles() -> float:
        them = zip(updates, models, task.parts, strict=True)
        return of(merge_apart([profiled(u, m, *part) for u, m, part in them], graph).state)

    @cache
    def merged() -> Merged:
        return merge_apart(updates, graph)

    def refined() -> float:
        parts = {
            update.name: OwnedNetwork(
                update.state, [(x, None) for x in images[:GRAM_IMAGES].split(100)]
            )
            for update, (images, _) in zip(updates, task.parts, strict=True)
        }
        return of(refine(merged(), models[0], parts))

    rows: dict[str, Callable[[], float]] = {
        ALONE: lambda: alone(models, task),
        ENSEMBLE: lambda: accuracy(task, rivals.ensemble(models)),
        "average": lambda: of(rivals.average(models)),
        PAPER: lambda: of(rivals.paper(updates, graph)),
        ALL_UNITS: lambda: of(rivals.paper(updates, graph, "all")),
        WEIGHTS: lambda: of(rivals.permuted_mean(models, graph, by_weights())),
        SOLVED: lambda: of(solved()),
        WITH_DATA[1]: lambda: of(rivals.with_statistics(models[0], solved(), shown)),
        REPAIRED: repaired,
        UNALIGNED: lambda: of(merge_apart(updates, graph, alignment=NO_ALIGNMENT).state),
        OURS: lambda: of(merged().state),
        PROFILED: with_profiles,
        REFINED: refined,
    }
    if isinstance(models[0], Transformer):  # the rival is written for networks without attention
        del rows[REPAIRED]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {n: known[n] if n in known else round(row(), 2) for n, row in rows.items()}


def alone(models: Sequence[nn.Module], task: Task) -> float:
    """Return the mean accuracy of the networks by themselves."""
    return round(statistics.mean(accuracy(task, model) for model in models), 2)


def verdicts(task: str, rows: dict[str, float]) -> dict[str, bool]:
    """Return which targets the mean over the seeds reaches, in one step and with `refine`."""
    others = (ALONE, ENSEMBLE, UNALIGNED, OURS, PROFILED, REFINED, *WITH_DATA)
    rivals = max(value for name, value in rows.items() if name not in others)
    domains = task.endswith("domains")
    judged = {}
    for step, row in (("one step", OURS), ("`refine`", REFINED)):
        if row not in rows:
            continue
        judged[f"{step}: ahead of every row without data"] = rows[row] >= rivals
        networks = "above the networks" if domains else "within 3 of the networks"
        judged[f"{step}: {networks}"] = rows[row] >= rows[ALONE] - (0 if domains else 3)
        if REPAIRED in rows:
            level = rows[row] >= rows[REPAIRED] - 1
            judged[f"{step}: not behind REPAIR with data by more than 1"] = level
    return judged


def table(record: dict[str, Any]) -> str:
    """Return the results as Markdown, a column per set, mean ± standard error over the seeds."""
    sets: dict[tuple[str, int, str], list[dict[str, float]]] = {}
    for entry in record["sets"]:
        key = (entry["task"], entry["networks"], entry["architecture"])
        sets.setdefault(key, []).append(entry["rows"])
    text = []
    for task, networks in dict.fromkeys(key[:2] for key in sets):
        columns = {a: sets[t, n, a] for t, n, a in sets if (t, n) == (task, networks)}
        text += [f"**{task}, {networks} networks**", ""]
        text += ["| merge | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
        found = {row for seeds in columns.values() for seed in seeds for row in seed}
        for row in (row for row in ROWS if row in found):
            cells = [_cell([s.get(row) for s in seeds]) for seeds in columns.values()]
            text.append(f"| {row} | " + " | ".join(cells) + " |")
        judged = {a: verdicts(task, _means(seeds)) for a, seeds in columns.items()}
        for target in dict.fromkeys(target for found in judged.values() for target in found):
            words = [verdict(judged[a][target]) if target in judged[a] else "–" for a in columns]
            text.append(f"| *{target}* | " + " | ".join(words) + " |")
        seeds_of = sorted({len(seeds) for seeds in columns.values()})
        text += ["", f"Seeds per column: {', '.join(map(str, seeds_of))}.", ""]
    return "\n".join(text)


def write_page(text: str, page: Path = PAGE) -> None:
    """Put the tables between their two marks."""
    begin, end = "<!-- table: benchmarks/merge_quality.py -->", "<!-- end of table -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    _, after = rest.split(end, 1)
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def _means(seeds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of every row that all seeds have."""
    return {r: statistics.mean(s[r] for s in seeds) for r in seeds[0] if all(r in s for s in seeds)}


def _cell(given: Sequence[float | None]) -> str:
    """Return mean ± standard error; a dash if the row was not measured for every seed."""
    values = [value for value in given if value is not None]
    if len(values) < len(given):
        return "–"
    mean = statistics.mean(values)
    if len(values) == 1:
        return f"{mean:.1f}"
    return f"{mean:.1f} ± {statistics.stdev(values) / len(values) ** 0.5:.1f}"


def main(given: Sequence[str] | None = None) -> None:
    """Measure what is not in the results yet, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data-dir", type=Path, default=Path())
    parser.add_argument("--tasks", nargs="+", default=["digits-data", "digits-domains"])
    parser.add_argument("--networks", type=int, default=3)
    parser.add_argument("--architectures", nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=None, help="train for so many epochs instead")
    default = Path(tempfile.gettempdir()) / "hfedatm-merge-quality"
    parser.add_argument("--cache", type=Path, default=default, help="folder of trained networks")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--complete", action="store_true", help="add rows that sets lack")
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    chosen = parser.parse_args(given)
    set_threads(1)
    file = chosen.output / "merge_quality.json"
    record: dict[str, Any] = {"sets": []}
    if file.is_file():
        record = json.loads(file.read_text(encoding="utf-8"))
    if not chosen.table:
        done = {_key(entry): entry for entry in record["sets"]}
        for name in chosen.tasks:
            task = load_task(name, chosen.networks, chosen.data_dir)
            for seed in chosen.seeds:
                for architecture in chosen.architectures:
                    entry = {
                        "task": name,
                        "networks": chosen.networks,
                        "architecture": architecture,
                        "seed": seed,
                    }
                    known = done.get(_key(entry), {}).get("rows", {})
                    if known and not (chosen.complete and REFINED not in known):
                        continue
                    models = trained(architecture, task, seed, chosen.cache, chosen.epochs)
                    if known and known[ALONE] != alone(models, task):
                        known = {}  # these are other networks: all rows must be of the same ones
                    entry["rows"] = measured(models, task, known)
                    print(_key(entry), entry["rows"], flush=True)
                    if _key(entry) in done:
                        done[_key(entry)]["rows"] = entry["rows"]
                    else:
                        record["sets"].append(entry)
                    chosen.output.mkdir(parents=True, exist_ok=True)
                    text = json.dumps(record, indent=1, ensure_ascii=False)
                    file.write_text(text + "\n", encoding="utf-8")
    text = table(record)
    print(text)
    if chosen.output == RESULTS:
        write_page(text)
        draw(record, BARS, PICTURE)


def _key(entry: dict[str, Any]) -> tuple[str, int, str, int]:
    return entry["task"], entry["networks"], entry["architecture"], entry["seed"]


if __name__ == "__main__":
    main()
