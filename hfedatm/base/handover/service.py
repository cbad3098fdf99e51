"""The two sides of a spool: hand a job over and wait for its answer; serve the jobs."""

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
    """Whoever serves a spool, as seen by those who hand work over."""

    spool: Spool
    what: str
    """What it is, for messages to people: ``station run``."""

    def start(self) -> None:
        """Start a new one; raises `UserError` if that is not possible now."""

    def ended(self) -> str:
        """Return why the started one is over, or an empty string while it is not."""


def hand_over(
    content: RecordDict,
    run_id: int,
    message_id: str,
    worker: Worker,
    *,
    timeout: float = float("inf"),
    poll: float = 0.05,
    start_timeout: float = 120.0,
    max_starts: int = 3,
) -> RecordDict:
    """Have a job done and return its answer.

    Parameters
    ----------
    content, run_id, message_id
        What was asked, and the ids that tell this job from all others: the same ids again are
        answered from the finished result, not done again.
    worker
        Does the jobs in its spool; started whenever none is alive and this job is not done.
    timeout
        Seconds after which nobody waits for the answer any more.
    poll
        Seconds between two looks at the spool.
    start_timeout
        Seconds that a worker gets to begin.
    max_starts
        How many workers this job may use up before it is given up.
    """
    deadline = time.monotonic() + timeout
    job = worker.spool.submit(run_id, message_id, content)
    starts = 0
    trouble = "it ended before the job was done"
    while not job.done:
        if time.monotonic() > deadline:
            raise HandoverError(f"the {worker.what} did not finish the job within {timeout:.3g} s")
        if not worker.spool.served:
            if starts == max_starts:
                raise HandoverError(f"tried {starts} {worker.what}s for this job: {trouble}")
            starts += 1
            trouble = _bring_up(worker, job, start_timeout, poll) or trouble
        time.sleep(poll)
    return job.answer()


def _bring_up(worker: Worker, job: Job, timeout: float, poll: float) -> str:
    """Start a worker and wait until it serves the spool; return what went wrong."""
    deadline = time.monotonic() + timeout
    submitted = False
    trouble = ""
    while time.monotonic() < deadline:
        try:
            if not submitted:
                worker.start()
                submitted, trouble = True, "it has not begun"
            elif ended := worker.ended():
                return ended
        except UserError as error:  # a station's SuperLink may be starting again
            trouble = str(error)
            log.warning("%s", trouble)
        # Asking a SuperLink costs a process, which a starting run would miss.
        look_again = time.monotonic() + (200 if submitted else 40) * poll
        while time.monotonic() < look_again:
            if worker.spool.served or job.done:
                return ""
            time.sleep(poll)
    return f"{trouble} after {timeout:.0f} s"


def serve(
    spool: Spool,
    do_job: Callable[[Job], None],
    *,
    poll: float = 0.05,
    wanted: Callable[[float], bool] = lambda idle: idle < 3600,
) -> None:
    """Do the spool's jobs for as long as that is wanted.

    Parameters
    ----------
    spool
        Where the jobs come from.
    do_job
        Answers one job.
    poll
        Seconds between two looks at the spool.
    wanted
        Asked, with the seconds since the last job, whether to wait for more.
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
    """Do one job. What goes wrong in it is the asker's to know and no reason to end."""
    try:
        job.finish(work(recordfile.load(job.request)))
    except Exception as error:
        lines = traceback.format_exc().splitlines()
        log.error("job %s failed:\n%s", job.stem.name, "\n".join(map(printable, lines)))
        # A user's mistake says by itself what it is, and a line is short.
        job.fail(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")
