"""A node's note of every task it does, where log lines are JSON."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from flwr.app import ConfigRecord, Context, Message

from hfedatm.base import logs
from hfedatm.base.text import printable

log = logging.getLogger("hfedatm.tasks")


def noted(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Log one line per task, under the id of the run that it belongs to (a Flower mod).

    This mod runs after the one that opens parcels. It reads the task's names only to show them.
    """
    task: Any = message.content.get("task")
    if not logs.wanted() or not isinstance(task, ConfigRecord):
        return call_next(message, context)
    logs.about(printable(task.get("run", ""), 80))
    kind, number = (printable(task.get(key, "?"), 20) for key in ("kind", "round"))
    what = f"{kind} of round {number}"
    began = time.perf_counter()
    log.info("%s: begun", what)
    reply = call_next(message, context)
    outcome = "done"
    if reply.has_error():
        outcome = f"failed: {printable(reply.error.reason, 200)}"
    elif isinstance(failed := reply.content.get("failure"), ConfigRecord):
        outcome = f"failed: {printable(failed.get('reason', ''), 200)}"
    log.info("%s: %s in %.2f s", what, outcome, time.perf_counter() - began)
    return reply
