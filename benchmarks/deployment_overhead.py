"""How much of a deployed round is not training: three tiers of processes against one process.

The work of a round is its time in one process (`hfedatm run`), with clients one after another. Here
all processes share one machine, so a deployed round cannot do this work sooner. The first deployed
round also starts the station runs and the processes that nodes fork; the figure is the median of
the later rounds.

``--against CHECKOUT`` then measures an older checkout of this repository with the same Python.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from measure import Figure, details, options, publish

from hfedatm.base.results import read_rounds

HFEDATM = str(Path(sys.executable).with_name("hfedatm"))
PROJECT = Path(__file__).resolve().parents[1]
# The ratio with a new Python for every message and a request for every array (commit 77377a2).
FIRST_FIGURE = 15.5


def seconds(folder: Path) -> list[float]:
    return [record.seconds for record in read_rounds(folder)]


def measure(code: Path, chosen: argparse.Namespace, first_port: int) -> dict[str, float]:
    """Return the seconds of rounds in one process and deployed, with the code of one checkout."""
    stations, clients, epochs, rounds = (1, 1, 1, 2) if chosen.smoke else (2, 2, 5, chosen.rounds)
    threads = {"OMP_NUM_THREADS": str(chosen.threads)}
    environment = os.environ | {"PYTHONPATH": str(code)} | threads

    def hfedatm(*given: str) -> None:
        subprocess.run([HFEDATM, *given], check=True, cwd=code, env=environment)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = [f"stations={stations}", f"clients-per-station={clients}", "station-rounds=2"]
        given += [f"local-epochs={epochs}", f"rounds={rounds}", f"output={folder}"]
        state = ["--folder", str(folder / "state")]
        size = [f"--stations={stations}", f"--clients={clients}", f"--first-port={first_port}"]
        hfedatm("run", *given, "run-name=here")
        try:
            hfedatm("up", *size, *state)
            hfedatm("submit", *given, "run-name=there", *state)
        finally:
            hfedatm("down", *state)
        here, there = seconds(folder / "here"), seconds(folder / "there")
    work, whole = statistics.median(here[1:]), statistics.median(there[1:])
    return {
        "ratio": (whole - work) / work,
        "share not training": 1 - work / whole,
        "one process": work,
        "deployed": whole,
        "deployed, first round": there[0],
    }


def figure(name: str, found: dict[str, float], limit: float | None) -> Figure:
    return Figure(
        name,
        found["ratio"],
        limit,
        "the same round in one process",
        details=details(found),
    )


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first-port", type=int, default=9500)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    own, rest = parser.parse_known_args(given)
    chosen = argparse.Namespace(**vars(options(__doc__, rest)), **vars(own))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # `hfedatm down` must still run
    name = "time of a deployed round beside training, LeNet-5"
    figures = [figure(name, measure(PROJECT, chosen, chosen.first_port), FIRST_FIGURE / 2)]
    if chosen.against:
        checkout = chosen.against.resolve()
        git = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.check_output(git, cwd=checkout, text=True).strip()
        before = measure(checkout, chosen, chosen.first_port + 100)
        figures.append(figure(f"{name}, at commit {commit}", before, None))
    publish(__file__, figures, chosen)


if __name__ == "__main__":
    main()
