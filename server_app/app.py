"""The ServerApp: settings, topology, strategy, results, from top to bottom."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from hfedatm.base.errors import UserError

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation that the run-config describes."""
    from hfedatm.runtime.find_stations import stations_of
    from hfedatm.runtime.opening import open_run
    from server_app.run import run_rounds

    try:
        with open_run(context.run_config) as folder:
            run_rounds(folder, stations_of(grid, folder.settings))
    except UserError as error:
        # Raised, not exited with: Flower would take the end of the thread for a finished run.
        print(f"hfedatm: {error}", flush=True)
        raise error.with_traceback(None) from None
