"""The two sides of a spool: one hands a job over and waits for its answer, one serves the jobs."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from flwr.app import RecordDict

from hfedatm.base.errors import UserError
from hfedatm.base.handover import recordfile
from hfedatm.base.handover.spool import HandoverError, Job, Spool, explain_disk
from hfedatm.base.text import printable

log = logging.getLogger("hfedatm.base.handover")

Work = Callable[[RecordDict], RecordDict]
POLL, SILENCE = 0.05, 120.0
"""Seconds between two looks at a spool; seconds without a sign of a worker until it is given up."""


class Worker(Protocol):
    """The process that serves a spool, as the processes that hand over work see it."""

    spool: Spool
    what: str
    """The worker's name in messages to people, such as ``station run``."""

    def start(self) -> None:
        """Start a new worker; raises `UserError` if that is not possible now."""

    def ended(self) -> str:
        """Return why the started worker has ended, or an empty string while it has not."""


def hand_over(
    content: RecordDict,
    run_id: int,
    message_id: str,
    worker: Worker,
    *,
    timeout: float = float("inf"),
    poll: float = POLL,
    silence: float = SILENCE,
    max_starts: int = 3,
) -> RecordDict:
    """Hand a job to a worker and return its answer.

    A worker that is on its way is waited for until ``timeout``, however slow the machine is.

    Parameters
    ----------
    content, run_id, message_id
        The content of the message, and the ids that identify the job: a finished job with the same
        ids is answered from its result, not done again.
    worker
        The worker that does the jobs in its spool; it is started when none is alive and this job is
        not done.
    timeout
        Seconds to wait for the answer.
    poll
        Seconds between two looks at the spool.
    silence
        Seconds after which a worker that cannot be started, or about which nothing can be learnt,
        is given up.
    max_starts
        Most workers that are started for this job before it is given up.
    """
    deadline = time.monotonic() + timeout
    starts = 0
    trouble = "it ended before the job was done"
    with worker.spool.submit(run_id, message_id, content) as job:
        while not job.done:
            if time.monotonic() > deadline:
                raise HandoverError(
                    f"the {worker.what} did not finish the job within {timeout:.3g} s"
                )
            if job.lost:
                raise HandoverError(f"the {worker.what} could not write its answer")
            with worker.spool.starting() as ours:
                if ours and not worker.spool.served:
                    if starts == max_starts:
                        raise HandoverError(
                            f"tried {starts} {worker.what}s for this job: {trouble}"
                        )
                    starts += 1
                    trouble = bring_up(worker, lambda: job.done, silence, deadline, poll) or trouble
            time.sleep(poll)
        return job.answer()


def bring_up(
    worker: Worker,
    needless: Callable[[], bool],
    silence: float = SILENCE,
    deadline: float = float("inf"),
    poll: float = POLL,
) -> str:
    """Start a worker and wait until it serves the spool; return why it has ended instead.

    The wait ends as soon as a worker is ``needless``, or at the time ``deadline``.
    """
    submitted = False
    heard = time.monotonic()
    while time.monotonic() < deadline:
        try:
            if not submitted:
                worker.start()
                submitted = True
            elif ended := worker.ended():
                return ended
            heard = time.monotonic()
        except UserError as error:  # a station's SuperLink may be restarting
            log.warning("%s", error)
            if time.monotonic() - heard > silence:
                raise HandoverError(
                    f"no sign of a {worker.what} for {silence:.3g} s: {error}"
                ) from None
        # Asking a SuperLink starts a process, whose CPU time the starting run needs.
        look_again = time.monotonic() + (200 if submitted else 40) * poll
        while time.monotonic() < look_again:
            if worker.spool.served or needless():
                return ""
            time.sleep(poll)
    return ""


def serve(
    spool: Spool,
    do_job: Callable[[Job], None],
    *,
    wanted: Callable[[float], bool],
    poll: float = POLL,
) -> None:
    """Do the spool's jobs for as long as ``wanted`` says.

    Parameters
    ----------
    spool
        Where the jobs come from.
    do_job
        Answers one job.
    wanted
        Called with the seconds since the last job; returns whether to wait for more.
    poll
        Seconds between two looks at the spool.
    """
    with spool.lease() as held:
        if not held:
            log.info("another process serves %s", spool.folder)
            return
        last = time.monotonic()
        while wanted(time.monotonic() - last):
            job = spool.waiting()
            if job is None:
                time.sleep(poll)
                continue
            spool.forget()
            do_job(job)
            last = time.monotonic()


def do(job: Job, work: Work) -> None:
    """Do one job; report an error in it to the process that asked, and go on serving."""
    try:
        result = work(recordfile.load(job.request))
    except Exception as error:
        lines = traceback.format_exc().splitlines()
        log.error("job %s failed:\n%s", job.stem.name, "\n".join(map(printable, lines)))
        # A `UserError` explains itself; its class name would only lengthen the line.
        _answer(job, reason=_reason(error))
    else:
        _answer(job, result)


def _answer(job: Job, result: RecordDict | None = None, reason: str = "") -> None:
    """Write a job's answer; if there is no room for it, write that, and if possible go on."""
    try:
        if result is not None:
            job.finish(result)
        else:
            job.fail(reason)
    except OSError as error:
        log.error("job %s: %s", job.stem.name, explain_disk(error))
        with suppress(OSError):  # who asked sees that the request has gone
            job.fail(explain_disk(error))


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
