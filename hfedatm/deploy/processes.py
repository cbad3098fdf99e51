"""Processes that outlive the command that started them: start, find, and end exactly those."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from hfedatm.deploy import flower
from hfedatm.deploy.topology import Process


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
        temporary = self.record.with_suffix(".tmp")
        temporary.write_text(json.dumps(noted, indent=1))
        temporary.replace(self.record)
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
        # Nodes first: they say goodbye to their link.
        order = sorted(living, key=lambda name: ("-node" not in name, "-gateway" not in name))
        # Flower's helpers have nothing left to do without their parent, but are slow to see it.
        family = [child for name in order for child in living[name].children(recursive=True)]
        ended = [living[name] for name in order]
        for process in ended:
            _signal(process, "terminate")
        _, stubborn = psutil.wait_procs(ended, timeout=patience)
        for process in stubborn + family:
            _signal(process, "kill")
        psutil.wait_procs(stubborn + family, timeout=patience)
        self.record.unlink(missing_ok=True)
        return order


def _signal(process: psutil.Process, how: str) -> None:
    try:
        getattr(process, how)()
    except psutil.NoSuchProcess:
        pass
