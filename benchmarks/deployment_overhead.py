"""What a deployment costs: its rounds against the same rounds in one process, and an idle node.

All processes share one machine. In one process clients train one after another; deployed, they
train on as many cores as there are. The figure is the median of the rounds after the first; the
first is given as a multiple of these.

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
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from measure import Figure, details, options, publish

from hfedatm.base.results import read_rounds
from hfedatm.deploy.processes import Processes

HFEDATM = str(Path(sys.executable).with_name("hfedatm"))
PROJECT = Path(__file__).resolve().parents[1]
WORKLOADS = {
    "LeNet-5": (["model=lenet5", "station-rounds=2", "local-epochs=5"], 2.5),
    "ResNet-18": (["model=resnet18", "station-rounds=1", "local-epochs=1"], 1.5),
}
"""Settings of a round, and how many times the time of one process it may take."""
MOST_FIRST, MOST_IDLE_MB = 1.5, 250.0
IDLE_SECONDS = 20
POLICY = f"[limits]\nidle-seconds = {IDLE_SECONDS}\n"


def seconds(folder: Path) -> list[float]:
    return [record.seconds for record in read_rounds(folder)]


def measure(code: Path, chosen: argparse.Namespace, first_port: int) -> dict[str, dict[str, float]]:
    """Return what was measured of each workload, and of an idle node, with one checkout's code."""
    stations, clients, rounds = (1, 1, 2) if chosen.smoke else (2, 2, chosen.rounds)
    threads = {"OMP_NUM_THREADS": str(chosen.threads)}
    environment = os.environ | {"PYTHONPATH": str(code)} | threads

    def hfedatm(*given: str) -> None:
        subprocess.run([HFEDATM, *given], check=True, cwd=code, env=environment)

    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "policy.toml").write_text(POLICY, encoding="utf-8")
        state = ["--folder", str(folder / "state")]
        size = [f"--stations={stations}", f"--clients={clients}", f"--first-port={first_port}"]
        hfedatm("up", *size, *state, "--policy", str(folder / "policy.toml"))
        try:
            for model, (work, _) in WORKLOADS.items():
                given = [f"stations={stations}", f"clients-per-station={clients}", *work]
                given += [f"rounds={rounds}", f"output={folder}", "device=cpu"]
                given += ["model=lenet5", "local-epochs=1"] if chosen.smoke else []
                hfedatm("run", *given, f"run-name={model}-here")
                hfedatm("submit", *given, f"run-name={model}-there", *state)
                found[model] = compared(folder / f"{model}-here", folder / f"{model}-there")
            found["warm"] = node_memory(folder / "state")
            time.sleep(2 * IDLE_SECONDS)
            found["idle"] = node_memory(folder / "state")
        finally:
            hfedatm("down", *state)
    return found


def compared(here: Path, there: Path) -> dict[str, float]:
    """Return the seconds of rounds in one process and deployed."""
    alone, deployed = seconds(here), seconds(there)
    work, whole = statistics.median(alone[1:]), statistics.median(deployed[1:])
    return {
        "ratio": whole / work,
        "first": deployed[0] / whole,
        "one process": work,
        "deployed": whole,
        "deployed, first round": deployed[0],
    }


def node_memory(state: Path) -> dict[str, float]:
    """Return the memory in MB of a client's node, with its children and its share of the helper.

    All nodes of the machine share one helper, if it has not ended.
    """
    living = Processes(state).living()
    node = living["station-1-client-1-node"]
    family = [process.memory_full_info() for process in (node, *node.children(recursive=True))]
    helpers = [p for p in psutil.process_iter(["cmdline"]) if str(state) in helper_folder(p)]
    helper = [process.memory_full_info() for process in helpers]
    sharing = sum(name.endswith("-node") for name in living)
    return {
        "resident": sum(each.rss for each in [*family, *helper]) / 1e6,
        "own": sum(each.pss for each in family) / 1e6,
        "helper": sum(each.pss for each in helper) / 1e6,
        "with its share": sum(e.pss for e in family) / 1e6
        + sum(e.pss for e in helper) / 1e6 / sharing,
        "nodes that share": float(sharing),
    }


def helper_folder(process: psutil.Process) -> str:
    command = process.info["cmdline"] or []
    return " ".join(command) if "hfedatm.deploy.prefork" in command else ""


def figures_of(found: dict[str, dict[str, float]], suffix: str = "") -> list[Figure]:
    """Return the figures of one checkout; only those of this one have targets."""

    def figure(name: str, value: float, limit: float, than: str, unit: str, of: str) -> Figure:
        target = None if suffix else limit
        return Figure(f"{name}{suffix}", value, target, than, unit, details=details(found[of]))

    made = []
    for model, (_, limit) in WORKLOADS.items():
        row = found[model]
        name = f"a deployed round of {model}"
        than = "the same round in one process"
        made.append(figure(name, row["ratio"], limit, than, "x", model))
        name, than = f"the first deployed round of {model}", "later rounds"
        made.append(figure(name, row["first"], MOST_FIRST, than, "x", model))
    than = "a SuperNode and a helper process: 618 MB"
    name = "memory of a client node that has been idle for long"
    made.append(figure(name, found["idle"]["resident"], MOST_IDLE_MB, than, "MB", "idle"))
    name = "memory of a client node that waits, with its share of the helper"
    made.append(figure(name, found["warm"]["with its share"], MOST_IDLE_MB, than, "MB", "warm"))
    return made


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first-port", type=int, default=9500)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    own, rest = parser.parse_known_args(given)
    chosen = argparse.Namespace(**vars(options(__doc__, rest)), **vars(own))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # `hfedatm down` must still run
    figures = figures_of(measure(PROJECT, chosen, chosen.first_port))
    if chosen.against:
        checkout = chosen.against.resolve()
        git = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.check_output(git, cwd=checkout, text=True).strip()
        before = measure(checkout, chosen, chosen.first_port + 100)
        figures += figures_of(before, f", at commit {commit}")
    publish(__file__, figures, chosen)


if __name__ == "__main__":
    main()
