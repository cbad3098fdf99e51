"""The ServerApp: settings, topology, strategy, results, from top to bottom."""

from __future__ import annotations

import sys

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from hfedatm.errors import UserError

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation that the run-config describes."""
    from server_app.run import open_run, run_rounds
    from server_app.topology import stations_of

    try:
        folder = open_run(context.run_config)
        run_rounds(folder, stations_of(grid, folder.settings))
    except UserError as error:
        # One clear message instead of a traceback; Flower still marks the run as failed.
        sys.exit(f"hfedatm: {error}")
