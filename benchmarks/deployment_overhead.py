"""How much of a deployed round is not training: three tiers of processes against one process.

    python benchmarks/deployment_overhead.py [--rounds 3] [--against CHECKOUT]

The work of a round is what it takes in process (`hfedatm run`), clients one after another. The
first deployed round also starts the station runs and what the nodes fork from; the figure is the
median of the later ones. ``--against`` measures an older checkout of this repository, too, after
the present one, with the same Python. Prints the figures and writes
``results/deployment_overhead.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hfedatm.results import read_rounds

HFEDATM = str(Path(sys.executable).with_name("hfedatm"))
PROJECT = Path(__file__).resolve().parents[1]
SETTINGS = ["stations=2", "clients-per-station=2", "station-rounds=2", "local-epochs=5"]


def seconds(folder: Path) -> list[float]:
    return [record["seconds"] for record in read_rounds(folder)]


def measure(code: Path, rounds: int, first_port: int) -> dict[str, Any]:
    """Return the figures of one checkout."""
    load = os.getloadavg()[0]
    environment = os.environ | {"PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}

    def hfedatm(*given: str) -> None:
        subprocess.run([HFEDATM, *given], check=True, cwd=code, env=environment)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = [*SETTINGS, f"rounds={rounds}", f"output={folder}"]
        state = ["--folder", str(folder / "state")]
        hfedatm("run", *given, "run-name=here")
        try:
            hfedatm("up", "--stations=2", "--clients=2", f"--first-port={first_port}", *state)
            hfedatm("submit", *given, "run-name=there", *state)
        finally:
            hfedatm("down", *state)
        here, there = seconds(folder / "here"), seconds(folder / "there")
    work, whole = statistics.median(here[1:]), statistics.median(there[1:])
    return {
        "in_process_round_seconds": work,
        "deployed_first_round_seconds": there[0],
        "deployed_round_seconds": whole,
        "share_not_training": 1 - work / whole,
        "overhead_seconds": whole - work,
        "load_before": load,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first-port", type=int, default=9500)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # not without `hfedatm down`
    result = {"settings": SETTINGS, "cores": os.cpu_count()}
    result["now"] = measure(PROJECT, chosen.rounds, chosen.first_port)
    if chosen.against:
        checkout = chosen.against.resolve()
        commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=checkout)
        before = measure(checkout, chosen.rounds, chosen.first_port + 100)
        result["before"] = {"commit": commit.decode().strip(), **before}
    print(json.dumps(result, indent=2))
    target = Path(__file__).parent / "results" / "deployment_overhead.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
