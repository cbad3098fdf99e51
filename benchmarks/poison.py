r"""What one hostile node of ten clients, or of five stations, does to the model.

    python benchmarks/poison.py --dataset digits                  # 40 minutes of one core
    python benchmarks/poison.py --dataset amazon-features --data-dir ~/data
    python benchmarks/poison.py --dataset digits --table          # only the table again

Every attack of ``attacks.py`` is made by one client of ten (2 stations x 5 clients) and by one
station of five (5 x 2), against the defences that are on by default and with a robust rule on top.
A run is compared with the run of the same seed in which that node does not take part; source
accuracy is that of the other nodes' examples in both. ``honest`` compares default defences with
none at all when nobody lies. Constants were chosen on seeds 10 to 12; reported are 0 to 2.
``benchmarks/results/poison-<dataset>.json`` grows as runs end, and runs that are in it are not
repeated; the table goes into ``docs/security.md``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attacks import ABSENT, ATTACKS, HONEST, hostile
from measure import RESULTS, set_threads

PAGE = Path(__file__).parent.parent / "docs" / "security.md"
SHAPES: dict[str, dict[str, Any]] = {
    "client": {"stations": 2, "clients-per-station": 5},
    "station": {"stations": 5, "clients-per-station": 2},
}
DATA: dict[str, dict[str, Any]] = {
    "digits": {"dataset": "digits", "rounds": 5, "local-epochs": 3},
    "amazon-features": {
        "preset": "amazon-features-mlp",
        "rounds": 5,
        "local-epochs": 2,
        "dataset": "amazon-features",
    },
    "digits4": {"preset": "digits4-lenet5", "rounds": 4, "local-epochs": 1},
}
OFF = {"bound-factor": 0, "claim-factor": 0, "least-agreement": 0, "max-fall": 0}
ROBUST = "geometric-median"
DEFENCES: dict[str, dict[str, Any]] = {
    "none": OFF,
    "default": {},
    "robust": {"robust-clients": ROBUST, "robust-stations": ROBUST},
}
LIMITS = {"default": 5.0, "robust": 2.0}
HONEST_LIMIT = 0.5
Key = tuple[str, str, str, int]


def plan(seeds: Sequence[int], attacks: Sequence[str], undefended: bool) -> Iterator[Key]:
    """Yield tier, defence, attack and seed of every run, what others are compared with first."""
    for seed in seeds:
        for tier in SHAPES:
            yield tier, "default", ABSENT, seed
            for defence in ("default", "none"):
                yield tier, defence, HONEST, seed
            for defence in ("default", "robust", *(("none",) if undefended else ())):
                for attack in attacks:
                    yield tier, defence, attack, seed


def run_one(key: Key, given: dict[str, Any]) -> dict[str, Any]:
    """Return how a run ended."""
    from hfedatm.base.results import read_rounds
    from hfedatm.runtime.local import run_locally

    tier, defence, attack, seed = key
    settings = {**given, **SHAPES[tier], **DEFENCES[defence], "seed": seed, "diagnostics": False}
    started, error = time.perf_counter(), ""
    with tempfile.TemporaryDirectory() as folder, hostile(attack, tier):  # type: ignore[arg-type]
        os.environ["HFEDATM_STATE"] = f"{folder}/state"
        logging.disable(logging.CRITICAL)
        try:
            run_locally({**settings, "output": folder, "run-name": "run"})
        except Exception as raised:  # a run that does not end is a result, too
            error = f"{type(raised).__name__}: {raised}"[:200]
        finally:
            logging.disable(logging.NOTSET)
        rounds = read_rounds(Path(folder) / "run")
    last = rounds[-1] if rounds else {}
    return {
        **dict(zip(("tier", "defence", "attack", "seed"), key, strict=True)),
        "ended": not error and len(rounds) == int(given["rounds"]),
        "error": error,
        "unseen": last.get("unseen", {}).get("accuracy", 0.0),
        "source": last.get("source", {}).get("accuracy", 0.0),
        "taken_back": sum("taken_back" in r for r in rounds),
        "kept": sum("kept" in r for r in rounds),
        "seconds": round(time.perf_counter() - started, 1),
    }


def measure(path: Path, keys: Sequence[Key], given: dict[str, Any]) -> dict[str, Any]:
    """Do the runs that are not in the file yet."""
    shown = {name: value for name, value in given.items() if name not in ("data-dir", "dataset")}
    shown |= {"dataset": given["dataset"], "robust": ROBUST}
    record = json.loads(path.read_text()) if path.is_file() else {"settings": shown, "runs": []}
    if record["settings"] != shown:
        raise SystemExit(f"{path} holds runs of other settings: {record['settings']}; remove it")
    known = {(r["tier"], r["defence"], r["attack"], r["seed"]) for r in record["runs"]}
    for key in keys:
        if key in known:
            continue
        found = run_one(key, given)
        record["runs"].append(found)
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(
            f"{key[0]:8} {key[1]:8} seed {key[3]:<3} {key[2]:30} "
            f"unseen {100 * found['unseen']:.1f} "
            f"source {100 * found['source']:.1f} in {found['seconds']:.0f} s {found['error']}",
            flush=True,
        )
    return record


def fall(runs: list[dict[str, Any]], key: tuple[str, str, str], score: str) -> float | None:
    """Return by how many points a score is below that of the run without the node, on average."""
    tier, defence, attack = key
    base = {
        r["seed"]: r[score]
        for r in runs
        if (r["tier"], r["defence"], r["attack"]) == (tier, "default", ABSENT)
    }
    falls = [
        100 * (base[r["seed"]] - r[score])
        for r in runs
        if (r["tier"], r["defence"], r["attack"]) == (tier, defence, attack) and r["seed"] in base
    ]
    return statistics.fmean(falls) if falls else None


def table(record: dict[str, Any]) -> str:
    """Return the Markdown table: points lost against the run without the node, and misses."""
    runs = record["runs"]
    seeds = sorted({r["seed"] for r in runs if r["attack"] in ATTACKS})
    honest_seeds = sorted({r["seed"] for r in runs if r["attack"] == HONEST})
    shown = [
        d
        for d in ("none", *LIMITS)
        if any(r["defence"] == d and r["attack"] in ATTACKS for r in runs)
    ]
    head = [f"{t}, {d}" for t in SHAPES for d in shown]
    lines = ["| attack by one | " + " | ".join(head) + " |", "|---|" + "---|" * len(head)]
    misses = []
    for attack in ATTACKS:
        cells = []
        for tier in SHAPES:
            for defence in shown:
                own = [
                    r
                    for r in runs
                    if (r["tier"], r["defence"], r["attack"]) == (tier, defence, attack)
                ]
                if not own:
                    cells.append("–")
                    continue
                unseen, source = (
                    fall(runs, (tier, defence, attack), s) for s in ("unseen", "source")
                )
                assert unseen is not None and source is not None
                broken = sum(not r["ended"] for r in own)
                cell = f"{0 - unseen:+.1f} / {0 - source:+.1f}"
                if broken:
                    cell += f", {broken} not ended"
                if defence in LIMITS and (broken or max(unseen, source) > LIMITS[defence]):
                    cell = f"**{cell}** miss"
                    misses.append(f"{attack} by one {tier}, {defence}")
                cells.append(cell)
        lines.append(f"| {attack} | " + " | ".join(cells) + " |")
    cost = [_honest(runs, tier, score) for tier in SHAPES for score in ("unseen", "source")]
    if all(c is not None for c in cost):
        mean = statistics.fmean(c for c in cost if c is not None)
        verdict = "reached" if mean <= HONEST_LIMIT else "**missed**"
        lines += [
            "",
            "Nobody lies, default defences against none, seeds "
            + ", ".join(map(str, honest_seeds))
            + ": "
            + ", ".join(
                f"{score} of {SHAPES[tier]['stations']} x {SHAPES[tier]['clients-per-station']} "
                f"{0 - c:+.1f}"
                for (tier, score), c in zip(
                    ((t, s) for t in SHAPES for s in ("unseen", "source")), cost, strict=True
                )
                if c is not None
            )
            + f"; on average {0 - mean:+.2f} points (at most −{HONEST_LIMIT}: {verdict}).",
        ]
    base = [r for r in runs if r["attack"] == ABSENT and r["seed"] in seeds]
    lines += [
        "",
        f"{record['settings']['dataset']}, seeds {', '.join(map(str, seeds))}, λ = 0, "
        f"{record['settings']['rounds']} rounds. Points of unseen / source accuracy against the "
        "run without the node "
        + (
            f"({100 * statistics.fmean(r['unseen'] for r in base):.1f} / "
            f"{100 * statistics.fmean(r['source'] for r in base):.1f} %)"
            if base
            else ""
        )
        + f"; robust is {record['settings']['robust']} at both tiers. "
        + f"Misses (more than {LIMITS['default']:g} and {LIMITS['robust']:g} points): "
        + (f"{len(misses)}: " + "; ".join(misses) if misses else "none")
        + ".",
    ]
    return "\n".join(lines)


def _honest(runs: list[dict[str, Any]], tier: str, score: str) -> float | None:
    by = {
        (r["defence"], r["seed"]): r[score]
        for r in runs
        if r["tier"] == tier and r["attack"] == HONEST
    }
    pairs = [
        100 * (by["none", s] - by["default", s])
        for d, s in by
        if d == "default" and ("none", s) in by
    ]
    return statistics.fmean(pairs) if pairs else None


def write_page(text: str, dataset: str, page: Path = PAGE) -> None:
    """Put the table between its two marks."""
    begin, end = f"<!-- table: benchmarks/poison.py {dataset} -->", "<!-- end of table -->"
    content = page.read_text(encoding="utf-8")
    if begin not in content:
        print(f"{page.name} has no place for it: {begin}")
        return
    before, rest = content.split(begin)
    _, after = rest.split(end, 1)
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dataset", choices=sorted(DATA), default="digits")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--attacks", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--undefended", action="store_true", help="also without any defence")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--quick", action="store_true", help="tiny runs: does it work at all?")
    chosen = parser.parse_args(given)
    set_threads(1)
    settings = {**DATA[chosen.dataset], "device": "cpu"}
    if chosen.data_dir:
        settings["data-dir"] = chosen.data_dir
    seeds, attacks = chosen.seeds, chosen.attacks
    if chosen.quick:
        settings |= {"rounds": 1, "local-epochs": 1, "station-rounds": 1}
        seeds, attacks = seeds[:1], attacks[:2]
    chosen.folder.mkdir(parents=True, exist_ok=True)
    path = chosen.folder / f"poison-{chosen.dataset}.json"
    keys = [] if chosen.table else list(plan(seeds, attacks, chosen.undefended))
    text = table(measure(path, keys, settings))
    print(text)
    if chosen.folder == RESULTS and not chosen.quick:
        write_page(text, chosen.dataset)


if __name__ == "__main__":
    main()
