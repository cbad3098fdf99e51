"""A deployment on this machine, through the commands a person would use."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil
import tomli_w
from helpers import lines_of

from hfedatm.deploy import local
from hfedatm.deploy.processes import Processes

PATIENCE = 900  # seconds; a busy machine may need them


class Deployment:
    """Two stations with two clients each, whose owners allow built-ins and what a test names."""

    def __init__(
        self,
        folder: Path,
        stations: int = 2,
        clients: int = 2,
        *,
        allowed: Sequence[str] = (),
        privacy: Mapping[str, object] | None = None,
        tiers: Sequence[int] = (),
        **environment: str,
    ):
        self.folder, self.stations, self.clients = folder / "state", stations, clients
        self.policy = {"code": {"allowed": list(allowed)}, "privacy": dict(privacy or {})}
        self.output = folder / "results"
        self.sizes = tuple(tiers) or (stations, clients)
        planned = local.plan(self.folder, *self.sizes)
        self.first_port = free_ports(2 * len(planned.links) + len(planned.nodes) + 1)
        self.environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        self.processes = Processes(self.folder)
        self.layout = local.plan(self.folder, *self.sizes, first_port=self.first_port)

    def hfedatm(self, *arguments: str) -> subprocess.CompletedProcess:
        """Run a command to its end; its output is on file, as its children may hold a pipe open."""
        log = self.output.with_name(f"{arguments[0]}.log")
        with log.open("w") as file:
            done = subprocess.run(
                [str(Path(sys.executable).with_name("hfedatm")), *arguments],
                env=self.environment, stdout=file, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, timeout=PATIENCE, check=False,
            )  # fmt: skip
        done.stdout = log.read_text()
        return done

    def up(self) -> None:
        size = ["--stations", str(self.stations), "--clients", str(self.clients)]
        if len(self.sizes) > 2:
            size = ["--tiers", "x".join(map(str, self.sizes))]
        place = ["--folder", str(self.folder), "--first-port", str(self.first_port)]
        given = []
        if any(any(section.values()) for section in self.policy.values()):
            file = self.output.with_name("policy.toml")
            file.write_text(tomli_w.dumps(self.policy))
            given = ["--policy", str(file)]
        done = self.hfedatm("up", *size, *place, *given, "--patience", str(PATIENCE))
        assert done.returncode == 0, done.stdout + self.logs()

    def down(self) -> None:
        self.hfedatm("down", "--folder", str(self.folder))

    def submit(self, name: str, **settings: object) -> Run:
        """Start a run; it goes on while the test does other things."""
        return Run(self, name, settings)

    # --- single processes

    def process(self, name: str) -> psutil.Process:
        return self.processes.living()[name]

    def kill(self, name: str, *, family: bool = True) -> None:
        """SIGKILL a process and, by default, all that it started."""
        process = self.process(name)
        doomed = [process, *(process.children(recursive=True) if family else [])]
        for each in doomed:
            each.kill()
        psutil.wait_procs(doomed, timeout=30)

    def start(self, name: str) -> None:
        """Start a process of the deployment again."""
        nodes = [process for _, _, process in self.layout.nodes]
        every = [*self.layout.links.values(), *self.layout.gateways.values(), *nodes]
        before = dict(os.environ)
        os.environ.update(self.environment)
        try:
            self.processes.start(next(process for process in every if process.name == name))
        finally:
            os.environ.clear()
            os.environ.update(before)

    def logs(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )


class Run:
    """A run of a deployment."""

    def __init__(self, deployment: Deployment, name: str, settings: dict[str, object]) -> None:
        self.deployment, self.folder = deployment, deployment.output / name
        given = {key.replace("_", "-"): value for key, value in settings.items()}
        if "resume" not in given:
            if self.folder.exists():  # the test is tried again
                deployment.hfedatm("stop", name, "--folder", str(deployment.folder))
                shutil.rmtree(self.folder)
            given |= {"output": deployment.output, "run-name": name}
        self._log = deployment.output.with_name(f"{name}{'-resumed' * ('resume' in given)}.log")
        with self._log.open("w") as file:
            self.process = subprocess.Popen(
                [str(Path(sys.executable).with_name("hfedatm")), "submit",
                 *(f"{key}={value}" for key, value in given.items()),
                 "--folder", str(deployment.folder)],
                env=deployment.environment, stdout=file, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self) -> list[dict]:
        """Wait for a good end; return the rounds."""
        code = self.process.wait(PATIENCE)
        assert code == 0, self.log + self.deployment.logs()
        return self.rounds()

    def rounds(self) -> list[dict]:
        return lines_of(self.folder)


def wait_until(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"waited too long until {what}"
        time.sleep(0.1)


def free_ports(count: int) -> int:
    """Return the first of ``count`` ports in a row that are free now.

    Test processes side by side look in places of their own: a port is bound only later.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 2
    start = 20000 + 20000 * worker
    for first in range(start + os.getpid() % 5000, start + 20000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise RuntimeError("no ports are free")
