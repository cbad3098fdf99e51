"""A deployed client works in a process of its own, whose death is an answer like any other."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from flwr.app import Context, Message, MessageType

from hfedatm.deploy.prefork import PRELOAD
from hfedatm.handling import reply_with_failure

Next = Callable[[Message, Context], Message]


class WorkLost(RuntimeError):
    """The process that did a client's work ended without an answer."""


def apart(message: Message, context: Context, call_next: Next) -> Message:
    """Work in a fork of this process where the node is a deployed one (a Flower mod).

    Otherwise a client that runs out of memory would be missed only when Flower no longer hears its
    heartbeat, and nobody would learn why.
    """
    metadata = message.metadata
    if PRELOAD not in os.environ or metadata.message_type == MessageType.QUERY:
        return call_next(message, context)
    try:
        return in_fork(message, context, call_next, metadata.created_at + metadata.ttl)
    except WorkLost as error:
        return reply_with_failure(message, error)


def in_fork(message: Message, context: Context, call_next: Next, until: float) -> Message:
    """Return the reply that a fork gives; nobody waits for it after the time ``until``."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=_work, args=(message, context, call_next, there))
    process.start()
    there.close()
    try:
        if not here.poll(max(0.0, until - time.time())):
            raise WorkLost("training took longer than anybody waits for it")
        return Message(here.recv(), reply_to=message)
    except EOFError:
        process.join()
        code = process.exitcode or 0
        why = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        raise WorkLost(
            f"the training process {why}; 9 is also what a lack of memory looks like"
        ) from None
    finally:
        process.kill()
        process.join()


def _work(message: Message, context: Context, call_next: Next, answer: Connection) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # how Flower's process ends is not for its fork
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answer.send(call_next(message, context).content)


def _end_with(parent: int) -> None:
    """Leave no work behind for which nobody waits."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
