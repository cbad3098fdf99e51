"""A node in one process: Flower's SuperNode, and a thread that starts a command for every task.

It takes the options of ``flower-supernode``. Importing what its work needs begins with the node
(`hfedatm.deploy.prefork`); a station's node also starts the station's run, so that the first task
finds everything ready.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import shlex
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hfedatm.base.environment import HELPER
from hfedatm.deploy import prefork

if TYPE_CHECKING:
    from hfedatm.deploy.station_run import StationRun

AGAIN = 1.0
"""Seconds between two attempts."""

FIRST, ADMISSION = "HFEDATM_NODE_BEGAN", 75.0
"""Environment variable: when this node began; seconds from then on in which it tries again.

A SuperLink that has not yet missed a killed node (two heartbeats, a minute) refuses it.
"""

log = logging.getLogger("hfedatm.node")


def main() -> None:
    """Run a node: ``python -m hfedatm.deploy.node --help``."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--port", type=int, default=0)
    options.add_argument("--node-config", default="")
    given, _ = options.parse_known_args()
    deployed = given.port and HELPER in os.environ
    if deployed:
        prefork.begin(os.getpid())

    from hfedatm.deploy import serving, tasks
    from hfedatm.flower_internals import supernode_command

    begun = [sys.executable, "-m", "hfedatm.deploy.node", *sys.argv[1:]]
    run = supernode_command(idle=_give_memory_back)
    serving.prepare()
    if deployed:
        tasks.begin(given.port)
        if station_run := _station_run(given.node_config):
            tasks.in_background(station_run.prepare)
        sys.argv += ["--isolation", "process"]
    first = float(os.environ.setdefault(FIRST, str(time.time())))
    try:
        run()
        # Flower's loop ends with an error it does not expect, and leaves the process as it is.
        log.error("the SuperNode has lost its SuperLink; it starts again")
    except SystemExit as end:
        if not end.code or time.time() - first > ADMISSION:
            raise
        log.warning("a SuperLink admits a node that was killed after a minute; trying again")
    time.sleep(AGAIN)
    os.execv(sys.executable, begun)


def _give_memory_back() -> None:
    """Return to the system what a large message has left; the C library would keep it."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _station_run(node_config: str) -> StationRun | None:
    """Return the run of a station's node, if this is one."""
    from hfedatm.base.handover.spool import Spool
    from hfedatm.deploy.station_run import StationRun

    config = dict(part.partition("=")[::2] for part in shlex.split(node_config))
    if "spool" in config and "link" in config:
        return StationRun(Spool(Path(config["spool"])), config["link"])
    return None


if __name__ == "__main__":
    main()
