"""Connect the two sides of a deployed station: ClientApp and ServerApp.

Towards the server a station is a ClientApp, started anew for every message; towards its clients it
is a ServerApp on the station's own SuperLink. The ClientApp puts a message's content into the spool
and waits (:func:`answer`); the ServerApp is one long-lived run that does the jobs in the spool. If
no such run is alive, the ClientApp starts one (:mod:`hfedatm.deploy.station_run`), so a station
needs no attendance.
"""

from __future__ import annotations

import time
from pathlib import Path

from flwr.app import Context, Message, RecordDict

from hfedatm.base.handover.service import hand_over
from hfedatm.base.handover.spool import HandoverError, Spool
from hfedatm.base.records import Task
from hfedatm.deploy.station_run import StationRun


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
