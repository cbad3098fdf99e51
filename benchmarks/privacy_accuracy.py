r"""Accuracy on the unseen domain against the privacy budget of the whole run.

    python benchmarks/privacy_accuracy.py rounds=5 local-epochs=2 evaluate-every=5 \
        gram-dtype=float32
    python benchmarks/privacy_accuracy.py --name pacs --seeds 1 preset=pacs-lenet5-small \
        data-dir=~/data rounds=6 local-epochs=1 lr=0.05 evaluate-every=6
    python benchmarks/privacy_accuracy.py --draw                           # draw again

The noise on the Grams is at example level. It is either added in full by every client (local) or
shared out among the clients of a secure sum. Grams are released in the last round only (``every``
of the rule): training goes on from the mean, which needs no Grams, so the whole budget is left for
the one merge that is kept. Two runs without noise bound the results: RegMean at epsilon = infinity,
and plain averaging, which needs no Grams and so spends nothing. All runs use the same seeds.
``docs/assets/privacy-<name>.json`` holds the numbers and grows as runs end; runs that it already
holds are not repeated. ``docs/assets/privacy-<name>.png`` is the picture.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent.parent / "docs" / "assets"
EPSILONS = (4.0, 2.0, 1.0, 0.5, 0.1)
EXAMPLE = {"privacy.mechanism": "example"}
VARIANTS: dict[str, dict[str, Any]] = {
    "local noise": EXAMPLE,
    "secure-aggregated noise": EXAMPLE | {"secure-aggregation": True},
}
FRAME: dict[str, dict[str, Any]] = {
    "no noise": {},
    "averaging": {"server-rule": "avg"},
}
LOOKS = {"local noise": ("#b45309", "s-"), "secure-aggregated noise": ("#0f766e", "o-")}


def plan(seeds: int, epsilons: tuple[float, ...]) -> list[dict[str, Any]]:
    runs = []
    for seed in range(seeds):
        for name, settings in FRAME.items():
            runs.append({"variant": name, "epsilon": None, "seed": seed, "settings": settings})
        for epsilon in epsilons:
            for name, settings in VARIANTS.items():
                own = settings | {"privacy.epsilon": epsilon}
                runs.append({"variant": name, "epsilon": epsilon, "seed": seed, "settings": own})
    return runs


def measure(path: Path, seeds: int, epsilons: tuple[float, ...], assignments: list[str]) -> None:
    from hfedatm.base.resolving import resolve
    from hfedatm.base.results import read_rounds
    from hfedatm.cli.run import read_settings
    from hfedatm.runtime.local import run_locally

    # Both kinds of noise weigh clients by examples, because shared noise requires it.
    given = {"gram-weights": "examples", "diagnostics": False} | read_settings(None, assignments)
    rounds = resolve(given).rounds
    shown = {key: value for key, value in given.items() if key != "data-dir"}
    record = json.loads(path.read_text()) if path.is_file() else {"settings": shown, "runs": []}
    if record["settings"] != shown:
        raise SystemExit(f"{path} holds runs of other settings: {record['settings']}; remove it")
    known = {(r["variant"], r["epsilon"], r["seed"]) for r in record["runs"]}
    for run in plan(seeds, epsilons):
        if (run["variant"], run["epsilon"], run["seed"]) in known:
            continue
        with tempfile.TemporaryDirectory() as folder:
            os.environ["HFEDATM_STATE"] = f"{folder}/state"
            own = {"seed": run["seed"], "output": folder, "run-name": "run"}
            if "server-rule" not in run["settings"]:
                own["rule-params"] = f"every={rounds}"
            run_locally({**given, **run["settings"], **own})
            last = read_rounds(Path(folder) / "run")[-1]
        record["runs"].append(
            {key: run[key] for key in ("variant", "epsilon", "seed")}
            | {
                "unseen": last.unseen_accuracy,
                "source": last.source_accuracy,
                "spent": last.privacy.epsilon if last.privacy else 0.0,
                "failures": len(last.failures),
            }
        )
        path.write_text(json.dumps(record, indent=1) + "\n")


def mean_and_error(values: list[float]) -> tuple[float, float]:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), error


def summary(record: dict[str, Any]) -> dict[str, dict[float | None, tuple[float, float]]]:
    """Mean and standard error of the unseen accuracy, by variant and epsilon."""
    found: dict[str, dict[float | None, list[float]]] = {}
    for run in record["runs"]:
        found.setdefault(run["variant"], {}).setdefault(run["epsilon"], []).append(run["unseen"])
    return {v: {e: mean_and_error(x) for e, x in by.items()} for v, by in found.items()}


def table(record: dict[str, Any]) -> str:
    means = summary(record)

    def cell(variant: str, epsilon: float | None) -> str:
        mean, error = means[variant][epsilon]
        return f"{100 * mean:.1f} ± {100 * error:.1f}"

    lines = ["| ε | " + " | ".join(VARIANTS) + " |", "|---|" + "---|" * len(VARIANTS)]
    lines.append("| ∞ |" + f" {cell('no noise', None)} |" * len(VARIANTS))
    for epsilon in sorted({e for v in VARIANTS for e in means.get(v, {})}, reverse=True):
        cells = [cell(v, epsilon) if epsilon in means.get(v, {}) else "-" for v in VARIANTS]
        lines.append(f"| {epsilon:g} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, f"\nAveraging, without Grams: {cell('averaging', None)} %"])


def draw(record: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    means = summary(record)
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name, style in (("no noise", "-"), ("averaging", ":")):
        mean, error = means[name][None]
        axes.axhline(100 * mean, color="0.35", linestyle=style, linewidth=1, label=name)
        axes.axhspan(100 * (mean - error), 100 * (mean + error), color="0.35", alpha=0.12)
    for variant, (colour, style) in LOOKS.items():
        by = sorted((e, *m) for e, m in means.get(variant, {}).items() if e)
        axes.errorbar(
            [e for e, *_ in by],
            [100 * m for _, m, _ in by],
            [100 * s for *_, s in by],
            fmt=style,
            color=colour,
            label=variant,
            capsize=3,
        )
    axes.set(xscale="log", xlabel="ε of the whole run (δ = 1e-5)")
    axes.set_ylabel("unseen-domain accuracy, %")
    axes.set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--name", default="digits")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--folder", type=Path, default=ASSETS)
    parser.add_argument("--draw", action="store_true", help="only draw what is there")
    parser.add_argument("assignments", nargs="*", metavar="KEY=VALUE")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    path = chosen.folder / f"privacy-{chosen.name}.json"
    if not chosen.draw:
        measure(path, chosen.seeds, tuple(chosen.epsilons), chosen.assignments)
    record = json.loads(path.read_text())
    draw(record, path.with_suffix(".png"))
    print(table(record))


if __name__ == "__main__":
    main()
