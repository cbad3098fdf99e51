"""Stations start apart, are merged in round 1 and train on: accuracy over the rounds.

Three federations train for the same rounds: HFedATM, which merges the stations' own models by the
Grams of all layers in round 1; averaging of the same stations; and averaging from a shared start,
which has nothing to merge apart. The network is LeNet-5 with BatchNorm, on rotated digits.

python benchmarks/train_on.py            # runs what is missing, then writes table and picture
python benchmarks/train_on.py --print    # only table and picture, from the JSON file
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import RESULTS, set_threads

PAGE = Path(__file__).parent.parent / "docs" / "results-apart.md"
PICTURE = PAGE.parent / "results" / "train-on-digits.png"
BEGIN, END = "<!-- table: benchmarks/train_on.py -->", "<!-- end of table -->"
ROWS: dict[str, dict[str, Any]] = {
    "HFedATM, own starts": {"server-rule": "hfedatm", "station-start": "own"},
    "Avg, own starts": {"server-rule": "avg", "station-start": "own"},
    "Avg, shared start": {"server-rule": "avg"},
}
SETTINGS: dict[str, Any] = {
    "dataset": "digits",
    "model": "lenet5",
    "model-params": "batch_norm=true",
    "target-domain": "45",
    "stations": 3,
    "clients-per-station": 2,
    "station-assignment": "mixed",
    "lambda": 1.0,
    "rounds": 6,
    "station-rounds": 2,
    "local-epochs": 2,
    "schedule": "constant",
    "diagnostics": False,
    "device": "cpu",
    "threads": 1,
}
SEEDS = (20, 21, 22)
GOALS = (0.8, 0.9)
Curve = list[list[float]]


def curve(row: str, seed: int) -> Curve:
    """Return accuracy on source validation and on the unseen domain after each round."""
    from hfedatm.base.results import read_rounds
    from hfedatm.runtime.local import run_locally

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        given = {**SETTINGS, **ROWS[row], "seed": seed, "output": folder, "run-name": "run"}
        run_locally(given)
        rounds = read_rounds(Path(folder) / "run")
        return [[r.source_accuracy or 0.0, r.unseen_accuracy or 0.0] for r in rounds]


def rounds_until(found: Curve, goal: float) -> int | None:
    """Return the first round whose model reaches the goal on the unseen domain."""
    return next((n for n, (_, unseen) in enumerate(found, 1) if unseen >= goal), None)


def cell(values: Sequence[float]) -> str:
    """Return the mean in percent, of several values ± their standard error."""
    mean = f"{100 * statistics.mean(values):.1f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {100 * statistics.stdev(values) / len(values) ** 0.5:.1f}"


def table(curves: dict[str, dict[str, Curve]]) -> str:
    """Return the accuracy by round, and the rounds that each seed needs to reach a goal."""
    count = max(len(one) for seeds in curves.values() for one in seeds.values())
    lines = []
    for which, name in ((1, "unseen domain 45°"), (0, "source validation")):
        header = " | ".join(f"round {n}" for n in range(1, count + 1))
        lines += [f"| {name} | {header} |", "|---|" + "---:|" * count]
        for row, seeds in curves.items():
            cells = [cell([one[n][which] for one in seeds.values()]) for n in range(count)]
            lines.append(f"| {row} | {' | '.join(cells)} |")
        lines.append("")
    goals = " | ".join(f"{100 * goal:g} %" for goal in GOALS)
    lines += [f"| rounds until the unseen domain has | {goals} |", "|---|" + "---:|" * len(GOALS)]
    for row, seeds in curves.items():
        needed = [[rounds_until(one, goal) for one in seeds.values()] for goal in GOALS]
        cells = [", ".join("never" if n is None else str(n) for n in some) for some in needed]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    names = ", ".join(next(iter(curves.values())))
    count = min(len(seeds) for seeds in curves.values())
    missing = "" if count == len(SEEDS) else f" {count} of {len(SEEDS)} seeds are measured so far."
    said = f"Seeds: {names}; the last table has one number per seed.{missing}"
    return "\n".join([*lines, "", said])


def picture(curves: dict[str, dict[str, Curve]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3), layout="constrained")
    for row, seeds in curves.items():
        means = [
            100 * statistics.mean(values)
            for values in zip(*([u for _, u in one] for one in seeds.values()), strict=True)
        ]
        axes.plot(range(1, len(means) + 1), means, marker="o", markersize=3, label=row)
    axes.set(xlabel="round", ylabel="accuracy on the unseen domain (%)", ylim=(0, 100))
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def write_page(text: str, page: Path = PAGE) -> None:
    """Put the table between its two marks."""
    content = page.read_text(encoding="utf-8")
    before, rest = content.split(BEGIN)
    after = rest.split(END, 1)[1]
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--print", action="store_true", dest="only_print", help="run nothing")
    parser.add_argument("--output", type=Path, default=RESULTS / "train_on.json")
    chosen = parser.parse_args(given)
    set_threads(1)
    stored = json.loads(chosen.output.read_text("utf-8")) if chosen.output.is_file() else {}
    curves = stored.get("curves", {}) if stored.get("settings") == SETTINGS else {}
    for seed in () if chosen.only_print else SEEDS:
        for row in ROWS:
            if str(seed) not in curves.setdefault(row, {}):
                curves[row][str(seed)] = curve(row, seed)
                result = {"settings": SETTINGS, "rows": ROWS, "curves": curves}
                chosen.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
                print(seed, row, [round(u, 3) for _, u in curves[row][str(seed)]], flush=True)
    text = table(curves)
    print(text)
    write_page(text)
    picture(curves, PICTURE)


if __name__ == "__main__":
    main()
