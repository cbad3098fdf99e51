"""Start the tasks of a SuperNode or a SuperLink in a thread of its own process.

Flower starts a process for this, the SuperExec. It takes as much memory as the process it belongs
to, it ends when that process does not answer for a minute, and nobody starts it again: a SuperLink
would then take runs and never begin one.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

from hfedatm.base import logs
from hfedatm.flower_internals import start_tasks

HOST = "127.0.0.1"
AGAIN = 1.0
"""Seconds until tasks are started again after an error."""

log = logging.getLogger("hfedatm.tasks")


def begin(port: int, ca_file: str | None = None) -> None:
    """Start the tasks of this process, which will listen at ``port``, for as long as it lives.

    Call it when everything is imported: two threads that import Flower at once get parts of it.
    """
    in_background(_start_tasks, port, ca_file)


def in_background(work: Callable[..., None], *given: object) -> None:
    """Do some work in a thread that ends with this process."""
    threading.Thread(target=work, args=given, daemon=True).start()


def _start_tasks(port: int, ca_file: str | None) -> None:
    while True:
        try:
            _wait_until_it_listens(port)
            # Lines of JSON are collected from a process's output, not from a database.
            start_tasks(f"{HOST}:{port}", ca_file, shown=logs.wanted())
        except (Exception, SystemExit):  # whatever Flower raises: it must not stay so
            log.exception("tasks are not started; trying again")
        time.sleep(AGAIN)


def _wait_until_it_listens(port: int) -> None:
    while True:
        try:
            socket.create_connection((HOST, port)).close()
            return
        except OSError:
            time.sleep(0.1)
