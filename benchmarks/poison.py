r"""The damage that one hostile node of ten clients, or of five stations, does to the model.

    python benchmarks/poison.py --dataset digits                  # 40 minutes of one core
    python benchmarks/poison.py --dataset amazon-features --data-dir ~/data
    python benchmarks/poison.py --dataset digits-sgd --attacks    # nobody lies, default optimiser
    python benchmarks/poison.py --dataset digits --table          # only the table again

Every attack of ``attacks.py`` is made by one client of ten (2 stations x 5 clients) and by one
station of five (5 x 2), against the defences that are on by default and with a robust rule on top;
a few also without any defence, with the first seed, to show what the defences are for. A run is
compared with the run of the same seed in which that node does not take part; source accuracy is
measured on the other nodes' examples in both. ``honest`` compares the default defences with none at
all when nobody lies. Most examples are held out, so that one example is far less than a tenth of a
point: on digits every angle shows all images, and clients train on a part of them.

Constants were chosen on seeds 10 to 12; seeds 20 to 22 are reported.
``benchmarks/results/poison-<dataset>.json`` grows as runs end; it holds runs of one state of the
code only, and runs that it already holds are not repeated. Answers that a client has already given
are not computed again (``replay.py``), so the seconds of a run say little. The table goes into
``docs/security.md``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacks import ABSENT, ATTACKS, HONEST, hostile
from measure import RESULTS, set_threads
from replay import Replies, replaying

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "security.md"
SHAPES: dict[str, dict[str, Any]] = {
    "client": {"stations": 2, "clients-per-station": 5},
    "station": {"stations": 5, "clients-per-station": 2},
}
DATA: dict[str, dict[str, Any]] = {
    "digits": {
        "dataset": "digits",
        "dataset-params": "images=all",
        "validation-fraction": 0.7,
        "rounds": 4,
        "local-epochs": 2,
        "batch-size": 32,
        "optimizer": "adamw",
        "lr": 0.005,
    },
    "digits-sgd": {
        "dataset": "digits",
        "dataset-params": "images=all",
        "validation-fraction": 0.7,
        "rounds": 5,
        "local-epochs": 2,
        "batch-size": 32,
        "lr": 0.1,
    },
    "amazon-features": {
        "preset": "amazon-features-mlp",
        "dataset": "amazon-features",
        "validation-fraction": 0.3,
        "rounds": 4,
        "local-epochs": 2,
    },
}
OFF = {"bound-factor": 0, "claim-factor": 0, "least-agreement": 0, "max-fall": 0}
ROBUST = "record"
DEFENCES: dict[str, dict[str, Any]] = {
    "none": OFF,
    "default": {},
    "robust": {"robust-clients": ROBUST, "robust-stations": ROBUST},
}
LIMITS = {"default": 5.0, "robust": 2.0}
HONEST_LIMIT = 0.5
UNDEFENDED = (
    "update × −10",
    "noise",
    "sign flip",
    "claim at the limit, sign flip",
    "Gram × 1e6, sign flip",
)
CODE = (
    "hfedatm_core",
    "hfedatm",
    "server_app",
    "station_app",
    "client_app",
    "benchmarks/attacks.py",
)
SCORES = ("unseen", "source")
Key = tuple[str, str, str, int]


def plan(seeds: Sequence[int], attacks: Sequence[str]) -> Iterator[Key]:
    """Yield tier, defence, attack and seed of every run, starting with the runs to compare with."""
    for seed in seeds:
        for tier in SHAPES:
            yield tier, "default", ABSENT, seed
            for defence in ("default", "none"):
                yield tier, defence, HONEST, seed
            for attack in attacks:
                yield tier, "default", attack, seed
                yield tier, "robust", attack, seed
                if seed == seeds[0] and attack in UNDEFENDED:
                    yield tier, "none", attack, seed


def code_digest() -> str:
    """Return the SHA-256 of all code that a run executes, so that versions are never mixed."""
    digest = hashlib.sha256()
    files = [ROOT / "benchmarks" / "attacks.py"]
    for package in CODE:
        files += sorted((ROOT / package).rglob("*.py"))
    for file in files:
        digest.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def run_one(key: Key, given: dict[str, Any], replies: Replies | None = None) -> dict[str, Any]:
    """Return how a run ended; clients reuse answers that they gave in another run."""
    from hfedatm.base.results import read_rounds
    from hfedatm.runtime.local import run_locally

    tier, defence, attack, seed = key
    settings = {**given, **SHAPES[tier], **DEFENCES[defence], "seed": seed, "diagnostics": False}
    started, error = time.perf_counter(), ""
    known = (replies or Replies()).of(f"{tier}/{seed}")
    of_node = range(SHAPES["station"]["clients-per-station"]) if tier == "station" else range(1)
    notes = dict.fromkeys(of_node, attack) if attack == "label flip" else {}
    with (
        tempfile.TemporaryDirectory() as folder,
        replaying(known, notes),
        hostile(attack, tier),  # type: ignore[arg-type]
    ):
        os.environ["HFEDATM_STATE"] = f"{folder}/state"
        logging.disable(logging.CRITICAL)
        try:
            run_locally({**settings, "output": folder, "run-name": "run"})
        except Exception as raised:  # a run that does not end is a result, too
            error = f"{type(raised).__name__}: {raised}"[:200]
        finally:
            logging.disable(logging.NOTSET)
        rounds = read_rounds(Path(folder) / "run")
    last = rounds[-1] if rounds else None
    return {
        **dict(zip(("tier", "defence", "attack", "seed"), key, strict=True)),
        "ended": not error and len(rounds) == int(given["rounds"]),
        "error": error,
        "unseen": (last and last.unseen_accuracy) or 0.0,
        "source": (last and last.source_accuracy) or 0.0,
        "taken_back": sum(bool(r.taken_back) for r in rounds),
        "kept": sum(bool(r.kept) for r in rounds),
        "seconds": round(time.perf_counter() - started, 1),
    }


def measure(path: Path, keys: Sequence[Key], given: dict[str, Any]) -> dict[str, Any]:
    """Do the runs that are not in the file yet."""
    shown = {name: value for name, value in given.items() if name != "data-dir"}
    shown |= {"robust": ROBUST}
    new: dict[str, Any] = {
        "code": code_digest(),
        "settings": shown,
        "runs": [],
    }
    record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else new
    if keys and (record["settings"], record.get("code")) != (shown, new["code"]):
        raise SystemExit(f"{path} holds runs of other settings or of other code; remove it")
    known = {(r["tier"], r["defence"], r["attack"], r["seed"]) for r in record["runs"]}
    replies = Replies()
    for key in keys:
        if key in known:
            continue
        found = run_one(key, given, replies)
        record["runs"].append(found)
        path.write_text(_compact(record) + "\n", encoding="utf-8")
        print(
            f"{key[0]:8} {key[1]:8} seed {key[3]:<3} {key[2]:30} "
            f"unseen {100 * found['unseen']:.1f} "
            f"source {100 * found['source']:.1f} in {found['seconds']:.0f} s {found['error']}",
            flush=True,
        )
    return record


def _compact(record: dict[str, Any]) -> str:
    """Return the record as JSON with a line per run."""
    runs = ",\n".join(f"  {json.dumps(run, ensure_ascii=False)}" for run in record["runs"])
    rest = json.dumps({**record, "runs": []}, ensure_ascii=False, indent=1)
    return rest.replace('"runs": []', f'"runs": [\n{runs}\n ]')


# --- the table


@dataclass(frozen=True)
class Change:
    """Points by which scores differ from those of the runs they are compared with."""

    mean: float
    error: float
    """Standard error of the mean over the seeds; 0 of one seed."""

    def __str__(self) -> str:
        return f"{0 + round(self.mean, 1):+.1f}" + (f" ± {self.error:.1f}" if self.error else "")


def change(
    runs: list[dict[str, Any]], of: tuple[str, str, str], base: tuple[str, str, str], score: str
) -> Change | None:
    """Return how a score of some runs differs from that of other runs with the same seeds."""

    def by_seed(wanted: tuple[str, str, str]) -> dict[int, float]:
        chosen = (r for r in runs if (r["tier"], r["defence"], r["attack"]) == wanted)
        return {r["seed"]: 100 * r[score] for r in chosen}

    found, others = by_seed(of), by_seed(base)
    points = [found[seed] - others[seed] for seed in sorted(found.keys() & others.keys())]
    if not points:
        return None
    spread = statistics.stdev(points) / len(points) ** 0.5 if len(points) > 1 else 0.0
    return Change(statistics.fmean(points), spread)


def table(record: dict[str, Any]) -> str:
    """Return the Markdown table: points lost against the run without the node, and misses."""
    runs, settings = record["runs"], record["settings"]
    columns = [
        (tier, defence)
        for tier in SHAPES
        for defence in ("none", *LIMITS)
        if any(r["defence"] == defence and r["attack"] in ATTACKS for r in runs)
    ]
    if not columns:
        return "\n".join(_honest(runs))
    head = " | ".join(f"{tier}, {defence}" for tier, defence in columns)
    lines = [f"| attack by one | {head} |", "|---|" + "---|" * len(columns)]
    misses: list[str] = []
    for attack in ATTACKS:
        cells = [_cell(runs, tier, defence, attack, misses) for tier, defence in columns]
        lines.append(f"| {attack} | " + " | ".join(cells) + " |")
    lines += ["", *_honest(runs)]
    seeds = sorted({r["seed"] for r in runs if r["attack"] == ABSENT})
    base = [r for r in runs if r["attack"] == ABSENT]
    absent = " / ".join(f"{100 * statistics.fmean(r[s] for r in base):.1f}" for s in SCORES)
    present = [
        f"{change(runs, (tier, 'default', HONEST), (tier, 'default', ABSENT), 'unseen')} ({tier})"
        for tier in SHAPES
    ]
    lines += [
        "",
        "The same node, if it is honest, changes unseen accuracy by " + ", ".join(present) + ".",
        "",
        f"{settings['dataset']}, λ = 0, {settings['rounds']} rounds, seeds "
        f"{', '.join(map(str, seeds))} (none: the first one only), code "
        f"`{record['code']}`. Points "
        f"of unseen / source accuracy against the run without the node ({absent} %), mean and its "
        f"standard error; robust is {settings['robust']} at both tiers. Misses (more than "
        f"{LIMITS['default']:g} and {LIMITS['robust']:g} points): "
        + (f"{len(misses)}: " + "; ".join(misses) if misses else "none")
        + ".",
    ]
    return "\n".join(lines)


def _cell(
    runs: list[dict[str, Any]], tier: str, defence: str, attack: str, misses: list[str]
) -> str:
    key = tier, defence, attack
    found = [change(runs, key, (tier, "default", ABSENT), score) for score in SCORES]
    if None in found:
        return "–"
    text = " / ".join(str(one) for one in found)
    own = [r for r in runs if (r["tier"], r["defence"], r["attack"]) == key]
    if broken := sum(not r["ended"] for r in own):
        text += f", {broken} not ended"
    lost = max(-one.mean for one in found if one)
    if defence in LIMITS and (broken or lost > LIMITS[defence]):
        misses.append(f"{attack} by one {tier}, {defence}")
        return f"**{text}** miss"
    return text


def _honest(runs: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the cost of the default defences when nobody lies."""
    yield "| nobody lies, default against none | unseen | source |"
    yield "|---|---|---|"
    for tier, shape in SHAPES.items():
        cells = []
        for score in SCORES:
            one = change(runs, (tier, "default", HONEST), (tier, "none", HONEST), score)
            miss = one is not None and one.mean < -HONEST_LIMIT
            cells.append("–" if one is None else f"**{one}** miss" if miss else str(one))
        yield (
            f"| {shape['stations']} x {shape['clients-per-station']} | " + " | ".join(cells) + " |"
        )


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
    parser.add_argument("--seeds", type=int, nargs="+", default=[20, 21, 22])
    parser.add_argument("--attacks", nargs="*", choices=list(ATTACKS), default=list(ATTACKS))
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
    keys = [] if chosen.table else list(plan(seeds, attacks))
    text = table(measure(path, keys, settings))
    print(text)
    if chosen.folder == RESULTS and not chosen.quick:
        write_page(text, chosen.dataset)


if __name__ == "__main__":
    main()
