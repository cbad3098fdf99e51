r"""Accuracy on the unseen domain against the privacy budget of the whole run.

    python benchmarks/privacy_accuracy.py rounds=5 local-epochs=2 evaluate-every=5 \
        gram-dtype=float32
    python benchmarks/privacy_accuracy.py --name pacs --seeds 1 preset=pacs-lenet5-small \
        data-dir=~/data rounds=6 local-epochs=1 lr=0.05 evaluate-every=6
    python benchmarks/privacy_accuracy.py --name digits4 --first-seed 3 --seeds 1 \
        --epsilons 8 4 2 1 --targets mnist mnistm usps --variant "secure-aggregated noise" \
        preset=digits4-lenet5 data-dir=~/data stations=3 clients-per-station=10 rounds=1 \
        station-rounds=1 local-epochs=4 secure-aggregation=true
    python benchmarks/privacy_accuracy.py --draw                           # draw again

The noise on the Grams is at example level. It is either added in full by every client (local) or
shared out among the clients of a secure sum. Grams are released in the last round only (``every``
of the rule): training goes on from the mean, which needs no Grams, so the whole budget is left for
the one merge that is kept. Two runs without noise bound the results: RegMean at epsilon = infinity,
and plain averaging, which needs no Grams and so spends nothing. All runs use the same seeds.
Noise on Grams changes no training, so a client trains a model once and later runs take the result.
``docs/assets/privacy-<name>.json`` holds the numbers and grows as runs end; runs that it already
holds are not repeated. ``docs/assets/privacy-<name>.png`` is the picture.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from client_app.training import train_locally
from hfedatm.reproduce.statistics import Estimate, estimate, paired_p, significant

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


def plan(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the runs, those of one training together."""
    runs = []
    for seed in range(chosen.first_seed, chosen.first_seed + chosen.seeds):
        for target in chosen.targets or [None]:
            place = {"seed": seed} | ({"target": target} if target else {})
            for name, settings in FRAME.items():
                runs.append({"variant": name, "epsilon": None, **place, "settings": settings})
            for epsilon in chosen.epsilons:
                for name in chosen.variant or VARIANTS:
                    own = VARIANTS[name] | {"privacy.epsilon": epsilon}
                    runs.append({"variant": name, "epsilon": epsilon, **place, "settings": own})
    return runs


