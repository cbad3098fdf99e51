"""Connect the two sides of a deployed station: ClientApp and ServerApp.

Towards the server a station is a ClientApp, started anew for every message; towards its clients it
is a ServerApp on the station's own SuperLink. The ClientApp puts a message's content into the spool
and waits (:func:`answer`); the ServerApp is one long-lived run that does the jobs in the spool. If
no such run is alive, the ClientApp starts one, so a station needs no attendance.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from flwr.app import Context, Message, RecordDict

from hfedatm.base.handover.service import hand_over
from hfedatm.base.handover.spool import HandoverError, Spool
from hfedatm.base.records import Task
from hfedatm.deploy import flower

log = logging.getLogger("hfedatm.station")


class StationRun:
    """The long-lived run on the station's SuperLink that serves a spool."""

    what = "station run"

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
        assert self.run_id is not None, "start was called before"
        status, details = flower.run_status(self.run_id, self.link)
        return f"run {self.run_id} {status}: {details}" if status.startswith("finished") else ""


def answer(message: Message, context: Context) -> RecordDict:
    """Answer a message of the server with the help of the station run.

    The node's configuration gives ``spool`` (directory shared with the station's SuperLink) and
    ``link`` (name of that SuperLink in Flower's configuration).
    """
    try:
        spool = Spool(Path(str(context.node_config["spool"])))
        link = str(context.node_config["link"])
    except KeyError as error:
        raise HandoverError(
            f"the node-config of this station lacks {error}: its SuperNode needs "
            """--node-config 'spool="/path/to/spool" link="station"'"""
        ) from None
    metadata = message.metadata
    return hand_over(
        message.content,
        metadata.run_id,
        metadata.message_id,
        StationRun(spool, link),
        timeout=metadata.created_at + metadata.ttl - time.time(),
        silence=Task.from_record(message.content["task"]).settings.join_timeout,
    )
