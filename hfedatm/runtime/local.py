"""Run the three tiers in one process: for debugging, tests and sweeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from client_app.app import app as client_app
from client_app.data import shares_of
from hfedatm.base.settings import Settings
from hfedatm.flower_internals import identify_process
from hfedatm.runtime.in_process import Clients, InProcessGrid
from hfedatm.runtime.opening import open_run
from hfedatm.runtime.progress import Progress
from hfedatm.runtime.stations import LocalStationsGrid, station_tree
from server_app.run import run_rounds
from station_app.station import run_station


def run_locally(given: Mapping[str, Any], clients: Clients | None = None) -> dict[str, Any]:
    """Run a federation here and return its summary.

    ``clients`` answer the stations' messages; by default the ClientApp does.
    """
    identify_process()
    with open_run(given) as folder:
        stations = local_stations(folder.settings, clients)
        progress = Progress(folder.path, folder.settings)
        progress.follow(stations)
        try:
            return run_rounds(folder, stations)
        finally:
            progress.end()


def local_stations(settings: Settings, clients: Clients | None = None) -> LocalStationsGrid:
    """Return stations of this process; one works at a time, so one reply is in memory."""
    shares_of(settings)  # refuse an impossible division before any client does
    return station_tree(
        run_station, settings, lambda ids: InProcessGrid(clients or client_app, ids), concurrency=1
    )
