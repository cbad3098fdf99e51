"""A node's process that has imported all slow modules, and forks for every message.

Flower starts a new process per message. On our nodes the command it starts is a small one
(``bin/flwr-clientapp``), which hands its arguments to this process; a fork of this process then
does the work of Flower's own command. No message sees what another left in memory.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import psutil

from hfedatm.base import logs
from hfedatm.base.environment import PRELOAD
from hfedatm.deploy.installed_app import run_installed_app_only
from hfedatm.flower_internals import clientapp_command

COMMANDS = Path(__file__).with_name("bin")
"""The folder of the small command; it must come first on a node's ``PATH``."""

ADDRESS = "prefork"


def serve(node: psutil.Process) -> None:
    """Fork for every request, until the process ``node`` has ended."""
    run_installed_app_only()
    command = clientapp_command()
    for module in os.environ.get(PRELOAD, "").split():
        import_module(module)
    logs.configure()
    gc.freeze()  # keep the collector from touching, and so copying, these objects in every fork
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for
    try:
        _fork_for_each_request(node, command)
    finally:
        gc.unfreeze()  # frozen objects may raise errors when Python exits, as those of triton do


def _fork_for_each_request(node: psutil.Process, command: Callable[[], None]) -> None:
    with _listen() as listener:
        while _lives(node):
            if arguments := _next_request(listener):
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                sys.argv = ["flwr-clientapp", *arguments]
                _do_and_end(command)


def _next_request(listener: socket.socket) -> list[str]:
    """Return the arguments of the next request in a fork; return nothing in this process."""
    try:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(10)
            arguments: list[str] = json.loads(connection.makefile().readline())
            if not os.fork():
                return arguments
            connection.sendall(b"+")
    except (OSError, ValueError):  # no request, or its sender has gone
        pass
    return []


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


def _lives(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


def do_one(arguments: list[str]) -> None:
    """Do the work of Flower's command in this process, because no prefork process answers."""
    logs.configure()
    run_installed_app_only()
    sys.argv = ["flwr-clientapp", *arguments]
    clientapp_command()()


if __name__ == "__main__":
    if sys.argv[1] == "--once":
        do_one(sys.argv[2:])
    else:
        serve(psutil.Process(int(sys.argv[1])))
