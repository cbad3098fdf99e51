"""How a deployed station's two faces work together.

Towards the server a station is a ClientApp, started anew for every message; towards its clients it
is a ServerApp on the station's own SuperLink. The first hands a message's content over through the
spool and waits (:func:`hand_over`); the second is one long-lived run that does the jobs in it
(:func:`serve`). If no such run is alive the first starts one, so a station needs nobody to tend it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid

from hfedatm.deploy import flower
from station_app import recordfile
from station_app.spool import Job, Spool, StationError

log = logging.getLogger("hfedatm.station")

RunStation = Callable[[Grid, RecordDict], RecordDict]


class StationRun:
    """The long-lived run on the station's SuperLink that serves a spool."""

    def __init__(self, spool: Spool, link: str) -> None:
        self.spool = spool
        self.link = link
        self.run_id: int | None = None

    def start(self) -> None:
        """Submit a new run to the SuperLink."""
        app = flower.write_app(
            self.spool.folder / "app", "station", {"spool": str(self.spool.folder)}
        )
        self.run_id = flower.start_run(app, self.link)
        log.info("started station run %s (flwr log %s %s)", self.run_id, self.run_id, self.link)

    def ended(self) -> str:
        """Return why the submitted run is over, or an empty string while it is not."""
        status, details = flower.run_status(self.run_id, self.link)
        return f"run {self.run_id} {status}: {details}" if status.startswith("finished") else ""


def answer(message: Message, context: Context) -> Message:
    """Answer a message of the server by way of the station run.

    The node's configuration says where: ``spool`` (directory shared with the station's SuperLink)
    and ``link`` (name of that SuperLink in Flower's configuration).
    """
    try:
        spool = Spool(Path(str(context.node_config["spool"])))
        link = str(context.node_config["link"])
    except KeyError as error:
        raise StationError(
            f"the node-config of this station lacks {error}: its SuperNode needs "
            """--node-config 'spool="/path/to/spool" link="station"'"""
        ) from None
    metadata = message.metadata
    content = hand_over(
        message.content,
        metadata.run_id,
        metadata.message_id,
        StationRun(spool, link),
        timeout=metadata.created_at + metadata.ttl - time.time(),
    )
    return Message(content, reply_to=message)


def hand_over(
    content: RecordDict,
    run_id: int,
    message_id: str,
    station_run: StationRun,
    *,
    timeout: float = float("inf"),
    poll: float = 0.1,
    start_timeout: float = 120.0,
    max_starts: int = 3,
) -> RecordDict:
    """Have the station run do a job and return its answer.

    Parameters
    ----------
    content, run_id, message_id
        What the server sent, and the ids that tell this job from all others: the same ids again are
        answered from the finished result, not done again.
    station_run
        Does the jobs in its spool; started whenever none is alive and this job is not done.
    timeout
        Seconds after which the server no longer waits.
    poll
        Seconds between two looks at the spool.
    start_timeout
        Seconds that a station run gets to begin.
    max_starts
        How many station runs this job may use up before it is given up.
    """
    deadline = time.monotonic() + timeout
    job = station_run.spool.submit(run_id, message_id, content)
    starts = 0
    trouble = "it ended before the job was done"
    while not job.done:
        if time.monotonic() > deadline:
            raise StationError(f"the station run did not finish the job within {timeout:.3g} s")
        if not station_run.spool.served:
            if starts == max_starts:
                raise StationError(f"tried {starts} station runs for this job: {trouble}")
            starts += 1
            trouble = _bring_up(station_run, job, start_timeout, poll) or trouble
        time.sleep(poll)
    return job.answer()


def _bring_up(station_run: StationRun, job: Job, timeout: float, poll: float) -> str:
    """Start a station run and wait until it serves the spool; return what went wrong."""
    deadline = time.monotonic() + timeout
    submitted = False
    trouble = ""
    while time.monotonic() < deadline:
        try:
            if not submitted:
                station_run.start()
                submitted, trouble = True, "it has not begun"
            elif ended := station_run.ended():
                return ended
        except flower.FlowerError as error:  # its SuperLink may be starting again
            trouble = str(error)
            log.warning("%s", trouble)
        # Asking the SuperLink costs a process, which a starting run would miss.
        look_again = time.monotonic() + (100 if submitted else 20) * poll
        while time.monotonic() < look_again:
            if station_run.spool.served or job.done:
                return ""
            time.sleep(poll)
    return f"{trouble} after {timeout:.0f} s"


def serve(
    grid: Grid, run_station: RunStation, spool: Spool, *, poll: float = 0.1, idle: float = 3600.0
) -> None:
    """Do the spool's jobs until there has been none for `idle` seconds.

    Parameters
    ----------
    grid
        The station's clients.
    run_station
        The station's work: content from the server in, content for the server out.
    spool
        Where the jobs come from.
    poll, idle
        Seconds between two looks at the spool, and without a job after which the run ends.
    """
    with spool.lease() as held:
        if not held:
            log.info("another station run serves %s", spool.folder)
            return
        last = time.monotonic()
        while time.monotonic() - last < idle:
            job = spool.waiting()
            if job is None:
                time.sleep(poll)
                continue
            spool.forget()
            _do(job, grid, run_station)
            last = time.monotonic()


def _do(job: Job, grid: Grid, run_station: RunStation) -> None:
    """Do one job. What goes wrong in it is the server's to know and no reason to end the run."""
    try:
        job.finish(run_station(grid, recordfile.load(job.request)))
    except Exception as error:
        log.exception("job %s failed", job.stem.name)
        job.fail(f"{type(error).__name__}: {error}")
