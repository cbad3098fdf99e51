"""The long-lived run on a station's own SuperLink, which does the station's jobs."""

from __future__ import annotations

import logging

from hfedatm.base.errors import UserError
from hfedatm.base.handover.service import bring_up
from hfedatm.base.handover.spool import Spool
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

    def prepare(self) -> None:
        """Start the run before there is a job, unless it is there or on its way."""
        with self.spool.starting() as ours:
            if ours and not self.spool.served:
                try:
                    bring_up(self, lambda: False)
                except UserError as error:  # the first job will start a run
                    log.warning("%s", error)
