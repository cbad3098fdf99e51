"""How the tests of this folder bring faults about, and what they look at afterwards."""

from pathlib import Path

import psutil
import torch
from deployment import wait_until
from safetensors.torch import load_file

SMALL = {
    "stations": 2,
    "clients-per-station": 2,
    "rounds": 2,
    "station-rounds": 1,
    "local-epochs": 1,
    "batch-size": 64,
    "validation-fraction": 0,
    "diagnostics": False,
    "device": "cpu",
    "train-fn": "faulty:train",
}


def pause(faults: Path, machine: str, training: int = 1) -> None:
    """Let the machine stop in the middle of its next training, or of a later one."""
    (faults / f"pause-{machine}").write_text(str(training))


def paused(faults: Path, machine: str) -> int:
    """Wait until the machine is in the middle of its training; return that process's id."""
    file = faults / f"paused-{machine}"
    wait_until(lambda: file.exists() and file.read_text(), f"{machine} trains")
    return int(file.read_text())


def release(faults: Path) -> None:
    for file in faults.glob("pause-*"):
        file.unlink()


def reasons(record, node):
    return [f["reason"] for f in record["failures"] if f["node"] == node]


def assert_same(run, model):
    found = load_file(run.folder / "last.safetensors")
    for name, tensor in model.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


def server_app_of(deployment, link: str) -> psutil.Process:
    """Return the process of the run that a link has going."""
    family = deployment.process(f"{link}-link").children(recursive=True)
    return next(p for p in family if "flwr-serverapp" in " ".join(p.cmdline()))


def helper_of(deployment) -> psutil.Process:
    """Return the process that forks for the messages of all nodes."""
    named = [p for p in psutil.process_iter(["cmdline"]) if is_helper(p, deployment)]
    return next(p for p in named if p.ppid() not in {other.pid for other in named})


def is_helper(process: psutil.Process, deployment) -> bool:
    """Return whether a process is the deployment's helper, or a fork of it that works."""
    command = process.info["cmdline"] or []
    return "hfedatm.deploy.prefork" in command and str(deployment.folder) in command
