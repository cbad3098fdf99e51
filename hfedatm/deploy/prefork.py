"""The helper process of a node: it has imported all slow modules, and forks for every message.

Flower starts a new process per message. On our nodes the command it starts is a small one
(``bin/flwr-clientapp``), which hands its arguments to this process; a fork of this process then
does the work of Flower's own command. No message sees what another left in memory.

A node starts its helper when it starts, so that the first message waits for no import. A helper
that has been idle for as long as its owner's policy says (``limits.idle-seconds``) ends and gives
its memory back; the next message starts another. The nodes that ``hfedatm up`` starts on one
computer share one helper: a fork takes over the environment and the output of the node that asks.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil

from hfedatm.base import logs
from hfedatm.base.environment import HELPER, PRELOAD

COMMANDS = Path(__file__).with_name("bin")
"""The folder of the small command; it must come first on a node's ``PATH``."""

ADDRESS, LOCK = "prefork", "prefork.lock"
READ_SECONDS = 10.0
"""Seconds for which a process that has connected may stay silent."""


def begin(node: int) -> None:
    """Start the helper of the node that this process is, unless there is one; do not wait."""
    command = [sys.executable, "-m", "hfedatm.deploy.prefork", os.environ[HELPER], str(node)]
    if not os.fork():  # the helper is nobody's child, so that nobody need wait for its end
        os.spawnv(os.P_NOWAIT, sys.executable, command)
        os._exit(0)
    os.wait()


def serve(folder: Path, node: int) -> None:
    """Be the helper in ``folder`` for the process ``node``, or introduce it to the one there is."""
    hello = {"node": node, "environment": dict(os.environ)}
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)  # the address of a socket must be short
    with open(LOCK, "w") as lock:
        while not _locked(lock):
            if _tell(hello):
                return
            time.sleep(0.05)  # the other has not begun to listen, or has just ended
        with _listen() as listener:
            try:
                Helper(listener, lock).run(hello)
            finally:
                gc.unfreeze()  # frozen objects may raise errors when Python exits (triton's do)


@dataclass
class Helper:
    """The process that forks for every request."""

    listener: socket.socket
    lock: IO[str]
    nodes: list[psutil.Process] = field(default_factory=list)

    def run(self, hello: Mapping[str, Any]) -> None:
        """Fork for every request, until all nodes have ended or nobody has asked for long."""
        # Late, so that a process that finds another helper ends soon.
        from hfedatm.base.trust.policy import idle_seconds
        from hfedatm.deploy.installed_app import run_installed_app_only
        from hfedatm.flower_internals import clientapp_command

        run_installed_app_only()
        command = clientapp_command()
        patience = idle_seconds()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for
        self._welcome(hello)
        asked = time.monotonic()
        while self._is_wanted(asked + patience):
            try:
                connection, _ = self.listener.accept()
            except OSError:  # nobody asks
                continue
            with connection:
                if request := self._answer(connection):
                    self._become(request)
                    _do_and_end(command)
            asked = time.monotonic()

    def _is_wanted(self, until: float) -> bool:
        self.nodes = [node for node in self.nodes if _lives(node)]
        return bool(self.nodes) and (
            time.monotonic() < until or bool(psutil.Process().children())  # forks that still work
        )

    def _answer(self, connection: socket.socket) -> dict[str, Any]:
        """Return the request and its output in a fork; return nothing in this process."""
        outputs: list[int] = []
        try:
            connection.settimeout(READ_SECONDS)
            _, outputs, _, _ = socket.recv_fds(connection, 1, 2)
            request: dict[str, Any] = json.loads(connection.makefile().readline())
            ready = self._welcome(request)
            if ready and "arguments" in request and len(outputs) == 2:
                if not os.fork():
                    return {**request, "outputs": outputs}
            connection.sendall(b"+" if ready else b"-")
        except (OSError, ValueError, KeyError, TypeError):  # no request, or its sender has gone
            pass
        for output in outputs:
            os.close(output)
        return {}

    def _welcome(self, request: Mapping[str, Any]) -> bool:
        """Note a node, and import what its work needs; return whether that was possible."""
        try:
            with suppress(psutil.NoSuchProcess):
                node = psutil.Process(request["node"])
                self.nodes += [node] if node not in self.nodes else []
            for module in request["environment"].get(PRELOAD, "").split():
                import_module(module)
        except ImportError:
            traceback.print_exc()
            return False
        gc.freeze()  # keep the collector from touching, and so copying, these objects in forks
        return True

    def _become(self, request: Mapping[str, Any]) -> None:
        """Make this fork a process of the node that asks."""
        self.listener.close()
        self.lock.close()  # else the lock would outlive a killed helper
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        for number, output in enumerate(request["outputs"], start=1):
            os.dup2(output, number)
            os.close(output)
        sys.argv = ["flwr-clientapp", *request["arguments"]]
        logs.configure()


def _do_and_end(work: Callable[[], None]) -> NoReturn:
    """Do the work and exit at once: everything left to clean up ends with the process."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    Path(ADDRESS).unlink(missing_ok=True)  # left by a process that has ended
    before = os.umask(0o177)
    listener.bind(ADDRESS)
    os.umask(before)
    listener.listen()
    listener.settimeout(0.5)
    return listener


def _tell(hello: Mapping[str, Any]) -> bool:
    """Introduce a node to the helper in this folder; return whether it listens."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(ADDRESS)
            connection.sendall(b"\n" + json.dumps(hello).encode() + b"\n")
        except OSError:
            return False
        return True


def _locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lives(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def do_one(arguments: list[str]) -> None:
    """Do the work of Flower's command in this process, because no helper answers."""
    from hfedatm.deploy.installed_app import run_installed_app_only
    from hfedatm.flower_internals import clientapp_command

    logs.configure()
    run_installed_app_only()
    sys.argv = ["flwr-clientapp", *arguments]
    clientapp_command()()


if __name__ == "__main__":
    if sys.argv[1] == "--once":
        do_one(sys.argv[2:])
    else:
        serve(Path(sys.argv[1]), int(sys.argv[2]))
