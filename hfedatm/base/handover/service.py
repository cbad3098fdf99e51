"""The two sides of a spool: one hands a job over and waits for its answer, one serves the jobs."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from typing import Protocol

from flwr.app import RecordDict

from hfedatm.base.errors import UserError
from hfedatm.base.handover import recordfile
from hfedatm.base.handover.spool import HandoverError, Job, Spool
from hfedatm.base.text import printable

log = logging.getLogger("hfedatm.base.handover")

Work = Callable[[RecordDict], RecordDict]


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
    poll: float = 0.05,
    silence: float = 120.0,
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
            if not worker.spool.served:
                if starts == max_starts:
                    raise HandoverError(f"tried {starts} {worker.what}s for this job: {trouble}")
                starts += 1
                trouble = _bring_up(worker, job, silence, deadline, poll) or trouble
            time.sleep(poll)
        return job.answer()


def _bring_up(worker: Worker, job: Job, silence: float, deadline: float, poll: float) -> str:
    """Start a worker and wait until it serves the spool; return why it has ended instead."""
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
            if worker.spool.served or job.done:
                return ""
            time.sleep(poll)
    return ""


def serve(
    spool: Spool,
    do_job: Callable[[Job], None],
    *,
    poll: float = 0.05,
    wanted: Callable[[float], bool] = lambda idle: idle < 3600,
) -> None:
    """Do the spool's jobs for as long as ``wanted`` says.

    Parameters
    ----------
    spool
        Where the jobs come from.
    do_job
        Answers one job.
    poll
        Seconds between two looks at the spool.
    wanted
        Called with the seconds since the last job; returns whether to wait for more.
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
        job.finish(work(recordfile.load(job.request)))
    except Exception as error:
        lines = traceback.format_exc().splitlines()
        log.error("job %s failed:\n%s", job.stem.name, "\n".join(map(printable, lines)))
        # A `UserError` explains itself; its class name would only lengthen the line.
        job.fail(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")
