"""The picture in the README: accuracy on the unseen domain, round by round, for two rules.

    python benchmarks/readme_picture.py                       # run, then draw
    python benchmarks/readme_picture.py --seeds 5 rounds=10   # other settings
    python benchmarks/readme_picture.py --draw                # draw again from the JSON

Every rule runs on the same seeds, that is, from the same weights and the same division of the data.
``docs/assets/result.json`` holds the numbers, ``docs/assets/result.png`` the picture.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent.parent / "docs" / "assets"
COLOURS = ("#b45309", "#0f766e", "#1d4ed8", "#7e22ce")  # apart for colour-blind readers, too
MARKERS = "so^D"
NAMES = {"avg": "plain averaging (avg)", "hfedatm": "FOT + RegMean (hfedatm)"}


def measure(rules: list[str], seeds: int, assignments: list[str]) -> dict[str, Any]:
    from hfedatm.cli.run import read_settings
    from hfedatm.results import read_rounds
    from hfedatm.runtime.local import run_locally
    from hfedatm.settings import resolve

    given = read_settings(None, assignments)
    curves: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for rule in rules:
            for seed in range(seeds):
                name = f"{rule}-{seed}"
                own = {"server-rule": rule, "seed": seed, "output": folder, "run-name": name}
                run_locally({**given, **own})
                rounds = read_rounds(Path(folder) / name)
                curves.setdefault(rule, []).append([r["unseen"]["accuracy"] for r in rounds])
    settings = resolve(given)
    return {
        "dataset": settings.dataset,
        "target-domain": settings.target_domain,
        "stations": settings.stations,
        "clients-per-station": settings.clients_per_station,
        "settings": given,
        "unseen_accuracy": curves,
    }


def draw(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    for (rule, curves), colour, marker in zip(
        result["unseen_accuracy"].items(), COLOURS, MARKERS, strict=False
    ):
        rounds = range(1, len(curves[0]) + 1)
        for curve in curves:
            axes.plot(rounds, [100 * a for a in curve], color=colour, alpha=0.25, linewidth=1)
        mean = [100 * statistics.fmean(at_round) for at_round in zip(*curves, strict=True)]
        axes.plot(
            rounds, mean, color=colour, marker=marker, linewidth=2, label=NAMES.get(rule, rule)
        )
    count = len(curves)
    axes.set(
        xlabel="global round",
        ylabel="accuracy on the unseen domain, %",
        title=f"{result['dataset']}, unseen domain {result['target-domain']}; "
        f"{result['stations']} stations × {result['clients-per-station']} clients; "
        f"mean of {count} seeds, each seed thin",
    )
    axes.title.set_fontsize(10)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("assignments", nargs="*", metavar="KEY=VALUE", help="settings of all runs")
    parser.add_argument("--rules", nargs="+", default=["avg", "hfedatm"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=ASSETS, help="where to write")
    parser.add_argument("--draw", action="store_true", help="run nothing; draw from the JSON")
    options = parser.parse_intermixed_args()
    numbers = options.folder / "result.json"
    if not options.draw:
        result = measure(options.rules, options.seeds, options.assignments)
        numbers.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    draw(json.loads(numbers.read_text(encoding="utf-8")), options.folder / "result.png")


if __name__ == "__main__":
    main()
