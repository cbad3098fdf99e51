"""Processes that outlive the command that started them: start, find, and end exactly those."""

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
        """Start a process, note it, and return its id; its output goes to a file of its name."""
        process.home.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{process.name}.log").open("ab") as log:
            started = subprocess.Popen(
                process.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt at the terminal is not for them
                env=flower.environment(process.home)
                | {"PYTHONUNBUFFERED": "1"}
                | dict(process.environment),
            )
        noted = self.noted()
        # An id alone may belong to a stranger one day; with its start time it cannot.
        noted[process.name] = [started.pid, psutil.Process(started.pid).create_time()]
        write_text(self.record, json.dumps(noted, indent=1))
        return started.pid

    def noted(self) -> dict[str, list[float]]:
        """Return the started processes: name to id and start time."""
        return json.loads(self.record.read_text()) if self.record.exists() else {}

    def living(self) -> dict[str, psutil.Process]:
        """Return those of the started processes that are alive."""
        living = {}
        for name, (pid, created) in self.noted().items():
            try:
                process = psutil.Process(int(pid))
                if process.create_time() == created and process.status() != "zombie":
                    living[name] = process
            except psutil.NoSuchProcess:
                continue
        return living

    def down(self, patience: float = 10.0) -> list[str]:
        """End the processes and what they started; return the names of those that were alive."""
        living = self.living()
        # Flower's helpers have nothing left to do without their parent, but are slow to see it.
        family = [child for each in living.values() for child in each.children(recursive=True)]
        # Tier by tier: a node says goodbye to its link, through the gateway, before it ends.
        deadline = time.monotonic() + patience
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
    psutil.wait_procs(processes, timeout=patience)
