r"""Merge networks that were trained apart, once, and measure the accuracy of the result.

    python benchmarks/merge_quality.py --data-dir ~/data                   # digits, three networks
    python benchmarks/merge_quality.py --data-dir ~/data --networks 5
    python benchmarks/merge_quality.py --data-dir ~/data --tasks pacs-data pacs-domains
    python benchmarks/merge_quality.py --table                             # only the table again

Networks of one architecture and different initial weights are trained on parts of one data set
(``-data``) or on a domain each (``-domains``), then merged once. The figure is the accuracy in
percent on the test images of all of them. Rows marked ``(data)`` need examples at the server, which
a federation's server does not have. Options of our merge were chosen on seeds 0 and 1 of the digits
with three networks; all other sets confirm them. ``benchmarks/results/merge_quality.json`` grows as
sets end, and sets that it already holds are not repeated.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import merge_rivals as rivals
import torch
from measure import RESULTS, set_threads, verdict
from merge_networks import ARCHITECTURES, Task, accuracy, load_task, trained
from torch import Tensor, nn

from hfedatm_core import ChannelGraph, Update, collect_grams, merge_apart

GRAM_IMAGES = 500
ALONE, ENSEMBLE = "the networks by themselves (mean)", "their ensemble"
OURS = "**fold + Gram matching + RegMean everywhere + repair**"
REPAIRED = "activation matching (data) + REPAIR (data)"
WITH_DATA = (REPAIRED, "weight matching + RegMean + BatchNorm measured again (data)")


def measured(models: Sequence[nn.Module], task: Task) -> dict[str, float]:
    """Return the accuracy of every row."""
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

    by_weights = rivals.weight_matching(models, graph)
    by_data = rivals.activation_matching(models, graph, shown)
    solved = rivals.permuted_regmean(updates, graph, by_weights)
    rows: dict[str, Callable[[], float]] = {
        ALONE: lambda: statistics.mean(accuracy(task, model) for model in models),
        ENSEMBLE: lambda: accuracy(task, rivals.ensemble(models)),
        "average": lambda: of(rivals.average(models)),
        "the paper's (FOT on convolutions + RegMean)": lambda: of(rivals.paper(updates, graph)),
        "the same, all units": lambda: of(rivals.paper(updates, graph, "all")),
        "weight matching (Git Re-Basin)": lambda: of(
            rivals.permuted_mean(models, graph, by_weights)
        ),
        "weight matching + RegMean": lambda: of(solved),
        WITH_DATA[1]: lambda: of(rivals.with_statistics(models[0], solved, shown)),
        REPAIRED: lambda: of(rivals.repair(models, graph, by_data, shown)),
        OURS: lambda: of(merge_apart(updates, graph).state),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: round(row(), 2) for name, row in rows.items()}


def verdicts(task: str, rows: dict[str, float]) -> dict[str, bool]:
    """Return which targets the mean over the seeds reaches."""
    ours = rows[OURS]
    without = [v for n, v in rows.items() if n not in (ALONE, ENSEMBLE, OURS, *WITH_DATA)]
    least = rows[ALONE] if task.endswith("domains") else rows[ALONE] - 3
    return {
        "ahead of every row without data": ours >= max(without),
        "above the networks" if task.endswith("domains") else "within 3 of the networks": (
            ours >= least
        ),
        "not behind REPAIR with data by more than 1": ours >= rows[REPAIRED] - 1,
    }


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
        for row in next(iter(columns.values()))[0]:
            cells = [_cell([seed[row] for seed in seeds]) for seeds in columns.values()]
            text.append(f"| {row} | " + " | ".join(cells) + " |")
        judged = {
            a: verdicts(task, {r: statistics.mean(s[r] for s in seeds) for r in seeds[0]})
            for a, seeds in columns.items()
        }
        for target in next(iter(judged.values())):
            words = [verdict(judged[a][target]) for a in columns]
            text.append(f"| *{target}* | " + " | ".join(words) + " |")
        seeds_of = sorted({len(seeds) for seeds in columns.values()})
        text += ["", f"Seeds per column: {', '.join(map(str, seeds_of))}.", ""]
    return "\n".join(text)


def _cell(values: Sequence[float]) -> str:
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
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    chosen = parser.parse_args(given)
    set_threads(1)
    file = chosen.output / "merge_quality.json"
    record: dict[str, Any] = {"sets": []}
    if file.is_file():
        record = json.loads(file.read_text(encoding="utf-8"))
    if not chosen.table:
        done = {_key(entry) for entry in record["sets"]}
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
                    if _key(entry) in done:
                        continue
                    models = trained(architecture, task, seed, chosen.cache, chosen.epochs)
                    entry["rows"] = measured(models, task)
                    print(_key(entry), entry["rows"], flush=True)
                    record["sets"].append(entry)
                    chosen.output.mkdir(parents=True, exist_ok=True)
                    text = json.dumps(record, indent=1, ensure_ascii=False)
                    file.write_text(text + "\n", encoding="utf-8")
    print(table(record))


def _key(entry: dict[str, Any]) -> tuple[str, int, str, int]:
    return entry["task"], entry["networks"], entry["architecture"], entry["seed"]


if __name__ == "__main__":
    main()
