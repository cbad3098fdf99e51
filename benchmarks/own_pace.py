r"""Virtual time to an accuracy: synchronous rounds against stations at their own pace.

    python benchmarks/own_pace.py --seed 0      # and 1, 2: one file of numbers per seed
    python benchmarks/own_pace.py --draw        # the table and the picture, from all files

Four stations train on rotated digits; a round of the last station takes ten times as long as one of
the others. A virtual clock decides who is first, so the numbers do not depend on the machine. All
runs train alike; they differ in how many stations a merge waits for. The curves of seed N are in
``docs/assets/own-pace-N.json``, the picture is ``docs/assets/own-pace.png``. Nothing is chosen by
the accuracy on the unseen domain; it is only reported.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent.parent / "docs" / "assets"
SECONDS = "1:1:1:10"
TRAINING: dict[str, Any] = {
    "stations": 4, "clients-per-station": 2, "station-rounds": 1, "local-epochs": 1,
    "batch-size": 32, "schedule": "constant", "validation-fraction": 0, "diagnostics": False,
    "device": "cpu",
}  # fmt: skip
RUNS: dict[str, tuple[str, int, dict[str, Any]]] = {  # options of the rule, merges, settings
    "wait for all 4": ("buffer=4", 25, {}),
    "merge when 3 have answered": ("buffer=3", 259, {}),
    "the same, no bounds on updates": ("buffer=3", 259, {"bound-factor": 0.0}),
    "the first 3, never the slow one": ("buffer=3,max_staleness=0", 250, {}),
    "merge when 1 has answered": ("buffer=1", 775, {}),
}
LEVELS = (0.5, 0.6, 0.7)
LOOKS = ("#64748b", "#0f766e", "#2563eb", "#b45309", "#7c3aed")


def measure(seed: int) -> None:
    from hfedatm.base.results import read_rounds
    from hfedatm.runtime.local import run_locally

    path = ASSETS / f"own-pace-{seed}.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    found: dict[str, list[tuple[float, float]]] = known
    for name, (options, rounds, more) in RUNS.items():
        if name in found:
            continue
        with tempfile.TemporaryDirectory() as folder:
            os.environ["HFEDATM_STATE"] = f"{folder}/state"
            params = f"{options},station_seconds={SECONDS}"
            own = {"seed": seed, "rounds": rounds, "output": folder, "run-name": "run", **more}
            run_locally({**TRAINING, **own, "rule-params": params})
            found[name] = [
                (float((line.metrics or {})["clock"]), line.unseen_accuracy or 0.0)
                for line in read_rounds(Path(folder) / "run")
            ]
        path.write_text(json.dumps(found, indent=1) + "\n")


def time_to(curve: list[tuple[float, float]], level: float) -> float | None:
    """Return when a run first reaches an accuracy; None if it never does."""
    return next((clock for clock, accuracy in curve if accuracy >= level), None)


def draw() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    seeds = [json.loads(path.read_text()) for path in sorted(ASSETS.glob("own-pace-?.json"))]
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    head = "".join(f" {100 * level:.0f} % after |" for level in LEVELS)
    print(f"| the server | merges |{head} at 30 | at 250 |")
    print("|---|---|" + "---|" * (len(LEVELS) + 2))
    for (name, (_, rounds, _)), colour in zip(RUNS.items(), LOOKS, strict=True):
        curves = [seed[name] for seed in seeds if name in seed]
        for number, curve in enumerate(curves):
            label = name if number == 0 else None
            axes.plot(*zip(*curve, strict=True), color=colour, lw=1.2, label=label)
        cells = [_times([time_to(curve, level) for curve in curves]) for level in LEVELS]
        cells += [_mean([_at(curve, clock) for curve in curves]) for clock in (30, 250)]
        print(f"| {name} | {rounds} | {' | '.join(cells)} |")
    axes.set(xlabel="virtual seconds", ylabel="accuracy on the unseen domain", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(ASSETS / "own-pace.png", dpi=150)


def _at(curve: list[tuple[float, float]], clock: float) -> float | None:
    """Return the accuracy of the model that is current at a time; None after the run's end."""
    if clock > curve[-1][0] + 1:
        return None
    return next((accuracy for when, accuracy in reversed(curve) if when <= clock), 0.0)


def _times(found: list[float | None]) -> str:
    reached = [value for value in found if value is not None]
    if len(reached) < len(found):
        return f"{len(reached)} of {len(found)} runs"
    return f"{statistics.mean(reached):.0f} ({min(reached):.0f} to {max(reached):.0f})"


def _mean(found: list[float | None]) -> str:
    known = [value for value in found if value is not None]
    if not known:
        return "-"
    some = f" (of {len(known)} runs)" if len(known) < len(found) else ""
    return f"{100 * statistics.mean(known):.1f} %{some}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int)
    parser.add_argument("--draw", action="store_true")
    given = parser.parse_args()
    if given.seed is not None:
        measure(given.seed)
    if given.draw:
        draw()
