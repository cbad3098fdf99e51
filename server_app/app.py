"""The ServerApp: settings, topology, strategy, results, from top to bottom."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from hfedatm.base.app_home import output_of
from hfedatm.base.errors import UserError

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the federation that the run-config describes."""
    from hfedatm.runtime.find_stations import stations_of
    from hfedatm.runtime.opening import open_run
    from hfedatm.runtime.progress import Progress
    from server_app.run import run_rounds

    given = dict(context.run_config)
    given["output"] = str(output_of(grid.run.fab_id, str(given.get("output", ""))))
    try:
        with open_run(given) as folder:
            folder.note_flower_run(context.run_id)
            stations = stations_of(grid, folder.settings)
            Progress(folder.path, folder.settings).follow(stations)
            run_rounds(folder, stations)
    except UserError as error:
        # Raise, do not exit: Flower would take the end of this thread for a finished run.
        print(f"hfedatm: {error}", flush=True)
        raise error.with_traceback(None) from None
