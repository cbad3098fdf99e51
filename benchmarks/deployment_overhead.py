"""How much of a deployed round is not training: three tiers of processes against one process.

    python benchmarks/deployment_overhead.py [--rounds 3]

The work of a round is what it takes in process (`hfedatm run`), clients one after another. The
first deployed round also starts the station runs and the clients' warm processes; the figure is the
median of the later ones. Prints the share and writes ``results/deployment_overhead.json``.
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

from hfedatm.results import read_rounds

HFEDATM = str(Path(sys.executable).with_name("hfedatm"))
SETTINGS = ["stations=2", "clients-per-station=2", "station-rounds=2", "local-epochs=1"]


def seconds(folder: Path) -> list[float]:
    return [record["seconds"] for record in read_rounds(folder)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first-port", type=int, default=9500)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # not without `hfedatm down`
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = [*SETTINGS, f"rounds={arguments.rounds}", f"output={folder}"]
        state = ["--folder", str(folder / "state")]
        subprocess.run([HFEDATM, "run", *given, "run-name=here"], check=True)
        ports = ["--first-port", str(arguments.first_port), "--patience", "900"]
        try:
            subprocess.run(
                [HFEDATM, "up", "--stations", "2", "--clients", "2", *ports, *state], check=True
            )
            subprocess.run([HFEDATM, "submit", *given, "run-name=there", *state], check=True)
        finally:
            subprocess.run([HFEDATM, "down", *state], check=True)
        work = statistics.median(seconds(folder / "here")[1:])
        rounds = seconds(folder / "there")
    round_seconds = statistics.median(rounds[1:])
    result = {
        "settings": SETTINGS,
        "in_process_round_seconds": work,
        "deployed_first_round_seconds": rounds[0],
        "deployed_round_seconds": round_seconds,
        "share_not_training": 1 - work / round_seconds,
        "overhead_seconds": round_seconds - work,
        "cores": os.cpu_count(),
        "load_before": load,
    }
    print(json.dumps(result, indent=2))
    target = Path(__file__).parent / "results" / "deployment_overhead.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
