"""Fuzz everything that others send: ``python tests/fuzz/fuzz.py [mutations] [seed]``.

Each target gets its share of the mutations. An input that breaks something is kept in ``cases``
and is tried by every run of the tests ever after.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).parent
CASES = HERE / "cases"
sys.path[:0] = [path for path in (str(HERE), str(HERE.parent)) if path not in sys.path]
LONGEST = 20.0
"""Seconds that one input may take; most take a few thousandths."""
SHARES = {  # how many of the mutations go to a target; 1 unless it is here
    "client: train, with Grams": 4,
    "client: train, with profiles": 0.3,
    "parcels": 6,
    "query": 3,
    "node memory": 2,
    "results: rounds.jsonl": 2,
    "results: config.json": 2,
    "results: rounds.jsonl, report": 0.02,
    "results: diagnostics/round-00002.npz, report": 0.1,
    "secure sum: keys": 0.06,
    "secure sum: share": 0.06,
    "secure sum: check": 0.06,
    "secure sum: mask": 0.06,
    "secure sum: sign": 0.06,
    "secure sum: reveal": 0.06,
}


def all_targets(folder: Path) -> dict[str, Any]:
    """Return the targets by name; each tries honest input when it is made."""
    from fuzz_adapters import make_adapter_targets
    from fuzz_counts import make_count_targets
    from fuzz_files import make_file_targets
    from fuzz_maps import Maps
    from fuzz_refining import make_refining_targets
    from fuzz_secure import make_secure_targets
    from fuzz_targets import make_targets
    from fuzz_tiers import make_tier_targets

    found = [*make_targets(), *make_file_targets(folder), *make_secure_targets(), Maps()]
    found += [*make_tier_targets(), *make_refining_targets(), *make_adapter_targets()]
    found += make_count_targets()
    return {target.name: target for target in found}


def divide(mutations: int, targets: dict[str, Any]) -> dict[str, int]:
    """Return how many mutations each target gets."""
    shares = {name: SHARES.get(name, 1.0) for name in targets}
    total = sum(shares.values())
    counts = {name: max(1, round(mutations * share / total)) for name, share in shares.items()}
    counts["parcels"] += mutations - sum(counts.values())
    return counts


def attack(target: Any, count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Spoil so many inputs for a target; return what became of them, and what broke."""
    outcomes: Counter[str] = Counter()
    broken = []
    for number in range(count):
        given = target.make(Random(f"{target.name}/{seed}/{number}"))
        started = time.process_time()  # the load of other processes does not count
        try:
            outcomes[target.check(given)] += 1
            took = time.process_time() - started
            assert took < LONGEST, f"it took {took:.0f} s"
        except (Exception, SystemExit):
            outcomes["CRASHED"] += 1
            kept = keep(target.name, given, f"{seed}-{number}")
            broken.append(f"{kept}\n{traceback.format_exc(limit=-5)}")
    return outcomes, broken


def keep(target: str, given: Any, number: str) -> str:
    """Keep an input that broke something; one that no file can hold is kept as its seed."""
    from flwr.app import RecordDict

    from hfedatm.base.handover import recordfile

    slug = re.sub(r"\W+", "-", target)
    CASES.mkdir(exist_ok=True)
    if isinstance(given, bytes):
        (CASES / f"{slug}--{number}.bytes").write_bytes(given)
    elif isinstance(given, RecordDict):
        try:
            (CASES / f"{slug}--{number}.records").write_bytes(recordfile.to_bytes(given))
        except (TypeError, ValueError):
            (CASES / f"{slug}--{number}.seed").touch()
    else:
        (CASES / f"{slug}--{number}.seed").touch()
    return f"{target}, {number}"


def kept_cases(targets: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, target and input of everything that ever broke something."""
    from hfedatm.base.handover import recordfile

    slugs = {re.sub(r"\W+", "-", name): target for name, target in targets.items()}
    for path in sorted(CASES.glob("*--*")):
        slug, _, number = path.stem.partition("--")
        target = slugs[slug]
        if path.suffix == ".bytes":
            yield path.name, target, path.read_bytes()
        elif path.suffix == ".records":
            yield path.name, target, recordfile.load(path)
        elif path.suffix == ".seed":
            yield (
                path.name,
                target,
                target.make(Random(f"{target.name}/{number.replace('-', '/')}")),
            )


_TARGETS: dict[str, Any] = {}
"""The targets of a worker process."""


def _prepare() -> None:
    """Make the targets of a worker process, which keeps its files to itself."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    os.environ["HFEDATM_STATE"] = f"{folder.name}/state"
    os.environ["XDG_CONFIG_HOME"] = f"{folder.name}/config"
    _TARGETS.update(all_targets(Path(folder.name)))


def _divided(mutations: int) -> dict[str, int]:
    return divide(mutations, _TARGETS)


def _attacked(name: str, count: int, seed: int) -> tuple[str, list[str]]:
    """Attack one target; return a line about it, and what broke."""
    started = time.perf_counter()
    outcomes, broken = attack(_TARGETS[name], count, seed)
    said = ", ".join(f"{number} {what}" for what, number in sorted(outcomes.items()))
    return f"{name:<46} {count:>6}  {said}  ({time.perf_counter() - started:.0f} s)", broken


def main(mutations: int, seed: int) -> int:
    """Fuzz all targets, as many at a time as there are cores, and print a line for each."""
    crashes = 0
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn, initializer=_prepare) as workers:
        counts = workers.submit(_divided, mutations).result()
        # The long ones first, so that no core is idle at the end.
        names = sorted(counts, key=lambda name: -counts[name])
        jobs = [workers.submit(_attacked, name, counts[name], seed) for name in names]
        for job in as_completed(jobs):
            line, broken = job.result()
            crashes += len(broken)
            for text in (line, *broken[:3]):
                print(text, flush=True)
    print(f"{mutations} mutations, {crashes} crashes")
    return 1 if crashes else 0


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    sys.exit(main(*(given + [50_000, 0][len(given) :])))