class TrainedOnce:
    """`train_locally`, which trains a client from the same model and seed once."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[dict[str, torch.Tensor], float]] = {}

    def __call__(
        self, model: nn.Module, method: Any, batches: Any, settings: Any, lr: float
    ) -> float:
        """Train the model, or give it the weights that it had after the same training."""
        # A client seeds torch from the run's seed, its number and the round before it trains.
        place = (torch.initial_seed(), settings.target_domain, settings.lam, lr)
        digest = hashlib.sha256(repr(place).encode())
        for tensor in model.state_dict().values():
            digest.update(tensor.numpy().tobytes())
        key = digest.hexdigest()
        if key not in self._kept:
            loss = train_locally(model, method, batches, settings, lr)
            self._kept[key] = ({n: t.clone() for n, t in model.state_dict().items()}, loss)
        state, loss = self._kept[key]
        model.load_state_dict(state)
        return loss


def measure(path: Path, chosen: argparse.Namespace) -> None:
    from hfedatm.base.resolving import resolve
    from hfedatm.base.results import read_rounds
    from hfedatm.cli.run import read_settings
    from hfedatm.runtime.local import run_locally

    # Both kinds of noise weigh clients by examples, because shared noise requires it.
    given = {"gram-weights": "examples", "diagnostics": False}
    given |= read_settings(None, chosen.assignments)
    settings = resolve(given)
    if settings.dp_sgd or settings.train_fn or settings.client_method != "fedavg":
        raise SystemExit("a client's training is taken over from run to run: FedAvg, no DP-SGD")
    shown = {key: value for key, value in given.items() if key != "data-dir"}
    record = json.loads(path.read_text()) if path.is_file() else {"settings": shown, "runs": []}
    if record["settings"] != shown:
        raise SystemExit(f"{path} holds runs of other settings: {record['settings']}; remove it")
    known = {name_of(run) for run in record["runs"]}
    place, trained = None, TrainedOnce()
    for run in plan(chosen):
        if name_of(run) in known:
            continue
        if place != place_of(run):
            place, trained = place_of(run), TrainedOnce()
        with (
            tempfile.TemporaryDirectory() as folder,
            patch("client_app.client.train_locally", trained),
        ):
            os.environ["HFEDATM_STATE"] = f"{folder}/state"
            own = {"seed": run["seed"], "output": folder, "run-name": "run"}
            if "server-rule" not in run["settings"]:
                own["rule-params"] = f"every={settings.rounds}"
            if "target" in run:
                own["target-domain"] = run["target"]
            run_locally({**given, **run["settings"], **own})
            last = read_rounds(Path(folder) / "run")[-1]
        record["runs"].append(
            {key: value for key, value in run.items() if key != "settings"}
            | {
                "unseen": last.unseen_accuracy,
                "source": last.source_accuracy,
                "spent": last.privacy.epsilon if last.privacy else 0.0,
                "failures": len(last.failures),
            }
        )
        path.write_text(json.dumps(record, indent=1) + "\n")


def name_of(run: dict[str, Any]) -> tuple[Any, ...]:
    return run["variant"], run["epsilon"], *place_of(run)


def place_of(run: dict[str, Any]) -> tuple[Any, ...]:
    return run["seed"], run.get("target")


class Figures:
    """The accuracies in percent of a record, by variant and epsilon."""

    def __init__(self, record: dict[str, Any], measure: str = "unseen") -> None:
        self._values: dict[tuple[str, float | None], dict[tuple[Any, ...], float]] = {}
        for run in record["runs"]:
            by_place = self._values.setdefault((run["variant"], run["epsilon"]), {})
            by_place[place_of(run)] = 100 * run[measure]
        self.epsilons = sorted({e for _, e in self._values if e is not None}, reverse=True)
        self.variants = [v for v in VARIANTS if any(v == name for name, _ in self._values)]

    def mean(self, variant: str, epsilon: float | None) -> Estimate | None:
        """Return the mean over targets, with the standard error over seeds."""
        by_seed: dict[int, list[float]] = {}
        for (seed, _), value in self._values.get((variant, epsilon), {}).items():
            by_seed.setdefault(seed, []).append(value)
        return estimate([sum(values) / len(values) for values in by_seed.values()])

    def gain(self, variant: str, epsilon: float | None) -> tuple[list[float], list[float]]:
        """Return the accuracies and those of averaging, paired over seeds and targets."""
        ours = self._values.get((variant, epsilon), {})
        theirs = self._values["averaging", None]
        places = sorted(ours.keys() & theirs.keys(), key=str)
        return [ours[p] for p in places], [theirs[p] for p in places]


def table(record: dict[str, Any]) -> str:
    """Return accuracy and gain over averaging by epsilon; a star is significant (Holm)."""
    found = Figures(record)
    rows = [(None, "no noise"), *((e, v) for e in found.epsilons for v in found.variants)]
    tested = {f"{v} {e}": paired_p(*found.gain(v, e)) for e, v in rows}
    marked = significant(tested)
    lines = ["| ε | noise | unseen domain | HFedATM − averaging |", "|---|---|---:|---:|"]
    for epsilon, variant in rows:
        ours, theirs = found.gain(variant, epsilon)
        gain = estimate([a - b for a, b in zip(ours, theirs, strict=True)])
        star = "*" if f"{variant} {epsilon}" in marked else ""
        shown = "∞" if epsilon is None else f"{epsilon:g}"
        mean = text(found.mean(variant, epsilon))
        lines.append(f"| {shown} | {variant} | {mean} | {text(gain, '+')}{star} |")
    lines.append(f"| – | averaging, no Grams | {text(found.mean('averaging', None))} | |")
    return "\n".join(lines)


def text(found: Estimate | None, sign: str = "") -> str:
    if found is None:
        return "–"
    error = "" if found.error is None else f" ± {found.error:.1f}"
    return f"{found.mean:{sign}.1f}{error}"


def draw(record: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = Figures(record)
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name, style in (("no noise", "-"), ("averaging", ":")):
        line = found.mean(name, None)
        if line is None:
            continue
        error = line.error or 0.0
        axes.axhline(line.mean, color="0.35", linestyle=style, linewidth=1, label=name)
        axes.axhspan(line.mean - error, line.mean + error, color="0.35", alpha=0.12)
    for variant in found.variants:
        colour, style = LOOKS[variant]
        by = [(e, m) for e in found.epsilons if (m := found.mean(variant, e))]
        axes.errorbar(
            [e for e, _ in by],
            [m.mean for _, m in by],
            [m.error or 0.0 for _, m in by],
            fmt=style,
            color=colour,
            label=variant,
            capsize=3,
        )
    axes.set(xscale="log", xlabel="ε of the whole run (δ = 1e-5)")
    axes.set_ylabel("unseen-domain accuracy, %")
    axes.set_xticks(found.epsilons, [f"{e:g}" for e in found.epsilons])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=160)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--name", default="digits")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--targets", nargs="+", default=[], help="unseen domains, each in turn")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="only this noise")
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--folder", type=Path, default=ASSETS)
    parser.add_argument("--draw", action="store_true", help="only draw what is there")
    parser.add_argument("assignments", nargs="*", metavar="KEY=VALUE")
    chosen = parser.parse_intermixed_args(given)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    path = chosen.folder / f"privacy-{chosen.name}.json"
    if not chosen.draw:
        measure(path, chosen)
    record = json.loads(path.read_text())
    draw(record, path.with_suffix(".png"))
    print(table(record))


if __name__ == "__main__":
    main()
