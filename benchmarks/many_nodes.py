"""Bring up many nodes on this machine, run two rounds, and report seconds and memory.

    python benchmarks/many_nodes.py --stations 1 --clients 50
    python benchmarks/many_nodes.py --stations 10 --clients 5

Starting stops as soon as less than ``--keep`` GB of memory would be free.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from hfedatm.deploy.processes import Processes

RUN = {
    "rounds": 2,
    "station-rounds": 1,
    "local-epochs": 1,
    "batch-size": 64,
    "device": "cpu",
    "diagnostics": False,
    "run-name": "many",
    "server-rule": "avg",  # so many clients have too few examples for a Gram
}


def memory(processes: Processes) -> float:
    """Return the GB that all processes of a deployment take, shared pages counted once."""
    total = 0
    for process in processes.living().values():
        for each in (process, *process.children(recursive=True)):
            try:
                total += each.memory_full_info().pss
            except (psutil.Error, AttributeError):
                continue
    return total / 1e9


class Watch:
    """Ends the deployment when memory runs out; notes the most that it took."""

    def __init__(self, folder: Path, keep: float) -> None:
        self.processes, self.keep = Processes(folder), keep
        self.most, self.ended = 0.0, False
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._over.wait(2.0):
            self.most = max(self.most, memory(self.processes))
            if psutil.virtual_memory().available / 1e9 < self.keep:
                self.ended = True
                self.processes.down()
                return

    def stop(self) -> None:
        """Watch no longer."""
        self._over.set()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``hfedatm`` to its end."""
    program = str(Path(sys.executable).with_name("hfedatm"))
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def measure(stations: int, clients: int, first_port: int, keep: float) -> dict[str, object]:
    """Return what a deployment of this size costs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "state"
        place = ["--folder", str(folder)]
        watch = Watch(folder, keep)
        found: dict[str, object] = {"stations": stations, "clients": clients}
        try:
            began = time.monotonic()
            size = ["--stations", str(stations), "--clients", str(clients)]
            more = ["--first-port", str(first_port), "--patience", "900"]
            up = command("up", *size, *more, *place)
            found["seconds until all are up"] = round(time.monotonic() - began, 1)
            if watch.ended or up.returncode:
                said = "memory ran out" if watch.ended else up.stderr[-300:]
                return found | {"not up": said, "GB": round(watch.most, 2)}
            time.sleep(10)
            found["GB idle"] = round(memory(watch.processes), 2)
            given = [f"{key}={value}" for key, value in RUN.items()]
            run = command("submit", *given, f"output={name}/results", *place)
            file = Path(name) / "results/many/rounds.jsonl"
            lines = file.read_text().splitlines() if file.exists() else []
            rounds = [json.loads(line) for line in lines]
            found |= {
                "completed": run.returncode == 0,
                "seconds of rounds": [round(r["seconds"], 1) for r in rounds],
                "clients that answered": [r["clients"]["answered"] for r in rounds],
                "bytes up": [r["bytes_up"] for r in rounds],
                "GB at most": round(watch.most, 2),
                "memory ran out": watch.ended,
            }
            return found
        finally:
            watch.stop()
            command("down", *place)


def main() -> None:
    """Measure what the command line asks for and print it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--stations", type=int, default=1)
    parser.add_argument("--clients", type=int, default=50, help="of each station")
    parser.add_argument("--first-port", type=int, default=21000)
    parser.add_argument("--keep", type=float, default=2.0, help="GB of memory that stay free")
    asked = parser.parse_args()
    print(
        json.dumps(measure(asked.stations, asked.clients, asked.first_port, asked.keep), indent=1)
    )


if __name__ == "__main__":
    main()
