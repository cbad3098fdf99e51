"""Draw the README's picture from the results of `merge_quality.py`, which calls this."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SETS = {
    ("digits-data", "vgg-bn"): "VGG,\nparts of one data set",
    ("digits-data", "resnet18-bn"): "ResNet-18,\nparts of one data set",
    ("digits-domains", "vgg-bn"): "VGG,\na domain each",
    ("digits-domains", "resnet18-bn"): "ResNet-18,\na domain each",
}
"""The columns: networks with BatchNorm, three at a time."""


def draw(record: Mapping[str, Any], bars: Mapping[str, tuple[str, str]], file: Path) -> None:
    """Write the picture; every bar is a row of the table, with its label and colour.

    The thin line on a bar is the standard error over the seeds.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8.6, 3.6), layout="constrained")
    width = 0.8 / len(bars)
    for number, (row, (label, colour)) in enumerate(bars.items()):
        columns = [_values(record, *key, row) for key in SETS]
        heights = [statistics.mean(values) for values in columns]
        errors = [statistics.stdev(v) / len(v) ** 0.5 if len(v) > 1 else 0.0 for v in columns]
        places = [column + (number + 0.5) * width - 0.4 for column in range(len(SETS))]
        drawn = axes.bar(
            places, heights, 0.92 * width, yerr=errors, label=label, color=colour, ecolor="0.35"
        )
        axes.bar_label(drawn, [f"{height:.0f}" for height in heights], fontsize=7, padding=2)
    axes.set_xticks(range(len(SETS)), list(SETS.values()), fontsize=9)
    axes.set_ylabel("accuracy, %")
    axes.set_ylim(0, 108)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(file, dpi=130, metadata={"Software": None})
    plt.close(figure)


def _values(record: Mapping[str, Any], task: str, architecture: str, row: str) -> Sequence[float]:
    return [
        entry["rows"][row]
        for entry in record["sets"]
        if (entry["task"], entry["networks"], entry["architecture"]) == (task, 3, architecture)
    ]
