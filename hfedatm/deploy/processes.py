"""Start, find and end processes that outlive the command that started them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from hfedatm.deploy import flower
from hfedatm.deploy.machines import Process
from hfedatm_files import write_text


@dataclass(frozen=True)
class Processes:
    """The processes that were started from one folder."""

    folder: Path

    @property
    def record(self) -> Path:
        """The file that lists the started processes."""
        return self.folder / "processes.json"

    def start(self, process: Process) -> int:
        """Start a process, record it, and return its id; its output goes to a file of its name."""
        process.home.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{process.name}.log").open("ab") as log:
            started = subprocess.Popen(
                process.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt at the terminal must not reach them
                env=flower.environment(process.home)
                | {"PYTHONUNBUFFERED": "1"}
                | dict(process.environment),
            )
        noted = self.noted()
        # Another process may get the same id one day, but not the same id and start time.
        noted[process.name] = [started.pid, psutil.Process(started.pid).create_time()]
        write_text(self.record, json.dumps(noted, indent=1))
        return started.pid

    def noted(self) -> dict[str, list[float]]:
        """Return the started processes: name to id and start time."""
        return json.loads(self.record.read_text()) if self.record.exists() else {}

    def living(self) -> dict[str, psutil.Process]:
        """Return the started processes that are still alive."""
        living = {}
        for name, (pid, created) in self.noted().items():
            try:
                process = psutil.Process(int(pid))
                if process.create_time() == created and process.status() != "zombie":
                    living[name] = process
            except psutil.NoSuchProcess:
                continue
        return living

    def end(self, name: str, patience: float = 10.0) -> None:
        """End one process and its children, if it is alive."""
        if process := self.living().get(name):
            family = [process, *process.children(recursive=True)]
            _end([process], "terminate", patience)
            _end(family, "kill", patience)

    def down(self, patience: float = 10.0) -> list[str]:
        """End the processes and their children; return the names of those that were alive."""
        living = self.living()
        # Flower's helpers are useless without their parent, but notice its end slowly.
        families = {name: each.children(recursive=True) for name, each in living.items()}
        family = [child for children in families.values() for child in children]
        deadline = time.monotonic() + patience
        # Runs first: a run must not take the end of its nodes for the result of a round.
        links = [name for name in living if name.endswith("-link")]
        _end([run for name in links for run in families[name]], "terminate", patience)
        # Then nodes: a node signs off from its link, through the gateway, before it ends.
        for kind in ("node", "gateway", "link"):
            ending = [each for name, each in living.items() if name.endswith(f"-{kind}")]
            _end(ending, "terminate", max(0.0, deadline - time.monotonic()))
        _end([*living.values(), *family], "kill", patience)
        self.record.unlink(missing_ok=True)
        return list(living)


def _end(processes: list[psutil.Process], how: str, patience: float) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            getattr(process, how)()
    deadline = time.monotonic() + patience
    while any(map(_lives, processes)) and time.monotonic() < deadline:
        psutil.wait_procs(processes, timeout=0.05)


def _lives(process: psutil.Process) -> bool:
    """Return whether a process has not ended; its parent may not have noticed its end."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
