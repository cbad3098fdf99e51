"""A deployed client works in a process of its own and reports why that process died, if it did."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NoReturn

import psutil
from flwr.app import Context, Message, MessageType

from hfedatm.base.answering import reply_with_failure
from hfedatm.base.environment import PRELOAD
from hfedatm.base.parent import end_with_parent
from hfedatm.base.trust.policy import Limits, Policy, PolicyRefusal

Next = Callable[[Message, Context], Message]
MB = 2**20
MEMORY_CHECK_SECONDS = 0.1
"""Seconds between two checks of a fork's memory."""


class WorkLost(RuntimeError):
    """The process that did a client's work ended without an answer."""


def in_own_process(message: Message, context: Context, call_next: Next) -> Message:
    """Work in a fork of this process if the node is deployed (a Flower mod).

    Without the fork, a client that runs out of memory would be noticed only when Flower misses its
    heartbeat, and nobody would learn why. The owner's limits on time and memory are enforced here.
    """
    metadata = message.metadata
    if metadata.message_type == MessageType.QUERY:
        return call_next(message, context)
    try:
        limits = Policy.current().limits
        if PRELOAD not in os.environ and limits.seconds is None and limits.memory_mb is None:
            return call_next(message, context)
        return in_fork(message, context, call_next, metadata.created_at + metadata.ttl, limits)
    except (WorkLost, PolicyRefusal) as error:
        return reply_with_failure(message, error)


def in_fork(
    message: Message,
    context: Context,
    call_next: Next,
    until: float,
    limits: Limits = Limits(),  # noqa: B008 (it cannot change)
) -> Message:
    """Return the reply that a fork gives.

    The fork is ended at the time ``until``, when nobody waits for it any longer, or as soon as it
    exceeds the limits.
    """
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=_work, args=(message, context, call_next, there))
    process.start()
    there.close()
    try:
        _watch(here, psutil.Process(process.pid), until, limits)
        return Message(here.recv(), reply_to=message)
    except EOFError:
        process.join()
        code = process.exitcode or 0
        why = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        raise WorkLost(
            f"the training process {why}; signal 9 often means that memory ran out"
        ) from None
    finally:
        process.kill()
        process.join()


def _watch(answer: Connection, process: psutil.Process, until: float, limits: Limits) -> None:
    """Wait for the answer; raise if it is late or the fork exceeds the owner's limits."""
    started = time.monotonic()
    left = until - time.time()
    while True:
        taken = time.monotonic() - started
        if limits.seconds is not None and taken >= limits.seconds:
            _over("seconds", f"longer than {limits.seconds:g} s", "seconds")
        if taken >= left:
            raise WorkLost("training took longer than the station waits for the reply")
        if limits.memory_mb is not None:
            _check_memory(process, limits.memory_mb)
        rests = [left - taken, MEMORY_CHECK_SECONDS if limits.memory_mb is not None else left]
        rests += [limits.seconds - taken] if limits.seconds is not None else []
        if answer.poll(max(0.0, min(rests))):
            return


def _check_memory(process: psutil.Process, most: float) -> None:
    try:
        used = process.memory_info().rss / MB
    except psutil.Error:  # the process has ended; the closed pipe will show it
        return
    if used > most:
        _over("memory", f"{used:.0f} MB, more than {most:g} MB", "memory-mb")


def _over(what: str, how: str, field: str) -> NoReturn:
    raise PolicyRefusal(
        f"{what}: this task takes {how}, the most that the owner of this node allows; it was "
        f"ended (policy: limits.{field})"
    )


def _work(message: Message, context: Context, call_next: Next, answer: Connection) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # the fork drops Flower's handlers
    end_with_parent()
    answer.send(call_next(message, context).content)
